"""FP8 weights of TP layouts: views of what vLLM made of the whole, beside its own sharding."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import vllm.model_executor.kernels.linear as linear_kernels
from torch import nn
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
    FP8BlockParams,
)
from vllm.model_executor.kernels.linear.scaled_mm.deep_gemm import DeepGemmFp8BlockScaledMMKernel
from vllm.model_executor.kernels.linear.scaled_mm.triton import TritonFp8BlockScaledMMKernel
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.online import fp8 as online_fp8
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8DynamicTokenSym,
)
from vllm.model_executor.warmup import deep_gemm_warmup
from vllm.platforms import PlatformEnum

from shoal.policies.values.layouts import Layout
from shoal.runtime.engine.kernels import fp8_methods, partitioned_linear
from shoal.runtime.engine.weights.rules import fp8
from shoal.runtime.engine.weights.rules.formats import quantised_method
from shoal.runtime.engine.weights.rules.shards import UnviewableWeights
from shoal.runtime.engine.weights.shared_weights import SharedWeights
from shoal.runtime.engine.weights.store import ResidentWeights
from shoal.runtime.engine.weights.view_loader import (
    arrange_weights,
    compile_kernels,
    view_weights,
)
from shoal.runtime.served_weights import FP8_QUANTISATIONS
from tests.depth import DEEP
from tests.runtime.engine.fp8_formats import (
    BLOCK,
    BLOCK_WISE,
    FORMATS,
    PER_TENSOR_OR_CHANNEL,
    EitherKernel,
    PackedKernel,
    QuantisingBlockKernel,
    ReferenceBlockKernel,
    checkpoint,
    load_part,
    on_cpus,
    pick_for_blocks,
)
from tests.runtime.engine.one_rank import ranks, tensor_parallel
from tests.runtime.engine.owned_bytes import owned_bytes

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 512, 1024, 8, 4, 64
QKV_OF_TWO = tuple(heads * HEAD_DIM // 2 for heads in (HEADS, KV_HEADS, KV_HEADS))
LARGEST = 4

PARTS: Mapping[str, list[tuple[Any, int, int]]] = {
    "qkv_proj": [
        ("q", HEADS * HEAD_DIM, HIDDEN),
        ("k", KV_HEADS * HEAD_DIM, HIDDEN),
        ("v", KV_HEADS * HEAD_DIM, HIDDEN),
    ],
    "o_proj": [(None, HIDDEN, HEADS * HEAD_DIM)],
    "gate_up_proj": [(0, INTERMEDIATE, HIDDEN), (1, INTERMEDIATE, HIDDEN)],
    "down_proj": [(None, HIDDEN, INTERMEDIATE)],
    "column": [(None, INTERMEDIATE, HIDDEN)],
    "router": [(None, HIDDEN, HIDDEN)],
}
"""Each layer's logical parts: vLLM's shard id (None: not fused), rows and columns."""


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    with on_cpus():
        yield


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM picks ``PackedKernel``, in place of CUTLASS."""
    kernels = linear_kernels._POSSIBLE_FP8_KERNELS
    monkeypatch.setitem(kernels, PlatformEnum.CPU, [PackedKernel])
    # What vLLM chooses where it has CUTLASS.
    method = online_fp8.Fp8PerTensorOnlineLinearMethod
    monkeypatch.setattr(method, "activation_quant_key", kFp8DynamicTokenSym)
    monkeypatch.setitem(fp8_methods.INPUT_RANGE_KERNELS, PackedKernel, PackedKernel)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM picks a block-wise kernel that a range of inputs is not for."""
    kernel = TritonFp8BlockScaledMMKernel
    monkeypatch.setattr(kernel, "is_supported", ReferenceBlockKernel.is_supported)
    pick_for_blocks(monkeypatch, ReferenceBlockKernel, kernel)


# --- layers ---


class Layer(nn.Module):
    """The quantised linear layers of one decoder layer, as vLLM's model classes name them."""

    def __init__(self, quant_config: QuantizationConfig, *, bias: bool = False) -> None:
        super().__init__()

        def options(name: str) -> dict[str, Any]:
            return {"quant_config": quant_config, "bias": bias, "prefix": f"layers.0.{name}"}

        self.qkv_proj = QKVParallelLinear(HIDDEN, HEAD_DIM, HEADS, KV_HEADS, **options("qkv_proj"))
        self.o_proj = RowParallelLinear(HEADS * HEAD_DIM, HIDDEN, **options("o_proj"))
        self.gate_up_proj = MergedColumnParallelLinear(
            HIDDEN, [INTERMEDIATE] * 2, **options("gate_up_proj")
        )
        self.act_fn = SiluAndMul()
        self.down_proj = RowParallelLinear(INTERMEDIATE, HIDDEN, **options("down_proj"))
        self.column = ColumnParallelLinear(HIDDEN, INTERMEDIATE, **options("column"))
        self.router = ReplicatedLinear(HIDDEN, HIDDEN, **options("router"))


