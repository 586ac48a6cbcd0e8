"""FP8 MLPs of which real engines keep a part each: fp32 activations, greedy, varied output.

DP and steps by sequence quantise activations as stock does, but sum products in another order. So a
value of an activation may be rounded up instead of down, which in FP8 is 6 % of it, and an answer
may go on otherwise after a while. The requests of a step also change the order of its sums. A
member of a TP group quantises its share with a scale of its own, so a group's tokens are compared
with those of a group whose engines have whole weights. Parts of layers are compared bit by bit in
``weights/sharing/test_slot_fp8.py``. With ``SHOAL_TESTS=all``, four engines share weights, too.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.policies.values.layouts import Unit, alone
from shoal.policies.values.partition import singles
from shoal.runtime.protocol.messages import Mode
from tests.depth import among
from tests.random_checkpoint import CheckpointSpec, write_checkpoint
from tests.runtime.engine import probes
from tests.runtime.engine.every_layout import before_damage_with_it_and_after
from tests.runtime.engine.prompts import random_prompts
from tests.runtime.engine.real_node import RealNode, stock_tokens
from tests.runtime.engine.scripted_shift import Script
from tests.runtime.engine.test_real_fp8 import quantised
from tests.units import tp
from tests.variety import is_varied

ENGINES, LAYERS = 4, 3
PROMPTS = random_prompts((5, 17, 31, 33, 64, 90, 130, 12), seed=21)
PAIR, QUARTET = tp(0, 1), tp(0, 1, 2, 3)
TOKENS = 24
SHARES = among([2], 4)
OPTIONS = {"dtype": "float32", "max_sp": 2}
Tokens = list[list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fp8")
    write_checkpoint(directory / "whole", CheckpointSpec(layers=LAYERS, seed=1))
    return quantised(directory / "whole", directory / "model")


@pytest.fixture(scope="module")
def expected(model: Path) -> Tokens:
    found = stock_tokens(model, PROMPTS, TOKENS, dtype=OPTIONS["dtype"])
    assert is_varied(found)
    return found


@pytest.fixture(scope="module")
def of_groups(model: Path) -> dict[int, Tokens]:
    """What groups generate whose engines have whole weights, by their members."""
    with RealNode(model, ENGINES, **OPTIONS) as node:
        return {len(group.engines): in_group(node, group) for group in (PAIR, QUARTET)}


@pytest.fixture(scope="module", params=SHARES)
def node(request: pytest.FixtureRequest, model: Path) -> Iterator[RealNode]:
    with RealNode(model, ENGINES, share_weights=request.param, **OPTIONS) as node:
        yield node


@pytest.fixture(scope="module")
def of_dp(node: RealNode) -> Tokens:
    """What DP generates, which nothing may change."""
    node.switch()
    return node.generate_spread(singles(ENGINES), PROMPTS, TOKENS)


def agree(found: Tokens, expected: Tokens) -> bool:
    """Return whether all answers begin alike, and most are equal."""
    pairs = list(zip(found, expected, strict=True))
    first = all(one[0] == other[0] for one, other in pairs)
    return first and sum(one == other for one, other in pairs) > len(pairs) / 2


def answers(node: RealNode, requests: list[list[str]]) -> Tokens:
    """Wait for prompts that engines took in turn; return what they generated, in their order."""
    found: Tokens = [[] for _ in PROMPTS]
    for engine, some in enumerate(requests):
        node.wait(some)
        found[engine::ENGINES] = [node.tokens[request] for request in some]
    return found


def in_group(node: RealNode, group: Unit) -> Tokens:
    node.switch()
    with node.bound(group):
        return node.generate(group, PROMPTS, TOKENS)


def test_dp_generates_stocks_tokens(node: RealNode, expected: Tokens, of_dp: Tokens) -> None:
    assert agree(of_dp, expected)
    assert node.audit() == []


def test_groups_generate_what_they_do_with_whole_weights(
    node: RealNode, of_dp: Tokens, of_groups: dict[int, Tokens]
) -> None:
    assert agree(in_group(node, PAIR), of_groups[2])
    assert agree(in_group(node, QUARTET), of_groups[4])
    node.switch()
    assert agree(node.generate(alone(2), PROMPTS, TOKENS), of_dp), "after other layouts"


def test_steps_by_sequence_generate_dps_tokens(node: RealNode, of_dp: Tokens) -> None:
    node.probe_all(probes.take_modes)
    node.script(Script.SP)
    try:
        found = in_group(node, PAIR)
    finally:
        node.script(Script.TP)
    assert agree(found, of_dp)
    modes = [node.probe(engine, probes.take_modes) for engine in PAIR.engines]
    assert all(ran[Mode.SP] >= TOKENS and not ran.get(Mode.TP) for ran in modes)


def test_tokens_stay_the_same_across_changes_of_memory(
    node: RealNode, of_dp: Tokens, of_groups: dict[int, Tokens]
) -> None:
    share = node.config.share_weights
    node.switch()
    requests = [node.submit(alone(e), PROMPTS[e::ENGINES], TOKENS) for e in range(ENGINES)]
    node.wait_for_tokens([r for some in requests for r in some], 2)
    node.change_memory(1)
    assert agree(answers(node, requests), of_dp)
    assert agree(in_group(node, PAIR), of_groups[2])
    requests = [node.submit(alone(e), PROMPTS[e::ENGINES], TOKENS) for e in range(ENGINES)]
    node.change_memory(share)
    assert agree(answers(node, requests), of_dp)
    assert agree(in_group(node, PAIR), of_groups[2])
    node.switch()
    assert agree(node.generate_spread(singles(ENGINES), PROMPTS, TOKENS), of_dp)
    assert node.audit() == []


@pytest.mark.parametrize(
    "damage", [probes.read_slots_early, probes.order_shards_by_rank], ids=["slots", "ranks"]
)
def test_weights_of_another_layer_or_member_change_the_tokens(
    node: RealNode, damage: probes.Damage
) -> None:
    unit = alone(0) if damage is probes.read_slots_early else QUARTET
    if unit.is_group and node.config.share_weights == ENGINES:
        pytest.skip("no layout has more members than share weights")
    found = before_damage_with_it_and_after(node, unit, damage, TOKENS)
    assert agree(found[0], found[2])
    assert not agree(found[0], found[1])
