"""When a scheduler's process collects garbage."""

import gc

import pytest

from shoal.policies.values.layouts import alone
from shoal.runtime.engine.agent import garbage
from shoal.runtime.engine.agent.garbage import LONGEST_SECONDS, PAUSE_SECONDS, Garbage
from shoal.runtime.protocol import messages as m
from tests.runtime.engine.agent.agent_bench import Bench
from tests.runtime.loopback_node import request_payload


class Time:
    """A clock, and how often garbage was collected."""

    def __init__(self) -> None:
        self.now, self.collections = 100.0, 0
        self.garbage = Garbage(lambda: self.now, self._collect)

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


def test_python_looks_through_new_objects_only() -> None:
    before = gc.get_threshold()
    try:
        garbage.collect_only_young()
        assert gc.get_threshold() == (*before[:2], garbage.NEVER)
    finally:
        gc.set_threshold(*before)
