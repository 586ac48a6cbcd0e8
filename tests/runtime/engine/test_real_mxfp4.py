"""GPT-OSS in MXFP4, as OpenAI publishes it, on real engines: groups have parts of DP's experts.

One node divides each expert (TP). On the other, engines share experts: each keeps a half of them,
and groups divide them by number (EP). With ``SHOAL_TESTS=all`` two engines share those of the
checkpoint in fp32, too, and four those in MXFP4.

vLLM has no kernel for such experts on most CPUs, and elsewhere computes them in bf16 alone. Here an
operator of Shoal computes them, and the node takes fp32, as sums in layouts differ too much in
bf16. The expected tokens are those of stock vLLM with a checkpoint of the same values in fp32.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config

from shoal.policies.values.layouts import alone
from shoal.policies.values.partition import singles
from shoal.runtime.whole_experts import ALWAYS, WholeExperts
from tests.depth import among, only_deep
from tests.models.families import write_family
from tests.mxfp4_checkpoint import Checkpoints, write_mxfp4
from tests.runtime.engine import probes
from tests.runtime.engine.every_layout import (
    ALL,
    COMPARED,
    TOKENS,
    EveryLayout,
    Tokens,
    assert_same_across_changes_of_memory,
    assert_wrong_experts_change_tokens,
    before_damage_with_it_and_after,
    node_in_fp32,
)
from tests.runtime.engine.real_node import RealNode, stock_tokens
from tests.units import tp, tp_units

LAYERS = 4
"""Two layers would each have a slot of their own."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    directory = tmp_path_factory.mktemp("models")
    write_family(directory / "gpt_oss", "gpt_oss", LAYERS)
    return write_mxfp4(directory / "gpt_oss", directory)


@pytest.fixture(scope="module")
def expected(checkpoints: Checkpoints) -> Tokens:
    return stock_tokens(checkpoints.plain, ALL, TOKENS)


class Case(NamedTuple):
    share: int
    """How many engines share experts."""
    is_packed: bool = True
    """Whether the checkpoint is in MXFP4; else it is that of the same values."""


@pytest.fixture(scope="module", params=among([Case(1), Case(2)], Case(2, is_packed=False)))
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture(scope="module")
def share(case: Case) -> int:
    return case.share


@pytest.fixture(scope="module")
def node(checkpoints: Checkpoints, case: Case) -> Iterator[RealNode]:
    whole = WholeExperts() if case.share == 1 else ALWAYS
    model = checkpoints.packed if case.is_packed else checkpoints.plain
    with node_in_fp32(model, GptOssMxfp4Config, whole, case.share) as node:
        yield node


class TestMxfp4(EveryLayout):
    def test_an_engine_keeps_its_part_of_the_experts(self, node: RealNode, share: int) -> None:
        if share > 1:
            sizes = node.probe_all(probes.expert_bytes)
            assert all(0 < own * share == whole for own, whole in sizes)

    def test_tokens_stay_the_same_across_changes_of_memory(
        self, node: RealNode, expected: Tokens, share: int
    ) -> None:
        if share > 1:
            assert_same_across_changes_of_memory(node, expected)

    def test_experts_of_another_layer_change_the_tokens(self, node: RealNode, share: int) -> None:
        if share > 1:
            damage = probes.read_slots_early
            found = before_damage_with_it_and_after(node, alone(0), damage, COMPARED)
            assert found[0] == found[2] != found[1]

    def test_the_wrong_experts_change_the_tokens(self, node: RealNode, share: int) -> None:
        """It is last: what it leaves in the prefix cache is wrong."""
        assert_wrong_experts_change_tokens(node, by_number=share > 1)


@only_deep
def test_tokens_are_as_expected_if_four_engines_share(
    checkpoints: Checkpoints, expected: Tokens
) -> None:
    """Groups of two stream a quarter of the experts."""
    with node_in_fp32(checkpoints.packed, GptOssMxfp4Config, ALWAYS, 4, engines=4) as node:
        for partition in (singles(4), tp_units(4, 2), (tp(0, 1, 2, 3),)):
            node.switch(*partition)
            assert node.generate_spread(node.partition, ALL, TOKENS) == expected
        assert node.audit() == []
