"""LoRA adapters where engines share weights: the tokens are stock's, whatever an engine streams.

With ``SHOAL_TESTS=all``, all engines of a node share weights, too.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.policies.values.layouts import DP, Layout, Unit
from shoal.policies.values.partition import singles
from shoal.runtime.config import Adapter
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages import Mode
from tests.depth import among
from tests.random_adapter import write_adapter
from tests.random_checkpoint import CheckpointSpec, write_checkpoint
from tests.runtime.engine import probes
from tests.runtime.engine.adapters import (
    Adapters,
    named,
    stock_tokens_of_each,
    submitted,
    write_adapters,
)
from tests.runtime.engine.prompts import random_prompts
from tests.runtime.engine.real_node import RealNode
from tests.runtime.engine.scripted_shift import Script
from tests.variety import is_varied

SPEC = CheckpointSpec(layers=3)
TOKENS = 24
PROMPTS = random_prompts((5, 33, 70, 150), seed=51)
SHARED = {"share_weights": 2}
CASES = among([(4, 2)], (2, 2), (4, 4))
"""How many engines there are, and how many share weights."""
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "llama"
    write_checkpoint(path, SPEC)
    return path


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    """None, and two adapters."""
    return write_adapters(tmp_path_factory.mktemp("adapters"), SPEC)


@pytest.fixture(scope="module")
def expected(model: Path, adapters: Adapters) -> list[list[int]]:
    """Stock's tokens for what ``submitted`` sends."""
    found = stock_tokens_of_each(model, adapters, PROMPTS, TOKENS, LORA)
    assert is_varied(found)
    return found


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "{1} of {0}".format(*case))
def node(model: Path, adapters: Adapters, request: pytest.FixtureRequest) -> Iterator[RealNode]:
    engines, share = request.param
    options = {"share_weights": share, "max_sp": 2, "kv_cache_memory_bytes": 13 << 20}
    with RealNode(model, engines, adapters=named(adapters), **options, **LORA) as node:
        yield node


def units_of(node: RealNode, layout: Layout) -> tuple[Unit, ...]:
    return tuple(unit for unit in node.config.units if unit.layout == layout)


def test_tokens_are_stocks_in_every_layout_and_mode(
    node: RealNode, adapters: Adapters, expected: list[list[int]]
) -> None:
    for layout in node.config.layouts:
        node.switch(*units_of(node, layout))
        assert node.wait(submitted(node, adapters, PROMPTS, TOKENS)) == expected, layout.name
        node.probe_all(probes.take_modes)
        if layout != DP:
            node.script(Script.RANDOM)
            assert node.wait(submitted(node, adapters, PROMPTS, TOKENS)) == expected, (
                f"{layout.name} by sequence"
            )
            node.script(Script.TP)
            assert all(ran[Mode.SP] > 0 for ran in node.probe_all(probes.take_modes))
    assert node.audit() == []


def test_carried_requests_keep_their_adapters_while_memory_moves(
    node: RealNode, adapters: Adapters, expected: list[list[int]]
) -> None:
    node.switch()
    requests = submitted(node, adapters, PROMPTS, 3 * TOKENS)
    widest = units_of(node, node.config.layouts[-1])
    for share, partition in ((1, widest), (node.config.share_weights, singles(1)), (1, widest)):
        node.wait_for_tokens(requests, len(node.tokens[requests[-1]]) + 2)
        node.change_memory(share)
        view = node.switch(*partition, treatment=m.Treatment.CARRY)
        assert (view.carried, view.recomputed) == (len(requests), {})
    assert [tokens[:TOKENS] for tokens in node.wait(requests)] == expected
    assert node.audit() == []


def test_adapters_of_the_head_are_refused_by_name(model: Path, tmp_path: Path) -> None:
    """Engines share the vocabulary, too."""
    write_adapter(tmp_path / "head", SPEC, seed=3, ends=True)
    with (
        pytest.raises(Exception, match=r"adapter head: it adapts .*, and in models"),
        RealNode(model, 2, adapters=[Adapter("head", str(tmp_path / "head"))], **SHARED, **LORA),
    ):
        pass
