"""FP8 experts of TP and EP layouts: views of what vLLM made of the whole, beside its own sharding.

vLLM has no kernel for them on CPUs that leaves them as they are, so tensors are compared. That its
Triton kernel computes the same on views and on copies, ``loadgen.bench.moe_kernels`` says on GPUs.
"""

from collections.abc import Iterator, Mapping

import pytest
import torch
import vllm._custom_ops as vllm_ops
from vllm.config.quantization import QuantizationConfigArgs
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.quantization import fp8 as fp8_module
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_fp8 as compressed_tensors_module,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
from vllm.model_executor.layers.quantization.online import fp8 as online_fp8
from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

from shoal.policies.values.layouts import Layout
from shoal.runtime.engine.kernels.expert_kernels import GroupedTritonExperts
from shoal.runtime.engine.weights.rules import experts
from shoal.runtime.engine.weights.rules.shards import UnviewableWeights
from shoal.runtime.engine.weights.shared_weights import SharedWeights
from shoal.runtime.engine.weights.store import ResidentWeights
from shoal.runtime.engine.weights.view_loader import arrange_weights, view_weights
from tests.runtime.engine.expert_layers import (
    EXPERTS,
    LARGEST,
    ExpertsLayer,
    make_experts,
    without_groups,
)
from tests.runtime.engine.fp8_formats import BLOCK, compressed_tensors, quantise
from tests.runtime.engine.owned_bytes import owned_bytes

HIDDEN, INTERMEDIATE = 256, 768
"""Half an expert is three blocks of scales, a quarter is none."""


def of_a_checkpoint(**more: object) -> QuantizationConfig:
    return Fp8Config(is_checkpoint_fp8_serialized=True, **more)


def online(shorthand: str) -> OnlineQuantizationConfig:
    """What ``--quantization`` with this name makes of experts that are not quantised."""
    return OnlineQuantizationConfig(QuantizationConfigArgs(moe=shorthand))


FORMATS = {
    "fp8 per tensor, dynamic": lambda: of_a_checkpoint(activation_scheme="dynamic"),
    "fp8 per tensor, static": lambda: of_a_checkpoint(activation_scheme="static"),
    "fp8 block-wise": lambda: of_a_checkpoint(
        activation_scheme="dynamic", weight_block_size=[BLOCK, BLOCK]
    ),
    "compressed-tensors per tensor": lambda: compressed_tensors("tensor", static=True),
    "compressed-tensors per channel": lambda: compressed_tensors("channel"),
    "compressed-tensors block-wise": lambda: compressed_tensors("block"),
    "online per tensor": lambda: online("fp8_per_tensor"),
    "online per channel": lambda: online("fp8_per_channel"),
    "online block-wise": lambda: online("fp8_per_block"),
}
ONLINE = [name for name in FORMATS if "online" in name]


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM picks its Triton kernel, as it does on GPUs when it is told to."""
    without_groups(monkeypatch)
    monkeypatch.setattr(experts, "PlainFp8Experts", Fp8MoEMethod)
    monkeypatch.setattr(experts, "_plain_compressed", lambda *_: None)
    monkeypatch.setattr(vllm_ops, "scaled_fp8_quant", quantised)
    for module in (fp8_module, compressed_tensors_module, online_fp8):
        pick(monkeypatch, module, Fp8MoeBackend.TRITON)
    # vLLM compiles its online quantisation to blocks, for longer than all of it takes here.
    with torch.compiler.set_stance("force_eager"):
        yield


def quantised(
    x: torch.Tensor, scale: torch.Tensor | None = None, **_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """What vLLM's kernel does that its CPU build lacks: without a scale, one for each row."""
    return quantise(x, x.abs().amax(dim=1, keepdim=True) / 448 if scale is None else scale)


def pick(patch: pytest.MonkeyPatch, module: object, backend: Fp8MoeBackend) -> None:
    patch.setattr(module, "select_fp8_moe_backend", lambda **_: (backend, TritonExperts))


def make(
    name: str, rank: int, degree: int, *, views: bool, by_expert: bool = False
) -> ExpertsLayer:
    config = SharedWeights(views=views, inner=FORMATS[name]())
    config.packed_modules_mapping = {}
    return make_experts(config, rank, degree, HIDDEN, INTERMEDIATE, by_expert=by_expert)


