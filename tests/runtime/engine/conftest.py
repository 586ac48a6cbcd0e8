"""Models and nodes that several modules use."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.preloaded import know_models
from tests.runtime.engine.prompts import MANY, PROMPTS, SHARED, Stock, make_model

MOST_TOKENS = 100
"""Output tokens of the longest comparison."""


@pytest.fixture(scope="session", autouse=True)
def known_models() -> None:
    know_models()


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def stock(llama: Path) -> Stock:
    """Return what says what stock vLLM generates: for which of the prompts, how many tokens."""
    from tests.runtime.engine.real_node import stock_tokens  # slow: vLLM

    prompts = PROMPTS + SHARED + MANY
    known = dict(zip(map(tuple, prompts), stock_tokens(llama, prompts, MOST_TOKENS), strict=True))

    def tokens(wanted: Sequence[Sequence[int]], length: int) -> list[list[int]]:
        assert length <= MOST_TOKENS
        return [known[tuple(prompt)][:length] for prompt in wanted]

    return tokens
