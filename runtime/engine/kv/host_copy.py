"""Copies KV from page to page where the device is the host (CPUs), and says what a copy has to do.

The kernel for GPUs is tested against this module.
"""

from collections.abc import Iterator

import numpy as np
import torch

from shoal.runtime.engine.kv.carry_plan import Numbers, Piece
from shoal.runtime.engine.kv.kv_pages import KvPages, Page

CHUNK_TOKENS = 4096
"""Tokens that are copied at once; their indices take memory."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def plain_order(page: Page, token_bytes: int, element_bytes: int) -> torch.Tensor:
    """Return where a token's elements are if they are adjacent; see ``copy``."""
    elements = torch.arange(token_bytes // element_bytes)
    return torch.arange(page.tokens)[:, None] * (page.token_stride // element_bytes) + elements


def copy(
    target: torch.Tensor,
    source: torch.Tensor,
    pages: KvPages,
    piece: Piece,
    insides: tuple[Page, Page],
    orders: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Copy what a member reads from one engine, of all layers.

    Args:
        target: the member's buffer, int8.
        source: the engine's buffer, int8; may be the same.
        pages: the pages of the KV group.
        piece: what to copy.
        insides: the inside of the source's pages, and of the target's.
        orders: of both: where the elements of each token of a head are, counted in elements from
            where the head's part of the page begins, ``[tokens, elements]``.
    """
    elements = orders[0].shape[1]
    word = pages.token_bytes // elements
    source_words, target_words = (tensor.view(_WORDS[word]) for tensor in (source, target))
    strip = piece.strip
    for pages_and_tokens in _chunks(piece):
        for head in range(strip.heads):
            read, written = (
                _indices(page, token, inside, first + head, order, word)
                for (page, token), inside, first, order in zip(
                    (pages_and_tokens[:2], pages_and_tokens[2:]),
                    insides,
                    (strip.source, strip.target),
                    orders,
                    strict=True,
                )
            )
            for layer in pages.layers:
                first_word = layer // word
                target_words[written + first_word] = source_words[read + first_word]


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
    page: Numbers, token: Numbers, inside: Page, head: int, order: torch.Tensor, word: int
) -> torch.Tensor:
    """Return the place of each token's elements in the first layer, in elements."""
    begin = (page * inside.stride + head * inside.head_stride) // word
    return torch.from_numpy(begin)[:, None] + order[torch.from_numpy(token)]
