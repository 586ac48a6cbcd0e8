"""Which KV a member of a unit reads from which members of another unit, and where it puts it.

A member holds some heads, in some layers, of every token of its unit's requests, and a block holds
as many tokens as the layout's geometry says. So what two members have in common is some adjacent
heads of some adjacent layers, a *strip*, and within it *runs* of tokens that are adjacent in both
members' blocks.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.policies.values.kv_geometry import KvGeometry
from shoal.policies.values.layouts import Layout, Unit
from shoal.runtime.engine.groups.head_order import head_shard
from shoal.runtime.engine.kv.kv_pages import KvPages, Page
from shoal.runtime.engine.link.instructions import Arrival

Numbers = NDArray[np.int64]

NULL_BLOCK = 0
"""vLLM's null block: id 0 in every pool, virtual or physical. In a request's blocks it stands for
KV that nothing needs any more."""


class Strip(NamedTuple):
    """Adjacent heads of adjacent layers that a member reads from one engine."""

    engine: int
    """The engine that has them."""
    source: int
    """Place of the first of them among the heads of that engine."""
    target: int
    """Place of the first of them among the reader's own heads."""
    heads: int
    layers: range
    """Numbers of the layers in the whole model."""


class Span(NamedTuple):
    """Tokens of a request, and the blocks of two members that hold them.

    The first block of each list begins with token 0: tokens are counted from there.
    """

    begin: int
    end: int
    source: Sequence[int]
    target: Sequence[int]


class Runs(NamedTuple):
    """Runs of adjacent tokens, as arrays of equal length.

    A run is some tokens from the one on that a page and a number in it name, on either side.
    """

    source_page: Numbers
    source_token: Numbers
    target_page: Numbers
    target_token: Numbers
    tokens: Numbers


class Piece(NamedTuple):
    """What a member reads from one engine in one go."""

    strip: Strip
    runs: Runs

    @property
    def tokens(self) -> int:
        """Tokens that are read, of each head and layer."""
        return int(self.runs.tokens.sum())

    def size(self, token_bytes: int) -> int:
        """Return the bytes that are read, if one token of one head and layer has so many."""
        return self.tokens * self.strip.heads * len(self.strip.layers) * token_bytes


def pieces(
    source: Unit,
    target: Unit,
    engine: int,
    requests: Iterable[Arrival],
    group: int,
    pages: KvPages,
    max_sp: int,
    held: KvPages | None = None,
) -> list[Piece]:
    """Return all that a member reads of one KV group.

    Args:
        source: the unit that has the KV.
        target: the unit that is to have it.
        engine: the member that reads.
        requests: the requests, with their blocks.
        group: number of the KV group.
        pages: its pages where it is to be.
        max_sp: the node's largest SP degree.
        held: its pages where it is; None: they are alike.
    """
    coming = [request for request in requests if request.begin < request.computed]
    if not coming:
        return []
    of_source, of_target = (held or pages).page(source.layout), pages.page(target.layout)
    targets = [request.target[engine][group] for request in coming]
    by_engine = dict[int, Runs]()
    found = list[Piece]()
    for strip in strips(source, target, engine, pages.geometry, max_sp):
        if strip.engine not in by_engine:
            spans = [
                Span(r.begin - r.since, r.computed - r.since, r.source[strip.engine][group], blocks)
                for r, blocks in zip(coming, targets, strict=True)
            ]
            by_engine[strip.engine] = runs(spans, of_source, of_target)
        found.append(Piece(strip, by_engine[strip.engine]))
    return found


def heads_of(member: int, layout: Layout, kv_heads: int, max_sp: int) -> range:
    """Return the KV heads of the whole model that a member of a layout holds.

    Args:
        member: the member's number in the unit.
        layout: the unit's layout.
        kv_heads: KV heads of the whole model. With more members, several hold the same head.
        max_sp: the node's largest SP degree, which decides the order of the heads.
    """
    shard = head_shard(layout.place(member).rank, layout.tp, max_sp)
    if layout.tp > kv_heads:
        head = shard * kv_heads // layout.tp
        return range(head, head + 1)
    each = kv_heads // layout.tp
    return range(shard * each, (shard + 1) * each)


