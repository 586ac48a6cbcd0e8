"""Engines that keep a part of the MLPs each: what becomes of the parts when engines die."""

from collections.abc import Iterator

import pytest

from shoal.policies.values.layouts import alone
from tests.random_checkpoint import CheckpointSpec, write_checkpoint
from tests.runtime.engine import probes
from tests.runtime.engine.prompts import PROMPTS
from tests.runtime.engine.real_node import RealNode
from tests.units import tp
from tests.variety import is_varied

PAIR = tp(0, 1)
SHORT = PROMPTS[:4]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealNode]:
    model = tmp_path_factory.mktemp("models") / "llama"
    write_checkpoint(model, CheckpointSpec(layers=3))
    with RealNode(model, 2, restart_limit=9, share_weights=2) as node:
        yield node


def assert_serves(node: RealNode, expected: list[list[int]]) -> None:
    for unit in (alone(0), PAIR, alone(1)):
        node.switch(*([unit] if unit.is_group else []))
        assert node.generate(unit, SHORT) == expected
    assert node.audit() == []


def test_engines_read_the_part_of_one_that_has_died_and_it_gets_its_part_back(
    node: RealNode,
) -> None:
    expected = node.generate(alone(0), SHORT)
    assert is_varied(expected)
    kept = [node.probe(engine, probes.kept_weights) for engine in PAIR.engines]
    running = node.submit(None, SHORT, max_tokens=300)
    node.wait_for_tokens(running, 3)
    node.kill("runner-1")
    # All go on in the engine that is left, also those that were in the other one.
    assert [tokens[:32] for tokens in node.wait(running)] == expected
    node.bring_back(PAIR)
    assert [node.probe(engine, probes.kept_weights) for engine in PAIR.engines] == kept
    assert_serves(node, expected)


def test_when_all_have_died_the_parts_are_loaded_again(node: RealNode) -> None:
    expected = node.generate(alone(0), SHORT)
    kept = node.probe(1, probes.kept_weights)
    running = node.submit(None, SHORT, max_tokens=300)
    node.wait_for_tokens(running, 3)
    node.kill("runner-0")
    node.kill("scheduler-1")
    node.bring_back(PAIR)
    assert node.probe(1, probes.kept_weights) != kept
    assert [tokens[:32] for tokens in node.wait(running)] == expected
    assert_serves(node, expected)
