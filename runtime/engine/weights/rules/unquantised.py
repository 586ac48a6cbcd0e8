"""Weights that are not quantised: vLLM's methods for them, and what multiplies their views."""

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.utils import dispatch_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

from shoal.runtime.engine.kernels import partitioned_linear
from shoal.runtime.engine.kernels.linear_tiles import MAX_RANGES
from shoal.runtime.engine.weights.rules.shards import Axes

KEEPS_SHAPES = True

STOCK = (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""vLLM's methods of layers that are not quantised."""


def _plain_gemm() -> Callable[..., torch.Tensor]:
    """Return vLLM's GEMM for this platform, without the CPU backend's weight prepacking.

    Prepacking empties the parameter, and with it every view.
    """
    if current_platform.is_cpu():
        return lambda _layer, x, weight, bias: nn.functional.linear(x, weight, bias)
    return dispatch_unquantized_gemm()  # type: ignore[no-any-return]


PACKING_ON_CPUS = ("CPUFp8PerTensorScaledMMLinearKernel", "CPUFp8BlockScaledMMKernel")
"""vLLM's kernels for CPUs with AMX, which it would choose there and which pack FP8 weights."""


def leave_weights_on_cpus() -> None:
    """Let vLLM's own methods of linear layers leave weights as they are, too, on CPUs.

    Some layers are made without a quantisation configuration, such as Mixtral's routers, and so are
    never given our method.
    """
    LinearBase._cpu_skip_gemm_dispatch = True
    disabled = os.environ.get("VLLM_DISABLED_KERNELS", "").split(",")
    names = dict.fromkeys(name for name in (*disabled, *PACKING_ON_CPUS) if name)
    os.environ["VLLM_DISABLED_KERNELS"] = ",".join(names)


class _InPlace:
    """What both methods change in vLLM's: they leave the weight, their own or a view, as it is.

    Args:
        meta: whether the weight will become a view, and so gets no storage of its own.
    """

    def __init__(self, *, meta: bool) -> None:
        self._meta = meta
        self._gemm_impl = _plain_gemm()

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        """Create the weight."""
        where: AbstractContextManager[Any] = torch.device("meta") if self._meta else nullcontext()
        with where:
            super().create_weights(*args, **kwargs)  # type: ignore[misc]

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Leave the weight as it is: views need its bytes in place."""


class PlainLinear(_InPlace, UnquantizedLinearMethod):  # type: ignore[misc]
    """The method of linear layers."""


class PlainEmbedding(_InPlace, UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """The method of vocabulary embeddings and the LM head."""

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the logits of ``x``, ``[tokens, hidden]``, over this rank's vocabulary."""
        return self._gemm_impl(layer, x, layer.weight, bias)


class Part(nn.Module):  # type: ignore[misc]
    """One logical part of a fused layer, such as this rank's keys: tensors and no code."""


class SplitLinear(PlainLinear):
    """A fused layer as one GEMM for each of ``layer.parts``."""

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the parts' outputs side by side: ``[tokens, sum of this rank's part sizes]``."""
        outputs = [self._gemm_impl(layer, x, part.weight, part.bias) for part in layer.parts]
        return torch.cat(outputs, dim=-1)


class RowRangesLinear(PlainLinear):
    """A fused layer as one operator over the ranges of rows of ``layer.parts``."""

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the parts' outputs side by side: ``[tokens, sum of this rank's part sizes]``."""
        return partitioned_linear.linear(x, *_ranges(layer))


def _ranges(layer: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    weights = [part.weight for part in layer.parts]
    biases = [part.bias for part in layer.parts]
    return weights, [] if biases[0] is None else biases


# --- the format (``WeightFormat``) ----------------------------------------------------------------


def axes(_: nn.Module) -> Mapping[str, Axes]:
    """Return which dimensions of the tensors are outputs and inputs."""
    return {"weight": Axes(0, 1), "bias": Axes(0)}


def bind_kernels(layer: nn.Module) -> None:
    """Choose for a fused layer with ``parts``: one launch, or a GEMM for each part."""
    if not hasattr(layer, "parts"):
        return
    if _in_one_launch(layer):
        _pair_parts(layer)
        layer.quant_method = RowRangesLinear(meta=True)
    else:
        layer.quant_method = SplitLinear(meta=True)


def _in_one_launch(layer: nn.Module) -> bool:
    on_gpu: bool = layer.parts[0].weight.is_cuda
    return on_gpu and len(layer.parts) <= MAX_RANGES


def _pair_parts(layer: nn.Module) -> None:
    """Make two parts of QKV one, where ``partitioned_linear`` can read them as one tensor."""
    weights, biases = (partitioned_linear.paired(ranges) for ranges in _ranges(layer))
    layer.parts = nn.ModuleList()
    for index, weight in enumerate(weights):
        part = Part()
        part.weight = Parameter(weight, requires_grad=False)
        part.bias = Parameter(biases[index], requires_grad=False) if biases else None
        layer.parts.append(part)


def warm_up(layer: nn.Module, seen: set[Any]) -> None:
    """Compile what a fused layer launches, unless one of its shape is among ``seen``."""
    if not isinstance(getattr(layer, "quant_method", None), RowRangesLinear):
        return
    weights, biases = _ranges(layer)
    shape = (*(weight.shape for weight in weights), bool(biases))
    if shape not in seen:
        seen.add(shape)
        partitioned_linear.warm_up(weights, biases)
