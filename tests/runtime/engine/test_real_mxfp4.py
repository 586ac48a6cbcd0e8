"""GPT-OSS in MXFP4, as OpenAI publishes it, on real engines: each group has ranges of DP's experts.

vLLM has no kernel for such experts on most CPUs, and elsewhere computes them in bf16 alone. Here an
operator of Shoal computes them, and the node takes fp32, as sums in layouts differ too much in
bf16. The expected tokens are those of stock vLLM with a checkpoint of the same values in fp32.
"""

from collections.abc import Iterator

import pytest
import torch
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config

from shoal.policies.values.layouts import alone
from shoal.policies.values.partition import singles
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages import Mode
from tests.models.families import write_family
from tests.mxfp4_checkpoint import Checkpoints, write_mxfp4
from tests.runtime.engine import probes
from tests.runtime.engine.prompts import PROMPTS, SHARED, random_prompts
from tests.runtime.engine.real_node import RealNode, stock_tokens
from tests.runtime.engine.scripted_shift import Script
from tests.units import tp
from tests.variety import is_varied

ALL = PROMPTS + SHARED
TOKENS = 24
GROUP = tp(0, 1)
Expected = list[list[int]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    directory = tmp_path_factory.mktemp("models")
    write_family(directory / "gpt_oss", "gpt_oss")
    return write_mxfp4(directory / "gpt_oss", directory)


@pytest.fixture(scope="module")
def expected(checkpoints: Checkpoints) -> Expected:
    return stock_tokens(checkpoints.plain, ALL, TOKENS)


@pytest.fixture(scope="module")
def node(checkpoints: Checkpoints) -> Iterator[RealNode]:
    with pytest.MonkeyPatch.context() as patch:
        types = staticmethod(lambda: [torch.float32])
        patch.setattr(GptOssMxfp4Config, "get_supported_act_dtypes", types)
        node = RealNode(checkpoints.packed, 2, max_sp=2)
    with node:
        yield node


def test_tokens_are_stocks_in_every_layout(node: RealNode, expected: Expected) -> None:
    assert is_varied(expected)
    for partition in (singles(2), (GROUP,)):
        node.switch(*partition)
        for _ in range(2):  # the second time from the prefix cache
            assert node.generate_spread(node.partition, ALL, TOKENS) == expected
    assert node.audit() == []


def test_tokens_are_stocks_however_steps_run(node: RealNode, expected: Expected) -> None:
    """In a step by sequence each member has few of the tokens, and all of DP's experts."""
    node.switch()
    node.probe_all(probes.take_modes)
    node.script(Script.RANDOM)
    with node.bound(GROUP):
        assert node.generate(GROUP, ALL, TOKENS) == expected
    node.script(Script.TP)
    assert all(ran[Mode.SP] > 0 for ran in node.probe_all(probes.take_modes))


def test_carried_requests_go_on_with_the_right_tokens(node: RealNode) -> None:
    prompts = random_prompts((5, 40, 130, 300), seed=51)
    node.switch()
    expected = node.generate(alone(1), prompts, 60)
    requests = node.submit(alone(0), prompts, 60)
    node.wait_for_tokens(requests, 6)
    for partition, tokens in (((GROUP,), 24), (singles(2), 44)):
        view = node.switch(*partition, treatment=m.Treatment.CARRY)
        assert (view.carried > 0, view.recomputed) == (True, {})
        node.wait_for_tokens(requests, tokens)
    assert node.wait(requests) == expected
    assert node.audit() == []


def test_no_layout_but_dp_owns_weights(node: RealNode) -> None:
    assert node.probe_all(probes.owned_bytes) == [{"dp": 0, "tp2": 0}] * 2


def test_the_wrong_experts_change_the_tokens(node: RealNode) -> None:
    """It is last: what it leaves in the prefix cache is wrong."""
    prompts = random_prompts((17, 40), seed=42)
    node.switch()
    expected = node.generate(alone(0), prompts, TOKENS)
    assert node.probe(0, probes.confuse_experts, GROUP.layout)
    with node.bound(GROUP):
        found = node.generate(GROUP, prompts, TOKENS)
    assert all(one != other for one, other in zip(found, expected, strict=True))
