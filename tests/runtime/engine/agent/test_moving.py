"""Requests leave their core between its steps, with the tokens that they have."""

import pytest

from shoal.policies.values.layouts import alone
from shoal.runtime.engine.fake.fake_tokens import expected_tokens
from shoal.runtime.protocol import messages as m
from tests.runtime.engine.agent.agent_bench import GROUP, Bench, started

STEP = 0.5
PROMPT = [1] * 8


@pytest.fixture
def bench() -> Bench:
    """Return an engine with two requests, of which a step is in flight."""
    bench = started(step_seconds=STEP)
    bench.add("leaves", tokens=9)
    bench.add("stays", tokens=9)
    for _ in range(2):
        bench.clock.advance(STEP)
        bench.turn(2)
    return bench


def test_requests_leave_when_the_step_in_flight_is_collected(bench: Bench) -> None:
    own = bench.backend.own
    assert bench.tell(m.MoveOut(alone(0), ["leaves"]), turns=3) == []
    assert (bench.agent.active, own.in_flight, own.num_requests) == ([], 1, 2)
    bench.clock.advance(STEP)
    (moved,) = bench.turn()
    assert isinstance(moved, m.Moved)
    tokens = moved.tokens["leaves"]
    assert tokens == expected_tokens(PROMPT, len(tokens))
    assert len(tokens) == 3
    assert own.num_requests == 1


def test_the_core_goes_on_without_them(bench: Bench) -> None:
    own = bench.backend.own
    bench.tell(m.MoveOut(alone(0), ["leaves"]))
    bench.clock.advance(STEP)
    bench.turn()
    assert bench.agent.next_wakeup() == 0.0
    bench.turn()
    assert (bench.agent.active, own.in_flight, own.num_requests) == ([own], 1, 1)


def test_what_is_asked_for_meanwhile_leaves_with_them(bench: Bench) -> None:
    bench.tell(m.MoveOut(alone(0), ["leaves"]))
    bench.tell(m.MoveOut(alone(0), ["stays"]))
    bench.clock.advance(STEP)
    (moved,) = bench.turn()
    assert isinstance(moved, m.Moved)
    assert set(moved.tokens) == {"leaves", "stays"}


def test_requests_that_have_ended_are_left_out(bench: Bench) -> None:
    bench.tell(m.MoveOut(alone(0), ["ended"]))
    bench.clock.advance(STEP)
    assert bench.turn() == [m.Moved(0, {})]


def test_an_idle_core_answers_at_once(bench: Bench) -> None:
    assert bench.tell(m.MoveOut(GROUP, ["ended"])) == [m.Moved(0, {})]
