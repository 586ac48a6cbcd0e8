"""KV buffers of which weights can have memory."""

import os
from typing import Any

import torch

from shoal.runtime.engine.groups.peer_memory import NotSharedError
from shoal.runtime.engine.kv.backing import Loan, Range, blocks_beside, find_loan, taken
from shoal.runtime.engine.kv.kv_memory import Handle, KvMemory, kv_memory
from shoal.runtime.engine.weights.sharing.descriptors import KV, Descriptors
from shoal.runtime.engine.weights.sharing.device_pages import DevicePages, ImportedPieces
from shoal.runtime.engine.weights.sharing.pages import Pages
from shoal.runtime.engine.weights.sharing.whole_weights import WholeWeights


class KvLender:
    """Says what an engine's KV can lend, and makes the memory of such a buffer.

    Args:
        engine: this engine.
        pages: exchange what is behind addresses.
        descriptors: those that the engine hands out.
        weights: which are to have the memory.
    """

    def __init__(
        self, engine: int, pages: Pages, descriptors: Descriptors, weights: WholeWeights
    ) -> None:
        self._engine, self._pages = engine, pages
        self._descriptors, self._weights = descriptors, weights
        self.loan: Loan | None = None
        """For all weights, or for the largest stage for which there is enough memory. None: the KV
        cache is too small, or not there yet."""
        self._config: Any = None

    def memory(self, name: str, device: torch.device, config: Any) -> KvMemory:
        """Return the memory of a buffer; this finds the loan.

        Args:
            name: as in ``kv_memory``.
            device: the engine's.
            config: vLLM's ``KVCacheConfig``; all weights are known.
        """
        self._config = config
        for stages in (1, *sorted(self._weights.stages)):
            self.loan = find_loan(config, self._weights.moving_bytes(stages), self._pages.page)
            if self.loan is not None:
                break
        if self.loan is None or not isinstance(self._pages, DevicePages):
            return kv_memory(name, device)
        return PiecesMemory(self._engine, self._pages, self._descriptors, self.loan)

    def _ranges(self, stages: int) -> list[Range] | None:
        loan, sizes = self.loan, self._weights.moving_bytes(stages)
        return None if loan is None else taken(loan.ranges, sizes)

    def blocks(self, stages: int = 1) -> int:
        """Return how many first blocks stay, the null block included, if weights have memory.

        Args:
            stages: see ``WholeWeights.moving_bytes``.

        Returns:
            The blocks; 0: there is not enough memory.
        """
        ranges = self._ranges(stages)
        return 0 if ranges is None else blocks_beside(self._config, ranges)

    def lent(self, buffer: torch.Tensor, stages: int = 1) -> list[torch.Tensor]:
        """Return what is lent of the buffer, uint8, for each weight of a stage."""
        ranges = self._ranges(stages)
        assert ranges is not None, "there is not enough memory for these weights"
        return [buffer[begin:end].view(torch.uint8) for begin, end in ranges]


class PiecesMemory:
    """``KvMemory`` on GPUs whose pieces can be behind weights, too. Others get descriptors of them.

    Args:
        engine: this engine.
        pages: make the memory, and map that of others.
        descriptors: those that the engine hands out.
        loan: what the pieces are.
    """

    def __init__(
        self, engine: int, pages: DevicePages, descriptors: Descriptors, loan: Loan
    ) -> None:
        self._engine, self._pages, self._descriptors = engine, pages, descriptors
        self._loan = loan
        self._sizes: list[int] = []

    def allocate(self, size: int) -> torch.Tensor:
        """See ``KvMemory.allocate``.

        Raises:
            NotSharedError: there is not enough memory.
        """
        page = self._pages.page
        self._sizes = self._loan.pieces(-(-size // page) * page)
        return self._pages.create(self._sizes)[:size].view(torch.int8).zero_()

    def handle(self, buffer: torch.Tensor) -> Handle:
        """See ``KvMemory.handle``."""
        self._descriptors.hold(KV, *self._pages.export(buffer, self._sizes))
        return {"engine": self._engine, "sizes": self._sizes}

    def open(self, pid: int, handle: Handle) -> ImportedPieces:
        """See ``KvMemory.open``."""
        files = self._descriptors.ask_all(handle["engine"], KV)
        try:
            if len(files) != len(handle["sizes"]):
                raise NotSharedError(f"engine {handle['engine']} does not hand out its KV cache")
            return self._pages.open(files, handle["sizes"])
        finally:
            for file in files:
                os.close(file)
