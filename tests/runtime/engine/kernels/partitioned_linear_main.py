"""The kernels of ``partitioned_linear`` in Triton's interpreter, with which it must be imported.

Run as ``python -m tests.runtime.engine.kernels.partitioned_linear_main``. Writes to standard
output, as JSON, for each kind of cases how far each case is off, and whether the counters of
arrived splits are zero again.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from shoal.runtime.engine.kernels import partitioned_linear
from shoal.runtime.engine.kernels.library_gemms import Ranges
from shoal.runtime.engine.kernels.linear_candidates import Format, format_of
from shoal.runtime.engine.kernels.linear_tiles import BLOCK, Tile
from shoal.runtime.engine.kernels.partitioned_linear_kernel import (
    Scales,
    arrival_counters,
    multiply,
)
from tests.runtime.engine import quick_interpreter

TILES = (
    Tile(1, 4, 128),
    Tile(1, 16, 64),
    Tile(16, 16, 64),
    Tile(16, 32, 128, splits=2),
    Tile(32, 16, 64, splits=4),
)
FP8_TILES = (
    Tile(1, 4, 128),
    Tile(16, 32, 128, splits=2),
    Tile(8, 16, 64, splits=4, rows_first=True),
    Tile(16, 64, 128, rows_first=True),
)
BLOCK_TILES = (
    Tile(16, 32, BLOCK, splits=2),
    Tile(8, 64, BLOCK, rows_first=True),
    Tile(16, 64, BLOCK, splits=4, rows_first=True),
)
RANGES = {
    "apart": (slice(16, 56), slice(100, 120), slice(171, 190)),
    "side by side": (slice(0, 40), slice(40, 60), slice(60, 80)),
    "two": (slice(8, 40), slice(90, 122)),
    "one": (slice(30, 95),),
}
"""Also of sizes that no tile divides, and where a tile spans two ranges."""
DEPTHS = (128, 200)
"""One that the tiles divide, and one that they do not."""


def wide(draw: torch.Generator) -> Iterator[dict[str, Any]]:
    """Yield cases in float32: every tile on every ranges, of either depth in turn."""
    ranges_of_rows = [item for item in RANGES.items() if item[0] != "one"]
    pairs = itertools.product(TILES, ranges_of_rows)
    for (tile, (name, ranges)), depth in zip(pairs, itertools.cycle(DEPTHS), strict=False):
        weight = torch.randn(200, depth, generator=draw)
        bias = torch.randn(200, generator=draw)
        # A tile of one token does the same for each: many would only take long.
        many = ((5, True), (18, False)) if tile.tokens > 1 else ((3, True), (2, False))
        for tokens, has_bias in ((1, False), *many):
            x = torch.randn(tokens, depth, generator=draw)
            weights = [weight[rows] for rows in ranges]
            biases = [bias[rows] for rows in ranges] if has_bias else []
            expected = x @ torch.cat(weights).T + (torch.cat(biases) if has_bias else 0)
            out = torch.full_like(expected, float("nan"))
            multiply(x, weights, biases, out, tile)
            yield {
                "case": f"{asdict(tile)}, {name}, depth {depth}, {tokens} tokens",
                "error": (out - expected).abs().max().item(),
                "counters": arrival_counters(x.device).abs().sum().item(),
            }


def on_gpu(ranges: Ranges) -> Format:
    return format_of(ranges)._replace(on_gpu=True)


def operator(draw: torch.Generator) -> Iterator[dict[str, Any]]:
    """Yield cases of the operator as a GPU's, tiles and GEMMs; the interpreter has no bf16."""
    partitioned_linear.format_of = on_gpu
    weight = torch.randn(200, 256, generator=draw).to(torch.float16)
    bias = torch.randn(200, generator=draw).to(torch.float16)
    ranges = (slice(16, 56), slice(100, 120), slice(170, 190))
    for tokens, has_bias in itertools.product((1, 5, 33, 129), (False, True)):
        x = torch.randn(tokens, 256, generator=draw).to(torch.float16)
        weights = [weight[rows] for rows in ranges]
        biases = [bias[rows] for rows in ranges] if has_bias else []
        expected = x.float() @ torch.cat(weights).float().T
        expected += torch.cat(biases).float() if has_bias else 0
        pairs = [partitioned_linear.paired(ranges) for ranges in (weights, biases)]
        out = partitioned_linear.linear(x, *pairs)
        yield {
            "case": f"{tokens} tokens, {has_bias=}",
            "error": (out - expected).abs().max().item() / expected.abs().max().item(),
            "counters": arrival_counters(x.device).abs().sum().item(),
        }


