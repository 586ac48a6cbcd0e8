"""Memory of KV buffers that other processes of the node can map: on CPUs, and on GPUs.

It ends with the processes that have it mapped, however these end: no file system has a name of it.
"""

import ctypes
import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from shoal.runtime.engine.groups.peer_memory import NotSharedError

Handle = Mapping[str, Any]
"""What another process needs to map a buffer, as JSON can hold it."""


class Mapped(Protocol):
    """A buffer as this process sees it."""

    address: int
    """Where it begins."""

    def close(self) -> None:
        """Unmap it. Nothing may read it any more."""


class KvMemory(Protocol):
    """Makes buffers and maps those of others."""

    def allocate(self, size: int) -> torch.Tensor:
        """Return a buffer of so many zeros, int8."""

    def handle(self, buffer: torch.Tensor) -> Handle:
        """Return what lets other processes map a buffer that was allocated here.

        Raises:
            NotSharedError: others cannot map it.
        """

    def open(self, pid: int, handle: Handle) -> Mapped:
        """Map a buffer.

        Args:
            pid: the process that allocated it.
            handle: what that process told of it.

        Raises:
            NotSharedError: it cannot be mapped, for instance because the process has ended.
        """


class HeldBuffer:
    """A buffer that this process has as a tensor: its own, or another engine's on CPUs."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor
        self.address = tensor.data_ptr()

    @property
    def bytes(self) -> torch.Tensor:
        """All of it, int8."""
        assert self._tensor is not None, "it is closed"
        return self._tensor

    def close(self) -> None:
        """See ``Mapped.close``."""
        self._tensor = None  # the mapping goes with the last view of it


class HostMemory:
    """Memory on CPUs: files that are only in memory (``memfd_create``).

    A page of such a file takes memory from its first use on, as the pages of any other memory do.

    Args:
        name: of the files, for people who look at a process's maps; the same in all processes.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._files: dict[int, int] = {}

    def allocate(self, size: int) -> torch.Tensor:
        """See ``KvMemory.allocate``."""
        file = os.memfd_create(self._name)
        os.ftruncate(file, size)
        buffer = _map(file, size)
        self._files[buffer.data_ptr()] = file
        return buffer

    def handle(self, buffer: torch.Tensor) -> Handle:
        """See ``KvMemory.handle``."""
        return {"file": self._files[buffer.data_ptr()], "bytes": buffer.numel()}

    def release(self, buffer: torch.Tensor) -> None:
        """Let go of a buffer that was allocated here; its memory ends with the last mapping."""
        os.close(self._files.pop(buffer.data_ptr()))

    def open(self, pid: int, handle: Handle) -> HeldBuffer:
        """See ``KvMemory.open``."""
        path = f"/proc/{pid}/fd/{handle['file']}"
        try:
            # The number may belong to another process by now.
            if f"memfd:{self._name}" not in str(Path(path).readlink()):
                raise NotSharedError(f"memory cannot be shared ({path} is another file)")
            file = os.open(path, os.O_RDWR)
            try:
                return HeldBuffer(_map(file, handle["bytes"]))
            finally:
                os.close(file)
        except OSError as error:
            raise NotSharedError(f"memory cannot be shared ({error})") from error


def _map(file: int, size: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.int8)


class DeviceBuffer:
    """A mapped buffer of an engine on another GPU."""

    def __init__(self, base: int, offset: int, close: Callable[[int], None]) -> None:
        self.address = base + offset
        self._base, self._close = base, close

    def close(self) -> None:
        """See ``Mapped.close``."""
        self._close(self._base)


class DeviceMemory:
    """Memory on GPUs, by CUDA's handles for other processes (CUDA IPC).

    Torch's own way to share a tensor would make a context on the other GPU, which takes hundreds of
    megabytes there. Here a peer's memory is mapped into the context of this process's own GPU.

    Args:
        device: this engine's GPU.
    """

    def __init__(self, device: torch.device) -> None:
        from vllm.distributed.device_communicators.cuda_wrapper import CudaRTLibrary

        self._device = device
        self._cuda = CudaRTLibrary()

    def allocate(self, size: int) -> torch.Tensor:
        """See ``KvMemory.allocate``."""
        return torch.zeros(size, dtype=torch.int8, device=self._device)

    def handle(self, buffer: torch.Tensor) -> Handle:
        """See ``KvMemory.handle``."""
        address = buffer.data_ptr()
        base = next(
            segment["address"]
            for segment in torch.cuda.memory_snapshot()
            if segment["address"] <= address < segment["address"] + segment["total_size"]
        )
        handle = self._call(self._cuda.cudaIpcGetMemHandle, ctypes.c_void_p(base))
        return {"handle": bytes(handle.internal).hex(), "offset": address - base}

    def open(self, pid: int, handle: Handle) -> DeviceBuffer:
        """See ``KvMemory.open``."""
        from vllm.distributed.device_communicators.cuda_wrapper import cudaIpcMemHandle_t

        opaque = cudaIpcMemHandle_t.from_buffer_copy(bytes.fromhex(handle["handle"]))
        with torch.cuda.device(self._device):
            base = self._call(self._cuda.cudaIpcOpenMemHandle, opaque)
        return DeviceBuffer(int(base.value), handle["offset"], self._close)

    def _close(self, base: int) -> None:
        with torch.cuda.device(self._device):
            self._cuda.lib.cudaIpcCloseMemHandle(ctypes.c_void_p(base))

    def _call(self, function: Callable[[Any], Any], argument: Any) -> Any:
        try:
            return function(argument)
        except RuntimeError as error:
            self._cuda.lib.cudaGetLastError()  # or torch would raise it at its next call
            raise NotSharedError(f"memory cannot be shared ({error})") from error


def kv_memory(name: str, device: torch.device) -> KvMemory:
    """Return the memory of KV buffers on a device; ``name`` as in ``HostMemory``."""
    return HostMemory(name) if device.type == "cpu" else DeviceMemory(device)
