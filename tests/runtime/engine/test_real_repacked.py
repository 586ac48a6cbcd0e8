"""Checkpoints whose weights vLLM repacks, on real engines: each layout loads its own shard.

DP's tokens are those of stock vLLM, and TP2's those of stock vLLM in TP2, but for near ties: there
is no fp32 of such weights, and in bf16 each sums in another order. With ``SHOAL_TESTS=all`` a
checkpoint with integers of compressed-tensors is served, too.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from shoal.policies.values.layouts import alone
from shoal.policies.values.partition import singles
from shoal.runtime.config import Adapter
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages import Mode
from tests.depth import among
from tests.random_adapter import write_adapter
from tests.random_checkpoint import CheckpointSpec
from tests.repacked_checkpoint import Form, write_repacked
from tests.runtime.engine import probes
from tests.runtime.engine.prompts import random_prompts
from tests.runtime.engine.real_node import RealNode, stock_tokens
from tests.runtime.engine.scripted_shift import Script
from tests.units import tp

PROMPTS = random_prompts((5, 17, 31, 64, 90, 130), seed=17)
PAIR = tp(0, 1)
TOKENS = 12
FEW = 6
"""Of a group, whose first tokens are compared, one request after the other."""
SURE = 3
"""So many first tokens are the same in any case. Each later one follows from all before it, and on
a CPU that does not multiply bf16 itself near ties change outputs from the fifth token on.
"""
DTYPE = "bfloat16"
Expected = list[list[int]]
Adapters = Sequence[LoRARequest | None]
NONE: Adapters = [None] * len(PROMPTS)
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
"""One slot more than adapters (``test_real_adapters.py``)."""
OTHERS = among([Form.AWQ], Form.INTEGERS)


@pytest.fixture(scope="module")
def model(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_repacked(llama, tmp_path_factory.mktemp("repacked") / "gptq", Form.GPTQ)


@pytest.fixture(scope="module")
def expected(model: Path) -> Expected:
    return stock_alone(model)


@pytest.fixture(scope="module")
def expected_of_pair(model: Path) -> Expected:
    return stock_pair(model)


def stock_alone(model: Path, adapters: Adapters = NONE, **lora: Any) -> Expected:
    return stock_tokens(model, PROMPTS, TOKENS, dtype=DTYPE, vllm_args=lora, adapters=adapters)


def by_pair(node: RealNode, adapters: Adapters = NONE) -> Expected:
    """Return what the group generates for one prompt after the other.

    Together they would round as their steps are put together, and that depends on how soon each
    one reaches the engine.
    """
    return [
        output
        for prompt, adapter in zip(PROMPTS, adapters, strict=True)
        for output in node.wait(node.submit(PAIR, [prompt], FEW, adapter=adapter))
    ]


def by_sequence(node: RealNode, adapters: Adapters = NONE) -> Expected:
    """Return what the group generates for all prompts at once; its steps run by sequence."""
    node.probe_all(probes.take_modes)
    node.script(Script.SP)
    with node.bound(PAIR):
        requests = [
            node.submit(PAIR, [prompt], TOKENS, adapter=adapter)[0]
            for prompt, adapter in zip(PROMPTS, adapters, strict=True)
        ]
        found = node.wait(requests)
    node.script(Script.TP)
    assert all(ran[Mode.SP] > 0 for ran in node.probe_all(probes.take_modes))
    return found


def alike(found: Expected, expected: Expected) -> bool:
    """Return whether outputs differ by no more than near ties, which come late."""
    return all(one[:SURE] == other[:SURE] for one, other in zip(found, expected, strict=True))


def stock_pair(model: Path, adapters: Adapters = NONE, **lora: Any) -> Expected:
    two = {"tensor_parallel_size": 2, "max_num_seqs": 1} | lora
    return stock_tokens(model, PROMPTS, FEW, dtype=DTYPE, vllm_args=two, adapters=adapters)


@pytest.fixture(scope="module")
def node(model: Path) -> Iterator[RealNode]:
    with RealNode(model, 2, dtype=DTYPE, max_sp=2, restart_limit=9) as node:
        yield node


def test_tokens_are_those_of_stocks_layout(
    node: RealNode, expected: Expected, expected_of_pair: Expected
) -> None:
    assert len({tuple(output) for output in expected}) == len(PROMPTS)
    assert node.generate_spread(singles(2), PROMPTS, TOKENS) == expected
    with node.bound(PAIR):
        assert alike(by_pair(node), expected_of_pair)
    assert node.generate_spread(singles(2), PROMPTS, TOKENS) == expected
    assert node.audit() == []


def test_a_group_owns_a_share_of_the_repacked_weights_alone(node: RealNode) -> None:
    """Each member has half of the layers that DP repacks, and views all others."""
    for owned in node.probe_all(probes.loaded_bytes):
        assert owned["tp2"] * 2 == owned["dp"] > 0
    repacked = [of["tp2"] for of in node.probe_all(probes.loaded_bytes)]
    assert [of["tp2"] for of in node.probe_all(probes.owned_bytes)] == repacked


def test_steps_by_sequence_generate_stocks_tokens(node: RealNode, expected: Expected) -> None:
    """They run the whole model of DP, on a share of the tokens."""
    assert by_sequence(node) == expected


def test_carried_requests_go_on(node: RealNode, expected: Expected) -> None:
    """Once in DP again they have no more than TP2's rounding in their KV; nothing is recomputed."""
    node.switch()
    requests = node.submit(alone(0), PROMPTS, 200)
    node.wait_for_tokens(requests, TOKENS)
    for partition, tokens in (((PAIR,), 60), (singles(2), 100)):
        view = node.switch(*partition, treatment=m.Treatment.CARRY)
        assert (view.carried, view.recomputed) == (len(PROMPTS), {})
        node.wait_for_tokens(requests, tokens)
    outputs = node.wait(requests)
    assert [output[:TOKENS] for output in outputs] == expected
    assert [len(output) for output in outputs] == [200] * len(PROMPTS)
    assert node.audit() == []


