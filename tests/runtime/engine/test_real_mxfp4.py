"""GPT-OSS in MXFP4, as OpenAI publishes it, on real engines: groups have parts of DP's experts.

One node divides each expert (TP), and one the experts by number (EP).

vLLM has no kernel for such experts on most CPUs, and elsewhere computes them in bf16 alone. Here an
operator of Shoal computes them, and the node takes fp32, as sums in layouts differ too much in
bf16. The expected tokens are those of stock vLLM with a checkpoint of the same values in fp32.
"""

from collections.abc import Iterator

import pytest
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config

from shoal.runtime.whole_experts import WholeExperts, parse
from tests.models.families import write_family
from tests.mxfp4_checkpoint import Checkpoints, write_mxfp4
from tests.runtime.engine.every_layout import (
    ALL,
    TOKENS,
    EveryLayout,
    Tokens,
    assert_wrong_experts_change_tokens,
    node_in_fp32,
)
from tests.runtime.engine.real_node import RealNode, stock_tokens


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    directory = tmp_path_factory.mktemp("models")
    write_family(directory / "gpt_oss", "gpt_oss")
    return write_mxfp4(directory / "gpt_oss", directory)


@pytest.fixture(scope="module")
def expected(checkpoints: Checkpoints) -> Tokens:
    return stock_tokens(checkpoints.plain, ALL, TOKENS)


@pytest.fixture(scope="module", params=["auto", "0"])
def whole(request: pytest.FixtureRequest) -> WholeExperts:
    found = parse(request.param)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def node(checkpoints: Checkpoints, whole: WholeExperts) -> Iterator[RealNode]:
    with node_in_fp32(checkpoints.packed, GptOssMxfp4Config, whole) as node:
        yield node


class TestMxfp4(EveryLayout):
    def test_the_wrong_experts_change_the_tokens(self, node: RealNode, whole: WholeExperts) -> None:
        """It is last: what it leaves in the prefix cache is wrong."""
        assert_wrong_experts_change_tokens(node, by_number=whole.always)
