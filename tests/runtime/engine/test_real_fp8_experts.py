"""Experts in FP8 with scales of blocks on real engines, divided by shares (TP) and by number (EP).

The engines that divide them by number also share them: each keeps a half.

vLLM has no kernel for them on CPUs that leaves them in place, and computes FP8 in 16 bits alone.
Here an operator of Shoal computes them, and the node takes fp32, as sums in layouts differ too much
in bf16. The expected tokens are those of stock vLLM with a checkpoint of the same values in fp32.
So this says whether a member finds the right weights with their scales. How a GPU's kernel rounds
activations it does not say.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.model_executor.layers.quantization.fp8 import Fp8Config

from shoal.runtime.whole_experts import ALWAYS, WholeExperts
from tests.random_checkpoint import Architecture, CheckpointSpec, write_checkpoint
from tests.runtime.engine.every_layout import (
    ALL,
    TOKENS,
    EveryLayout,
    Tokens,
    assert_wrong_experts_change_tokens,
    node_in_fp32,
)
from tests.runtime.engine.real_node import RealNode, stock_tokens

SPEC = CheckpointSpec(architecture=Architecture.QWEN3_MOE, seed=31)
BLOCKS = {"shares": 32, "ranges": 128}
"""Half an expert of 128 rows is two blocks of 32, and no block of 128: that node divides by number.
"""


class Checkpoints(NamedTuple):
    packed: Path
    plain: Path


def write_blocks(directory: Path, block: int) -> Checkpoints:
    """Write a model whose experts are in FP8, and one of the same values in fp32."""
    write_checkpoint(directory / "whole", SPEC)
    plain = load_file(directory / "whole" / "model.safetensors")
    packed = dict(plain)
    for name in [name for name in plain if ".experts." in name]:
        weight = plain[name]
        tiles = weight.unfold(0, block, block).unfold(1, block, block)
        scale = tiles.abs().amax((2, 3)) / torch.finfo(torch.float8_e4m3fn).max
        whole = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
        packed[name] = (weight / whole).to(torch.float8_e4m3fn)
        packed[f"{name}_scale_inv"] = scale
        plain[name] = packed[name].float() * whole
    others = {name.removesuffix(".weight") for name in plain if ".experts." not in name}
    # Of some layers vLLM looks up the name that it has for several of them.
    others |= {name.replace("q_proj", "qkv_proj") for name in others}
    others |= {name.replace("gate_proj", "gate_up_proj") for name in others}
    quantisation = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
        "modules_to_not_convert": sorted(others),
    }
    config = json.loads((directory / "whole" / "config.json").read_text())
    written = Checkpoints(directory / "packed", directory / "plain")
    for path, tensors in zip(written, (packed, plain), strict=True):
        shutil.copytree(directory / "whole", path)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    quantised = config | {"quantization_config": quantisation}
    (written.packed / "config.json").write_text(json.dumps(quantised))
    return written


@pytest.fixture(scope="module", params=BLOCKS)
def checkpoints(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoints:
    return write_blocks(tmp_path_factory.mktemp(request.param), BLOCKS[request.param])


@pytest.fixture(scope="module")
def by_number(checkpoints: Checkpoints) -> bool:
    return checkpoints.packed.parent.name.startswith("ranges")


@pytest.fixture(scope="module")
def expected(checkpoints: Checkpoints) -> Tokens:
    return stock_tokens(checkpoints.plain, ALL, TOKENS)


@pytest.fixture(scope="module")
def node(checkpoints: Checkpoints, by_number: bool) -> Iterator[RealNode]:
    # The node that divides each expert computes whole experts in steps that compute a prompt.
    whole, share = (ALWAYS, 2) if by_number else (WholeExperts(17, None, automatic=False), 1)
    with node_in_fp32(checkpoints.packed, Fp8Config, whole, share) as node:
        yield node


class TestFp8Experts(EveryLayout):
    def test_the_wrong_experts_change_the_tokens(self, node: RealNode, by_number: bool) -> None:
        """It is last: what it leaves in the prefix cache is wrong."""
        assert_wrong_experts_change_tokens(node, by_number=by_number)
