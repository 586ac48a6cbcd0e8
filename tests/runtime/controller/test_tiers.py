"""Requests whose KV waits in the host's memory: on their way there and back, and when things fail.

The blocks of fake engines and of their tiers remember whose tokens they hold, so tokens are wrong
if a block is used too early.
"""

from dataclasses import replace

import msgspec
import pytest

from shoal.policies import registry
from shoal.policies.values.layouts import tier_of
from shoal.policies.values.snapshot import Move
from shoal.runtime.config import FakeSettings
from shoal.runtime.controller import handovers
from shoal.runtime.controller.requests.pauses import PAUSE_SECONDS
from shoal.runtime.engine.agent.tier_core import TierCore
from shoal.runtime.engine.fake.faults import Faults, Seam
from shoal.runtime.protocol import messages as m
from tests.runtime.controller.moving_script import GROUP, OTHER, SOURCE, Script, turns
from tests.runtime.loopback_node import LoopbackNode

TIER_BLOCKS = 40
SETTINGS = FakeSettings(
    num_blocks=60,
    block_tokens=4,
    max_num_seqs=16,
    max_model_len=200,
    max_num_batched_tokens=16,
    tier_blocks=TIER_BLOCKS,
)
TIER = tier_of(2)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script(moves_while_dead=True, parks=True)
    monkeypatch.setitem(registry.POLICIES, "script", script.policy)
    return script


def started(settings: FakeSettings = SETTINGS, **limits) -> LoopbackNode:
    limits = {"restart_limit": 3, "policy": "script"} | limits
    node = LoopbackNode(4, settings=settings, **limits)
    node.settle()
    return node


@pytest.fixture
def node(script: Script) -> LoopbackNode:
    return started()


def held(node: LoopbackNode, unit) -> list[str]:
    return sorted(node.controller.books.requests.core(unit).requests)


def tier(node: LoopbackNode, outcome: str) -> float:
    return node.value("shoal_tier_requests_total", outcome=outcome)


def parked(node: LoopbackNode, script: Script, count: int, output: int = 60) -> None:
    """Compute the prompts of some requests on one engine, and park them."""
    for k in range(count):
        node.send(f"r{k}", 8, output)
    turns(node, 10)
    script.always(Move(SOURCE, TIER, count))
    turns(node, 1)
    script.always()
    turns(node, 20)


def finish(node: LoopbackNode) -> None:
    node.settle()
    assert node.missing == []
    node.assert_exact()
    assert node.audit() == []
    assert node.view().policy_errors == 0
    assert node.value("shoal_tier_kv_blocks", engine="2", state="used") == 0


def test_requests_wait_in_the_hosts_memory_and_go_on_in_a_group(
    node: LoopbackNode, script: Script
) -> None:
    parked(node, script, 3)
    assert held(node, TIER) == ["r0", "r1", "r2"]
    assert (tier(node, "parked"), node.audit()) == (3, [])
    before = {name: list(tokens) for name, tokens in node.tokens.items()}
    state = next(state for state in script.seen[-1].tiers if state.unit == TIER)
    assert len(state.tokens) == script.seen[-1].parked == script.seen[-1].requests == 3
    assert state.free_blocks < TIER_BLOCKS
    source = next(unit for unit in script.seen[-1].units if unit.unit == SOURCE)
    assert (source.requests, source.free_blocks, source.paused) == (0, 60, 0)
    turns(node, 20)
    assert {name: list(tokens) for name, tokens in node.tokens.items()} == before, "they wait"
    script.always(Move(TIER, GROUP, 2))
    turns(node, 2)
    script.always()
    turns(node, 10)
    assert held(node, TIER) == ["r2"], "the oldest go first"
    script.always(Move(TIER, OTHER, 1))
    finish(node)
    assert (tier(node, "hit"), tier(node, "miss")) == (3, 0)
    assert node.value("shoal_tier_bytes_total", direction="read") == 0  # a token has none here


def test_what_finds_no_room_stays_where_it_is(node: LoopbackNode, script: Script) -> None:
    """Each request takes eleven or twelve of the tier's 40 blocks."""
    for k in range(5):
        node.send(f"r{k}", 40, 60)
    turns(node, 25)
    script.always(Move(SOURCE, TIER, 5))
    turns(node, 30)
    assert 2 <= len(held(node, TIER)) <= 3
    assert tier(node, "no_room") == 0
    script.always(Move(TIER, GROUP, 1))
    finish(node)


