"""The exchange of ``exchange.py`` without collectives: every member reads what is its own.

What a member has to give lies in memory that its peers can read, over NVLink. It says so, in one
barrier of all members, and each copies its part from every one: keys and values that several hold
as well as those of one, and outputs right to where they belong. The memory is two slots that take
turns: who is past the barrier of an exchange knows that everybody has read the one before, so its
slot may be written again in the next.

NCCL needs a message buffer for every pair and channel, hundreds of megabytes for each layout, and
for a reduction's many small steps; here are none.
"""

import os
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, Protocol

import torch

from runtime.engine.communicators import SpGroups
from runtime.engine.exchange import WORD, HeadExchange, side_by_side, words_of

ENABLED = os.environ.get("SHOAL_SP_EXCHANGE", "nccl") == "peer"
"""Whether groups on GPUs exchange so. By default by NCCL: this is not measured yet."""


class PeerMemory(Protocol):
    """Memory of a group's members that each of them can read."""

    def own(self) -> torch.Tensor:
        """Return this member's slot of the exchange that begins, ``[words]``."""

    def publish(self) -> None:
        """Let all members read, once each of them has written. Collective; on the stream."""

    def of(self, member: int) -> torch.Tensor:
        """Return a member's slot of the exchange that was published last, ``[words]``."""


class PeerExchange(HeadExchange):
    """See the module.

    Args:
        groups: this member's process groups; nothing is sent in them.
        memory: of the members of ``groups.sp``, in its order.
    """

    def __init__(self, groups: SpGroups, memory: PeerMemory) -> None:
        super().__init__(groups)
        self._memory = memory
        self._kv_part = groups.sp.rank() if groups.within is None else _rank_of(groups.across)
        """Of the base's KV heads, which are this member's."""

    def connect(self, device: torch.device) -> None:
        """Do a first exchange. Collective."""
        del device  # the memory is on it
        self._memory.publish()

    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``HeadExchange.gather``."""
        mine = hidden.contiguous().view(hidden.shape[0], -1).view(WORD)
        self._slot(*mine.shape).copy_(mine)
        self._memory.publish()
        gathered = hidden.new_empty((self.sp * self.share, *hidden.shape[1:]))
        rows = gathered.view(self.sp, self.share, -1).view(WORD)
        for member in self._in_turn():
            rows[member] = self._slot_of(member, *mine.shape)
        return gathered[: self.num_tokens]

    def to_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """See ``HeadExchange.to_heads``."""
        asked = ((query,), self.sp, self._place), ((key, value), self.kv_parts, self._kv_part)
        shapes, begin = [], 0
        for tensors, parts, _ in asked:
            shape = (parts, self.share, sum(map(words_of, tensors)) // parts)
            shapes.append((begin, shape))
            side_by_side(tensors, parts, out=self._slot(*shape, begin=begin))
            begin += prod(shape)
        self._memory.publish()
        heads: list[torch.Tensor] = []
        for (tensors, parts, part), (offset, shape) in zip(asked, shapes, strict=True):
            received = query.new_empty((self.sp, *shape[1:]), dtype=WORD)
            for member in self._in_turn():
                received[member] = self._slot_of(member, *shape, begin=offset)[part]
            heads += self._as_heads(received.flatten(0, 1), tensors, parts)
        return heads

    def new_heads(self, output: torch.Tensor, heads: int) -> torch.Tensor:
        """See ``HeadExchange.new_heads``: where peers can read it, once it is filled."""
        words = words_of(output) // output.shape[1] * heads
        return self._slot(self.sp * self.share, words).view(output.dtype).unflatten(1, (heads, -1))

    def to_tokens(self, heads: torch.Tensor, output: torch.Tensor) -> None:
        """See ``HeadExchange.to_tokens``; ``heads`` came from ``new_heads``."""
        self._memory.publish()
        rows = output.view(self.share, -1).view(WORD).unflatten(1, (self.sp, -1))
        shape = (self.sp, self.share, words_of(heads))
        for member in self._in_turn():
            rows[:, member] = self._slot_of(member, *shape)[self._place]

    def _in_turn(self) -> Iterator[int]:
        """Yield every member, each one's next neighbour first: so nobody is read by all at once."""
        return ((self._place + distance) % self.sp for distance in range(1, self.sp + 1))

    def _slot(self, *shape: int, begin: int = 0) -> torch.Tensor:
        return self._memory.own()[begin : begin + prod(shape)].view(shape)

    def _slot_of(self, member: int, *shape: int, begin: int = 0) -> torch.Tensor:
        return self._memory.of(member)[begin : begin + prod(shape)].view(shape)


def _rank_of(group: Any | None) -> int:
    return 0 if group is None else int(group.rank())


class SymmetricMemory:
    """``PeerMemory`` on GPUs that NVLink connects (``torch.distributed._symmetric_memory``).

    Args:
        group: gloo group of the members, by which they find each other's memory. Collective.
        words: of a slot.
        device: this member's.

    Raises:
        RuntimeError: a member's memory cannot be read by another one.
    """

    def __init__(self, group: Any, words: int, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        memory = symmetric.empty(2 * words, dtype=WORD, device=device)
        self._handle = symmetric.rendezvous(memory, group.group_name)
        self._slots = [
            [self._handle.get_buffer(member, (words,), WORD, slot * words) for slot in (0, 1)]
            for member in range(group.size())
        ]
        self._own = self._slots[group.rank()]
        self._published = 0

    def own(self) -> torch.Tensor:
        """See ``PeerMemory``."""
        return self._own[self._published % 2]

    def publish(self) -> None:
        """See ``PeerMemory``."""
        self._handle.barrier()
        self._published += 1

    def of(self, member: int) -> torch.Tensor:
        """See ``PeerMemory``."""
        return self._slots[member][(self._published - 1) % 2]


def needed_words(tokens: int, bytes_of_token: int) -> int:
    """Return the words of a slot for steps of so many tokens of each member.

    Args:
        tokens: of each member.
        bytes_of_token: the most that a member has of one token to give.
    """
    words: int = -(-tokens * bytes_of_token // WORD.itemsize)
    return words
