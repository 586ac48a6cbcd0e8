"""Addresses that are reserved once, and the memory behind them, which can be exchanged.

What computes with such addresses, also compiled code, need not know of an exchange. Nobody may
use an address while what is behind it is exchanged.
"""

import ctypes
import mmap
import os
from typing import Protocol

import torch

_MAP_FIXED, _MAP_NORESERVE, _MADV_REMOVE = 0x10, 0x4000, 9
"""Of Linux; Python's ``mmap`` cannot map at a given address."""


class Pages(Protocol):
    """The addresses of one device. All ranges are uint8 tensors of whole pages."""

    page: int
    """Bytes of a page."""

    def reserve(self, size: int) -> torch.Tensor:
        """Return addresses without memory, which nobody may touch, for the process's life."""

    def map(
        self, at: torch.Tensor, file: int, begin: int, *, writable: bool, now: bool = False
    ) -> None:
        """Put shared memory behind addresses, in place of what is there.

        Args:
            at: the addresses.
            file: a descriptor of the memory.
            begin: where in the memory the first page is, in bytes.
            writable: whether it is written to by these addresses.
            now: whether all of it is there, and counts to this process, when this returns; else
                each page when it is first touched.

        Raises:
            OSError: it cannot be mapped.
        """

    def block(self, at: torch.Tensor) -> None:
        """Let nothing be behind addresses: whoever touches them ends the process."""

    def discard(self, at: torch.Tensor) -> None:
        """Give shared memory back that is behind addresses; it reads as zeros from then on.

        It is gone for all who have it mapped.
        """


class HostPages:
    """On CPUs: ``mmap`` at given addresses."""

    page = mmap.PAGESIZE

    def __init__(self) -> None:
        self._c = ctypes.CDLL(None, use_errno=True)
        self._c.mmap.restype = ctypes.c_void_p
        self._c.mmap.argtypes = [
            *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
            *(ctypes.c_int, ctypes.c_long),
        ]
        self._c.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def reserve(self, size: int) -> torch.Tensor:
        """See ``Pages.reserve``."""
        at = self._mmap(None, size, 0, _PRIVATE, -1, 0)
        return torch.frombuffer((ctypes.c_char * size).from_address(at), dtype=torch.uint8)

    def map(
        self, at: torch.Tensor, file: int, begin: int, *, writable: bool, now: bool = False
    ) -> None:
        """See ``Pages.map``."""
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        flags = mmap.MAP_SHARED | _MAP_FIXED | (mmap.MAP_POPULATE if now else 0)
        self._mmap(at.data_ptr(), at.nbytes, protection, flags, file, begin)

    def block(self, at: torch.Tensor) -> None:
        """See ``Pages.block``."""
        self._mmap(at.data_ptr(), at.nbytes, 0, _PRIVATE | _MAP_FIXED, -1, 0)

    def discard(self, at: torch.Tensor) -> None:
        """See ``Pages.discard``."""
        if self._c.madvise(at.data_ptr(), at.nbytes, _MADV_REMOVE):
            raise _error()

    def _mmap(
        self, at: int | None, size: int, protection: int, flags: int, file: int, begin: int
    ) -> int:
        address = self._c.mmap(at, size, protection, flags, file, begin)
        if address in (None, ctypes.c_void_p(-1).value):
            raise _error()
        return int(address)


_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE


def pages_on(device: torch.device) -> Pages | None:
    """Return what exchanges memory on a device; None: nothing does so far."""
    return HostPages() if device.type == "cpu" else None


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
