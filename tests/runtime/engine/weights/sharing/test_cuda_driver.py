"""What the driver of GPUs is asked for, and that each of its answers is looked at."""

import sys
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.runtime.engine.weights.sharing.cuda_driver import CudaDriver, DriverError


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2


class Api:
    """In place of ``cuda.bindings.driver``: constants are their names, structures have any field.

    Functions answer with their success, and what ``answers`` has for them.
    """

    CUresult = Result

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {"cuMemAddressReserve": 4096}
        self.fails = ""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu"):
            return lambda *args: self._call(name, *args)
        if name in ("CUmemAllocationProp", "CUmemLocation", "CUmemAccessDesc"):
            return SimpleNamespace
        return _Names()

    def _call(self, name: str, *args: Any) -> tuple[Any, ...]:
        self.seen.append((name, *args))
        if name == self.fails:
            return (Result.CUDA_ERROR_OUT_OF_MEMORY, None)
        return (Result.CUDA_SUCCESS, *([self.answers[name]] if name in self.answers else []))


class _Names:
    def __getattr__(self, name: str) -> str:
        return name


FILES = "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"
ON_GPU_3 = SimpleNamespace(type="CU_MEM_LOCATION_TYPE_DEVICE", id=3)


def test_memory_is_made_on_a_gpu_and_can_be_handed_out_by_descriptors() -> None:
    api = Api()
    api.answers |= {"cuMemCreate": "handle", "cuMemExportToShareableHandle": 9}
    driver = CudaDriver(api)
    assert driver.export(driver.create(1 << 21, 3)) == 9
    (create, export) = api.seen
    kind = SimpleNamespace(
        type="CU_MEM_ALLOCATION_TYPE_PINNED", requestedHandleTypes=FILES, location=ON_GPU_3
    )
    assert create == ("cuMemCreate", 1 << 21, kind, 0)
    assert export == ("cuMemExportToShareableHandle", "handle", FILES, 0)


@pytest.mark.parametrize(
    ("writes", "flag"),
    [
        (False, "CU_MEM_ACCESS_FLAGS_PROT_READ"),
        (True, "CU_MEM_ACCESS_FLAGS_PROT_READWRITE"),
    ],
)
def test_memory_is_mapped_for_one_gpu(writes: bool, flag: str) -> None:
    api = Api()
    api.answers["cuMemImportFromShareableHandle"] = "handle"
    driver = CudaDriver(api)
    handle = driver.import_memory(7)
    address = driver.reserve(1 << 21)
    driver.map_memory(address, 1 << 21, handle)
    driver.release(handle)
    driver.allow(address, 1 << 21, 3, writes=writes)
    driver.unmap(address, 1 << 21)
    driver.free(address, 1 << 21)
    assert api.seen == [
        ("cuMemImportFromShareableHandle", 7, FILES),
        ("cuMemAddressReserve", 1 << 21, 0, 0, 0),
        ("cuMemMap", 4096, 1 << 21, 0, "handle", 0),
        ("cuMemRelease", "handle"),
        ("cuMemSetAccess", 4096, 1 << 21, [SimpleNamespace(location=ON_GPU_3, flags=flag)], 1),
        ("cuMemUnmap", 4096, 1 << 21),
        ("cuMemAddressFree", 4096, 1 << 21),
    ]


def test_bytes_are_copied_on_a_stream() -> None:
    api = Api()
    CudaDriver(api).copy(100, 200, 50, 6)
    assert api.seen == [("cuMemcpyAsync", 100, 200, 50, 6)]


def test_a_call_that_fails_is_named_with_the_error() -> None:
    api = Api()
    api.fails = "cuMemCreate"
    with pytest.raises(DriverError, match=r"^cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY$"):
        CudaDriver(api).create(1 << 21, 0)
    api.fails = "cuCtxSynchronize"
    with pytest.raises(DriverError, match=r"^cuCtxSynchronize: "):
        CudaDriver(api).settle()


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DriverError, match="package cuda-bindings is needed"):
        CudaDriver()
