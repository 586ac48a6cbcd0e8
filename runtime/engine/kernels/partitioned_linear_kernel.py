"""Triton kernels behind ``partitioned_linear``: one launch over up to three ranges.

An output column is a weight row. Before the loop over the depth, a kernel finds it by comparing the
column with the sizes of the ranges. So ranges cost nothing, whatever their alignment. Rows that
are parts of longer rows cost nothing either: they only have another stride.

FP8 operands are multiplied directly. The scales of a token and of a row are factors of the whole
sum; the scales of a block are factors of that block's part of it.

Importing this module imports Triton, which only CUDA (or Triton's interpreter) has a use for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shoal.runtime.engine.kernels.linear_tiles import COUNTERS, Tile


@dataclass(frozen=True)
class Scales:
    """Scales of FP8 operands, float32, by which their product is multiplied.

    Attributes:
        x: one for each token, or one for all; with blocks ``[tokens, depth / block]``.
        weight: one for each row of the first range, and behind them in memory, as the rows lie,
            those of the other ranges; or one for all. With blocks
            ``[rows / block, depth / block]``.
        block: rows and elements of a row that share a scale. Every range begins at a multiple of
            it, and a tile must be as deep. 0: scales by row and token.
    """

    x: torch.Tensor
    weight: torch.Tensor
    block: int = 0

    def strides(self) -> tuple[int, int, int, int]:
        """Return the strides of tokens and rows, and of blocks along a token and along a row."""
        if self.block:
            (token, x_step), (row, step) = self.x.stride(), self.weight.stride()
            return token, row, x_step, step
        return int(self.x.numel() > 1), int(self.weight.numel() > 1), 0, 0


@triton.jit
def _rows_of(columns, total, size0, size1, distance1, distance2):  # type: ignore[no-untyped-def]
    """Return the weight row of each output column, counted from the first range's first row."""
    rows = tl.where(columns < size0, columns, columns - size0 + distance1)
    rows = tl.where(columns < size0 + size1, rows, columns - size0 - size1 + distance2)
    # Columns beyond the last are computed from some row and not stored.
    return tl.where(columns < total, rows, 0).to(tl.int64)


# Sizes and distances differ between layouts and members, so no kernel is compiled for their values.
# A scale for all has the stride 0.
_UNKNOWN = ["size0", "size1", "distance1", "distance2", "x_scale_stride", "scale_stride"]


