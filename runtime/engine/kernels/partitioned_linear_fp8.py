"""One FP8 linear layer over ranges of a weight's rows: QKV and row-parallel layers of a TP layout.

What ``partitioned_linear`` is for 16-bit weights, with a scale by tensor or by token of the
activations and one by tensor or by output channel of the weight, or with scales of blocks of both.
QKV is three ranges of rows. A row-parallel layer is one range of rows that are parts of longer
ones, which vLLM's CUTLASS kernels cannot read: they take every weight for packed. A step of few
tokens is one launch of our kernel; a step of many is a GEMM, vLLM's where it reads the range, of
several ranges after a copy into one.

To ``torch.compile`` it is one opaque operator. The choice is made where it runs or is captured.
"""

import functools
import os
from collections.abc import Sequence
from typing import Any

import torch

torch.library.define(
    "shoal::row_ranges_fp8_linear",
    "(Tensor x, Tensor x_scale, Tensor[] weights, Tensor[] scales, Tensor[] biases,"
    " ScalarType dtype, int block) -> Tensor",
)

BLOCK = 128
"""Rows and inputs that share a scale where scales are those of blocks: what the kernel can."""

BLOCKS_ENABLED = os.environ.get("SHOAL_ROW_RANGES_BLOCKS", "1") != "0"
"""Whether layers with scales of blocks use the operator; else they use vLLM's Triton kernel."""


def linear(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weights: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    dtype: torch.dtype,
    block: int = 0,
) -> torch.Tensor:
    """Return ``(x_scale * x) @ cat(scales * weights).T + cat(biases)``, ``[tokens, sum of rows]``.

    Args:
        x: ``[tokens, depth]``, float8_e4m3fn.
        x_scale: float32, one for each token or one for all.
        weights: ``[rows, depth]`` each, float8_e4m3fn: at most ``partitioned_linear.MAX_RANGES``
            ranges of rows of one tensor, whose rows may be parts of longer ones.
        scales: the same ranges of one float32 tensor of a scale for each row; or for each range the
            scale of the whole weight.
        biases: the same ranges of one tensor ``[rows]`` of the output's type; empty without a bias.
        dtype: the output's type, bfloat16 or float16.
        block: ``BLOCK`` if ``x_scale`` is ``[tokens, depth / block]`` and each of ``scales``
            ``[rows / block, depth / block]``; else 0.
    """
    output: torch.Tensor = torch.ops.shoal.row_ranges_fp8_linear(
        x, x_scale, list(weights), list(scales), list(biases), dtype, block
    )
    return output