def test_a_group_that_is_formed_anew_loads_its_shards_again(
    node: RealNode, expected: Expected, expected_of_pair: Expected
) -> None:
    """Damage to a shard shows that the group computes with it, and that DP does not."""
    with node.bound(PAIR):
        node.probe(1, probes.damage_repacked, PAIR.layout)
        found = node.generate(PAIR, PROMPTS[::-1], FEW)[::-1]
    assert all(one != other for one, other in zip(found, expected_of_pair, strict=True))
    assert not alike(found, expected_of_pair)
    node.kill("runner-0")
    node.until(lambda: node.controller.books.engines.gone, "the death to be known")
    node.bring_back(PAIR)
    assert node.generate_spread(singles(2), PROMPTS, TOKENS) == expected
    with node.bound(PAIR):
        assert alike(by_pair(node), expected_of_pair)
    assert node.audit() == []


@pytest.mark.parametrize("form", OTHERS)
def test_other_forms_generate_the_tokens_of_stocks_layout(
    form: Form, llama: Path, tmp_path: Path
) -> None:
    """DP and TP2 round differently; steps by sequence round as DP. Damage to TP2's shards changes
    its tokens, and not DP's.

    Each member has some scales whole, and vLLM's kernel for 8 bits hides its weights. Every second
    request has an adapter, which is not quantised.
    """
    model, added = write_repacked(llama, tmp_path / form, form), tmp_path / "adapter"
    write_adapter(added, CheckpointSpec(), seed=3)
    adapters = [None, LoRARequest(added.name, 1, str(added))] * (len(PROMPTS) // 2)
    alone_tokens = stock_alone(model, adapters, **LORA)
    pair_tokens = stock_pair(model, adapters, **LORA)
    assert len({tuple(output) for output in alone_tokens}) == len(PROMPTS)
    named = [Adapter(added.name, str(added))]
    with RealNode(model, 2, dtype=DTYPE, adapters=named, max_sp=2, **LORA) as node:
        for owned in node.probe_all(probes.loaded_bytes):
            assert 0 < owned["tp2"] < owned["dp"]
        assert by_engines(node, adapters) == alone_tokens
        assert by_engines(node, NONE)[1] != alone_tokens[1], "the adapter changes tokens"
        assert by_sequence(node, adapters) == alone_tokens
        with node.bound(PAIR):
            assert alike(by_pair(node, adapters), pair_tokens)
            node.probe_all(probes.damage_repacked, PAIR.layout)
            damaged = node.generate(PAIR, PROMPTS[::-1], FEW)[::-1]
        assert all(one != other for one, other in zip(damaged, pair_tokens, strict=True))
        assert not alike(damaged, pair_tokens)
        assert by_engines(node, adapters) == alone_tokens
        assert node.audit() == []


def by_engines(node: RealNode, adapters: Adapters) -> Expected:
    """Return what the engines alone generate, to which the prompts are dealt out."""
    requests = [
        node.submit(alone(number % 2), [prompt], TOKENS, adapter=adapter)[0]
        for number, (prompt, adapter) in enumerate(zip(PROMPTS, adapters, strict=True))
    ]
    return node.wait(requests)
