"""What attention has beside its projections: scales of the KV cache, sinks, norms by head."""

from torch import nn
from torch.nn import Parameter
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.models import commandr

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


class LatentAttentionRule(AttentionRule):
    """MLA: the matrices that it absorbs into queries and outputs are views of ``kv_b_proj``.

    vLLM makes them of each layout's ``kv_b_proj`` once that has its weights
    (``MLAAttention.process_weights_after_loading``). As they are views, they take no memory, and
    those of a layout that views ``kv_b_proj`` lie in the DP model's weights, too.
    """

    kind = LayerKind.LATENT_ATTENTION
    layers = (MLAAttention,)

    def view(self, layer: nn.Module, full: FullLayer, shard: Shard) -> None:
        """Share the scales of the KV cache.

        Raises:
            UnviewableWeights: vLLM has made other matrices than views, or reads KV sparsely.
        """
        with named(full.name):
            if problem := _latent_problem(full):
                raise UnviewableWeights(problem)
            share_kv_scales(layer, full)


def _latent_problem(full: FullLayer) -> str:
    """Return why layouts cannot share a latent attention layer; "" if they can."""
    if full.module.use_sparse:
        return "latent attention that reads only some tokens is not supported"
    if full.module.is_amx_bmm_enabled:
        return (
            "AMX_MLA packs kv_b_proj, which no layout could view: use --attention-backend CPU_MLA"
        )
    weights = full.module.kv_b_proj.weight.untyped_storage().data_ptr()
    absorbed = full.tensor("W_UV"), full.tensor("W_UK_T")
    if any(matrix.untyped_storage().data_ptr() != weights for matrix in absorbed):
        return "its absorbed matrices are copies of kv_b_proj, which layouts could not share"
    return ""


class HeadNormRule(ShardRule):
    """Cohere's norms: those of queries and keys have a weight for each element of each head."""

    kind = LayerKind.WHOLE
    layers = (commandr.LayerNorm, commandr.RMSNorm)
    of_heads = True

    def view(self, layer: nn.Module, full: FullLayer, shard: Shard) -> None:
        """Take the weights of the member's heads, or all if the norm is not divided.

        With more members than KV heads, neighbours have the same (``QkvRule.shares``).
        """
        heads, own = full.module.weight.shape[0], layer.weight.shape[0]
        parts = heads // own
        begin, size = Shard(shard.rank * parts // shard.of, parts).cut(heads)
        weight = full.tensor("weight").narrow(0, begin, size)
        layer.weight = Parameter(weight, requires_grad=False)


class SinksRule(ShardRule):
    """The module around QKV and attention, if it has a sink for each query head (GPT-OSS)."""

    kind = LayerKind.ATTENTION
    of_heads = True

    def matches(self, layer: nn.Module) -> bool:
        """Return whether the module has sinks, and a QKV projection that says which heads."""
        return layer._parameters.get("sinks") is not None and any(
            isinstance(child, QKVParallelLinear) for child in layer.children()
        )

    def view(self, layer: nn.Module, full: FullLayer, shard: Shard) -> None:
        """Take the sinks of the member's heads, also where attention reads them.

        Raises:
            UnviewableWeights: the module has another parameter, or another number of sinks.
        """
        if set(layer._parameters) != {"sinks"}:
            raise UnviewableWeights(f"{full.name} has more for each head than sinks")
        sinks = full.tensor("sinks").narrow(0, *shard.cut(full.module.sinks.shape[0]))
        if sinks.shape != layer.sinks.shape:
            raise UnviewableWeights(f"{full.name}.sinks is split in a way Shoal does not know")
        layer.sinks = Parameter(sinks, requires_grad=False)
        for child in layer.children():
            if isinstance(child, Attention):
                child.impl.sinks = layer.sinks  # it keeps the tensor that it was made with


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
