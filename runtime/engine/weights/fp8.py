"""FP8 weights under every layout: vLLM processes the DP model's, the others view the result.

Per-tensor, per-channel and block-wise scales, as vLLM's ``fp8`` and compressed-tensors load them
and as its online quantisation makes them. DP keeps vLLM's method and kernel. In the other layouts:

- a range of outputs is a packed matrix of its own: the same kernel, on views;
- a range of inputs is not. vLLM's CUTLASS kernels take the weight for packed without looking at its
  strides and would read other members' inputs, with no error, so another kernel multiplies it:
  ``partitioned_linear_fp8``'s in steps of few tokens;
- QKV is one layer over three ranges of outputs (``partitioned_linear_fp8``).

A kernel that keeps weights in a form of its own (repacked, padded) is refused by name.
"""

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
    FP8BlockParams,
    Fp8BlockScaledMMLinearKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.cutlass import (
    CutlassFp8BlockScaledMMKernel,
    CutlassFP8ScaledMMLinearKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.deep_gemm import DeepGemmFp8BlockScaledMMKernel
from vllm.model_executor.kernels.linear.scaled_mm.flashinfer import (
    FlashInferFp8DeepGEMMDynamicBlockScaledKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.pytorch import (
    BlockWiseTorchFP8ScaledMMLinearKernel,
    ChannelWiseTorchFP8ScaledMMLinearKernel,
    PerTensorTorchFP8ScaledMMLinearKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.triton import TritonFp8BlockScaledMMKernel
from vllm.model_executor.layers.fusion.quant_activation import as_quantized_activation
from vllm.model_executor.layers.linear import LinearMethodBase, RowParallelLinear
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

from shoal.runtime.engine.kernels import partitioned_linear, partitioned_linear_fp8
from shoal.runtime.engine.weights.shards import Axes, UnviewableWeights

_METHODS = (
    Fp8LinearMethod,
    Fp8PerTensorOnlineLinearMethod,
    Fp8PerBlockOnlineLinearMethod,
    Fp8PtpcOnlineLinearMethod,
)


# --- what vLLM made of a layer --------------------------------------------------------------------


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


def _owner(layer: nn.Module) -> Any:
    """Return what holds a layer's ``fp8_linear``: vLLM's method, or compressed-tensors' scheme."""
    method = layer.quant_method
    method = method.method if isinstance(method, ViewedFp8) else method
    return layer.scheme if isinstance(method, CompressedTensorsLinearMethod) else method


def _quantising(kernel: Any) -> Any:
    """Return the kernel that quantises inputs apart from the product, as ours want them.

    It is the one for many tokens where vLLM's picks one of two by their number and leaves the
    quantisation to them (``FlashInferFp8DeepGEMMDynamicBlockScaledKernel``).
    """
    return getattr(kernel, "fallback", kernel)


def is_fp8(layer: nn.Module) -> bool:
    """Return whether ``axes`` knows the layer's tensors."""
    quantised = (ViewedFp8, CompressedTensorsLinearMethod, *_METHODS)
    return isinstance(getattr(layer, "quant_method", None), quantised)


def axes(layer: nn.Module) -> dict[str, Axes]:
    """Return the axes of the tensors of an FP8 layer of the DP model, processed by vLLM.

    Raises:
        UnviewableWeights: the layer's kernel keeps them in a form of its own.
    """
    kernel = _owner(layer).fp8_linear
    if type(kernel) not in _INPUT_RANGE_KERNELS:
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
            if isinstance(_quantising(kernel), DeepGemmFp8BlockScaledMMKernel):
                problem += "; with VLLM_USE_DEEP_GEMM=0 vLLM takes another kernel"
            raise UnviewableWeights(problem)
    return known | {"bias": Axes(0)}


# --- how the other layouts apply it ---------------------------------------------------------------


class ViewedFp8(LinearMethodBase):  # type: ignore[misc]
    """vLLM's FP8 method on views: it creates no weights and processes none.

    Args:
        method: vLLM's own method for the layer.
    """

    def __init__(self, method: LinearMethodBase) -> None:
        self.method = method

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        """Create the tensors without storage: they become views."""
        without_storage: AbstractContextManager[Any] = torch.device("meta")
        with without_storage:
            self.method.create_weights(*args, **kwargs)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Leave the tensors as they are: vLLM processed what they view."""

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the layer's output, ``[tokens, outputs of this rank]``."""
        return self.method.apply(layer, x, bias)


class SplitFp8(ViewedFp8):
    """A fused layer as one product for each logical part: ``layer.parts[i]`` has its tensors."""

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the parts' outputs side by side: ``[tokens, sum of this rank's part sizes]``."""
        kernel = _owner(layer).fp8_linear
        if isinstance(kernel, Fp8BlockScaledMMLinearKernel):
            return self._apply_block_wise(kernel, layer, x)
        prepared = as_quantized_activation(x, kernel.input_quant_key())
        if prepared is not None:
            data, scale, shape = prepared.data, prepared.scale, prepared.orig_shape
        else:
            shape = x.shape
            first = layer.parts[0]
            data, scale = kernel.quant_fp8(x.view(-1, shape[-1]), first.input_scale, None)
        return self._multiply(layer, data, scale, shape)

    def _multiply(
        self, layer: nn.Module, data: torch.Tensor, scale: torch.Tensor, shape: torch.Size
    ) -> torch.Tensor:
        """Return the outputs for a quantised input that was of ``shape``."""
        outputs = [
            part.kernel.apply_scaled_mm(
                A=data,
                B=part.weight,
                out_dtype=part.kernel.config.out_dtype,
                As=scale,
                Bs=part.weight_scale,
                bias=part.bias,
                output_shape=[*shape[:-1], part.weight.shape[1]],
            )
            for part in layer.parts
        ]
        return torch.cat(outputs, dim=-1)

    def _apply_block_wise(self, kernel: Any, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        # As Fp8BlockScaledMMLinearKernel.apply_weights, but the input is quantised once.
        data = x.view(-1, x.shape[-1])
        scale = data
        if kernel.apply_input_quant:
            data, scale = kernel.quant_fp8(data, None, None, use_triton=kernel.use_triton)
        output = self._multiply_blocks(kernel, layer, data, scale)
        return output.view(*x.shape[:-1], output.shape[-1])

    def _multiply_blocks(
        self, kernel: Any, layer: nn.Module, data: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        """Return the outputs for an input that ``kernel`` quantised."""
        outputs = []
        for part in layer.parts:
            weight_scale = FP8BlockParams.from_layer(part).block_scale
            output = kernel.apply_block_scaled_mm(A=data, B=part.weight, As=scale, Bs=weight_scale)
            outputs.append(output if part.bias is None else output + part.bias)
        return torch.cat(outputs, dim=-1).to(kernel.config.out_dtype)


class RowRangesFp8(SplitFp8):
    """A fused layer as one operator over the ranges of rows of ``layer.parts``.

    Per-tensor and per-channel scales, for what vLLM multiplies with CUTLASS; block-wise ones that
    our kernel knows.
    """

    def _multiply(
        self, layer: nn.Module, data: torch.Tensor, scale: torch.Tensor, shape: torch.Size
    ) -> torch.Tensor:
        output = partitioned_linear_fp8.linear(data, scale, *_launch(layer))
        return output.view(*shape[:-1], output.shape[1])

    def _apply_block_wise(self, kernel: Any, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return super()._apply_block_wise(_quantising(kernel), layer, x)

    def _multiply_blocks(
        self, kernel: Any, layer: nn.Module, data: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        return partitioned_linear_fp8.linear(data, scale, *_launch(layer))


Launch = tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], torch.dtype, int]
"""Weights ``[rows, depth]``, scales and biases, the output's type and the size of a scale's block:
what ``partitioned_linear_fp8.linear`` is given besides an input."""


def _launch(layer: nn.Module) -> Launch:
    """Return that of a fused layer's parts."""
    kernel = _owner(layer).fp8_linear
    weights = [part.weight for part in layer.parts]
    biases = [part.bias for part in layer.parts]
    if isinstance(kernel, Fp8BlockScaledMMLinearKernel):
        scales, block = _block_scales(layer), partitioned_linear_fp8.BLOCK
    else:
        weights = [weight.t() for weight in weights]
        scales, block = [part.weight_scale for part in layer.parts], 0
    return weights, scales, [] if biases[0] is None else biases, kernel.config.out_dtype, block


def _block_scales(layer: nn.Module) -> list[torch.Tensor]:
    return [FP8BlockParams.from_layer(part).block_scale for part in layer.parts]


def _can_launch(kernel: Fp8BlockScaledMMLinearKernel, scales: list[torch.Tensor]) -> bool:
    """Return whether our kernel is on, and made for a layer's blocks and scales."""
    on = partitioned_linear.ENABLED and partitioned_linear_fp8.BLOCKS_ENABLED
    known = tuple(kernel.weight_group_shape) == (partitioned_linear_fp8.BLOCK,) * 2
    return on and known and all(scale.dtype == torch.float32 for scale in scales)


class InputRangeKernel(CutlassFP8ScaledMMLinearKernel):  # type: ignore[misc]
    """CUTLASS's stand-in where rows of the weight may be parts of longer ones.

    Per-tensor and per-channel scales.
    """

    def apply_scaled_mm(
        self,
        *,
        A: torch.Tensor,  # noqa: N803 - vLLM's names
        B: torch.Tensor,  # noqa: N803
        out_dtype: torch.dtype,
        As: torch.Tensor,  # noqa: N803
        Bs: torch.Tensor,  # noqa: N803
        bias: torch.Tensor | None,
        output_shape: list[int],
    ) -> torch.Tensor:
        """Return ``(As * A) @ (Bs * B) + bias``; ``A`` is ``[tokens, inputs]``."""
        if partitioned_linear.ENABLED:
            biases = [] if bias is None else [bias]
            output = partitioned_linear_fp8.linear(A, As, [B.t()], [Bs], biases, out_dtype)
        else:
            output = partitioned_linear_fp8.scaled_mm(A, As, B.t(), Bs, bias, out_dtype)
        return output.view(*output_shape)


class BlockInputRangeKernel(TritonFp8BlockScaledMMKernel):  # type: ignore[misc]
    """The same for block-wise scales; what our kernel does not know is vLLM's Triton kernel's."""

    def apply_block_scaled_mm(
        self,
        A: torch.Tensor,  # noqa: N803 - vLLM's names
        B: torch.Tensor,  # noqa: N803
        As: torch.Tensor,  # noqa: N803
        Bs: torch.Tensor,  # noqa: N803
    ) -> torch.Tensor:
        """Return ``(As * A) @ (Bs * B).T``; ``A`` is ``[tokens, inputs]``."""
        if not _can_launch(self, [As, Bs]):
            return super().apply_block_scaled_mm(A, B, As, Bs)
        dtype, block = self.config.out_dtype, partitioned_linear_fp8.BLOCK
        return partitioned_linear_fp8.linear(A, As, [B], [Bs], [], dtype, block)


_INPUT_RANGE_KERNELS: Mapping[type, type] = {
    CutlassFP8ScaledMMLinearKernel: InputRangeKernel,
    PerTensorTorchFP8ScaledMMLinearKernel: PerTensorTorchFP8ScaledMMLinearKernel,
    ChannelWiseTorchFP8ScaledMMLinearKernel: ChannelWiseTorchFP8ScaledMMLinearKernel,
    CutlassFp8BlockScaledMMKernel: BlockInputRangeKernel,
    DeepGemmFp8BlockScaledMMKernel: BlockInputRangeKernel,
    FlashInferFp8DeepGEMMDynamicBlockScaledKernel: BlockInputRangeKernel,
    BlockWiseTorchFP8ScaledMMLinearKernel: BlockInputRangeKernel,
    TritonFp8BlockScaledMMKernel: BlockInputRangeKernel,
}
"""vLLM's kernels that keep weights as loaded, and what multiplies ranges of inputs for each."""


def bind_kernels(layer: nn.Module) -> None:
    """Give an FP8 layer, whose tensors are views now, kernels that can read them.

    Args:
        layer: a layer of a TP layout with a ``ViewedFp8`` method; with ``parts`` if it is fused and
            they are apart.
    """
    if hasattr(layer, "parts"):
        _bind_parts(layer)
    elif isinstance(layer, RowParallelLinear):
        _bind_input_range(layer)
    else:
        _note_loaded(_owner(layer).fp8_linear, layer)


def _bind_parts(layer: nn.Module) -> None:
    kernel = _owner(layer).fp8_linear
    fits = len(layer.parts) <= partitioned_linear.MAX_RANGES and _in_one_launch(layer, kernel)
    layer.quant_method = (RowRangesFp8 if fits else SplitFp8)(layer.quant_method.method)
    for part in layer.parts:
        part.input_scale = getattr(part, "input_scale", None)
        if not fits:
            part.kernel = copy.copy(kernel)
            part.weight_block_size = layer.weight_block_size
            _note_loaded(part.kernel, part)


def _in_one_launch(layer: nn.Module, kernel: Any) -> bool:
    """Return whether our kernel can stand for vLLM's on a fused layer's parts."""
    if isinstance(kernel, Fp8BlockScaledMMLinearKernel):
        quantises: bool = _quantising(kernel).apply_input_quant
        return quantises and _can_launch(kernel, _block_scales(layer))
    return partitioned_linear.ENABLED and isinstance(kernel, CutlassFP8ScaledMMLinearKernel)


def _bind_input_range(layer: nn.Module) -> None:
    owner = _owner(layer)
    kernel = owner.fp8_linear
    replacement = _INPUT_RANGE_KERNELS[type(kernel)]
    if replacement is InputRangeKernel:
        owner.fp8_linear = InputRangeKernel(kernel.config, kernel.layer_param_names)
        _spread_scale(layer, kernel)
    elif replacement is not type(kernel):
        owner.fp8_linear = replacement(kernel.config)
        # DeepGEMM's are powers of two: all layouts round inputs alike.
        powers: bool = _quantising(kernel).quant_fp8.use_ue8m0
        owner.fp8_linear.quant_fp8.use_ue8m0 = powers
        # As vLLM's CUTLASS and cuBLAS want them; our kernel and vLLM's in Triton look at strides.
        owner.fp8_linear.quant_fp8.column_major_scales = True
        _pack_scale(layer)


def launches(layer: nn.Module) -> list[Launch]:
    """Return what ``partitioned_linear_fp8`` is given of a bound layer, besides activations.

    Nothing where vLLM's kernels do; twice with and without a bias, which only the first member of a
    group adds to a row-parallel layer.
    """
    if not partitioned_linear.ENABLED or not is_fp8(layer):
        return []
    kernel = _owner(layer).fp8_linear
    dtype, block = kernel.config.out_dtype, partitioned_linear_fp8.BLOCK
    if isinstance(layer.quant_method, RowRangesFp8):
        return [_launch(layer)]
    if isinstance(kernel, BlockInputRangeKernel):
        scale = FP8BlockParams.from_layer(layer).block_scale
        return [([layer.weight], [scale], [], dtype, block)] if _can_launch(kernel, [scale]) else []
    if isinstance(kernel, InputRangeKernel):
        biases = [[]] if layer.bias is None else [[], [layer.bias]]
        return [([layer.weight.t()], [layer.weight_scale], bias, dtype, 0) for bias in biases]
    return []


def warm_up(layer: nn.Module, seen: set[Any]) -> None:
    """Compile what a bound layer launches, unless a layer of its shape is among ``seen``."""
    for weights, scales, biases, dtype, block in launches(layer):
        shapes = [weight.shape for weight in weights]
        shape = (weights[0].dtype, *shapes, bool(biases), block)
        if shape not in seen:
            seen.add(shape)
            partitioned_linear_fp8.warm_up(weights, scales, biases, dtype, block)


def _note_loaded(kernel: Any, layer: nn.Module) -> None:
    """Note what a kernel's ``process_weights_after_loading`` does, besides changing weights."""
    kernel = _quantising(kernel)
    if isinstance(kernel, CutlassFP8ScaledMMLinearKernel):
        kernel.logical_output_size = layer.weight.shape[1]
    elif isinstance(kernel, DeepGemmFp8BlockScaledMMKernel):
        # Else vLLM compiles its kernels for the layout's shapes when a request first needs one.
        layer.deep_gemm_warmup_provider = kernel


def _spread_scale(layer: nn.Module, kernel: Any) -> None:
    """Repeat a per-tensor scale for every output where activations have scales by token.

    cuBLAS wants both or neither. These few bytes are the layout's own.
    """
    by_token = kernel.config.activation_quant_key.scale.group_shape.is_per_token()
    if by_token and layer.weight_scale.numel() == 1:
        spread = layer.weight_scale.data.reshape(1, 1).repeat(layer.weight.shape[1], 1)
        layer.weight_scale = Parameter(spread, requires_grad=False)


def _pack_scale(layer: nn.Module) -> None:
    """Copy a shard's scales of blocks, which are parts of longer rows: cuBLAS wants them packed.

    These few bytes, one for 4,096 of the shard's weights, are the layout's own, on every device.
    """
    name = FP8BlockParams.from_layer(layer).block_scale_attr
    packed = getattr(layer, name).data.contiguous()
    setattr(layer, name, Parameter(packed, requires_grad=False))


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
