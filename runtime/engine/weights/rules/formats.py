"""Formats of weights: what tensors a linear layer has, and what multiplies views of them.

A format is a module: ``unquantised``, and one for each quantisation. Which part of a layer's
outputs or inputs a member has does not depend on its format: the layer's rule says it.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW8A8Int8,
    CompressedTensorsWNA16,
)

from shoal.runtime.engine.weights.rules import fp8, unquantised
from shoal.runtime.engine.weights.rules.shards import Axes, UnviewableWeights
from shoal.runtime.served_weights import REPACKED_QUANTISATIONS


class WeightFormat(Protocol):
    """What Shoal has to know of the layers of one format."""

    KEEPS_SHAPES: bool
    """Whether loaded tensors have the shapes with which vLLM's layers create them."""

    def axes(self, layer: nn.Module) -> Mapping[str, Axes]:
        """Return which dimensions of a DP layer's tensors are its outputs and inputs.

        Raises:
            UnviewableWeights: vLLM's kernel for the layer keeps them in a form of its own.
        """

    def bind_kernels(self, layer: nn.Module) -> None:
        """Give a layer, whose tensors are views now, kernels that can read them."""

    def warm_up(self, layer: nn.Module, seen: set[Any]) -> None:
        """Compile what a bound layer launches, unless a layer of its shape is among ``seen``."""


class QuantisedFormat(WeightFormat, Protocol):
    """A format that a checkpoint names."""

    VIEWED: type
    """Makes of vLLM's method the method of a layer whose tensors will be views."""

    def serves(self, scheme: Any) -> bool:
        """Return whether vLLM's method (or compressed-tensors' scheme) makes this format."""

    def matches(self, layer: nn.Module) -> bool:
        """Return whether a layer of any layout has a method of this format."""


QUANTISED: tuple[QuantisedFormat, ...] = (fp8,)


def format_of(layer: nn.Module) -> WeightFormat:
    """Return the format of a layer's weights."""
    return next((known for known in QUANTISED if known.matches(layer)), unquantised)


def owns_weights(layer: nn.Module) -> bool:
    """Return whether every layout loads its own shard of a layer, because vLLM repacks it."""
    return getattr(layer, "shoal_owned", False)


REPACKED_SCHEMES = (CompressedTensorsWNA16, CompressedTensorsW8A8Int8)
"""compressed-tensors' schemes of ``is_integer_scheme``."""


def _is_repacked(scheme: Any, layer: nn.Module) -> bool:
    """Return whether vLLM repacks what a linear layer loads, in a quantisation that is served."""
    config = getattr(scheme, "quant_config", None)
    named = config is not None and config.get_name() in REPACKED_QUANTISATIONS
    return isinstance(layer, LinearBase) and (named or isinstance(scheme, REPACKED_SCHEMES))


def quantised_method(
    method: LinearMethodBase, layer: nn.Module, name: str, *, views: bool
) -> LinearMethodBase:
    """Return the method of a layer that vLLM would give ``method``.

    Args:
        method: vLLM's ``quant_method`` for the layer, from the checkpoint's quantisation.
        layer: the layer, which is being made.
        name: what it is called in the model.
        views: whether its tensors will be views, where their format allows it. A layer that vLLM
            repacks keeps vLLM's method, and is marked (``owns_weights``).

    Raises:
        UnviewableWeights: no format is for this quantisation; the message names it.
    """
    scheme = fp8.scheme_of(method, layer)
    for known in QUANTISED:
        if known.serves(scheme):
            return known.VIEWED(method) if views else method
    if _is_repacked(scheme, layer):
        layer.shoal_owned = True
        return method
    raise UnviewableWeights(f"{name}: {type(scheme).__name__} weights are not supported")
