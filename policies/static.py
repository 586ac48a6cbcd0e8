"""Policies that keep one layout and give each request to the unit where it costs least."""

from collections.abc import Callable, Iterable
from operator import attrgetter

from shoal.policies.lane import rooms_for
from shoal.policies.unit_costs import UnitCosts
from shoal.policies.values.layouts import Layout, Unit, alone
from shoal.policies.values.partition import Partition, singles, units_of
from shoal.policies.values.plan import Dispatch, Plan, Policy, Room
from shoal.policies.values.snapshot import LayoutState, PoolRequest, Snapshot, UnitState

Preference = Callable[[PoolRequest], int]
"""Returns 1 if a request should go to the narrowest unit, -1 to the widest, 0 to any."""
Hold = Callable[[PoolRequest], bool]
"""Returns whether a request stays in the pool, for a unit that is being formed."""


def dispatch_least_loaded(
    snapshot: Snapshot,
    *,
    prefer: Preference | None = None,
    hold: Hold | None = None,
    lane: Unit | None = None,
) -> tuple[Dispatch, ...]:
    """Return the dispatches that can start now, in the pool's order.

    A request that fits a unit, but not now, reserves that unit's room, so that smaller requests do
    not overtake it for ever. A request that no unit can hold blocks no others. A request that is
    too long for a single engine goes to the smallest group that can start it, whatever ``prefer``
    says, because wider groups are scarcer. Otherwise it goes to the unit in which it costs least:
    one that has its prefix cached, or little to do, unless its first token would come too late
    there (``unit_costs.py``).

    Args:
        snapshot: the node.
        prefer: the preferred width for requests that fit one engine; among units of equal width the
            one in which it costs least is taken.
        hold: whether a request stays in the pool.
        lane: the group that urgent requests have to themselves.
    """
    rooms = [Room(unit) for unit in snapshot.units if unit.serving]
    dispatches = []
    cost = UnitCosts(snapshot)
    for request in snapshot.pool:
        rooms = [room for room in rooms if room.slots > 0]
        if not rooms:
            break
        if hold is not None and hold(request):
            continue
        sign = 1 if _needs_group(snapshot, request) else prefer(request) if prefer else 0
        allowed = rooms_for(snapshot, request, rooms, lane)
        room = _choose(allowed, request, sign, cost) if allowed else None
        if room is not None:
            patience = cost.patience(request, room)
            room.take(request)
            dispatches.append(Dispatch(request.request_id, room.unit.unit, patience))
    return tuple(dispatches)


def _needs_group(snapshot: Snapshot, request: PoolRequest) -> bool:
    """Return whether the request is too long for the narrowest layout."""
    narrowest: LayoutState | UnitState
    if snapshot.layouts:
        narrowest = snapshot.layouts[0]
    else:
        narrowest = min(snapshot.units, key=lambda unit: unit.unit.size)
    return not narrowest.can_hold(request)


def _choose(rooms: list[Room], request: PoolRequest, sign: int, cost: UnitCosts) -> Room | None:
    """Return the room to take; None: the request waits. ``sign`` is as in ``Preference``."""
    ranks = cost.ranks(request, rooms)

    def rank(room: Room) -> tuple[int, bool, float, int]:
        unit = room.unit.unit
        # Idle units cost the same: the one with the least in its cache keeps the caches apart.
        return sign * unit.size, *ranks[unit], room.unit.cached_tokens

    best = min(rooms, key=rank)
    if best.takes(request):
        return best
    able = [room for room in rooms if room.takes(request)]
    if able:
        return min(able, key=rank)
    for room in rooms:
        if room.unit.can_hold(request):
            room.slots = 0
    return None


def _keep(snapshot: Snapshot) -> Plan:
    return Plan(dispatches=dispatch_least_loaded(snapshot))


def with_singles(snapshot: Snapshot, groups: Iterable[Unit]) -> Partition:
    """Return the partition with those of these groups that can be formed; other engines alone."""
    formed = [group for group in groups if snapshot.can_form(group)]
    covered = {engine for group in formed for engine in group.engines}
    rest = [alone(engine) for engine in range(snapshot.engines) if engine not in covered]
    return tuple(sorted([*formed, *rest]))


def layout_for_all(snapshot: Snapshot) -> Layout | None:
    """Return the narrowest layout without stages that holds every request; None: none does."""
    running = max((unit.longest_tokens for unit in snapshot.units), default=0)
    for state in snapshot.layouts:
        holds = running <= state.longest and all(map(state.can_hold, snapshot.pool))
        if holds and state.layout.pp == 1:
            return state.layout
    return None


def place_group(snapshot: Snapshot, layout: Layout) -> tuple[Unit, ...]:
    """Return one group of at least this layout's size: an existing one, or the least loaded.

    An existing group of all engines does not count. If no group can be formed, the result is empty.
    """
    groups = [group for group in units_of(snapshot.engines, layout) if snapshot.can_form(group)]
    sizes = range(layout.world_size, snapshot.engines)
    wide = [unit for unit in snapshot.partition if unit.size in sizes]
    if wide:
        return (min(wide, key=attrgetter("size")),)
    return (min(groups, key=lambda group: _requests_of(snapshot, group)),) if groups else ()


def _requests_of(snapshot: Snapshot, group: Unit) -> float:
    members = set(group.engines)
    return sum(state.requests for state in snapshot.units if members & set(state.unit.engines))


def _towards(snapshot: Snapshot, wanted: Partition) -> Plan:
    """Return a plan that dispatches, and switches to ``wanted`` as far as it can be formed."""
    target = with_singles(snapshot, wanted)
    return Plan(
        dispatches=dispatch_least_loaded(snapshot),
        target=None if snapshot.switching or target == snapshot.partition else target,
    )


def _all_dp(snapshot: Snapshot) -> Plan:
    return _towards(snapshot, singles(snapshot.engines))


def _all_tp(snapshot: Snapshot) -> Plan:
    return _towards(snapshot, units_of(snapshot.engines, snapshot.widest))


MANUAL = Policy("manual", _keep, decides_layout=False)
"""Keeps the partition that an operator sets."""

STATIC_DP = Policy("static-dp", _all_dp, decides_layout=True, forms_groups=False)
"""Keeps every engine alone."""

STATIC_TP = Policy("static-tp", _all_tp, decides_layout=True, shifts=False)
"""Keeps groups of the largest size, with every step in TP."""
