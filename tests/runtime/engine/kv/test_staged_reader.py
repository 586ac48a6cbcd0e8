"""KV that goes through memory of the host: what arrives, what fails, and who lets go of what."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.policies.values.layouts import alone
from shoal.runtime.engine.groups.peer_memory import NotSharedError
from shoal.runtime.engine.kv import staged_reader, staging_plan
from shoal.runtime.engine.kv.carry_plan import Numbers
from shoal.runtime.engine.kv.host_copy import HostCopier
from shoal.runtime.engine.kv.kv_memory import HeldBuffer, HostMemory
from shoal.runtime.engine.kv.kv_reader import KvReader
from shoal.runtime.engine.kv.portions import Copier, Copy, Portion
from shoal.runtime.engine.kv.staged_reader import Lane, StagedReader
from shoal.runtime.engine.kv.staging_server import StagingServer, address_of
from shoal.runtime.engine.link.instructions import Copied
from tests.depth import DEEP
from tests.runtime.engine.kernels.test_kv_copy_kernel import InterpretedCopier, interpreted
from tests.runtime.engine.kv.carried_kv import CASES, Case, Engines
from tests.runtime.engine.kv.test_kv_reader import Neighbours, order

__all__ = ["interpreted"]
NAME = "shoal-test-staging"
WAIT_SECONDS = 120
BESIDE = ("DP of another engine to TP2", "TP4 to TP2 of others, NHD", "TP2 x PP2 to PP4, NHD")
WAYS = [
    (name, beside)
    for beside in (False, True)
    for name in (BESIDE if beside and not DEEP else CASES)
]
"""What is carried, and whether steps go on beside it."""


class CountedPins:
    """Notes which memory a device is told to reach, and to forget."""

    def __init__(self) -> None:
        self.pinned = list[int]()
        self.unpinned = list[int]()

    def enter(self) -> None:
        pass

    def pin(self, buffer: torch.Tensor) -> None:
        self.pinned.append(buffer.data_ptr())

    def unpin(self, buffer: torch.Tensor) -> None:
        self.unpinned.append(buffer.data_ptr())

    @property
    def held(self) -> int:
        assert len(self.unpinned) <= len(self.pinned), "let go of twice"
        return len(self.pinned) - len(self.unpinned)


class Hooked:
    """A copier that does something of the test's in place of a copy, if it is told to."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self.before: Callable[[], bool] = lambda: True
        """Called before each copy for another engine; returns whether there is one."""

    def after_steps(self, *, beside: bool) -> Copy:
        return self._copier.after_steps(beside=beside)

    def at_once(self) -> Copy:
        return self._copy

    def settle(self) -> None:
        self._copier.settle()

    def _copy(
        self, portions: Sequence[Portion], table: Numbers | None = None
    ) -> Callable[[], float]:
        if not self.before():
            return lambda: 0.0
        return self._copier.at_once()(portions, table)


class Server(StagingServer):
    """A server that can end, as its process would."""

    connections: list[Any]

    def _serve(self, connection: Any) -> None:
        vars(self).setdefault("connections", []).append(connection)
        super()._serve(connection)

    def end(self) -> None:
        for connection in self.connections:
            with socket.socket(fileno=os.dup(connection.fileno())) as both:
                both.shutdown(socket.SHUT_RDWR)


