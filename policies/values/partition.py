"""Partitions of a node into units.

The engines of a unit are an aligned, adjacent run whose length is a power of two: ``(0, 1)``,
``(2, 3)``, ``(0, 1, 2, 3)``, never ``(1, 2)``. The units of a node always partition its engines.
"""

import functools
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from shoal.policies.values.layouts import (
    Engines,
    Layout,
    Unit,
    alone,
    layouts_up_to,
    tensor_parallel,
    unit_of,
)

Partition = tuple[Unit, ...]
"""Units that cover every engine of the node once, ordered by their first engine."""


class PartitionError(ValueError):
    """A partition that the node cannot form; the message says which unit is wrong and why."""


def singles(engines: int) -> Partition:
    """Return the all-DP partition of ``engines`` engines."""
    return tuple(map(alone, range(engines)))


@functools.cache  # policies ask for the same ones in every decision
def units_of(engines: int, layout: Layout) -> Partition:
    """Return the aligned units of a layout among ``engines`` engines; a remainder is left out."""
    size = layout.world_size
    return tuple(unit_of(first, layout) for first in range(0, engines - size + 1, size))


def parse_partition(
    units: Iterable[Iterable[int]],
    *,
    engines: int,
    max_group: int,
    max_pp: int = 1,
    names: Mapping[Engines, str] = MappingProxyType({}),
) -> Partition:
    """Check a requested partition and return it in canonical order.

    Args:
        units: one list of engine numbers per unit, in any order.
        engines: number of engines of the node.
        max_group: size of the largest group of the node.
        max_pp: most pipeline stages of a group of the node.
        names: names of the layouts of units, by their engines in ascending order. A unit without a
            name is one engine alone, or a TP group.

    Raises:
        PartitionError: a unit is empty, too large, not aligned or not adjacent, its layout is none
            of the node's or of another size, or the units do not cover every engine exactly once.
    """
    partition = tuple(
        sorted(
            _in_layout(_parse_unit(unit, engines, max_group), names, max_group, max_pp)
            for unit in units
        )
    )
    _check_cover(partition, engines)
    return partition


def _parse_unit(engines: Iterable[int], node_engines: int, max_group: int) -> Unit:
    members = tuple(sorted(engines))
    if not members:
        raise PartitionError("a unit is empty: every unit names at least one engine")
    for engine in members:
        if not 0 <= engine < node_engines:
            raise PartitionError(
                f"unit {list(members)} names engine {engine}: "
                f"this node has engines 0..{node_engines - 1}"
            )
    sizes = [layout.world_size for layout in layouts_up_to(max_group)]
    if len(members) not in sizes:
        raise PartitionError(
            f"unit {list(members)} has {len(members)} engines: allowed sizes are {sizes}"
        )
    unit = tensor_parallel(members)
    if unit != unit_of(unit.leader, unit.layout):
        raise PartitionError(
            f"unit {list(members)} is not an aligned, adjacent group of {unit.size} engines"
        )
    return unit


def _in_layout(unit: Unit, names: Mapping[Engines, str], max_group: int, max_pp: int) -> Unit:
    """Return the unit of the same engines in the layout that was asked for."""
    name = names.get(unit.engines)
    if name is None:
        return unit
    allowed = [of for of in layouts_up_to(max_group, max_pp) if of.world_size == unit.size]
    for layout in allowed:
        if layout.name == name:
            return Unit(unit.engines, layout)
    raise PartitionError(
        f"unit {list(unit.engines)} cannot have the layout {name!r}: "
        f"layouts of {unit.size} engines are {', '.join(of.name for of in allowed)} on this node"
    )


def _check_cover(partition: Partition, engines: int) -> None:
    seen: set[int] = set()
    for unit in partition:
        for engine in unit.engines:
            if engine in seen:
                raise PartitionError(f"engine {engine} is in more than one unit")
            seen.add(engine)
    missing = sorted(set(range(engines)) - seen)
    if missing:
        raise PartitionError(f"engines {missing} are in no unit: the units must cover every engine")
