"""The partitions that ``adaptive`` compares."""

from collections.abc import Iterator

from shoal.policies.static import place_group, with_singles
from shoal.policies.values.layouts import Layout, Unit, layouts_up_to
from shoal.policies.values.partition import Partition, units_of
from shoal.policies.values.snapshot import Snapshot


def widest(partition: Partition) -> int:
    """Return the engines of its largest unit."""
    return max(unit.size for unit in partition)


def candidates_of(snapshot: Snapshot, needed: int) -> Iterator[Partition]:
    """Yield each layout for all engines, and groups beside narrower units where somebody needs one.

    Args:
        snapshot: the node.
        needed: engines of the narrowest unit that holds every request.
    """
    layouts = layouts_up_to(snapshot.max_group)
    seen: set[Partition] = set()
    classes = len(snapshot.targets) > 1
    for wide in layouts:
        if wide.world_size < needed:
            continue
        options = [with_singles(snapshot, units_of(snapshot.engines, wide))]
        if (classes or wide.world_size == needed > 1) and 1 < wide.world_size < snapshot.engines:
            options += _beside(snapshot, wide)
        for option in options:
            if option not in seen and widest(option) >= needed:
                seen.add(option)
                yield option


def _beside(snapshot: Snapshot, wide: Layout) -> Iterator[Partition]:
    """Yield the partitions with one such group, by the layout of the other engines."""
    group = place_group(snapshot, wide)
    taken = {engine for unit in group for engine in unit.engines}
    for narrow in layouts_up_to(wide.world_size // 2) if group else ():
        units = units_of(snapshot.engines, narrow)
        rest = [unit for unit in units if not taken.intersection(unit.engines)]
        yield with_singles(snapshot, [*group, *rest])


def with_lane(snapshot: Snapshot, needed: int, lane: Unit) -> Iterator[Partition]:
    """Yield the partitions with this group, by the layout of the other engines."""
    seen: set[Partition] = set()
    taken = set(lane.engines)
    for layout in layouts_up_to(snapshot.max_group):
        units = units_of(snapshot.engines, layout)
        option = with_singles(snapshot, [lane, *(u for u in units if taken.isdisjoint(u.engines))])
        if option not in seen and widest(option) >= needed:
            seen.add(option)
            yield option
