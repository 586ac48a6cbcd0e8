"""Real engines whose groups compute whole experts in long steps and shares of each in short ones.

fp32, greedy. ``test_real_experts`` has groups that always compute shares.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.runtime.whole_experts import WholeExperts
from tests.runtime.engine import probes
from tests.runtime.engine.every_layout import (
    assert_tokens_in_every_layout,
    assert_tokens_in_every_mode,
    assert_tokens_through_carries,
    assert_wrong_experts_change_tokens_by_length,
)
from tests.runtime.engine.prompts import PROMPTS, SHARED, make_model
from tests.runtime.engine.real_node import RealNode, stock_tokens

ALL = PROMPTS + SHARED
TOKENS = 24
Expected = list[list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen3-moe", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected(model: Path) -> Expected:
    return stock_tokens(model, ALL, TOKENS)


@pytest.fixture(scope="module")
def node(model: Path) -> Iterator[RealNode]:
    # A step has at most 16 requests that decode, and more tokens than that if it computes a prompt.
    whole = WholeExperts(17, None, automatic=False)
    with RealNode(model, 2, max_sp=2, whole_experts=whole) as node:
        yield node


def test_tokens_are_stocks_in_every_layout(node: RealNode, expected: Expected) -> None:
    assert_tokens_in_every_layout(node, ALL, TOKENS, expected)


def test_tokens_are_stocks_however_steps_run(node: RealNode, expected: Expected) -> None:
    assert_tokens_in_every_mode(node, ALL, TOKENS, expected)


def test_carried_requests_go_on_with_the_right_tokens(node: RealNode) -> None:
    assert_tokens_through_carries(node, 60)


def test_no_layout_but_dp_owns_weights(node: RealNode) -> None:
    assert node.probe_all(probes.owned_bytes) == [{"dp": 0, "tp2": 0}] * 2


def test_wrong_experts_change_the_tokens_of_their_steps(node: RealNode) -> None:
    """It is last: what it leaves in the prefix cache is wrong."""
    assert_wrong_experts_change_tokens_by_length(node, TOKENS)
