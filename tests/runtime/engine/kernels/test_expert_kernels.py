"""Routed experts on weights that are views, beside the same sums written out."""

import pytest
import torch
from torch.nn import functional
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from vllm import _custom_ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SwigluOAIAndMul
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts import triton_moe
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.platforms import current_platform

from shoal.runtime.engine.kernels.expert_kernels import (
    GroupedTritonExperts,
    of_mxfp4,
    plain_experts,
)
from shoal.runtime.engine.weights.rules.fused import regroup_rows

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, TOKENS = 6, 32, 128, 3, 9
GROUPS = 4


class Layer:
    """Random experts, in vLLM's order of rows, and what nine tokens ask of them."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(3)
        self.x = torch.randn(TOKENS, HIDDEN, generator=draw)
        self.w13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=draw)
        self.w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=draw)
        self.weights = torch.rand(TOKENS, TOP_K, generator=draw)
        order = [torch.randperm(EXPERTS, generator=draw)[:TOP_K] for _ in range(TOKENS)]
        self.ids = torch.stack(order).to(torch.int32)

    @property
    def grouped(self) -> torch.Tensor:
        """Each expert's rows, grouped for members of up to four."""
        return torch.stack([regroup_rows(expert, GROUPS) for expert in self.w13])

    def expected(self) -> torch.Tensor:
        """Return the definition, with no order of rows but vLLM's."""
        gate_up = torch.einsum("td,tkrd->tkr", self.x, self.w13[self.ids.long()])
        gate, up = gate_up.chunk(2, dim=-1)
        inner = functional.silu(gate) * up * self.weights[..., None]
        return torch.einsum("tki,tkhi->th", inner, self.w2[self.ids.long()])


