"""FP8 weights under every layout: vLLM processes the DP model's, the others view the result.

Scales may be per-tensor, per-channel or block-wise, as vLLM's ``fp8`` and compressed-tensors load
them and as its online quantisation makes them. DP keeps vLLM's method and kernel; ``fp8_methods``
decides what multiplies the views of other layouts. A kernel that keeps weights in a form of its own
(repacked, padded) is refused by name.
"""

from collections.abc import Mapping
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
from vllm.model_executor.layers.quantization.online.fp8 import (
    Fp8PerBlockOnlineLinearMethod,
    Fp8PerTensorOnlineLinearMethod,
    Fp8PtpcOnlineLinearMethod,
)

from shoal.runtime.engine.kernels import fp8_methods
from shoal.runtime.engine.weights.rules.shards import Axes, UnviewableWeights

_SCHEMES: Mapping[str, type] = {
    "fp8": Fp8LinearMethod,
    "compressed-tensors": CompressedTensorsW8A8Fp8,
    "fp8_per_tensor": Fp8PerTensorOnlineLinearMethod,
    "fp8_per_channel": Fp8PtpcOnlineLinearMethod,
    "fp8_per_block": Fp8PerBlockOnlineLinearMethod,
}
"""vLLM's method or scheme of a layer, by vLLM's name of each of ``FP8_QUANTISATIONS``."""

KEEPS_SHAPES = False
VIEWED: type = fp8_methods.ViewedFp8
bind_kernels = fp8_methods.bind_kernels
warm_up = fp8_methods.warm_up


def scheme_of(method: Any, layer: nn.Module) -> Any:
    """Return what applies a layer's weights: vLLM's method, or compressed-tensors' scheme."""
    return layer.scheme if isinstance(method, CompressedTensorsLinearMethod) else method


def serves(scheme: Any) -> bool:
    """Return whether a scheme is FP8 that other layouts can view."""
    return type(scheme) in _SCHEMES.values()


def matches(layer: nn.Module) -> bool:
    """Return whether ``axes`` knows the layer's tensors."""
    quantised = (fp8_methods.ViewedFp8, CompressedTensorsLinearMethod, *_SCHEMES.values())
    return isinstance(getattr(layer, "quant_method", None), quantised)


def axes(layer: nn.Module) -> dict[str, Axes]:
    """Return the axes of the tensors of an FP8 layer of the DP model, processed by vLLM.

    Raises:
        UnviewableWeights: the layer's kernel keeps them in a form of its own.
    """
    kernel = fp8_methods.fp8_owner(layer).fp8_linear
    if type(kernel) not in fp8_methods.INPUT_RANGE_KERNELS:
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
            if isinstance(fp8_methods.quantising_kernel(kernel), DeepGemmFp8BlockScaledMMKernel):
                problem += "; with VLLM_USE_DEEP_GEMM=0 vLLM takes another kernel"
            raise UnviewableWeights(problem)
    return known | {"bias": Axes(0)}
