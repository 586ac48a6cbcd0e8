"""The group that urgent requests have to themselves while such come.

An urgent request is as fast as in an idle group only if nobody else is in its group's steps: beside
a batch of other requests a token takes as long as the batch's. So no other request starts there,
even if all other units are full, unless no other unit can ever hold it. The others pay with the
engines that they lack.
"""

from shoal.policies.values.layouts import Layout, Unit
from shoal.policies.values.partition import units_of
from shoal.policies.values.plan import Room
from shoal.policies.values.snapshot import NORMAL_PRIORITY, PoolRequest, Snapshot

LINGER_SECONDS = 5.0
"""How long after the last urgent request the node is ready for the next one."""


def lane_of(snapshot: Snapshot) -> Unit | None:
    """Return the group that urgent requests have, or should get, to themselves; None: none.

    Of groups that exist it is the one with the most urgent requests, otherwise the one whose
    engines have the fewest others.
    """
    size = snapshot.urgent_engines
    if not size or snapshot.since_urgent > LINGER_SECONDS:
        return None
    groups = units_of(snapshot.engines, Layout(tp=size))
    able = [group for group in groups if snapshot.can_form(group)]

    def rank(group: Unit) -> tuple[bool, int, int]:
        urgent = others = 0
        for unit in snapshot.units:
            if not set(group.engines).isdisjoint(unit.unit.engines):
                urgent += sum(n for priority, n in unit.by_priority if priority < NORMAL_PRIORITY)
                others += unit.requests
        return group in snapshot.partition, urgent, urgent - others

    return max(able, key=rank, default=None)


def rooms_for(
    snapshot: Snapshot, request: PoolRequest, rooms: list[Room], lane: Unit | None
) -> list[Room]:
    """Return the rooms to which a request may go.

    An urgent one goes to the lane, or, while that cannot take it, anywhere.
    """
    if lane is None:
        return rooms
    if request.priority < NORMAL_PRIORITY:
        apart = [room for room in rooms if room.unit.unit == lane and room.takes(request)]
        return apart or rooms
    rest = [unit for unit in snapshot.units if unit.unit != lane]
    alive = (unit for unit in rest if not snapshot.dead.intersection(unit.unit.engines))
    if any(unit.can_hold(request) for unit in alive):
        return [room for room in rooms if room.unit.unit != lane]
    return rooms
