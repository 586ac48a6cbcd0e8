"""FP8 weights and an FP8 KV cache on real engines: DP is stock's, TP views the weights.

Per-channel scales, as compressed-tensors writes them, are what vLLM's CPU build can serve. The
model has one KV head, which both members of the group hold. Adapters (LoRA) go with such weights,
too.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.lora.request import LoRARequest

from shoal.policies.values.layouts import alone
from shoal.policies.values.partition import singles
from shoal.runtime.config import Adapter
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages import Mode
from tests.random_adapter import write_adapter
from tests.random_checkpoint import CheckpointSpec, write_checkpoint
from tests.runtime.engine import probes
from tests.runtime.engine import test_real_repacked as repacked
from tests.runtime.engine.prompts import random_prompts
from tests.runtime.engine.real_node import RealNode, stock_tokens
from tests.runtime.engine.scripted_shift import Script
from tests.runtime.engine.test_real_repacked import LORA
from tests.units import tp

PROMPTS = random_prompts((5, 17, 31, 32, 33, 64, 90, 130, 40, 70, 12, 100), seed=11)
GROUP = tp(0, 1)
TOKENS = 16
DTYPE = "bfloat16"
SPEC = CheckpointSpec(layers=2, kv_heads=1, seed=1)
KV = {"kv_cache_dtype": "fp8"}
QUANTISED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def quantised(model: Path, directory: Path) -> Path:
    """Write a copy of a checkpoint whose decoder layers have FP8 weights, a scale by channel."""
    directory.mkdir()
    tensors = load_file(model / "model.safetensors")
    for name in list(tensors):
        if name.split(".")[-2] in QUANTISED and name.endswith(".weight"):
            weight = tensors[name].float()
            scale = weight.abs().amax(dim=1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
            tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale"] = scale
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "all": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": "channel",
                    "symmetric": True,
                },
                "input_activations": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": "token",
                    "symmetric": True,
                    "dynamic": True,
                },
            }
        },
    }
    (directory / "config.json").write_text(json.dumps(config))
    for file in model.iterdir():
        if not (directory / file.name).exists():
            shutil.copy(file, directory)
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fp8")
    write_checkpoint(directory / "whole", SPEC)
    return quantised(directory / "whole", directory / "model")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return stock_tokens(model, PROMPTS, TOKENS, dtype=DTYPE, vllm_args=KV)


@pytest.fixture(scope="module")
def node(model: Path) -> Iterator[RealNode]:
    # Its steps are TP's unless a test says otherwise.
    with RealNode(model, 2, dtype=DTYPE, max_sp=2, **KV) as node:
        yield node


def test_dp_generates_stocks_tokens(node: RealNode, expected: list[list[int]]) -> None:
    assert len({tuple(output) for output in expected}) == len(PROMPTS)
    assert node.generate_spread([alone(0), alone(1)], PROMPTS, TOKENS) == expected


def test_most_first_tokens_of_a_group_are_stocks(node: RealNode, expected: list[list[int]]) -> None:
    """Not all: a member quantises its share of an activation with a scale of its own."""
    with node.bound(GROUP):
        outputs = node.generate(GROUP, PROMPTS, TOKENS)
        assert node.generate(GROUP, PROMPTS, TOKENS) == outputs, "from the prefix cache"
    agreeing = sum(a[0] == b[0] for a, b in zip(outputs, expected, strict=True))
    assert agreeing > len(PROMPTS) / 2  # of a vocabulary of thousands: no accident
    assert node.generate_spread([alone(0), alone(1)], PROMPTS, TOKENS) == expected
    assert node.audit() == []


def test_steps_by_sequence_generate_stocks_tokens(
    node: RealNode, expected: list[list[int]]
) -> None:
    """All of them: a member has whole activations, and quantises them with DP's scales."""
    node.probe_all(probes.take_modes)
    node.script(Script.SP)
    try:
        with node.bound(GROUP):
            outputs = node.generate(GROUP, PROMPTS, TOKENS)
    finally:
        node.script(Script.TP)
    modes = node.probe_all(probes.take_modes)
    assert outputs == expected
    assert all(ran[Mode.SP] >= TOKENS for ran in modes)
    assert not any(ran.get(Mode.TP) for ran in modes)
    assert node.audit() == []


@pytest.mark.parametrize("damaged", [False, True])
def test_fp8_kv_of_one_head_is_carried_to_both_members_and_back(
    node: RealNode, damaged: bool
) -> None:
    """The prompt's KV is of DP. It is compared where it has gone, so rounding by TP shows nothing.

    One wrong block shows.
    """
    (prompt,) = random_prompts((300,), seed=12 + damaged)
    (expected,) = node.generate(alone(0), [prompt], TOKENS)
    requests = node.submit(alone(0), [prompt], 250)
    node.wait_for_tokens(requests, 3)

    def damage(_engine: int, message: m.Message) -> None:
        if damaged and isinstance(message, m.Allot | m.Import) and message.requests:
            for blocks in message.requests[0].blocks.get(0, [])[:1]:  # a rest has none
                blocks[2] = blocks[3]

    node.transport.before_send = damage
    view = node.switch(GROUP, treatment=m.Treatment.CARRY)
    node.transport.before_send = lambda _engine, _message: None
    assert (view.carried, view.recomputed) == (1, {})
    node.wait_for_tokens(requests, len(node.tokens[requests[0]]) + 3)
    engines = node.controller.books.engines
    engines.drain([0], drained=True)  # so that what the group has goes to engine 1
    node.until(lambda: node.partition == singles(2), "the group to be released")
    engines.drain([0], drained=False)
    node.wait(requests)
    again = node.submit(alone(1), [prompt], TOKENS)
    found = node.wait(again) == [expected]
    assert node.probe(1, probes.scheduled)[again[0]] < 100, "the prompt is in the prefix cache"
    assert found is not damaged
    assert node.audit() == []


def test_no_layout_but_dp_owns_weights(node: RealNode) -> None:
    assert node.probe_all(probes.owned_bytes) == [{"dp": 0, "tp2": 0}] * 2


def test_adapters_go_with_fp8_weights(model: Path, tmp_path: Path) -> None:
    """DP's tokens are stock's, also by sequence. TP2's are stock TP2's, but for late near ties.

    Every second request has the adapter, which is not quantised.
    """
    write_adapter(tmp_path / "adapter", SPEC, seed=3)
    adapter = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    adapters = [None, adapter] * (len(repacked.PROMPTS) // 2)
    alone_tokens = repacked.stock_alone(model, adapters, **LORA)
    pair_tokens = repacked.stock_pair(model, adapters, **LORA)
    named = [Adapter(adapter.lora_name, adapter.lora_path)]
    with RealNode(model, 2, dtype=DTYPE, adapters=named, max_sp=2, **LORA) as node:
        assert repacked.by_engines(node, adapters) == alone_tokens
        assert repacked.by_sequence(node, adapters) == alone_tokens
        assert repacked.by_engines(node, repacked.NONE)[1] != alone_tokens[1], "it changes tokens"
        with node.bound(GROUP):
            assert repacked.alike(repacked.by_pair(node, adapters), pair_tokens)
            assert not repacked.alike(repacked.by_pair(node), pair_tokens), "without the adapter"
        assert node.probe_all(probes.owned_bytes) == [{"dp": 0, "tp2": 0}] * 2
        assert node.audit() == []
