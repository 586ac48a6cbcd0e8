"""The tables of tiles: that each is used, warmed up, and one that the kernels can do."""

import itertools
import math

import pytest

from shoal.runtime.engine.kernels.linear_tiles import (
    BLOCK,
    BLOCK_INPUT_RANGE,
    BLOCK_INPUT_RANGE_WITHOUT_CUBLAS,
    BLOCK_QKV,
    COUNTERS,
    FP8_INPUT_RANGE,
    FP8_QKV,
    QKV_16_BIT,
    Best,
    Table,
)

BLOCK_INPUT_RANGE_ALONE = (*BLOCK_INPUT_RANGE, *BLOCK_INPUT_RANGE_WITHOUT_CUBLAS)
TABLES = (QKV_16_BIT, FP8_QKV, FP8_INPUT_RANGE, BLOCK_QKV, BLOCK_INPUT_RANGE_ALONE)
of_every_table = pytest.mark.parametrize("table", TABLES)
SIZES = list(itertools.product((512, 768, 1280, 3072, 5120, 8192), (512, 2048, 4096, 14336)))


def best_of(table: Table, tokens: int, columns: int, depth: int) -> Best | None:
    """Return the first row that is meant for a step."""
    fitting = (best for best in table if tokens <= best.tokens and best.fits(columns, depth))
    return next(fitting, None)


@of_every_table
def test_long_steps_are_left_to_gemms(table: Table) -> None:
    longest = table[-1].tokens
    assert best_of(table, longest, 512, 512) is not None
    assert best_of(table, longest + 1, 512, 512) is None


@of_every_table
def test_of_several_tiles_the_first_that_fits_is_taken(table: Table) -> None:
    """None is hidden by those before it."""
    limits = {limit for best in table for limit in (best.columns, best.depth, best.deeper_than)}
    sizes = sorted(limits - {0})
    tokens = sorted({best.tokens for best in table})
    chosen = {id(best_of(table, *each)) for each in itertools.product(tokens, sizes, sizes)}
    assert chosen - {id(None)} == {id(best) for best in table}


@of_every_table
def test_split_tiles_have_a_counter_each(table: Table) -> None:
    for tokens, (columns, depth) in itertools.product(range(1, table[-1].tokens + 1), SIZES):
        best = best_of(table, tokens, columns, depth)
        if best is not None and best.tile.splits > 1:
            tiles = math.ceil(tokens / best.tile.tokens) * math.ceil(columns / best.tile.columns)
            assert tiles <= COUNTERS


@pytest.mark.parametrize("table", [BLOCK_QKV, BLOCK_INPUT_RANGE_ALONE])
def test_a_tile_of_blocks_is_as_deep_as_they_are(table: Table) -> None:
    """And is none of the matrix-vector kernel's, which knows no blocks."""
    assert {best.tile.depth for best in table} == {BLOCK}
    assert min(best.tile.tokens for best in table) > 1
