"""The partitions that ``adaptive`` compares."""

from collections.abc import Iterator

from shoal.policies.static import place_group, with_singles
from shoal.policies.values.layouts import Layout, Unit, layouts_up_to
from shoal.policies.values.partition import Partition, units_of
from shoal.policies.values.snapshot import Snapshot


def widest_size(partition: Partition) -> int:
    """Return the engines of its largest unit."""
    return max(unit.size for unit in partition)


def candidates_of(snapshot: Snapshot, needed: int, lane: Unit | None) -> Iterator[Partition]:
    """Yield each layout for all engines, and one group beside narrower units if it is needed.

    Args:
        snapshot: the node.
        needed: engines of the narrowest unit that holds every request.
        lane: the group that urgent requests have to themselves. Then it is each layout for all
            other engines. None: they have none.
    """
    options = _without_lane(snapshot, needed) if lane is None else _with_lane(snapshot, lane)
    return iter(dict.fromkeys(option for option in options if widest_size(option) >= needed))


def _without_lane(snapshot: Snapshot, needed: int) -> Iterator[Partition]:
    """Yield the partitions by the layout of all engines, or of the one group that is needed."""
    layouts = layouts_up_to(snapshot.max_group)
    for wide in layouts:
        if wide.world_size < needed:
            continue
        yield with_singles(snapshot, units_of(snapshot.engines, wide))
        if 1 < wide.world_size == needed < snapshot.engines:
            yield from _beside(snapshot, wide)


def _beside(snapshot: Snapshot, wide: Layout) -> Iterator[Partition]:
    """Yield the partitions with one such group, by the layout of the other engines."""
    group = place_group(snapshot, wide)
    taken = {engine for unit in group for engine in unit.engines}
    for narrow in layouts_up_to(wide.world_size // 2) if group else ():
        units = units_of(snapshot.engines, narrow)
        rest = [unit for unit in units if not taken.intersection(unit.engines)]
        yield with_singles(snapshot, [*group, *rest])


def _with_lane(snapshot: Snapshot, lane: Unit) -> Iterator[Partition]:
    """Yield the partitions with this group, by the layout of the other engines."""
    taken = set(lane.engines)
    for layout in layouts_up_to(snapshot.max_group):
        units = units_of(snapshot.engines, layout)
        yield with_singles(snapshot, [lane, *(u for u in units if taken.isdisjoint(u.engines))])
