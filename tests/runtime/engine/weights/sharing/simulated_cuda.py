"""A driver of GPUs whose memory is the host's, and streams that note what they are given."""

import ctypes
import mmap
import os
from typing import Any

import pytest
import torch

from shoal.runtime.engine.weights.sharing.cuda_driver import DriverError

GRANULE = 4096
MAP_FIXED = 0x10


class HostDriver:
    """In place of ``CudaDriver``: memory is a file that is only in memory.

    It refuses what CUDA refuses: parts of handles, and addresses that are not reserved, that have
    something behind them, or that do not.
    """

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.refuses = ""
        """The call that fails."""
        self._reserved: dict[int, int] = {}
        self._mapped: dict[int, int] = {}
        """Sizes, by address."""
        self._c = ctypes.CDLL(None, use_errno=True)
        self._c.mmap.restype = ctypes.c_void_p
        integer, size, address = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
        self._c.mmap.argtypes = [address, size, integer, integer, integer, ctypes.c_long]
        self._c.mprotect.argtypes = [address, size, integer]
        self._c.munmap.argtypes = [address, size]

    def _note(self, name: str, *what: Any) -> None:
        self.seen.append((name, *what))
        if name == self.refuses:
            raise DriverError(f"{name}: NOT_PERMITTED")

    def granule(self, device: int) -> int:
        return GRANULE

    def create(self, size: int, device: int) -> int:
        self._note("create", size, device)
        _require(size % GRANULE == 0, "create: no whole pages")
        file = os.memfd_create("simulated")
        os.ftruncate(file, size)
        return file

    def export(self, handle: int) -> int:
        self._note("export")
        return os.dup(handle)

    def import_memory(self, file: int) -> int:
        self._note("import")
        return os.dup(file)

    def release(self, handle: int) -> None:
        os.close(handle)

    def reserve(self, size: int) -> int:
        if self.refuses == "reserve":
            raise DriverError("reserve: NOT_PERMITTED")
        _require(size % GRANULE == 0, "reserve: no whole pages")
        address = self._nothing(None, size, 0)
        self._reserved[address] = size
        return address

    def free(self, address: int, size: int) -> None:
        self._note("free", size)
        _require(self._reserved.get(address) == size, "free: not what was reserved")
        _require(not self._behind(address, size), "free: there is something behind it")
        del self._reserved[address]
        assert self._c.munmap(address, size) == 0

    def map_memory(self, address: int, size: int, handle: int) -> None:
        self._note("map", size)
        whole = os.fstat(handle).st_size
        _require(size <= whole, "map: too large")
        _require(size == whole, "map: not the whole handle")
        _require(
            any(begin <= address <= begin + of - size for begin, of in self._reserved.items()),
            "map: not reserved",
        )
        _require(not self._behind(address, size), "map: there is something behind it")
        self._mapped[address] = size
        assert self._c.mmap(address, size, 0, mmap.MAP_SHARED | MAP_FIXED, handle, 0) == address

    def unmap(self, address: int, size: int) -> None:
        self._note("unmap", size)
        _require(self._mapped.get(address) == size, "unmap: not what was mapped")
        del self._mapped[address]
        self._nothing(address, size, MAP_FIXED)

    def allow(self, address: int, size: int, device: int, *, writes: bool) -> None:
        self._note("allow", size, device, writes)
        behind = self._behind(address, size)
        whole = address in behind and sum(self._mapped[at] for at in behind) == size
        _require(whole, "allow: not all is mapped")
        rights = mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0)
        assert self._c.mprotect(address, size, rights) == 0

    def _behind(self, address: int, size: int) -> list[int]:
        """Return where mappings begin that a range touches."""
        end = address + size
        return [at for at, of in self._mapped.items() if at < end and address < at + of]

    def _nothing(self, address: int | None, size: int, flags: int) -> int:
        flags |= mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return int(self._c.mmap(address, size, 0, flags, -1, 0))

    def settle(self) -> None:
        self._note("settle")

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        self._note("copy", stream)
        ctypes.memmove(target, source, size)


def _require(allowed: bool, problem: str) -> None:
    if not allowed:
        raise DriverError(problem)


def simulate_streams(monkeypatch: pytest.MonkeyPatch, seen: list[Any]) -> None:
    """Let torch's streams and events note in ``seen`` what they are given."""
    streams = Streams(seen)
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(streams, name))


class Streams:
    """In place of ``torch.cuda``, as far as streams and events go."""

    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen
        """What all streams were given, in order; a driver's copies too."""
        self._made = 0

    def Stream(self, device: Any) -> "Stream":  # noqa: N802 - torch's name
        self._made += 1
        return Stream(self.seen, self._made)

    def Event(self) -> "Event":  # noqa: N802 - torch's name
        return Event()

    def current_stream(self, device: Any) -> "Stream":
        return Stream(self.seen, 0)


class Event:
    def __init__(self) -> None:
        self.of = -1

    def record(self, stream: "Stream") -> None:
        self.of = stream.cuda_stream
        stream.seen.append(("event", self.of))

    def synchronize(self) -> None:
        """Return at once: what streams are given is done at once."""


class Stream:
    """A stream; 0 is the one that computes."""

    def __init__(self, seen: list[Any], number: int) -> None:
        self.seen, self.cuda_stream = seen, number

    def wait_event(self, event: Event) -> None:
        self.seen.append(("wait", self.cuda_stream, event.of))
