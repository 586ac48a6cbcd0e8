"""The tiers of a node's engines: memory of the host that holds KV, which every engine has mapped.

A block of a tier holds what a block of its engine alone holds, in the order in which groups divide
it: layer after layer, and in each layer head after head, with the tokens of a head next to each
other (Seesaw, 4.2). So whatever a member of another unit needs of it consists of long runs.

The memory is pinned, so that GPUs copy to and from it while steps go on.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from shoal.runtime.engine.groups.peer_memory import NotSharedError
from shoal.runtime.engine.kv.kv_memory import Handle, HeldBuffer, HostMemory, Mapped
from shoal.runtime.engine.kv.kv_pages import KvPages
from shoal.runtime.engine.kv.peer_buffers import PeerBuffers
from shoal.runtime.engine.kv.staging_memory import PinnedBuffer, Pins


class PinnedMemory(HostMemory):
    """Memory of the host that the devices of all processes reach that map it.

    Args:
        name: see ``HostMemory``.
        pins: of this process's device.
    """

    def __init__(self, name: str, pins: Pins) -> None:
        super().__init__(name)
        self._pins = pins

    def handle(self, buffer: torch.Tensor) -> Handle:
        """See ``KvMemory.handle``; this process's device reaches the buffer, too, from now on."""
        self._pins.pin(buffer)
        return super().handle(buffer)

    def open(self, pid: int, handle: Handle) -> PinnedBuffer:
        """See ``KvMemory.open``."""
        return PinnedBuffer(super().open(pid, handle).bytes, self._pins)


def tier_pages(pages: KvPages) -> KvPages:
    """Return how a tier holds what a KV group of an engine alone has in its buffer."""
    page = pages.block_bytes // len(pages.layers)
    layers = tuple(number * page for number in range(len(pages.layers)))
    return KvPages(pages.geometry, layers, pages.block_bytes, pages.token_bytes, head_major=True)


class Tiers:
    """The tier of one engine, and those of its peers as it has them mapped.

    Args:
        directory: the node's private directory.
        engine: the engine.
        size: bytes of a tier.
        groups: the pages of each KV group in the engines' buffers.
        pins: of the engine's device.
        settle: see ``PeerBuffers``.

    Raises:
        NotSharedError: the device cannot reach so much memory of the host. The others are told.
    """

    def __init__(
        self,
        directory: Path,
        engine: int,
        size: int,
        groups: Sequence[KvPages],
        pins: Pins,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self.pages = [tier_pages(pages) for pages in groups]
        """Those of each KV group in a tier."""
        memory = PinnedMemory(f"{directory.name}-tier", pins)
        self._peers = PeerBuffers(directory, engine, memory, settle, name="tier")
        block = max(pages.block_bytes for pages in groups)
        self.blocks = max(0, size // block - 1)
        """Blocks that requests can have: the first one stands for KV that nothing needs."""
        raw = memory.allocate(block * (self.blocks + 1))
        self.own = HeldBuffer(raw)
        try:
            self._peers.announce(raw)
        except NotSharedError:
            memory.release(raw)  # or what has been pinned of it would stay with the process
            raise

    def open_all(self, engines: int, seconds: float) -> str:
        """Map the tiers of all engines; return why one cannot be mapped, or "".

        That takes seconds for each 10 GiB, so it is not left to the first request.

        Args:
            engines: number of the node's engines.
            seconds: how long to wait for engines that have announced nothing yet.
        """
        return next(iter(self._peers.open_all(engines, seconds).values()), "")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While active, no tier is unmapped."""
        with self._peers.reading():
            yield

    def memory(self, engine: int) -> Mapped:
        """Return an engine's tier; only while ``reading``.

        Raises:
            NotSharedError: see ``PeerBuffers.buffer``.
        """
        return self.own if engine == self._engine else self._peers.buffer(engine)
