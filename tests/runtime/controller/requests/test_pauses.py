"""What becomes of requests that a hard switch has paused, and whose unit does not come back."""

from shoal.policies.values.layouts import alone
from shoal.runtime.controller.requests.pauses import MANUAL_PAUSE_SECONDS, PAUSE_SECONDS
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages import Outcome
from shoal.runtime.protocol.wire import FinishReason
from tests.runtime.loopback_node import LoopbackNode
from tests.units import tp

ALONE = (alone(0), alone(1), alone(2), alone(3))
TOGETHER = tp(0, 1, 2, 3)
LIMIT = 100.0


def node_with_requests(*layout: tuple[int, ...], policy: str = "manual") -> LoopbackNode:
    """Return a node of this layout with four requests under way, one of which cannot be moved."""
    node = LoopbackNode(4, pause_limit_seconds=LIMIT)
    node.settle()
    if layout != ALONE:
        node.switch(*layout)
    for k in range(3):
        node.send(f"r{k}", 10, 40)
    node.send("pinned", 10, 40, presence_penalty=0.5)
    node.turns(8)
    if policy != "manual":
        node.call(m.SetPolicy, policy)
    node.collect()
    assert all(0 < len(tokens) < 40 for tokens in node.tokens.values())
    assert len(node.tokens) == 4
    return node


def test_an_operators_pause_lasts_for_a_while_and_costs_no_recomputation() -> None:
    node = node_with_requests(*ALONE)
    node.switch(TOGETHER, treatment=m.Treatment.HARD)
    node.run_for(MANUAL_PAUSE_SECONDS - 1.0, tick=1.0)
    assert len(node.missing) == 4
    assert node.switch(*ALONE).resumed == 4
    assert node.missing == []
    node.assert_exact()
    assert node.view().moves_total == 0


def test_what_a_hard_release_has_paused_moves_though_no_policy_decides() -> None:
    node = node_with_requests(TOGETHER)
    assert node.switch(*ALONE, treatment=m.Treatment.HARD).paused == 4
    node.run_for(MANUAL_PAUSE_SECONDS + 1.0, tick=1.0)
    assert node.missing == ["pinned"]
    node.assert_exact()
    assert node.view().moves_total == 3
    assert node.audit() == []


def test_what_a_hard_bind_has_paused_moves_though_no_policy_decides() -> None:
    node = node_with_requests(*ALONE)
    assert node.switch(TOGETHER, treatment=m.Treatment.HARD).paused == 4
    node.run_for(MANUAL_PAUSE_SECONDS + 1.0, tick=1.0)
    assert node.missing == ["pinned"]
    node.assert_exact()
    assert node.audit() == []


def test_under_a_policy_that_decides_it_moves_sooner() -> None:
    node = node_with_requests(*ALONE)
    node.switch(TOGETHER, treatment=m.Treatment.HARD)
    node.call(m.SetPolicy, "static-tp")
    node.run_for(PAUSE_SECONDS - 1.0, tick=1.0)
    assert len(node.missing) == 4
    node.run_for(2.0, tick=1.0)
    assert node.missing == [], "what cannot be moved goes on beside the group"
    node.assert_exact()
    assert node.view().moves_total == 3
    assert node.partition == (TOGETHER,)


def test_the_controller_wakes_up_for_it_by_itself() -> None:
    node = node_with_requests(TOGETHER)
    node.switch(*ALONE, treatment=m.Treatment.HARD)
    for _ in range(2):
        until = node.controller.next_wakeup()
        assert until is not None
        assert 0.0 < until <= LIMIT
        node.clock.advance(until)
        node.settle()
    assert node.missing == ["pinned"]


def test_what_cannot_move_goes_on_when_its_unit_is_back() -> None:
    node = node_with_requests(TOGETHER)
    node.switch(*ALONE, treatment=m.Treatment.HARD)
    node.run_for(LIMIT - 1.0, tick=1.0)
    node.switch(TOGETHER)
    assert node.missing == []
    node.assert_exact()
    assert node.finish["pinned"] is FinishReason.LENGTH


def test_what_cannot_move_ends_at_the_limit_with_a_reason() -> None:
    node = node_with_requests(TOGETHER)
    node.switch(*ALONE, treatment=m.Treatment.HARD)
    node.run_for(LIMIT + 1.0, tick=1.0)
    assert node.missing == []
    node.assert_exact()
    assert node.finish["pinned"] is FinishReason.ERROR
    note = node.ended()["pinned"]
    assert (note.outcome, note.status) == (Outcome.LOST, 500)
    assert "[0, 1, 2, 3] was not back within 100 s" in note.message
    assert node.audit() == []
    node.switch(TOGETHER)
    assert not node.controller.books.requests.paused


def test_each_pause_counts_from_its_own_start() -> None:
    node = node_with_requests(TOGETHER)
    for _ in range(2):
        node.switch(*ALONE, treatment=m.Treatment.HARD)
        node.run_for(MANUAL_PAUSE_SECONDS - 5.0, tick=1.0)
        assert "r0" in node.missing
        node.set_layout(TOGETHER)
        node.turns(6)
    node.settle()
    assert node.missing == []
    assert node.view().moves_total == 0