def test_a_source_that_dies_loses_what_is_in_its_tier(node: LoopbackNode, script: Script) -> None:
    parked(node, script, 3)
    node.kill(2)
    turns(node, 1)
    assert held(node, TIER) == []
    node.restart(2)
    finish(node)
    assert tier(node, "hit") == 0


@pytest.mark.parametrize("seam", [Seam.ADOPT, Seam.COPY])
def test_an_engine_may_die_while_it_parks(script: Script, seam: Seam) -> None:
    node = started(faults={2: Faults(die_at=seam)})
    parked(node, script, 3)
    finish(node)


def test_a_group_that_dies_while_it_reads_leaves_the_rest(
    node: LoopbackNode, script: Script
) -> None:
    parked(node, script, 3)
    script.always(Move(TIER, GROUP, 2))
    turns(node, 1)
    node.kill(1)
    script.moves = lambda seen: (Move(TIER, OTHER, 1),) if OTHER in seen.partition else ()
    finish(node)


@pytest.mark.parametrize("wait", range(6))
def test_clients_may_leave_at_any_moment(script: Script, wait: int) -> None:
    node = started(msgspec.structs.replace(SETTINGS, copy_seconds=0.01, token_bytes=1))
    for k in range(4):
        node.send(f"r{k}", 8, 60)
    turns(node, 10)
    script.always(Move(SOURCE, TIER, 4))
    turns(node, 1)
    script.always()
    turns(node, wait, 0.004)
    node.abort("r1")
    node.abort("r2")
    turns(node, 10, 0.01)
    assert held(node, TIER) == ["r0", "r3"]
    node.abort("r3")
    script.always(Move(TIER, GROUP, 1))
    turns(node, wait, 0.004)
    node.abort("r0")
    node.run_for(1.0)
    node.settle()
    assert node.audit() == []
    assert node.value("shoal_tier_kv_blocks", engine="2", state="used") == 0


def test_under_another_policy_what_waits_goes_on_after_a_while(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.POLICIES, "script", replace(script.policy, parks=False))
    node = started()
    parked(node, script, 3)
    assert len(held(node, TIER)) == 3
    turns(node, 20, PAUSE_SECONDS / 10)
    assert held(node, TIER) == []
    finish(node)


def test_what_waits_goes_on_while_an_engine_is_drained(node: LoopbackNode, script: Script) -> None:
    parked(node, script, 3)
    node.call(m.DrainEngines, [3], True)
    turns(node, 40, PAUSE_SECONDS / 10)
    assert held(node, TIER) == []
    finish(node)


def test_a_drained_engines_tier_is_emptied(node: LoopbackNode, script: Script) -> None:
    parked(node, script, 3)
    node.call(m.DrainEngines, [2], True)
    turns(node, 20, 0.1)
    assert held(node, TIER) == []
    finish(node)


def test_only_an_engine_alone_parks_and_only_in_its_own_tier(
    node: LoopbackNode, script: Script
) -> None:
    for k in range(3):
        node.send(f"r{k}", 8, 60)
    turns(node, 10)
    script.always(Move(SOURCE, tier_of(3), 1))
    turns(node, 5)
    assert held(node, tier_of(3)) == []
    assert node.view().policy_errors > 0


def test_without_the_option_there_are_no_tiers(script: Script) -> None:
    node = started(msgspec.structs.replace(SETTINGS, tier_blocks=0))
    assert script.seen[-1].tiers == ()
    node.send("r", 8, 5)
    node.settle()
    node.assert_exact()


def test_blocks_that_two_requests_get_are_noticed(
    node: LoopbackNode, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above can fail: what the tier's blocks hold decides about the tokens."""
    take = TierCore._take

    def take_the_same(core: TierCore, *request):
        free = list(core._free)
        blocks = take(core, *request)
        core._free = free
        return blocks

    monkeypatch.setattr(TierCore, "_take", take_the_same)
    parked(node, script, 3)
    assert any("tier of engine 2" in problem for problem in node.audit())
    script.always(Move(TIER, GROUP, 3))
    node.settle()
    with pytest.raises(AssertionError):
        node.assert_exact()


def test_prompts_that_are_not_computed_stay(
    node: LoopbackNode, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller guesses by steps; the engine knows."""
    monkeypatch.setattr(handovers.Handovers, "_decodes", lambda *_: True)
    node.send("long", 100, 60)
    turns(node, 2)
    script.always(Move(SOURCE, TIER, 1))
    turns(node, 3)
    assert held(node, TIER) == []
    assert held(node, SOURCE) == ["long"]
    turns(node, 40, handovers.PARK_SECONDS / 4)
    assert held(node, TIER) == ["long"]
    script.always(Move(TIER, GROUP, 1))
    finish(node)
