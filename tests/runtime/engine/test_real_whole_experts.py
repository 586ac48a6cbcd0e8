"""Real engines whose groups compute whole experts in long steps and shares of each in short ones.

fp32, greedy. ``test_real_experts`` has groups that always compute shares, and its requests are
carried. With ``SHOAL_TESTS=all`` these are, too.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.runtime.whole_experts import WholeExperts
from tests.runtime.engine.every_layout import (
    ALL,
    TOKENS,
    EveryLayout,
    Tokens,
    assert_wrong_experts_change_tokens_by_length,
)
from tests.runtime.engine.prompts import make_model
from tests.runtime.engine.real_node import RealNode, stock_tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen3-moe", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected(model: Path) -> Tokens:
    return stock_tokens(model, ALL, TOKENS)


@pytest.fixture(scope="module")
def node(model: Path) -> Iterator[RealNode]:
    # A step has at most 16 requests that decode, and more tokens than that if it computes a prompt.
    whole = WholeExperts(17, None, automatic=False)
    with RealNode(model, 2, max_sp=2, whole_experts=whole) as node:
        yield node


class TestWholeExperts(EveryLayout):
    carries = False

    def test_wrong_experts_change_the_tokens_of_their_steps(self, node: RealNode) -> None:
        """It is last: what it leaves in the prefix cache is wrong."""
        assert_wrong_experts_change_tokens_by_length(node)
