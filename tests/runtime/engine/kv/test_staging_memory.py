"""Memory of the host that a GPU is told to reach, and to forget: with a simulated CUDA library."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.device_communicators import cuda_wrapper

from shoal.runtime.engine.groups.peer_memory import NotSharedError
from shoal.runtime.engine.kv.kv_memory import HeldBuffer, HostMemory
from shoal.runtime.engine.kv.staging_memory import (
    SLOTS,
    TABLE_BYTES,
    DevicePins,
    Region,
    region_bytes,
)


class Library:
    """Stands in for CUDA's runtime library."""

    def __init__(self) -> None:
        self.calls = list[str]()
        self.error = 0
        self.unreachable = 0
        """CUDA's error for an address that the GPU lacks; 0: it has all."""
        self.moved = 0
        """How far the GPU's address is from the host's."""

    def register(self, address: Any, size: Any, flags: Any) -> int:
        assert (size.value, flags.value) == (region_bytes(4096), 3)
        self.calls.append("register")
        return self.error

    def on_device(self, found: Any, address: Any, flags: Any) -> int:
        ctypes.cast(found, ctypes.POINTER(ctypes.c_void_p))[0] = address.value + self.moved
        return self.unreachable

    def unregister(self, address: Any) -> int:
        self.calls.append("unregister")
        return 0

    def forget(self) -> int:
        self.calls.append("forget the error")
        return 0

    @property
    def lib(self) -> Any:
        return SimpleNamespace(
            cudaHostRegister=self.register,
            cudaHostGetDevicePointer=self.on_device,
            cudaHostUnregister=self.unregister,
            cudaGetLastError=self.forget,
        )


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setattr(cuda_wrapper, "CudaRTLibrary", lambda: library)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    return library


def region() -> Region:
    buffer = HeldBuffer(torch.zeros(region_bytes(4096), dtype=torch.int8))
    return Region(buffer, 4096, DevicePins(torch.device("cuda", 0)))


def test_a_region_is_registered_and_unregistered_once(library: Library) -> None:
    found = region()
    assert [slot.memory.bytes.numel() for slot in found.slots] == [4096] * SLOTS
    assert [slot.table.nbytes for slot in found.slots] == [TABLE_BYTES] * SLOTS
    assert library.calls == ["register"]
    found.close()
    found.close()
    assert library.calls == ["register", "unregister"]


def test_a_region_that_nobody_has_closed_is_unregistered_before_it_is_unmapped(
    library: Library,
) -> None:
    """Else CUDA takes the next mapping at its address for the old one, and refuses it."""
    memory = HostMemory("shoal-test")
    pins = DevicePins(torch.device("cuda", 0))
    found = Region(HeldBuffer(memory.allocate(region_bytes(4096))), 4096, pins)
    del found
    assert library.calls == ["register", "unregister"]


def test_memory_that_cannot_be_registered_is_not_shared(library: Library) -> None:
    library.error = 2
    with pytest.raises(NotSharedError, match=r"cannot be pinned \(CUDA error 2\)"):
        region()
    assert library.calls == ["register", "forget the error"]


def test_memory_with_another_address_on_the_gpu_is_not_used(library: Library) -> None:
    library.moved = 4096
    with pytest.raises(NotSharedError, match="another address"):
        region()
    assert library.calls == ["register", "unregister"]


def test_memory_that_the_gpu_cannot_reach_is_let_go_of(library: Library) -> None:
    library.unreachable = 801
    with pytest.raises(NotSharedError, match="CUDA error 801"):
        region()
    assert library.calls == ["register", "unregister", "forget the error"]
