"""A node of which no engine serves: how long requests wait for one, and how they end."""

from typing import Any

import msgspec
import pytest

from shoal.policies.values.layouts import alone
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.messages import Outcome
from shoal.runtime.protocol.transport import SUPERVISOR
from tests.runtime.controller.requests.test_admission import (
    ONE_SEAT,
    busy_node,
    ended,
    steps,
    turns,
)
from tests.runtime.loopback_node import LoopbackNode

LIMIT = 20.0
UNAVAILABLE = (Outcome.UNAVAILABLE, 503)
STREAMS = 24


def stop(node: LoopbackNode, engine: int) -> None:
    """Find an engine stopped by a signal, as the supervisor does a moment after it was."""
    node.agents.pop(engine, None)
    died = m.EngineDied(engine, "stopped by a signal", m.DeathCause.STOPPED, restarts=True)
    node.network.control_sends(SUPERVISOR, died)


def lost_node(limit: float | None = LIMIT, **settings: Any) -> LoopbackNode:
    """Return a node in the middle of streams whose two engines are lost at once."""
    node = LoopbackNode(2, restart_limit=5, outage_limit_seconds=limit, **settings)
    node.settle()
    for k in range(STREAMS):
        node.send(f"r{k}", 10, 40)
    node.turns(6)
    node.collect()
    assert node.tokens
    assert not node.finish
    node.hung = {0}  # stopped
    node.kill(1)
    turns(node)
    stop(node, 0)
    turns(node)
    return node


def pass_time(node: LoopbackNode, seconds: float) -> None:
    node.clock.advance(seconds)
    turns(node)


def test_streams_of_engines_that_are_lost_at_once_end_at_the_limit() -> None:
    node = lost_node()
    pass_time(node, LIMIT - 0.5)
    assert ended(node) == {}
    assert len(node.missing) == STREAMS
    pass_time(node, 1.0)
    assert ended(node) == dict.fromkeys(node.prompts, UNAVAILABLE)
    assert node.outcomes == {Outcome.UNAVAILABLE: STREAMS}
    note = node.ended()["r0"]
    assert note.message == "no engine has served for 20 s"
    assert note.retry_after == 10
    # A client that has tokens must not take what it has for the whole.
    assert set(node.finish.values()) == {wire.FinishReason.ERROR}
    assert not node.pool.all()
    assert not node.controller.books.requests.interrupted


def test_they_go_on_when_an_engine_is_back_before() -> None:
    node = lost_node()
    pass_time(node, LIMIT - 0.5)
    node.restart(0)
    node.settle()
    pass_time(node, 10 * LIMIT)
    node.settle()
    assert ended(node) == {}
    assert node.outcomes == {Outcome.FINISHED: STREAMS}
    assert set(node.finish.values()) == {wire.FinishReason.LENGTH}
    node.assert_exact()
    assert node.audit() == []


def test_what_comes_later_is_refused_at_once_until_an_engine_serves() -> None:
    node = lost_node()
    pass_time(node, LIMIT + 1.0)
    node.send("late")
    turns(node)
    assert ended(node)["late"] == UNAVAILABLE
    node.restart(1)
    node.settle()
    node.send("in time")
    node.settle()
    assert node.finish["in time"] is wire.FinishReason.LENGTH
    assert "in time" not in ended(node)


def test_another_outage_has_its_own_limit() -> None:
    node = lost_node()
    pass_time(node, LIMIT - 1.0)
    node.restart(0)
    node.settle()
    pass_time(node, 2.0)
    node.kill(0)
    node.send("waiting")
    turns(node)
    pass_time(node, LIMIT - 1.0)
    assert "waiting" not in ended(node)
    pass_time(node, 2.0)
    assert ended(node)["waiting"] == UNAVAILABLE


def test_requests_of_which_no_front_end_has_spoken_end_too() -> None:
    node = LoopbackNode(1, restart_limit=5, outage_limit_seconds=LIMIT)
    node.settle()
    node.send("r", 10, 40)
    node.turns(6)
    node.kill(0)
    node.controller.turn()
    assert list(node.controller.books.requests.interrupted) == ["r"]
    node.clock.advance(LIMIT + 1.0)
    node.controller.turn()
    node.clock.advance(LIMIT + 1.0)
    node.controller.turn()
    assert ended(node) == {"r": UNAVAILABLE}
    assert node.outcomes == {Outcome.UNAVAILABLE: 1}


def test_one_engine_that_serves_is_enough() -> None:
    node = busy_node(2, restart_limit=5, outage_limit_seconds=LIMIT)
    node.kill(0)
    for k in range(STREAMS):
        node.send(f"waiting{k}", 4, 100)
    turns(node)
    assert len(node.pool) >= STREAMS
    node.clock.advance(10 * LIMIT)
    node.controller.turn()
    assert node.outcomes == {}


def test_without_a_limit_requests_wait() -> None:
    node = lost_node(None)
    pass_time(node, 1000 * LIMIT)
    assert ended(node) == {}
    assert len(node.missing) == STREAMS


def test_what_a_front_end_has_ended_while_the_controller_hung_counts_once() -> None:
    node = LoopbackNode(1, settings=ONE_SEAT)
    turns(node)
    for name in ("runs", "waits", "unread"):
        node.send(name, 4, 100)
    turns(node)
    node.send("late", 4, 100)  # the controller hangs: it finds both messages at once
    names = ["runs", "waits", "late", "unknown"]
    word = [msgspec.msgpack.encode(names)]
    node.network.front_sends(0, wire.RequestType.UNANSWERED, word)
    turns(node)
    assert node.outcomes == {Outcome.UNAVAILABLE: 3}
    assert [node.controller.books.requests.where(name) for name in names] == [None] * 4
    assert not node.pool.all()
    steps(node, 2)
    load = node.backends[0].cores[alone(0)].load
    assert (load.running, load.waiting) == (1, 0), "the other goes on"


def test_the_first_start_is_no_outage() -> None:
    node = LoopbackNode(1, outage_limit_seconds=LIMIT)
    node.send("early")
    node.controller.turn()
    node.clock.advance(100 * LIMIT)
    node.controller.turn()
    node.controller.turn()
    assert ended(node) == {}
    node.settle()
    assert node.finish["early"] is wire.FinishReason.LENGTH


def test_the_controller_wakes_for_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    node = lost_node()
    waits: list[float | None] = []
    monkeypatch.setattr(node.network.controller, "wait", lambda t, **_: waits.append(t))
    node.controller.turn()
    node.clock.advance(LIMIT)
    node.controller.turn()
    node.controller.turn()
    assert waits == [LIMIT, 0.0, None]