def layers_of(member: int, layout: Layout, layers: int) -> range:
    """Return the layers of the whole model that a member of a layout holds.

    Args:
        member: the member's number in the unit.
        layout: the unit's layout.
        layers: layers of the whole model, a multiple of the layout's stages.
    """
    each = layers // layout.pp
    stage = layout.place(member).stage
    return range(stage * each, (stage + 1) * each)


def strips(
    source: Unit, target: Unit, engine: int, geometry: KvGeometry, max_sp: int
) -> list[Strip]:
    """Return what a member of ``target`` reads, by layers, and by its heads within each of these.

    Where several engines hold a head, a member reads its own memory if that has it, and otherwise
    the members that need the head read it from different engines.

    Args:
        source: the unit that has the KV.
        target: the unit that is to have it.
        engine: the member that reads.
        geometry: of the KV group: layers and KV heads of the whole model.
        max_sp: the node's largest SP degree.
    """
    own = layers_of(target.engines.index(engine), target.layout, geometry.layers)
    stages = {layers_of(i, source.layout, geometry.layers) for i in range(source.size)}
    return [
        strip
        for held in sorted(stages, key=lambda layers: layers.start)
        if (layers := range(max(held.start, own.start), min(held.stop, own.stop)))
        for strip in _strips_of(layers, source, target, engine, geometry, max_sp)
    ]


def _strips_of(
    layers: range, source: Unit, target: Unit, engine: int, geometry: KvGeometry, max_sp: int
) -> list[Strip]:
    """Return what a member reads of layers that one stage holds, on either side."""
    held, needed = (
        {
            e: heads_of(i, unit.layout, geometry.heads, max_sp)
            for i, e in enumerate(unit.engines)
            if layers.start in layers_of(i, unit.layout, geometry.layers)
        }
        for unit in (source, target)
    )
    found = list[Strip]()
    for slot, head in enumerate(needed[engine]):
        holders = [e for e in held if head in held[e]]
        readers = [e for e in needed if head in needed[e]]
        chosen = holders[readers.index(engine) % len(holders)]
        holder = engine if engine in holders else chosen
        place = held[holder].index(head)
        if found and found[-1].engine == holder and found[-1].source + found[-1].heads == place:
            found[-1] = found[-1]._replace(heads=found[-1].heads + 1)
        else:
            found.append(Strip(holder, place, slot, 1, layers))
    return found


def runs(spans: Iterable[Span], source: Page, target: Page) -> Runs:
    """Return the runs of all spans.

    No run is longer than the smaller of the two pages. Null blocks are left out.

    Args:
        spans: tokens with the blocks that have them and that are to have them.
        source: pages of the layout that has them.
        target: pages of the layout that is to have them.
    """
    full = [span for span in spans if span.begin < span.end]
    if not full:
        return Runs(*np.empty((5, 0), dtype=np.int64))
    # All spans at once: requests are many and their spans short, if most was copied ahead.
    longest = min(source.tokens, target.tokens)
    begin, end = np.array([(span.begin, span.end) for span in full], dtype=np.int64).T
    first = begin // longest
    counts = -(-end // longest) - first
    of = np.repeat(np.arange(len(full)), counts)
    nth = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    edge = (first[of] + nth) * longest
    token = np.maximum(edge, begin[of])
    found = np.empty((5, len(of)), dtype=np.int64)
    found[0], found[1] = _where([span.source for span in full], of, token, source)
    found[2], found[3] = _where([span.target for span in full], of, token, target)
    found[4] = np.minimum(edge + longest, end[of]) - token
    if (null := (found[0] < source.per_block) | (found[2] < target.per_block)).any():
        found = found[:, ~null]
    return Runs(*found)


def _where(
    blocks: Sequence[Sequence[int]], of: Numbers, tokens: Numbers, page: Page
) -> tuple[Numbers, Numbers]:
    """Return the page that holds each token, and which token of the page it is.

    Args:
        blocks: the blocks of every span.
        of: the number of each token's span.
        tokens: the numbers of the tokens, each within its request.
        page: pages of these blocks.
    """
    sizes = np.array([len(ids) for ids in blocks], dtype=np.int64)
    ids = np.fromiter(chain.from_iterable(blocks), dtype=np.int64, count=int(sizes.sum()))
    nth, within = np.divmod(tokens, page.tokens)
    block, part = np.divmod(nth, page.per_block)
    return ids[(np.cumsum(sizes) - sizes)[of] + block] * page.per_block + part, within
