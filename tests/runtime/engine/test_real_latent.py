"""A model whose attention caches latents (MLA) on real engines: stock's tokens in every layout.

On CPUs vLLM computes its prompts whole, and keeps no prefixes.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.policies.values.layouts import alone
from shoal.policies.values.partition import singles
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages.views import SwitchView
from tests.random_checkpoint import Architecture, CheckpointSpec, write_checkpoint
from tests.runtime.engine import probes
from tests.runtime.engine.every_layout import COMPARED, first
from tests.runtime.engine.prompts import PROMPTS, SHARED, random_prompts
from tests.runtime.engine.real_node import RealNode, stock_tokens
from tests.units import tp
from tests.variety import is_varied

ALL = PROMPTS + SHARED
TOKENS = 24
PAIR = tp(0, 1)
BACKEND = {"attention_backend": "CPU_MLA"}
"""Where a processor has AMX, vLLM would take its backend for that, which packs weights."""
CARRIED = random_prompts((5, 33, 64, 150), seed=43)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "deepseek-v2"
    write_checkpoint(path, CheckpointSpec(Architecture.DEEPSEEK_V2, layers=3, kv_heads=8))
    return path


@pytest.fixture(scope="module")
def node(model: Path) -> Iterator[RealNode]:
    with RealNode(model, 2, **BACKEND) as node:
        yield node


def test_tokens_are_stocks_in_every_layout(node: RealNode, model: Path) -> None:
    expected = stock_tokens(model, ALL, TOKENS, vllm_args=BACKEND)
    assert is_varied(expected)
    for partition in (singles(2), (PAIR,)):
        node.switch(*partition)
        assert node.generate_spread(node.partition, ALL, COMPARED) == first(expected)
    assert node.audit() == []


def test_no_layout_but_dp_owns_weights_or_absorbed_matrices(node: RealNode) -> None:
    assert node.probe_all(probes.owned_bytes) == [{"dp": 0, "tp2": 0}] * 2
    absorbed, weights = node.probe(0, probes.absorbed_bytes)
    assert 0 < absorbed == weights


def test_a_group_holds_no_more_tokens_than_an_engine(node: RealNode) -> None:
    """Every member has the whole latent of every token."""
    limits = node.controller.books.engines.limits
    assert limits(PAIR).block_tokens == limits(alone(0)).block_tokens == 16


def carried(node: RealNode, tokens: int) -> tuple[list[list[int]], list[SwitchView]]:
    """Carry requests from single engines to their group and back; return what they generate."""
    node.switch()
    requests = [
        node.submit(alone(number % 2), [prompt], tokens)[0] for number, prompt in enumerate(CARRIED)
    ]
    views = []
    for partition in ((PAIR,), singles(2)):
        node.wait_for_tokens(requests, len(node.tokens[requests[0]]) + 3)
        views.append(node.switch(*partition, treatment=m.Treatment.CARRY))
    return node.wait(requests), views


def test_carried_requests_go_on_with_the_right_tokens(node: RealNode) -> None:
    node.switch()
    expected = node.generate_spread(singles(2), CARRIED, 60)
    found, views = carried(node, 60)
    assert found == expected
    assert all(view.carried == len(CARRIED) and view.recomputed == {} for view in views)
    assert node.audit() == []


def test_a_member_that_reads_no_latent_changes_the_tokens(node: RealNode) -> None:
    node.switch()
    expected = node.generate_spread(singles(2), CARRIED, 60)
    node.probe(1, probes.read_nothing, True)
    found, _ = carried(node, 60)  # with fewer tokens some may end before they are carried
    node.probe(1, probes.read_nothing, False)
    assert all(one != other for one, other in zip(found, expected, strict=True))


def test_the_matrices_of_other_heads_change_the_tokens(node: RealNode) -> None:
    """It is last: the group is of no use after it."""
    node.switch()
    expected = node.generate(alone(0), CARRIED, COMPARED)
    with node.bound(PAIR):
        node.probe(1, probes.absorb_other_heads, PAIR.layout)
        found = node.generate(PAIR, CARRIED, COMPARED)
    assert all(one != other for one, other in zip(found, expected, strict=True))
