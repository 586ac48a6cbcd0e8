"""How a layout computes FP8 layers whose tensors are views: vLLM's methods, given other kernels.

- A range of outputs is a packed matrix of its own: vLLM's kernel multiplies the view.
- A range of inputs is not packed. vLLM's CUTLASS kernels assume that it is, without looking at its
  strides, and would read other members' inputs, with no error.
- QKV is one layer over three ranges of outputs.

``partitioned_linear`` computes the last two where it can replace vLLM's kernel: CUTLASS with scales
by tensor or by channel, and, with scales of blocks that it knows, all kernels that keep weights as
loaded. Otherwise one of vLLM's kernels multiplies that looks at strides.
"""

import copy
from collections.abc import Mapping, Sequence
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

from shoal.runtime.engine.kernels import partitioned_linear
from shoal.runtime.engine.kernels.library_gemms import Ranges
from shoal.runtime.engine.kernels.linear_tiles import BLOCK, MAX_RANGES

INPUT_RANGE_KERNELS: Mapping[type, type] = {
    CutlassFP8ScaledMMLinearKernel: CutlassFP8ScaledMMLinearKernel,
    PerTensorTorchFP8ScaledMMLinearKernel: PerTensorTorchFP8ScaledMMLinearKernel,
    ChannelWiseTorchFP8ScaledMMLinearKernel: ChannelWiseTorchFP8ScaledMMLinearKernel,
    CutlassFp8BlockScaledMMKernel: TritonFp8BlockScaledMMKernel,
    DeepGemmFp8BlockScaledMMKernel: TritonFp8BlockScaledMMKernel,
    FlashInferFp8DeepGEMMDynamicBlockScaledKernel: TritonFp8BlockScaledMMKernel,
    BlockWiseTorchFP8ScaledMMLinearKernel: TritonFp8BlockScaledMMKernel,
    TritonFp8BlockScaledMMKernel: TritonFp8BlockScaledMMKernel,
}
"""vLLM's kernels that keep weights as loaded, and for each the kernel of a range of inputs.

The latter quantises the inputs, and multiplies unless our operator replaces it.
"""


# --- methods --------------------------------------------------------------------------------------


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
    """A fused layer as one of vLLM's layers for each of ``layer.parts``."""

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the parts' outputs side by side: ``[tokens, sum of this rank's part sizes]``."""
        outputs = [part.kernel.apply_weights(part, x, part.bias) for part in layer.parts]
        return torch.cat(outputs, dim=-1)


class PartitionedFp8(ViewedFp8):
    """Our operator: over ``layer.parts`` of a fused layer, or over a row-parallel layer."""

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the output, ``[tokens, outputs of this rank]``, of an input quantised once."""
        data, scale, shape = quantised_input(layer, x)
        output = partitioned_linear.linear(data, *_ranges(layer, bias), x_scale=scale)
        return output.view(*shape[:-1], output.shape[-1])


def fp8_owner(layer: nn.Module) -> Any:
    """Return what holds a layer's ``fp8_linear``: vLLM's method, or compressed-tensors' scheme."""
    method = layer.quant_method
    method = method.method if isinstance(method, ViewedFp8) else method
    return layer.scheme if isinstance(method, CompressedTensorsLinearMethod) else method


def quantising_kernel(kernel: Any) -> Any:
    """Return the kernel that quantises inputs apart from the product, as our kernels need them.

    vLLM's kernel may pick one of two by the number of tokens and leave quantisation to these
    (``FlashInferFp8DeepGEMMDynamicBlockScaledKernel``). Then it is the one for many tokens.
    """
    return getattr(kernel, "fallback", kernel)


def _parts(layer: nn.Module) -> Sequence[nn.Module]:
    return layer.parts if hasattr(layer, "parts") else [layer]