def configured(name: str, *, views: bool) -> SharedWeights:
    config = SharedWeights(views=views, inner=FORMATS[name]())
    config.packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    return config


def load(layer: Layer) -> None:
    """Load the same random checkpoint through vLLM's own weight loaders, and process it."""
    draw = torch.Generator().manual_seed(5)
    for name, parts in PARTS.items():
        module = getattr(layer, name)
        tensors = checkpoint(parts, draw)
        with largest_of_all_ranks(torch.cat([part["weight"] for part in tensors])):
            for (shard, *_), part in zip(parts, tensors, strict=True):
                load_part(module, shard, part, per_tensor=len(parts))
            module.quant_method.process_weights_after_loading(module)


@contextmanager
def largest_of_all_ranks(weight: torch.Tensor) -> Iterator[None]:
    """Stand in for the all-reduce by which ranks that quantise their shards agree on scales."""
    whole = weight.to(torch.bfloat16)

    def reduced(amax: torch.Tensor, is_sharded: bool) -> torch.Tensor:
        if not is_sharded:
            return amax
        by_row = whole.abs().amax(dim=1, keepdim=True)
        return by_row.max().reshape(1) if amax.numel() == 1 else by_row

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(online_fp8, "amax_for_tp_weight_quant", reduced)
        yield


def stock(name: str, rank: int, degree: int, *, bias: bool = False) -> Layer:
    """Return what stock vLLM holds on one rank, processed there."""
    with tensor_parallel(rank, degree):
        layer = Layer(configured(name, views=False), bias=bias)
        load(layer)
    return layer


def full(name: str, *, bias: bool = False) -> Layer:
    """Return the DP layer: loaded, processed and grouped."""
    layer = stock(name, 0, 1, bias=bias)
    arrange_weights(ResidentWeights(layer), LARGEST)
    return layer


def view(dp: Layer, name: str, rank: int, degree: int, *, bias: bool = False) -> Layer:
    with tensor_parallel(rank, degree):
        layer = Layer(configured(name, views=True), bias=bias)
        view_weights(layer, ResidentWeights(dp), Layout(tp=degree), rank)
    return layer


def degrees(name: str) -> list[tuple[int, int]]:
    # A rank of TP4 would have half a block of keys.
    return ranks(2) if name in BLOCK_WISE else ranks(2, 4)


CASES = [(name, rank, degree) for name in FORMATS for rank, degree in degrees(name)]


