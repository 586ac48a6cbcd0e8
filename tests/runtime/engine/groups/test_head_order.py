"""Who holds which heads: held against what the exchanges of a base leave each member with."""

import itertools

import pytest

from shoal.runtime.engine.groups.head_order import Base, base_of, head_shard, peers_of

POWERS = (1, 2, 4, 8)
SHAPES = [(sp, tp) for sp, tp in itertools.product(POWERS, POWERS) if sp * tp <= 8]
SIZES = [(members, max_sp) for members, max_sp in itertools.product(POWERS, POWERS)]


def order(members: int, max_sp: int) -> list[int]:
    return [head_shard(member, members, max_sp) for member in range(members)]


@pytest.mark.parametrize(
    ("members", "max_sp", "base"),
    [
        (8, 8, (8, 1)),
        (8, 2, (2, 4)),
        (8, 4, (4, 2)),
        (2, 8, (2, 1)),
        (4, 1, (1, 4)),
        (1, 4, (1, 1)),
    ],
)
def test_the_base_has_as_much_sp_as_is_allowed(
    members: int, max_sp: int, base: tuple[int, int]
) -> None:
    assert base_of(members, max_sp) == Base(*base)


@pytest.mark.parametrize(("sp", "tp"), SHAPES)
def test_each_member_holds_what_the_all_to_all_leaves_it_with(sp: int, tp: int) -> None:
    """Algorithm 2, step by step, on the names of heads."""
    members = sp * tp
    of_the_base = order(tp, sp)
    per_base = members // tp
    for member in range(members):
        peers = next(group for group in peers_of(members, sp, members).sp if member in group)
        # Before the exchange every peer has all heads of the same place of the base.
        (place,) = {peer % tp for peer in peers}
        heads = range(of_the_base[place] * per_base, (of_the_base[place] + 1) * per_base)
        assert head_shard(member, members, sp) == heads[peers.index(member)]


@pytest.mark.parametrize(("members", "max_sp"), SIZES)
def test_every_shard_has_one_member(members: int, max_sp: int) -> None:
    assert sorted(order(members, max_sp)) == list(range(members))


@pytest.mark.parametrize("members", POWERS)
def test_without_tp_in_the_base_the_order_is_the_members(members: int) -> None:
    assert order(members, 8) == order(members, members) == order(members, 1) == list(range(members))


@pytest.mark.parametrize(
    ("members", "max_sp", "shards"),
    [
        (4, 2, [0, 2, 1, 3]),
        (8, 4, [0, 4, 1, 5, 2, 6, 3, 7]),
        # The base of (SP 2, TP 4) is in the order of (SP 2, TP 2) itself.
        (8, 2, [0, 4, 2, 6, 1, 5, 3, 7]),
    ],
)
def test_the_order_of_mixed_bases(members: int, max_sp: int, shards: list[int]) -> None:
    assert order(members, max_sp) == shards


def test_the_order_of_the_papers_figure() -> None:
    """Shift Parallelism, Figure 7: six heads on (SP 3, TP 2)."""
    by_head = sorted(range(6), key=order(6, 3).__getitem__)
    assert by_head == [0, 2, 4, 1, 3, 5]


@pytest.mark.parametrize("kv_heads", POWERS)
@pytest.mark.parametrize(("sp", "tp"), SHAPES)
def test_kv_heads_go_where_the_tp_layout_keeps_them(sp: int, tp: int, kv_heads: int) -> None:
    """Algorithm 1 on the names of KV heads; vLLM gives neighbours of a shard the same head."""
    members = sp * tp
    peers = peers_of(members, sp, kv_heads)

    def kept(shard: int, of: int) -> range:
        size = max(1, kv_heads // of)
        first = shard * kv_heads // of
        return range(first, first + size)

    for member in range(members):
        across = next(group for group in peers.across if member in group)
        within = next(group for group in peers.within if member in group)
        heads = kept(order(tp, sp)[member % tp], tp)
        each = len(heads) // len(across)
        mine = heads[across.index(member) * each :][:each]
        assert list(mine) == list(kept(head_shard(member, members, sp), members))
        assert len({kept(head_shard(peer, members, sp), members) for peer in within}) == 1


@pytest.mark.parametrize("kv_heads", POWERS)
@pytest.mark.parametrize(("sp", "tp"), SHAPES)
def test_every_way_to_exchange_divides_the_whole_group(sp: int, tp: int, kv_heads: int) -> None:
    peers = peers_of(sp * tp, sp, kv_heads)
    for groups in (peers.sp, peers.across, peers.within):
        assert sorted(itertools.chain(*groups)) == list(range(sp * tp))
        assert len({len(group) for group in groups}) == 1
    assert len(peers.across[0]) * len(peers.within[0]) == sp
