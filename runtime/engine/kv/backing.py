"""Which memory of an engine's KV buffer can be behind weights instead, and which blocks lose it.

The buffer keeps its addresses and its memory. Blocks with high ids are given up, so that nothing
but the weights uses what is behind them.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

Range = tuple[int, int]
"""Begin and end in the buffer, in bytes."""


class Loan(NamedTuple):
    """What KV can lend."""

    blocks: int
    """How many first blocks stay, vLLM's null block included."""
    ranges: Sequence[Range]
    """For each piece of memory that is wanted, in whole pages."""

    def pieces(self, size: int) -> list[int]:
        """Return the sizes of adjacent pieces of a buffer, of which each range is one."""
        edges = sorted({0, size, *chain.from_iterable(self.ranges)})
        return [end - begin for begin, end in pairwise(edges)]


def taken(ranges: Sequence[Range], sizes: Sequence[int]) -> list[Range] | None:
    """Return which ranges of a loan smaller pieces take: the last ones of their sizes.

    So what is lent is at the end of the loan, and few blocks lose it.

    Args:
        ranges: of the loan, ascending.
        sizes: of the pieces that are wanted, each as large as a range.

    Returns:
        The range of each piece; None: the loan has not so many.
    """
    left: dict[int, list[Range]] = {}
    for begin, end in ranges:
        left.setdefault(end - begin, []).append((begin, end))
    if any(sizes.count(size) > len(left.get(size, ())) for size in set(sizes)):
        return None
    return [left[size].pop() for size in reversed(sizes)][::-1]


def blocks_beside(config: Any, ranges: Sequence[Range]) -> int:
    """Return how many first blocks have no memory in some ranges, vLLM's null block included."""
    blocks = int(config.num_blocks)
    for base, after in _kept(config, 1):
        begins = [begin for begin, end in ranges if end > base]
        blocks = min([blocks, *(max(0, begin - base) // (after - base) for begin in begins)])
    return blocks


def find_loan(config: Any, sizes: Sequence[int], page: int) -> Loan | None:
    """Return the loan that leaves KV the most blocks; None: it leaves no block.

    Args:
        config: vLLM's ``KVCacheConfig``, which says where blocks are.
        sizes: of the pieces that are wanted, in bytes: multiples of a page.
        page: bytes of a page.
    """
    found, low, high = None, 2, int(config.num_blocks) + 1
    while low < high:
        middle = (low + high) // 2
        ranges = _packed(sizes, _beyond(config, middle, page))
        if ranges is None:
            high = middle
        else:
            found, low = Loan(middle, ranges), middle + 1
    return found


def _packed(sizes: Sequence[int], free: Iterable[Range]) -> list[Range] | None:
    """Put pieces into free ranges, each into the first that the one before has left (next fit)."""
    ranges: list[Range] = []
    left, (begin, end) = iter(free), (0, 0)
    for size in sizes:
        while end - begin < size:
            after = next(left, None)
            if after is None:
                return None
            begin, end = after
        ranges.append((begin, begin + size))
        begin += size
    return ranges


def _beyond(config: Any, blocks: int, page: int) -> Iterator[Range]:
    """Yield the ranges of whole pages in which no block is one of the first ones."""
    covered, (size,) = 0, {tensor.size for tensor in config.kv_cache_tensors}
    for kept, then in (*sorted(_kept(config, blocks)), (size, 0)):
        begin, end = -(-covered // page) * page, kept // page * page
        if begin < end:
            yield begin, end
        covered = max(covered, then)


def _kept(config: Any, blocks: int) -> Iterator[Range]:
    """Yield the ranges of the first blocks."""
    for tensor in config.kv_cache_tensors:
        if tensor.block_stride > tensor.layer_stride:  # a block has the pages of all layers
            yield 0, blocks * tensor.block_stride
            continue
        for layer in range(len(tensor.layers)):
            begin = tensor.offset + layer * tensor.layer_stride
            yield begin, begin + blocks * tensor.block_stride