def fp8(draw: torch.Generator) -> Iterator[dict[str, Any]]:
    """Yield cases in FP8 whose rows are parts of longer ones; and how far off without scales."""
    scales = itertools.cycle(itertools.product((False, True), repeat=2))
    for tile, (name, ranges), depth in itertools.product(FP8_TILES, RANGES.items(), DEPTHS):
        by_token, by_row = next(scales)
        tokens, has_bias = (3 if tile.tokens == 1 else 18), name in ("two", "apart")
        weight = torch.randn(200, 300, generator=draw).to(torch.float8_e4m3fn)[:, 70 : 70 + depth]
        bias = torch.randn(200, generator=draw)
        scale = torch.rand(200, 1, generator=draw) + 1.5 if by_row else torch.tensor(2.5)
        x = torch.randn(tokens, depth, generator=draw).to(torch.float8_e4m3fn)
        x_scale = torch.rand(tokens, 1, generator=draw) + 1.5 if by_token else torch.tensor([1.5])
        of_rows = [scale[rows] if by_row else scale for rows in ranges]
        biases = [bias[rows] for rows in ranges] if has_bias else []
        weights = [weight[rows] for rows in ranges]
        product = x.float() @ torch.cat([part.float() for part in weights]).T
        scaled = product * x_scale * (torch.cat(of_rows).T if by_row else scale)
        expected = scaled + (torch.cat(biases) if has_bias else 0)
        out = torch.full_like(expected, float("nan"))
        multiply(x, weights, biases, out, tile, Scales(x_scale, of_rows[0]))
        yield {
            "case": f"{asdict(tile)}, {name}, depth {depth}, {by_token=}, {by_row=}",
            "scales": (by_token, by_row),
            "error": (out - expected).abs().max().item(),
            "unscaled": (out - product).abs().max().item(),
            "counters": arrival_counters(x.device).abs().sum().item(),
        }


def blocks(draw: torch.Generator) -> Iterator[dict[str, Any]]:
    """Yield the same with scales of blocks, as far as the depth goes; tokens' in both orders."""
    full = torch.randn(8 * BLOCK, 5 * BLOCK, generator=draw).to(torch.float8_e4m3fn)
    scales = torch.rand(8, 5, generator=draw) + 1.5
    names = ("q, k, v", "one")
    for tile, name, blocks in itertools.product(BLOCK_TILES, names, (1, 3)):
        begins = {"q, k, v": (1, 4, 7), "one": (3,)}[name]
        sizes = {"q, k, v": (2, 1, 1), "one": (2,)}[name]
        ranges = [slice(b, b + size) for b, size in zip(begins, sizes, strict=True)]
        depth = slice(BLOCK, (1 + blocks) * BLOCK)
        weights = [full[rows.start * BLOCK : rows.stop * BLOCK, depth] for rows in ranges]
        of_rows = [scales[rows, 1 : 1 + blocks] for rows in ranges]
        x = torch.randn(18, blocks * BLOCK, generator=draw).to(torch.float8_e4m3fn)
        x_scale = torch.rand(18, blocks, generator=draw) + 1.5
        x_scale = x_scale.t().contiguous().t() if tile.rows_first else x_scale
        product = x.float() @ torch.cat([part.float() for part in weights]).T
        spread = torch.cat(of_rows).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        weight = torch.cat([part.float() for part in weights]) * spread
        expected = (x.float() * x_scale.repeat_interleave(BLOCK, 1)) @ weight.T
        out = torch.full_like(expected, float("nan"))
        multiply(x, weights, [], out, tile, Scales(x_scale, of_rows[0], BLOCK))
        yield {
            "case": f"{asdict(tile)}, {name}, {blocks} blocks deep",
            "error": (out - expected).abs().max().item(),
            "unscaled": (out - product).abs().max().item(),
            "counters": arrival_counters(x.device).abs().sum().item(),
        }


def main() -> None:
    quick_interpreter.be_quick(find_overflows=True)
    kinds = (wide, fp8, blocks, operator)  # the last one has all layers taken for a GPU's
    made = {cases.__name__: list(cases(torch.Generator().manual_seed(3))) for cases in kinds}
    json.dump(made, sys.stdout)


if __name__ == "__main__":
    main()
