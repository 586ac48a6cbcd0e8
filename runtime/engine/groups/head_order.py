"""Who holds which heads, and who exchanges with whom, when a group runs steps by sequence.

Shift Parallelism, 3.2 and 3.3.1. A TP layout of ``tp`` engines runs a step as SP over a *base*:
``base.sp`` members share the tokens, each as one of ``base.tp`` engines that share the weights, and
``tp = base.sp * base.tp``. Member ``r`` has place ``r % base.tp`` in its TP group, whose members
are adjacent, and place ``r // base.tp`` in its SP group, whose members are ``base.tp`` apart. All
functions here do arithmetic on such places.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Base:
    """The SP and TP degrees with which a TP layout runs a step by sequence."""

    sp: int
    tp: int


def base_of(tp: int, max_sp: int) -> Base:
    """Return the base of a TP layout: as much SP as is allowed, TP for the rest.

    Args:
        tp: members of the layout, a power of two.
        max_sp: largest SP degree, a power of two.
    """
    sp = min(tp, max_sp)
    return Base(sp, tp // sp)


def head_shard(member: int, tp: int, max_sp: int) -> int:
    """Return which of ``tp`` equal shards of the attention heads ``member`` holds.

    Shift Parallelism, 3.3.1. A member of the base computes the heads of its place in the TP group,
    and the all-to-all leaves it with the part of these that belongs to its place in the SP group.
    The KV cache holds that part, so the TP layout must compute the same heads. The base is itself a
    TP layout that runs by sequence, so its shards are in the order that its own base gives them.

    Args:
        member: place in the layout.
        tp: members of the layout.
        max_sp: largest SP degree; 1, or one that spans the layout, gives the order of the members.
    """
    base = base_of(tp, max_sp)
    if base.sp == 1:
        return member
    return head_shard(member % base.tp, base.tp, max_sp) * base.sp + member // base.tp


@dataclass(frozen=True)
class Peers:
    """Which members of a layout exchange: three ways to divide all of them into groups.

    Attributes:
        sp: members that share a step's tokens: the SP groups.
        across: members of an SP group that exchange KV heads; each holds another head.
        within: members of an SP group that hold the same KV head: the GQA groups.
    """

    sp: tuple[tuple[int, ...], ...]
    across: tuple[tuple[int, ...], ...]
    within: tuple[tuple[int, ...], ...]


def peers_of(tp: int, max_sp: int, kv_heads: int) -> Peers:
    """Return who exchanges with whom in a TP layout (Shift Parallelism, Algorithms 1 and 2).

    With at least as many KV heads as members, every GQA group is one member, and KV heads are
    exchanged like queries.

    Args:
        tp: members of the layout.
        max_sp: largest SP degree.
        kv_heads: KV heads of a layer of the whole model.
    """
    base = base_of(tp, max_sp)
    across = min(base.sp, max(1, kv_heads // base.tp))
    size = base.sp // across
    groups = tuple(tuple(range(place, tp, base.tp)) for place in range(base.tp))
    return Peers(
        sp=groups,
        across=tuple(group[place::size] for group in groups for place in range(size)),
        within=tuple(
            group[first : first + size] for group in groups for first in range(0, base.sp, size)
        ),
    )
