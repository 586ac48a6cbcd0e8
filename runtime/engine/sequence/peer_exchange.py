"""The exchange of ``head_exchange.py`` without collectives: by members' memory.

Members write and read each other's, which all of them can reach, over NVLink. Queries, keys and
values are written right to where their member computes attention from; its outputs are read from
where it left them. Between the two is one barrier of all members. The memory is two slots that take
turns: who is past the barrier of an exchange knows that everybody is done with the one before, so
that one's slot may be written again in the next.

NCCL needs a message buffer for every pair and channel, hundreds of megabytes for each layout, and
for a reduction's many small steps; here are none. And it takes more of the host: here an exchange
is one kernel of our own (``peer_exchange_kernel.py``) and the barrier.
"""

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import permutations
from typing import Any, NamedTuple, Protocol

import torch
from vllm.platforms import current_platform

from shoal.runtime.engine.groups.communicators import SpGroups
from shoal.runtime.engine.sequence.head_exchange import WORD, HeadExchange, words_of
from shoal.runtime.engine.sequence.sp_settings import EXCHANGE, SettingError

log = logging.getLogger("shoal.engine")

SHARING_SECONDS = 60.0
"""How long members that have begun together wait for each other; they are done within moments."""
_WITHOUT = f"{EXCHANGE}=nccl goes without"
LINE_BYTES = 128
"""Of a GPU's caches. So the second slot begins with one, as attention kernels want of addresses."""


def _by_nvlink(devices: Sequence[int]) -> bool:
    """Return whether NVLink connects every two, as vLLM asks for its custom all-reduce."""
    physical = current_platform.visible_device_id_to_physical_device_id
    return bool(current_platform.is_fully_connected([physical(device) for device in devices]))


def exchanges_by_peers(
    setting: str,
    devices: Sequence[int],
    *,
    can_access: Callable[[int, int], bool] = torch.cuda.can_device_access_peer,
    by_nvlink: Callable[[Sequence[int]], bool] = _by_nvlink,
) -> bool:
    """Return whether a group exchanges through its members' memory, not by collectives.

    No member asks another one: each sees all of the node's devices, and so all come to the same.

    Args:
        setting: see ``exchange_setting``.
        devices: of the group's members, in order; none: they have none.
        can_access: whether a device can access the memory of another one.
        by_nvlink: whether NVLink connects every two of these devices.

    Raises:
        SettingError: the setting is ``peer``, and they cannot.
    """
    if setting == "nccl" or (setting == "auto" and not devices):
        return False
    pairs = permutations(devices, 2)
    barred = next((pair for pair in pairs if not can_access(*pair)), None)
    problem = ""
    if not devices:
        problem = "there are no GPUs"
    elif barred is not None:
        problem = "GPU {} cannot access the memory of GPU {}".format(*barred)
    elif setting == "auto" and not by_nvlink(devices):
        # Members wait for each other by atomic operations, which peers on PCIe need not have.
        problem = "NVLink does not connect every two of them"
    if problem and setting == "peer":
        raise SettingError(f"{EXCHANGE}=peer: {problem}")
    if problem:
        names = ", ".join(map(str, devices))
        log.info("steps by sequence of GPUs %s exchange by NCCL: %s", names, problem)
    return not problem


class Slot(NamedTuple):
    """What an exchange goes through.

    Attributes:
        own: this member's, ``[words]``.
        addresses: of every member's, int64, ``[members]``, on the members' device.
    """

    own: torch.Tensor
    addresses: torch.Tensor


class PeerMemory(Protocol):
    """Memory of a group's members that each of them can read and write."""

    def slot(self) -> Slot:
        """Return the slot of the exchange that begins."""

    def publish(self) -> None:
        """Let all members have what each of them has written. Collective; on the stream.

        The exchange after it has the other slot.
        """


