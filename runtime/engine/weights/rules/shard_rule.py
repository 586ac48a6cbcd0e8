"""What a rule says of a kind of layer: how a layout views full layers, and what it launches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import Parameter
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
    resolve_quant_method,
)

from shoal.runtime.engine.weights.rules.formats import format_of, quantised_method
from shoal.runtime.engine.weights.rules.shards import Axes, Shard, UnviewableWeights
from shoal.runtime.engine.weights.rules.unquantised import STOCK, PlainEmbedding, PlainLinear
from shoal.runtime.served_weights import LayerKind


@dataclass(frozen=True)
class FullLayer:
    """A layer of the DP model, whose tensors are wherever the store has them."""

    name: str
    """Its name in the model; empty for the model itself."""
    module: nn.Module
    """vLLM's layer, which has its sizes, its method, and the shapes of its tensors."""
    find: Callable[[str], torch.Tensor]
    """``ResidentWeights.tensor``."""

    def tensor(self, key: str) -> torch.Tensor:
        """Return one of its parameters or buffers, whole."""
        return self.find(f"{self.name}.{key}".removeprefix("."))


class ShardRule:
    """How layers of one kind share the full layer's bytes in every layout.

    Unless a subclass says otherwise, every member has all tensors of the layer.
    """

    kind: ClassVar[LayerKind]
    """Before the start, models are refused whose layers are of a kind without a rule."""
    layers: ClassVar[tuple[type, ...]] = ()
    """vLLM's classes of such layers."""
    plain: ClassVar[type[PlainLinear | PlainEmbedding] | None] = None
    """Their method if they are not quantised; None leaves the choice to the layer."""
    scheme: ClassVar[str] = ""
    """What ``WEIGHT_SCHEME`` says of the order of the full layer's rows, if it is not vLLM's, and
    of the operator that multiplies views of them."""
    of_heads: ClassVar[bool] = False
    """Whether a layer around or beside a QKV projection is divided as the attention heads are."""

    def matches(self, layer: nn.Module) -> bool:
        """Return whether this rule is for a layer; the first such rule in ``RULES`` applies."""
        return isinstance(layer, self.layers)

    def stock_method(
        self, inner: QuantizationConfig | None, layer: nn.Module, name: str
    ) -> QuantizeMethodBase | None:
        """Return what vLLM would take for a layer of the checkpoint.

        Args:
            inner: vLLM's own configuration of a quantised checkpoint.
            layer: the layer, which is being made.
            name: what the layer is called in the model.
        """
        return resolve_quant_method(inner, layer, name) if inner else None

    def quant_method(
        self, layer: nn.Module, stock: QuantizeMethodBase | None, name: str, *, views: bool
    ) -> QuantizeMethodBase | None:
        """Return what creates and applies the layer's weights; None leaves it to the layer.

        Args:
            layer: the layer, which is being made.
            stock: what vLLM would take for the checkpoint.
            name: what the layer is called in the model.
            views: whether its tensors will be views; otherwise they are the DP model's.

        Raises:
            UnviewableWeights: the layer's quantisation is not supported; the message names it.
        """
        if isinstance(stock, STOCK):
            return None if self.plain is None else self.plain(meta=views)
        return quantised_method(stock, layer, name, views=views)

    def arrange(self, full: FullLayer, groups: int) -> None:
        """Put the rows of the full layer in an order in which shards are ranges.

        Args:
            full: the layer of the DP model, loaded.
            groups: size of the largest group that the node can form; more than 1.

        Raises:
            UnviewableWeights: the rows cannot be put in that order.
        """

    def view(self, layer: nn.Module, full: FullLayer, shard: Shard) -> None:
        """Let the tensors of a layout's layer be views of the full layer's.

        Args:
            layer: vLLM's layer for this member, whose tensors have no bytes.
            full: the same layer of the DP model, loaded and arranged.
            shard: which share of the layer the member has.

        Raises:
            UnviewableWeights: the layer is split in a way that the rule does not know.
        """
        view_whole(layer, full)

    def warm_up(self, layer: nn.Module, seen: set[Any]) -> None:
        """Compile what a viewed layer launches, unless a layer of its shape is among ``seen``."""
        format_of(layer).warm_up(layer, seen)


class WholeRule(ShardRule):
    """Norms, and everything else that no other rule is for: every member has all of it."""

    kind = LayerKind.WHOLE
    layers = (nn.Module,)


Take = Callable[[Axes, torch.Tensor], torch.Tensor]
"""Picks a shard of one tensor."""


def view_tensors(target: nn.Module, full: FullLayer, take: Take) -> None:
    """Make the parameters of ``target`` shards of the parameters of ``full``."""
    axes = format_of(full.module).axes(full.module)
    for key in target._parameters:
        target._parameters[key] = None
    for key, parameter in full.module._parameters.items():
        view = None
        if parameter is not None:
            if key not in axes:
                raise UnviewableWeights(f"{key} is split in a way Shoal does not know")
            view = Parameter(take(axes[key], full.tensor(key).data), requires_grad=False)
        target.register_parameter(key, view)


def view_whole(layer: nn.Module, full: FullLayer) -> None:
    """Give a layer the full layer's own parameters, and its buffers of the same shape."""
    for key, parameter in layer._parameters.items():
        if parameter is None:
            continue
        other = full.module._parameters.get(key)
        if other is None or other.shape != parameter.shape:
            raise UnviewableWeights(f"{full.name}.{key} is split in a way Shoal does not know")
        layer._parameters[key] = full.tensor(key)
    for key, buffer in layer._buffers.items():
        other = full.module._buffers.get(key)
        if buffer is not None and other is not None and other.shape == buffer.shape:
            layer._buffers[key] = full.tensor(key)
