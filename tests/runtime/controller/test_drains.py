"""Engines that are taken out for maintenance: they are emptied, and serve again when resumed."""

import pytest

from shoal.policies.values.layouts import Unit, alone
from shoal.runtime.controller.books.carry_book import CarryStage
from shoal.runtime.controller.reporting.layout_view import engine_views
from shoal.runtime.controller.switches import RETRY_SECONDS
from shoal.runtime.protocol import messages as m
from tests.runtime.loopback_node import LoopbackNode
from tests.units import tp

PAIR, OTHER_PAIR, ALL = tp(0, 1), tp(2, 3), tp(0, 1, 2, 3)
SINGLES = tuple(alone(engine) for engine in range(4))
CARRY = m.Treatment.CARRY


def serving_node(*layout: Unit, requests: int = 8, policy: str = "manual") -> LoopbackNode:
    """Return a node of four engines in this layout, with requests under way."""
    node = LoopbackNode(4, policy=policy)
    node.settle()
    if layout:
        node.switch(*layout)
    for k in range(requests):
        node.send(f"r{k}", 10, 40)
    node.turns(8)
    node.collect()
    return node


def drain(node: LoopbackNode, *engines: int, drained: bool = True) -> m.FromController | None:
    """Take engines out, or let them serve again; return the answer, which comes at once."""
    call = node.call(m.DrainEngines, list(engines), drained)
    node.controller.turn()
    return node.reply(call)


def requests_of(node: LoopbackNode, engine: int) -> int:
    """Return how many requests need an engine."""
    return node.view().engines[engine].requests


def assert_carried(node: LoopbackNode, requests: int) -> None:
    """Everything has ended, so many requests took their KV along, and none was recomputed."""
    node.settle()
    assert node.missing == []
    node.assert_exact()
    assert node.value("shoal_carried_requests_total", outcome="carried") == requests
    assert node.value("shoal_carried_requests_total", outcome="recomputed") == 0
    assert node.view().moves_total == 0
    assert node.outcomes == {m.Outcome.FINISHED: len(node.prompts)}
    assert node.audit() == []


# --- what becomes of requests ---


def test_the_requests_of_a_drained_engine_go_on_elsewhere() -> None:
    node = serving_node()
    held = len(node.controller.books.requests.core(alone(1)).requests)
    assert held == 2
    answer = drain(node, 1)
    assert isinstance(answer, m.LayoutView)
    assert [(e.drained, e.requests) for e in answer.engines] == [
        *((False, 2), (True, 2), (False, 2), (False, 2))
    ]
    node.turns(6)
    assert len(node.controller.books.requests.core(alone(1)).requests) == 0
    assert len(node.missing) == 8
    assert_carried(node, 2)
    assert node.partition == SINGLES


def test_an_engine_counts_what_is_read_from_it() -> None:
    node = serving_node()
    books, counts = node.controller.books, []
    drain(node, 1)
    for _ in range(6):
        node.turns(1)
        is_read = any(carry.stage is CarryStage.IMPORTING for carry in books.carries)
        counts.append((is_read, engine_views(books)[1].requests))
    assert (True, 2) in counts
    assert counts[-1] == (False, 0)


def test_a_group_with_a_drained_engine_is_released() -> None:
    node = serving_node(PAIR, OTHER_PAIR)
    held = len(node.controller.books.requests.core(PAIR).requests)
    drain(node, 0)
    assert_carried(node, held)
    assert node.partition == (alone(0), alone(1), OTHER_PAIR)
    (view,) = [view for view in node.view().switches if view.reason == "drain"]
    assert (view.treatment, view.outcome, view.carried) == ("carry", "done", held)
    assert node.value("shoal_switches_total", reason="drain", outcome="done") == 1


def test_paused_requests_leave_a_drained_engine_too() -> None:
    node = serving_node()
    node.switch(PAIR, alone(2), alone(3), treatment=m.Treatment.HARD)
    assert len(node.missing) == 4
    drain(node, 0)
    # Those of engine 1 go on where they are, because its group is released.
    assert_carried(node, 2)
    assert requests_of(node, 0) == 0


def test_what_comes_to_a_drained_engine_by_a_running_switch_leaves_it_again() -> None:
    node = serving_node(ALL)
    node.set_layout(*SINGLES, treatment=CARRY)
    node.turns(1)
    assert isinstance(drain(node, 3), m.LayoutView)
    node.run_for(2.0)
    assert requests_of(node, 3) == 0
    assert node.partition == SINGLES
    node.settle()
    assert node.missing == []
    node.assert_exact()


def test_a_request_that_only_its_group_can_hold_ends_there() -> None:
    node = LoopbackNode(4)
    node.settle()
    node.switch(PAIR, alone(2), alone(3))
    node.send("long", 300, 40)
    node.turns(2)
    for k in range(12):
        node.send(f"r{k}", 10, 60)
    node.turns(6)
    core = node.controller.books.requests.core(PAIR)
    short = len(core.requests) - 1
    assert short > 1
    drain(node, 1)
    node.turns(8)
    assert list(core.requests) == ["long"]
    assert PAIR in node.partition
    assert not node.controller.snapshot().units[0].serving
    assert_carried(node, short)
    node.run_for(2.0, tick=0.5)
    assert node.partition == SINGLES


