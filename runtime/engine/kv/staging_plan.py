"""What goes through which part of the host's memory: KV of engines that no peer can read.

A *slot* is a part of a reader's memory that both processes have mapped. The engine that has the KV
copies into a slot what the reader asks for, with all heads of a token together and all tokens one
after another. The reader copies it from there to where it belongs. So each copy goes by the same
plan as a copy from memory to memory (``carry_plan.py``), with a packed page on one side.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from shoal.policies.values.layouts import Layout
from shoal.runtime.engine.kv.carry_plan import Piece, Runs
from shoal.runtime.engine.kv.kv_memory import Mapped
from shoal.runtime.engine.kv.kv_pages import KvPages, Page, Side
from shoal.runtime.engine.kv.portions import Portion

MOST_RUNS = 4096
"""Runs that are copied at once: a slot has room for as many in its table."""


class Ask(NamedTuple):
    """What an engine is asked to copy into a slot."""

    slot: int
    group: int
    """The KV group."""
    layout: Layout
    """That of the unit which has the KV."""
    piece: Piece


def chunks(piece: Piece, pages: KvPages, limit: int) -> Iterator[Piece]:
    """Yield the parts of a piece that go through a slot one after another.

    Args:
        piece: what a member reads from one engine.
        pages: those of its KV group.
        limit: bytes of a slot, at least those of a block.
    """
    runs = piece.runs
    layers = len(piece.strip.layers)
    ends = np.cumsum(runs.tokens) * (piece.strip.heads * pages.token_bytes * layers)
    first, count = 0, len(ends)
    while first < count:
        before = ends[first - 1] if first else 0
        fits = int(np.searchsorted(ends, before + limit, side="right"))
        last = min(max(fits, first + 1), first + MOST_RUNS)
        yield piece._replace(runs=Runs(*(values[first:last] for values in runs)))
        first = last


def gathered(ask: Ask, pages: KvPages, own: Mapped, slot: Mapped) -> Portion:
    """Return what the engine that has the KV copies into a slot.

    Args:
        ask: what a reader asks for.
        pages: those of the KV group.
        own: the engine's own buffer.
        slot: the slot.
    """
    strip, runs = ask.piece
    packed, first, zeros = _packed(ask.piece, pages)
    piece = Piece(
        strip._replace(target=0),
        runs._replace(target_page=first, target_token=zeros),
    )
    side = pages.side(ask.layout, strip.layers)
    return Portion(ask.group, pages.token_bytes, side, packed, [(piece, own)], slot)


def scattered(ask: Ask, pages: KvPages, target: Layout, slot: Mapped, own: Mapped) -> Portion:
    """Return what the reader copies out of a slot.

    Args:
        ask: what it has asked for.
        pages: those of the KV group.
        target: the layout of the reader's unit.
        slot: the slot.
        own: the reader's own buffer.
    """
    strip, runs = ask.piece
    packed, first, zeros = _packed(ask.piece, pages)
    piece = Piece(
        strip._replace(source=0),
        runs._replace(source_page=first, source_token=zeros),
    )
    side = pages.side(target, strip.layers)
    return Portion(ask.group, pages.token_bytes, packed, side, [(piece, slot)], own)


def _packed(piece: Piece, pages: KvPages) -> tuple[Side, np.ndarray, np.ndarray]:
    """Return the packed side of a piece, and in it page and token at which each run begins.

    A run begins at a page of its own, whose stride is that of a token.
    """
    tokens, heads = piece.runs.tokens, piece.strip.heads
    row = heads * pages.token_bytes
    longest = int(tokens.max(initial=1))
    page = Page(heads, longest, 1, row, pages.token_bytes, row)
    size = int(tokens.sum()) * row
    layers = tuple(layer * size for layer in range(len(piece.strip.layers)))
    first = np.cumsum(tokens) - tokens
    return Side(page, layers, packed=True), first, np.zeros_like(first)
