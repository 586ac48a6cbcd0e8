"""Experts in FP8 with scales of blocks on real engines, divided by shares (TP) and by number (EP).

The engines that divide them by number also share them: each keeps a half. With
``SHOAL_TESTS=all`` they share those of compressed-tensors, too, in blocks and in channels, and
requests are carried.

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
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config

from shoal.runtime.whole_experts import ALWAYS, WholeExperts
from tests.depth import DEEP
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


class Form(NamedTuple):
    """How a checkpoint has its experts."""

    rows: int
    """Of a weight, those that share a scale."""
    is_shared: bool = True
    """Whether engines share experts. Then groups divide them by number."""
    strategy: str = ""
    """Compressed-tensors' name of what shares a scale; empty: it is vLLM's ``fp8``."""


FORMS = {
    # Half an expert is two blocks of 32, so this node divides each.
    "shares": Form(32, is_shared=False),
    "ranges": Form(128),
}
if DEEP:
    FORMS |= {
        "compressed blocks": Form(128, strategy="block"),
        "channels": Form(1, strategy="channel"),
    }


class Checkpoints(NamedTuple):
    packed: Path
    plain: Path


def write_fp8(directory: Path, form: Form) -> Checkpoints:
    """Write a model whose experts are in FP8, and one of the same values in fp32."""
    write_checkpoint(directory / "whole", SPEC)
    plain = load_file(directory / "whole" / "model.safetensors")
    packed = dict(plain)
    for name in [name for name in plain if ".experts." in name]:
        weight, rows = plain[name], form.rows
        columns = weight.shape[1] if form.strategy == "channel" else rows
        tiles = weight.unfold(0, rows, rows).unfold(1, columns, columns)
        scale = tiles.abs().amax((2, 3)) / torch.finfo(torch.float8_e4m3fn).max
        whole = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        packed[name] = (weight / whole).to(torch.float8_e4m3fn)
        packed[f"{name}_scale" if form.strategy else f"{name}_scale_inv"] = scale
        plain[name] = packed[name].float() * whole
    others = {name.removesuffix(".weight") for name in plain if ".experts." not in name}
    # Of some layers vLLM looks up the name that it has for several of them.
    others |= {name.replace("q_proj", "qkv_proj") for name in others}
    others |= {name.replace("gate_proj", "gate_up_proj") for name in others}
    config = json.loads((directory / "whole" / "config.json").read_text())
    written = Checkpoints(directory / "packed", directory / "plain")
    for path, tensors in zip(written, (packed, plain), strict=True):
        shutil.copytree(directory / "whole", path)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    quantised = config | {"quantization_config": quantisation(form, sorted(others))}
    (written.packed / "config.json").write_text(json.dumps(quantised))
    return written


def quantisation(form: Form, others: list[str]) -> dict[str, Any]:
    """Return what a checkpoint's configuration says of FP8.

    Args:
        form: of its experts.
        others: the names of layers that are not quantised.
    """
    size = [form.rows, form.rows]
    if not form.strategy:
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": size,
            "modules_to_not_convert": others,
        }
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = fp8 | {"strategy": form.strategy, "dynamic": False}
    inputs = fp8 | {"strategy": "token", "dynamic": True}
    if form.strategy == "block":
        weights |= {"block_structure": size}
        inputs |= {"strategy": "group", "group_size": form.rows}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"all": group},
        "ignore": others,
    }


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    return FORMS[request.param]


@pytest.fixture(scope="module")
def checkpoints(form: Form, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return write_fp8(tmp_path_factory.mktemp("models"), form)


@pytest.fixture(scope="module")
def expected(checkpoints: Checkpoints) -> Tokens:
    return stock_tokens(checkpoints.plain, ALL, TOKENS)


@pytest.fixture(scope="module")
def node(checkpoints: Checkpoints, form: Form) -> Iterator[RealNode]:
    # The node that divides each expert computes whole experts in steps that compute a prompt.
    whole = ALWAYS if form.is_shared else WholeExperts(17, None, automatic=False)
    of_vllm = CompressedTensorsConfig if form.strategy else Fp8Config
    share = 2 if form.is_shared else 1
    with node_in_fp32(checkpoints.packed, of_vllm, whole, share) as node:
        yield node


class TestFp8Experts(EveryLayout):
    carries = False

    def test_the_wrong_experts_change_the_tokens(self, node: RealNode, form: Form) -> None:
        """It is last: what it leaves in the prefix cache is wrong."""
        assert_wrong_experts_change_tokens(node, by_number=form.is_shared)
