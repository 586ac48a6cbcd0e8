"""Routed experts as vLLM's model classes make them, of one member of a group that is not there."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe import FusedMoEFactory, GateLinear
from vllm.model_executor.layers.fused_moe import layer as layer_module
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from shoal.runtime.engine.weights.shared_weights import SharedWeights
from tests.runtime.engine.one_rank import tensor_parallel

EXPERTS, TOP_K = 8, 2
LARGEST = 4
"""Largest group of the node: what the DP rows are grouped for."""


class ExpertsLayer(nn.Module):
    """A router and its experts."""

    def __init__(
        self, quant_config: QuantizationConfig, hidden: int, intermediate: int, **experts: Any
    ) -> None:
        super().__init__()
        self.gate = GateLinear(hidden, EXPERTS, quant_config=SharedWeights(views=False))
        self.experts = FusedMoEFactory(
            num_experts=EXPERTS,
            top_k=TOP_K,
            hidden_size=hidden,
            intermediate_size=intermediate,
            quant_config=quant_config,
            gate=self.gate,
            prefix="experts",
            **experts,
        )

    @property
    def routed(self) -> Any:
        """What has the experts' weights."""
        return self.experts.routed_experts


def make_experts(
    quant_config: QuantizationConfig,
    rank: int,
    degree: int,
    hidden: int,
    intermediate: int,
    *,
    by_expert: bool = False,
    **experts: Any,
) -> ExpertsLayer:
    """Return a member's layer; ``by_expert`` gives it a range of whole experts."""
    config = VllmConfig(parallel_config=ParallelConfig(enable_expert_parallel=by_expert))
    with set_current_vllm_config(config), tensor_parallel(rank, degree):
        return ExpertsLayer(quant_config, hidden, intermediate, **experts)


def load_experts(
    layer: ExpertsLayer, hidden: int, intermediate: int, *, without: int | None = None
) -> None:
    """Load a random checkpoint, the same one each time, by vLLM's own loader.

    Args:
        layer: a layer whose experts are not quantised.
        hidden: features of a token.
        intermediate: inner features of an expert.
        without: an expert that is left out; None: all are loaded.
    """
    draw = torch.Generator().manual_seed(5)
    layer.gate.weight.data = torch.randn(EXPERTS, hidden, generator=draw)
    for expert in range(EXPERTS):
        for shard, key in (("w1", "w13_weight"), ("w3", "w13_weight"), ("w2", "w2_weight")):
            shape = (hidden, intermediate) if shard == "w2" else (intermediate, hidden)
            weight, parameter = torch.randn(shape, generator=draw), getattr(layer.routed, key)
            if expert != without:
                parameter.weight_loader(parameter, weight, key, shard_id=shard, expert_id=expert)


def expert_output(layer: ExpertsLayer, hidden: int, tokens: int, seed: int = 9) -> torch.Tensor:
    """Return what a member computes of some tokens, before the members add up."""
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed))
    with set_forward_context(None, VllmConfig()):
        computed: torch.Tensor = layer.experts._forward_impl(x, x, None)
    return computed


def without_groups(patch: pytest.MonkeyPatch) -> None:
    """Let vLLM find groups of one, which a single process lacks."""
    alone = SimpleNamespace(world_size=1, rank_in_group=0)
    patch.setattr(layer_module, "get_dp_group", lambda: alone)
    patch.setattr(layer_module, "get_pcp_group", lambda: alone)
