"""Triton kernels behind ``partitioned_linear`` and its FP8: one launch over up to three ranges.

An output column is a weight row; which one is found by comparing the column with the sizes of the
ranges, before the loop over the depth. So the ranges cost nothing, whatever their alignment, nor do
rows that are parts of longer ones: they only have another stride.

FP8 operands are multiplied as they are. A token's scale and a row's are factors of the sum, those
of blocks of a block's part of it.

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
        tokens: rows of ``x``; 1 is the matrix-vector kernel, else a multiple of 16, or 8 with
            ``rows_first``.
        columns: output columns, which are weight rows.
        depth: elements of a row that one turn of the loop reads.
        splits: programs that share the depth of one output tile; the last to arrive adds up.
        warps: warps of a program.
        stages: depth of the software pipeline; of no meaning to the matrix-vector kernel.
        rows_first: the weight is the product's left operand. Hopper's tensor cores take FP8 as it
            is in products of 64 left rows or more alone, which a step of few tokens has not.
    """

    tokens: int
    columns: int
    depth: int
    splits: int = 1
    warps: int = 4
    stages: int = 4
    rows_first: bool = False


@dataclass(frozen=True)
class Scales:
    """Scales of FP8 operands, float32: what a product of them is to be multiplied with.

    Attributes:
        x: one for each token, or one for all; of blocks ``[tokens, depth / block]``.
        weight: one for each row of the first range, followed in memory as that range's rows are; or
            one for all; of blocks ``[rows / block, depth / block]``.
        block: rows and elements of a row that share a scale, a multiple of which every range begins
            with; a tile must be as deep. 0: scales by row and token.
    """

    x: torch.Tensor
    weight: torch.Tensor
    block: int = 0

    def strides(self) -> tuple[int, int, int, int]:
        """Return how far tokens, rows, and along the depth a token's and a row's blocks are."""
        if self.block:
            (token, x_step), (row, step) = self.x.stride(), self.weight.stride()
            return token, row, x_step, step
        return int(self.x.numel() > 1), int(self.weight.numel() > 1), 0, 0


ANY = 1 << 30
Table = tuple[tuple[int, int, int, Tile], ...]
"""Most tokens, output columns and depth, and the tile for them; the first that fits is taken."""

TILES: Table = (
    (1, ANY, ANY, Tile(1, 1, 2048)),
    (8, ANY, ANY, Tile(16, 64, 128, splits=4)),
    (16, ANY, ANY, Tile(16, 32, 128, splits=4)),
    (32, 3072, ANY, Tile(32, 32, 128, splits=4)),
    (32, ANY, ANY, Tile(32, 64, 128, splits=4, stages=3)),
    (64, 1536, ANY, Tile(64, 32, 128, splits=4)),
    (64, 3072, ANY, Tile(64, 64, 128, splits=2)),
    (64, ANY, ANY, Tile(64, 64, 64, splits=2, stages=6)),
    (128, 3072, ANY, Tile(64, 64, 64, splits=2, stages=5)),
)
"""QKV in 16 bits. Chosen by ``linear_kernels`` on an H200, as all of these tables, for an 8B and
a 70B Llama in TP2, TP4 and TP8: up to 16 tokens at most what one GEMM over a copy takes, up to 64
at most 1.15 times that."""

_FP8_TILES: Table = (
    (8, ANY, ANY, Tile(8, 64, 128, splits=4, stages=6, rows_first=True)),
    (16, ANY, ANY, Tile(16, 64, 256, splits=2, rows_first=True)),
    (32, ANY, ANY, Tile(32, 64, 256, splits=2, rows_first=True)),
)

FP8_QKV_TILES: Table = (
    (1, 3072, ANY, Tile(1, 2, 4096)),
    (1, ANY, ANY, Tile(1, 2, 2048)),
    *_FP8_TILES,
    (64, ANY, ANY, Tile(64, 64, 128, splits=2, stages=6, rows_first=True)),
    (128, ANY, ANY, Tile(128, 64, 128, stages=5)),
)
"""QKV in FP8 with scales of tokens and rows. With 1 and 64 tokens, in all six, at most 1.24 times
what the best tile tried takes, otherwise (TP2 and TP4) 1.13."""

FP8_INPUT_RANGE_TILES: Table = (
    (1, 4096, ANY, Tile(1, 8, 512)),
    (1, ANY, 1024, Tile(1, 8, 512)),
    (1, ANY, 4096, Tile(1, 8, 1024)),
    (1, ANY, ANY, Tile(1, 2, 2048)),
    *_FP8_TILES,
    (64, 4096, 4096, Tile(64, 64, 128, stages=6, rows_first=True)),
    (64, 4096, ANY, Tile(64, 64, 128, splits=2, stages=6, rows_first=True)),
    (64, ANY, ANY, Tile(64, 64, 128, stages=6, rows_first=True)),
    (128, ANY, ANY, Tile(128, 64, 128, stages=5)),
)
"""Row-parallel layers, the same way: 1.10 with 1 and 64 tokens, otherwise 1.13."""

