"""Stock vLLM's data parallelism, for the simulator: which engine gets which request."""

from shoal.policies.values.plan import Dispatch, Plan, Policy, Room
from shoal.policies.values.snapshot import Snapshot

REFERENCE = "shoal.loadgen.bench.stock_balancer:STOCK_BALANCER"
"""How commands name this policy."""
CROWDED = 0.5
"""From this share of its KV blocks on, it counts against an engine that requests wait there."""
WAITING = 6.0
"""How much it counts for each of them when all blocks are used."""


def _plan(snapshot: Snapshot, /) -> Plan:
    """Send each request to the engine with the fewest, as vLLM's front end does.

    See ``DPLBAsyncMPClient.get_core_engine_for_request`` in ``vllm/v1/engine/core_client.py``. It
    does not know what requests are like, nor what engines have cached. Of engines with as many
    requests another one comes first each time. A real front end has counts of other front ends that
    are up to 100 ms old; here all counts are true.
    """
    first = snapshot.memory if isinstance(snapshot.memory, int) else 0
    rooms = [Room(unit) for unit in snapshot.units if unit.serving]
    dispatches = []
    for request in snapshot.pool:
        turned = rooms[first % len(rooms) :] + rooms[: first % len(rooms)] if rooms else []
        able = [room for room in turned if room.takes(request)]
        if not able:
            break
        room = min(able, key=_score)
        room.take(request)
        dispatches.append(Dispatch(request.request_id, room.unit.unit))
        first += 1
    return Plan(tuple(dispatches), memory=first)


def _score(room: Room) -> float:
    unit = room.unit
    used = 1 - room.blocks / unit.total_blocks
    return unit.requests + room.taken + unit.waiting * WAITING * max(0.0, used - CROWDED)


STOCK_BALANCER = Policy("stock-dp", _plan, decides_layout=True, forms_groups=False, interface=1)
"""See the module."""
