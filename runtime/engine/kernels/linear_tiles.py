"""Which tile of our kernel is the best for which layer and step: data, no code.

``python -m shoal.loadgen.bench.linear_kernels`` found all of it on an H200, for an 8B and a 70B
Llama in TP2, TP4 and TP8. Factors below are over the best of what it tried, for the worst of these.
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
        stages: depth of the software pipeline; of no meaning to the matrix-vector kernel.
        rows_first: the weight is the product's left operand. Hopper's tensor cores take FP8 as it
            is only in products of 64 left rows or more, and a step of few tokens has fewer.
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
"""Rows and inputs that share a scale where scales are those of blocks: what our kernel can."""

ANY = 1 << 30


class Best(NamedTuple):
    """A tile, and what it is the best for: steps of up to so many tokens, of layers of a size."""

    tokens: int
    columns: int
    """Most outputs of the layer."""
    depth: int
    """Most inputs."""
    tile: Tile
    deeper_than: int = 0
    """More inputs than this."""

    def fits(self, columns: int, depth: int) -> bool:
        """Return whether it is meant for a layer of so many outputs and inputs."""
        return columns <= self.columns and self.deeper_than < depth <= self.depth


Table = tuple[Best, ...]
"""Of several that fit, the first is taken."""

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
"""QKV in 16 bits: up to 16 tokens at most what one GEMM over a copy takes, up to 64 at most 1.15
times that."""

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
"""QKV in FP8 with scales of tokens and rows: with 1 and 64 tokens, in all six models, at most 1.24
times the best tile's time, otherwise (TP2 and TP4) 1.13."""

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
"""Row-parallel layers, the same way: 1.10 with 1 and 64 tokens, otherwise 1.13."""

BLOCK_QKV: Table = (
    Best(8, ANY, ANY, Tile(8, 64, 128, splits=8, rows_first=True)),
    Best(16, ANY, ANY, Tile(16, 64, 128, splits=8, rows_first=True)),
    Best(32, ANY, ANY, Tile(32, 64, 128, splits=4, stages=5, rows_first=True)),
    Best(64, ANY, ANY, Tile(64, 64, 128, splits=4, rows_first=True)),
    Best(128, 3072, ANY, Tile(64, 64, 128, splits=2, stages=5, rows_first=True)),
    Best(128, ANY, ANY, Tile(128, 64, 128, splits=2)),
)
"""QKV in FP8 with scales of blocks of 128: the best tile tried in all six models, or within 1 % of
it; at most 0.84 times what a copy and ``torch._scaled_mm`` take."""

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
"""Row-parallel layers, the same way, as far as our kernel is faster than cuBLAS: up to 32 tokens,
and up to 64 where a layer is so narrow and deep that splits of the depth pay."""

BLOCK_INPUT_RANGE_WITHOUT_CUBLAS: Table = (
    Best(64, 4096, ANY, Tile(64, 64, 128, splits=2, stages=5, rows_first=True)),
    Best(64, ANY, ANY, Tile(64, 64, 128, splits=2, stages=5)),
    Best(128, 4096, ANY, Tile(64, 64, 128, splits=2, stages=5, rows_first=True)),
    Best(128, ANY, ANY, Tile(128, 64, 128, splits=2)),
)
"""The same for more tokens, where cuBLAS cannot be taken. Both tables: at most 1.09 times the best
tile's time."""
