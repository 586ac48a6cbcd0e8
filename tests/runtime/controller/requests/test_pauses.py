"""What becomes of requests that a hard switch has paused, and whose unit does not come back."""

from shoal.policies.values.layouts import alone
from shoal.policies.values.partition import Partition
from shoal.runtime.controller.requests.pauses import MANUAL_PAUSE_SECONDS, PAUSE_SECONDS
from shoal.runtime.protocol import messages as m
from tests.runtime.loopback_node import LoopbackNode
from tests.units import tp

ALONE = (alone(0), alone(1), alone(2), alone(3))
TOGETHER = tp(0, 1, 2, 3)
HARD = m.Treatment.HARD


def node_with_requests(*layout: Partition) -> LoopbackNode:
    """Return a node of this layout with four requests under way."""
    node = LoopbackNode(4)
    node.settle()
    if layout != ALONE:
        node.switch(*layout)
    for k in range(4):
        node.send(f"r{k}", 10, 40)
    node.turns(8)
    node.collect()
    assert all(0 < len(tokens) < 40 for tokens in node.tokens.values())
    assert len(node.tokens) == 4
    return node


def assert_carried(node: LoopbackNode, requests: int) -> None:
    """All requests have ended, and so many of them took their KV to another unit."""
    assert node.missing == []
    node.assert_exact()
    assert node.value("shoal_carried_requests_total", outcome="carried") == requests
    assert node.view().moves_total == 0
    assert node.audit() == []


def test_an_operators_pause_lasts_for_a_while_and_costs_no_recomputation() -> None:
    node = node_with_requests(*ALONE)
    node.switch(TOGETHER, treatment=HARD)
    node.run_for(MANUAL_PAUSE_SECONDS - 1.0, tick=1.0)
    assert len(node.missing) == 4
    assert node.switch(*ALONE).resumed == 4
    assert_carried(node, 0)


def test_what_a_hard_release_has_paused_is_carried_though_no_policy_decides() -> None:
    node = node_with_requests(TOGETHER)
    assert node.switch(*ALONE, treatment=HARD).paused == 4
    node.run_for(MANUAL_PAUSE_SECONDS + 1.0, tick=1.0)
    assert_carried(node, 4)


def test_what_a_hard_bind_has_paused_is_carried_though_no_policy_decides() -> None:
    node = node_with_requests(*ALONE)
    assert node.switch(TOGETHER, treatment=HARD).paused == 4
    node.run_for(MANUAL_PAUSE_SECONDS + 1.0, tick=1.0)
    assert_carried(node, 4)


def test_under_a_policy_that_decides_it_is_carried_sooner() -> None:
    node = node_with_requests(*ALONE)
    node.switch(TOGETHER, treatment=HARD)
    node.call(m.SetPolicy, "static-tp")
    node.run_for(PAUSE_SECONDS - 1.0, tick=1.0)
    assert len(node.missing) == 4
    node.run_for(2.0, tick=1.0)
    assert_carried(node, 4)
    assert node.partition == (TOGETHER,)


def test_a_carry_at_once_leaves_nothing_paused() -> None:
    node = node_with_requests(*ALONE)
    node.switch(TOGETHER, treatment=HARD)
    view = node.switch(TOGETHER, treatment=m.Treatment.CARRY)
    assert (view.carried, view.paused) == (4, 0)
    assert_carried(node, 4)


def test_the_controller_wakes_up_for_it_by_itself() -> None:
    node = node_with_requests(TOGETHER)
    node.switch(*ALONE, treatment=HARD)
    until = node.controller.next_wakeup()
    assert until is not None
    assert 0.0 < until <= MANUAL_PAUSE_SECONDS
    node.clock.advance(until)
    node.settle()
    assert_carried(node, 4)


def test_what_no_unit_there_can_hold_waits_in_the_pool_for_one() -> None:
    node = LoopbackNode(4)
    node.settle()
    node.switch(TOGETHER)
    node.send("long", 300, 40)
    node.turns(8)
    node.switch(*ALONE, treatment=HARD)
    node.run_for(MANUAL_PAUSE_SECONDS + 1.0, tick=1.0)
    assert "long" in node.pool
    node.switch(TOGETHER)
    assert node.missing == []
    node.assert_exact()
    assert node.view().moves_total == 1


def test_each_pause_counts_from_its_own_start() -> None:
    node = node_with_requests(TOGETHER)
    for _ in range(2):
        node.switch(*ALONE, treatment=HARD)
        node.run_for(MANUAL_PAUSE_SECONDS - 5.0, tick=1.0)
        assert "r0" in node.missing
        node.set_layout(TOGETHER)
        node.turns(6)
    node.settle()
    assert_carried(node, 0)
