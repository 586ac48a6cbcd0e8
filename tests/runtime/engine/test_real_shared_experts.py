"""Routed experts of which real engines keep a range each: fp32, greedy, tokens equal to stock's.

If two engines share them, a node of four has layouts that stream, layouts that compute what their
engines keep, and layouts of which each member computes a half of that. ``test_real_experts`` has
engines with all experts, and ``test_real_fp8_experts`` has shared ones in FP8. With
``SHOAL_TESTS=all``, four engines share experts, too, and so do engines of other families.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.policies.values.layouts import Unit, alone
from shoal.policies.values.partition import Partition, singles
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages import Mode
from shoal.runtime.whole_experts import ALWAYS
from tests.depth import among, only_deep
from tests.random_checkpoint import write_checkpoint
from tests.runtime.engine import probes
from tests.runtime.engine.every_layout import (
    ALL,
    COMPARED,
    before_damage_with_it_and_after,
    first,
)
from tests.runtime.engine.prompts import MODELS_WITH_EXPERTS, make_model, random_prompts
from tests.runtime.engine.real_node import RealNode, stock_tokens
from tests.runtime.engine.scripted_shift import Script
from tests.units import pp, tp, tp_units
from tests.variety import is_varied

ENGINES, TOKENS = 4, 24
WIDEST = tp(0, 1, 2, 3)
KV = {"kv_cache_memory_bytes": 24 << 20}
"""Whole weights leave room for requests."""
Expected = list[list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen3-moe", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected(model: Path) -> Expected:
    return stock_tokens(model, ALL, TOKENS)


@pytest.fixture(scope="module", params=among([2], 4))
def node(request: pytest.FixtureRequest, model: Path) -> Iterator[RealNode]:
    share = request.param
    options: dict[str, Any] = {"max_sp": 2, "whole_experts": ALWAYS, "restart_limit": 9} | KV
    with RealNode(model, ENGINES, share_weights=share, **options) as node:
        yield node


def test_tokens_are_stocks_in_every_layout(node: RealNode, expected: Expected) -> None:
    assert is_varied(expected)
    partitions: list[Partition] = [
        singles(ENGINES),
        (WIDEST,),
        tp_units(ENGINES, 2),
        (tp(0, 1), alone(2), alone(3)),
    ]
    for partition in partitions:
        node.switch(*partition)
        assert node.generate_spread(node.partition, ALL, COMPARED) == first(expected)
    assert node.audit() == []


def test_tokens_are_stocks_by_sequence(node: RealNode, expected: Expected) -> None:
    """A member has few of a step's tokens, and streams the experts that its base lacks."""
    node.switch()
    node.probe_all(probes.take_modes)
    node.script(Script.RANDOM)
    with node.bound(WIDEST):
        assert node.generate(WIDEST, ALL, COMPARED) == first(expected)
    node.script(Script.TP)
    assert all(ran[Mode.SP] > 0 for ran in node.probe_all(probes.take_modes))


def test_carried_requests_go_on_with_the_right_tokens(node: RealNode) -> None:
    node.switch()
    prompts = random_prompts((5, 33, 64, 150), seed=41)
    requests = [node.submit(alone(e), [prompt], 60)[0] for e, prompt in enumerate(prompts)]
    for partition in ((WIDEST,), singles(ENGINES)):
        node.wait_for_tokens(requests, len(node.tokens[requests[0]]) + 3)
        view = node.switch(*partition, treatment=m.Treatment.CARRY)
        assert (view.carried > 0, view.recomputed) == (True, {})
    found = node.wait(requests)
    assert node.generate_spread(singles(ENGINES), prompts, 60) == found
    assert node.audit() == []


def test_an_engine_keeps_its_part_of_the_experts(node: RealNode) -> None:
    share = node.config.share_weights
    sizes = node.probe_all(probes.expert_bytes)
    assert len({own for own, _ in sizes}) == 1
    assert all(own * share == whole for own, whole in sizes)


def test_tokens_stay_the_same_across_changes_of_memory(node: RealNode, expected: Expected) -> None:
    node.switch()
    for share in (1, node.config.share_weights):
        requests = [node.submit(alone(e), ALL[e::ENGINES], TOKENS) for e in range(ENGINES)]
        node.wait_for_tokens([r for some in requests for r in some], 2)
        node.change_memory(share)
        for engine, some in enumerate(requests):
            assert node.wait(some) == expected[engine::ENGINES]
        with node.bound(WIDEST):
            assert node.generate(WIDEST, ALL, COMPARED) == first(expected)
        node.switch()
        assert node.generate_spread(singles(ENGINES), ALL, COMPARED) == first(expected)
    assert node.audit() == []


def test_experts_of_an_engine_that_has_died_are_read_and_come_back(
    node: RealNode, expected: Expected
) -> None:
    node.switch()
    kept = [node.probe(engine, probes.kept_weights) for engine in range(ENGINES)]
    running = node.submit(alone(0), ALL[:4], TOKENS)
    node.wait_for_tokens(running, 3)
    node.kill("runner-1")
    assert node.wait(running) == expected[:4]
    node.bring_back(WIDEST)
    assert [node.probe(engine, probes.kept_weights) for engine in range(ENGINES)] == kept
    for unit in (alone(1), WIDEST):
        node.switch(*([unit] if unit.is_group else []))
        assert node.generate(unit, ALL[:4], TOKENS) == expected[:4]
    assert node.audit() == []


@pytest.mark.parametrize(
    ("damage", "unit"),
    [(probes.read_slots_early, alone(0)), (probes.order_experts_by_rank, WIDEST)],
    ids=["slots", "ranks"],
)
def test_experts_of_another_layer_or_member_change_the_tokens(
    node: RealNode, damage: probes.Damage, unit: Unit
) -> None:
    if unit.is_group and node.config.share_weights == ENGINES:
        pytest.skip("no layout has more members than share weights")
    found = before_damage_with_it_and_after(node, unit, damage, COMPARED)
    assert found[0] == found[2]
    assert found[0] != found[1]


# --- other families, and pipelines ----------------------------------------------------------------


@only_deep
@pytest.mark.parametrize("name", MODELS_WITH_EXPERTS)
def test_every_family_generates_stocks_tokens(name: str, tmp_path: Path) -> None:
    """In all layouts of two engines, with whole stages of a pipeline, and with whole weights."""
    # vLLM wants experts in each stage, and the first layer of GLM 4.5 has none.
    write_checkpoint(model := tmp_path / name, replace(MODELS_WITH_EXPERTS[name], layers=4))
    expected = stock_tokens(model, ALL, TOKENS)
    pair = pp(0, 1)
    options: dict[str, Any] = {"max_sp": 2, "max_pp": 2, "whole_experts": ALWAYS} | KV
    with RealNode(model, 2, share_weights=2, **options) as node:
        for number, level in enumerate(((2, 1), (2, 2), (2, 1), (1, 1))):
            if number:
                node.change_memory(*level)
            for partition in (singles(2), (tp(0, 1),), (pair,)):
                node.switch(*partition)
                assert node.generate_spread(partition, ALL, TOKENS) == expected
        node.script(Script.RANDOM)
        node.switch(tp(0, 1))
        assert node.generate(tp(0, 1), ALL, TOKENS) == expected
        assert node.audit() == []
