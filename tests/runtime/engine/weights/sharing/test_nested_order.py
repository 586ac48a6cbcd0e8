"""Parts of MLPs: nested in each other, and read from one peer at a time."""

import itertools
from functools import partial

import pytest

from shoal.runtime.engine.groups.head_order import head_shard
from shoal.runtime.engine.weights.sharing.nested_order import Order, Source, nested_shard, sources

SIZES = (1, 2, 4, 8)


def span(shard: int, of: int) -> range:
    return range(shard * 8 // of, (shard + 1) * 8 // of)


@pytest.mark.parametrize("of", SIZES)
def test_members_have_all_parts(of: int) -> None:
    assert sorted(nested_shard(place, of) for place in range(of)) == list(range(of))


def test_a_part_lies_inside_those_of_narrower_layouts() -> None:
    for engine in range(8):
        spans = [span(nested_shard(engine % of, of), of) for of in SIZES]
        assert all(set(inner) <= set(outer) for outer, inner in itertools.pairwise(spans))


def test_in_the_order_of_ranks_it_does_not() -> None:
    assert not set(span(1, 4)) <= set(span(1, 2))


@pytest.mark.parametrize(
    ("share", "tp"), [(share, tp) for share in SIZES for tp in SIZES if tp <= share]
)
@pytest.mark.parametrize(
    "order", [nested_shard, *(partial(head_shard, max_sp=most) for most in (1, 2, 4))]
)
def test_members_read_what_they_compute_each_from_another_peer(
    share: int, tp: int, order: Order
) -> None:
    reads = [sources(place, share, tp, order) for place in range(share)]
    for place, found in enumerate(reads):
        assert sorted(part for _, part in found) == list(range(share // tp))
        first = order(place % tp, tp) * (share // tp)
        assert all(order(other, share) == first + part for other, part in found)
    if order is not nested_shard:
        return  # these read from the same peers as nested parts only where they are nested
    for at_once in zip(*reads, strict=True):
        assert len({source.place for source in at_once}) == share, "two read the same memory"


def test_what_a_member_keeps_itself_comes_last() -> None:
    assert sources(1, 4, 1) == [Source(2, 1), Source(3, 3), Source(0, 0), Source(1, 2)]
