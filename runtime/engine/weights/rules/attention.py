"""Attention: it has no weights, but may have scales of the KV cache."""

from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

from shoal.runtime.engine.weights.rules.shard_rule import FullLayer, ShardRule
from shoal.runtime.engine.weights.rules.shards import Shard, UnviewableWeights, named
from shoal.runtime.served_weights import LayerKind


class AttentionRule(ShardRule):
    """Every member has the scales, and all else that the layer may hold."""

    kind = LayerKind.ATTENTION
    layers = (Attention,)

    def quant_method(
        self, layer: nn.Module, stock: QuantizeMethodBase | None, name: str, *, views: bool
    ) -> QuantizeMethodBase | None:
        """Return a method that loads scales for DP alone."""
        if isinstance(stock, BaseKVCacheMethod):
            return ViewedKVScales(stock.quant_config) if views else stock
        return super().quant_method(layer, stock, name, views=views)

    def view(self, layer: nn.Module, full: FullLayer, shard: Shard) -> None:
        """Share the scales of the KV cache, and all else."""
        with named(full.name):
            share_kv_scales(layer, full)
        super().view(layer, full, shard)


_KV_SCALES = ("_q_scale", "_k_scale", "_v_scale", "_prob_scale")


class ViewedKVScales(BaseKVCacheMethod):  # type: ignore[misc]
    """Scales of an attention layer's KV cache that are the DP layer's: nothing to load."""

    def create_weights(self, layer: nn.Module) -> None:
        """Create none."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Leave them as they are."""


def share_kv_scales(layer: nn.Module, full: FullLayer) -> None:
    """Give an attention layer the DP layer's KV cache scales.

    Raises:
        UnviewableWeights: they differ by head, and heads are split.
    """
    for key in _KV_SCALES:
        if full.module._buffers.get(key) is None:
            continue
        scale = full.tensor(key)
        if scale.numel() != 1:
            raise UnviewableWeights("KV cache scales by head are not supported")
        layer._buffers[key] = scale
        for name in (f"{key}_float", f"{key}_cpu"):
            if hasattr(full.module, name):
                setattr(layer, name, getattr(full.module, name))
