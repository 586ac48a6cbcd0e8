"""Which weights can be served: kinds of layers with a rule, and quantisations with a format.

This module imports neither vLLM nor torch. With it the main process refuses all other models before
an engine starts. ``runtime/engine/weights/rules`` has the rules and formats themselves: each rule
is for one of the kinds listed here, and each quantisation named here has a format there.
"""

import enum
from collections.abc import Mapping
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
    """Routed experts; their routers and shared experts are other layers."""
    STATE_SPACE = enum.auto()
    LATENT_ATTENTION = enum.auto()
    """MLA: all heads share one latent for each token; its projections are linear layers."""


WITHOUT_RULE = frozenset({LayerKind.STATE_SPACE})
"""Kinds of layers that only DP could view."""

EXPERTS_BACKEND = "triton"
"""vLLM's name of the one kernel that computes routed experts, in every layout, on GPUs."""


def widest_share(size: int, block: int, most: int) -> int:
    """Return among how many members each expert can be divided so that the shares are views.

    In layouts of more members, each has a range of whole experts (expert parallel).

    Args:
        size: an expert's inner size.
        block: how many of these rows share a scale, or 1.
        most: members of the largest group, a power of two.
    """
    while size % (most * block) and most > 1:
        most //= 2
    return most


FP8_QUANTISATIONS = frozenset(
    {"fp8", "compressed-tensors", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block"}
)
"""vLLM's names of quantisations that every layout can serve; see ``is_fp8_scheme``."""

MXFP4_QUANTISATIONS = frozenset({"gpt_oss_mxfp4"})
"""vLLM's names of quantisations whose experts it packs one by one, and nothing else.

A layout beyond DP has parts of what is packed: ranges of whole experts (expert parallel), or shares
of each, of these units.
"""

STORED_MXFP4_UNIT = 32
"""Inner features of an expert that are divided together where experts stay as they are stored."""
HOPPER_MXFP4_UNIT = 128
"""The same where they are packed for vLLM's Triton kernel on Hopper."""

MXFP4_BACKENDS = ("triton", "marlin", "flashinfer_trtllm")
"""vLLM's names of kernels that read such experts from a range of what was packed for all.

vLLM chooses among them by the GPU: it takes the first on Hopper, the second on older GPUs, and the
last on Blackwell.
"""

REPACKED_QUANTISATIONS = frozenset({"auto_awq", "auto_gptq", "awq"})
"""vLLM's names of quantisations whose loaded weights it repacks, so that no view is possible.

Each layout loads its own shard of such layers. ``awq`` is what vLLM's model configuration calls
``auto_awq`` on CPUs. Of compressed-tensors' schemes, those of ``is_integer_scheme`` are repacked.
"""

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


def is_integer_scheme(weights: Any, activations: Any) -> bool:
    """Return whether compressed-tensors computes such layers with integers that vLLM repacks.

    These are ``CompressedTensorsWNA16`` (weights alone) and ``CompressedTensorsW8A8Int8``, which
    each layout loads its own shard of.

    Args:
        weights: the ``QuantizationArgs`` of the weights; None if they are not quantised.
        activations: the same for the activations.
    """
    if weights is None or weights.type != "int" or weights.dynamic:
        return False
    if activations is None:
        return weights.num_bits in (4, 8) and weights.strategy in ("channel", "group")
    of_bytes = (weights.num_bits, activations.type, activations.num_bits) == (8, "int", 8)
    return (
        of_bytes
        and weights.strategy in ("tensor", "channel")
        and activations.strategy in ("tensor", "token")
    )


def schemes(quantisation: Any) -> Mapping[str, Any]:
    """Return how compressed-tensors has each group of layers, by what it is called.

    Args:
        quantisation: vLLM's ``VllmConfig.quant_config``; None, or of any class.
    """
    if getattr(quantisation, "online_quantization_config", None) is not None:
        return {}  # it is quantised again as it is loaded
    return getattr(quantisation, "target_scheme_map", {})


def _is_fp8(quantised: Any) -> bool:
    return quantised is not None and (quantised.type, quantised.num_bits) == ("float", 8)
