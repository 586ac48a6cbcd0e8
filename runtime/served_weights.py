"""Which weights can be served: kinds of layers with a rule, and quantisations with a format.

This module imports neither vLLM nor torch. With it the main process refuses all other models before
an engine starts. ``runtime/engine/weights/rules`` has the rules and formats themselves: each rule
is for one of the kinds listed here, and each quantisation named here has a format there.
"""

import enum
from typing import Any


class LayerKind(enum.Enum):
    """A kind of layer, by how its weights are divided."""

    LINEAR = enum.auto()
    FUSED = enum.auto()
    VOCABULARY = enum.auto()
    ATTENTION = enum.auto()
    """Its only weights, if any, are scales of the KV cache."""
    WHOLE = enum.auto()
    """Norms, and all other layers that every member holds completely."""
    EXPERTS = enum.auto()
    STATE_SPACE = enum.auto()
    LATENT_ATTENTION = enum.auto()


WITHOUT_RULE = frozenset({LayerKind.EXPERTS, LayerKind.STATE_SPACE, LayerKind.LATENT_ATTENTION})
"""Kinds of layers that only DP could view."""

FP8_QUANTISATIONS = frozenset(
    {"fp8", "compressed-tensors", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block"}
)
"""vLLM's names of quantisations that every layout can serve; see ``is_fp8_scheme``."""

_STRATEGIES = ("tensor", "channel", "block")
"""The parts of an FP8 weight that may share one scale, in compressed-tensors' words."""


def is_fp8_scheme(weights: Any, activations: Any) -> bool:
    """Return whether ``CompressedTensorsW8A8Fp8`` computes such layers of compressed-tensors.

    It is the only scheme of compressed-tensors that every layout can view.

    Args:
        weights: the ``QuantizationArgs`` of the weights; None if they are not quantised.
        activations: the same for the activations.
    """
    return _is_fp8(weights) and weights.strategy in _STRATEGIES and _is_fp8(activations)


def _is_fp8(quantised: Any) -> bool:
    return quantised is not None and (quantised.type, quantised.num_bits) == ("float", 8)