def outputs(layer: Layer, x: torch.Tensor, rank: int, degree: int) -> dict[str, torch.Tensor]:
    """Return every layer's output, before any all-reduce."""
    inner = x.new_zeros(x.shape[0], INTERMEDIATE).copy_(x.repeat(1, INTERMEDIATE // HIDDEN))
    results = {
        "qkv_proj": layer.qkv_proj(x)[0],
        "gate_up_proj": layer.act_fn(layer.gate_up_proj(x)[0]),
        "column": layer.column(x)[0],
        "router": layer.router(x)[0],
    }
    for name, source in (("o_proj", x), ("down_proj", inner)):
        module = getattr(layer, name)
        share = source.chunk(degree, dim=1)[rank].contiguous()
        bias = module.bias if rank == 0 else None
        results[name] = module.quant_method.apply(module, share, bias)
    return results


def assert_like_stock(viewed: Layer, expected: Layer, rank: int, degree: int) -> None:
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(9)).to(torch.bfloat16)
    found = outputs(viewed, x, rank, degree)
    for name, output in outputs(expected, x, rank, degree).items():
        assert output.abs().max() > 0.1, name
        torch.testing.assert_close(found[name], output, rtol=0.02, atol=0.02, msg=name)


# --- views ---


@pytest.mark.parametrize(("name", "rank", "degree"), CASES)
def test_every_layer_computes_what_stock_computes(name: str, rank: int, degree: int) -> None:
    viewed = view(full(name), name, rank, degree)
    assert_like_stock(viewed, stock(name, rank, degree), rank, degree)


@pytest.mark.parametrize("name", FORMATS)
def test_a_bias_is_added_once(name: str) -> None:
    dp = full(name, bias=True)
    for rank in range(2):
        viewed = view(dp, name, rank, 2, bias=True)
        assert_like_stock(viewed, stock(name, rank, 2, bias=True), rank, 2)


@pytest.mark.parametrize(("name", "rank", "degree"), CASES)
def test_the_tensors_are_vllms_shards(name: str, rank: int, degree: int) -> None:
    expected, viewed = stock(name, rank, degree), view(full(name), name, rank, degree)
    for key in ("o_proj", "down_proj", "column", "router"):
        shards = dict(getattr(expected, key).named_parameters())
        views = dict(getattr(viewed, key).named_parameters())
        assert views.keys() == shards.keys()
        for tensor, shard in shards.items():
            assert torch.equal(views[tensor].float(), shard.float()), (key, tensor)


@pytest.mark.parametrize("name", FORMATS)
def test_dp_computes_what_stock_computes(name: str) -> None:
    expected = stock(name, 0, 1)
    assert {getattr(expected, part).weight.dtype for part in PARTS} == {torch.float8_e4m3fn}
    assert_like_stock(full(name), expected, 0, 1)
    with tensor_parallel(0, 1):
        ungrouped = stock(name, 0, 1)
    x = torch.randn(5, HIDDEN)
    assert torch.equal(ungrouped.qkv_proj(x)[0], expected.qkv_proj(x)[0])


@pytest.mark.parametrize(("name", "rank", "degree"), CASES)
def test_views_own_no_byte(name: str, rank: int, degree: int) -> None:
    dp = full(name)
    assert owned_bytes(view(dp, name, rank, degree), dp) == 0


# --- CUTLASS ---


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", PER_TENSOR_OR_CHANNEL)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_kernel_that_ignores_strides_gets_no_range_of_inputs(
    name: str, rank: int, bias: bool
) -> None:
    viewed = view(full(name, bias=bias), name, rank, 2, bias=bias)
    assert_like_stock(viewed, stock(name, rank, 2, bias=bias), rank, 2)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The sizes of the ranges of rows of every layer that the operator computed."""
    calls: list[tuple[int, ...]] = []
    linear = partitioned_linear.linear

    def noted(
        x: torch.Tensor, weights: list[torch.Tensor], *rest: Any, x_scale: torch.Tensor
    ) -> torch.Tensor:
        calls.append(tuple(weight.shape[0] for weight in weights))
        return linear(x, weights, *rest, x_scale=x_scale)

    monkeypatch.setattr(partitioned_linear, "linear", noted)
    return calls


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("name", PER_TENSOR_OR_CHANNEL)
def test_ranges_of_rows_and_of_inputs_are_one_launch_each(
    name: str, launched: list[tuple[int, ...]]
) -> None:
    outputs(view(full(name), name, 1, 2), torch.randn(5, HIDDEN), 1, 2)
    assert launched == [QKV_OF_TWO, (HIDDEN,), (HIDDEN,)]


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("name", BLOCK_WISE)
@pytest.mark.parametrize("rank", [0, 1])
def test_ranges_with_block_wise_scales_are_one_launch_each(
    name: str, rank: int, launched: list[tuple[int, ...]]
) -> None:
    viewed = view(full(name, bias=True), name, rank, 2, bias=True)
    assert_like_stock(viewed, stock(name, rank, 2, bias=True), rank, 2)
    assert launched == [QKV_OF_TWO, (HIDDEN,), (HIDDEN,)]


EVERY_COMPILED = list(product(BLOCK_WISE, (False, True)))
COMPILED = EVERY_COMPILED if DEEP else EVERY_COMPILED[::3]
"""Formats with and without a bias; to compile one takes seconds."""


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize(("name", "bias"), COMPILED)
def test_ranges_with_block_wise_scales_are_one_operator_each_to_a_compiler(
    name: str, bias: bool
) -> None:
    viewed = view(full(name, bias=bias), name, 1, 2, bias=bias)
    graphs: list[Any] = []

    def backend(graph: Any, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    for layer, width in ((viewed.qkv_proj, HIDDEN), (viewed.o_proj, HEADS * HEAD_DIM // 2)):
        graphs.clear()
        torch.compiler.reset()  # all that the tests before compiled is of the same code
        apply = layer.quant_method.apply
        with torch.compiler.set_stance("default"):
            compiled = torch.compile(
                lambda x, layer=layer, apply=apply: apply(layer, x),
                backend=backend,
                fullgraph=True,
                dynamic=True,
            )
            for tokens in (3, 8, 65):
                x = torch.randn(tokens, width)
                assert torch.equal(compiled(x), apply(layer, x))
        (graph,) = graphs
        called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        assert sum("partitioned_linear" in name for name in called) == 1, called


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("name", BLOCK_WISE)
@pytest.mark.parametrize("powers", [False, True])
def test_what_picks_one_of_two_kernels_leaves_the_quantisation_to_the_second(
    name: str, powers: bool, launched: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pick_for_blocks(monkeypatch, EitherKernel, TritonFp8BlockScaledMMKernel)
    monkeypatch.setattr(EitherKernel, "powers", powers)
    viewed = view(full(name), name, 1, 2)
    assert_like_stock(viewed, stock(name, 1, 2), 1, 2)
    assert launched == [QKV_OF_TWO, (HIDDEN,), (HIDDEN,)]
    assert fp8_methods.fp8_owner(viewed.o_proj).fp8_linear.quant_fp8.use_ue8m0 == powers


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("name", BLOCK_WISE)
@pytest.mark.parametrize("reason", ["inputs as they are", "other blocks"])
def test_qkv_that_our_kernel_does_not_know_is_a_product_for_each_part(
    name: str, reason: str, launched: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "inputs as they are":
        pick_for_blocks(monkeypatch, QuantisingBlockKernel, QuantisingBlockKernel)
    else:
        monkeypatch.setattr(fp8_methods, "BLOCK", 64)
    viewed = view(full(name, bias=True), name, 1, 2, bias=True)
    layer, expected = viewed.qkv_proj, stock(name, 1, 2, bias=True).qkv_proj
    assert type(layer.quant_method) is fp8_methods.SplitFp8
    assert warmed_up(layer, monkeypatch) == []
    x = torch.randn(5, HIDDEN)
    torch.testing.assert_close(layer(x)[0], expected(x)[0], rtol=0.02, atol=0.02)
    assert launched == []


def warmed_up(layer: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the ranges for which a layer has kernels of ours compiled."""
    ranges: list[Any] = []
    monkeypatch.setattr(partitioned_linear, "warm_up", lambda *given: ranges.append(given))
    fp8_methods.warm_up(layer, set())
    return ranges


