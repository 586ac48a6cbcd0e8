"""GEMMs of PyTorch and vLLM over ranges of a weight's rows: what steps of many tokens take.

Each takes the input ``[tokens, depth]``, its scales or None, and the ``Ranges``, and returns
``[tokens, sum of rows]``. The list in ``linear_candidates`` says which weights each of them reads.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from shoal.runtime.engine.kernels.linear_tiles import BLOCK, BLOCK_INPUT_RANGE


class Ranges(NamedTuple):
    """Ranges of rows that are one layer; the fields are those of ``partitioned_linear.linear``."""

    weights: Sequence[torch.Tensor]
    biases: Sequence[torch.Tensor] = ()
    scales: Sequence[torch.Tensor] = ()
    dtype: torch.dtype | None = None
    block: int = 0


class Joined(NamedTuple):
    """A layer as one weight ``[rows, depth]``, with its scales and its bias."""

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None


def joined(ranges: Ranges) -> Joined:
    """Return FP8 ranges as one weight: several are copied into one.

    Two of QKV's three GEMMs are narrow. The three take longer than one wide GEMM, by more than it
    takes to read and write the weight once.
    """
    weights, biases, scales, _, block = ranges
    if len(weights) == 1:
        return Joined(weights[0], scales[0], biases[0] if biases else None)
    # Copied as bytes, which every version of PyTorch can do.
    weight = torch.cat([part.view(torch.uint8) for part in weights]).view(weights[0].dtype)
    scale = torch.cat(list(scales)) if block or scales[0].numel() > 1 else scales[0]
    return Joined(weight, scale, torch.cat(list(biases)) if biases else None)


# --- 16 bits --------------------------------------------------------------------------------------


def gemms(x: torch.Tensor, _: torch.Tensor | None, ranges: Ranges) -> torch.Tensor:
    """One GEMM for each range of a weight that is not quantised; see ``multiply_each``."""
    out = x.new_empty(x.shape[0], columns_of(ranges.weights))
    multiply_each(x, ranges.weights, ranges.biases, out)
    return out


def columns_of(weights: Sequence[torch.Tensor]) -> int:
    """Return how many outputs all ranges have; two ``paired`` ranges are one tensor."""
    columns = 0
    for weight in weights:
        columns += weight.shape[0] if weight.dim() == 2 else 2 * weight.shape[1]
    return columns


def multiply_each(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    out: torch.Tensor,
) -> None:
    """Write ``x @ cat(weights).T + cat(biases)`` to ``out``: GEMMs over the ranges, no copy.

    Args:
        x: ``[tokens, depth]``.
        weights: ranges of rows of one tensor, in its order, ``[rows, depth]`` each; those that are
            ``paired``, ``[2, rows, depth]``, are one batched GEMM.
        biases: the same ranges of one tensor ``[rows]``, or none.
        out: ``[tokens, sum of rows]``; a GEMM writes to a range of its columns, which are
            contiguous.
    """
    tokens, width, offset = out.shape[0], out.stride(0), out.storage_offset()
    begin = 0
    for index, weight in enumerate(weights):
        bias = biases[index] if biases else None
        rows = weight.shape[-2]
        if weight.dim() == 2:
            columns, weight = out[:, begin : begin + rows], weight.t()
            if bias is None:
                torch.mm(x, weight, out=columns)
            else:
                torch.addmm(bias, x, weight, out=columns)
            begin += rows
        else:
            columns = out.as_strided((2, tokens, rows), (rows, width, 1), offset + begin)
            both, weight = x.expand(2, -1, -1), weight.transpose(1, 2)
            if bias is None:
                torch.bmm(both, weight, out=columns)
            else:
                torch.baddbmm(bias.unsqueeze(1), both, weight, out=columns)
            begin += 2 * rows


# --- FP8 ----------------------------------------------------------------------------------------


def cutlass(x: torch.Tensor, x_scale: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    """vLLM's CUTLASS kernels, which take every weight for packed."""
    from vllm import _custom_ops

    weight, scale, bias = joined(ranges)
    inside = bias
    if ranges.block:
        # They expect the tokens' scales of one block side by side, and take no bias.
        x_scale, scale, inside = x_scale.t().contiguous().t(), scale.t(), None
    output: torch.Tensor = _custom_ops.cutlass_scaled_mm(
        x, weight.t(), scale_a=x_scale, scale_b=scale, out_dtype=ranges.dtype, bias=inside
    )
    return _added(output, bias) if ranges.block else output


