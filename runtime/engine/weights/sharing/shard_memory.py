"""Memory for an engine's part of the weights, which the other engines can read."""

import fcntl
import mmap
import os
import warnings
from typing import Protocol

import torch

_SEAL_FUTURE_WRITE = 0x10
"""``F_SEAL_FUTURE_WRITE`` of Linux, which Python 3.11 has no name for."""


class ShardMemory(Protocol):
    """Makes such memory, and maps that of others. It ends with the last process that holds it."""

    def create(self, size: int) -> tuple[int, torch.Tensor]:
        """Return a descriptor of new memory of so many bytes, and the memory, uint8."""

    def seal(self, file: int) -> None:
        """Let nobody who maps it from now on write to it, or change its size."""

    def open(self, file: int, size: int) -> torch.Tensor:
        """Return memory to be read, uint8.

        Raises:
            ValueError: it has another size.
        """


class HostShards:
    """Memory on CPUs: a file that is only in memory (``memfd_create``).

    Args:
        name: of the files, for people who look at a process's maps.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def create(self, size: int) -> tuple[int, torch.Tensor]:
        """See ``ShardMemory.create``."""
        file = os.memfd_create(self._name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(file, size)
        return file, torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)

    def seal(self, file: int) -> None:
        """See ``ShardMemory.seal``."""
        if fcntl.fcntl(file, fcntl.F_GET_SEALS):
            return  # by the runner that filled it
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)

    def open(self, file: int, size: int) -> torch.Tensor:
        """See ``ShardMemory.open``. Its pages count to this process at once (``MAP_POPULATE``)."""
        if os.fstat(file).st_size != size:
            raise ValueError(f"shared weights have {os.fstat(file).st_size} bytes, not {size}")
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        mapped = mmap.mmap(file, size, flags=flags, prot=mmap.PROT_READ)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable.*")
            return torch.frombuffer(mapped, dtype=torch.uint8)