@pytest.fixture
def deep_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM picks DeepGEMM, which it has for GPUs alone."""
    pick_for_blocks(monkeypatch, DeepGemmFp8BlockScaledMMKernel, TritonFp8BlockScaledMMKernel)
    supported = ReferenceBlockKernel.is_supported
    for kernel in (DeepGemmFp8BlockScaledMMKernel, TritonFp8BlockScaledMMKernel):
        monkeypatch.setattr(kernel, "is_supported", supported)
    monkeypatch.setattr(DeepGemmFp8BlockScaledMMKernel, "can_implement", lambda _: (True, None))
    multiply = ReferenceBlockKernel.apply_block_scaled_mm
    for kernel in (DeepGemmFp8BlockScaledMMKernel, TritonFp8BlockScaledMMKernel):
        monkeypatch.setattr(kernel, "apply_block_scaled_mm", multiply)
    monkeypatch.setattr(
        deep_gemm_warmup, "get_mk_alignment_for_contiguous_layout", lambda: [BLOCK, BLOCK]
    )


@pytest.mark.usefixtures("deep_gemm")
@pytest.mark.parametrize("in_one_launch", [False, True])
@pytest.mark.parametrize("name", BLOCK_WISE)
def test_vllm_warms_deep_gemm_up_for_what_a_layout_multiplies_with_it(
    name: str, in_one_launch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_one_launch:
        monkeypatch.setattr(fp8_methods, "MAX_RANGES", 1)
    warmed: list[tuple[int, ...]] = []

    def warm_up(w: torch.Tensor, ws: torch.Tensor, **_: object) -> None:
        assert ws.shape == tuple(size // BLOCK for size in w.shape)
        assert w.is_contiguous()
        warmed.append(tuple(w.shape))

    monkeypatch.setattr(deep_gemm_warmup, "_deepgemm_fp8_gemm_nt_warmup", warm_up)
    viewed = view(full(name), name, 1, 2)
    assert_like_stock(viewed, stock(name, 1, 2), 1, 2)
    deep_gemm_warmup.deepgemm_fp8_gemm_nt_warmup(viewed, 8192)
    parts = [] if in_one_launch else [(size, HIDDEN) for size in QKV_OF_TWO]
    columns = [(INTERMEDIATE, HIDDEN), (INTERMEDIATE // 2, HIDDEN), (HIDDEN, HIDDEN)]
    assert warmed == parts + columns


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("reason", ["other blocks", "scales of exponents"])
def test_what_our_kernel_does_not_know_is_left_to_vllms(
    reason: str, launched: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(Exception):
        pass

    def ask(*_: object, **__: object) -> None:
        raise Asked

    monkeypatch.setattr(TritonFp8BlockScaledMMKernel, "apply_block_scaled_mm", ask)
    name = "fp8 block-wise"
    dp = full(name)
    if reason == "other blocks":
        monkeypatch.setattr(fp8_methods, "BLOCK", 64)
    else:
        exponents = dp.o_proj.weight_scale_inv.data.to(torch.float8_e8m0fnu)
        dp.o_proj.weight_scale_inv = nn.Parameter(exponents, requires_grad=False)
    layer = view(dp, name, 1, 2).o_proj
    with pytest.raises(Asked):
        layer.quant_method.apply(layer, torch.randn(5, HEADS * HEAD_DIM // 2))
    assert launched == []
    assert warmed_up(layer, monkeypatch) == []


@pytest.mark.parametrize("name", PER_TENSOR_OR_CHANNEL)
def test_other_kernels_keep_their_products(name: str, launched: list[tuple[int, ...]]) -> None:
    """PyTorch's read any strides, and pad activations."""
    outputs(view(full(name), name, 1, 2), torch.randn(5, HIDDEN), 1, 2)
    assert launched == []


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("bias", [False, True])
def test_kernels_are_compiled_once_for_each_shape(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed: list[tuple[int, int, int]] = []

    def warm_up(weights: Any, biases: Any, _: object, dtype: torch.dtype, block: int) -> None:
        assert (dtype, block) == (torch.bfloat16, 0)
        warmed.append((len(weights), weights[0].shape[1], len(biases)))

    monkeypatch.setattr(partitioned_linear, "warm_up", warm_up)
    name = "compressed-tensors per channel"
    viewed = view(full(name, bias=bias), name, 1, 2, bias=bias)
    compile_kernels(nn.ModuleList([viewed, view(full(name), name, 1, 2)]))
    without = [(3, HIDDEN, 0), (1, HEADS * HEAD_DIM // 2, 0), (1, INTERMEDIATE // 2, 0)]
    # A row-parallel layer adds its bias on one member alone.
    with_bias = [(3, HIDDEN, 3), (1, HEADS * HEAD_DIM // 2, 1), (1, INTERMEDIATE // 2, 1)]
    assert sorted(warmed) == sorted(without + (with_bias if bias else []))


@pytest.mark.usefixtures("packed")
def test_with_a_range_of_inputs_it_would_compute_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def keep_kernel(layer: nn.Module) -> bool:
        if not hasattr(layer, "parts"):
            fp8_methods._note_loaded(layer.scheme.fp8_linear, layer)
        return hasattr(layer, "parts")

    monkeypatch.setattr(fp8_methods, "_in_one_launch", keep_kernel)
    name = "compressed-tensors per channel"
    viewed = view(full(name), name, 1, 2)
    with pytest.raises(AssertionError, match="o_proj"):
        assert_like_stock(viewed, stock(name, 1, 2), 1, 2)


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("name", PER_TENSOR_OR_CHANNEL)
def test_only_a_spread_scale_is_the_layouts_own(name: str) -> None:
    """A scale by tensor, where activations have scales by token: 4 bytes for every output."""
    dp = full(name)
    spread = name in ("compressed-tensors per tensor, dynamic", "online per tensor")
    assert owned_bytes(view(dp, name, 1, 2), dp) == (2 * 4 * HIDDEN if spread else 0)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("name", BLOCK_WISE)
@pytest.mark.parametrize("rank", [0, 1])
def test_of_blocks_only_row_parallel_scales_are_the_layouts_own(name: str, rank: int) -> None:
    """They are packed, as cuBLAS wants them."""
    dp = full(name)
    viewed = view(dp, name, rank, 2)
    scales = [
        FP8BlockParams.from_layer(layer).block_scale for layer in (viewed.o_proj, viewed.down_proj)
    ]
    assert all(scale.is_contiguous() for scale in scales)
    assert owned_bytes(viewed, dp) == sum(4 * scale.numel() for scale in scales) > 0


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("name", BLOCK_WISE)
def test_scales_of_inputs_lie_block_by_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As cuBLAS and CUTLASS want them, with no copy before a product."""

    def noted(x: torch.Tensor, *ranges: Any, x_scale: torch.Tensor) -> torch.Tensor:
        orders.append((x.shape, x_scale.stride()))
        return linear(x, *ranges, x_scale=x_scale)

    orders: list[tuple[torch.Size, tuple[int, ...]]] = []
    linear = partitioned_linear.linear
    monkeypatch.setattr(partitioned_linear, "linear", noted)
    viewed = view(full(name), name, 1, 2)
    for layer in (viewed.o_proj, viewed.down_proj):
        layer.quant_method.apply(layer, torch.randn(5, layer.input_size_per_partition))
    assert [stride for _, stride in orders] == [(1, 5), (1, 5)]
    assert min(shape[1] for shape, _ in orders) > 0


@pytest.mark.usefixtures("blocks")
def test_kernels_for_blocks_are_compiled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[tuple[int, int, int, int]] = []

    def warm_up(weights: Any, biases: Any, scales: Any, _: torch.dtype, block: int) -> None:
        for weight, scale in zip(weights, scales, strict=True):
            assert scale.shape == tuple(size // block for size in weight.shape)
        warmed.append((len(weights), weights[0].shape[1], len(biases), block))

    monkeypatch.setattr(partitioned_linear, "warm_up", warm_up)
    name = "fp8 block-wise"
    dp = full(name, bias=True)
    compile_kernels(nn.ModuleList([view(dp, name, rank, 2, bias=True) for rank in (0, 1)]))
    depths = (HEADS * HEAD_DIM // 2, INTERMEDIATE // 2)
    row_parallel = [(1, depth, biases, BLOCK) for depth in depths for biases in (0, 1)]
    assert warmed == [(3, HIDDEN, 3, BLOCK), *row_parallel]


# --- what cannot be viewed ---


def test_a_shard_that_cuts_a_block_is_named() -> None:
    dp = full("fp8 block-wise")
    with pytest.raises((UnviewableWeights, ValueError), match=r"128"):
        view(dp, "fp8 block-wise", 1, 4)


def test_groups_that_cut_a_block_are_named() -> None:
    dp = stock("fp8 block-wise", 0, 1)
    with pytest.raises(UnviewableWeights, match=r"^gate_up_proj: .* do not make 16 groups$"):
        arrange_weights(ResidentWeights(dp), 16)


def test_a_kernel_with_a_form_of_its_own_is_named() -> None:
    class RepackingKernel:
        pass

    name = "compressed-tensors per channel"
    dp = full(name)
    dp.o_proj.scheme.fp8_linear = RepackingKernel()
    with pytest.raises(UnviewableWeights, match=r"^o_proj: RepackingKernel keeps FP8 weights"):
        view(dp, name, 0, 2)


def test_a_padded_weight_is_named() -> None:
    name = "compressed-tensors per channel"
    dp = full(name)
    padded = torch.nn.functional.pad(dp.down_proj.weight.float(), (0, 16))
    dp.down_proj.weight = nn.Parameter(padded.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(UnviewableWeights, match=r"^down_proj: .* changed the shape of weight$"):
        view(dp, name, 0, 2)


@pytest.mark.usefixtures("deep_gemm")
@pytest.mark.parametrize("name", BLOCK_WISE)
def test_of_scales_that_deep_gemm_packed_the_way_out_is_named(name: str) -> None:
    """As it does on Blackwell: four exponents in a word."""
    dp = full(name)
    scale = "weight_scale" if hasattr(dp.down_proj, "weight_scale") else "weight_scale_inv"
    packed = torch.zeros(HIDDEN, INTERMEDIATE // (4 * BLOCK), dtype=torch.int32)
    setattr(dp.down_proj, scale, nn.Parameter(packed, requires_grad=False))
    with pytest.raises(UnviewableWeights) as raised:
        view(dp, name, 0, 2)
    assert str(raised.value) == (
        f"down_proj: DeepGemmFp8BlockScaledMMKernel has changed the shape of {scale};"
        " with VLLM_USE_DEEP_GEMM=0 vLLM takes another kernel"
    )


def test_another_quantisation_is_named() -> None:
    class AWQLinearMethod:
        pass

    with pytest.raises(UnviewableWeights, match=r"^model\.o_proj: AWQLinearMethod weights are not"):
        quantised_method(AWQLinearMethod(), nn.Module(), "model.o_proj", views=True)


def test_every_quantisation_that_is_accepted_before_the_start_is_known() -> None:
    assert fp8._SCHEMES.keys() == FP8_QUANTISATIONS
