"""Which part of every layer an engine keeps, and from whom it gets the others, in which order.

SiDP (section 4) gives whole layers to owners. Here each engine keeps the same part of every layer,
because a TP layout reads just such a part. Members have the parts in bit-reversed order: so the
part that an engine computes in a layout of ``2n`` members lies inside the part that it computes in
a layout of ``n``. An engine that keeps its part of ``n`` has all wider layouts' parts as views.
Attention has the order of its heads instead (``head_order``), where this is nested, too.
"""

from collections.abc import Callable
from typing import NamedTuple

Order = Callable[[int, int], int]
"""Returns which of so many equal parts a member computes: its place in a layout, and the parts."""


def nested_shard(place: int, of: int) -> int:
    """Return which of ``of`` equal parts the member at ``place`` computes.

    Args:
        place: the member's place in an aligned group, from 0.
        of: members of the group, a power of two.
    """
    bits = of.bit_length() - 1
    return sum((place >> bit & 1) << (bits - 1 - bit) for bit in range(bits))


def rank_order(place: int, _of: int) -> int:
    """Return the same in the order of ranks, which the vocabulary has."""
    return place


class Heads(NamedTuple):
    """Attention whose projections are shared."""

    kv_heads: int
    """Of a layer of the whole model; the parts divide them."""
    order: Order
    """Which part of the heads a member computes (``head_order.head_shard``)."""


class Source(NamedTuple):
    """A member that keeps a part of what another member computes with."""

    place: int
    """Its place among the members that share weights."""
    part: int
    """Which part it is, counted from the first that the reader needs."""


def sources(place: int, share: int, tp: int, order: Order = nested_shard) -> list[Source]:
    """Return who keeps the parts that a member needs in a layout, in the order of reading.

    Each member begins with the next one, so that no two read the same member's memory at a time
    (SiDP's peak shifting). What it keeps itself comes last.

    Args:
        place: the member's place among those that share weights.
        share: how many members share weights, each keeping one part of so many.
        tp: members of the layout, at most ``share``.
        order: of the parts.
    """
    count = share // tp
    first = order(place % tp, tp) * count
    others = [(place + distance) % share for distance in range(1, share + 1)]
    found = [Source(other, order(other, share) - first) for other in others]
    return [source for source in found if 0 <= source.part < count]
