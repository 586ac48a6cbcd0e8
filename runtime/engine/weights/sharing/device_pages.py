"""``Pages`` on GPUs, by CUDA's virtual memory management, and the pieces of other engines.

CUDA maps whole handles only, so each piece of memory is one handle. A piece that is behind other
addresses, too, stays behind its own: in this process, and in those that have imported it.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from shoal.runtime.engine.groups.peer_memory import NotSharedError
from shoal.runtime.engine.weights.sharing.cuda_driver import CudaDriver, DriverError
from shoal.runtime.engine.weights.sharing.pages import Exchange


class DevicePages:
    """See the module.

    Args:
        device: this engine's, with its number.
        driver: of the GPUs.
    """

    def __init__(self, device: torch.device, driver: CudaDriver) -> None:
        self._device, self._driver = device, driver
        self._number = device.index or 0
        self._handles: dict[int, Any] = {}
        """Of all pieces, by the addresses of ``create``."""
        self._behind: set[int] = set()
        """The addresses of ``reserve`` behind which there is something."""

    @cached_property
    def page(self) -> int:
        """See ``Pages.page``."""
        return self._driver.granule(self._number)

    def create(self, sizes: Sequence[int]) -> torch.Tensor:
        """See ``Pages.create``. What the memory holds is unknown.

        Raises:
            NotSharedError: there is not enough memory.
        """
        size = sum(sizes)
        try:
            begin = self._driver.reserve(size)
            for address, piece in zip(_addresses(begin, sizes), sizes, strict=True):
                self._handles[address] = self._driver.create(piece, self._number)
                self._driver.map_memory(address, piece, self._handles[address])
            self._driver.allow(begin, size, self._number, writes=True)
        except DriverError as error:
            problem = f"GPU {self._number} has no {size / 1e9:.2f} GB of memory that can move"
            raise NotSharedError(f"{problem} ({error})") from error
        return tensor_at(begin, size, self._device)

    def reserve(self, size: int) -> torch.Tensor:
        """See ``Pages.reserve``."""
        return tensor_at(self._driver.reserve(size), size, self._device)

    def put(self, exchanges: Sequence[Exchange]) -> None:
        """See ``Pages.put``.

        Other threads may give the GPU work meanwhile that uses none of the addresses.
        """
        self._driver.settle()
        for at, _ in exchanges:
            if at.data_ptr() in self._behind:
                self._driver.unmap(at.data_ptr(), at.nbytes)
        for at, memory in exchanges:
            self._driver.map_memory(at.data_ptr(), at.nbytes, self._handles[memory.data_ptr()])
            self._driver.allow(at.data_ptr(), at.nbytes, self._number, writes=True)
            self._behind.add(at.data_ptr())

    # --- other processes --------------------------------------------------------------------------

    def export(self, memory: torch.Tensor, sizes: Sequence[int]) -> list[int]:
        """Return a descriptor of each piece of memory that ``create`` has made of such sizes.

        Raises:
            NotSharedError: CUDA hands out none.
        """
        addresses = _addresses(memory.data_ptr(), sizes)
        try:
            return [self._driver.export(self._handles[address]) for address in addresses]
        except DriverError as error:
            raise NotSharedError(f"GPU {self._number} hands out no memory ({error})") from error

    def open(self, files: Sequence[int], sizes: Sequence[int]) -> "ImportedPieces":
        """Map what another process has exported, to be read.

        Raises:
            NotSharedError: this GPU cannot reach it.
        """
        pieces: ImportedPieces | None = None
        try:
            with self._current():
                pieces = ImportedPieces(self._driver, sum(sizes), self._current)
                for file, size in zip(files, sizes, strict=True):
                    pieces.add(file, size)
                self._driver.allow(pieces.address, sum(sizes), self._number, writes=False)
        except DriverError as error:
            if pieces is not None:
                pieces.close()
            problem = f"GPU {self._number} cannot read another engine's memory"
            raise NotSharedError(f"{problem} ({error})") from error
        return pieces

    def _current(self) -> AbstractContextManager[Any]:
        """In any thread: use this GPU's context."""
        is_cuda = self._device.type == "cuda"
        return torch.cuda.device(self._device) if is_cuda else nullcontext()


class ImportedPieces:
    """Adjacent pieces of another process's memory, as this one has them mapped.

    Args:
        driver: of the GPUs.
        size: bytes of all.
        current: makes the GPU's context current.
    """

    def __init__(self, driver: CudaDriver, size: int, current: Any) -> None:
        self._driver, self._size, self._current = driver, size, current
        self._sizes: list[int] = []
        self.address = driver.reserve(size)
        """Where the first begins."""

    def add(self, file: int, size: int) -> None:
        """Map the next piece."""
        handle = self._driver.import_memory(file)
        try:
            self._driver.map_memory(self.address + sum(self._sizes), size, handle)
        finally:
            self._driver.release(handle)  # the mapping holds the memory
        self._sizes.append(size)

    def close(self) -> None:
        """Unmap all. Nothing may read it any more."""
        with self._current():
            for address, size in zip(
                _addresses(self.address, self._sizes), self._sizes, strict=True
            ):
                self._driver.unmap(address, size)
            self._driver.free(self.address, self._size)


def tensor_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """Return bytes that begin at an address as a tensor, uint8."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, size)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _addresses(begin: int, sizes: Sequence[int]) -> list[int]:
    """Return where adjacent pieces begin."""
    return list(accumulate(sizes[:-1], initial=begin)) if sizes else []
