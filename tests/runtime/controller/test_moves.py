"""Soft preempt: requests that are taken out of a unit go on elsewhere, token by token the same."""

from shoal.policies.values.layouts import alone
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.wire import FinishReason
from tests.runtime.loopback_node import LoopbackNode
from tests.units import tp

SOFT, HARD = m.Treatment.SOFT, m.Treatment.HARD
ALONE = (alone(0), alone(1), alone(2), alone(3))


def started(**settings) -> LoopbackNode:
    node = LoopbackNode(4, **settings)
    node.settle()
    return node


def assert_sound(node: LoopbackNode) -> None:
    assert node.missing == []
    node.assert_exact()
    assert {node.finish[r] for r in node.prompts} == {FinishReason.LENGTH}
    assert node.audit() == []


def test_a_soft_bind_moves_what_runs_into_the_group() -> None:
    node = started()
    for k in range(8):
        node.send(f"r{k}", 10, 40)
    node.turns(12)
    node.collect()
    half = {r: len(tokens) for r, tokens in node.tokens.items()}
    assert len(half) == 8
    assert all(0 < tokens < 40 for tokens in half.values())
    view = node.switch(tp(0, 1, 2, 3), treatment=SOFT)
    assert (view.moved, view.paused, view.drained) == (8, 0, 0)
    assert set(node.placed().values()) >= {tp(0, 1, 2, 3)}
    assert_sound(node)
    assert node.view().moves_total == 8


def test_a_soft_release_moves_what_runs_out_of_the_group() -> None:
    node = started()
    node.switch(tp(0, 1, 2, 3))
    for k in range(6):
        node.send(f"r{k}", 20, 40)
    node.turns(10)
    assert {node.controller.books.requests.where(f"r{k}") for k in range(6)} == {tp(0, 1, 2, 3)}
    view = node.switch(*ALONE, treatment=SOFT)
    assert view.moved == 6
    assert_sound(node)


def test_requests_paused_in_other_groups_move_too() -> None:
    node = started()
    node.switch(tp(0, 1), alone(2), alone(3))
    for k in range(4):
        node.send(f"r{k}", 12, 30)
    node.turns(8)
    assert node.switch(*ALONE, treatment=HARD).paused > 0
    node.switch(tp(0, 1, 2, 3), treatment=SOFT)
    assert_sound(node)


def test_a_request_can_move_again_and_again() -> None:
    node = started()
    node.send("r", 10, 60)
    for k in range(6):
        node.turns(8)
        units = [tp(0, 1, 2, 3)] if k % 2 == 0 else ALONE
        node.set_layout(*units, treatment=SOFT)
    node.settle()
    assert node.view().moves_total > 2
    assert_sound(node)


def test_a_moved_request_can_be_withdrawn() -> None:
    node = started()
    node.send("r", 10, 60)
    node.turns(8)
    node.set_layout(tp(0, 1, 2, 3), treatment=SOFT)
    node.abort("r")
    node.settle()
    assert node.audit() == []
    assert len(node.pool) == 0
