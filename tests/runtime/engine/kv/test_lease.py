"""The lease over vLLM's own block pool: virtual blocks open and close, their backing pairs up."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool

from shoal.runtime.engine.kv.lease import GroupLease, num_uncached
from tests.units import tp

GROUP = tp(2, 3)
BLOCKS = 16
"""Blocks of the pool, the null block included."""
TOKENS = 32


@pytest.fixture
def pool() -> Any:
    return BlockPool(BLOCKS, enable_caching=True, hash_block_size=TOKENS)


@pytest.fixture
def lease(pool: Any) -> GroupLease:
    return GroupLease(GROUP, pool)


def physical(*blocks: int) -> dict[int, list[int]]:
    """Return a lease whose members lend unlike ids: 100 and up, 200 and up."""
    return {2: [100 + block for block in blocks], 3: [200 + block for block in blocks]}


def cache(pool: Any, blocks: list[Any], name: bytes) -> None:
    """Enter full blocks into the pool's prefix cache as a request's prompt would."""
    hashes = [name + bytes([index]) for index in range(len(blocks))]
    request = SimpleNamespace(block_hashes=hashes)
    pool.cache_full_blocks(request, blocks, 0, len(blocks), TOKENS, kv_cache_group_id=0)


def test_every_block_is_closed_at_first(lease: GroupLease, pool: Any) -> None:
    assert (lease.num_open, lease.num_free, pool.get_num_free_blocks()) == (0, 0, 0)
    assert lease.check_integrity() == []


def test_opened_blocks_can_be_allocated_and_go_out_in_row_order(
    lease: GroupLease, pool: Any
) -> None:
    virtual = lease.open(physical(7, 5, 9))
    assert virtual == [1, 2, 3]
    assert (lease.num_open, lease.num_free) == (3, 3)
    assert [block.block_id for block in pool.get_new_blocks(3)] == virtual
    assert (lease.num_open, lease.num_free) == (3, 0)


def test_closing_returns_what_was_lent_with_rows_aligned(lease: GroupLease) -> None:
    lease.open(physical(7, 5, 9))
    returned = lease.close(BLOCKS)
    assert {2: sorted(returned[2]), 3: sorted(returned[3])} == {
        2: [105, 107, 109],
        3: [205, 207, 209],
    }
    assert [block - 100 for block in returned[2]] == [block - 200 for block in returned[3]]
    assert (lease.num_open, lease.num_free) == (0, 0)
    assert lease.check_integrity() == []


def test_blocks_that_a_request_holds_survive_a_close(lease: GroupLease, pool: Any) -> None:
    lease.open(physical(*range(5)))
    held = pool.get_new_blocks(2)
    returned = lease.close(BLOCKS)
    assert (lease.num_open, lease.num_free) == (2, 0)
    assert len(returned[2]) == len(returned[3]) == 3
    pool.free_blocks(held)
    last = lease.close(BLOCKS)
    assert sorted(returned[2] + last[2]) == [100, 101, 102, 103, 104]
    assert sorted(returned[3] + last[3]) == [200, 201, 202, 203, 204]
    assert lease.check_integrity() == []


def test_rows_with_a_block_beyond_an_id_close_whichever_member_lent_it(
    lease: GroupLease, pool: Any
) -> None:
    lease.open({2: [5, 30, 7, 31], 3: [40, 6, 8, 9]})
    held = pool.get_new_blocks(4)[3:]  # the last one stays held
    pool.free_blocks(pool.blocks[1:4])
    assert lease.close_beyond(29) == {2: [5, 30], 3: [40, 6]}
    assert (lease.num_open, lease.num_free) == (2, 1)
    assert lease.close_beyond(29) == {2: [], 3: []}, "the last one is held"
    assert [lease.is_beyond(block.block_id, 29) for block in held] == [True]
    pool.free_blocks(held)
    assert lease.close_beyond(29) == {2: [31], 3: [9]}
    assert lease.check_integrity() == []
    assert len(lease.open(physical(1, 2, 3))) == 3, "closed rows can be opened again"


def test_a_close_takes_no_more_than_asked(lease: GroupLease, pool: Any) -> None:
    lease.open(physical(*range(6)))
    pool.get_new_blocks(1)
    assert len(lease.close(2)[2]) == 2
    assert (lease.num_open, lease.num_free) == (4, 3)
    assert lease.close(0) == {2: [], 3: []}
    assert len(lease.close(9)[2]) == 3


def test_free_blocks_that_cache_nothing_are_counted_and_closed_first(
    lease: GroupLease, pool: Any
) -> None:
    lease.open(physical(*range(8)))
    cached, plain = pool.get_new_blocks(3), pool.get_new_blocks(2)
    cache(pool, cached, b"kept")
    assert num_uncached(pool, 9) == 3
    pool.free_blocks([*reversed(cached), *plain])
    assert (num_uncached(pool, 9), num_uncached(pool, 4), lease.num_free) == (5, 4, 8)
    lease.close(5)
    assert num_uncached(pool, 9) == 0
    assert pool.get_cached_block(b"kept\2", [0]) is not None
    lease.close(1)
    assert pool.get_cached_block(b"kept\2", [0]) is None, "of a prompt the end goes first"
    assert pool.get_cached_block(b"kept\1", [0]) is not None


def test_a_lease_grows_while_blocks_are_held(lease: GroupLease, pool: Any) -> None:
    first = lease.open(physical(0, 1))
    pool.get_new_blocks(2)
    second = lease.open(physical(2, 3))
    assert not set(first) & set(second)
    assert (lease.num_open, lease.num_free) == (4, 2)
    assert lease.check_integrity() == []


def test_closed_blocks_open_again_on_other_physical_blocks(lease: GroupLease) -> None:
    lease.open(physical(0, 1, 2))
    lease.close(BLOCKS)
    lease.open(physical(8, 9, 7))
    assert sorted(lease.close(BLOCKS)[3]) == [207, 208, 209]


def test_the_whole_pool_but_the_null_block_can_be_open(lease: GroupLease) -> None:
    virtual = lease.open(physical(*range(BLOCKS - 1)))
    assert virtual == list(range(1, BLOCKS))
    with pytest.raises(ValueError, match=r"lease of 1 blocks, but only 0 are closed"):
        lease.open(physical(50))


def test_closing_evicts_the_prefix_cache_of_the_closed_blocks_only(
    lease: GroupLease, pool: Any
) -> None:
    lease.open(physical(*range(4)))
    kept, lost = pool.get_new_blocks(2), pool.get_new_blocks(2)
    cache(pool, kept, b"kept")
    cache(pool, lost, b"lost")
    pool.free_blocks(lost)
    # A freed block is cached until it is used again: without the close this would be a hit.
    assert pool.get_cached_block(b"lost\0", [0]) == lost[:1]
    lease.close(BLOCKS)
    assert pool.get_cached_block(b"lost\0", [0]) is None
    assert pool.get_cached_block(b"lost\1", [0]) is None
    assert pool.get_cached_block(b"kept\0", [0]) == kept[:1]


@pytest.mark.parametrize(
    ("members", "cause"),
    [
        ({2: [1]}, r"lease of \[2\] for group \[2, 3\]"),
        ({2: [1], 3: [1], 4: [1]}, r"lease of \[2, 3, 4\] for group \[2, 3\]"),
        ({2: [1], 3: []}, r"members lent different numbers of blocks: \[0, 1\]"),
        ({2: list(range(20)), 3: list(range(20))}, r"lease of 20 blocks, but only 15 are closed"),
    ],
)
def test_a_lease_that_does_not_fit_is_refused_and_changes_nothing(
    lease: GroupLease, members: dict[int, list[int]], cause: str
) -> None:
    with pytest.raises(ValueError, match=cause):
        lease.open(members)
    assert (lease.num_open, lease.num_free) == (0, 0)
    assert lease.check_integrity() == []


# --- negative controls of check_integrity ---


def test_two_virtual_blocks_on_one_physical_block_are_found(lease: GroupLease) -> None:
    lease.open({2: [101, 102], 3: [201, 201]})
    assert lease.check_integrity() == ["group [2, 3]: member 3 backs two virtual blocks with one"]


def test_a_member_without_backing_for_a_block_is_found(lease: GroupLease) -> None:
    lease.open(physical(0, 1))
    lease._backing[3].popitem()
    assert lease.check_integrity() == ["group [2, 3]: member 3 backs 1 virtual blocks, expected 2"]


def test_a_lost_virtual_block_is_found(lease: GroupLease) -> None:
    lease.open(physical(0, 1))
    lease._closed.pop()
    assert lease.check_integrity() == [
        "group [2, 3]: 2 open + 12 closed virtual blocks, expected 15"
    ]
