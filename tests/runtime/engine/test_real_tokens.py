"""Every layout generates exactly stock vLLM's tokens: fp32, greedy, models whose output varies.

Prompts go through chunked prefill (the nodes' step budget is 64 tokens) and, the second time and
where they share a beginning, through the prefix cache; before and after switches.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from policies.partition import Partition, groups_of, singles
from tests.runtime.engine import probes
from tests.runtime.engine.prompts import MODELS, PROMPTS, SHARED, make_model
from tests.runtime.engine.real_node import RealNode, stock_tokens
from tests.variety import is_varied

ALL = PROMPTS + SHARED
ENGINES = 4
Expected = list[list[int]]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(request.param, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected(model: Path) -> Expected:
    return stock_tokens(model, ALL)


@pytest.fixture(scope="module")
def node(model: Path) -> Iterator[RealNode]:
    with RealNode(model, ENGINES) as node:
        yield node


LAYOUTS: dict[str, Partition] = {
    "dp": singles(ENGINES),
    "tp2x2": groups_of(ENGINES, 2),
    "tp4": groups_of(ENGINES, 4),
    "dp-again": singles(ENGINES),
    "tp4-again": groups_of(ENGINES, 4),
    "mixed": ((0, 1), (2,), (3,)),
}
"""Partitions in the order a node goes through them."""


def test_stock_output_varies(expected: Expected) -> None:
    assert is_varied(expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_stocks(node: RealNode, expected: Expected, layout: str) -> None:
    node.switch(*LAYOUTS[layout])
    assert node.partition == LAYOUTS[layout]
    assert node.generate_spread(node.partition, ALL) == expected
    assert node.generate_spread(node.partition, ALL) == expected, "from the prefix cache"
    assert node.audit() == []


def test_prompts_came_in_chunks_and_from_the_prefix_cache(
    node: RealNode, expected: Expected
) -> None:
    """What the tests above claim to cover, seen in a runner."""
    node.switch((0, 1))
    prompt = [7, *PROMPTS[-1]]  # no prefix of an earlier one
    first, again = (node.submit((0, 1), [prompt], max_tokens=1) for _ in range(2))
    node.wait(first + again)
    computed = node.probe(1, probes.scheduled)
    assert computed[first[0]] == len(prompt)
    assert computed[again[0]] < len(prompt)
    assert node.probe(1, probes.largest_step) <= 64 < len(prompt)


def test_no_layout_but_dp_owns_weights(node: RealNode) -> None:
    for owned in node.probe_all(probes.owned_bytes):
        assert owned == {1: 0, 2: 0, 4: 0}
    for layouts in node.probe_all(probes.parameters):
        (size, devices, storages), *views = layouts.values()
        assert devices == {"cpu"}
        for viewed_size, viewed_devices, viewed_storages in views:
            assert viewed_devices == {"cpu"}
            assert viewed_storages <= storages
            # Not by leaving parameters out: a rank sees its share, norms whole.
            assert viewed_size >= size / ENGINES


def test_the_kv_caches_of_all_layouts_are_one_storage(node: RealNode) -> None:
    for storages in node.probe_all(probes.kv_storages):
        assert len(storages) == 3
        assert len(set.union(*storages.values())) == 1
        ((_, size),) = storages[1]
        assert size == node.config.vllm_args["kv_cache_memory_bytes"]
