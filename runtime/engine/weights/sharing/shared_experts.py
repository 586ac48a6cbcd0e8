"""Routed experts of which each engine keeps a range, and gets the others from its peers.

SiDP (section 4) divides a model's FFNs by layers. Here each engine keeps whole experts of every
layer, so that groups divide the experts by number (EP). A layer's tensors with a row for each
expert, which are weights and scales, are shared in the same way.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from shoal.policies.values.layouts import DP, Layout
from shoal.runtime.engine.kernels.expert_methods import InPlaceExperts, ViewedFp8Experts
from shoal.runtime.engine.weights.rules.expert_ranges import (
    ExpertRange,
    have_experts,
    is_of_experts,
    with_experts,
)
from shoal.runtime.engine.weights.rules.experts import set_groups
from shoal.runtime.engine.weights.rules.rule_registry import rule_of
from shoal.runtime.engine.weights.rules.shards import UnviewableWeights
from shoal.runtime.engine.weights.sharing.nested_order import nested_shard
from shoal.runtime.engine.weights.sharing.shared_weight import Degree, SharedWeight
from shoal.runtime.engine.weights.sharing.slots import use_weights
from shoal.runtime.engine.weights.sharing.weight_keeper import Keeper
from shoal.runtime.engine.weights.sharing.whole_weights import WholeWeights


class _Slots:
    """Mixed into methods of experts: a layer of DP loads those that its engine keeps.

    Attributes:
        add: is given the layer when its tensors are made, without memory.
    """

    add: Callable[[nn.Module], None]

    def create_weights(self, layer: nn.Module, num_experts: int, **others: Any) -> None:
        """Make the tensors of the experts that the engine keeps."""
        own = len(layer.expert_map_manager.get_local_expert_ids())
        super().create_weights(layer=layer, num_experts=own, **others)  # type: ignore[misc]
        self.add(layer)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Make the kernel, once the tensors are there (``SharedExperts.complete``)."""
        if not layer.w13_weight.is_meta:
            super().process_weights_after_loading(layer)  # type: ignore[misc]


class SlotExperts(_Slots, InPlaceExperts):
    """Of experts in 16 or 32 bits."""


class SlotFp8Experts(_Slots, ViewedFp8Experts):
    """Of experts in FP8 with scales of blocks."""


@dataclass
class _Layer:
    """One layer of the DP model."""

    module: nn.Module
    weights: dict[str, SharedWeight] = field(default_factory=dict)
    """By the name of the tensor in the layer."""
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    """``[experts of a part, ...]`` of each."""
    loaded: dict[str, set[tuple[int, str]]] = field(default_factory=dict)
    """Of each, the experts that have been loaded, and vLLM's name of the part: of ``w13``, gate's
    and up's rows are loaded one after the other."""

    @property
    def number(self) -> int:
        """See ``SharedWeight.layer``."""
        return next(iter(self.weights.values())).layer

    def of(self, key: str, stored: torch.Tensor) -> torch.Tensor:
        """Return some experts' rows of a tensor, as they are stored, in the tensor's shape."""
        return stored.view(-1, *self.shapes[key][1:])

    @property
    def own(self) -> dict[str, torch.Tensor]:
        """What the engine keeps, by the names of tensors."""
        found = {}
        for key, weight in self.weights.items():
            assert weight.kept is not None, "there is no memory for it yet"
            found[key] = self.of(key, weight.kept)
        return found