class Node:
    """The engines of a case in one process; none can read another's memory."""

    def __init__(
        self,
        case: Case,
        directory: Path,
        *,
        copier: Callable[[], Copier] | None = None,
    ) -> None:
        self.case, self.engines, self._directory = case, Engines(case), directory
        self.pins = CountedPins()
        self._copier_of = copier or (lambda: HostCopier(partial(order, case, 2)))
        self.copiers = dict[int, Hooked]()
        self.servers = dict[int, Server]()
        self.staged = dict[int, StagedReader]()
        for engine in case.source.engines:
            self.serve(engine)
        self.readers = {engine: self._reader(engine) for engine in case.target.engines}

    def serve(self, engine: int) -> None:
        """Let an engine answer, also in place of an earlier incarnation."""
        self.copiers[engine] = Hooked(self._copier_of())
        self.servers[engine] = Server(
            address_of(self._directory, engine),
            [self.case.pages],
            HeldBuffer(self.engines.buffers[engine]),
            self.copiers[engine],
            HostMemory(NAME),
            self.pins,
        )

    def _reader(self, engine: int) -> KvReader:
        own, pages = HeldBuffer(self.engines.buffers[engine]), [self.case.pages]
        of = self._directory, pages, own, HostMemory(NAME), self.pins, WAIT_SECONDS
        reader = StagedReader(partial(Lane, *of), lambda _: False)
        self.staged[engine] = reader
        return KvReader(
            engine, self.case.max_sp, pages, own, Neighbours({}), self._copier_of(), reader
        )

    def read(self, engine: int, *, beside: bool = False) -> Copied:
        case, requests = self.case, self.engines.requests
        return self.readers[engine].read(case.source, case.target, requests, beside=beside)()

    def right(self, engine: int, *, beside: bool = False) -> bool:
        """Return whether a member has what it should, and nothing else, once it has read."""
        # What is expected is written to the very buffer that is mapped: that is undone.
        buffer = self.engines.expected(engine)
        expected, before = buffer.clone(), self.engines.buffers[engine]
        buffer[:], self.engines.buffers[engine] = before, buffer
        assert not buffer.equal(expected)
        copied = self.read(engine, beside=beside)
        assert not copied.problem
        found = buffer.equal(expected)
        buffer[:] = before
        return found


@contextmanager
def small_slots(tokens: int = 8) -> Iterator[None]:
    """Let slots hold little, so that a case needs many of them."""
    patch = pytest.MonkeyPatch()
    patch.setattr(staged_reader, "SLOT_BYTES", 1)  # the least is a block
    patch.setattr(staging_plan, "MOST_RUNS", tokens)
    try:
        yield
    finally:
        patch.undo()


@pytest.fixture
def slots() -> Iterator[None]:
    with small_slots():
        yield


