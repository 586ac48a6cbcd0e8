"""Engines whose loops do not answer are given up, but not for breaks of the controller's own."""

import pytest

from shoal.runtime.controller.books.engine_book import EngineState
from shoal.runtime.controller.failures.pulse import PINGS
from shoal.runtime.protocol import messages as m
from tests.runtime.loopback_node import LoopbackNode

TIMEOUT = 4.0


def started(timeout: float | None = TIMEOUT) -> LoopbackNode:
    node = LoopbackNode(2, engine_timeout_seconds=timeout)
    node.settle()
    return node


def dead(node: LoopbackNode) -> frozenset[int]:
    return node.controller.books.engines.in_state(EngineState.DEAD)


def test_engines_that_answer_live() -> None:
    node = started()
    node.run_for(10 * TIMEOUT, tick=0.5)
    assert dead(node) == frozenset()


def test_an_engine_that_does_not_is_given_up_and_its_requests_go_on() -> None:
    node = started()
    for k in range(4):
        node.send(f"r{k}", 10, 5)
    node.controller.turn()
    node.hung = {0}
    node.run_for(TIMEOUT - 1.0, tick=0.5)
    assert dead(node) == frozenset()
    assert node.missing
    node.run_for(2.5, tick=0.5)
    assert dead(node) == {0}
    assert node.missing == []
    node.assert_exact()
    assert node.value("shoal_engine_deaths_total", cause=m.DeathCause.SILENT) == 1
    (order,) = node.network.control_replies["supervisor"]
    assert isinstance(order, m.KillEngines)
    assert list(order.engines) == [0]
    assert "did not answer for 4 s" in order.reason


def test_one_that_was_only_slow_lives() -> None:
    node = started()
    node.hung = {0}
    node.run_for(TIMEOUT - 1.0, tick=0.5)
    node.hung = set()
    node.run_for(3 * TIMEOUT, tick=0.5)
    assert dead(node) == frozenset()


def test_a_break_of_the_controller_is_not_held_against_engines() -> None:
    node = started()
    node.clock.advance(100 * TIMEOUT)  # nobody ran: the machine was suspended
    node.controller.turn()
    node.controller.turn()
    assert dead(node) == frozenset()
    node.run_for(TIMEOUT, tick=0.5)
    assert dead(node) == frozenset()


def test_one_that_is_back_has_all_of_its_time_again() -> None:
    node = LoopbackNode(2, engine_timeout_seconds=TIMEOUT, restart_limit=3)
    node.settle()
    node.hung = {0}
    while dead(node) == frozenset():
        node.run_for(0.1, tick=0.1)
    node.restart(0)
    node.settle()
    node.hung = {0}
    node.run_for(TIMEOUT - 1.0, tick=0.5)
    assert dead(node) == frozenset()
    node.run_for(2.5, tick=0.5)
    assert dead(node) == {0}


def test_without_a_timeout_nobody_is_asked() -> None:
    node = started(None)
    node.hung = {0}
    node.run_for(100.0, tick=10.0)
    assert dead(node) == frozenset()
    assert not node.network.to_engines[0]
    assert node.controller.next_wakeup() is None


def test_the_controller_wakes_to_ask() -> None:
    wakeup = started().controller.next_wakeup()
    assert wakeup == pytest.approx(TIMEOUT / PINGS)
