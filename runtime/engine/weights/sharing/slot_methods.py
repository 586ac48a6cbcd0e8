"""How layers compute whose weights are slots, of which the engine keeps a part elsewhere."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn import Parameter

from shoal.runtime.engine.weights.rules.unquantised import PlainLinear
from shoal.runtime.engine.weights.sharing.shared_weight import GATE_UP, SharedWeight
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
    ) -> None:
        """Let another layout's layer compute with several parts, which steps stream.

        Args:
            target: the layout's layer, which has been made a view of them.
            layer: of the DP model.
            weight: its weight.
            stored: the parts, as they are stored.
            parts: which ones these are.
        """


Add = Callable[..., tuple[SharedWeight, Parameter]]
"""``SharedMlps.add`` for one layer."""


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
        shape = (sum(output_partition_sizes), input_size_per_partition)
        layer.register_parameter("weight", self._add(shape, params_dtype)[1])
        layer.shoal_grouped = True

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the layer's output; the part that this engine keeps is used where it is.

        Args:
            layer: of the DP model, which is complete.
            x: ``[tokens, inputs]``.
            bias: None; other layers are refused.
        """
        return split_linear(x, layer.weight, layer.own, layer.own_begin, layer.own_dimension)

    def keep(self, layer: nn.Module, weight: SharedWeight, _whole: torch.Tensor) -> None:
        """See ``SlotMethod.keep``."""
        assert weight.kept is not None
        layer.register_buffer("own", weight.of_layer(weight.kept), persistent=False)
        layer.own_dimension = OUTPUTS if weight.kind == GATE_UP else INPUTS
        layer.own_begin = weight.own * layer.own.shape[layer.own_dimension]

    def part(
        self, _layer: nn.Module, weight: SharedWeight, stored: torch.Tensor, _parts: PartRange
    ) -> nn.Module:
        """See ``SlotMethod.part``."""
        tensor = weight.of_layer(stored)
        layer = nn.Module()
        layer.register_parameter("weight", Parameter(tensor, requires_grad=False))
        layer.register_parameter("bias", None)
        layer.input_size, layer.shoal_grouped = tensor.shape[1], True
        return layer

    def stream(self, *_: Any) -> None:
        """See ``SlotMethod.stream``. All parts together are one matrix, of which it has a view."""