class PeerExchange(HeadExchange):
    """See the module. What ``to_heads`` returns holds until the next but one exchange.

    Args:
        groups: this member's process groups; nothing is sent in them.
        memory: of the members of ``groups.sp``, in its order.
    """

    def __init__(self, groups: SpGroups, memory: PeerMemory) -> None:
        super().__init__(groups)
        from shoal.runtime.engine.sequence import peer_exchange_kernel  # where there is a GPU

        self._kernels = peer_exchange_kernel
        self._memory = memory
        # Views of slots in the shapes of this step. Layers look alike: each is made once.
        self._inputs: dict[object, tuple[list[int], Sequence[torch.Tensor]]] = {}
        self._outputs: dict[object, torch.Tensor] = {}

    def begin(self, num_tokens: int, share: int | None = None) -> None:
        """See ``HeadExchange.begin``."""
        super().begin(num_tokens, share)
        self._inputs.clear()
        self._outputs.clear()

    def connect(self, device: torch.device) -> None:
        """Exchange a token for heads and back, for which the kernels are compiled. Collective."""
        self.begin(self.sp)
        query, key, value = (
            torch.zeros(1, heads, WORD.itemsize, dtype=torch.uint8, device=device)
            for heads in (self.sp, self.kv_parts, self.kv_parts)
        )
        self.to_heads(query, key, value)
        self.to_tokens(self.new_heads(query, 1), query)

    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``HeadExchange.gather``."""
        mine = hidden.contiguous().view(hidden.shape[0], -1).view(WORD)
        slot = self._memory.slot()
        slot.own[: mine.numel()].view_as(mine).copy_(mine)
        self._memory.publish()
        gathered = hidden.new_empty((self.sp * self.share, *hidden.shape[1:]))
        width = mine.shape[1]
        strides = (width, self.share * width)
        self._kernels.take(gathered, self.share, strides, width, slot.addresses, self._place, 0)
        return gathered[: self.num_tokens]

    def to_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """See ``HeadExchange.to_heads``."""
        tensors = [_by_token(tensor) for tensor in (query, key, value)]
        slot = self._memory.slot()
        kind = (slot.own.data_ptr(), *((tensor.shape, tensor.dtype) for tensor in tensors))
        if kind not in self._inputs:
            self._inputs[kind] = self._received(slot, tensors)
        widths, heads = self._inputs[kind]
        neighbours = self.sp // self.kv_parts
        self._kernels.give(tensors, widths, slot.addresses, self._place, neighbours)
        self._memory.publish()
        return heads

    def _received(
        self, slot: Slot, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[int], Sequence[torch.Tensor]]:
        """Return the words of a token that this member keeps of each, and where they come to be."""
        parts = (self.sp, self.kv_parts, self.kv_parts)
        widths = [words_of(t) // part for t, part in zip(tensors, parts, strict=True)]
        rows, width = self.sp * self.share, sum(widths)
        return widths, self._as_heads(slot.own[: rows * width].view(rows, width), tensors, widths)

    def new_heads(self, output: torch.Tensor, heads: int) -> torch.Tensor:
        """See ``HeadExchange.new_heads``: where peers can read it, once it is filled."""
        slot = self._memory.slot()
        kind = (slot.own.data_ptr(), heads, output.shape[2], output.dtype)
        if kind not in self._outputs:
            rows, words = self.sp * self.share, words_of(output) // output.shape[1] * heads
            own = slot.own[: rows * words].view(output.dtype)
            self._outputs[kind] = own.view(rows, heads, output.shape[2])
        return self._outputs[kind]

    def to_tokens(self, heads: torch.Tensor, output: torch.Tensor) -> None:
        """See ``HeadExchange.to_tokens``; ``heads`` came from ``new_heads``."""
        addresses = self._memory.slot().addresses
        self._memory.publish()
        width, first = words_of(heads), self._place * self.share
        strides = (self.sp * width, width)
        self._kernels.take(output, self.share, strides, width, addresses, self._place, first)


def _by_token(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``[tokens, heads, size]`` with each token's heads one after the other."""
    size = tensor.shape[2]
    return tensor if tensor.stride()[1:] == (size, 1) else tensor.contiguous()


class NotSharedError(RuntimeError):
    """A member cannot reach another one's memory; the message is one line."""


class SymmetricMemory:
    """``PeerMemory`` on GPUs that NVLink connects (``torch.distributed._symmetric_memory``).

    Args:
        group: gloo group of the members, by which they find each other's memory. Collective.
        words: of a slot.
        device: this member's.

    Raises:
        NotSharedError: this member's memory, or its access to the others', is refused. In a
            container that may be the host's: it takes ``pidfd_getfd``, which needs SYS_PTRACE.
        RuntimeError: there is no memory left for it.
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
) -> SymmetricMemory | None:
    """Return memory of a group's members, or None if any of them cannot share it: all say why.

    Args:
        group: see ``SymmetricMemory``, as of the others. Collective: all come to the same.
        words: of a slot.
        device: this member's.
        tried: whether a narrower group of this member could not. Then no wider one tries: torch
            numbers what members tell each other, and one that failed has told less.
        required: whether there is nothing else to exchange by.

    Raises:
        NotSharedError: it cannot be shared and is required, or not all members have come as far; it
            says what helps.
        RuntimeError: there is no memory left for it.
    """
    memory, problem = None, "a peer cannot share its memory"
    # They may have loaded their weights minutes apart.
    if _all_agree(group, not tried, seconds=None):
        try:
            memory = SymmetricMemory(group, words, device)
        except NotSharedError as error:
            problem = str(error)
            if required:
                raise NotSharedError(f"{problem}; {_WITHOUT}") from error
        if _all_agree(group, memory is not None, seconds=SHARING_SECONDS):
            return memory
    log.warning("steps by sequence exchange by NCCL, which takes longer: %s", problem)
    return None


def _all_agree(group: Any, value: bool, *, seconds: float | None) -> bool:
    """Return whether all members say yes.

    Args:
        group: theirs, gloo's.
        value: whether this one does.
        seconds: how long to wait for the others; None: as long as the group does.

    Raises:
        NotSharedError: one said nothing: it waits for memory that another one cannot share.
    """
    answers = torch.tensor([int(value)])
    options = torch.distributed.AllreduceOptions()
    options.reduceOp = torch.distributed.ReduceOp.MIN
    answer = group.allreduce([answers], options)
    try:
        answer.wait() if seconds is None else answer.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        text = "not all members of a group can share memory"
        raise NotSharedError(f"{text}; {_WITHOUT}") from error
    return bool(answers.item())


def needed_words(tokens: int, bytes_of_token: int) -> int:
    """Return the words of a slot for steps of so many tokens of each member: whole cache lines.

    Args:
        tokens: of each member.
        bytes_of_token: the most that a slot takes for each of them.
    """
    lines = -(-tokens * bytes_of_token // LINE_BYTES)
    words: int = lines * LINE_BYTES // WORD.itemsize
    return words
