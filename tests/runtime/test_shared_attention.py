"""Engines share attention where each one's heads in wider layouts are among those that it keeps."""

import itertools

import pytest

from shoal.runtime.engine.groups.head_order import head_shard
from shoal.runtime.shared_attention import is_attention_shared

SIZES = (1, 2, 4, 8)


def keeps_its_heads(share: int, widest: int, max_sp: int) -> bool:
    """Return whether all engines of a node keep what they compute in layouts of more members."""
    wider = [tp for tp in SIZES if share < tp <= widest]
    return all(
        head_shard(engine % tp, tp, max_sp) * share // tp
        == head_shard(engine % share, share, max_sp)
        for tp, engine in itertools.product(wider, range(max(widest, share)))
    )


@pytest.mark.parametrize("max_sp", SIZES)
@pytest.mark.parametrize("widest", SIZES)
@pytest.mark.parametrize("share", SIZES[1:])
def test_no_engine_lacks_a_head(share: int, widest: int, max_sp: int) -> None:
    if is_attention_shared(8, share, widest, max_sp):
        assert keeps_its_heads(share, widest, max_sp)


def test_engines_would_lack_heads_in_the_order_of_ranks() -> None:
    assert not keeps_its_heads(2, 4, 1)
    assert not is_attention_shared(8, 2, 4, 1)
    assert is_attention_shared(8, 2, 4, 2)


def test_heads_that_several_engines_hold_are_not_shared() -> None:
    assert is_attention_shared(4, 4, 4, 1)
    assert not is_attention_shared(2, 4, 4, 1)
    assert not is_attention_shared(8, 1, 4, 1), "nothing is shared"
