"""FP8 weights under every layout: vLLM processes the DP model's, the others view the result.

Per-tensor, per-channel and block-wise scales, as vLLM's ``fp8`` and compressed-tensors load them
and as its online quantisation makes them. DP keeps vLLM's method and kernel; what multiplies the
views of other layouts, ``fp8_methods`` decides. A kernel that keeps weights in a form of its own
(repacked, padded) is refused by name.
"""

from typing import Any

from torch import nn
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
    FP8BlockParams,
    Fp8BlockScaledMMLinearKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.deep_gemm import DeepGemmFp8BlockScaledMMKernel
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsLinearMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW8A8Fp8,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.quantization.online.fp8 import (
    Fp8PerBlockOnlineLinearMethod,
    Fp8PerTensorOnlineLinearMethod,
    Fp8PtpcOnlineLinearMethod,
)

from shoal.runtime.engine.kernels.fp8_methods import (
    INPUT_RANGE_KERNELS,
    ViewedFp8,
    fp8_owner,
    quantising_kernel,
)
from shoal.runtime.engine.weights.shards import Axes, UnviewableWeights

_METHODS = (
    Fp8LinearMethod,
    Fp8PerTensorOnlineLinearMethod,
    Fp8PerBlockOnlineLinearMethod,
    Fp8PtpcOnlineLinearMethod,
)


def check_method(method: Any, layer: nn.Module, name: str) -> None:
    """Check that a layer's quantisation is FP8 that other layouts can view.

    Args:
        method: vLLM's ``quant_method`` for the layer.
        layer: the linear layer.
        name: what the layer is called in the model.

    Raises:
        UnviewableWeights: it is another quantisation; the message names it.
    """
    scheme = layer.scheme if isinstance(method, CompressedTensorsLinearMethod) else method
    if type(scheme) not in (*_METHODS, CompressedTensorsW8A8Fp8):
        raise UnviewableWeights(f"{name}: {type(scheme).__name__} weights are not supported")


def is_fp8(layer: nn.Module) -> bool:
    """Return whether ``axes`` knows the layer's tensors."""
    quantised = (ViewedFp8, CompressedTensorsLinearMethod, *_METHODS)
    return isinstance(getattr(layer, "quant_method", None), quantised)


def axes(layer: nn.Module) -> dict[str, Axes]:
    """Return the axes of the tensors of an FP8 layer of the DP model, processed by vLLM.

    Raises:
        UnviewableWeights: the layer's kernel keeps them in a form of its own.
    """
    kernel = fp8_owner(layer).fp8_linear
    if type(kernel) not in INPUT_RANGE_KERNELS:
        raise UnviewableWeights(f"{type(kernel).__name__} keeps FP8 weights in a form of its own")
    outputs, inputs = layer.output_size, layer.input_size
    if isinstance(kernel, Fp8BlockScaledMMLinearKernel):
        scale = FP8BlockParams.from_layer(layer).block_scale_attr
        rows, columns = layer.weight_block_size
        shapes = {"weight": (outputs, inputs), scale: (-(-outputs // rows), -(-inputs // columns))}
        known = {"weight": Axes(0, 1), scale: Axes(0, 1, rows, columns)}
    else:
        per_channel = layer.weight_scale.numel() > 1
        shapes = {"weight": (inputs, outputs)}
        if per_channel:
            shapes["weight_scale"] = (outputs, 1)
        known = {
            "weight": Axes(1, 0),
            "weight_scale": Axes(0) if per_channel else Axes(),
            "input_scale": Axes(),
        }
    for key, shape in shapes.items():
        if tuple(getattr(layer, key).shape) != shape:
            problem = f"{type(kernel).__name__} has changed the shape of {key}"
            if isinstance(quantising_kernel(kernel), DeepGemmFp8BlockScaledMMKernel):
                problem += "; with VLLM_USE_DEEP_GEMM=0 vLLM takes another kernel"
            raise UnviewableWeights(problem)
    return known | {"bias": Axes(0)}


# --- scales of the KV cache -----------------------------------------------------------------------

_KV_SCALES = ("_q_scale", "_k_scale", "_v_scale", "_prob_scale")


class ViewedKVScales(BaseKVCacheMethod):  # type: ignore[misc]
    """Scales of an attention layer's KV cache that are the DP layer's: nothing to load."""

    def create_weights(self, layer: nn.Module) -> None:
        """Create none."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Leave them as they are."""


def share_kv_scales(layer: nn.Module, full: nn.Module) -> None:
    """Give an attention layer the DP layer's KV cache scales.

    Raises:
        UnviewableWeights: they differ by head, and heads are split.
    """
    for key in _KV_SCALES:
        scale = full._buffers.get(key)
        if scale is None:
            continue
        if scale.numel() != 1:
            raise UnviewableWeights("KV cache scales by head are not supported")
        layer._buffers[key] = scale
        for name in (f"{key}_float", f"{key}_cpu"):
            if hasattr(full, name):
                setattr(layer, name, getattr(full, name))
