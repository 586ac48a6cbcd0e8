"""Which weights can be served: kinds of layers with a rule, and quantisations with a format.

Neither vLLM nor torch is needed to read it. The main process refuses all other models by name
before an engine starts. The rules and formats (``runtime/engine/weights/rules``) are the other half
of it: each rule is for one of the kinds here, and each name here is one that a format knows.
"""

import enum
from typing import Any


class LayerKind(enum.Enum):
    """A kind of layer, by how its weights are divided."""

    LINEAR = enum.auto()
    FUSED = enum.auto()
    VOCABULARY = enum.auto()
    ATTENTION = enum.auto()
    """It has scales of the KV cache at most."""
    WHOLE = enum.auto()
    """Norms, and whatever else every member has all of."""
    EXPERTS = enum.auto()
    STATE_SPACE = enum.auto()
    LATENT_ATTENTION = enum.auto()


WITHOUT_RULE = frozenset({LayerKind.EXPERTS, LayerKind.STATE_SPACE, LayerKind.LATENT_ATTENTION})
"""Kinds of layers that no layout but DP could view."""

FP8_QUANTISATIONS = frozenset(
    {"fp8", "compressed-tensors", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block"}
)
"""vLLM's names of quantisations that every layout can serve; see ``is_fp8_scheme``."""

_STRATEGIES = ("tensor", "channel", "block")
"""What one scale of an FP8 weight may be for, in compressed-tensors' words."""


def is_fp8_scheme(weights: Any, activations: Any) -> bool:
    """Return whether compressed-tensors' layers are computed by ``CompressedTensorsW8A8Fp8``.

    That is the one of its schemes that every layout can view.

    Args:
        weights: its ``QuantizationArgs`` of the weights; None if they are not quantised.
        activations: the same of the activations.
    """
    return _is_fp8(weights) and weights.strategy in _STRATEGIES and _is_fp8(activations)


def _is_fp8(quantised: Any) -> bool:
    return quantised is not None and (quantised.type, quantised.num_bits) == ("float", 8)
