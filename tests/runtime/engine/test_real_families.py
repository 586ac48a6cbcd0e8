"""Other families of models on real engines: every layout and mode generates stock's tokens.

``SHOAL_FAMILIES`` names those of ``tests.models.families`` that are tested: one by default, all of
them with ``all``. Prompts reach far beyond windows.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models.families import FAMILIES, write_family
from tests.runtime.engine import probes
from tests.runtime.engine.every_layout import (
    assert_tokens_in_every_layout,
    assert_tokens_in_every_mode,
    assert_tokens_through_carries,
)
from tests.runtime.engine.prompts import PROMPTS, SHARED
from tests.runtime.engine.real_node import RealNode, stock_tokens

ALL = PROMPTS + SHARED
TOKENS = 24
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
    assert_tokens_in_every_layout(node, ALL, TOKENS, expected)


def test_tokens_are_stocks_however_steps_run(node: RealNode, expected: Expected) -> None:
    assert_tokens_in_every_mode(node, ALL, TOKENS, expected)


def test_carried_requests_go_on_with_the_right_tokens(node: RealNode) -> None:
    assert_tokens_through_carries(node, 80)


def test_no_layout_but_dp_owns_weights(node: RealNode) -> None:
    assert node.probe_all(probes.owned_bytes) == [{"dp": 0, "tp2": 0}] * 2
