"""Which blocks of fake engines are full, so that they can be copied while their request goes on."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from shoal.runtime.engine.fake.fake_kv import KvMemory
from shoal.runtime.engine.fake.fake_scheduler import FakeRequest


class Sealed(NamedTuple):
    """A block that is full, and that nobody writes to any more."""

    content: Any
    """What the memory said then; whoever writes to the block changes that."""
    request: FakeRequest
    start: int
    """The first of the request's tokens that it holds."""
    end: int


class SealedBlocks:
    """The full blocks that pre-copies are about, on all devices that this process knows.

    Args:
        memory: what all blocks hold.
    """

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory
        self._sealed: dict[tuple[int, int], Sealed] = {}

    def seal(self, request: FakeRequest, blocks: Mapping[int, Sequence[int]], size: int) -> None:
        """Note that blocks of ``size`` tokens hold the beginning of a request."""
        for engine, ids in blocks.items():
            for index, block in enumerate(ids):
                content = self._memory.content(engine, block)
                sealed = Sealed(content, request, index * size, (index + 1) * size)
                self._sealed[engine, block] = sealed

    def hold(self, request_id: str, tokens: int, engine: int, ids: Iterable[int]) -> bool:
        """Return whether blocks of an engine still hold the beginning of a request."""
        reached = 0
        for block in ids:
            sealed = self._sealed.get((engine, block))
            if sealed is None or sealed.content is not self._memory.content(engine, block):
                return False
            if (sealed.request.id, sealed.start) != (request_id, reached):
                return False
            reached = sealed.end
        return reached >= tokens

    def writer(self, engine: int, block: int) -> FakeRequest:
        """Return whose tokens a block holds that was sealed."""
        return self._sealed[engine, block].request
