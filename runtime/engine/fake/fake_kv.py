"""Whose KV the blocks of fake engines hold.

The fake's KV has no content. Instead, every block remembers the request whose tokens it holds, so
that a copy of blocks that hold something else gives wrong tokens, as it does on a device.
"""

from collections.abc import Iterable, Mapping, Sequence

from shoal.runtime.engine.fake.fake_scheduler import FakeRequest

Blocks = Mapping[int, Sequence[int]]
"""Member engine -> the physical blocks that hold a request's tokens, in order."""


class KvMemory:
    """What the blocks of the engines of a process hold. Cores that share devices share it."""

    def __init__(self) -> None:
        self._held: dict[int, dict[int, tuple[FakeRequest, int]]] = {}

    def clear(self, engine: int) -> None:
        """Take note of an engine that starts: its blocks hold nothing."""
        self._held[engine] = {}

    def knows(self, engines: Iterable[int]) -> bool:
        """Return whether this process sees all that is written to the blocks of these engines."""
        return self._held.keys() >= set(engines)

    def write(self, request: FakeRequest, first: int, blocks: Blocks) -> None:
        """Let blocks hold a request's tokens from now on.

        Args:
            request: the request.
            first: which of its blocks the first one is.
            blocks: the blocks.
        """
        for engine in self._held.keys() & blocks.keys():
            # What else is written to engines of other processes is not seen here.
            ids = enumerate(blocks[engine], first)
            self._held[engine].update((block, (request, index)) for index, block in ids)

    def content(self, engine: int, block: int) -> tuple[FakeRequest, int] | None:
        """Return what a block holds: an object that every writing replaces; None: nothing known."""
        return self._held.get(engine, {}).get(block)

    def holds(self, request: FakeRequest, computed: int, blocks: Blocks) -> bool:
        """Return whether blocks hold the KV of a request's first tokens.

        Args:
            request: the request, in any core.
            computed: how many of its tokens.
            blocks: the blocks that are said to hold them.
        """
        writers: dict[int, FakeRequest] = {}
        for engine, ids in blocks.items():
            held = self._held[engine]
            for index, block in enumerate(ids):
                writer, written = held.get(block, (None, -1))
                if writer is None or (writer.id, written) != (request.id, index):
                    return False
                writers[id(writer)] = writer
        wanted = first_tokens(request, computed)
        return all(
            writer.computed >= computed and first_tokens(writer, computed) == wanted
            for writer in writers.values()
        )


def first_tokens(request: FakeRequest, count: int) -> list[int]:
    """Return the first tokens of a request, prompt and output."""
    return [*request.prompt, *request.generated][:count]
