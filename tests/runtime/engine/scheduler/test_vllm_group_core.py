"""What a group's core tells the members' runners, and which blocks it wants of them."""

from types import SimpleNamespace

import pytest

from shoal.runtime.engine.link import instructions as steps
from shoal.runtime.engine.scheduler import vllm_core
from shoal.runtime.engine.scheduler.vllm_group_core import LEASE_CHUNK, VllmGroupCore
from tests.runtime.engine.scheduler.stand_in import StandIn
from tests.units import tp

GROUP = tp(0, 1)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setattr(vllm_core, "EngineCore", stand_in)
    return stand_in


@pytest.fixture
def core(vllm: StandIn) -> VllmGroupCore:
    return VllmGroupCore(GROUP, SimpleNamespace(), log_stats=False, max_sp=1)


def test_a_lease_is_opened_and_grown_at_the_runners_too(vllm: StandIn, core: VllmGroupCore) -> None:
    core.bind(7, {0: [5, 6], 1: [8, 9]}, seed=3)
    core.grow({0: [4], 1: [2]})
    bind, extend = vllm.sent
    assert bind == steps.Bind(7, [1, 2], {0: [5, 6], 1: [8, 9]}, 3)
    assert extend == steps.Extend([3], {0: [4], 1: [2]})
    assert (core.lease_blocks, core.load.free_blocks) == (3, 3)


def test_a_release_sends_the_runners_back_and_returns_what_nobody_holds(
    vllm: StandIn, core: VllmGroupCore
) -> None:
    core.bind(7, {0: [5, 6, 7], 1: [8, 9, 3]}, seed=3)
    vllm.run("paused", 4, 8)
    core.release(7)
    returned = core.shrink(3)
    assert vllm.sent[1:] == [steps.Detach(7)]
    assert {engine: sorted(blocks) for engine, blocks in returned.items()} == {
        0: [6, 7],
        1: [3, 9],
    }
    assert core.lease_blocks == 1
    assert core.check_integrity() == []


def test_blocks_that_no_request_holds_are_noticed(vllm: StandIn, core: VllmGroupCore) -> None:
    core.bind(7, {0: [5], 1: [8]}, seed=3)
    core.block_pool.get_new_blocks(1)
    assert core.check_integrity() == ["core [0, 1]: 1 virtual blocks held by no request"]


def test_blocks_are_lacking_in_chunks(vllm: StandIn, core: VllmGroupCore) -> None:
    core.bind(7, {0: [5], 1: [8]}, seed=3)
    assert core.blocks_lacking == 0
    vllm.waiting.append(SimpleNamespace(num_tokens=7))
    assert core.blocks_lacking == LEASE_CHUNK
    vllm.waiting.append(SimpleNamespace(num_tokens=64))
    assert core.blocks_lacking == 2 + 17 - 1  # with a token more each, and one block is free
    assert core.blocks_wanted == 0, "nothing is cached"


def test_blocks_are_wanted_for_two_steps_that_evict_nothing(vllm: StandIn) -> None:
    vllm.turn_caching_on()
    core = VllmGroupCore(GROUP, SimpleNamespace(), log_stats=False, max_sp=1)
    lent = range(1, 13)
    core.bind(7, {0: [*lent], 1: [*lent]}, seed=3)
    assert core.blocks_wanted == 0, "a step of 16 tokens takes up to 5 blocks"
    vllm.cache(3)
    assert core.load.free_blocks == 12
    assert core.blocks_wanted == 3 * 5 - 9
    vllm.run("running", 4, 8)
    assert core.blocks_wanted == 1 + 3 * 5 - 8, "a running request may need its next one"
    core.shrink(8)
    assert core.block_pool.get_cached_block(b"0", [0]) is not None, "the others went first"
    assert core.blocks_wanted == 1 + 3 * 5
