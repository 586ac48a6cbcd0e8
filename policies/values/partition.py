"""Groups of engines and the partitions of a node into them.

A group is an aligned, adjacent run of engines whose size is a power of two: ``(0, 1)``, ``(2, 3)``,
``(0, 1, 2, 3)``, never ``(1, 2)``. The units of a node always partition its engines.
"""

from collections.abc import Iterable, Sequence

Group = tuple[int, ...]
"""The engines of one group, ascending. A single engine is a group of one."""

Partition = tuple[Group, ...]
"""Groups that cover every engine of the node once, ordered by their first engine."""


class PartitionError(ValueError):
    """A partition that the node cannot form; the message says which group is wrong and why."""


def leader_of(group: Group) -> int:
    """Return the engine that runs the group's scheduler: its first."""
    return group[0]


def layout_name(group: Group) -> str:
    """Return the layout a group runs in: ``dp`` alone, ``tp2``, ``tp4`` or ``tp8`` together."""
    return "dp" if len(group) == 1 else f"tp{len(group)}"


def singles(engines: int) -> Partition:
    """Return the all-DP partition of ``engines`` engines."""
    return tuple((engine,) for engine in range(engines))


def groups_of(engines: int, size: int) -> Partition:
    """Return the aligned groups of ``size`` among ``engines`` engines; a remainder is left out."""
    return tuple(tuple(range(first, first + size)) for first in range(0, engines - size + 1, size))


def degrees(max_group: int) -> tuple[int, ...]:
    """Return the group sizes a node with ``--max-group max_group`` can form: 1, 2, 4, ..."""
    return tuple(1 << k for k in range(max_group.bit_length()) if 1 << k <= max_group)


def parse_partition(units: Iterable[Iterable[int]], *, engines: int, max_group: int) -> Partition:
    """Check a requested partition and return it in canonical order.

    Args:
        units: one list of engine numbers per unit, in any order.
        engines: number of engines of the node.
        max_group: largest group the node was started with.

    Raises:
        PartitionError: a unit is empty, too large, not aligned or not adjacent, or the units do
            not cover every engine exactly once.
    """
    partition = tuple(sorted(_parse_group(unit, engines, max_group) for unit in units))
    _check_cover(partition, engines)
    return partition


def _parse_group(unit: Iterable[int], engines: int, max_group: int) -> Group:
    group = tuple(sorted(unit))
    if not group:
        raise PartitionError("a unit is empty: every unit names at least one engine")
    for engine in group:
        if not 0 <= engine < engines:
            raise PartitionError(
                f"unit {list(group)} names engine {engine}: this node has engines 0..{engines - 1}"
            )
    if len(group) not in degrees(max_group):
        raise PartitionError(
            f"unit {list(group)} has {len(group)} engines: "
            f"allowed sizes are {list(degrees(max_group))}"
        )
    first = group[0]
    if first % len(group) or group != tuple(range(first, first + len(group))):
        raise PartitionError(
            f"unit {list(group)} is not an aligned, adjacent group of {len(group)} engines"
        )
    return group


def _check_cover(partition: Sequence[Group], engines: int) -> None:
    seen: set[int] = set()
    for group in partition:
        for engine in group:
            if engine in seen:
                raise PartitionError(f"engine {engine} is in more than one unit")
            seen.add(engine)
    missing = sorted(set(range(engines)) - seen)
    if missing:
        raise PartitionError(f"engines {missing} are in no unit: the units must cover every engine")
