"""Blocks by tokens, and tokens by blocks, with one KV group and with several."""

import pytest

from shoal.policies.values.kv_need import blocks_for, tokens_in

GROUPS = [(0,), (0, 0), (0, 3), (0, 3, 3, 7), (5, 0, 1)]


def test_a_window_takes_no_more_blocks_than_it_spans() -> None:
    assert [blocks_for(tokens, 16) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert [blocks_for(tokens, 16, (0, 3, 3)) for tokens in (16, 48, 49, 160)] == [3, 9, 10, 16]


@pytest.mark.parametrize("limits", GROUPS)
def test_the_longest_request_is_the_longest_that_fits(limits: tuple[int, ...]) -> None:
    for blocks in range(60):
        tokens = tokens_in(blocks, 4, limits)
        assert blocks_for(tokens, 4, limits) <= blocks < blocks_for(tokens + 1, 4, limits)
