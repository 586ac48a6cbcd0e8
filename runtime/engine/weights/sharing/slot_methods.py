"""How layers compute whose weights are slots, of which the engine keeps a part elsewhere."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn import Parameter

from shoal.policies.values.layouts import DP
from shoal.runtime.engine.weights.rules.unquantised import PlainLinear
from shoal.runtime.engine.weights.sharing.shared_weight import QKV, SharedWeight
from shoal.runtime.engine.weights.sharing.slots import use_weights
from shoal.runtime.engine.weights.sharing.split_linear import INPUTS, OUTPUTS, split_linear


class PartRange(NamedTuple):
    """Some adjacent parts of a weight."""

    first: int
    """The first one, counted in the whole weight."""
    size: int


class SlotMethod(Protocol):
    """The method of a DP layer whose weight is a slot, by the format of its weight."""

    def keep(self, layer: nn.Module, weight: SharedWeight, whole: torch.Tensor) -> None:
        """Let DP's layer use the part that the engine keeps where it is kept.

        Args:
            layer: of the DP model; everything is loaded.
            weight: its weight, of which the engine's part is there.
            whole: where the other parts are, as they are stored.
        """

    def part(
        self, layer: nn.Module, weight: SharedWeight, stored: torch.Tensor, parts: PartRange
    ) -> nn.Module:
        """Return what rules have to know of the layer of which a layout's layer is a part.

        Args:
            layer: of the DP model.
            weight: its weight.
            stored: the parts in question, as they are stored.
            parts: which ones these are.
        """

    def stream(
        self,
        target: nn.Module,
        layer: nn.Module,
        weight: SharedWeight,
        stored: torch.Tensor,
        parts: PartRange,
        pp: int,
    ) -> None:
        """Let another layout's layer compute with several parts, which steps stream.

        With all parts it computes as DP's does: the engine's own part is used where it is kept.

        Args:
            target: the layout's layer, which has been made a view of them.
            layer: of the DP model.
            weight: its weight.
            stored: the parts, as they are stored.
            parts: which ones these are.
            pp: stages of the layout.
        """


Add = Callable[..., tuple[SharedWeight, Parameter]]
"""``SharedLayers.add`` for one layer."""


def register_slot(layer: nn.Module, slot: Parameter) -> None:
    """Let a slot be a layer's weight, which vLLM's loader of made-up weights leaves out.

    It writes to everything but buffers that no checkpoint has. The slot is not the engine's own
    part, and may have no memory for it (``WholeWeights.weight``).
    """
    layer.register_parameter("weight", slot)
    layer._non_persistent_buffers_set.add("weight")


class SlotLinear(PlainLinear):
    """``SlotMethod`` of weights that are not quantised.

    Args:
        add: makes the weight.
    """

    def __init__(self, add: Add) -> None:
        super().__init__(meta=False)
        self._add = add

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Let the weight be a slot, and let what is loaded for it go to this engine's part."""
        sections = tuple(output_partition_sizes)
        shape = (sum(sections), input_size_per_partition)
        made = self._add(shape, params_dtype, sections=sections)
        register_slot(layer, made[1])
        layer.shoal_grouped = True

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the layer's output; the part that this engine keeps is used where it is.

        Args:
            layer: of the DP model, which is complete.
            x: ``[tokens, inputs]``.
            bias: is added to the output.
        """
        y = split_linear(x, layer.weight, layer.own, layer.own_begin, layer.own_dimension)
        return y if bias is None else y + bias

    def keep(self, layer: nn.Module, weight: SharedWeight, _whole: torch.Tensor) -> None:
        """See ``SlotMethod.keep``."""
        assert weight.kept is not None
        layer.register_buffer("own", weight.of_layer(weight.kept), persistent=False)
        layer.own_dimension = INPUTS if weight.is_by_inputs else OUTPUTS
        layer.own_begin = weight.own * layer.own.shape[layer.own_dimension]

    def part(
        self, layer: nn.Module, weight: SharedWeight, stored: torch.Tensor, _parts: PartRange
    ) -> nn.Module:
        """See ``SlotMethod.part``."""
        tensor = weight.of_layer(stored)
        part = nn.Module()
        part.register_parameter("weight", Parameter(tensor, requires_grad=False))
        part.register_parameter("bias", layer.bias)
        part.input_size, part.shoal_grouped = tensor.shape[1], True
        return part

    def stream(
        self,
        target: nn.Module,
        layer: nn.Module,
        weight: SharedWeight,
        _stored: torch.Tensor,
        parts: PartRange,
        pp: int,
    ) -> None:
        """See ``SlotMethod.stream``. All parts together are one matrix, of which it has a view."""
        if parts.size == weight.degree.parts:
            target.register_buffer("own", layer.own, persistent=False)
            target.own_dimension, target.own_begin = layer.own_dimension, layer.own_begin
            target.quant_method = self


class InSections:
    """Mixed into methods of fused layers: outputs of several parts are put in vLLM's order."""

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the layer's output, of attention once the model's layer is in its slot."""
        if layer.slot_waits:
            x = use_weights(x, layer.slot_tp, layer.slot_number, layer.slot_pp)
        return in_sections(super().apply(layer, x, bias), layer)  # type: ignore[misc]


class SlotInSections(InSections):
    """Mixed into a ``SlotMethod``, which is that of a layer of several matrices then.

    A part has its own range of each, one after the other (``SharedWeight.stored``). So outputs of
    several parts are put in vLLM's order afterwards.
    """

    def part(
        self, layer: nn.Module, weight: SharedWeight, stored: torch.Tensor, parts: PartRange
    ) -> nn.Module:
        """See ``SlotMethod.part``. The part knows what it has of each matrix (``FusedRule``)."""
        part: nn.Module = super().part(layer, weight, stored, parts)  # type: ignore[misc]
        all_parts = weight.degree.parts
        part.output_sizes = [size * parts.size // all_parts for size in weight.sections]
        if weight.kind == QKV:
            part.total_num_kv_heads = layer.total_num_kv_heads * parts.size // all_parts
        part.shoal_grouped = parts.size > 1
        return part

    def stream(
        self,
        target: nn.Module,
        layer: nn.Module,
        weight: SharedWeight,
        stored: torch.Tensor,
        parts: PartRange,
        pp: int,
    ) -> None:
        """See ``SlotMethod.stream``."""
        super().stream(target, layer, weight, stored, parts, pp)  # type: ignore[misc]
        note_parts(target, weight, parts, pp)
        target.quant_method = self if target.slot_tp == DP.tp else self._streamed(target)

    def _streamed(self, target: nn.Module) -> Any:
        """Return the method of a layer that streams several parts, which are one product."""
        raise NotImplementedError


class SlotFused(SlotInSections, SlotLinear):
    """``SlotMethod`` of several matrices that are one. The bias is in the order of parts.

    Args:
        add: makes the weight.
    """

    def keep(self, layer: nn.Module, weight: SharedWeight, whole: torch.Tensor) -> None:
        """See ``SlotMethod.keep``."""
        super().keep(layer, weight, whole)
        note_parts(layer, weight, PartRange(0, weight.degree.parts), DP.pp)
        if layer.bias is not None:
            order_by_parts(layer.bias.data, weight.sections, weight.degree.parts)

    def part(
        self, layer: nn.Module, weight: SharedWeight, stored: torch.Tensor, parts: PartRange
    ) -> nn.Module:
        """See ``SlotMethod.part``."""
        part = super().part(layer, weight, stored, parts)
        if layer.bias is not None:
            size = layer.bias.shape[0] // weight.degree.parts
            bias = layer.bias.data.narrow(0, parts.first * size, parts.size * size)
            part.bias = Parameter(bias, requires_grad=False)
        return part

    def _streamed(self, _target: nn.Module) -> "StreamedFused":
        return StreamedFused(meta=True)


class StreamedFused(InSections, PlainLinear):
    """The same of a layout that streams several parts: one product for all."""


# --- several matrices that are one, of any format -------------------------------------------------


def note_parts(layer: nn.Module, weight: SharedWeight, parts: PartRange, pp: int) -> None:
    """Let a layer that computes with several parts know its slot, and what ``in_sections`` needs.

    Args:
        layer: of DP, or of another layout that streams.
        weight: DP's.
        parts: those of the weight that the layer has.
        pp: stages of the layout.
    """
    layer.slot_number, layer.slot_parts, layer.slot_pp = weight.layer, parts.size, pp
    layer.slot_tp = weight.degree.parts // parts.size
    layer.slot_sections = tuple(size // layer.slot_tp for size in weight.sections)
    # Of an MLP that comes first in its layer, all of it waits (``SharedLayers.stream_in``).
    layer.slot_waits = weight.kind == QKV


def order_by_parts(rows: torch.Tensor, sections: Sequence[int], parts: int) -> None:
    """Put rows for outputs from vLLM's order into that of parts, in place.

    Args:
        rows: ``[outputs, ...]``, first those of the first matrix, such as all queries.
        sections: how many rows each matrix has.
        parts: how many parts there are; each has its rows of the first matrix, then of the next.
    """
    of_parts = [some.unflatten(0, (parts, -1)) for some in rows.split(list(sections))]
    rows.copy_(torch.cat(of_parts, dim=1).flatten(0, 1))


def in_sections(y: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """Return outputs of a layer's parts, each with sections of its own, in vLLM's order."""
    of_parts = y.view(*y.shape[:-1], layer.slot_parts, -1)
    sizes = [size // layer.slot_parts for size in layer.slot_sections]
    return torch.cat([some.flatten(-2) for some in of_parts.split(sizes, dim=-1)], dim=-1)
