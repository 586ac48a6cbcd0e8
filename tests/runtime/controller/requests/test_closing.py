"""What a whole node hands back when it is to end, and when."""

import pytest

from shoal.policies.values.layouts import alone
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.messages import Outcome
from shoal.runtime.protocol.transport import SUPERVISOR
from tests.runtime.controller.requests.test_admission import (
    BUSY,
    ONE_SEAT,
    STEP,
    busy_node,
    ended,
    steps,
    turns,
)
from tests.runtime.loopback_node import LoopbackNode
from tests.units import tp

HANDED_BACK = (Outcome.HANDED_BACK, 503)


def end(node: LoopbackNode, seconds: float) -> None:
    node.network.control_sends(SUPERVISOR, m.EndNode(seconds))
    turns(node)


def test_what_waits_starts_in_the_first_half_of_the_time() -> None:
    node = LoopbackNode(1, settings=ONE_SEAT)
    turns(node)
    for name in ("a", "b", "c"):
        node.send(name, 4, 4)
    turns(node)
    assert len(node.pool) == 1
    end(node, 40 * STEP)
    steps(node, 19)
    assert node.finish == dict.fromkeys("abc", wire.FinishReason.LENGTH)
    node.assert_exact()


def test_what_still_waits_at_half_time_is_handed_back_and_what_runs_goes_on() -> None:
    node = busy_node()
    node.send("waiting")
    end(node, 20 * STEP)
    steps(node, 9)
    assert ended(node) == {}
    steps(node, 1)
    assert ended(node) == {"waiting": HANDED_BACK}
    assert node.ended()["waiting"].retry_after == 1
    assert node.finish == {"waiting": wire.FinishReason.ERROR}
    assert node.controller.books.requests.where("busy0") == alone(0)


def test_what_still_runs_at_the_end_is_handed_back_and_frees_its_engine() -> None:
    node = busy_node()
    end(node, 4 * STEP)
    steps(node, 3)
    assert ended(node) == {}
    steps(node, 3)
    names = [f"busy{k}" for k in range(BUSY)]
    assert ended(node) == dict.fromkeys(names, HANDED_BACK)
    # A client that has tokens must not take what it has for the whole.
    assert node.tokens["busy0"]
    assert node.finish == dict.fromkeys(names, wire.FinishReason.ERROR)
    assert node.outcomes == {Outcome.HANDED_BACK: BUSY}
    assert node.backends[0].cores[alone(0)].load.running == 0
    node.assert_exact()


def test_no_time_hands_everything_back_at_once_and_newcomers_too() -> None:
    node = busy_node()
    node.send("waiting")
    turns(node)
    end(node, 0.0)
    assert set(ended(node).values()) == {HANDED_BACK}
    assert len(ended(node)) == BUSY + 1
    node.send("late")
    turns(node)
    assert ended(node)["late"] == HANDED_BACK


def test_a_second_word_can_only_leave_less_time() -> None:
    node = busy_node()
    end(node, 100.0)
    end(node, 0.0)
    assert len(ended(node)) == BUSY
    other = busy_node()
    end(other, 0.0)
    end(other, 100.0)
    other.send("late")
    turns(other)
    assert ended(other)["late"] == HANDED_BACK


def test_interrupted_and_paused_requests_are_handed_back() -> None:
    node = LoopbackNode(2, settings=ONE_SEAT)
    turns(node)
    node.send("paused", 4, 100)
    turns(node)
    unit = node.controller.books.requests.where("paused")
    assert unit is not None
    node.set_layout([0, 1])
    steps(node, 3)
    assert node.partition == (tp(0, 1),)
    assert node.controller.books.requests.where("paused") == unit
    end(node, 0.0)
    assert ended(node) == {"paused": HANDED_BACK}
    lost = busy_node(2)
    lost.kill(1)
    lost.controller.turn()
    assert lost.controller.books.requests.interrupted
    lost.network.control_sends(SUPERVISOR, m.EndNode(0.0))
    turns(lost)
    assert set(ended(lost).values()) == {HANDED_BACK}
    assert len(ended(lost)) == 2 * BUSY
    assert not lost.controller.books.requests.interrupted


def test_the_controller_wakes_for_both_times(monkeypatch: pytest.MonkeyPatch) -> None:
    node = busy_node()
    end(node, 4.0)
    waits: list[float | None] = []
    monkeypatch.setattr(node.network.controller, "wait", lambda t, **_: waits.append(t))
    node.controller.turn()
    node.clock.advance(2.0)
    node.controller.turn()
    node.controller.turn()
    assert waits == [2.0, 0.0, 2.0]


def test_a_node_that_is_to_end_is_not_ready() -> None:
    node = LoopbackNode(1, settings=ONE_SEAT)
    turns(node)
    assert node.view().ready
    end(node, 10.0)
    view = node.view()
    assert not view.ready
    assert view.reason == "the server is shutting down"
