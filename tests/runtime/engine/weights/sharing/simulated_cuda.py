"""A driver of GPUs whose memory is the host's, and streams that note what they are given."""

import ctypes
import mmap
import os
from typing import Any

import pytest
import torch

from shoal.runtime.engine.weights.sharing.cuda_driver import DriverError, Rows

GRANULE = 4096


class HostDriver:
    """In place of ``CudaDriver``: memory is a file that is only in memory."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.refuses = ""
        """The call that fails."""
        self._mapped: dict[int, mmap.mmap] = {}

    def _note(self, name: str, *what: Any) -> None:
        self.seen.append((name, *what))
        if name == self.refuses:
            raise DriverError(f"{name}: NOT_PERMITTED")

    def granule(self, device: int) -> int:
        return GRANULE

    def create(self, size: int, device: int) -> int:
        self._note("create", size, device)
        file = os.memfd_create("simulated")
        os.ftruncate(file, size)
        return file

    def export(self, handle: int) -> int:
        self._note("export")
        return os.dup(handle)

    def import_memory(self, file: int) -> int:
        self._note("import")
        return os.dup(file)

    def map_memory(self, handle: int, size: int) -> int:
        self._note("map", size)
        if os.fstat(handle).st_size < size:
            raise DriverError("map: too large")
        mapped = mmap.mmap(handle, size)
        os.close(handle)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self._mapped[address] = mapped
        return address

    def allow(self, address: int, size: int, device: int, *, writes: bool) -> None:
        self._note("allow", size, device, writes)
        rights = mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0)
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), rights) == 0

    def settle(self) -> None:
        self._note("settle")

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        self._note("copy", stream)
        ctypes.memmove(target, source, size)

    def copy_rows(self, target: Rows, source: Rows, rows: int, size: int, stream: int) -> None:
        self._note("copy rows", stream)
        for row in range(rows):
            begins = (of.address + row * of.stride for of in (target, source))
            ctypes.memmove(*begins, size)


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


class Stream:
    """A stream; 0 is the one that computes."""

    def __init__(self, seen: list[Any], number: int) -> None:
        self.seen, self.cuda_stream = seen, number

    def wait_event(self, event: Event) -> None:
        self.seen.append(("wait", self.cuda_stream, event.of))
