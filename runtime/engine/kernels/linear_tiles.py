"""Which tile of our kernel is the best for which layer and step: data, no code.

``python -m shoal.loadgen.bench.linear_kernels`` found all of it on an H200, for an 8B and a 70B
Llama in TP2, TP4 and TP8. Factors below compare with the best tile that it tried; each is the worst
over these six models.
"""

from dataclasses import dataclass
from typing import NamedTuple


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
        stages: depth of the software pipeline; the matrix-vector kernel ignores it.
        rows_first: whether the weight is the product's left operand. Hopper's tensor cores take FP8
            directly only if that has 64 rows or more, and a step of few tokens has fewer.
    """

    tokens: int
    columns: int
    depth: int
    splits: int = 1
    warps: int = 4
    stages: int = 4
    rows_first: bool = False


COUNTERS = 8192
"""Most output tiles of a launch that splits the depth."""

MAX_RANGES = 3
"""Most ranges of rows that one launch reads: query, key and value."""

BLOCK = 128
"""Rows and inputs that share a scale of blocks: the only size that our kernel knows."""

ANY = 1 << 30


class Best(NamedTuple):
    """A tile, and what it is the best for: steps of up to so many tokens, in layers of a size."""

    tokens: int
    columns: int
    """Most outputs of the layer."""
    depth: int
    """Most inputs."""
    tile: Tile
    deeper_than: int = 0
    """The layer has more inputs than this."""

    def fits(self, columns: int, depth: int) -> bool:
        """Return whether the tile is meant for a layer of so many outputs and inputs."""
        return columns <= self.columns and self.deeper_than < depth <= self.depth


Table = tuple[Best, ...]
"""If several rows fit, the first is taken."""

QKV_16_BIT: Table = (
    Best(1, ANY, ANY, Tile(1, 1, 2048)),
    Best(8, ANY, ANY, Tile(16, 64, 128, splits=4)),
    Best(16, ANY, ANY, Tile(16, 32, 128, splits=4)),
    Best(32, 3072, ANY, Tile(32, 32, 128, splits=4)),
    Best(32, ANY, ANY, Tile(32, 64, 128, splits=4, stages=3)),
    Best(64, 1536, ANY, Tile(64, 32, 128, splits=4)),
    Best(64, 3072, ANY, Tile(64, 64, 128, splits=2)),
    Best(64, ANY, ANY, Tile(64, 64, 64, splits=2, stages=6)),
    Best(128, 3072, ANY, Tile(64, 64, 64, splits=2, stages=5)),
)
"""QKV in 16 bits: up to 16 tokens no slower than one GEMM over a copy, up to 64 tokens at most 15 %
slower."""

_FP8: Table = (
    Best(8, ANY, ANY, Tile(8, 64, 128, splits=4, stages=6, rows_first=True)),
    Best(16, ANY, ANY, Tile(16, 64, 256, splits=2, rows_first=True)),
    Best(32, ANY, ANY, Tile(32, 64, 256, splits=2, rows_first=True)),
)

FP8_QKV: Table = (
    Best(1, 3072, ANY, Tile(1, 2, 4096)),
    Best(1, ANY, ANY, Tile(1, 2, 2048)),
    *_FP8,
    Best(64, ANY, ANY, Tile(64, 64, 128, splits=2, stages=6, rows_first=True)),
    Best(128, ANY, ANY, Tile(128, 64, 128, stages=5)),
)
"""QKV in FP8 with scales of tokens and rows: at most 24 % slower than the best tile with 1 and 64
tokens, in all six models; otherwise (TP2 and TP4) at most 13 % slower."""

FP8_INPUT_RANGE: Table = (
    Best(1, 4096, ANY, Tile(1, 8, 512)),
    Best(1, ANY, 1024, Tile(1, 8, 512)),
    Best(1, ANY, 4096, Tile(1, 8, 1024)),
    Best(1, ANY, ANY, Tile(1, 2, 2048)),
    *_FP8,
    Best(64, 4096, 4096, Tile(64, 64, 128, stages=6, rows_first=True)),
    Best(64, 4096, ANY, Tile(64, 64, 128, splits=2, stages=6, rows_first=True)),
    Best(64, ANY, ANY, Tile(64, 64, 128, stages=6, rows_first=True)),
    Best(128, ANY, ANY, Tile(128, 64, 128, stages=5)),
)
"""Row-parallel layers, the same way: 10 % slower with 1 and 64 tokens, otherwise 13 %."""

BLOCK_QKV: Table = (
    Best(8, ANY, ANY, Tile(8, 64, 128, splits=8, rows_first=True)),
    Best(16, ANY, ANY, Tile(16, 64, 128, splits=8, rows_first=True)),
    Best(32, ANY, ANY, Tile(32, 64, 128, splits=4, stages=5, rows_first=True)),
    Best(64, ANY, ANY, Tile(64, 64, 128, splits=4, rows_first=True)),
    Best(128, 3072, ANY, Tile(64, 64, 128, splits=2, stages=5, rows_first=True)),
    Best(128, ANY, ANY, Tile(128, 64, 128, splits=2)),
)
"""QKV in FP8 with scales of blocks of 128: the best tile tried in all six models, or within 1 % of
it; at least 16 % less time than a copy and ``torch._scaled_mm``."""

BLOCK_INPUT_RANGE: Table = (
    Best(16, ANY, 1024, Tile(16, 64, 128, stages=6, rows_first=True)),
    Best(8, ANY, ANY, Tile(8, 64, 128, splits=4, stages=6, rows_first=True)),
    Best(16, 4096, 3072, Tile(16, 64, 128, splits=2, stages=6, rows_first=True)),
    Best(16, 4096, ANY, Tile(16, 64, 128, splits=4, stages=6, rows_first=True)),
    Best(16, ANY, ANY, Tile(16, 64, 128, splits=2, stages=6, rows_first=True)),
    Best(32, 4096, 3072, Tile(32, 64, 128, splits=2, stages=5, rows_first=True)),
    Best(32, 4096, ANY, Tile(32, 64, 128, splits=4, stages=5, rows_first=True)),
    Best(32, ANY, ANY, Tile(32, 64, 128, splits=2, stages=5, rows_first=True)),
    Best(64, 4096, ANY, Tile(64, 64, 128, splits=4, rows_first=True), deeper_than=3072),
)
"""Row-parallel layers, the same way, where our kernel is faster than cuBLAS: up to 32 tokens, and
up to 64 if a layer is so narrow and deep that splitting the depth pays."""

BLOCK_INPUT_RANGE_WITHOUT_CUBLAS: Table = (
    Best(64, 4096, ANY, Tile(64, 64, 128, splits=2, stages=5, rows_first=True)),
    Best(64, ANY, ANY, Tile(64, 64, 128, splits=2, stages=5)),
    Best(128, 4096, ANY, Tile(64, 64, 128, splits=2, stages=5, rows_first=True)),
    Best(128, ANY, ANY, Tile(128, 64, 128, splits=2)),
)
"""The same for more tokens, where cuBLAS cannot be used. Both tables: at most 9 % slower than the
best tile."""