def test_what_only_drained_engines_could_hold_waits_until_they_are_resumed() -> None:
    node = LoopbackNode(2)
    node.settle()
    drain(node, 0)
    node.send("long", 300, 40)
    node.send("short", 10, 10)
    node.settle()
    assert node.missing == ["long"]
    assert "long" in node.pool
    drain(node, 0, drained=False)
    node.switch(PAIR)
    assert_carried(node, 0)


# --- drained engines serve nothing ---


def test_no_request_starts_on_a_drained_engine_until_it_is_resumed() -> None:
    node = serving_node(requests=0)
    drain(node, 0, 1, 2)
    for k in range(8):
        node.send(f"a{k}")
    node.settle()
    assert set(node.placed().values()) == {alone(3)}
    drain(node, 0, 1, 2, drained=False)
    for k in range(8):
        node.send(f"b{k}")
    node.turns(2)
    assert set(node.placed().values()) == set(SINGLES)
    assert_carried(node, 0)


def test_a_policy_forms_groups_of_the_other_engines_only() -> None:
    node = LoopbackNode(4, max_group=2, policy="static-tp")
    node.settle()
    assert list(node.partition) == [PAIR, OTHER_PAIR]
    for k in range(4):
        node.send(f"r{k}", 10, 40)
    node.turns(8)
    drain(node, 0)
    node.run_for(2.0, tick=0.5)
    assert list(node.partition) == [alone(0), alone(1), OTHER_PAIR]
    assert node.missing == []
    node.assert_exact()
    assert node.view().policy_errors == 0
    drain(node, 0, drained=False)
    node.run_for(5.0, tick=0.5)
    assert list(node.partition) == [PAIR, OTHER_PAIR]


def test_a_drained_engine_that_died_comes_back_drained() -> None:
    node = LoopbackNode(2, restart_limit=3)
    node.settle()
    drain(node, 1)
    node.kill(1)
    node.settle()
    node.restart(1)
    node.settle()
    assert node.view().engines[1].state == "serving"
    assert node.view().engines[1].drained
    node.send("a")
    node.send("b")
    node.settle()
    assert set(node.placed().values()) == {alone(0)}


def test_while_only_drained_engines_are_left_the_node_is_not_ready() -> None:
    node = LoopbackNode(2, restart_limit=3)
    node.settle()
    drain(node, 1)
    node.kill(0)
    node.settle()
    view = node.view()
    assert (view.ready, view.reason) == (False, "engines [0] are lost, engines [1] are drained")
    assert node.value("shoal_ready") == 0


# --- answers ---


@pytest.mark.parametrize(
    ("engines", "status", "error"),
    [
        ([0, 4], 400, "there are no engines [4]: this node has 0..3"),
        ([0, 1, 2, 3], 409, "no engine would serve without engines [0, 1, 2, 3]"),
    ],
)
def test_what_cannot_be_drained(engines: list[int], status: int, error: str) -> None:
    node = serving_node(requests=0)
    answer = drain(node, *engines)
    assert isinstance(answer, m.CallFailed)
    assert (answer.status, answer.error) == (status, error)
    assert not any(engine.drained for engine in node.view().engines)


def test_the_last_engine_that_serves_cannot_be_drained() -> None:
    node = serving_node(requests=0)
    drain(node, 0, 1)
    drain(node, 2)
    answer = drain(node, 3)
    assert isinstance(answer, m.CallFailed)
    assert answer.status == 409
    assert isinstance(drain(node, 2), m.LayoutView)  # nothing changes


def test_a_layout_with_a_group_of_a_drained_engine_is_refused() -> None:
    node = serving_node(requests=0)
    drain(node, 0)
    call = node.set_layout(PAIR, OTHER_PAIR)
    node.settle()
    answer = node.reply(call)
    assert isinstance(answer, m.CallFailed)
    assert (answer.status, answer.error) == (
        409,
        "unit [0, 1] cannot be formed: engines [0] are drained",
    )
    assert [tuple(group.engines) for group in node.view().unavailable] == [*((0, 1), (0, 1, 2, 3))]
    node.switch(alone(0), alone(1), OTHER_PAIR)


def test_metrics_say_which_engines_are_drained() -> None:
    node = serving_node(requests=0)
    drain(node, 2)
    values = {s.labels: s.value for s in node.metric("shoal_engine_drained")}
    assert values == {("0",): 0, ("1",): 0, ("2",): 1, ("3",): 0}


# --- failures ---


def test_a_release_that_fails_is_tried_again() -> None:
    node = serving_node(PAIR, OTHER_PAIR)
    drain(node, 0)
    node.kill(1)
    node.settle()
    node.run_for(RETRY_SECONDS + 2.0, tick=0.5)
    assert OTHER_PAIR in node.partition
    assert PAIR not in node.partition
    assert node.missing == []
    node.assert_exact()


def test_the_controller_wakes_up_for_what_could_not_leave_yet() -> None:
    node = LoopbackNode(2)
    node.settle()
    node.switch(PAIR)
    node.send("long", 300, 40)
    node.turns(8)
    drain(node, 0)
    node.turns(3)
    assert PAIR in node.partition
    until = node.controller.next_wakeup()
    assert until is not None
    assert 0.0 < until <= 1.0
