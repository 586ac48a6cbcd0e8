"""The tiles that the benchmark of kernels tries, as they are written."""

import pytest

from shoal.loadgen.bench.linear_layers import DTYPES
from shoal.loadgen.bench.tiles_to_try import read_tile, tiles_by_tokens, tiles_to_try, written
from shoal.runtime.engine.kernels.linear_tiles import BLOCK, Tile


def test_a_tile_is_read_as_it_is_written() -> None:
    tiles = [Tile(16, 64, 128, 4, 8, 5, rows_first=True), Tile(1, 2, 4096)]
    assert [written(tile) for tile in tiles] == ["16x64x128/4w8s5r", "1x2x4096/1w4s4"]
    assert [read_tile(written(tile)) for tile in tiles] == tiles


def test_what_is_no_tile_is_named() -> None:
    with pytest.raises(ValueError, match=r"^16x64 is no tile$"):
        read_tile("16x64")


def test_a_number_of_tokens_has_those_of_the_next_larger_one() -> None:
    by_tokens = tiles_by_tokens("bf16")
    assert list(by_tokens) == [1, 16, 32, 64, 128, 256, 1024]
    assert tiles_to_try("bf16", 9) is tiles_to_try("bf16", 16) is by_tokens[16]
    assert tiles_to_try("bf16", 17) is by_tokens[32]
    assert tiles_to_try("bf16", 1025) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_is_tried_once_and_can_be(dtype: str) -> None:
    for tiles in tiles_by_tokens(dtype).values():
        assert len(set(tiles)) == len(tiles) > 1
        assert all(tile.tokens >= 16 or tile.rows_first or tile.tokens == 1 for tile in tiles)
        if dtype == "fp8-block":
            assert {tile.depth for tile in tiles} == {BLOCK}
