"""Policies that keep one layout and hand each request to the least loaded unit that can start."""

from policies.partition import Partition, groups_of, singles
from policies.plan import Dispatch, Plan, Policy, Room
from policies.snapshot import PoolRequest, Snapshot


def dispatch_least_loaded(snapshot: Snapshot) -> tuple[Dispatch, ...]:
    """Return the dispatches that can start now, in the pool's order.

    A request that fits a unit in principle but not now keeps that unit's room: a later, smaller one
    must not overtake it for ever. One that no unit can hold waits aside and blocks nobody.
    """
    rooms = [Room(unit) for unit in snapshot.units if unit.serving]
    dispatches = []
    for request in snapshot.pool:
        if not any(room.slots > 0 for room in rooms):
            break
        room = _choose(rooms, request)
        if room is not None:
            room.take(request)
            dispatches.append(Dispatch(request.request_id, room.unit.group))
    return tuple(dispatches)


def _choose(rooms: list[Room], request: PoolRequest) -> Room | None:
    open_rooms = [room for room in rooms if room.takes(request)]
    if open_rooms:
        return min(open_rooms, key=_load)
    for room in rooms:
        if room.unit.can_hold(request):
            room.slots = 0
    return None


def _load(room: Room) -> tuple[float, int]:
    """Return requests per engine, including those of this plan; the first unit wins a tie."""
    taken = room.unit.free_slots - room.slots
    return (room.unit.requests + taken) / len(room.unit.group), room.unit.group[0]


def _keep(snapshot: Snapshot) -> Plan:
    return Plan(dispatches=dispatch_least_loaded(snapshot))


def _towards(snapshot: Snapshot, wanted: Partition) -> Plan:
    """Return a plan that dispatches and moves to ``wanted``, dead engines left alone."""
    alive = [group for group in wanted if not snapshot.dead.intersection(group)]
    covered = {engine for group in alive for engine in group}
    rest = [(engine,) for engine in range(snapshot.engines) if engine not in covered]
    target = tuple(sorted([*alive, *rest]))
    return Plan(
        dispatches=dispatch_least_loaded(snapshot),
        target=None if snapshot.switching or target == snapshot.partition else target,
    )


def _all_dp(snapshot: Snapshot) -> Plan:
    return _towards(snapshot, singles(snapshot.engines))


def _all_tp(snapshot: Snapshot) -> Plan:
    return _towards(snapshot, groups_of(snapshot.engines, snapshot.max_group))


MANUAL = Policy("manual", _keep, decides_layout=False)
"""Keeps the partition that an operator sets."""

STATIC_DP = Policy("static-dp", _all_dp, decides_layout=True)
"""Every engine alone."""

STATIC_TP = Policy("static-tp", _all_tp, decides_layout=True)
"""Groups of the largest size."""
