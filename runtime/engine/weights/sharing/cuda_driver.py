"""CUDA's virtual memory management and its copies, as engines need them to share weights.

Each call checks what the driver answers. Importing this module imports no CUDA.
"""

from typing import Any


class DriverError(RuntimeError):
    """The driver refused a call. The message is one line: the call, and the name of the error."""


def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DriverError(f"the package cuda-bindings is needed ({error})") from error
    return driver


class CudaDriver:
    """The driver of the GPUs. CUDA is initialised, by torch, before any method is called.

    Args:
        api: ``cuda.bindings.driver``; imported if there is none.

    Raises:
        DriverError: the package is not there.
    """

    def __init__(self, api: Any = None) -> None:
        self._api = _bindings() if api is None else api
        kinds = self._api.CUmemAllocationHandleType
        self._by_file = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def granule(self, device: int) -> int:
        """Return the bytes of which all sizes of memory on a GPU are multiples."""
        least = self._api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._do("cuMemGetAllocationGranularity", self._kind(device), least))

    def create(self, size: int, device: int) -> Any:
        """Return a handle of new memory on a GPU, which other processes can be given."""
        return self._do("cuMemCreate", size, self._kind(device), 0)

    def export(self, handle: Any) -> int:
        """Return a descriptor of the memory. The memory stays as long as the descriptor is open."""
        return int(self._do("cuMemExportToShareableHandle", handle, self._by_file, 0))

    def import_memory(self, file: int) -> Any:
        """Return a handle of the memory that a descriptor is of."""
        return self._do("cuMemImportFromShareableHandle", file, self._by_file)

    def reserve(self, size: int) -> int:
        """Return the first of so many addresses, behind which there is nothing."""
        return int(self._do("cuMemAddressReserve", size, 0, 0, 0))

    def free(self, address: int, size: int) -> None:
        """Give reserved addresses back, behind which there is nothing."""
        self._do("cuMemAddressFree", address, size)

    def map_memory(self, address: int, size: int, handle: Any) -> None:
        """Put all of a handle's memory behind reserved addresses; no GPU may use them yet."""
        self._do("cuMemMap", address, size, 0, handle, 0)

    def unmap(self, address: int, size: int) -> None:
        """Take away what one ``map_memory`` has put behind addresses."""
        self._do("cuMemUnmap", address, size)

    def release(self, handle: Any) -> None:
        """Let go of a handle. Its memory stays as long as it is mapped, or others hold it."""
        self._do("cuMemRelease", handle)

    def allow(self, address: int, size: int, device: int, *, writes: bool) -> None:
        """Let a GPU read mapped memory, and write it if ``writes``."""
        flags = self._api.CUmemAccess_flags
        access = self._api.CUmemAccessDesc()
        access.location = self._place(device)
        access.flags = (
            flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            if writes
            else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        )
        self._do("cuMemSetAccess", address, size, [access], 1)

    def settle(self) -> None:
        """Wait for all that this process's GPU was given to do."""
        self._do("cuCtxSynchronize")

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Have bytes copied; both addresses may be on any GPU.

        Args:
            target: an address.
            source: an address.
            size: in bytes.
            stream: the stream that copies.
        """
        self._do("cuMemcpyAsync", target, source, size, stream)

    def _kind(self, device: int) -> Any:
        """Return what memory is made: on a GPU, with descriptors."""
        kind = self._api.CUmemAllocationProp()
        kind.type = self._api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        kind.requestedHandleTypes = self._by_file
        kind.location = self._place(device)
        return kind

    def _place(self, device: int) -> Any:
        place = self._api.CUmemLocation()
        place.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        place.id = device
        return place

    def _do(self, name: str, *args: Any) -> Any:
        """Call a function of the driver, and return what it answers."""
        code, *answer = getattr(self._api, name)(*args)
        if code != self._api.CUresult.CUDA_SUCCESS:
            raise DriverError(f"{name}: {getattr(code, 'name', code)}")
        return answer[0] if answer else None
