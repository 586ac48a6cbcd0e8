"""Models with routed experts on real engines: every layout and mode generates stock's tokens.

fp32, greedy. What does not depend on experts is in ``test_real_tokens``. With ``SHOAL_TESTS=all``
requests of every family are carried, and every family shows that wrong experts would be noticed.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.policies.values.layouts import Layout, Unit, alone
from shoal.policies.values.partition import Partition, singles
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages import Mode
from tests.depth import skip_unless_deep
from tests.runtime.engine import probes
from tests.runtime.engine.every_layout import (
    ALL,
    COMPARED,
    TOKENS,
    assert_wrong_experts_change_tokens,
    first,
)
from tests.runtime.engine.prompts import (
    MODELS_WITH_EXPERTS,
    make_model,
    random_prompts,
)
from tests.runtime.engine.real_node import RealNode, stock_tokens
from tests.runtime.engine.scripted_shift import Script
from tests.units import tp, tp_units
from tests.variety import is_varied

ENGINES = {"qwen3-moe": 4, "mixtral": 2, "glm4-moe": 2, "llama4": 2}
"""One family shows what does not depend on the family: more than one width."""
Expected = list[list[int]]


@pytest.fixture(scope="module", params=MODELS_WITH_EXPERTS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(request.param, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def engines(model: Path) -> int:
    return ENGINES[model.name]


@pytest.fixture(scope="module")
def expected(model: Path) -> Expected:
    return stock_tokens(model, ALL, TOKENS)


@pytest.fixture(scope="module")
def node(model: Path, engines: int) -> Iterator[RealNode]:
    # Of four engines, two modules of two members each: the base of SP is then a TP layout.
    with RealNode(model, engines, max_sp=2) as node:
        yield node


@pytest.fixture(scope="module")
def widest(engines: int) -> Unit:
    return tp(*range(engines))


def test_tokens_are_stocks_in_every_layout(
    node: RealNode, expected: Expected, engines: int
) -> None:
    assert is_varied(expected)
    partitions: list[Partition] = [singles(engines), tp_units(engines, engines)]
    if engines > 2:
        partitions += [tp_units(engines, 2), (tp(0, 1), alone(2), alone(3))]
    for partition in partitions:
        node.switch(*partition)
        assert node.generate_spread(node.partition, ALL, COMPARED) == first(expected)
    again = node.generate_spread(node.partition, ALL, COMPARED)
    assert again == first(expected), "from the prefix cache"
    assert node.audit() == []


def test_tokens_are_stocks_however_steps_run(
    node: RealNode, expected: Expected, widest: Unit
) -> None:
    """In a step by sequence a member has few of the tokens, and all the experts of its base."""
    node.switch()
    node.probe_all(probes.take_modes)
    node.script(Script.RANDOM)
    with node.bound(widest):
        assert node.generate(widest, ALL, COMPARED) == first(expected)
    node.script(Script.TP)
    assert all(min(ran[mode] for mode in Mode) > 0 for ran in node.probe_all(probes.take_modes))


def test_carried_requests_go_on_with_the_right_tokens(
    node: RealNode, model: Path, widest: Unit
) -> None:
    if model.name in ("mixtral", "glm4-moe", "llama4"):
        skip_unless_deep()
    node.switch()
    prompts = random_prompts((5, 33, 64, 150), seed=41)
    requests = [
        node.submit(alone(number % widest.size), [prompt], 60)[0]
        for number, prompt in enumerate(prompts)
    ]
    for partition in ((widest,), singles(widest.size)):
        node.wait_for_tokens(requests, len(node.tokens[requests[0]]) + 3)
        view = node.switch(*partition, treatment=m.Treatment.CARRY)
        assert view.carried > 0
        assert view.recomputed == {}
    found = node.wait(requests)
    assert node.generate_spread(singles(widest.size), prompts, 60) == found
    assert node.audit() == []


def test_no_layout_but_dp_owns_weights(node: RealNode, engines: int) -> None:
    layouts = [Layout(tp=degree).name for degree in (1, 2, 4) if degree <= engines]
    assert node.probe_all(probes.owned_bytes) == [dict.fromkeys(layouts, 0)] * engines


def test_the_wrong_experts_change_the_tokens(node: RealNode, model: Path, widest: Unit) -> None:
    """It is last: what it leaves in the prefix cache is wrong."""
    if model.name in ("glm4-moe", "llama4"):
        skip_unless_deep()
    by_number = model.name == "qwen3-moe"
    assert_wrong_experts_change_tokens(node, widest, by_number=by_number)