@pytest.mark.usefixtures("slots")
@pytest.mark.parametrize(("name", "beside"), WAYS)
def test_members_get_what_they_are_to_hold_and_nothing_else(
    name: str, beside: bool, tmp_path: Path
) -> None:
    case = CASES[name]
    node = Node(case, tmp_path)
    for engine in case.target.engines:
        assert node.right(engine, beside=beside)
        copied = node.read(engine)
        heads = max(1, case.heads // case.target.layout.tp)
        layers = case.layers // case.target.layout.pp
        tokens = sum(request.computed - request.begin for request in node.engines.requests)
        assert copied.bytes == tokens * heads * layers * case.token_bytes
        own = tokens and engine in case.source.engines
        assert copied.host_bytes <= copied.bytes if own else copied.host_bytes == copied.bytes


@pytest.mark.usefixtures("interpreted", "slots")
@pytest.mark.parametrize("name", ["DP of another engine to TP2", "TP4 to TP2 of others, NHD"])
def test_the_kernel_copies_into_slots_and_out_of_them(name: str, tmp_path: Path) -> None:
    node = Node(CASES[name], tmp_path, copier=lambda: InterpretedCopier(3))
    assert all(node.right(engine) for engine in node.case.target.engines)


@pytest.mark.parametrize("limit", [1, 3, 10**9])
def test_chunks_hold_every_run_once_and_no_more_than_a_slot(limit: int) -> None:
    case = CASES["DP to DP"]
    engines = Engines(case)
    (piece,) = staging_plan_pieces(case, engines)
    pages, block = case.pages, case.pages.block_bytes
    parts = list(staging_plan.chunks(piece, pages, limit * block))
    each = piece.strip.heads * pages.token_bytes * len(piece.strip.layers)
    assert all(part.tokens * each <= limit * block for part in parts)
    for values, *of_parts in zip(piece.runs, *(part.runs for part in parts), strict=True):
        assert values.tolist() == [one for part in of_parts for one in part.tolist()]


def staging_plan_pieces(case: Case, engines: Engines) -> list[Any]:
    from shoal.runtime.engine.kv.carry_plan import pieces

    return pieces(case.source, case.target, 1, engines.requests, 0, case.pages, case.max_sp)


@pytest.mark.usefixtures("slots")
def test_a_slot_that_is_read_before_it_was_written_shows(tmp_path: Path) -> None:
    """The tests above can fail: what is in a slot decides."""
    node = Node(CASES["DP of another engine to TP2"], tmp_path)
    answers = iter([True, False])
    node.copiers[3].before = lambda: next(answers, True)
    assert not node.right(0)
    assert node.right(1)


@pytest.mark.usefixtures("slots")
@pytest.mark.parametrize("beside", [False, True])
def test_an_engine_that_ends_while_it_is_read_is_a_problem_of_the_copy(
    beside: bool, tmp_path: Path
) -> None:
    node = Node(CASES["DP of another engine to TP2"], tmp_path)

    def end() -> bool:
        node.servers[3].end()
        return True

    node.copiers[3].before = end
    problem = "the runner of engine 3 has ended"
    if beside:
        assert node.read(0, beside=True).problem == problem
    else:
        with pytest.raises(NotSharedError, match=problem):
            node.read(0)
    until(lambda: node.pins.held == 0)
    node.serve(3)
    assert node.right(0, beside=beside)


@pytest.mark.usefixtures("slots")
def test_an_engine_that_was_restarted_is_asked_anew(tmp_path: Path) -> None:
    node = Node(CASES["DP of another engine to TP2"], tmp_path)
    assert all(node.right(engine) for engine in (0, 1))
    node.servers[3].end()
    node.serve(3)
    assert all(node.right(engine) for engine in (0, 1))


def test_what_comes_too_late_is_written_where_nobody_reads(tmp_path: Path) -> None:
    node = Node(CASES["DP of another engine to TP2"], tmp_path)
    late, go_on = threading.Event(), threading.Event()

    def be_late() -> bool:
        late.set()
        return go_on.wait(WAIT_SECONDS)

    lane = node.staged[0]._lanes[False]
    lane.connect(3)  # which may take long, too
    node.copiers[3].before, lane._patience = be_late, 0.2
    with pytest.raises(NotSharedError, match="engine 3 did not copy its KV in time"):
        node.read(0)
    assert late.wait(WAIT_SECONDS)
    lane._patience = WAIT_SECONDS
    old = set(node.pins.pinned)
    node.copiers[3].before = lambda: True
    assert node.right(0)
    assert set(node.pins.pinned) - old, "the region is another one"
    go_on.set()
    # What was late has gone: the mappings of both sides are those of the second read.
    until(lambda: node.pins.held == 2)


def test_memory_that_the_device_cannot_reach_is_refused_and_let_go_of(tmp_path: Path) -> None:
    node = Node(CASES["DP of another engine to TP2"], tmp_path)

    def refuse(_: torch.Tensor) -> None:
        raise NotSharedError("memory of the host cannot be pinned (CUDA error 1)")

    pin, node.pins.pin = node.pins.pin, refuse  # type: ignore[method-assign]
    with pytest.raises(NotSharedError, match="cannot be pinned"):
        node.read(0)
    node.pins.pin = pin  # type: ignore[method-assign]
    assert node.right(0)


def test_an_engine_that_is_not_there_cannot_be_connected_to(tmp_path: Path) -> None:
    node = Node(Case(alone(3), alone(0)), tmp_path)
    with pytest.raises(NotSharedError, match="the runner of engine 2 has ended"):
        node.staged[0].connect(2)
    until(lambda: node.pins.held == 0)
    node.staged[0].connect(3)
    assert node.staged[0].serves(3)
    until(lambda: node.pins.held == 4)  # two lanes, on both sides


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)