def checkpoint(expert: int, shard: str) -> Mapping[str, torch.Tensor]:
    """Return the random tensors of one projection of an expert, in every format."""
    draw = torch.Generator().manual_seed(100 * expert + int(shard[1]))
    rows, columns = (HIDDEN, INTERMEDIATE) if shard == "w2" else (INTERMEDIATE, HIDDEN)
    blocks = torch.rand(rows // BLOCK, columns // BLOCK, generator=draw) + 0.5
    weight = torch.randn(rows, columns, generator=draw)
    return {
        "weight": weight.clamp(-4, 4).to(torch.float8_e4m3fn),
        "channel": torch.rand(rows, 1, generator=draw) + 0.5,
        "tensor": torch.rand(1, generator=draw) + 0.5,
        "block": blocks,
        # That of inputs is the same for gate and up.
        "input_scale": torch.tensor([1.5 + expert]),
    }


def loaded(name: str, rank: int, degree: int, *, by_expert: bool = False) -> ExpertsLayer:
    """Return the layer with the same random checkpoint, loaded and processed by vLLM."""
    layer = make(name, rank, degree, views=False, by_expert=by_expert)
    routed = layer.routed
    for expert in range(EXPERTS):
        for shard in ("w1", "w3", "w2"):
            tensors = checkpoint(expert, shard)
            prefix = "w2_" if shard == "w2" else "w13_"
            for key, parameter in list(routed.named_parameters()):
                processed = name in ONLINE and not parameter.is_meta
                if processed or not key.startswith(prefix):
                    continue
                kind = key.removeprefix(prefix)
                kind = parameter.quant_method if "weight_scale" in kind else kind
                tensor = tensors[kind].to(parameter.dtype)
                parameter.weight_loader(parameter, tensor, key, shard_id=shard, expert_id=expert)
    if name not in ONLINE:  # which vLLM processes as the last tensor is loaded
        routed.quant_method.process_weights_after_loading(routed)
    return layer


def full(name: str) -> ExpertsLayer:
    """Return the DP layer: loaded, processed and grouped."""
    layer = loaded(name, 0, 1)
    arrange_weights(ResidentWeights(layer), LARGEST)
    return layer


def view(
    dp: ExpertsLayer, name: str, rank: int, degree: int, *, by_expert: bool = False
) -> ExpertsLayer:
    layer = make(name, rank, degree, views=True, by_expert=by_expert)
    view_weights(layer, ResidentWeights(dp), Layout(tp=degree), rank)
    layer.routed.quant_method.process_weights_after_loading(layer.routed)
    return layer


def in_order(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """Return rows of ``w13`` with all gate rows first."""
    parts = tensor.float().unflatten(1, (groups, 2, -1))
    return parts.transpose(1, 2).reshape(tensor.shape)


def assert_stocks(viewed: ExpertsLayer, stock: ExpertsLayer) -> None:
    """Check every tensor of the experts, and that the kernel gets these scales."""
    expected = dict(stock.routed.named_parameters())
    found = dict(viewed.routed.named_parameters())
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        ours = found[key]
        if key.startswith("w13_") and tensor.dim() == 3:
            ours = in_order(ours, viewed.routed.shoal_groups)
        assert torch.equal(ours.float(), tensor.float()), key
    experts = viewed.routed.quant_method.moe_kernel.fused_experts
    assert type(experts) is GroupedTritonExperts
    assert experts.groups == viewed.routed.shoal_groups
    scales = [found[key] for key in found if "weight_scale" in key]
    assert experts.w1_scale is scales[0]
    assert experts.w2_scale is scales[1]


def degrees(name: str) -> list[tuple[int, int]]:
    return [(1, 2)] if "block" in name else [(1, 2), (2, 4)]


@pytest.mark.parametrize(
    ("name", "rank", "degree"),
    [(name, *of) for name in FORMATS if name not in ONLINE for of in degrees(name)],
)
def test_shares_of_experts_are_vllms(name: str, rank: int, degree: int) -> None:
    dp = full(name)
    viewed = view(dp, name, rank, degree)
    assert_stocks(viewed, loaded(name, rank, degree))
    assert owned_bytes(viewed, dp) == 0


@pytest.mark.parametrize("name", [name for name in FORMATS if "static" not in name])
@pytest.mark.parametrize(("rank", "degree"), [(0, 2), (3, 4)])
def test_ranges_of_experts_are_vllms(name: str, rank: int, degree: int) -> None:
    dp = full(name)
    viewed = view(dp, name, rank, degree, by_expert=True)
    stock = loaded(name, rank, degree, by_expert=True)
    if "per tensor" in name and "compressed" in name:
        # A member of stock knows the inputs' scales of its own experts alone.
        stock.routed.w13_input_scale = dp.routed.w13_input_scale
        stock.routed.w2_input_scale = dp.routed.w2_input_scale
    assert_stocks(viewed, stock)
    assert owned_bytes(viewed, dp) == 0


@pytest.mark.parametrize("name", ONLINE)
@pytest.mark.parametrize(("rank", "degree"), [(1, 2)])
def test_shares_of_what_vllm_quantised_are_rows_and_columns_of_it(
    name: str, rank: int, degree: int
) -> None:
    """Stock's members reduce over all ranks to find scales, which takes groups."""
    dp, whole = full(name), dict(loaded(name, 0, 1).routed.named_parameters())
    viewed = view(dp, name, rank, degree).routed
    gate, up = whole["w13_weight"].float().chunk(2, dim=1)
    rows = torch.cat([gate.chunk(degree, dim=1)[rank], up.chunk(degree, dim=1)[rank]], dim=1)
    assert torch.equal(in_order(viewed.w13_weight, viewed.shoal_groups), rows)
    columns = whole["w2_weight"].float().chunk(degree, dim=2)[rank]
    assert torch.equal(viewed.w2_weight.float(), columns)
    assert owned_bytes(view(dp, name, rank, degree), dp) == 0


def test_blocks_are_never_cut() -> None:
    """DP's rows are grouped for two members, although the node has groups of four."""
    assert full("fp8 block-wise").routed.shoal_groups == 2
    assert full("fp8 per tensor, dynamic").routed.shoal_groups == 4


@pytest.mark.parametrize("name", ["fp8 block-wise", "compressed-tensors per channel"])
def test_a_kernel_that_packs_experts_is_refused_by_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (fp8_module, compressed_tensors_module):
        pick(monkeypatch, module, Fp8MoeBackend.MARLIN)
    with pytest.raises(UnviewableWeights, match=r"^experts: MARLIN, vLLM's kernel for these exp"):
        make(name, 0, 1, views=False)