def cutlass_has_blocks() -> bool:
    """Return whether vLLM has its CUTLASS kernel for blocks on this device."""
    try:
        from vllm.model_executor.layers.quantization.utils import w8a8_utils
    except ImportError:  # Benchmarks of kernels run without vLLM.
        return False
    there: bool = w8a8_utils.CUTLASS_BLOCK_FP8_SUPPORTED
    return there


def scaled_mm(x: torch.Tensor, x_scale: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    """``torch._scaled_mm`` without blocks; rows may be parts of longer ones.

    It needs a scale for every token and for every row, or one for all tokens and one for all rows.
    """
    weight, scale, bias = joined(ranges)
    tokens, rows = x.shape[0], weight.shape[0]
    if scale.numel() > 1 or x_scale.numel() > 1:
        if x_scale.numel() != tokens:
            x_scale = x_scale.reshape(1, 1).expand(tokens, 1).contiguous()
        if scale.numel() != rows:
            scale = scale.reshape(1, 1).expand(1, rows).contiguous()
        x_scale, scale = x_scale.reshape(-1, 1), scale.reshape(1, -1)
    else:
        x_scale, scale = x_scale.view(1), scale.view(1)
    # Accumulates fast on Hopper, as vLLM's CUTLASS kernels do.
    output: torch.Tensor = torch._scaled_mm(
        x,
        weight.t(),
        scale_a=x_scale,
        scale_b=scale,
        bias=bias,
        out_dtype=ranges.dtype,
        use_fast_accum=True,
    )
    return output


def cublas_blocks(x: torch.Tensor, x_scale: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    """``torch._scaled_mm`` with scales of blocks; our kernel for up to three last tokens.

    The tokens' scales of one block lie side by side, and cuBLAS needs them to begin at a multiple
    of 16 bytes.
    """
    from shoal.runtime.engine.kernels.partitioned_linear_kernel import Scales, multiply

    weight, scale, bias = joined(ranges)
    tokens, (rows, depth) = x.shape[0], weight.shape
    most = tokens - tokens % 4
    output = x.new_empty(tokens, rows, dtype=ranges.dtype)
    torch._scaled_mm(
        x[:most],
        weight.t(),
        scale_a=x_scale[:most].t().contiguous().t(),
        scale_b=scale.t(),
        out_dtype=ranges.dtype,
        out=output[:most],
    )
    if most < tokens:
        tile = next(best.tile for best in BLOCK_INPUT_RANGE if best.fits(rows, depth))
        multiply(x[most:], [weight], [], output[most:], tile, Scales(x_scale[most:], scale, BLOCK))
    return _added(output, bias)


@functools.cache
def cublas_has_blocks() -> bool:
    """Return whether ``torch._scaled_mm`` has scales of blocks: on Hopper, since CUDA 12.9."""
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    return version >= (12, 9) and torch.cuda.get_device_capability()[0] == 9


def triton_blocks(x: torch.Tensor, x_scale: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    """vLLM's Triton kernel for blocks, which looks at strides."""
    weight, scale, bias = joined(ranges)
    output: torch.Tensor = torch.ops.vllm.w8a8_triton_block_scaled_mm_func(
        x, weight, x_scale, scale, [BLOCK, BLOCK], ranges.dtype
    )
    return _added(output, bias)


def triton_forms(columns: int, depth: int, shortest: int) -> list[int]:
    """Return numbers of tokens, from the shortest, that need every form of vLLM's Triton kernel.

    It has a form for each configuration that vLLM has tuned for numbers of tokens near a given one;
    without these, it has one form. Each has another form for numbers that are no multiple of 16.
    """
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    configurations = fp8_utils.get_w8a8_block_fp8_configs(columns, depth, BLOCK, BLOCK) or {}
    counts = [shortest, *(near for near in configurations if near > shortest)]
    return [tokens + more for tokens in counts for more in (0, 1)]


def reference_blocks(x: torch.Tensor, x_scale: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    """The product in float32, for CPUs."""
    weight, scale, bias = joined(ranges)
    spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    product = (x.float() * x_scale.repeat_interleave(BLOCK, 1)) @ (weight.float() * spread).t()
    return _added(product.to(ranges.dtype), bias)


def _added(output: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return output if bias is None else output + bias