def share(layer: Layer, rank: int, of: int) -> torch.Tensor:
    """Return what one of several members computes of grouped experts."""
    rows, columns = 2 * INTERMEDIATE // of, INTERMEDIATE // of
    w13 = layer.grouped.narrow(1, rank * rows, rows)
    w2 = layer.w2.narrow(2, rank * columns, columns)
    return plain_experts(layer.x, w13, w2, layer.weights, layer.ids, groups=GROUPS // of)


def test_experts_in_vllms_order() -> None:
    layer = Layer()
    found = plain_experts(layer.x, layer.w13, layer.w2, layer.weights, layer.ids)
    torch.testing.assert_close(found, layer.expected(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("of", [1, 2, 4])
def test_the_shares_of_all_members_add_up(of: int) -> None:
    layer = Layer()
    found = sum(share(layer, rank, of) for rank in range(of))
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found, layer.expected(), rtol=1e-4, atol=1e-3)


def test_another_number_of_groups_gives_other_sums() -> None:
    layer = Layer()
    found = plain_experts(layer.x, layer.grouped, layer.w2, layer.weights, layer.ids, groups=2)
    assert not torch.allclose(found, layer.expected(), rtol=0.1, atol=1.0)


def by_range(layer: Layer, expert_maps: list[list[int]]) -> torch.Tensor:
    """Return the sum of members with a third of the experts each, which these maps describe."""
    found = torch.zeros_like(layer.x)
    for rank, expert_map in enumerate(expert_maps):
        own = slice(rank * 2, rank * 2 + 2)
        found += plain_experts(
            *(layer.x, layer.w13[own], layer.w2[own], layer.weights, layer.ids),
            torch.tensor(expert_map, dtype=torch.int32),
        )
    return found


RANGES = [[0, 1, -1, -1, -1, -1], [-1, -1, 0, 1, -1, -1], [-1, -1, -1, -1, 0, 1]]


def test_ranges_of_experts_add_up() -> None:
    layer = Layer()
    torch.testing.assert_close(by_range(layer, RANGES), layer.expected(), rtol=1e-4, atol=1e-3)


def test_a_wrong_map_of_experts_gives_other_sums() -> None:
    layer = Layer()
    wrong = [[1, 0, -1, -1, -1, -1], *RANGES[1:]]
    assert not torch.allclose(by_range(layer, wrong), layer.expected(), rtol=0.1, atol=1.0)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_vllms_activation_reads_groups_in_place(groups: int) -> None:
    """Of vLLM's Triton experts nothing but this is ours: it does not depend on the device."""
    current_platform.import_kernels()
    rows = torch.randn(5, 2 * INTERMEDIATE)
    grouped = regroup_rows(rows.t(), groups).t().contiguous()
    experts = object.__new__(GroupedTritonExperts)
    experts.groups = groups
    expected, found = torch.empty(2, 5, INTERMEDIATE)
    torch.ops._C.silu_and_mul(expected, rows)
    experts.activation(MoEActivation.SILU, found, grouped)
    assert torch.equal(found, expected)


def quantised(
    rows: torch.Tensor, group_size: int, quant_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand for vLLM's operator of GPUs, which fuses SwiGLU with the quantisation in blocks."""
    gate, up = rows.chunk(2, dim=-1)
    blocks = (functional.silu(gate) * up).unflatten(-1, (-1, group_size))
    scales = blocks.abs().amax(-1) / torch.finfo(quant_dtype).max
    return (blocks / scales[..., None]).flatten(1).to(quant_dtype), scales


@pytest.mark.parametrize(("groups", "told"), [(1, 1), (2, 2), (4, 4), (4, 2), (2, 1)])
def test_vllms_fused_activation_reads_groups_in_place(
    groups: int, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``TritonExperts.apply`` calls it, which needs a GPU for all that is around it."""
    block = {"group_size": INTERMEDIATE // 4, "quant_dtype": torch.float8_e4m3fn}

    def apply(_: TritonExperts, rows: torch.Tensor, found: list[torch.Tensor]) -> None:
        found[:] = triton_moe.ops.silu_and_mul_per_block_quant(rows, **block)

    monkeypatch.setattr(_custom_ops, "silu_and_mul_per_block_quant", quantised)
    monkeypatch.setattr(TritonExperts, "apply", apply)
    rows = torch.randn(5, 2 * INTERMEDIATE)
    grouped = regroup_rows(rows.t(), groups).t().contiguous()
    experts = object.__new__(GroupedTritonExperts)
    experts.group(told)
    found: list[torch.Tensor] = []
    experts.apply(grouped, found)
    pairs = list(zip(found, quantised(rows, **block), strict=True))
    assert all(ours.shape == stocks.shape for ours, stocks in pairs)
    same = all(torch.equal(ours.float(), stocks.float()) for ours, stocks in pairs)
    assert same == (groups == told)


def test_other_experts_have_vllms_own_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_custom_ops, "silu_and_mul_per_block_quant", quantised)

    def fail(*_: object) -> None:
        raise RuntimeError("a step that fails")

    monkeypatch.setattr(TritonExperts, "apply", fail)
    experts = object.__new__(GroupedTritonExperts)
    experts.group(4)
    with pytest.raises(RuntimeError, match="a step that fails"):
        experts.apply()
    rows = torch.randn(5, 2 * INTERMEDIATE)
    found = triton_moe.ops.silu_and_mul_per_block_quant(rows, 32, torch.float8_e4m3fn)
    assert torch.equal(found[1], quantised(rows, 32, torch.float8_e4m3fn)[1])
    assert triton_moe.ops.topk_softmax is _custom_ops.topk_softmax


@pytest.mark.parametrize("of", [1, 2, 4])
def test_experts_with_rows_in_turn_and_biases(of: int) -> None:
    """GPT-OSS: a member's share is a range of rows, and one member adds the second bias."""
    layer, draw = Layer(), torch.Generator().manual_seed(4)
    first = torch.randn(EXPERTS, 2 * INTERMEDIATE, generator=draw)
    second = torch.randn(EXPERTS, HIDDEN, generator=draw)
    ids = layer.ids.long()
    gate_up = torch.einsum("td,tkrd->tkr", layer.x, layer.w13[ids]) + first[ids]
    with set_current_vllm_config(VllmConfig()):
        inner = SwigluOAIAndMul().forward_native(gate_up)
    each = torch.einsum("tki,tkhi->tkh", inner, layer.w2[ids]) + second[ids]
    expected = (each * layer.weights[..., None]).sum(1)
    found = torch.zeros_like(expected)
    for rank in range(of):
        rows, columns = 2 * INTERMEDIATE // of, INTERMEDIATE // of
        found += plain_experts(
            layer.x,
            layer.w13.narrow(1, rank * rows, rows),
            layer.w2.narrow(2, rank * columns, columns),
            *(layer.weights, layer.ids),
            w13_bias=first.narrow(1, rank * rows, rows),
            w2_bias=None if rank else second,
            in_turn=True,
        )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_values_in_mxfp4_are_those_of_transformers() -> None:
    draw = torch.Generator().manual_seed(5)
    packed = torch.randint(0, 256, (4, 48), dtype=torch.uint8, generator=draw)
    scales = torch.randint(100, 150, (4, 3), dtype=torch.uint8, generator=draw)
    blocks = packed.view(1, 4, 3, 16)
    expected = convert_moe_packed_tensors(blocks, scales[None], dtype=torch.float32)
    assert torch.equal(of_mxfp4(packed, scales), expected[0].T)
