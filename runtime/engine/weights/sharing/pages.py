"""Addresses that are reserved once, and the memory behind them, which can be exchanged.

What computes with such addresses, also compiled code and CUDA graphs, need not know of an exchange.
Nobody may use an address while what is behind it is exchanged.
"""

import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

_MAP_NORESERVE = 0x4000
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
"""Of Linux; Python's ``mmap`` cannot map at a given address."""


class Exchange(NamedTuple):
    """What is to be behind some addresses. Both are uint8, and have the same number of bytes."""

    at: torch.Tensor
    """Addresses: a part of what ``Pages.reserve`` returned, the same one in each exchange."""
    memory: torch.Tensor
    """One whole piece that ``Pages.create`` has made; it stays behind its own addresses, too."""


class Pages(Protocol):
    """The addresses of one device. All sizes are multiples of a page."""

    @property
    def page(self) -> int:
        """Bytes of a page."""

    def create(self, sizes: Sequence[int]) -> torch.Tensor:
        """Return new memory, uint8: adjacent pieces of these sizes in bytes.

        Raises:
            OSError: there is not so much memory; on GPUs ``NotSharedError``.
        """

    def reserve(self, size: int) -> torch.Tensor:
        """Return addresses without memory, uint8, which nobody may touch, for the process's life.

        Raises:
            OSError: there are not so many addresses; on GPUs ``DriverError``.
        """

    def put(self, exchanges: Sequence[Exchange]) -> None:
        """Put memory behind addresses, in place of what is there. Waits until nothing computes.

        Raises:
            OSError: it cannot be done; on GPUs ``DriverError``. What is behind the addresses is
                unknown then, and the process has to end.
        """


class HostPages:
    """On CPUs: ``mremap`` maps shared memory once more, at a given address.

    Pieces need not be whole: any memory that is mapped to be shared will do.
    """

    page = mmap.PAGESIZE

    def __init__(self) -> None:
        self._c = ctypes.CDLL(None, use_errno=True)
        self._c.mmap.restype = self._c.mremap.restype = ctypes.c_void_p
        integer, size, address = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
        self._c.mmap.argtypes = [address, size, integer, integer, integer, ctypes.c_long]
        self._c.mremap.argtypes = [address, size, size, integer, address]

    def create(self, sizes: Sequence[int]) -> torch.Tensor:
        """See ``Pages.create``."""
        return torch.frombuffer(mmap.mmap(-1, sum(sizes)), dtype=torch.uint8)

    def reserve(self, size: int) -> torch.Tensor:
        """See ``Pages.reserve``."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        at = _checked(self._c.mmap(None, size, 0, flags, -1, 0))
        return torch.frombuffer((ctypes.c_char * size).from_address(at), dtype=torch.uint8)

    def put(self, exchanges: Sequence[Exchange]) -> None:
        """See ``Pages.put``. What is put there counts to this process when this returns."""
        flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
        for at, memory in exchanges:
            # An old size of 0 leaves the mapping where it is, and makes another one.
            _checked(self._c.mremap(memory.data_ptr(), 0, at.nbytes, flags, at.data_ptr()))
            at[:: self.page].sum()


def _checked(address: int | None) -> int:
    if address in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(address or 0)
