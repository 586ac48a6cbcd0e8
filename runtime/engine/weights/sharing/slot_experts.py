"""Methods of routed experts of which an engine keeps some, for DP's layers: one for each format."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend

from shoal.runtime.engine.kernels.expert_methods import InPlaceExperts, ViewedFp8Experts
from shoal.runtime.engine.kernels.mxfp4_experts import (
    Mxfp4Experts,
    PlainMxfp4Experts,
    range_of,
)
from shoal.runtime.engine.kernels.mxfp4_shares import Packed
from shoal.runtime.engine.weights.rules.expert_ranges import is_of_experts

PACKED_BY_RANGES = (Mxfp4MoeBackend.TRITON, Mxfp4MoeBackend.MARLIN, Mxfp4MoeBackend.XPU)
"""vLLM's kernels of MXFP4 that compute any range of experts, as a map says which these are. On CPUs
``PlainMxfp4Experts`` goes by the last name. TRT-LLM's kernels find a range by a member's rank."""


class Slots:
    """Mixed into methods of experts: a layer of DP loads those that its engine keeps.

    Attributes:
        add: is given the layer when its tensors are made, without memory.
        is_packed: whether what is kept of an expert is not what a checkpoint has of it.
    """

    add: Callable[[nn.Module], None]
    is_packed = False

    def create_weights(self, layer: nn.Module, num_experts: int, **others: Any) -> None:
        """Make the tensors of the experts that the engine keeps."""
        own = len(layer.expert_map_manager.get_local_expert_ids())
        super().create_weights(layer=layer, num_experts=own, **others)  # type: ignore[misc]
        self.add(layer)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Make the kernel, once the tensors are there (``SharedExperts.complete``)."""
        if not getattr(layer.w13_weight, "is_meta", False):
            super().process_weights_after_loading(layer)  # type: ignore[misc]

    def kept_like(self, layer: nn.Module, _known: dict[Any, Any]) -> Mapping[str, Packed]:
        """Return some experts in the form in which an engine keeps them.

        Args:
            layer: has tensors without memory as a checkpoint has them.
            _known: what methods of other layers have found.
        """
        return {
            key: parameter
            for key, parameter in layer._parameters.items()
            if is_of_experts(key) and parameter is not None
        }


class SlotExperts(Slots, InPlaceExperts):
    """Of experts in 16 or 32 bits."""


class SlotFp8Experts(Slots, ViewedFp8Experts):
    """Of experts in FP8 with scales of blocks or channels, which vLLM does not change."""


class _PackedSlots(Slots):
    """Mixed into methods of experts in MXFP4. What vLLM packs of each expert is kept.

    How many bytes that is, is found out by packing two experts of zeros.
    """

    is_packed = True
    views = True

    def kept_like(self, layer: nn.Module, known: dict[Any, Any]) -> Mapping[str, Packed]:
        """See ``Slots.kept_like``.

        Raises:
            NotImplementedError: kernels cannot read an expert where it would begin.
        """
        stored = super().kept_like(layer, known)
        form = tuple((key, *tensor.shape[1:]) for key, tensor in stored.items())
        if form not in known:  # layers are alike: two experts are packed once, and have memory once
            known[form] = self._two(layer, stored)
        like: Mapping[str, Packed]
        like, configs = known[form]
        vars(self).update(configs)
        return like

    def _two(
        self, layer: nn.Module, stored: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, Packed], dict[str, Any]]:
        two = nn.Module()
        two.params_dtype = layer.params_dtype
        for key, parameter in stored.items():
            zeros = torch.zeros(2, *parameter.shape[1:], dtype=parameter.dtype)
            two.register_parameter(key, Parameter(zeros, requires_grad=False))
        packed: dict[str, Packed] = self.pack(two)  # type: ignore[attr-defined]
        for each in packed.values():
            range_of(each, slice(1, 2), 2)
        return packed, self.scale_configs(two)  # type: ignore[attr-defined]


class SlotMxfp4Experts(_PackedSlots, Mxfp4Experts):
    """Of experts in MXFP4 on GPUs."""


class SlotPlainMxfp4Experts(_PackedSlots, PlainMxfp4Experts):
    """Of experts in MXFP4 on CPUs."""


def slot_experts(stock: Any, viewed: Any) -> Slots:
    """Return the method of a layer of DP whose engine keeps some of the experts.

    Args:
        stock: what vLLM would take for the checkpoint.
        viewed: the method for a layer of views.

    Raises:
        NotImplementedError: such experts cannot be shared.
    """
    if isinstance(viewed, InPlaceExperts):
        return SlotExperts(viewed.moe, meta=True)
    if isinstance(viewed, Mxfp4Experts):
        if viewed.mxfp4_backend not in PACKED_BY_RANGES:
            raise NotImplementedError(
                f"{viewed.mxfp4_backend.value}, vLLM's kernel for these experts, finds a member's "
                "experts by its rank; --moe-backend marlin can share them"
            )
        plain = isinstance(viewed, PlainMxfp4Experts)
        return (SlotPlainMxfp4Experts if plain else SlotMxfp4Experts)(viewed.moe)
    by_channel = getattr(getattr(stock, "weight_quant", None), "strategy", None) == "channel"
    if isinstance(viewed, ViewedFp8Experts) and (by_channel or getattr(stock, "block_quant", 0)):
        return SlotFp8Experts(viewed.method)
    raise NotImplementedError(
        "experts in FP8 with one scale for each weight cannot be shared, nor those that vLLM "
        "quantises as it loads them"
    )