@triton.jit(do_not_specialize=_UNKNOWN)  # type: ignore[untyped-decorator]
def _vector_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    bias_ptr,
    x_scale_ptr,
    scale_ptr,
    out_ptr,
    x_stride,
    weight_stride,
    total,
    size0,
    size1,
    distance1,
    distance2,
    x_scale_stride,
    scale_stride,
    full_depth: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_depth: tl.constexpr,
    has_bias: tl.constexpr,
    scaled: tl.constexpr,
):
    """Multiply token ``program_id(1)`` with a tile of rows: bound by reading the weight once."""
    token = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)
    rows = _rows_of(columns, total, size0, size1, distance1, distance2)
    depth = tl.arange(0, tile_depth)
    x_ptrs = x_ptr + token * x_stride + depth
    weight_ptrs = weight_ptr + rows[:, None] * weight_stride + depth[None, :]
    products = tl.zeros((tile_columns, tile_depth), dtype=tl.float32)
    # Unrolled: all reads of a program are in flight together.
    for start in tl.static_range(0, full_depth, tile_depth):
        if start + tile_depth <= full_depth:
            x = tl.load(x_ptrs + start)
            weight = tl.load(weight_ptrs + start)
        else:
            inside = depth < full_depth - start
            x = tl.load(x_ptrs + start, mask=inside, other=0.0)
            weight = tl.load(weight_ptrs + start, mask=inside[None, :], other=0.0)
        products += weight.to(tl.float32) * x.to(tl.float32)[None, :]
    result = tl.sum(products, axis=1)
    stored = columns < total
    if scaled:
        x_scale = tl.load(x_scale_ptr + token * x_scale_stride)
        result *= x_scale * tl.load(scale_ptr + rows * scale_stride)
    if has_bias:
        result += tl.load(bias_ptr + rows, mask=stored, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * total + columns, result.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit  # type: ignore[untyped-decorator]
def _added_up(  # type: ignore[no-untyped-def]
    result,
    partial_ptr,
    arrived_ptr,
    tile,
    split,
    tile_tokens: tl.constexpr,
    tile_columns: tl.constexpr,
    splits: tl.constexpr,
):
    """Return the sum of all splits' results, and whether this one is the last that arrived.

    Every split writes its sum; the last to arrive reads all, in their order, so that the result
    does not depend on who was last.
    """
    size: tl.constexpr = tile_tokens * tile_columns
    place = tl.arange(0, tile_tokens)[:, None] * tile_columns + tl.arange(0, tile_columns)
    partial_ptrs = partial_ptr + tile * (splits * size) + place
    tl.store(partial_ptrs + split * size, result)
    tl.debug_barrier()
    last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == splits - 1
    if last:
        result = tl.zeros((tile_tokens, tile_columns), dtype=tl.float32)
        for other in range(splits):
            result += tl.load(partial_ptrs + other * size, cache_modifier=".cg")
        tl.store(arrived_ptr + tile, 0)
    return result, last


@triton.jit(do_not_specialize=["tokens", *_UNKNOWN, "x_scale_step", "scale_step"])  # type: ignore[untyped-decorator]
def _matrix_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    bias_ptr,
    x_scale_ptr,
    scale_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    tokens,
    x_stride,
    weight_stride,
    total,
    size0,
    size1,
    distance1,
    distance2,
    x_scale_stride,
    scale_stride,
    x_scale_step,
    scale_step,
    full_depth: tl.constexpr,
    tile_tokens: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_depth: tl.constexpr,
    splits: tl.constexpr,
    rows_first: tl.constexpr,
    has_bias: tl.constexpr,
    scaled: tl.constexpr,
    block: tl.constexpr,
):
    """Multiply a tile of tokens with a tile of rows over one part of the depth."""
    # Neighbouring programs share the weight tile, so it comes from memory once.
    tiles = tl.cdiv(tokens, tile_tokens)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    token = (tile % tiles) * tile_tokens + tl.arange(0, tile_tokens)
    columns = (tile // tiles) * tile_columns + tl.arange(0, tile_columns)
    rows = _rows_of(columns, total, size0, size1, distance1, distance2)
    token_read = tl.where(token < tokens, token, 0).to(tl.int64)

    part: tl.constexpr = (
        (full_depth + splits * tile_depth - 1) // (splits * tile_depth) * tile_depth
    )
    depth = split * part + tl.arange(0, tile_depth)
    if rows_first:
        x_ptrs = x_ptr + token_read[None, :] * x_stride + depth[:, None]
        weight_ptrs = weight_ptr + rows[:, None] * weight_stride + depth[None, :]
        result = tl.zeros((tile_columns, tile_tokens), dtype=tl.float32)
    else:
        x_ptrs = x_ptr + token_read[:, None] * x_stride + depth[None, :]
        weight_ptrs = weight_ptr + rows[None, :] * weight_stride + depth[:, None]
        result = tl.zeros((tile_tokens, tile_columns), dtype=tl.float32)
    if block:
        tl.static_assert(tile_depth == block)
        first_block = split * (part // block)
        x_scale_ptrs = x_scale_ptr + token_read * x_scale_stride + first_block * x_scale_step
        scale_ptrs = scale_ptr + (rows // block) * scale_stride + first_block * scale_step
    for start in range(0, part, tile_depth):
        if part * splits == full_depth:
            x = tl.load(x_ptrs)
            weight = tl.load(weight_ptrs)
        else:
            inside = depth < full_depth - start
            along, across = inside[None, :], inside[:, None]
            x = tl.load(x_ptrs, mask=across if rows_first else along, other=0.0)
            weight = tl.load(weight_ptrs, mask=along if rows_first else across, other=0.0)
        if block:
            there = split * part + start < full_depth
            of_x = tl.load(x_scale_ptrs, mask=there, other=0.0)
            of_rows = tl.load(scale_ptrs, mask=there, other=0.0)
            if rows_first:
                result += tl.dot(weight, x) * (of_rows[:, None] * of_x[None, :])
            else:
                result += tl.dot(x, weight) * (of_x[:, None] * of_rows[None, :])
            x_scale_ptrs += x_scale_step
            scale_ptrs += scale_step
        else:
            result = tl.dot(weight, x, result) if rows_first else tl.dot(x, weight, result)
        x_ptrs += tile_depth
        weight_ptrs += tile_depth
    if rows_first:
        result = tl.trans(result)

    last = True
    if splits > 1:
        result, last = _added_up(
            result, partial_ptr, arrived_ptr, tile, split, tile_tokens, tile_columns, splits
        )
    if last:
        if scaled and not block:
            x_scale = tl.load(x_scale_ptr + token_read * x_scale_stride)
            result *= x_scale[:, None] * tl.load(scale_ptr + rows * scale_stride)[None, :]
        if has_bias:
            bias = tl.load(bias_ptr + rows, mask=columns < total, other=0.0)
            result += bias.to(tl.float32)[None, :]
        out_ptrs = out_ptr + token.to(tl.int64)[:, None] * total + columns[None, :]
        stored = (token < tokens)[:, None] & (columns < total)[None, :]
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=stored)


_counters: dict[torch.device, torch.Tensor] = {}


def arrival_counters(device: torch.device) -> torch.Tensor:
    """Return the device's counters of arrived splits: zero before and after every launch.

    Launches on one device must not overlap. The first call allocates: not during a capture.
    """
    if device not in _counters:
        _counters[device] = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
    return _counters[device]


def multiply(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    out: torch.Tensor,
    tile: Tile,
    scales: Scales | None = None,
) -> None:
    """Write ``x @ cat(weights).T + cat(biases)`` to ``out`` in one launch.

    Args:
        x: ``[tokens, depth]``, rows contiguous.
        weights: ``[rows, depth]`` each, rows contiguous: at most three ascending ranges of rows of
            one tensor.
        biases: the same ranges of one tensor ``[rows]``, or none.
        out: ``[tokens, sum of rows]``, contiguous.
        tile: what each program computes.
        scales: what the product is multiplied with before a bias is added.
    """
    tokens, depth = x.shape
    total = out.shape[1]
    first = weights[0]
    x_scale, scale = (scales.x, scales.weight) if scales else (first, first)
    operands = (x, first, biases[0] if biases else first, x_scale, scale, out)
    *strides, x_step, step = scales.strides() if scales else (0, 0, 0, 0)
    shape = (x.stride(0), first.stride(0), total, *_ranges(weights), *strides)
    constants = {
        "full_depth": depth,
        "tile_columns": tile.columns,
        "tile_depth": tile.depth,
        "has_bias": bool(biases),
        "scaled": scales is not None,
        "num_warps": tile.warps,
    }
    column_tiles = triton.cdiv(total, tile.columns)
    if tile.tokens == 1:
        _vector_kernel[(column_tiles, tokens)](*operands, *shape, **constants)
        return
    tiles = triton.cdiv(tokens, tile.tokens) * column_tiles
    partial, arrived = out, out
    if tile.splits > 1:
        elements = tiles * tile.splits * tile.tokens * tile.columns
        partial = torch.empty(elements, dtype=torch.float32, device=x.device)
        arrived = arrival_counters(x.device)
    _matrix_kernel[(tiles, tile.splits)](
        *operands,
        *(partial, arrived, tokens, *shape, x_step, step),
        tile_tokens=tile.tokens,
        splits=tile.splits,
        rows_first=tile.rows_first,
        block=scales.block if scales else 0,
        num_stages=tile.stages,
        **constants,
    )


def _ranges(weights: Sequence[torch.Tensor]) -> tuple[int, int, int, int]:
    """Return the sizes of the first two ranges, and how far the other two are from the first."""
    first = weights[0]
    sizes = [weight.shape[0] for weight in weights] + [0, 0]
    begins = [weight.storage_offset() - first.storage_offset() for weight in weights[1:]]
    distances = [begin // first.stride(0) for begin in begins] + [0, 0]
    return sizes[0], sizes[1], distances[0], distances[1]