def quantised_input(layer: nn.Module, x: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Size]:
    """Return an input in FP8, ``[tokens, inputs]``, its scales and its shape.

    Does as ``apply_weights`` of ``FP8ScaledMMLinearKernel`` and ``Fp8BlockScaledMMLinearKernel``.
    """
    kernel = quantising_kernel(fp8_owner(layer).fp8_linear)
    if isinstance(kernel, Fp8BlockScaledMMLinearKernel):
        data = x.view(-1, x.shape[-1])
        return *kernel.quant_fp8(data, None, None, use_triton=kernel.use_triton), x.shape
    prepared = as_quantized_activation(x, kernel.input_quant_key())
    if prepared is not None:
        data = prepared.data.view(-1, prepared.data.shape[-1])
        return data, prepared.scale, prepared.orig_shape
    scale = _parts(layer)[0].input_scale
    return *kernel.quant_fp8(x.view(-1, x.shape[-1]), scale, None), x.shape


def multiply(
    part: nn.Module,
    data: torch.Tensor,
    scale: torch.Tensor,
    shape: torch.Size,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what vLLM's kernel makes of inputs that are quantised: ``[..., outputs of the part]``.

    Args:
        part: has tensors as a processed layer has them, packed, and its ``piece_kernel``.
        data: FP8, ``[tokens, inputs of the part]``, packed.
        scale: of the inputs.
        shape: of the inputs before they were quantised; all but the last dimension counts.
        bias: is added to the outputs.
    """
    kernel, out_dtype = part.kernel, part.kernel.config.out_dtype
    if isinstance(kernel, Fp8BlockScaledMMLinearKernel):
        block_scale = FP8BlockParams.from_layer(part).block_scale
        output = kernel.apply_block_scaled_mm(A=data, B=part.weight, As=scale, Bs=block_scale)
        output = output if bias is None else output + bias
        return output.to(out_dtype).view(*shape[:-1], output.shape[-1])
    output_shape = [*shape[:-1], part.weight.shape[1]]
    return kernel.apply_scaled_mm(
        A=data,
        B=part.weight,
        out_dtype=out_dtype,
        As=scale,
        Bs=part.weight_scale,
        bias=bias,
        output_shape=output_shape,
    )


def piece_kernel(kernel: Any, part: nn.Module) -> Any:
    """Return a kernel for a part of the layer that vLLM has chosen ``kernel`` for."""
    own = copy.copy(quantising_kernel(kernel))
    _note_loaded(own, part)
    return own


def _ranges(layer: nn.Module, bias: torch.Tensor | None) -> Ranges:
    """Return a layer's ranges. Parts have biases of their own; a row-parallel layer is given one.

    Only the first member of a group adds the bias that is given.
    """
    kernel, parts = fp8_owner(layer).fp8_linear, _parts(layer)
    biases = [part.bias for part in parts] if hasattr(layer, "parts") else [bias]
    present = [] if biases[0] is None else biases
    if isinstance(kernel, Fp8BlockScaledMMLinearKernel):
        weights, block = [part.weight for part in parts], BLOCK
    else:
        weights, block = [part.weight.t() for part in parts], 0
    return Ranges(weights, present, _scales(kernel, parts), kernel.config.out_dtype, block)


def _scales(kernel: Any, parts: Sequence[nn.Module]) -> list[torch.Tensor]:
    if isinstance(kernel, Fp8BlockScaledMMLinearKernel):
        return [FP8BlockParams.from_layer(part).block_scale for part in parts]
    return [part.weight_scale for part in parts]


# --- a layer's method ----------------------------------------------------------------------------


def bind_kernels(layer: nn.Module) -> None:
    """Give an FP8 layer, whose tensors are views now, a method and a kernel that can read them.

    Args:
        layer: a layer of a TP layout with a ``ViewedFp8`` method; it has ``parts`` if it is fused
            and its ranges are apart.
    """
    fused = hasattr(layer, "parts")
    if not fused and not isinstance(layer, RowParallelLinear):
        _note_loaded(fp8_owner(layer).fp8_linear, layer)
        return
    for part in _parts(layer):
        part.input_scale = getattr(part, "input_scale", None)
    if not fused:
        _bind_input_range(layer)
    if _in_one_launch(layer):
        layer.quant_method = PartitionedFp8(layer.quant_method.method)
    elif fused:
        _split(layer)


def _in_one_launch(layer: nn.Module) -> bool:
    """Return whether our operator can stand in for vLLM's kernel."""
    kernel, parts = fp8_owner(layer).fp8_linear, _parts(layer)
    if len(parts) > MAX_RANGES:
        return False
    if isinstance(kernel, Fp8BlockScaledMMLinearKernel):
        known = tuple(kernel.weight_group_shape) == (BLOCK, BLOCK)
        exact = all(scale.dtype == torch.float32 for scale in _scales(kernel, parts))
        return known and exact and quantising_kernel(kernel).apply_input_quant
    return isinstance(kernel, CutlassFP8ScaledMMLinearKernel)


def _split(layer: nn.Module) -> None:
    layer.quant_method = SplitFp8(layer.quant_method.method)
    for part in layer.parts:
        part.kernel = copy.copy(fp8_owner(layer).fp8_linear)
        part.weight_block_size = layer.weight_block_size
        _note_loaded(part.kernel, part)


def _bind_input_range(layer: nn.Module) -> None:
    """Let a row-parallel layer be read as rows that are parts of longer ones."""
    owner = fp8_owner(layer)
    kernel = owner.fp8_linear
    replacement = INPUT_RANGE_KERNELS[type(kernel)]
    if isinstance(kernel, CutlassFP8ScaledMMLinearKernel):
        _spread_scale(layer, kernel)
    elif issubclass(replacement, TritonFp8BlockScaledMMKernel):
        owner.fp8_linear = replacement(kernel.config)
        # DeepGEMM's scales are powers of two: all layouts must round inputs alike.
        powers: bool = quantising_kernel(kernel).quant_fp8.use_ue8m0
        owner.fp8_linear.quant_fp8.use_ue8m0 = powers
        # As vLLM's CUTLASS and cuBLAS need them; our kernel and vLLM's in Triton look at strides.
        owner.fp8_linear.quant_fp8.column_major_scales = True
        _pack_scale(layer)


def _spread_scale(layer: nn.Module, kernel: Any) -> None:
    """Repeat a per-tensor scale for every output where activations have scales by token.

    cuBLAS needs both by token and output, or neither. These few bytes are the layout's own.
    """
    by_token = kernel.config.activation_quant_key.scale.group_shape.is_per_token()
    if by_token and layer.weight_scale.numel() == 1:
        spread = layer.weight_scale.data.reshape(1, 1).repeat(layer.weight.shape[1], 1)
        layer.weight_scale = Parameter(spread, requires_grad=False)


def _pack_scale(layer: nn.Module) -> None:
    """Copy a shard's scales of blocks, which are parts of longer rows: cuBLAS needs them packed.

    These few bytes, one for 4,096 of the shard's weights, are the layout's own, on every device.
    """
    name = FP8BlockParams.from_layer(layer).block_scale_attr
    packed = getattr(layer, name).data.contiguous()
    setattr(layer, name, Parameter(packed, requires_grad=False))


def _note_loaded(kernel: Any, layer: nn.Module) -> None:
    """Note what a kernel's ``process_weights_after_loading`` notes, besides changing weights."""
    kernel = quantising_kernel(kernel)
    if isinstance(kernel, CutlassFP8ScaledMMLinearKernel):
        kernel.logical_output_size = layer.weight.shape[1]
    elif isinstance(kernel, DeepGemmFp8BlockScaledMMKernel):
        # Otherwise vLLM would compile its kernels for these shapes when a request first needs one.
        layer.deep_gemm_warmup_provider = kernel


def warm_up(layer: nn.Module, seen: set[Any]) -> None:
    """Compile what our operator launches for a bound layer, unless ``seen`` has one of its shape.

    Does so without and with the bias of a row-parallel layer, which only the first member adds.
    """
    if not isinstance(layer.quant_method, PartitionedFp8):
        return
    biases = [None] if hasattr(layer, "parts") or layer.bias is None else [None, layer.bias]
    for bias in biases:
        ranges = _ranges(layer, bias)
        sizes = [weight.shape for weight in ranges.weights]
        shape = (ranges.weights[0].dtype, *sizes, bool(ranges.biases), ranges.block)
        if shape not in seen:
            seen.add(shape)
            partitioned_linear.warm_up(*ranges)
