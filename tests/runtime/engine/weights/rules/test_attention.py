"""Scales of the KV cache, which are the DP layer's in every layout; sinks and norms, by head."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.models import commandr

from shoal.policies.values.layouts import Layout
from shoal.runtime.engine.weights.rules.attention import (
    HeadNormRule,
    SinksRule,
    share_kv_scales,
)
from shoal.runtime.engine.weights.rules.shard_rule import FullLayer
from shoal.runtime.engine.weights.rules.shards import Shard, UnviewableWeights
from shoal.runtime.engine.weights.shared_weights import SharedWeights
from shoal.runtime.engine.weights.store import ResidentWeights
from shoal.runtime.engine.weights.view_loader import view_weights
from tests.runtime.engine.one_rank import ranks, tensor_parallel

KV_HEADS = 4


def full(layer: nn.Module) -> FullLayer:
    return FullLayer("", layer, ResidentWeights(layer).tensor)


def test_scales_by_head_are_refused() -> None:
    layer, dp = nn.Module(), nn.Module()
    dp.register_buffer("_k_scale", torch.ones(KV_HEADS))
    with pytest.raises(UnviewableWeights, match="by head"):
        share_kv_scales(layer, full(dp))


def test_kv_cache_scales_are_the_dp_layers() -> None:
    layer, dp = nn.Module(), nn.Module()
    dp.register_buffer("_k_scale", torch.tensor(0.5))
    dp._k_scale_float = 0.5  # type: ignore[assignment]
    layer.register_buffer("_k_scale", torch.tensor(1.0))
    share_kv_scales(layer, full(dp))
    assert layer._k_scale is dp._k_scale
    assert layer._k_scale_float == 0.5


# --- sinks ---

HEADS, HEAD_SIZE = 8, 16


class WithSinks(nn.Module):
    """Attention as GPT-OSS has it."""

    def __init__(self, degree: int, *, views: bool) -> None:
        super().__init__()
        weights = SharedWeights(views=views)
        self.sinks = nn.Parameter(torch.zeros(HEADS // degree), requires_grad=False)
        self.qkv_proj = QKVParallelLinear(32, HEAD_SIZE, HEADS, KV_HEADS, quant_config=weights)
        self.attn = object.__new__(Attention)
        nn.Module.__init__(self.attn)
        self.attn.impl = SimpleNamespace(sinks=self.sinks)


def block(degree: int, rank: int, *, views: bool) -> nn.Module:
    model = nn.Module()
    with set_current_vllm_config(VllmConfig()), tensor_parallel(rank, degree):
        model.self_attn = WithSinks(degree, views=views)
    return model


@pytest.mark.parametrize("heads", [None, 0])
@pytest.mark.parametrize(("rank", "degree"), ranks(2, 4))
def test_a_member_has_the_sinks_of_its_heads(rank: int, degree: int, heads: int | None) -> None:
    """Attention reads them, also where heads are in another order than members."""
    dp = block(1, 0, views=False)
    dp.self_attn.sinks.data = torch.arange(HEADS).float()
    viewed = block(degree, rank, views=True)
    view_weights(viewed, ResidentWeights(dp), Layout(tp=degree), rank, heads)
    shard = rank if heads is None else heads
    expected = torch.arange(HEADS).float().chunk(degree)[shard]
    assert torch.equal(viewed.self_attn.sinks, expected)
    assert viewed.self_attn.attn.impl.sinks is viewed.self_attn.sinks
    storage = dp.self_attn.sinks.untyped_storage().data_ptr()
    assert viewed.self_attn.sinks.untyped_storage().data_ptr() == storage


def test_another_tensor_beside_sinks_is_refused() -> None:
    dp, viewed = block(1, 0, views=False).self_attn, block(2, 0, views=True).self_attn
    viewed.gains = nn.Parameter(torch.ones(HEADS // 2))
    with pytest.raises(UnviewableWeights, match="has more for each head than sinks"):
        SinksRule().view(viewed, full(dp), Shard(0, 2))


# --- norms ---


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize(("rank", "degree"), ranks(2, 4))
def test_a_member_has_the_norms_of_its_heads(rank: int, degree: int, heads: int) -> None:
    """With more members than heads, neighbours have the same."""
    dp = commandr.LayerNorm(param_shape=(heads, HEAD_SIZE))
    dp.weight.data = torch.arange(float(heads)).repeat_interleave(HEAD_SIZE).view(heads, -1)
    viewed = commandr.LayerNorm(param_shape=(max(1, heads // degree), HEAD_SIZE))
    HeadNormRule().view(viewed, full(dp), Shard(rank, degree))
    expected = [head for head in range(heads) if head * degree // heads == rank]
    assert viewed.weight[:, 0].tolist() == (expected or [rank * heads // degree])


def test_a_norm_of_all_is_whole() -> None:
    dp, viewed = (commandr.RMSNorm(param_shape=HEAD_SIZE) for _ in range(2))
    HeadNormRule().view(viewed, full(dp), Shard(1, 2))
    assert viewed.weight.data_ptr() == dp.weight.data_ptr()
    assert viewed.weight.shape == (HEAD_SIZE,)
