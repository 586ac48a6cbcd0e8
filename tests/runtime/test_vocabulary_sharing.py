"""Engines share the vocabulary where each keeps what it computes in every layout; in pieces."""

import itertools

import pytest

from shoal.runtime.engine.weights.sharing.nested_order import rank_order
from shoal.runtime.vocabulary_sharing import PIECE_BYTES, head_pieces, is_vocabulary_shared

SIZES = (1, 2, 4, 8)


@pytest.mark.parametrize(("share", "widest"), [*itertools.product(SIZES, SIZES)])
def test_no_engine_lacks_a_row(share: int, widest: int) -> None:
    """In layouts of as many members as share weights, or more."""
    keeps = all(
        rank_order(engine % tp, tp) * share // tp == rank_order(engine % share, share)
        for tp in SIZES
        if share <= tp <= widest
        for engine in range(max(share, widest))
    )
    assert is_vocabulary_shared(False, share, widest) == (share > 1 and keeps)
    assert not is_vocabulary_shared(True, share, widest)


@pytest.mark.parametrize(
    ("share", "pieces"),
    # The 32B shape's 152,064 rows of 10 KiB.
    [(2, 16), (4, 32), (8, 32)],
)
def test_a_piece_is_as_large_as_a_slot_may_be(share: int, pieces: int) -> None:
    rows = 152_064 // share
    assert head_pieces(rows, 10_240, share) == pieces
    held = (1 if share == 2 else share) * rows * 10_240 // pieces
    assert PIECE_BYTES / 2 < held <= PIECE_BYTES


def test_pieces_are_equal_and_begin_where_kernels_like_it() -> None:
    assert head_pieces(2 * 99_999, 10_240, 2) == 2, "an odd number of rows cannot be halved"
    assert head_pieces(6, (64 << 20) + 2, 2) == 1, "a half would begin within 256 bytes"
    assert head_pieces(6, 64 << 20, 2) == 2
    assert head_pieces(6, 10, 2) == 1
