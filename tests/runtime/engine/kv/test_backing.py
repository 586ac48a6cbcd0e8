"""Which parts of a KV buffer can be lent, where layers or blocks are outermost."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_cache_interface import KVCacheTensor

from shoal.runtime.engine.kv.backing import Loan, blocks_beside, find_loan, taken

PAGE = 4096
LAYERS, BLOCKS = 3, 10


def config_of(*, blocks_outermost: bool = False, block: int = PAGE, blocks: int = BLOCKS) -> Any:
    size = LAYERS * blocks * block
    strides = (block, LAYERS * block) if blocks_outermost else (blocks * block, block)
    tensor = KVCacheTensor(size, [f"layer{n}" for n in range(LAYERS)], *strides)
    return SimpleNamespace(num_blocks=blocks, kv_cache_tensors=[tensor])


def lent(config: Any, sizes: list[int]) -> Loan:
    loan = find_loan(config, sizes, PAGE)
    assert loan is not None
    assert [end - begin for begin, end in loan.ranges] == sizes
    ranges = sorted(loan.ranges)
    assert all(one[1] <= other[0] for one, other in pairwise(ranges))
    assert all(edge % PAGE == 0 for edges in ranges for edge in edges)
    return loan


def test_the_ends_of_layers_are_lent() -> None:
    loan = lent(config_of(), [2 * PAGE, PAGE] * LAYERS)
    assert loan.blocks == 7
    assert loan.ranges == [
        *((7 * PAGE, 9 * PAGE), (9 * PAGE, 10 * PAGE)),
        *((17 * PAGE, 19 * PAGE), (19 * PAGE, 20 * PAGE)),
        *((27 * PAGE, 29 * PAGE), (29 * PAGE, 30 * PAGE)),
    ]
    assert loan.pieces(30 * PAGE) == [size * PAGE for size in (7, 2, 1, 7, 2, 1, 7, 2, 1)]


def test_where_blocks_are_outermost_the_end_of_the_buffer_is_lent() -> None:
    loan = lent(config_of(blocks_outermost=True), [2 * PAGE, PAGE] * LAYERS)
    assert loan.blocks == 7
    assert loan.pieces(30 * PAGE) == [21 * PAGE, *[2 * PAGE, PAGE] * LAYERS]
    assert loan.pieces(31 * PAGE)[-1] == PAGE, "what the buffer has beyond its last block"


@pytest.mark.parametrize(
    ("sizes", "blocks"),
    [([1], 9), ([1, 1, 1], 9), ([1, 1, 1, 1], 8), ([2, 1, 2], 8), ([8] * 3, 2), ([3] * 6, 4)],
)
def test_as_many_blocks_stay_as_can_be(sizes: list[int], blocks: int) -> None:
    assert lent(config_of(), [size * PAGE for size in sizes]).blocks == blocks


@pytest.mark.parametrize("blocks_outermost", [False, True])
def test_all_of_a_loan_leaves_the_blocks_that_it_says(blocks_outermost: bool) -> None:
    config, sizes = config_of(blocks_outermost=blocks_outermost), [2 * PAGE, PAGE] * LAYERS
    loan = lent(config, sizes)
    assert taken(loan.ranges, sizes) == loan.ranges
    assert blocks_beside(config, loan.ranges) == loan.blocks
    assert blocks_beside(config, []) == BLOCKS


def test_a_part_of_a_loan_is_at_its_end_whatever_layers_it_is_for() -> None:
    config = config_of(blocks_outermost=True)
    loan = lent(config, [2 * PAGE, PAGE] * LAYERS)
    last = taken(loan.ranges, [2 * PAGE, PAGE])
    assert last == [*loan.ranges[-2:]]
    assert blocks_beside(config, last) == 9
    twice = taken(loan.ranges, [2 * PAGE] * 2)
    assert twice == [loan.ranges[2], loan.ranges[4]]
    assert blocks_beside(config, twice) == 8
    assert taken(loan.ranges, [2 * PAGE] * (LAYERS + 1)) is None
    assert taken(loan.ranges, [3 * PAGE]) is None


@pytest.mark.parametrize("sizes", [[9], [8] * 4, [5] * 4])
def test_what_leaves_no_block_beside_the_null_block_is_not_lent(sizes: list[int]) -> None:
    assert find_loan(config_of(), [size * PAGE for size in sizes], PAGE) is None


def test_pages_that_hold_parts_of_blocks_that_stay_are_not_lent() -> None:
    block = PAGE - 512
    loan = lent(config_of(block=block), [PAGE] * LAYERS)
    assert loan.blocks == 8, "of one block in each layer no whole page could be lent"
    for layer in range(LAYERS):
        begin = layer * BLOCKS * block
        kept = (begin, begin + loan.blocks * block)
        assert all(end <= kept[0] or kept[1] <= first for first, end in loan.ranges)


def test_groups_of_layers_that_share_bytes_lend_none_that_a_kept_block_has() -> None:
    config = config_of()
    (whole,) = config.kv_cache_tensors
    two = KVCacheTensor(whole.size, ["window0"], whole.layer_stride, PAGE, offset=BLOCKS * PAGE)
    config.kv_cache_tensors.append(two)
    assert lent(config, [5 * PAGE] * LAYERS).blocks == 5


MIB = 1 << 20


@pytest.mark.parametrize(
    ("layers", "hidden", "inner", "kv_heads"),
    [(64, 5120, 27648, 8), (80, 8192, 28672, 8), (32, 4096, 14336, 8)],
    ids=["32B", "70B", "8B"],
)
def test_models_weights_fill_the_ends_of_layers(
    layers: int, hidden: int, inner: int, kv_heads: int
) -> None:
    """Of GPUs' pages, with what two engines share."""
    page = 2 * MIB
    sizes = [-(-hidden * inner * parts // page) * page for parts in (2, 1)]
    block = 2 * 2 * 16 * kv_heads * 128
    blocks = 2 * sum(sizes) // block + 3
    names = [f"layer{n}" for n in range(layers)]
    tensor = KVCacheTensor(layers * blocks * block, names, blocks * block, block)
    config = SimpleNamespace(num_blocks=blocks, kv_cache_tensors=[tensor])
    loan = find_loan(config, sizes * layers, page)
    assert loan is not None
    given_up = (blocks - loan.blocks) * block
    assert sum(sizes) <= given_up <= sum(sizes) + 2 * page, "two pages of each layer are cut"
    assert len(loan.pieces(layers * blocks * block)) <= 3 * layers + 1
