"""Scales of the KV cache, which are the DP layer's in every layout."""

import pytest
import torch
from torch import nn

from shoal.runtime.engine.weights.rules.attention import share_kv_scales
from shoal.runtime.engine.weights.rules.shard_rule import FullLayer
from shoal.runtime.engine.weights.rules.shards import UnviewableWeights
from shoal.runtime.engine.weights.store import ResidentWeights

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
