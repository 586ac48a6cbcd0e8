"""An engine's own core lends blocks of vLLM's pool, and knows which it can spare."""

from types import SimpleNamespace

import pytest

from shoal.policies.values.layouts import alone
from shoal.runtime.engine.scheduler import vllm_core
from shoal.runtime.engine.scheduler.vllm_own_core import VllmOwnCore
from tests.runtime.engine.scheduler.stand_in import BLOCKS, StandIn


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setattr(vllm_core, "EngineCore", stand_in)
    return stand_in


@pytest.fixture
def core(vllm: StandIn) -> VllmOwnCore:
    return VllmOwnCore(alone(3), SimpleNamespace(), log_stats=False)


def test_what_is_lent_comes_back(core: VllmOwnCore) -> None:
    assert core.num_blocks == BLOCKS
    blocks = core.lend(5)
    assert (len(blocks), core.lent, core.load.free_blocks) == (5, frozenset(blocks), BLOCKS - 5)
    assert len(core.lend(BLOCKS)) == BLOCKS - 5
    core.take_back(sorted(core.lent))
    assert (core.lent, core.load.free_blocks) == (frozenset(), BLOCKS)
    with pytest.raises(KeyError):
        core.take_back(blocks)


def test_blocks_that_cache_nothing_are_lent_first(vllm: StandIn) -> None:
    vllm.turn_caching_on()
    core = VllmOwnCore(alone(3), SimpleNamespace(), log_stats=False)
    vllm.cache(6)
    lent = core.lend(BLOCKS - 6)
    assert cached(core) == [0, 1, 2, 3, 4, 5]
    lent += core.lend(2)
    assert cached(core) == [0, 1, 2, 3], "the least lately used go first"
    core.take_back(lent)
    assert cached(core) == [0, 1, 2, 3], "what was lent is found by nobody"
    core.lend(BLOCKS - 4)
    assert cached(core) == [0, 1, 2, 3]


def cached(core: VllmOwnCore) -> list[int]:
    """Return which blocks of ``StandIn.cache`` are in the prefix cache."""
    return [k for k in range(BLOCKS) if core.block_pool.get_cached_block(b"%d" % k, [0])]


def test_urgent_lending_preempts_the_latest_first(vllm: StandIn, core: VllmOwnCore) -> None:
    vllm.run("early", 24, 8)
    vllm.run("late", 24, 8)
    vllm.prev_step_scheduled_req_ids = {"early", "late"}
    assert len(core.lend(6, urgent=True)) == 6
    assert [request.request_id for request in vllm.running] == ["early"]
    assert vllm.prev_step_scheduled_req_ids == {"early"}


def test_nobody_is_preempted_while_a_step_is_in_flight(vllm: StandIn, core: VllmOwnCore) -> None:
    vllm.run("early", 24, 8)
    core._in_flight.append(SimpleNamespace())
    assert len(core.lend(BLOCKS, urgent=True)) == BLOCKS - 6
    assert len(vllm.running) == 1


def test_lost_and_doubly_held_blocks_are_noticed(core: VllmOwnCore) -> None:
    core.lend(2)
    assert core.check_integrity() == []
    (lost,) = core.block_pool.get_new_blocks(1)
    assert core.check_integrity() == [
        f"engine 3: {BLOCKS - 1} blocks free, lent, copied ahead or given up, expected {BLOCKS}"
    ]
    core.block_pool.free_blocks([lost])
    core._lent[lost.block_id] = lost
    assert f"engine 3: lent blocks not held once: [{lost.block_id}]" in core.check_integrity()