def warm_up(
    weights: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    dtype: torch.dtype,
    block: int = 0,
) -> None:
    """Compile every kernel that ``linear`` may choose for a CUDA layer, and allocate its counters.

    Neither may happen while a graph is captured or a request waits.
    """
    from shoal.runtime.engine.kernels.partitioned_linear_kernel import (
        arrival_counters,
        tiles_of,
        token_counts,
    )

    first = weights[0]
    arrival_counters(first.device)
    depth = first.shape[1]
    short = token_counts(tiles_of(first.dtype, block, len(weights)))
    for tokens in (*short, *_long_steps(weights, scales, dtype, block)):
        blocks = -(-depth // block) if block else 1
        # They lie as in a step: Triton compiles other forms for other strides.
        x_scale = torch.ones(blocks, tokens, dtype=torch.float32, device=first.device).t()
        x = torch.zeros(tokens, depth, dtype=first.dtype, device=first.device)
        linear(x, x_scale, weights, scales, biases, dtype, block)


def _long_steps(
    weights: Sequence[torch.Tensor], scales: Sequence[torch.Tensor], dtype: torch.dtype, block: int
) -> list[int]:
    """Return numbers of tokens that between them need every form of vLLM's Triton kernel.

    It has one for each configuration that vLLM has found for numbers of tokens near it, or one for
    all, and another where the number is no multiple of 16.
    """
    from shoal.runtime.engine.kernels.partitioned_linear_kernel import tiles_of, token_counts

    first = weights[0]
    if not block or len(weights) > 1:
        return []
    if _cutlass_reads(first) or _cublas_reads(first, scales[0], dtype):
        return []
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    shortest = max(token_counts(tiles_of(first.dtype, block, ranges=1))) + 16
    configurations = fp8_utils.get_w8a8_block_fp8_configs(*first.shape, block, block) or {}
    counts = [shortest, *(near for near in configurations if near > shortest)]
    return [tokens + more for tokens in counts for more in (0, 1)]


@torch.library.register_fake("shoal::row_ranges_fp8_linear")  # type: ignore[untyped-decorator]
def _empty(
    x: torch.Tensor,
    x_scale: torch.Tensor,  # noqa: ARG001 - the operator's signature
    weights: list[torch.Tensor],
    scales: list[torch.Tensor],  # noqa: ARG001
    biases: list[torch.Tensor],  # noqa: ARG001
    dtype: torch.dtype,
    block: int,  # noqa: ARG001
) -> torch.Tensor:
    return x.new_empty((x.shape[0], sum(weight.shape[0] for weight in weights)), dtype=dtype)


def on_gpu(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weights: list[torch.Tensor],
    scales: list[torch.Tensor],
    biases: list[torch.Tensor],
    dtype: torch.dtype,
    block: int,
) -> torch.Tensor:
    """Return what ``linear`` does, by our kernel or by a GEMM, as the number of tokens says."""
    from shoal.runtime.engine.kernels.partitioned_linear_kernel import (
        Scales,
        multiply,
        tile_for,
        tiles_of,
    )

    tokens, depth = x.shape
    columns = sum(weight.shape[0] for weight in weights)
    tile = tile_for(tiles_of(x.dtype, block, len(weights)), tokens, columns, depth)
    if tile is None or (block and _better_by_cublas(tokens, weights, scales, dtype)):
        return by_gemm(x, x_scale, weights, scales, biases, dtype, block)
    output = _empty(x, x_scale, weights, scales, biases, dtype, block)
    multiply(x, weights, biases, output, tile, Scales(x_scale, scales[0], block))
    return output


@torch.library.impl("shoal::row_ranges_fp8_linear", "cuda")  # type: ignore[untyped-decorator]
def _on_cuda(*given: Any) -> torch.Tensor:
    return on_gpu(*given)


def _better_by_cublas(
    tokens: int, weights: Sequence[torch.Tensor], scales: Sequence[torch.Tensor], dtype: torch.dtype
) -> bool:
    """Return whether cuBLAS is faster than our kernel with scales of blocks, and can be taken.

    From 33 tokens on, from 65 where a product is so narrow and deep that our kernel's splits of the
    depth pay: what ``linear_kernels`` says of an 8B and a 70B Llama on an H200. Of several ranges
    it is never, as they would have to be copied.
    """
    rows, depth = weights[0].shape
    most = 64 if rows <= 4096 and depth > 3072 else 32
    return len(weights) == 1 and tokens > most and _cublas_reads(weights[0], scales[0], dtype)


def by_gemm(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weights: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    dtype: torch.dtype,
    block: int = 0,
) -> torch.Tensor:
    """Return what ``linear`` returns, by one GEMM.

    Several ranges are copied into one weight before: of QKV's GEMMs two are narrow, and all three
    take longer than a wide one, by more than it takes to read and write the weight once.
    """
    weight, scale, bias = weights[0], scales[0], biases[0] if biases else None
    if len(weights) > 1:
        weight = joined(weights)
        bias = torch.cat(list(biases)) if biases else None
        scale = torch.cat(list(scales)) if scale.numel() > 1 or block else scale
    if block:
        output = _block_mm(x, x_scale, weight, scale, dtype)
        return output if bias is None else output + bias
    gemm = _cutlass_mm if x.is_cuda and weight.is_contiguous() else scaled_mm
    return gemm(x, x_scale, weight, scale, bias, dtype)


# As a decorator it would leave None in the function's place, which ``on_gpu`` calls.
torch.library.impl("shoal::row_ranges_fp8_linear", "cpu", by_gemm)


def joined(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a copy of FP8 weights ``[rows, depth]`` each as one, ``[sum of rows, depth]``."""
    # As bytes: those any PyTorch copies.
    return torch.cat([weight.view(torch.uint8) for weight in weights]).view(weights[0].dtype)


def _cutlass_mm(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    from vllm import _custom_ops

    output: torch.Tensor = _custom_ops.cutlass_scaled_mm(
        x, weight.t(), scale_a=x_scale, scale_b=scale, out_dtype=dtype, bias=bias
    )
    return output


def _block_mm(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    if _cutlass_reads(weight):
        # It takes every token's scale of one block to lie beside the next token's.
        by_block = x_scale.t().contiguous().t()
        return _cutlass_mm(x, by_block, weight, scale.t(), None, dtype)
    if _cublas_reads(weight, scale, dtype):
        return _cublas_mm(x, x_scale, weight, scale, dtype)
    if x.is_cuda:
        # vLLM's Triton kernel looks at strides.
        output: torch.Tensor = torch.ops.vllm.w8a8_triton_block_scaled_mm_func(
            x, weight, x_scale, scale, [BLOCK, BLOCK], dtype
        )
        return output
    spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    product = (x.float() * x_scale.repeat_interleave(BLOCK, 1)) @ (weight.float() * spread).t()
    return product.to(dtype)


def _cutlass_reads(weight: torch.Tensor) -> bool:
    """Return whether CUTLASS can take a weight with scales of blocks: it takes all for packed."""
    if not (weight.is_cuda and weight.is_contiguous()):
        return False
    from vllm.model_executor.layers.quantization.utils import w8a8_utils

    there: bool = w8a8_utils.CUTLASS_BLOCK_FP8_SUPPORTED
    return there


def _cublas_reads(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether cuBLAS can take a weight with scales of blocks: it looks at strides of rows.

    With outputs in bfloat16; others are not tried.

    It takes a row's scales for padded to a multiple of four, and reads those of other rows where
    they are not: PyTorch 2.11 lets it (pytorch/pytorch#166752).
    """
    if not weight.is_cuda or dtype is not torch.bfloat16 or weight.shape[0] % 16:
        return False
    return scale.is_contiguous() and scale.shape[1] % 4 == 0 and _cublas_has_blocks()


@functools.cache
def _cublas_has_blocks() -> bool:
    """Return whether ``torch._scaled_mm`` has scales of blocks: on Hopper, since CUDA 12.9."""
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    return version >= (12, 9) and torch.cuda.get_device_capability()[0] == 9


def _cublas_mm(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the product by ``torch._scaled_mm``, of up to three last tokens by our kernel.

    cuBLAS wants every block's scales of the tokens, which lie side by side, to begin at a multiple
    of 16 bytes.
    """
    from shoal.runtime.engine.kernels.partitioned_linear_kernel import (
        Scales,
        multiply,
        tile_for,
        tiles_of,
    )

    tokens, depth = x.shape
    most = tokens - tokens % 4
    output = x.new_empty(tokens, weight.shape[0], dtype=dtype)
    torch._scaled_mm(
        x[:most],
        weight.t(),
        scale_a=x_scale[:most].t().contiguous().t(),
        scale_b=scale.t(),
        out_dtype=dtype,
        out=output[:most],
    )
    if most < tokens:
        tile = tile_for(tiles_of(x.dtype, BLOCK, 1), tokens - most, weight.shape[0], depth)
        assert tile is not None
        given = Scales(x_scale[most:], scale, BLOCK)
        multiply(x[most:], [weight], [], output[most:], tile, given)
    return output


def scaled_mm(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return ``(x_scale * x) @ (scale * weight).T + bias`` by ``torch._scaled_mm``.

    Args:
        x: ``[tokens, depth]``.
        x_scale: one for each token, or one for all.
        weight: ``[rows, depth]``, rows contiguous; they may be parts of longer ones.
        scale: one for each row, or one for all. Both kinds are contiguous.
        bias: ``[rows]`` or none.
        dtype: the output's type.
    """
    tokens, rows = x.shape[0], weight.shape[0]
    if scale.numel() > 1 or x_scale.numel() > 1:  # by token and by row: one of each, all given
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
        out_dtype=dtype,
        use_fast_accum=True,
    )
    return output
