"""The kernels of ``row_ranges`` through Triton's interpreter, which Triton must be imported with.

Run as ``python -m tests.runtime.engine.row_ranges_main``. Writes to standard output, as JSON, how
far each case is off, and whether the counters of arrived splits are zero again.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import itertools
import json
import sys
from dataclasses import asdict

import torch

from runtime.engine.row_ranges_kernel import Tile, arrival_counters, multiply

TILES = (
    Tile(1, 4, 128),
    Tile(1, 16, 64),
    Tile(16, 16, 64),
    Tile(16, 32, 128, splits=2),
    Tile(32, 16, 64, splits=4),
)
RANGES = {
    "apart": (slice(16, 56), slice(100, 120), slice(171, 190)),
    "side by side": (slice(0, 40), slice(40, 60), slice(60, 80)),
    "two": (slice(8, 40), slice(90, 122)),
}
"""Also of sizes that no tile divides, and where a tile spans two ranges."""
DEPTHS = (128, 200)
"""One that the tiles divide, and one that they do not."""


def main() -> None:
    draw = torch.Generator().manual_seed(3)
    results = []
    for tile, (name, ranges), depth in itertools.product(TILES, RANGES.items(), DEPTHS):
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
            results.append(
                {
                    "case": f"{asdict(tile)}, {name}, depth {depth}, {tokens} tokens",
                    "error": (out - expected).abs().max().item(),
                    "counters": arrival_counters(x.device).abs().sum().item(),
                }
            )
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
