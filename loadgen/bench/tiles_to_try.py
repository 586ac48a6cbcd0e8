"""The tiles that ``linear_kernels`` tries, written as it prints them.

``16x64x128/4w8s5r`` is a ``Tile`` of 16 tokens, 64 columns, a depth of 128, 4 splits, 8 warps, 5
stages, and rows first.
"""

import functools
import re
from collections.abc import Mapping, Sequence

from shoal.runtime.engine.kernels.linear_tiles import Tile

_TO_TRY: Mapping[str, str] = {
    "bf16": """
         1: 1x1x2048/1w4s4 1x2x1024/1w4s4 1x2x2048/1w4s4 1x2x4096/1w8s4 1x4x1024/1w4s4
            1x4x2048/1w4s4 1x4x2048/1w8s4 1x8x1024/1w4s4 1x8x1024/1w8s4 1x8x512/1w4s4
            1x16x512/1w4s4 16x16x256/1w4s4 16x16x256/2w4s4 16x32x128/2w4s5
        16: 16x16x256/1w4s4 16x16x256/2w4s4 16x16x256/4w4s4 16x16x512/1w4s3 16x16x512/2w4s3
            16x32x128/1w4s6 16x32x128/2w4s5 16x32x256/1w4s4 16x32x256/2w4s3 16x32x256/4w4s3
            16x32x128/4w4s4 16x64x128/2w4s4 16x64x128/4w4s4 16x16x128/2w2s6
        32: 32x16x256/1w4s4 32x16x256/2w4s3 32x32x128/1w4s5 32x32x128/2w4s4 32x32x128/4w4s4
            32x32x256/2w4s3 32x64x128/2w4s4 32x64x128/4w4s3
        64: 64x16x128/1w4s5 64x32x128/1w4s4 64x32x128/2w4s4 64x32x128/4w4s4 64x64x64/1w4s6
            64x64x64/2w4s6 64x64x128/2w4s4 64x64x128/4w4s3 64x128x64/4w4s4
       128: 64x64x64/1w4s5 64x64x128/1w4s3 64x128x64/1w4s4 64x64x64/2w4s5 128x64x64/1w4s4
            128x64x64/2w4s4 128x64x128/2w8s3 128x128x64/2w8s4
       256: 64x64x64/1w4s5 64x128x64/1w4s4 64x128x128/1w8s3 128x64x64/1w4s4 128x128x64/1w8s4
            128x128x64/2w8s4
      1024: 64x128x64/1w4s4 128x64x64/1w4s4 128x128x64/1w8s3 128x128x64/1w8s4
    """,
    "fp8": """
         1: 1x1x4096/1w4s4 1x2x2048/1w4s4 1x2x4096/1w4s4 1x4x1024/1w4s4 1x4x2048/1w4s4
            1x4x2048/1w8s4 1x8x512/1w4s4 1x8x1024/1w4s4 8x64x256/2w4s4r 8x64x256/4w4s4r
         8: 8x64x128/4w4s6r 8x64x256/2w4s4r 8x64x256/4w4s4r 8x64x512/2w4s3r 8x128x256/4w8s3r
            16x64x256/4w4s4 16x32x256/4w4s4 16x32x256/2w4s4 16x64x128/2w4s6r 16x64x128/4w4s5r
            16x64x256/2w4s4r 16x64x256/4w4s3r 16x64x256/8w4s3r 16x64x512/2w4s3r 16x128x128/4w8s5r
            16x128x256/4w8s3r
        16: 16x64x256/4w4s4 16x32x256/4w4s4 16x32x256/2w4s4 16x64x128/2w4s6r 16x64x128/4w4s5r
            16x64x256/2w4s4r 16x64x256/4w4s3r 16x64x256/8w4s3r 16x64x512/2w4s3r 16x128x128/4w8s5r
            16x128x256/4w8s3r
        32: 32x32x256/4w4s4 32x64x256/4w4s3 32x64x128/2w4s6r 32x64x128/4w4s5r 32x64x256/2w4s4r
            32x64x256/4w4s3r 32x128x128/4w8s4r 32x128x256/4w8s3r
        64: 64x32x256/4w4s3 64x64x128/2w4s6 64x64x256/2w4s3 64x64x128/1w4s6r 64x64x128/2w4s6r
            64x64x128/4w4s4r 64x64x256/2w4s3r 64x128x128/2w8s4r 64x128x128/4w8s4r
       128: 128x64x128/2w4s4 128x64x128/1w4s5 128x128x128/2w8s4 128x64x128/2w4s4r
            128x128x128/1w8s4r 128x128x128/2w8s4r
    """,
    "fp8-block": """
         8: 8x64x128/2w4s6r 8x64x128/4w4s6r 8x64x128/8w4s4r 16x64x128/4w4s5 16x32x128/4w4s5
            16x64x128/1w4s6r 16x64x128/2w4s6r 16x64x128/4w4s6r 16x64x128/8w4s4r 16x128x128/4w8s5r
        16: 16x64x128/4w4s5 16x64x128/1w4s6r 16x64x128/2w4s6r 16x64x128/4w4s6r 16x64x128/8w4s4r
            16x128x128/4w8s5r
        32: 32x64x128/2w4s5r 32x64x128/4w4s5r 32x128x128/4w8s4r
        64: 64x64x128/2w4s5 64x64x128/2w4s5r 64x64x128/4w4s4r 64x128x128/4w8s4r
       128: 64x64x128/2w4s5r 128x64x128/2w4s4 128x128x128/1w8s4 128x128x128/2w8s4
    """,
}
"""Tiles by type of the weights. They follow the most tokens that they are meant for."""

_TILE = re.compile(r"(\d+)x(\d+)x(\d+)/(\d+)w(\d+)s(\d+)(r?)")


def written(tile: Tile) -> str:
    """Return a tile in a few letters."""
    sizes = f"{tile.tokens}x{tile.columns}x{tile.depth}"
    return f"{sizes}/{tile.splits}w{tile.warps}s{tile.stages}{'r' if tile.rows_first else ''}"


def read_tile(word: str) -> Tile:
    """Return the tile that a word stands for.

    Raises:
        ValueError: the word is not a tile.
    """
    match = _TILE.fullmatch(word)
    if match is None:
        raise ValueError(f"{word} is no tile")
    tokens, columns, depth, splits, warps, stages = map(int, match.groups()[:6])
    return Tile(tokens, columns, depth, splits, warps, stages, rows_first=bool(match[7]))


@functools.cache
def tiles_by_tokens(dtype: str) -> Mapping[int, Sequence[Tile]]:
    """Return the tiles for a type of weights, by the most tokens for which they are meant."""
    found: dict[int, list[Tile]] = {}
    for word in _TO_TRY[dtype].split():
        if word.endswith(":"):
            most = int(word[:-1])
            found[most] = []
        else:
            found[most].append(read_tile(word))
    return found


def tiles_to_try(dtype: str, tokens: int) -> Sequence[Tile]:
    """Return the tiles for a number of tokens; none if no tile is meant for so many."""
    by_tokens = tiles_by_tokens(dtype)
    fitting = [most for most in by_tokens if tokens <= most]
    return by_tokens[min(fitting)] if fitting else []
