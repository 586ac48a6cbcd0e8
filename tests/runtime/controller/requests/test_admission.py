"""Who may wait in the pool of a whole node, and how the others end."""

import msgspec
import pytest

from shoal.runtime.config import QUEUED_AHEAD, FakeSettings
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.messages import Outcome
from tests.runtime.loopback_node import LoopbackNode

STEP = 0.5
ONE_SEAT = FakeSettings(
    step_seconds=STEP, num_blocks=64, block_tokens=4, max_num_seqs=1, max_model_len=200
)
BUSY = 1 + QUEUED_AHEAD
"""Requests that fill an engine of ``ONE_SEAT``."""


def turns(node: LoopbackNode, count: int = 3) -> None:
    """Let messages through without letting time pass."""
    for _ in range(count):
        node.controller.turn()
        for engine in sorted(node.agents):
            node.turn_agent(engine)
    node.collect()


def steps(node: LoopbackNode, count: int) -> None:
    """Let time pass, a step of the engines at a time."""
    for _ in range(count):
        node.clock.advance(STEP)
        turns(node)


def busy_node(engines: int = 1, **limits: object) -> LoopbackNode:
    """Return a node whose seats are all taken for longer than a test looks."""
    node = LoopbackNode(engines, settings=ONE_SEAT, **limits)
    turns(node)
    for k in range(BUSY * engines):
        node.send(f"busy{k}", 4, 100)
    turns(node)
    assert len(node.pool) == 0
    return node


def ended(node: LoopbackNode) -> dict[str, tuple[Outcome, int | None]]:
    return {name: (note.outcome, note.status) for name, note in node.ended().items()}


def limits_told(node: LoopbackNode, client: int = 0) -> list[m.PoolLimits]:
    notes = node.network.control_replies.get(f"front-{client}", [])
    return [note for note in notes if isinstance(note, m.PoolLimits)]


# --- deadlines ---


def test_a_request_that_waits_at_its_deadline_is_dropped() -> None:
    node = busy_node()
    node.send("hasty", terms=wire.Terms(deadline=node.clock.now + 1.0))
    node.send("patient", 4, 2)
    turns(node)
    node.clock.advance(0.999)
    turns(node)
    assert ended(node) == {}
    node.clock.advance(0.001)
    turns(node)
    assert ended(node) == {"hasty": (Outcome.EXPIRED, 504)}
    assert node.ended()["hasty"].retry_after is None
    assert node.finish["hasty"] is wire.FinishReason.ABORT
    assert node.outcomes == {Outcome.EXPIRED: 1}
    assert "patient" in node.pool


def test_the_controller_wakes_for_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    node = busy_node()
    node.send("hasty", terms=wire.Terms(deadline=node.clock.now + 1.5))
    turns(node)
    waits: list[float | None] = []
    monkeypatch.setattr(node.network.controller, "wait", lambda t, **_: waits.append(t))
    node.controller.turn()
    assert waits == [1.5]


def test_a_running_request_has_no_deadline() -> None:
    node = LoopbackNode(1, settings=ONE_SEAT)
    turns(node)
    node.send("a", 4, 5, terms=wire.Terms(deadline=node.clock.now + STEP))
    turns(node)
    steps(node, 10)
    assert node.finish["a"] is wire.FinishReason.LENGTH
    assert ended(node) == {}


def test_a_deadline_that_is_over_on_arrival_beats_a_free_unit() -> None:
    node = LoopbackNode(1, settings=ONE_SEAT)
    turns(node)
    node.send("late", terms=wire.Terms(deadline=node.clock.now))
    turns(node)
    assert ended(node) == {"late": (Outcome.EXPIRED, 504)}
    assert node.placed() == {}


# --- limits ---


def test_newcomers_beyond_the_limit_are_refused_the_latest_first() -> None:
    node = busy_node(max_waiting_requests=2)
    for name in "abcd":
        node.send(name)
    turns(node)
    assert ended(node) == dict.fromkeys("cd", (Outcome.POOL_FULL, 503))
    assert "2 requests" in node.ended()["c"].message
    assert [r.id for r in node.pool.all()] == ["a", "b"]
    assert node.outcomes == {Outcome.POOL_FULL: 2}


def test_what_can_start_at_once_is_not_counted() -> None:
    node = LoopbackNode(4, settings=ONE_SEAT, max_waiting_requests=1, max_waiting_tokens=20)
    turns(node)
    for k in range(4 * BUSY + 1):
        node.send(f"r{k}", 10)
    turns(node)
    assert ended(node) == {}
    assert len(node.pool) == 1


def test_waiting_prompt_tokens_are_limited() -> None:
    node = busy_node(max_waiting_tokens=30)
    node.send("a", 20)
    node.send("b", 10)
    node.send("c", 1)
    turns(node)
    assert ended(node) == {"c": (Outcome.POOL_FULL, 503)}
    assert "30 prompt tokens" in node.ended()["c"].message
    assert node.pool.tokens == 30


def test_front_ends_are_told_when_the_pool_is_full_and_when_it_is_not() -> None:
    node = busy_node(max_waiting_requests=1)
    assert limits_told(node) == []
    node.send("a")
    turns(node)
    for client in (0, 1):
        (full,) = limits_told(node, client)
        assert full.full == "the task pool is full: 1 requests may wait"
    node.abort("a")
    turns(node)
    assert limits_told(node)[-1] == m.PoolLimits()
    assert len(limits_told(node)) == 2


