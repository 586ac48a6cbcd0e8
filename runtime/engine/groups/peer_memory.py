"""Memory of a group's members that each of them can read and write, over NVLink.

Members agree on it: either all of them have it, or none does. It lives as long as the layout that
it was made for, so a group that is formed anew after a death makes its own.
"""

from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch

WORD = torch.int64
"""What is exchanged: eight bytes at a time, whatever the types of queries, keys and values are."""
SHARING_SECONDS = 60.0
"""How long members that have begun together wait for each other; they are done within moments."""
LINE_BYTES = 128
"""Size of a GPU's cache lines. Slots begin with one, as attention kernels need such addresses."""


class Slot(NamedTuple):
    """What an exchange goes through.

    Attributes:
        own: this member's slot, ``[words]``.
        addresses: address of every member's slot, int64, ``[members]``, on this member's device.
    """

    own: torch.Tensor
    addresses: torch.Tensor


class PeerMemory(Protocol):
    """Memory of a group's members that each of them can read and write."""

    def slot(self) -> Slot:
        """Return the slot of the exchange that begins."""

    def publish(self) -> None:
        """Let all members read what each of them has written. Collective; on the stream.

        The next exchange uses the other slot.
        """


class NotSharedError(RuntimeError):
    """A member cannot reach another member's memory; the message is one line."""


class SymmetricMemory:
    """``PeerMemory`` on GPUs that NVLink connects (``torch.distributed._symmetric_memory``).

    Args:
        group: gloo group of the members, by which they find each other's memory. Collective.
        words: size of a slot.
        device: this member's device.

    Raises:
        NotSharedError: this member may not share its memory, or not reach the others'. In a
            container the host may refuse it: it takes ``pidfd_getfd``, which needs SYS_PTRACE.
        RuntimeError: there is not enough memory left.
    """

    def __init__(self, group: Any, words: int, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        memory = symmetric.empty(2 * words, dtype=WORD, device=device)
        try:
            self._handle = symmetric.rendezvous(memory, group.group_name)
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise NotSharedError(f"memory cannot be shared ({reason})") from error
        self._slots = [self._slot(group, words, offset, device) for offset in (0, words)]
        self._published = 0

    def _slot(self, group: Any, words: int, offset: int, device: torch.device) -> Slot:
        members = range(group.size())
        buffers = [self._handle.get_buffer(m, (words,), WORD, offset) for m in members]
        addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64)
        return Slot(buffers[group.rank()], addresses.to(device))

    def slot(self) -> Slot:
        """See ``PeerMemory``."""
        return self._slots[self._published % 2]

    def publish(self) -> None:
        """See ``PeerMemory``."""
        self._handle.barrier()
        self._published += 1


def shared_memory(
    group: Any, words: int, device: torch.device, *, tried: bool, required: bool
) -> tuple[SymmetricMemory | None, str]:
    """Return memory of a group's members, or None and the reason if any of them cannot share it.

    Args:
        group: see ``SymmetricMemory``. Collective: all members come to the same result.
        words: size of a slot.
        device: this member's device.
        tried: whether a narrower group of this member could not share memory. Then no wider one
            tries: torch numbers the members' messages, and one that failed has sent fewer.
        required: whether the members cannot do without such memory.

    Raises:
        NotSharedError: it cannot be shared and is required, or a member did not answer in time.
        RuntimeError: there is not enough memory left.
    """
    memory, problem = None, "a peer cannot share its memory"
    # Members may have loaded their weights minutes apart.
    if _all_agree(group, not tried, seconds=None):
        try:
            memory = SymmetricMemory(group, words, device)
        except NotSharedError as error:
            problem = str(error)
            if required:
                raise
        if _all_agree(group, memory is not None, seconds=SHARING_SECONDS):
            return memory, ""
    return None, problem


def _all_agree(group: Any, value: bool, *, seconds: float | None) -> bool:
    """Return whether all members say yes.

    Args:
        group: the members' gloo group.
        value: whether this member says yes.
        seconds: how long to wait for the others; None: as long as the group does.

    Raises:
        NotSharedError: a member said nothing: it waits for memory that another cannot share.
    """
    answers = torch.tensor([int(value)])
    options = torch.distributed.AllreduceOptions()
    options.reduceOp = torch.distributed.ReduceOp.MIN
    answer = group.allreduce([answers], options)
    try:
        answer.wait() if seconds is None else answer.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        raise NotSharedError("not all members of a group can share memory") from error
    return bool(answers.item())


def needed_words(tokens: int, bytes_of_token: int) -> int:
    """Return the words of a slot for steps with so many tokens of each member, in whole lines.

    Args:
        tokens: the tokens of each member.
        bytes_of_token: the most bytes that a slot takes for each token.
    """
    lines = -(-tokens * bytes_of_token // LINE_BYTES)
    words: int = lines * LINE_BYTES // WORD.itemsize
    return words