BLOCK_QKV_TILES: Table = (
    (8, ANY, ANY, Tile(8, 64, 128, splits=8, rows_first=True)),
    (16, ANY, ANY, Tile(16, 64, 128, splits=8, rows_first=True)),
    (32, ANY, ANY, Tile(32, 64, 128, splits=4, stages=5, rows_first=True)),
    (64, ANY, ANY, Tile(64, 64, 128, splits=4, rows_first=True)),
    (128, 3072, ANY, Tile(64, 64, 128, splits=2, stages=5, rows_first=True)),
    (128, ANY, ANY, Tile(128, 64, 128, splits=2)),
)
"""QKV in FP8 with scales of blocks of 128: the best tile tried in all six, or within 1 % of it; at
most 0.84 times what a copy and ``torch._scaled_mm`` take."""

BLOCK_INPUT_RANGE_TILES: Table = (
    (16, ANY, 1024, Tile(16, 64, 128, stages=6, rows_first=True)),
    (8, ANY, ANY, Tile(8, 64, 128, splits=4, stages=6, rows_first=True)),
    (16, 4096, 3072, Tile(16, 64, 128, splits=2, stages=6, rows_first=True)),
    (16, 4096, ANY, Tile(16, 64, 128, splits=4, stages=6, rows_first=True)),
    (16, ANY, ANY, Tile(16, 64, 128, splits=2, stages=6, rows_first=True)),
    (32, 4096, 3072, Tile(32, 64, 128, splits=2, stages=5, rows_first=True)),
    (32, 4096, ANY, Tile(32, 64, 128, splits=4, stages=5, rows_first=True)),
    (32, ANY, ANY, Tile(32, 64, 128, splits=2, stages=5, rows_first=True)),
    (64, 4096, 3072, Tile(64, 64, 128, splits=2, stages=5, rows_first=True)),
    (64, 4096, ANY, Tile(64, 64, 128, splits=4, rows_first=True)),
    (64, ANY, ANY, Tile(64, 64, 128, splits=2, stages=5)),
    (128, 4096, ANY, Tile(64, 64, 128, splits=2, stages=5, rows_first=True)),
    (128, ANY, ANY, Tile(128, 64, 128, splits=2)),
)
"""Row-parallel layers, the same way: at most 1.09 times what the best tile tried takes."""

_TABLES = {
    (torch.bfloat16, 0): (TILES, TILES),
    (torch.float16, 0): (TILES, TILES),
    (torch.float8_e4m3fn, 0): (FP8_INPUT_RANGE_TILES, FP8_QKV_TILES),
    (torch.float8_e4m3fn, 128): (BLOCK_INPUT_RANGE_TILES, BLOCK_QKV_TILES),
}
"""By type and size of scales' blocks: the table of one range, and that of several."""


def tiles_of(dtype: torch.dtype, block: int = 0, ranges: int = 3) -> Table:
    """Return the table for so many ranges of a type, with scales of blocks of a size."""
    one, several = _TABLES.get((dtype, block), ((), ()))
    return several if ranges > 1 else one


def tile_for(table: Table, tokens: int, columns: int, depth: int) -> Tile | None:
    """Return the tile for a step, or None where GEMMs over the ranges are as fast."""
    fitting = (
        tile
        for most, widest, deepest, tile in table
        if tokens <= most and columns <= widest and depth <= deepest
    )
    return next(fitting, None)


def token_counts(table: Table) -> list[int]:
    """Return numbers of tokens that between them need every tile of a layer."""
    return sorted({most for most, *_ in table})


@triton.jit
def _rows_of(columns, total, size0, size1, distance1, distance2):  # type: ignore[no-untyped-def]
    """Return the weight row of each output column, counted from the first range's first row."""
    rows = tl.where(columns < size0, columns, columns - size0 + distance1)
    rows = tl.where(columns < size0 + size1, rows, columns - size0 - size1 + distance2)
    # Columns beyond the last are computed from some row and not stored.
    return tl.where(columns < total, rows, 0).to(tl.int64)


# Sizes and distances differ between layouts and members: nothing is compiled for their values. A
# scale for all has the stride 0.
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
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
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
    bias = biases[0] if biases else first
    x_scale, scale = (scales.x, scales.weight) if scales else (first, first)
    *strides, x_step, step = scales.strides() if scales else (0, 0, 0, 0)
    shape = (x.stride(0), first.stride(0), total, *_ranges(weights), *strides)
    column_tiles = triton.cdiv(total, tile.columns)
    if tile.tokens == 1:
        _vector_kernel[(column_tiles, tokens)](
            x,
            first,
            bias,
            x_scale,
            scale,
            out,
            *shape,
            full_depth=depth,
            tile_columns=tile.columns,
            tile_depth=tile.depth,
            has_bias=bool(biases),
            scaled=scales is not None,
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
        x_scale,
        scale,
        out,
        partial,
        arrived,
        tokens,
        *shape,
        x_step,
        step,
        full_depth=depth,
        tile_tokens=tile.tokens,
        tile_columns=tile.columns,
        tile_depth=tile.depth,
        splits=tile.splits,
        rows_first=tile.rows_first,
        has_bias=bool(biases),
        scaled=scales is not None,
        block=scales.block if scales else 0,
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
