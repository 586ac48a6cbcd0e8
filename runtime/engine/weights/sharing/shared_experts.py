"""Routed experts of which each engine keeps a range, and gets the others from its peers.

SiDP (section 4) divides a model's FFNs by layers. Here each engine keeps whole experts of every
layer, so that groups divide the experts by number (EP). A layer's tensors with a row for each
expert, which are weights and scales, are shared in the same way.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from shoal.policies.values.layouts import DP, Layout
from shoal.runtime.engine.kernels.mxfp4_experts import elements_of, in_rows
from shoal.runtime.engine.kernels.mxfp4_shares import Packed
from shoal.runtime.engine.weights.rules.expert_ranges import (
    ExpertRange,
    have_experts,
    is_of_experts,
    with_experts,
)
from shoal.runtime.engine.weights.rules.experts import set_groups, unviewable
from shoal.runtime.engine.weights.rules.rule_registry import rule_of
from shoal.runtime.engine.weights.rules.shards import UnviewableWeights, named
from shoal.runtime.engine.weights.sharing.nested_order import nested_shard
from shoal.runtime.engine.weights.sharing.shared_weight import Degree, SharedWeight
from shoal.runtime.engine.weights.sharing.slot_experts import slot_experts
from shoal.runtime.engine.weights.sharing.slots import streamed
from shoal.runtime.engine.weights.sharing.weight_keeper import Keeper
from shoal.runtime.engine.weights.sharing.whole_weights import WholeWeights

_PARTS: dict[str | None, tuple[int, ...]] = {"w1": (0,), "w3": (1,)}
"""vLLM's names of what a checkpoint may have of ``w13``: gate and up."""

_IN_RUNNER = ".routed_experts"
"""How the name of routed experts ends, which are in the ``MoERunner`` that vLLM's models call."""


def _kept(weight: SharedWeight) -> torch.Tensor:
    """Return what the engine keeps of a weight, for which there is memory."""
    assert weight.kept is not None, "there is no memory for it yet"
    return weight.kept


