"""On which streams a GPU copies KV, in what order, and what lives until it has; CUDA is simulated.

The kernel runs in Triton's interpreter, so the bytes are copied too.
"""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from shoal.runtime.engine.kernels import kv_copy_kernel, words_in_memory
from shoal.runtime.engine.kv.device_copy import DeviceCopier
from shoal.runtime.engine.kv.kv_memory import HeldBuffer
from shoal.runtime.engine.kv.kv_reader import KvReader
from tests.runtime.engine.kv.carried_kv import CASES, Engines
from tests.runtime.engine.kv.test_kv_reader import Neighbours

KERNEL, WORDS = kv_copy_kernel._copy_kernel, words_in_memory.words
MAIN, SIDE = "main", "side"


class Cuda:
    """Stands in for ``torch.cuda``: notes what each stream is given, and who waits for what."""

    def __init__(self) -> None:
        self.given: list[tuple[str, str]] = []
        """Streams, and what they were given."""
        self.awaited: list[str] = []
        """Streams whose events the host has waited for."""
        self.stream_name = MAIN
        self.tables: list[weakref.ref[torch.Tensor]] = []

    def give(self, what: str) -> None:
        self.given.append((self.stream_name, what))

    def current_stream(self) -> "Stream":
        return Stream(self, self.stream_name)

    @contextmanager
    def stream(self, stream: "Stream") -> Iterator[None]:
        before, self.stream_name = self.stream_name, stream.name
        try:
            yield
        finally:
            self.stream_name = before

    def to_device(self, table: torch.Tensor) -> torch.Tensor:
        self.give("table")
        table = table.clone()
        self.tables.append(weakref.ref(table))
        return table

    def copy(self, *args: Any, **options: Any) -> None:
        self.give("kernel")
        LAUNCH(*args, **options)


LAUNCH = kv_copy_kernel.copy


class Stream:
    def __init__(self, cuda: Cuda, name: str = SIDE) -> None:
        self.cuda, self.name = cuda, name

    def wait_event(self, event: "Event") -> None:
        self.cuda.given.append((self.name, f"wait for {event.stream}"))


class Event:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.stream = cuda, ""

    def record(self) -> None:
        self.stream = self.cuda.stream_name
        self.cuda.give("event")

    def synchronize(self) -> None:
        self.cuda.awaited.append(self.stream)

    def elapsed_time(self, end: "Event") -> float:
        assert self.stream == end.stream
        return 250.0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setattr(kv_copy_kernel, "_copy_kernel", InterpretedFunction(KERNEL.fn))
    monkeypatch.setattr(kv_copy_kernel, "words", InterpretedFunction(WORDS.fn))
    monkeypatch.setattr(kv_copy_kernel, "copy", cuda.copy)
    monkeypatch.setattr(DeviceCopier, "_compile", staticmethod(lambda _: None))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: Stream(cuda))
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event(cuda))
    monkeypatch.setattr(torch.cuda, "current_stream", cuda.current_stream)
    monkeypatch.setattr(torch.cuda, "stream", cuda.stream)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda table: table)
    monkeypatch.setattr(torch.Tensor, "to", lambda table, *_, **__: cuda.to_device(table))
    return cuda


class Member:
    """A member that reads what it is to hold."""

    def __init__(self, name: str = "DP to TP2", engine: int = 0) -> None:
        self.engines, self.case = Engines(CASES[name]), CASES[name]
        self.expected = self.engines.expected(engine)
        own = HeldBuffer(self.engines.buffers[engine])
        self.bytes = own.bytes
        self.copier = DeviceCopier(own, [self.case.pages])
        peers = Neighbours(self.engines.buffers)
        pages = [self.case.pages]
        self.reader = KvReader(engine, self.case.max_sp, pages, own, peers, self.copier)

    def read(self, *, beside: bool) -> Any:
        requests = self.engines.requests
        return self.reader.read(self.case.source, self.case.target, requests, beside=beside)


def test_what_goes_on_beside_steps_waits_for_earlier_ones_and_none_waits_for_it(cuda: Cuda) -> None:
    member = Member()
    wait = member.read(beside=True)
    assert cuda.given == [
        (MAIN, "event"),
        (SIDE, "wait for main"),
        (SIDE, "event"),
        (SIDE, "table"),
        (SIDE, "kernel"),
        (SIDE, "event"),
    ]
    assert cuda.stream_name == MAIN
    copied = wait()
    assert (copied.seconds, cuda.awaited) == (0.25, [SIDE])
    assert copied.bytes
    assert member.bytes.equal(member.expected)


def test_what_steps_need_is_copied_between_them(cuda: Cuda) -> None:
    member = Member()
    member.read(beside=False)
    assert cuda.given == [(MAIN, what) for what in ("event", "table", "kernel", "event")]
    assert member.bytes.equal(member.expected)


def test_a_peers_memory_stays_until_both_streams_have_read_it(cuda: Cuda) -> None:
    member = Member()
    member.copier.settle()
    assert cuda.awaited == []
    member.read(beside=True)
    member.read(beside=False)
    member.read(beside=False)
    member.copier.settle()
    assert sorted(cuda.awaited) == [MAIN, SIDE]


def test_the_table_lives_until_the_copy_has_ended(cuda: Cuda) -> None:
    """Its memory must not become another tensor's of the same stream, or the host's."""
    wait = Member().read(beside=True)
    gc.collect()
    (table,) = cuda.tables
    assert table() is not None
    wait()
    gc.collect()
    assert table() is None


def test_a_member_with_nothing_to_read_gives_its_device_nothing(cuda: Cuda) -> None:
    member = Member()
    assert member.copier.after_steps(beside=False)([])() == 0.0
    assert cuda.given == []
