"""When a scheduler's process collects garbage."""

import gc

import pytest
from msgspec import structs

from shoal.policies.values.layouts import alone
from shoal.runtime.engine.agent import garbage
from shoal.runtime.engine.agent.garbage import LONGEST_SECONDS, PAUSE_SECONDS, Garbage
from shoal.runtime.protocol import messages as m
from tests.runtime.engine.agent.agent_bench import GROUP, Bench, started
from tests.runtime.engine.agent.test_carrying import (
    CARRY,
    OTHER,
    OWN,
    STEP,
    carried,
    expect,
    only,
    take_in,
)
from tests.runtime.loopback_node import request_payload


class Time:
    """A clock, and how often garbage was collected."""

    def __init__(self) -> None:
        self.now, self.collections = 100.0, 0
        self.automatic = list[bool]()
        self.garbage = Garbage(lambda: self.now, self._collect, self.automatic.append)

    def _collect(self) -> None:
        self.collections += 1

    def after(self, seconds: float, *, idle: bool) -> int:
        """Return how many collections there were, after so long."""
        self.now += seconds
        self.garbage.tend(idle=idle)
        return self.collections


def test_an_engine_that_has_worked_collects_when_it_is_idle() -> None:
    time = Time()
    assert time.after(PAUSE_SECONDS + 1, idle=False) == 0, "requests wait for it"
    assert time.after(0.1, idle=True) == 1


def test_an_idle_engine_collects_once() -> None:
    time = Time()
    assert time.garbage.due_in() is None
    time.after(1.0, idle=False)
    assert time.garbage.due_in() is None, "a step wakes it"
    assert time.after(1.0, idle=True) == 0
    assert time.garbage.due_in() == pytest.approx(PAUSE_SECONDS - 2.0)
    assert time.after(PAUSE_SECONDS - 2.0, idle=True) == 1
    assert time.garbage.due_in() is None
    assert time.after(2 * PAUSE_SECONDS, idle=True) == 1, "nothing has changed since"


def test_one_that_is_never_idle_collects_at_last() -> None:
    time = Time()
    assert time.after(LONGEST_SECONDS - 1, idle=False) == 0
    assert time.after(1.0, idle=False) == 1
    assert time.after(PAUSE_SECONDS, idle=True) == 2


def test_an_agent_with_a_request_is_not_idle() -> None:
    bench, time = Bench(), Time()
    bench.agent._garbage = time.garbage
    payload = request_payload("a", [1] * 4, 3, client=0)
    bench.network.controller.to_engine(0, m.AddRequest(alone(0), "a"), payload)
    bench.agent.turn()
    time.now += PAUSE_SECONDS
    bench.agent.turn()
    assert time.collections == 0
    for _ in range(50):
        bench.clock.advance(1.0)
        bench.agent.turn(0.0)
    assert time.collections == 1


def test_python_is_told_once_that_requests_stand_still() -> None:
    time = Time()
    for hurries in (False, True, True, False, False):
        time.garbage.hold(hurries=hurries)
    assert time.automatic == [False, True]


def test_python_collects_nothing_until_the_first_step_of_requests_that_come_has_ended() -> None:
    bench, time = started(step_seconds=STEP), Time()
    bench.bind()
    expect(bench, "r")
    bench.tell(m.Release(5, GROUP, m.Treatment.HARD))
    bench.agent._garbage = time.garbage
    bench.tell(m.Resume(5, GROUP, []))
    assert time.automatic == [], "the step before their last one may take long"
    whole = carried("r")
    bench.tell(m.Allot(CARRY, OWN, OTHER, [structs.replace(whole, tokens=whole.tokens[:-1])]))
    assert time.automatic == [False]
    take_in(bench, whole)
    bench.turn(3)
    assert time.automatic == [False]
    bench.clock.advance(STEP)
    bench.turn(2)
    assert time.automatic == [False, True]


def test_python_collects_nothing_from_the_turn_on_in_which_requests_get_their_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, time, then = started(step_seconds=STEP), Time(), list[list[bool]]()
    bench.agent._garbage = time.garbage
    allot = bench.backend.own.allot

    def noting(request: m.CarriedRequest) -> bool:
        then.append([*time.automatic])
        return allot(request)

    monkeypatch.setattr(bench.backend.own, "allot", noting)
    expect(bench, "r")
    bench.tell(m.Allot(CARRY, OWN, OTHER, [carried("r")]))
    assert then == [[False]]


def test_python_collects_again_when_the_group_of_a_dead_member_never_ends_its_step() -> None:
    bench, time = started(step_seconds=STEP), Time()
    bench.agent._garbage = time.garbage
    expect(bench, "r", unit=GROUP)
    bench.bind()
    take_in(bench, carried("r"), unit=GROUP)
    bench.turn(3)
    assert bench.backend.groups[GROUP].in_flight
    assert time.automatic == [False]
    bench.tell(m.Release(5, GROUP, m.Treatment.HARD))
    assert bench.backend.groups[GROUP].in_flight
    assert time.automatic == [False, True]


def test_python_collects_nothing_while_a_source_takes_its_last_step() -> None:
    bench, time = started(step_seconds=STEP), Time()
    bench.agent._garbage = time.garbage
    bench.add("leaves")
    bench.clock.advance(STEP)
    bench.turn(2)
    bench.tell(m.Export(CARRY, OWN, ["leaves"]))
    assert time.automatic == [False]
    bench.clock.advance(STEP)
    only(bench.turn(), m.Exported)
    assert time.automatic == [False, True]


def test_an_agent_lets_python_collect_or_not() -> None:
    try:
        garbage.let_python_collect(False)
        assert not gc.isenabled()
    finally:
        garbage.let_python_collect(True)
    assert gc.isenabled()


def test_python_looks_through_new_objects_only() -> None:
    before = gc.get_threshold()
    try:
        garbage.collect_only_young()
        assert gc.get_threshold() == (*before[:2], garbage.NEVER)
    finally:
        gc.set_threshold(*before)