@dataclass
class _Layer:
    """One layer of the DP model."""

    module: nn.Module
    like: Mapping[str, Packed]
    """Some experts, in the form in which the engine keeps its own; by the name of the tensor."""
    weights: dict[str, SharedWeight] = field(default_factory=dict)
    missing: dict[str, set[tuple[int, int]]] = field(default_factory=dict)
    """By the name of a tensor of the checkpoint, the experts that have not been loaded, and 0, or
    of ``w13`` gate (0) and up (1)."""
    stored: dict[str, Parameter] = field(default_factory=dict)
    """The engine's experts as a checkpoint has them, until they have been packed."""

    @property
    def number(self) -> int:
        """See ``SharedWeight.layer``."""
        return next(iter(self.weights.values())).layer

    def of(self, key: str, stored: torch.Tensor) -> Packed:
        """Return some experts' rows of a tensor, as they are stored, as kernels take them."""
        return in_rows(self.like[key], stored)

    @property
    def own(self) -> dict[str, Packed]:
        """What the engine keeps, by the names of tensors."""
        return {key: self.of(key, _kept(weight)) for key, weight in self.weights.items()}

    @property
    def was_filled(self) -> bool:
        """Whether the engine's experts were there before it loaded them."""
        return any(weight.was_filled for weight in self.weights.values())

    def target(self, key: str, parameter: Parameter) -> Parameter:
        """Return where vLLM's loader may write what a checkpoint has of the engine's experts."""
        if self.module.quant_method.is_packed:
            return self.store()[key]
        target = Parameter(self.of(key, _kept(self.weights[key])), requires_grad=False)
        target.__dict__.update(parameter.__dict__)  # by which vLLM knows what a scale is for
        return target

    def note(self, key: str, experts: Iterable[int], shard: str | None) -> None:
        """Note which of the engine's experts have been loaded.

        Args:
            key: the tensor's name.
            experts: counted among the engine's own.
            shard: vLLM's name of the part: of ``w13``, gate's and up's rows may come one after the
                other.
        """
        parts = _PARTS.get(shard, (0, 1))
        self.missing[key] -= {(expert, part) for expert in experts for part in parts}
        if self.module.quant_method.is_packed:
            if not any(self.missing.values()):
                self.pack()
        elif not self.missing[key]:
            self.weights[key].missing = set()

    def store(self) -> dict[str, Parameter]:
        """Return memory for the engine's experts as a checkpoint has them, until they are packed.

        As in vLLM, what no checkpoint fills is zero: sizes may be rounded up.
        """
        if not self.stored:
            device = _kept(next(iter(self.weights.values()))).device
            for key in self.missing:
                found = self.module._parameters[key]
                zeros = torch.zeros(found.shape, dtype=found.dtype, device=device)
                self.stored[key] = Parameter(zeros, requires_grad=False)
                self.stored[key].__dict__.update(found.__dict__)
        return self.stored

    def pack(self) -> None:
        """Keep what vLLM packs of the engine's experts, which have all been loaded."""
        part = nn.Module()
        part.params_dtype = self.module.params_dtype
        for key, tensor in self.stored.items():
            part.register_parameter(key, tensor)
        for key, packed in self.module.quant_method.pack(part).items():
            elements_of(self.of(key, _kept(self.weights[key]))).copy_(elements_of(packed))
            self.weights[key].missing = set()
        self.stored = {}


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
        self._forms: dict[Any, Any] = {}
        """What methods of layers have found, for other layers (``Slots.kept_like``)."""

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
        with named(name), unviewable():
            method = slot_experts(stock, viewed)
        # vLLM calls the layer as what it is in (``MoERunner.routed_experts``).
        method.add = partial(self._add, f"{name}{_IN_RUNNER}")
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
        with named(name), unviewable():
            like = module.quant_method.kept_like(module, self._forms)
        layer = self._layers[name] = _Layer(module, like)
        have_experts(module, module.expert_map_manager.expert_map)
        module.shoal_first = 0
        for key, packed in like.items():
            elements = elements_of(packed)
            weight = layer.weights[key] = SharedWeight(
                layer=self._keeper.number_of(f"{name}.{key}"),
                kind=key,
                shape=(module.global_num_experts, elements[0].numel()),
                dtype=elements.dtype,
                degree=self._degree,
                own=nested_shard(self._place, self._degree.parts),
                begin=self._keeper.size,
            )
            self._keeper.keep(f"{name}.{key}", weight)
            self._whole.add(f"{name}.{key}", weight)
        for key, parameter in module._parameters.items():
            if is_of_experts(key) and parameter is not None:
                parts = range(2 if key.startswith("w13_") else 1)
                layer.missing[key] = {(e, p) for e in range(len(parameter)) for p in parts}
                parameter.weight_loader = partial(self._load, layer, key)
                if module.moe_config.has_bias:  # GPT-OSS in 16 bits is loaded without a loader
                    parameter.copy_ = partial(self._load, layer, key, parameter)
                module._non_persistent_buffers_set.add(key)  # see ``register_slot``

    def _load(
        self,
        layer: _Layer,
        key: str,
        param: Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str | None = None,
        shard_id: str | None = None,
        expert_id: int | None = None,
        return_success: bool = False,
    ) -> bool | None:
        """Take what the checkpoint has of one expert, or of all.

        Args and what it returns are those of ``RoutedExperts.weight_loader``.
        """
        self._keeper.allocate()
        module = layer.module
        own = self._own(module.global_num_experts)
        here = range(module.global_num_experts)[own.slice]
        taken = [expert_id] if expert_id is not None else list(here)
        if expert_id is None or loaded_weight.dim() == 3:
            taken, expert_id = list(here), own.first
            if len(loaded_weight) != own.size:
                loaded_weight = loaded_weight[own.slice]
        if expert_id not in here:
            return False if return_success else None
        if not layer.was_filled:
            target = layer.target(key, param)
            if weight_name is None:
                target.data.copy_(loaded_weight)
            else:
                module.weight_loader(target, loaded_weight, weight_name, shard_id, expert_id, True)
            layer.note(key, [expert - own.first for expert in taken], shard_id)
        return True if return_success else None

    def make_up(self, fill: Callable[[torch.Tensor], None]) -> None:
        """Fill what is packed of experts, and is missing, with made-up values."""
        for layer in self._layers.values():
            if layer.module.quant_method.is_packed and not layer.was_filled:
                for tensor in layer.store().values():
                    fill(tensor)
                layer.pack()

    def complete(self) -> None:
        """Let DP's layers compute with what the engine keeps, and with what is streamed."""
        for name, layer in self._layers.items():
            self._compute_all(layer.module, name, layer)

    def _compute_all(self, target: nn.Module, name: str, layer: _Layer) -> None:
        """Let a layer compute its engine's own experts, and all others by a layer beside it."""
        experts = target.global_num_experts
        here, others = self._own(experts), ExpertRange(0, experts)
        if self._degree.parts == 2:
            # Nothing is behind the addresses of this engine's own part (``WholeWeights``), and a
            # Triton kernel fails if nothing is where a tensor begins.
            others = ExpertRange(here.size - here.first, here.size)
        everywhere = self._everywhere(name, layer, others)
        device = elements_of(everywhere["w2_weight"]).device
        own, numbers = here.numbers(experts, device), others.numbers(experts, device)
        target.quant_method.have(target, layer.own)
        have_experts(target, own)
        beside = with_experts(target, everywhere, numbers.masked_fill(own >= 0, -1))
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
        module = layer.module
        here, tensors = self._own(module.global_num_experts, tp), layer.own
        if tp < self._degree.parts:
            tensors = self._everywhere(name, layer, here)
        part = nn.Module()
        for key, parameter in module._parameters.items():
            if not is_of_experts(key):
                part.register_parameter(key, parameter)
        part.quant_method = module.quant_method.for_whole(module.moe_config)
        part.quant_method.have(part, tensors)
        part.shoal_first, part.local_num_experts = here
        return part

    def _everywhere(self, name: str, layer: _Layer, experts: ExpertRange) -> dict[str, Packed]:
        """Return some experts where layouts of few members find them."""
        whole = {key: self._whole.weight(f"{name}.{key}") for key in layer.weights}
        return {key: layer.of(key, tensor[experts.slice]) for key, tensor in whole.items()}

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
                # Not in the layer itself: that runs inside an operator, and in CUDA graphs.
                runner = modules[name.removesuffix(_IN_RUNNER)]
                runner.forward = streamed(runner.forward, layout.tp, layer.number, layout.pp)
        return numbers
