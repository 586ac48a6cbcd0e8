"""Latent attention: what vLLM absorbs must be views, and the KV cache's scales are DP's."""

import pytest
import torch
from torch import nn

from shoal.runtime.engine.weights.rules.attention import LatentAttentionRule
from shoal.runtime.engine.weights.rules.shard_rule import FullLayer
from shoal.runtime.engine.weights.rules.shards import Shard, UnviewableWeights
from shoal.runtime.engine.weights.store import ResidentWeights

HEADS, LATENT, SIZE = 4, 16, 8
"""Heads, elements of a latent, and those of a head's part without positions and of its values."""
TP2 = Shard(1, 2)


def latent(heads: int = HEADS) -> nn.Module:
    """Return what is read of a loaded layer of latent attention."""
    layer = nn.Module()
    layer.use_sparse = layer.is_amx_bmm_enabled = False  # type: ignore[assignment]
    layer.kv_b_proj = nn.Linear(LATENT, heads * 2 * SIZE, bias=False)
    rows = layer.kv_b_proj.weight.detach().T.view(LATENT, heads, 2 * SIZE)
    keys, values = rows.split(SIZE, dim=-1)
    layer.W_UV = nn.Parameter(values.transpose(0, 1), requires_grad=False)
    layer.W_UK_T = nn.Parameter(keys.permute(1, 2, 0), requires_grad=False)
    layer.register_buffer("_k_scale", torch.tensor(0.5))
    return layer


def test_a_latent_layer_has_the_dp_layers_scales() -> None:
    dp, layer = latent(), latent(HEADS // 2)
    LatentAttentionRule().view(layer, FullLayer("", dp, ResidentWeights(dp).tensor), TP2)
    assert layer._k_scale is dp._k_scale


@pytest.mark.parametrize("matrix", ["W_UV", "W_UK_T"])
def test_absorbed_matrices_that_are_copies_are_refused(matrix: str) -> None:
    dp = latent()
    setattr(dp, matrix, nn.Parameter(getattr(dp, matrix).clone()))
    with pytest.raises(UnviewableWeights, match=r"absorbed matrices are copies of kv_b_proj"):
        LatentAttentionRule().view(latent(), FullLayer("", dp, ResidentWeights(dp).tensor), TP2)


@pytest.mark.parametrize(
    ("flag", "said"),
    [("is_amx_bmm_enabled", "AMX_MLA packs kv_b_proj.*CPU_MLA"), ("use_sparse", "some tokens")],
)
def test_other_kinds_of_latent_attention_are_refused_by_name(flag: str, said: str) -> None:
    dp = latent()
    setattr(dp, flag, True)
    with pytest.raises(UnviewableWeights, match=rf"^attn: .*{said}"):
        LatentAttentionRule().view(latent(), FullLayer("attn", dp, ResidentWeights(dp).tensor), TP2)