class SharedExperts:
    """See the module.

    Args:
        place: this engine's, among those that share weights.
        degree: how many share weights.
        whole: has the slots.
        keeper: of all weights.
    """

    def __init__(self, place: int, degree: Degree, whole: WholeWeights, keeper: Keeper) -> None:
        self._place, self._degree = place, degree
        self._whole, self._keeper = whole, keeper
        self._layers: dict[str, _Layer] = {}
        """By the name of the layer in the model."""

    def __bool__(self) -> bool:
        """Return whether engines share experts."""
        return bool(self._layers)

    # --- loading ----------------------------------------------------------------------------------

    def method(self, layer: nn.Module, name: str, stock: Any) -> QuantizeMethodBase | None:
        """Return the method of a layer of the DP model; None if it has no routed experts.

        Args:
            layer: the layer, which is being made.
            name: of the layer.
            stock: what vLLM would take for the checkpoint.

        Raises:
            UnviewableWeights: the experts cannot be shared.
        """
        if not isinstance(layer, RoutedExperts):
            return None
        if layer.global_num_experts % self._degree.groups:
            raise UnviewableWeights(
                f"{name}: {layer.global_num_experts} experts do not make {self._degree.groups} "
                "equal parts"
            )
        viewed = rule_of(layer).quant_method(layer, stock, name, views=True)
        method: SlotExperts | SlotFp8Experts
        if isinstance(viewed, InPlaceExperts) and not layer.moe_config.has_bias:
            method = SlotExperts(layer.moe_config, meta=True)
        elif isinstance(viewed, ViewedFp8Experts) and getattr(stock, "block_quant", False):
            method = SlotFp8Experts(viewed.method)
        else:
            raise UnviewableWeights(
                f"{name}: only experts without biases, in 16 bits or in FP8 with scales of blocks, "
                "can be shared"
            )
        # vLLM calls the layer as what it is in (``MoERunner.routed_experts``).
        method.add = partial(self._add, f"{name}.routed_experts")
        # vLLM's loader takes only the experts of this map.
        manager = layer.expert_map_manager = copy.copy(layer.expert_map_manager)
        manager._expert_map = self._own(layer.global_num_experts).numbers(layer.global_num_experts)
        return method

    def _own(self, experts: int, tp: int | None = None) -> ExpertRange:
        """Return the experts that the engine keeps, or of these and others those of a layout."""
        members = min(tp or self._degree.parts, self._degree.parts)
        count = experts // members
        return ExpertRange(nested_shard(self._place % members, members) * count, count)

    def _add(self, name: str, module: nn.Module) -> None:
        layer = self._layers[name] = _Layer(module)
        have_experts(module, module.expert_map_manager.expert_map)
        module.shoal_first = 0
        for key, parameter in [*module._parameters.items()]:
            if not is_of_experts(key) or parameter is None:
                continue
            weight = SharedWeight(
                layer=self._keeper.number_of(f"{name}.{key}"),
                kind=key,
                shape=(module.global_num_experts, parameter[0].numel()),
                dtype=parameter.dtype,
                degree=self._degree,
                own=nested_shard(self._place, self._degree.parts),
                begin=self._keeper.size,
            )
            layer.weights[key], layer.shapes[key] = weight, parameter.shape
            layer.loaded[key] = set()
            self._keeper.keep(f"{name}.{key}", weight)
            self._whole.add(f"{name}.{key}", weight)
            parameter.weight_loader = partial(self._load, layer, key)
            module._non_persistent_buffers_set.add(key)  # see ``register_slot``

    def _load(
        self,
        layer: _Layer,
        key: str,
        param: Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Take what the checkpoint has of one expert, or of all.

        Args and what it returns are those of ``RoutedExperts.weight_loader``.
        """
        self._keeper.allocate()
        weight, module = layer.weights[key], layer.module
        own = self._own(module.global_num_experts)
        here = range(module.global_num_experts)[own.slice]
        if loaded_weight.dim() == 3:
            expert_id = own.first
            if len(loaded_weight) != own.size:
                loaded_weight = loaded_weight[own.slice]
        if expert_id not in here:
            return False if return_success else None
        if not weight.was_filled:
            assert weight.kept is not None
            target = Parameter(layer.of(key, weight.kept), requires_grad=False)
            target.__dict__.update(param.__dict__)  # by which vLLM knows what a scale is for
            module.weight_loader(target, loaded_weight, weight_name, shard_id, expert_id, True)
            taken = here if loaded_weight.dim() == 3 else [expert_id]
            layer.loaded[key] |= {(expert, shard_id) for expert in taken}
            if len(layer.loaded[key]) == own.size * (2 if key.startswith("w13_") else 1):
                weight.missing = set()
        return True if return_success else None

    def complete(self) -> None:
        """Let DP's layers compute with what the engine keeps, and with what is streamed."""
        for name, layer in self._layers.items():
            self._compute_all(layer.module, name, layer)

    def _compute_all(self, target: nn.Module, name: str, layer: _Layer) -> None:
        """Let a layer compute its engine's own experts, and all others by a layer beside it."""
        experts = target.global_num_experts
        everywhere = self._everywhere(name, layer)
        device = everywhere["w2_weight"].device
        here = self._own(experts)
        own = here.numbers(experts, device)
        for key, tensor in layer.own.items():
            target.register_parameter(key, Parameter(tensor, requires_grad=False))
        have_experts(target, own)
        if self._degree.parts == 2:
            # Nothing is behind the addresses of this engine's own part (``WholeWeights``), and a
            # Triton kernel fails if nothing is where a tensor begins.
            others = ExpertRange(here.size - here.first, here.size)
            everywhere = {key: tensor[others.slice] for key, tensor in everywhere.items()}
            numbers = others.numbers(experts, device)
        else:
            numbers = torch.arange(experts, dtype=torch.int32, device=device)
            numbers.masked_fill_(own >= 0, -1)
        beside = with_experts(target, everywhere, numbers)
        object.__setattr__(target, "shoal_beside", beside)  # it is no module of the model
        for each in (target, beside):
            set_groups(each, 1)
            each.quant_method.process_weights_after_loading(each)

    # --- layouts ----------------------------------------------------------------------------------

    def part(self, name: str, tp: int) -> nn.Module | None:
        """Return what rules have to know of the layer of which a layout's layer is a part.

        Args:
            name: of a layer of the model.
            tp: members of the layout.

        Returns:
            The experts that this engine computes in the layout, or that these are a part of; None
            if the layer is not shared.
        """
        layer = self._layers.get(name)
        if layer is None:
            return None
        here, tensors = self._own(layer.module.global_num_experts, tp), layer.own
        if tp < self._degree.parts:
            tensors = {k: tensor[here.slice] for k, tensor in self._everywhere(name, layer).items()}
        part = nn.Module()
        for key, parameter in layer.module._parameters.items():
            tensor = Parameter(tensors[key], requires_grad=False) if key in tensors else parameter
            part.register_parameter(key, tensor)
        part.shoal_first = here.first
        return part

    def _everywhere(self, name: str, layer: _Layer) -> dict[str, torch.Tensor]:
        """Return the tensors of all experts, where layouts of few members find them."""
        return {key: layer.of(key, self._whole.weight(f"{name}.{key}")) for key in layer.weights}

    def stream_in(
        self, modules: Mapping[str, nn.Module], layout: Layout, waits: set[int]
    ) -> set[int]:
        """Have a layout's layers use slots that have been filled.

        Args:
            modules: of the layout's model, by their names; a stage has some of the layers.
            layout: the layout, of fewer members than share weights.
            waits: the numbers of layers that others let wait.

        Returns:
            The numbers of the layers that the model has.
        """
        numbers: set[int] = set()
        for name, layer in self._layers.items():
            target = modules.get(name)
            if target is None:
                continue
            numbers.add(layer.number)
            if layout.tp == DP.tp and target is not layer.module:
                self._compute_all(target, name, layer)
            if layer.number not in waits:
                target.shoal_before = partial(
                    use_weights, tp=layout.tp, layer=layer.number, pp=layout.pp
                )
        return numbers
