"""Other families of models on real engines: every layout and mode generates stock's tokens.

``SHOAL_FAMILIES`` names those of ``tests.models.families`` that are tested: one by default, and all
with ``SHOAL_TESTS=all``. Prompts reach far beyond windows.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.depth import DEEP
from tests.models.families import FAMILIES, write_family
from tests.runtime.engine.every_layout import ALL, TOKENS, EveryLayout, Tokens
from tests.runtime.engine.real_node import RealNode, stock_tokens

NAMES = os.environ.get("SHOAL_FAMILIES", ",".join(FAMILIES) if DEEP else "gemma3").split(",")


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
def expected(model: Path) -> Tokens:
    return stock_tokens(model, ALL, TOKENS)


@pytest.fixture(scope="module")
def node(model: Path) -> Iterator[RealNode]:
    with RealNode(model, 2, max_sp=2) as node:
        yield node


class TestFamily(EveryLayout):
    carried_tokens = 80