def test_a_caller_over_its_own_limit_is_refused_and_the_others_are_not() -> None:
    node = busy_node()
    greedy = wire.Terms(caller="greedy", max_waiting=2)
    for k in range(4):
        node.send(f"g{k}", terms=greedy)
    node.send("other", terms=wire.Terms(caller="other", max_waiting=2))
    turns(node)
    assert ended(node) == dict.fromkeys(("g2", "g3"), (Outcome.CALLER_FULL, 429))
    assert [r.id for r in node.pool.all()] == ["g0", "g1", "other"]
    assert list(limits_told(node)[-1].callers) == ["greedy"]
    node.abort("g0")
    turns(node)
    assert limits_told(node)[-1].callers == {}


def test_a_caller_whose_limit_is_taken_away_waits_like_the_others() -> None:
    node = busy_node()
    for k in range(3):
        node.send(f"g{k}", terms=wire.Terms(caller="greedy", max_waiting=2))
    turns(node)
    assert list(limits_told(node)[-1].callers) == ["greedy"]
    node.abort("g0")
    turns(node)
    for k in range(3, 6):  # the file of keys has changed meanwhile
        node.send(f"g{k}", terms=wire.Terms(caller="greedy"))
    turns(node)
    assert [r.id for r in node.pool.all()] == ["g1", "g3", "g4", "g5"]
    assert limits_told(node)[-1].callers == {}


def test_what_front_ends_refuse_is_counted() -> None:
    node = LoopbackNode(1)
    node.network.control_sends("front-1", m.CountRefused(Outcome.POOL_FULL))
    assert node.value("shoal_requests_total", outcome="pool_full") == 1
    outcomes = [sample.labels for sample in node.metric("shoal_requests_total")]
    assert sorted(outcomes) == sorted((outcome.value,) for outcome in Outcome)


def full_node(waiting: int) -> LoopbackNode:
    """Return a node whose pool has been full for long; its one seat is free every three steps."""
    node = LoopbackNode(1, settings=ONE_SEAT, max_waiting_requests=waiting)
    turns(node)
    for _ in range(60):
        while len(node.pool) < waiting:
            node.send(f"r{len(node.prompts)}", 4, 3)
            turns(node)
        steps(node, 1)
    return node


@pytest.mark.parametrize("newcomers", [3, 50])
def test_the_refused_are_told_how_long_the_pool_takes_to_empty(newcomers: int) -> None:
    waiting = 10
    node = full_node(waiting)
    for k in range(newcomers):
        node.send(f"new{k}")
    turns(node)
    expected = pytest.approx(waiting * 3 * STEP, abs=1)
    assert len(node.ended()) >= newcomers - 1
    assert all(note.retry_after == expected for note in node.ended().values())
    assert limits_told(node)[-1].retry_after == expected


# --- other ends ---


def test_an_abort_in_the_pool_is_noted_for_the_response_that_waits() -> None:
    node = busy_node()
    node.send("a")
    turns(node)
    node.abort("a")
    turns(node)
    assert ended(node) == {"a": (Outcome.ABORTED, None)}
    assert len(node.pool) == 0


def test_what_no_group_can_hold_is_refused_with_the_limit() -> None:
    node = LoopbackNode(2, settings=ONE_SEAT)
    node.settle()
    node.send("long", 201, 1)
    turns(node)
    assert ended(node) == {"long": (Outcome.TOO_LONG, 400)}
    assert "holds 200" in node.ended()["long"].message


def test_what_only_a_dead_engine_s_group_could_hold_is_refused_with_what_is_left() -> None:
    small = FakeSettings(num_blocks=8, block_tokens=4, max_num_seqs=2, max_model_len=60)
    node = LoopbackNode(2, settings=small)
    node.settle()
    node.kill(1)
    node.settle()
    node.send("long", 40, 1)
    turns(node)
    assert ended(node) == {"long": (Outcome.TOO_LONG, 400)}
    assert "holds 32" in node.ended()["long"].message


def test_a_lost_request_says_so() -> None:
    node = busy_node()
    node.send("a")
    node.kill(0)
    node.settle()
    assert ended(node)["a"] == (Outcome.LOST, 500)
    assert ended(node)["busy0"] == (Outcome.LOST, 500)


@pytest.mark.parametrize("text", ["{", '{"deadline": "soon"}'])
def test_terms_that_no_front_end_made_drop_the_message(text: str) -> None:
    node = LoopbackNode(1)
    node.settle()
    fields = [
        "a",
        [1, 2],
        None,
        {"max_tokens": 2},
        None,
        0.0,
        None,
        None,
        None,
        None,
        None,
        0,
        0,
        0,
    ]
    payload = msgspec.msgpack.encode([*fields, {"x-shoal-terms": text}])
    node.network.front_sends(0, wire.RequestType.ADD, [payload])
    node.send("b")
    node.settle()
    assert list(node.placed()) == ["b"]


# --- late binding ---


@pytest.mark.parametrize("seats", [1, 4])
def test_a_unit_never_idles_between_two_steps_while_requests_wait(seats: int) -> None:
    settings = msgspec.structs.replace(ONE_SEAT, max_num_seqs=seats)
    node = LoopbackNode(2, settings=settings)
    turns(node)
    for k in range(12 * seats):
        node.send(f"r{k}", 4, 3)  # all of a batch end in the same step
    turns(node)
    ends = 0
    while len(node.pool):
        node.clock.advance(STEP)
        for engine in node.agents:
            node.turn_agent(engine)  # ends a step; the controller has had no turn yet
            core = node.backends[engine].own
            assert core.in_flight
            ends += 1
        turns(node)
    assert ends > 2 * 3
    steps(node, 10)
    assert node.missing == []
    node.assert_exact()


def test_only_one_request_leaves_the_pool_ahead_of_its_seat() -> None:
    node = busy_node()
    for k in range(5):
        node.send(f"r{k}", 4, 2)
    turns(node)
    core = node.backends[0].own
    assert (core.load.running, core.load.waiting) == (1, QUEUED_AHEAD)
    assert len(node.pool) == 5
