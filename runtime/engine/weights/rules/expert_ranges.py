"""vLLM's layer of routed experts, as it would be if it had a range of whole experts."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


class ExpertRange(NamedTuple):
    """Some experts that follow each other."""

    first: int
    """The first one's number among all."""
    size: int

    @property
    def slice(self) -> slice:
        """Their rows in a tensor of all experts."""
        return slice(self.first, self.first + self.size)

    def numbers(self, experts: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return what vLLM calls an expert map, int32: each expert's place here, or -1.

        Args:
            experts: of the layer.
            device: of the result.
        """
        places = torch.full((experts,), -1, dtype=torch.int32)
        places[self.slice] = torch.arange(self.size, dtype=torch.int32)
        return places.to(device)


def is_of_experts(key: str) -> bool:
    """Return whether a tensor of a layer has a row for each expert: weights, scales, biases."""
    return key.startswith(("w13_", "w2_"))


def have_experts(layer: nn.Module, numbers: torch.Tensor) -> None:
    """Let a layer take its tensors for those of some experts.

    Args:
        layer: vLLM's, whose kernel is not made yet.
        numbers: see ``ExpertRange.numbers``; on the device of the tensors.
    """
    layer.register_buffer("_expert_map", numbers, persistent=False)
    layer.local_num_experts = int((numbers >= 0).sum())


def with_experts(
    layer: RoutedExperts,
    tensors: Mapping[str, Any],
    numbers: torch.Tensor,
    members: int = 1,
    rank: int = 0,
) -> RoutedExperts:
    """Return a layer that has other experts; its kernel is to be made yet.

    Args:
        layer: vLLM's, of which the copy has everything else.
        tensors: those of the experts.
        numbers: see ``have_experts``.
        members: how many divide the experts.
        rank: which of these has these experts.
    """
    other = copy.copy(layer)
    other._parameters, other._modules = dict(layer._parameters), {}
    other._buffers = dict(layer._buffers)
    have_experts(other, numbers)
    config = layer.moe_config
    other.moe_config = replace(
        config,
        moe_parallel_config=replace(
            config.moe_parallel_config,
            **{"tp_size": 1, "tp_rank": 0, "use_ep": members > 1},
            **{"ep_size": members, "ep_rank": rank},
        ),
        num_local_experts=other.local_num_experts,
        intermediate_size_per_partition_unpadded=None,
    )
    other.quant_method = layer.quant_method.for_whole(other.moe_config)
    other.quant_method.have(other, tensors)
    return other
