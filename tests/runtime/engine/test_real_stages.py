"""Pipelines of engines that share weights: a stage streams what its engine does not keep.

``SHOAL_TESTS=all`` adds four engines that share weights, and a death.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.policies.values.layouts import Unit, alone
from shoal.policies.values.level import WHOLE, Level
from shoal.runtime.protocol import messages as m
from tests.depth import only_deep
from tests.random_checkpoint import CheckpointSpec, write_checkpoint
from tests.runtime.engine import probes
from tests.runtime.engine.prompts import PROMPTS, SHARED, random_prompts
from tests.runtime.engine.real_node import RealNode
from tests.runtime.engine.test_real_carry import TOKENS, further
from tests.runtime.engine.test_real_pipeline import FOUR, assert_every_pipeline
from tests.units import pp, tp
from tests.variety import is_varied

pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")

PAIR, TP2 = pp(0, 1), tp(0, 1)
SHARED_BY_2, STAGES = Level(2), Level(2, 2)
CARRY = m.Treatment.CARRY
LAYERS = 6
HEAD = LAYERS
"""The number of what is in a slot after the last layer: the LM head, in one piece."""
FEW = 56
"""Tokens of requests that run while memory moves."""
_seeds = itertools.count(4200)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealNode]:
    model = tmp_path_factory.mktemp("models") / "llama"
    write_checkpoint(model, CheckpointSpec(layers=LAYERS))
    sizes: dict[str, Any] = {"kv_cache_memory_bytes": 24 << 20}
    with RealNode(model, 2, max_pp=2, share_weights=2, restart_limit=9, **sizes) as node:
        yield node


def test_a_pipeline_generates_dps_tokens_and_streams_its_own_layers(node: RealNode) -> None:
    prompts = [*PROMPTS, *SHARED]
    expected = node.generate_spread([alone(0), alone(1)], prompts)
    assert is_varied(expected)
    assert node.probe_all(probes.owned_bytes) == [{"dp": 0, "pp2": 0, "tp2": 0}] * 2
    with node.bound(PAIR):
        assert node.generate(PAIR, prompts) == expected
        first, last = node.probe_all(probes.layers_in_slots)
        assert first <= {0, 1, 2}
        assert last <= {3, 4, 5, HEAD}
    assert node.generate(alone(0), prompts) == expected
    assert node.audit() == []


def test_requests_go_from_a_pipeline_to_every_layout_and_back(node: RealNode) -> None:
    prompts = random_prompts((40, 33, 90, 150, 5, 200), next(_seeds))
    plain = node.generate(alone(1), prompts, TOKENS)
    assert is_varied(plain)
    requests = node.submit(alone(0), prompts, TOKENS)
    node.wait_for_tokens(requests, 8)
    for unit in (PAIR, TP2, None, PAIR):
        view = node.switch(*filter(None, [unit]), treatment=CARRY)
        assert (view.carried, view.recomputed) == (len(prompts), {})
        further(node, requests, 15)
    assert node.wait(requests) == plain
    node.switch()
    assert node.audit() == []


def test_a_slot_that_is_read_too_early_changes_a_pipelines_tokens(node: RealNode) -> None:
    for damaged in (True, False):
        prompts = random_prompts((5, 33, 100), next(_seeds))
        expected = node.generate(alone(0), prompts)
        node.probe(1, probes.read_slots_early, damaged)
        with node.bound(PAIR):
            assert (node.generate(PAIR, prompts) != expected) is damaged
    assert node.audit() == []


def levels(node: RealNode) -> list[Level]:
    return [engine.level for engine in node.controller.books.engines]


def blocks(node: RealNode) -> list[int]:
    return [node.controller.books.engines.num_blocks(engine) for engine in PAIR.engines]


def test_memory_moves_under_requests_of_a_pipeline_and_of_engines_alone(node: RealNode) -> None:
    """With whole stages, a pipeline streams nothing, DP the layers of other stages, TP nothing.

    From whole weights to whole stages and back the way leads over shared weights.
    """
    prompts, every = random_prompts((40, 70, 90), next(_seeds)), blocks(node)
    expected = node.generate_spread([alone(0), alone(1)], prompts, FEW)
    assert is_varied(expected)
    short, left = [tokens[:16] for tokens in expected], {}

    def change(unit: Unit, level: Level) -> None:
        requests = node.submit(unit, prompts, FEW)
        node.wait_for_tokens(requests, 4)
        view = node.change_memory(*level)
        assert (view.after, view.after_stages, view.error) == (*level, None)
        assert levels(node) == [level] * 2
        assert node.wait(requests) == expected
        left[level] = blocks(node)

    def streamed(unit: Unit) -> list[set[int]]:
        node.probe_all(probes.take_streamed)
        assert node.generate(unit, prompts, 16) == short
        return [set(layers) for layers in node.probe_all(probes.take_streamed)]

    with node.bound(PAIR):
        for level in (WHOLE, SHARED_BY_2, STAGES):
            change(PAIR, level)
            assert node.probe_all(probes.streams) == [level != WHOLE] * 2
        assert streamed(PAIR) == [set(), set()]
    assert streamed(alone(0)) == [{3, 4, 5, HEAD}, set()]
    assert streamed(alone(1)) == [set(), {0, 1, 2}]
    with node.bound(TP2):
        assert streamed(TP2) == [set(), set()]
    for level in (WHOLE, STAGES, SHARED_BY_2):
        change(alone(0), level)
    assert streamed(alone(1)) == [set(), set(range(LAYERS + 1))], "as before"
    for whole, stages, all_blocks in zip(left[WHOLE], left[STAGES], every, strict=True):
        assert 0.4 < (all_blocks - stages) / (all_blocks - whole) < 0.6
    assert left[SHARED_BY_2] == every
    assert node.audit() == []


def test_whole_stages_that_hold_other_layers_change_the_tokens(node: RealNode) -> None:
    for damage in ("exchanged", "early", ""):
        prompts = random_prompts((5, 33, 100), next(_seeds))
        expected = node.generate(alone(0), prompts)
        node.probe(0, probes.damage_stages, damage)
        node.change_memory(*STAGES)
        with node.bound(PAIR):
            assert (node.generate(PAIR, prompts) == expected) is (damage == "")
        node.change_memory(2)
    assert node.audit() == []


@only_deep
def test_a_stage_whose_engine_comes_back_streams_again_until_it_follows(node: RealNode) -> None:
    prompts = random_prompts((40, 70), next(_seeds))
    expected = node.generate(alone(0), prompts)
    for level in (SHARED_BY_2, STAGES):
        node.change_memory(*level)
        node.switch(PAIR)
        node.kill("runner-1")
        node.bring_back(PAIR)
        node.until(lambda level=level: levels(node) == [level] * 2, "the end of the change")
        node.switch(PAIR)
        assert node.generate(PAIR, prompts) == expected
        node.switch()
    node.change_memory(2)
    assert node.audit() == []


@only_deep
@pytest.mark.parametrize("share", [2, 4])
def test_four_engines_that_share_weights_form_every_pipeline(tmp_path: Path, share: int) -> None:
    write_checkpoint(tmp_path / "model", CheckpointSpec(layers=4))
    with RealNode(tmp_path / "model", 4, max_pp=4, share_weights=share) as node:
        assert_every_pipeline(node)
        for unit in (FOUR, PAIR):
            assert node.change_memory(share, unit.layout.pp).error is None
            assert_every_pipeline(node)
            node.probe_all(probes.take_streamed)
            with node.bound(unit):
                node.generate(unit, PROMPTS)
            assert not any(node.probe_all(probes.take_streamed)[: unit.size])
