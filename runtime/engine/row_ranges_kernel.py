"""Triton kernels behind ``row_ranges``: one launch over up to three ranges of a weight's rows.

An output column is a weight row; which one is found by comparing the column with the sizes of the
ranges, before the loop over the depth. So the ranges cost nothing, whatever their alignment.

Importing this module imports Triton, which only CUDA (or Triton's interpreter) has a use for.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

COUNTERS = 8192
"""Most output tiles of a launch that splits the depth."""


@dataclass(frozen=True)
class Tile:
    """What one program of a launch computes.

    Attributes:
        tokens: rows of ``x``; 1 is the matrix-vector kernel, else a multiple of 16.
        columns: output columns, which are weight rows.
        depth: elements of a row that one turn of the loop reads.
        splits: programs that share the depth of one output tile; the last to arrive adds up.
        warps: warps of a program.
        stages: depth of the software pipeline; of no meaning to the matrix-vector kernel.
    """

    tokens: int
    columns: int
    depth: int
    splits: int = 1
    warps: int = 4
    stages: int = 4


TILES: tuple[tuple[int, int, Tile], ...] = (
    (1, 1 << 30, Tile(1, 1, 2048)),
    (8, 1 << 30, Tile(16, 64, 128, splits=4)),
    (16, 1 << 30, Tile(16, 32, 128, splits=4)),
    (32, 3072, Tile(32, 32, 128, splits=4)),
    (32, 1 << 30, Tile(32, 64, 128, splits=4, stages=3)),
    (64, 1536, Tile(64, 32, 128, splits=4)),
    (64, 3072, Tile(64, 64, 128, splits=2)),
    (64, 1 << 30, Tile(64, 64, 64, splits=2, stages=6)),
    (128, 3072, Tile(64, 64, 64, splits=2, stages=5)),
)
"""Most tokens, most output columns, and the tile for them; the first that fits is taken. Chosen by
``row_ranges_bench`` on an H200 for bf16 layers of an 8B and a 70B Llama in TP2, TP4 and TP8: up to
16 tokens at most what one GEMM over a copy takes, up to 64 at most 1.15 times that."""


def tile_for(tokens: int, columns: int, dtype: torch.dtype) -> Tile | None:
    """Return the tile for a step, or None where GEMMs over the ranges are as fast."""
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    fitting = (tile for most, widest, tile in TILES if tokens <= most and columns <= widest)
    return next(fitting, None)


def token_counts() -> list[int]:
    """Return numbers of tokens that between them need every tile of a layer."""
    return sorted({most for most, _, _ in TILES})


@triton.jit
def _rows_of(columns, total, size0, size1, distance1, distance2):  # type: ignore[no-untyped-def]
    """Return the weight row of each output column, counted from the first range's first row."""
    rows = tl.where(columns < size0, columns, columns - size0 + distance1)
    rows = tl.where(columns < size0 + size1, rows, columns - size0 - size1 + distance2)
    # Columns beyond the last are computed from some row and not stored.
    return tl.where(columns < total, rows, 0).to(tl.int64)


# Sizes and distances differ between layouts and members: nothing is compiled for their values.
_RANGES = ["size0", "size1", "distance1", "distance2"]


@triton.jit(do_not_specialize=_RANGES)  # type: ignore[untyped-decorator]
def _vector_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    weight_stride,
    total,
    size0,
    size1,
    distance1,
    distance2,
    full_depth: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_depth: tl.constexpr,
    has_bias: tl.constexpr,
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
    if has_bias:
        result += tl.load(bias_ptr + rows, mask=stored, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * total + columns, result.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["tokens", *_RANGES])  # type: ignore[untyped-decorator]
def _matrix_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    bias_ptr,
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
    full_depth: tl.constexpr,
    tile_tokens: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_depth: tl.constexpr,
    splits: tl.constexpr,
    has_bias: tl.constexpr,
):
    """Multiply a tile of tokens with a tile of rows over one part of the depth."""
    # Neighbours share the weight tile, which so comes from memory once.
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
    x_ptrs = x_ptr + token_read[:, None] * x_stride + depth[None, :]
    weight_ptrs = weight_ptr + rows[None, :] * weight_stride + depth[:, None]
    result = tl.zeros((tile_tokens, tile_columns), dtype=tl.float32)
    for start in range(0, part, tile_depth):
        if part * splits == full_depth:
            x = tl.load(x_ptrs)
            weight = tl.load(weight_ptrs)
        else:
            inside = depth < full_depth - start
            x = tl.load(x_ptrs, mask=inside[None, :], other=0.0)
            weight = tl.load(weight_ptrs, mask=inside[:, None], other=0.0)
        result = tl.dot(x, weight, result)
        x_ptrs += tile_depth
        weight_ptrs += tile_depth

    last = True
    if splits > 1:
        # Every split writes its sum; the last to arrive reads all, in their order, so that the
        # result does not depend on who was last.
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
    if last:
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
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    out: torch.Tensor,
    tile: Tile,
) -> None:
    """Write ``x @ cat(weights).T + cat(biases)`` to ``out`` in one launch.

    Args:
        x: ``[tokens, depth]``, rows contiguous.
        weights: ``[rows, depth]`` each, at most three ascending ranges of rows of one tensor.
        biases: the same ranges of one tensor ``[rows]``, or none.
        out: ``[tokens, sum of rows]``, contiguous.
        tile: what each program computes.
    """
    tokens, depth = x.shape
    total = out.shape[1]
    first = weights[0]
    bias = biases[0] if biases else first
    shape = (x.stride(0), first.stride(0), total, *_ranges(weights))
    column_tiles = triton.cdiv(total, tile.columns)
    if tile.tokens == 1:
        _vector_kernel[(column_tiles, tokens)](
            x,
            first,
            bias,
            out,
            *shape,
            full_depth=depth,
            tile_columns=tile.columns,
            tile_depth=tile.depth,
            has_bias=bool(biases),
            num_warps=tile.warps,
        )
        return
    tiles = triton.cdiv(tokens, tile.tokens) * column_tiles
    partial, arrived = out, out
    if tile.splits > 1:
        elements = tiles * tile.splits * tile.tokens * tile.columns
        partial = torch.empty(elements, dtype=torch.float32, device=x.device)
        arrived = arrival_counters(x.device)
    _matrix_kernel[(tiles, tile.splits)](
        x,
        first,
        bias,
        out,
        partial,
        arrived,
        tokens,
        *shape,
        full_depth=depth,
        tile_tokens=tile.tokens,
        tile_columns=tile.columns,
        tile_depth=tile.depth,
        splits=tile.splits,
        has_bias=bool(biases),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _ranges(weights: list[torch.Tensor]) -> tuple[int, int, int, int]:
    """Return the sizes of the first two ranges, and how far the other two are from the first."""
    first = weights[0]
    sizes = [weight.shape[0] for weight in weights] + [0, 0]
    begins = [weight.storage_offset() - first.storage_offset() for weight in weights[1:]]
    distances = [begin // first.stride(0) for begin in begins] + [0, 0]
    return sizes[0], sizes[1], distances[0], distances[1]
