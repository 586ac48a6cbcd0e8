"""Whole experts for some steps of a layout whose members have shares of each.

The views that a member of such a layout has for these steps are a range of DP's experts. Whichever
of the two a step takes, a member's result is its part of a sum over all members.
"""

import logging

from torch import nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from shoal.runtime.engine.kernels.expert_methods import InLayers
from shoal.runtime.engine.kernels.mxfp4_experts import Mxfp4Experts
from shoal.runtime.engine.weights.rules.expert_ranges import (
    ExpertRange,
    is_of_experts,
    with_experts,
)
from shoal.runtime.engine.weights.rules.experts import of_experts
from shoal.runtime.engine.weights.rules.shard_rule import FullLayer
from shoal.runtime.engine.weights.rules.shards import Shard
from shoal.runtime.engine.weights.store import ResidentWeights, layers_of
from shoal.runtime.whole_experts import WholeExperts

log = logging.getLogger("shoal.engine")


def add_whole_experts(
    model: nn.Module, store: ResidentWeights, shard: Shard, when: WholeExperts
) -> None:
    """Let the experts of a layout's model have a range of whole experts beside their shares.

    Layers stay as they are that have whole experts already, or a number that cannot be divided.

    Args:
        model: the layout's, whose tensors are views.
        store: has the DP model's weights.
        shard: the member, among those that divide the experts.
        when: in which steps whole experts are computed.
    """
    full = layers_of(store.model)
    steps = range(0)
    for name, layer in layers_of(model).items():
        if _divides_each(layer, shard):
            steps = _add(layer, FullLayer(name, full[name], store.tensor), shard, when)
    if steps and shard.rank == 0:
        log.info(
            "members of TP%d compute whole experts in steps of %d to %d tokens, and shares of each "
            "in others",
            *(shard.of, steps.start, steps.stop - 1),
        )


def _divides_each(layer: nn.Module, shard: Shard) -> bool:
    return (
        shard.of > 1
        and isinstance(layer, RoutedExperts)
        and isinstance(layer.quant_method, InLayers)
        and not isinstance(layer.quant_method, Mxfp4Experts)
        and not layer.moe_config.moe_parallel_config.use_ep
        and layer.global_num_experts % shard.of == 0
    )


def _add(layer: RoutedExperts, full: FullLayer, shard: Shard, when: WholeExperts) -> range:
    config = layer.moe_config
    steps = when.steps(
        *(layer.global_num_experts, layer.top_k, config.intermediate_size),
        *(shard.of, config.max_num_tokens),
        bits=8 * full.tensor("w2_weight").element_size(),
    )
    if steps:
        layer.shoal_whole = whole_experts(layer, full, shard)
        layer.shoal_whole_steps = steps
    return steps


def whole_experts(layer: RoutedExperts, full: FullLayer, shard: Shard) -> RoutedExperts:
    """Return vLLM's layer as it would be if the members divided the experts by number.

    vLLM makes its kernel when the weights of all layers are processed, as it does for others.

    Args:
        layer: the member's layer, with shares.
        full: the same layer of the DP model.
        shard: the member.
    """
    own = ExpertRange(*shard.cut(layer.global_num_experts))
    views = {
        key: of_experts(full.tensor(key).data, own.slice)
        for key in full.module._parameters
        if is_of_experts(key)
    }
    device = full.tensor("w2_weight").device
    numbers = own.numbers(layer.global_num_experts, device)
    whole = with_experts(layer, views, numbers, shard.of, shard.rank)
    whole.shoal_groups = getattr(full.module, "shoal_groups", 1)
    return whole
