"""Moves that a policy plans: who goes, when, and what else gets its turn."""

from dataclasses import replace

import pytest

from shoal.policies import registry
from shoal.policies.values.snapshot import Move
from shoal.runtime.config import BACKGROUND_PRIORITY, FakeSettings
from shoal.runtime.controller import handovers
from shoal.runtime.protocol import messages as m
from tests.runtime.controller.moving_script import GROUP, OTHER, PARTITION, SOURCE, Script, turns
from tests.runtime.loopback_node import LoopbackNode

SETTINGS = FakeSettings(
    num_blocks=400,
    block_tokens=4,
    max_num_seqs=16,
    max_model_len=800,
    max_num_batched_tokens=16,
)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script(serves_batches=True)
    monkeypatch.setitem(registry.POLICIES, "script", script.policy)
    return script


@pytest.fixture
def node(script: Script) -> LoopbackNode:
    node = LoopbackNode(4, policy="script", settings=SETTINGS, restart_limit=3)
    node.settle()
    assert node.controller.books.units.partition == PARTITION
    return node


def held(node: LoopbackNode, unit) -> list[str]:
    return list(node.controller.books.requests.core(unit).requests)


def start(node: LoopbackNode, count: int, tokens: int = 300) -> None:
    """Send requests, and let all of them run."""
    for k in range(count):
        node.send(f"r{k}", 8, tokens)
    turns(node, 10)


def handed_over(node: LoopbackNode) -> float:
    return node.controller.books.statistics.carries.departures.total("handover")


def finish(node: LoopbackNode) -> None:
    node.settle()
    assert node.missing == []
    node.assert_exact()
    assert node.audit() == []
    assert node.view().policy_errors == 0
    assert node.value("shoal_carried_requests_total", outcome="recomputed") == 0


def test_the_latest_requests_go_on_in_the_group(node: LoopbackNode, script: Script) -> None:
    start(node, 5)
    script.always(Move(SOURCE, GROUP, 2))
    turns(node, 1)
    script.always()
    turns(node, 20)
    assert sorted(held(node, GROUP)) == ["r3", "r4"]
    assert held(node, SOURCE) == ["r0", "r1", "r2"]
    assert handed_over(node) == 2
    finish(node)


def test_what_is_under_way_is_in_the_snapshot_and_nobody_goes_twice(
    node: LoopbackNode, script: Script
) -> None:
    start(node, 4)
    script.always(Move(SOURCE, GROUP, 1))
    turns(node, 40)
    under_way = [seen.moves for seen in script.seen if seen.moves]
    assert set(under_way) == {(Move(SOURCE, GROUP, 1),)}
    assert all(seen.switching for seen in script.seen if seen.moves)
    assert handed_over(node) == 4, "each once, one after the other"
    assert sorted(held(node, GROUP)) == ["r0", "r1", "r2", "r3"]
    finish(node)


def test_moves_between_other_units_overlap(node: LoopbackNode, script: Script) -> None:
    start(node, 4)
    script.always(Move(SOURCE, GROUP, 1), Move(SOURCE, OTHER, 1))
    turns(node, 1)
    assert len(node.controller.books.carries.ids) == 2
    script.always()
    turns(node, 20)
    assert [len(held(node, unit)) for unit in PARTITION] == [1, 2, 1]
    finish(node)


def test_a_request_stays_until_its_prompt_is_computed(node: LoopbackNode, script: Script) -> None:
    """A step has 16 tokens at most, so this prompt takes twenty of them."""
    script.always(Move(SOURCE, GROUP, 1))
    node.send("long", 320, 60)
    turns(node, 12)
    assert held(node, SOURCE) == ["long"]
    assert not node.tokens.get("long")
    assert handed_over(node) == 0
    turns(node, 40)
    assert handed_over(node) == 1
    finish(node)


def test_an_audit_gets_its_turn_while_moves_follow_each_other(
    node: LoopbackNode, script: Script
) -> None:
    start(node, 8)
    # While one move ends, another one is under way.
    script.always(Move(SOURCE, GROUP, 1), Move(GROUP, OTHER, 1))
    turns(node, 3)
    script.always(*(Move(a, b, 1) for a in PARTITION for b in PARTITION if a != b))
    turns(node, 20)
    assert all(seen.moves for seen in script.seen[-12:])
    call = node.call(m.AuditNode)
    turns(node, 12)
    reply = node.reply(call)
    assert isinstance(reply, m.AuditDone)
    assert reply.problems == []
    before = handed_over(node)
    turns(node, 20)
    assert handed_over(node) > before, "and then they go on"
    script.always()
    finish(node)


def test_now_and_then_all_moves_end_before_the_next_begins(
    node: LoopbackNode, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handovers, "WINDOW_SECONDS", 2.0)
    start(node, 8, 600)
    node.hung = {0}
    script.always(Move(SOURCE, GROUP, 1))
    turns(node, 1)
    assert handed_over(node) == 1
    script.always(Move(SOURCE, OTHER, 1))
    turns(node, 6, 0.1)
    within = handed_over(node)
    assert within > 1, "moves overlap"
    turns(node, 6, 0.4)
    late = handed_over(node)
    turns(node, 6, 0.1)
    assert handed_over(node) == late < 8, "the first move has not ended"
    node.hung = set()
    turns(node, 10)
    assert handed_over(node) > late
    script.always()
    finish(node)


def test_nothing_moves_while_an_engine_is_drained(node: LoopbackNode, script: Script) -> None:
    start(node, 3)
    node.call(m.DrainEngines, [3], True)
    turns(node, 10)
    script.moves_while_dead = True
    script.always(Move(SOURCE, GROUP, 1))
    turns(node, 20)
    assert handed_over(node) == 0
    script.always()
    finish(node)


def test_requests_stay_if_the_group_dies(node: LoopbackNode, script: Script) -> None:
    start(node, 3)
    script.always(Move(SOURCE, GROUP, 2))
    turns(node, 1)
    script.always()
    node.kill(1)
    node.settle()
    assert held(node, GROUP) == []
    finish(node)


def test_nothing_moves_to_a_dead_unit(node: LoopbackNode, script: Script) -> None:
    start(node, 3)
    node.kill(3)
    script.always(Move(SOURCE, OTHER, 1))
    script.moves_while_dead = True
    turns(node, 10)
    assert handed_over(node) == 0
    script.always()
    finish(node)


@pytest.mark.parametrize("serves_batches", [True, False])
def test_background_requests_are_the_policys_if_it_serves_batches(
    script: Script, monkeypatch: pytest.MonkeyPatch, serves_batches: bool
) -> None:
    policy = replace(script.policy, serves_batches=serves_batches)
    monkeypatch.setitem(registry.POLICIES, "script", policy)
    node = LoopbackNode(4, policy="script", settings=SETTINGS)
    node.settle()
    node.send("r0", 8, 5, priority=BACKGROUND_PRIORITY)
    node.settle()
    seen = any(one.pool for one in script.seen)
    assert seen == serves_batches
