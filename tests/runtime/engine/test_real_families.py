"""Other families of models on real engines: every layout and mode generates stock's tokens.

``SHOAL_FAMILIES`` names those of ``tests.models.families`` that are tested: one by default, all of
them with ``all``. Prompts reach far beyond windows.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.policies.values.layouts import alone
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages import Mode
from tests.models.families import FAMILIES, write_family
from tests.runtime.engine import probes
from tests.runtime.engine.prompts import PROMPTS, SHARED, random_prompts
from tests.runtime.engine.real_node import RealNode, stock_tokens
from tests.runtime.engine.scripted_shift import Script
from tests.units import tp
from tests.variety import is_varied

ALL = PROMPTS + SHARED
TOKENS = 24
GROUP = tp(0, 1)
CHOSEN = os.environ.get("SHOAL_FAMILIES", "gemma3")
NAMES = list(FAMILIES) if CHOSEN == "all" else CHOSEN.split(",")
Expected = list[list[int]]


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def model(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / name
    write_family(path, name)
    return path


@pytest.fixture(scope="module")
def expected(model: Path) -> Expected:
    return stock_tokens(model, ALL, TOKENS)


@pytest.fixture(scope="module")
def node(model: Path) -> Iterator[RealNode]:
    with RealNode(model, 2, max_sp=2) as node:
        yield node


def test_tokens_are_stocks_in_every_layout(node: RealNode, expected: Expected) -> None:
    assert is_varied(expected)
    for partition in ((alone(0), alone(1)), (GROUP,)):
        node.switch(*partition)
        for _ in range(2):  # the second time from the prefix cache
            assert node.generate_spread(node.partition, ALL, TOKENS) == expected
    assert node.audit() == []


def test_tokens_are_stocks_however_steps_run(node: RealNode, expected: Expected) -> None:
    node.switch()
    node.probe_all(probes.take_modes)
    node.script(Script.RANDOM)
    with node.bound(GROUP):
        assert node.generate(GROUP, ALL, TOKENS) == expected
    node.script(Script.TP)
    assert all(ran[Mode.SP] > 0 for ran in node.probe_all(probes.take_modes))


def test_carried_requests_go_on_with_the_right_tokens(node: RealNode) -> None:
    prompts = random_prompts((5, 40, 130, 300), seed=51)
    node.switch()
    expected = node.generate(alone(1), prompts, 80)
    requests = node.submit(alone(0), prompts, 80)
    node.wait_for_tokens(requests, 6)
    for partition, tokens in (((GROUP,), 24), ((alone(0), alone(1)), 44)):
        view = node.switch(*partition, treatment=m.Treatment.CARRY)
        assert (view.carried > 0, view.recomputed) == (True, {})
        node.wait_for_tokens(requests, tokens)
    assert node.wait(requests) == expected
    assert node.audit() == []


def test_no_layout_but_dp_owns_weights(node: RealNode) -> None:
    assert node.probe_all(probes.owned_bytes) == [{"dp": 0, "tp2": 0}] * 2
