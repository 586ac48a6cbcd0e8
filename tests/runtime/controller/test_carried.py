"""Carries through the whole protocol: requests go on in other units, token by token the same."""

import pytest

from shoal.policies.values.layouts import alone
from shoal.policies.values.partition import Partition
from shoal.runtime.config import FakeSettings
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.wire import FinishReason
from tests.runtime.loopback_node import LoopbackNode
from tests.units import pp, tp

CARRY = m.Treatment.CARRY
ALONE = (alone(0), alone(1), alone(2), alone(3))
PAIRS = (tp(0, 1), tp(2, 3))
PIPELINES = (pp(0, 1), pp(2, 3))
LONG, BOTH = (pp(0, 1, 2, 3),), (pp(0, 1, 2, 3, stages=2),)
ALL = (tp(0, 1, 2, 3),)
PROMPT = 10
ROOMY = FakeSettings(num_blocks=256, block_tokens=4, max_num_seqs=8, max_model_len=400)


def under_way(
    *layout: Partition, requests: int = 8, settings: FakeSettings = ROOMY
) -> LoopbackNode:
    """Return a node of this layout whose requests have some of their tokens."""
    node = LoopbackNode(4, settings=settings, max_pp=4)
    node.settle()
    if layout != ALONE:
        node.switch(*layout)
    for k in range(requests):
        node.send(f"r{k}", PROMPT, 40)
    node.turns(10)
    node.collect()
    assert len(node.tokens) == requests
    assert all(0 < len(tokens) < 40 for tokens in node.tokens.values())
    return node


def assert_sound(node: LoopbackNode) -> None:
    assert node.missing == []
    node.assert_exact()
    assert {node.finish[r] for r in node.prompts} == {FinishReason.LENGTH}
    assert node.audit() == []
    assert not len(node.controller.books.carries)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        *[(ALONE, ALL), (ALL, ALONE), (PAIRS, ALL), (ALL, PAIRS), (ALONE, PAIRS), (PAIRS, ALONE)],
        *[(ALONE, LONG), (LONG, ALL), (ALL, BOTH), (BOTH, ALONE), (PIPELINES, LONG)],
        *[(PAIRS, PIPELINES), (LONG, BOTH)],
    ],
)
def test_requests_go_on_and_no_token_is_computed_twice(before: Partition, after: Partition) -> None:
    node = under_way(*before)
    view = node.switch(*after, treatment=CARRY)
    assert (view.carried, view.recomputed, view.paused, view.moved) == (8, {}, 0, 0)
    assert_sound(node)
    assert node.value("shoal_step_tokens_total", kind="prefill") == 8 * PROMPT


def test_requests_are_carried_again_and_again() -> None:
    node = under_way(*ALONE, requests=4)
    layouts = (ALL, PAIRS, ALONE, PAIRS, ALL, ALONE)
    for layout in layouts:
        node.set_layout(*layout, treatment=CARRY)
        node.turns(6)
    node.settle()
    assert node.value("shoal_carried_requests_total", outcome="carried") >= 4 * 3
    assert_sound(node)


def test_what_finds_no_room_is_computed_again() -> None:
    tight = FakeSettings(num_blocks=20, block_tokens=4, max_num_seqs=8, max_model_len=80)
    node = LoopbackNode(4, settings=tight)
    node.settle()
    for k in range(16):
        node.send(f"r{k}", PROMPT, 20)
    node.turns(14)
    call = node.set_layout(*PAIRS, treatment=CARRY)
    node.run_for(5.0)
    reply = node.reply(call)
    assert isinstance(reply, m.SwitchDone)
    assert reply.switch.carried > 0
    assert reply.switch.recomputed == {"no_room": 16 - reply.switch.carried}
    assert_sound(node)


def test_a_carried_request_can_be_withdrawn_at_any_time() -> None:
    for turns in range(8):
        node = under_way(*ALONE)
        node.set_layout(*ALL, treatment=CARRY)
        node.turns(turns)
        node.abort("r3")
        node.abort("r4")
        node.settle()
        assert node.missing == []
        node.assert_exact()
        assert node.audit() == []
        assert not len(node.controller.books.carries), turns


@pytest.mark.slow
@pytest.mark.parametrize("engine", range(4))
def test_an_engine_may_die_at_any_time(engine: int) -> None:
    for turns in range(8):
        node = under_way(*PAIRS)
        node.set_layout(*ALL, treatment=CARRY)
        node.turns(turns)
        node.kill(engine)
        node.run_for(12.0, tick=1.0)
        dead = node.controller.books.engines.gone
        for other in dead:
            node.agents.pop(other, None)
        node.run_for(40.0, tick=1.0)
        assert node.missing == [], turns
        node.assert_exact()
        assert node.audit() == []
        assert not len(node.controller.books.carries), turns
