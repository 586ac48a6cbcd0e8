"""Which blocks of an engine's KV buffer have memory behind them: all, or the first ones.

The buffer keeps its addresses. The memory of the other blocks is free for something else.
"""

from collections.abc import Iterator
from typing import Any

import torch

from shoal.runtime.engine.weights.sharing.pages import Pages


class KvBacking:
    """The memory behind one engine's KV buffer.

    Args:
        buffer: the buffer, int8.
        file: a descriptor of its memory.
        config: vLLM's ``KVCacheConfig``, which says where blocks are.
        pages: exchanges what is behind addresses.
    """

    def __init__(self, buffer: torch.Tensor, file: int, config: Any, pages: Pages) -> None:
        self._buffer, self._file = buffer, file
        self._config, self._pages = config, pages
        self.num_blocks = int(config.num_blocks)
        """All blocks, vLLM's null block included."""
        self._without: list[tuple[int, int]] = []
        """Ranges of the buffer that have no memory: begin and end of each, in bytes."""

    def blocks_without(self, size: int) -> int:
        """Return how many first blocks keep their memory if so many bytes are given up; -1: none.

        It is the most that can be kept.
        """
        low, high = -1, self.num_blocks
        while low < high:
            middle = -(-(low + high) // 2)
            if sum(end - begin for begin, end in self._beyond(middle)) >= size:
                low = middle
            else:
                high = middle - 1
        return low

    def keep(self, blocks: int) -> None:
        """Give up the memory of all but the first blocks, whose contents nobody needs.

        It is gone for other engines, too, which have the buffer mapped. Whoever touches it in this
        process ends the process.
        """
        without = list(self._beyond(blocks))
        if without == self._without:
            return
        self.keep_all()
        for begin, end in without:
            self._pages.discard(self._buffer[begin:end])
            self._pages.block(self._buffer[begin:end])
        self._without = without

    def keep_all(self) -> None:
        """Let all blocks have memory again; of what was given up they have zeros."""
        for begin, end in self._without:
            self._pages.map(self._buffer[begin:end], self._file, begin, writable=True)
        self._without = []

    def _beyond(self, blocks: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of whole pages in which no block is one of the first ones."""
        page, covered = self._pages.page, 0
        for kept, then in (*sorted(self._kept(max(blocks, 0))), (self._buffer.nbytes, 0)):
            begin, end = -(-covered // page) * page, kept // page * page
            if begin < end:
                yield begin, end
            covered = max(covered, then)

    def _kept(self, blocks: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of the first blocks."""
        for tensor in self._config.kv_cache_tensors if blocks else ():
            if tensor.block_stride > tensor.layer_stride:  # a block has the pages of all layers
                yield 0, blocks * tensor.block_stride
                continue
            for layer in range(len(tensor.layers)):
                begin = tensor.offset + layer * tensor.layer_stride
                yield begin, begin + blocks * tensor.block_stride
