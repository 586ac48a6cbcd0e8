"""Whose KV the blocks of fake engines hold.

The fake's KV has no content. Instead, every block remembers the request whose tokens it holds, so
that a copy of blocks that hold something else gives wrong tokens, as it does on a device. So does a
prefix that is found in the wrong blocks.
"""

from collections.abc import Iterable, Mapping, Sequence
from weakref import WeakValueDictionary

from shoal.policies.values.layouts import Unit, tier_of
from shoal.runtime.engine.fake.fake_request import FakeRequest

Blocks = Mapping[int, Sequence[int]]
"""Member engine -> the physical blocks that hold a request's tokens, in order."""


def memory_of(unit: Unit, engine: int) -> int:
    """Return the number of the memory in which a unit has its blocks on an engine.

    It is the engine's number, or another one for the engine's tier.
    """
    return -1 - engine if unit.tier else engine


class KvMemory:
    """What the blocks of the engines of a process hold. Cores that share devices share it."""

    def __init__(self) -> None:
        # Who wrote a block, and which of its tokens: from one, up to but not including another.
        self._held: dict[int, dict[int, tuple[FakeRequest, int, int]]] = {}
        self._requests: WeakValueDictionary[tuple[Unit, str], FakeRequest] = WeakValueDictionary()

    def clear(self, engine: int) -> None:
        """Take note of an engine that starts: its blocks hold nothing."""
        self._held[engine] = {}
        self._held[memory_of(tier_of(engine), engine)] = {}

    def knows(self, engines: Iterable[int]) -> bool:
        """Return whether this process sees all that is written to the blocks of these engines."""
        return self._held.keys() >= set(engines)

    def write(
        self, unit: Unit, request: FakeRequest, first: int, blocks: Blocks, block_tokens: int
    ) -> None:
        """Let blocks hold a request's tokens from now on.

        Args:
            unit: the unit that computes the request.
            request: the request.
            first: which of its blocks the first one is.
            blocks: the blocks.
            block_tokens: tokens of each.
        """
        self._requests[unit, request.id] = request
        for engine in self._held.keys() & blocks.keys():
            # What else is written to engines of other processes is not seen here.
            ids = enumerate(blocks[engine], first)
            self._held[engine].update(
                (block, (request, index * block_tokens, (index + 1) * block_tokens))
                for index, block in ids
            )

    def content(self, engine: int, block: int) -> tuple[FakeRequest, int, int] | None:
        """Return what a block holds: an object that every writing replaces; None: nothing known."""
        return self._held.get(engine, {}).get(block)

    def copy(self, source: Blocks, target: Blocks, begin: int, end: int) -> None:
        """Let blocks hold what others hold, if these hold the tokens of one request.

        Args:
            source: the blocks that are read, from the request's first token on.
            target: the blocks that hold its tokens from ``begin`` on, up to ``end``, from now on.
            begin: a token.
            end: a token.
        """
        if not self.knows(source):
            return
        engine, ids = next(iter(source.items()))
        found = [self._held[engine][block] for block in ids if block in self._held[engine]]
        writer = next((writer for writer, start, _ in reversed(found) if start < end), None)
        is_right = writer is not None and self.holds(writer, end, source)
        for engine in self._held.keys() & target.keys():
            size = (end - begin) // len(target[engine])
            for start, block in zip(range(begin, end, size), target[engine], strict=True):
                self._held[engine].pop(block, None)
                if writer is not None and is_right:
                    self._held[engine][block] = writer, start, start + size

    def wipe(self, blocks: Blocks) -> None:
        """Let blocks hold nothing of use from now on."""
        for engine in self._held.keys() & blocks.keys():
            for block in blocks[engine]:
                self._held[engine].pop(block, None)

    def move(self, engine: int, others: Mapping[int, int]) -> None:
        """Let blocks of an engine hold what others hold, which hold nothing from now on."""
        held = self._held.get(engine, {})
        held |= {other: held.pop(block) for block, other in others.items() if block in held}

    def holds(
        self, request: FakeRequest, tokens: int, blocks: Blocks, source: Unit | None = None
    ) -> bool:
        """Return whether blocks hold the KV of a request's first tokens.

        Args:
            request: the request, in any core.
            tokens: how many of its tokens.
            blocks: the blocks that are said to hold them.
            source: the unit whose core must have computed them and must keep these blocks for the
                request; None: nobody needs to keep them, and the next step may compute them.
        """
        if source is not None:
            there = self._requests.get((source, request.id))
            if there is None or not there.blocks or there.computed < tokens:
                return False
        writers: dict[int, tuple[FakeRequest, int]] = {}
        for engine, ids in blocks.items():
            held, reached = self._held[engine], 0
            for block in ids:
                writer, start, end = held.get(block, (None, -1, -1))
                if writer is None or start != reached:
                    return False
                reached = end
                writers[id(writer)] = writer, min(end, tokens)
            if reached < tokens:
                return False
        return all(writer.first(end) == request.first(end) for writer, end in writers.values())
