"""Copies KV from page to page where the device is the host (CPUs), and says what a copy has to do.

The kernel for GPUs is tested against this module.
"""

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from shoal.runtime.clock import Clock
from shoal.runtime.engine.kv.carry_plan import Numbers, Piece
from shoal.runtime.engine.kv.kv_memory import HeldBuffer
from shoal.runtime.engine.kv.kv_pages import Page, Side
from shoal.runtime.engine.kv.portions import Copy, Portion

CHUNK_TOKENS = 4096
"""Tokens that are copied at once; their indices take memory."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def plain_order(page: Page, token_bytes: int, element_bytes: int) -> torch.Tensor:
    """Return where a token's elements are if they are adjacent; see ``copy``."""
    elements = torch.arange(token_bytes // element_bytes)
    return torch.arange(page.tokens)[:, None] * (page.token_stride // element_bytes) + elements


class HostCopier:
    """Copies on CPUs, where a call returns once the work is done.

    Args:
        order: from a KV group and a page of it to where the elements of each token are
            (``copy_portion``).
        clock: a monotonic clock.
    """

    def __init__(
        self, order: Callable[[int, Page], torch.Tensor], clock: Clock = time.monotonic
    ) -> None:
        self._order, self._clock = order, clock

    def after_steps(self, *, beside: bool) -> Copy:
        """See ``Copier.after_steps``: steps have ended when their calls return."""
        del beside
        return self._copy

    def at_once(self) -> Copy:
        """See ``Copier.at_once``."""
        return self._copy

    def settle(self) -> None:
        """See ``Copier.settle``: a copy is over when the call returns."""

    def _copy(
        self, portions: Sequence[Portion], table: Numbers | None = None
    ) -> Callable[[], float]:
        del table
        began = self._clock()
        for portion in portions:
            copy_portion(portion, self._orders(portion))
        seconds = self._clock() - began
        return lambda: seconds

    def _orders(self, portion: Portion) -> tuple[torch.Tensor, torch.Tensor]:
        packed = portion.source if portion.source.packed else portion.target
        plain = portion.target if portion.source.packed else portion.source
        order = self._order(portion.group, plain.page)
        if not packed.packed:
            return order, self._order(portion.group, portion.target.page)
        element = portion.token_bytes // order.shape[1]
        other = plain_order(packed.page, portion.token_bytes, element)
        return (other, order) if portion.source.packed else (order, other)


def copy_portion(portion: Portion, orders: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Copy a portion between buffers that are tensors; they may be the same.

    Args:
        portion: what to copy.
        orders: of the source and of the target: where the elements of each token of a head are,
            counted in elements from where the head's part of the page begins,
            ``[tokens, elements]``.
    """
    word = portion.token_bytes // orders[0].shape[1]
    assert isinstance(portion.memory, HeldBuffer)
    target = portion.memory.bytes.view(_WORDS[word])
    for piece, mapped in portion.pieces:
        assert isinstance(mapped, HeldBuffer)
        source = mapped.bytes.view(_WORDS[word])
        for pages_and_tokens in _chunks(piece):
            for head in range(piece.strip.heads):
                read = _indices(
                    pages_and_tokens[:2], portion.source, piece.strip.source + head, orders[0], word
                )
                written = _indices(
                    pages_and_tokens[2:], portion.target, piece.strip.target + head, orders[1], word
                )
                for first, after in zip(portion.source.layers, portion.target.layers, strict=True):
                    target[written + after // word] = source[read + first // word]


def _chunks(piece: Piece) -> Iterator[Numbers]:
    """Yield page and token of the source and of the target for each token, some at a time."""
    *firsts, counts = piece.runs
    ends = np.cumsum(counts)
    within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    each = np.stack([np.repeat(first, counts) for first in firsts])
    each[1] += within
    each[3] += within
    for begin in range(0, each.shape[1], CHUNK_TOKENS):
        yield each[:, begin : begin + CHUNK_TOKENS]


def _indices(
    pages_and_tokens: Numbers, side: Side, head: int, order: torch.Tensor, word: int
) -> torch.Tensor:
    """Return the place of each token's elements in the first layer, in elements."""
    page, token = pages_and_tokens
    begin = (page * side.page.stride + head * side.page.head_stride) // word
    return torch.from_numpy(begin)[:, None] + order[torch.from_numpy(token)]
