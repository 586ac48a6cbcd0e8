"""Memory of the host that two engines' processes have mapped, and that their GPUs can reach."""

import ctypes
import weakref
from typing import NamedTuple, Protocol

import numpy as np
import torch

from shoal.runtime.engine.groups.peer_memory import NotSharedError
from shoal.runtime.engine.kv.carry_plan import Numbers
from shoal.runtime.engine.kv.kv_memory import Handle, HeldBuffer, HostMemory

SLOTS = 2
"""Slots of a region: while one is read, the next one is filled."""
SLOT_BYTES = 16 << 20
"""Bytes of KV that a slot holds: some 0.7 ms over PCIe 4, so messages do not count."""
TABLE_BYTES = 128 << 10
"""Bytes of a slot in which a device is told what to copy: runs and layers of ``staging_plan``."""


class Pins(Protocol):
    """Lets a device reach memory of the host."""

    def enter(self) -> None:
        """Prepare the calling thread."""

    def pin(self, buffer: torch.Tensor) -> None:
        """Let the device reach a buffer, at the buffer's own address.

        Raises:
            NotSharedError: it cannot.
        """

    def unpin(self, buffer: torch.Tensor) -> None:
        """Undo that. No work of the device may use the buffer any more."""


class NoPins:
    """``Pins`` of a device that is the host."""

    def enter(self) -> None:
        """See ``Pins.enter``."""

    def pin(self, buffer: torch.Tensor) -> None:
        """See ``Pins.pin``."""

    def unpin(self, buffer: torch.Tensor) -> None:
        """See ``Pins.unpin``."""


class DevicePins:
    """``Pins`` of a GPU, by ``cudaHostRegister``.

    Args:
        device: this engine's GPU.
    """

    def __init__(self, device: torch.device) -> None:
        from vllm.distributed.device_communicators.cuda_wrapper import CudaRTLibrary

        self._device = device
        self._library = CudaRTLibrary().lib

    def enter(self) -> None:
        """See ``Pins.enter``."""
        torch.cuda.set_device(self._device)

    def pin(self, buffer: torch.Tensor) -> None:
        """See ``Pins.pin``."""
        address = ctypes.c_void_p(buffer.data_ptr())
        portable_and_mapped = 1 | 2
        self._check(
            self._library.cudaHostRegister(
                address, ctypes.c_size_t(buffer.numel()), ctypes.c_uint(portable_and_mapped)
            )
        )
        on_device = ctypes.c_void_p()
        error = self._library.cudaHostGetDevicePointer(
            ctypes.byref(on_device), address, ctypes.c_uint(0)
        )
        if not error and on_device.value == address.value:
            return
        self.unpin(buffer)
        self._check(error)
        raise NotSharedError("a GPU has another address for memory of the host")

    def unpin(self, buffer: torch.Tensor) -> None:
        """See ``Pins.unpin``."""
        self._library.cudaHostUnregister(ctypes.c_void_p(buffer.data_ptr()))

    def _check(self, error: int) -> None:
        if error:
            self._library.cudaGetLastError()  # or torch would raise it at its next call
            raise NotSharedError(f"memory of the host cannot be pinned (CUDA error {error})")


def pins_of(device: torch.device) -> Pins:
    """Return what lets a device reach memory of the host."""
    return NoPins() if device.type == "cpu" else DevicePins(device)


class Slot(NamedTuple):
    """A part of a region."""

    memory: HeldBuffer
    """For KV."""
    table: Numbers
    """For what the device is told (``portions.Copy``)."""


class Offer(NamedTuple):
    """What another process needs to map a region."""

    pid: int
    handle: Handle
    slot_bytes: int


class PinnedBuffer(HeldBuffer):
    """A mapped buffer that this process's device can reach.

    If nobody closes it, it is let go of all the same. Else its memory would be unmapped while the
    device takes it for pinned, and nothing else could be pinned at its address (CUDA error 712).

    Args:
        tensor: the buffer.
        pins: of the device.

    Raises:
        NotSharedError: the device cannot reach it.
    """

    def __init__(self, tensor: torch.Tensor, pins: Pins) -> None:
        super().__init__(tensor)
        pins.pin(tensor)
        self._let_go = weakref.finalize(self, _let_go, tensor, pins)
        self._let_go.atexit = False

    def close(self) -> None:
        """See ``Mapped.close``; later calls do nothing."""
        self._let_go()
        super().close()


def _let_go(tensor: torch.Tensor, pins: Pins) -> None:
    pins.enter()
    pins.unpin(tensor)


class Region:
    """A region that this process has mapped, and its slots.

    Args:
        buffer: all of it.
        slot_bytes: bytes of KV that a slot holds.
        pins: of this process's device.

    Raises:
        NotSharedError: the device cannot reach it.
    """

    def __init__(self, buffer: HeldBuffer, slot_bytes: int, pins: Pins) -> None:
        self._buffer = PinnedBuffer(buffer.bytes, pins)
        self.slots = [_slot(part) for part in buffer.bytes.split(TABLE_BYTES + slot_bytes)]

    def close(self) -> None:
        """Unmap it; later calls do nothing. No copy may go on here."""
        self.slots = []
        self._buffer.close()


def _slot(part: torch.Tensor) -> Slot:
    table = part[:TABLE_BYTES].numpy().view(np.int64)
    return Slot(HeldBuffer(part[TABLE_BYTES:]), table)


def region_bytes(slot_bytes: int) -> int:
    """Return the size of a region."""
    return SLOTS * (TABLE_BYTES + slot_bytes)


def open_region(memory: HostMemory, offer: Offer, pins: Pins) -> Region:
    """Map a region that another process has offered.

    Raises:
        NotSharedError: it cannot be mapped, or the device cannot reach it.
    """
    return Region(memory.open(offer.pid, offer.handle), offer.slot_bytes, pins)
