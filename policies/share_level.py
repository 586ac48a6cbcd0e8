"""How many engines share weights: whether memory serves requests better as KV or as whole weights.

Where engines share weights, units hold more KV, so more or longer requests run at once, but narrow
layouts read weights from other engines in every step. Each level is judged by the layout that costs
least at it (``forecast.py``). What the other level would have saved is added up, and the node
changes when that has reached the price of the change, as in the ski rental problem. A part of the
price may be paid by what is forecast. So what is lost by staying too long is about the price. The
price doubles with every change that takes the last one back, and returns to its true value within
minutes. So what is lost by changing too often is bounded as well.

It is a part of any policy (``with_share_level``), and needs a cost model.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from shoal.policies.flow import FAR, NEAR
from shoal.policies.forecast import Forecast
from shoal.policies.switch_costs import usual_prompt
from shoal.policies.unit_costs import prices_of
from shoal.policies.values.partition import Partition
from shoal.policies.values.plan import Plan, Policy, ShareReason
from shoal.policies.values.snapshot import ShareLevel, Snapshot

HORIZON_SECONDS = sum(NEAR) + sum(FAR)
"""Time over which a forecast adds up what it predicts."""
REVIEW_SECONDS = 0.5
"""How often the levels are judged."""
LONGEST_REVIEW_SECONDS = 1.0
"""A judgement counts for at most this time, if the policy was not asked for longer."""
MOST_AHEAD = 0.75
"""Share of the price that may be paid by what the forecast says of the future."""
LEAST_SAVED = 2.0
"""So many seconds of requests must be saved in any case."""
SURE_SECONDS = 0.5
"""So many seconds of each request on the node must be saved."""
STOP_SECONDS = 0.05
"""Time for which engines compute nothing when they go on with other memory."""
CACHE_SECONDS = 30.0
"""How long it takes until caches are as full as they were before KV was given up."""
DOUBT = 2.0
"""Factor by which a change that takes the last one back makes the next one dearer."""
MOST_DOUBT = 16.0
DOUBT_SECONDS = 120.0
"""Time constant with which the price returns to its true value."""

Layouts = Callable[[Snapshot], Iterable[Partition]]
"""The partitions that a policy may choose."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What is remembered from one plan to the next."""

    own: object = None
    """What the policy itself remembers."""
    at: float = -math.inf
    """When the levels were last judged."""
    saved: float = 0.0
    """Seconds of requests that the other level would have saved so far."""
    doubt: float = 1.0
    """Factor of the price."""
    changed: bool = False
    """Whether there was a change: the next one takes it back, as there are two levels."""


def present(snapshot: Snapshot) -> Iterable[Partition]:
    """Return the only partition of a policy that keeps one."""
    return (snapshot.partition,)


def with_share_level(policy: Policy, layouts: Layouts = present) -> Policy:
    """Return a policy that also decides how many engines share weights, where nodes can change it.

    Args:
        policy: decides everything else.
        layouts: which partitions it chooses from.
    """

    def plan(snapshot: Snapshot, /) -> Plan:
        known = snapshot.memory
        if not _levels(snapshot) and not isinstance(known, Memory):
            return policy.plan(snapshot)
        memory = known if isinstance(known, Memory) else Memory(known)
        found = policy.plan(replace(snapshot, memory=memory.own))
        if found.share_weights is not None or not _levels(snapshot):
            return replace(found, memory=replace(memory, own=found.memory))
        memory = replace(memory, own=found.memory)
        if snapshot.now - memory.at < REVIEW_SECONDS or snapshot.pending is not None:
            return replace(found, memory=memory)
        level, memory = _judged(snapshot, memory, layouts)
        if level is None or found.target is not None:
            return replace(found, memory=memory)
        reason: ShareReason = "kv" if level.share > snapshot.share_weights else "steps"
        return replace(found, share_weights=level.share, share_reason=reason, memory=memory)

    return replace(policy, plan=plan)


def _judged(
    snapshot: Snapshot, memory: Memory, layouts: Layouts
) -> tuple[ShareLevel | None, Memory]:
    """Return the level to change to, if any, and the memory with what it would have saved."""
    known = math.isfinite(memory.at)
    elapsed = min(LONGEST_REVIEW_SECONDS, snapshot.now - memory.at) if known else 0.0
    partitions = tuple(layouts(snapshot))
    here = _cost(snapshot, partitions)
    costs = {level: _cost(at_level(snapshot, level), partitions) for level in _levels(snapshot)}
    best = min(costs, key=costs.__getitem__)
    gain = (here - costs[best]) / HORIZON_SECONDS
    saved = max(0.0, memory.saved + elapsed * gain)
    doubt = 1 + (memory.doubt - 1) * math.exp(-elapsed / DOUBT_SECONDS)
    memory = replace(memory, at=snapshot.now, saved=saved, doubt=doubt)
    price = doubt * _price(snapshot)
    if saved < (1 - MOST_AHEAD) * price or saved + here - costs[best] < price:
        return None, memory
    doubt = min(MOST_DOUBT, DOUBT * doubt) if memory.changed else doubt
    return best, replace(memory, saved=0.0, doubt=doubt, changed=True)


def _levels(snapshot: Snapshot) -> Sequence[ShareLevel]:
    """Return the levels that are judged: not those of pipelines, which are in no partition here."""
    return [level for level in snapshot.share_levels if level.stages == 1]


def at_level(snapshot: Snapshot, level: ShareLevel) -> Snapshot:
    """Return the node as it would be at another level."""
    return replace(
        snapshot,
        share_weights=level.share,
        share_stages=level.stages,
        layouts=level.layouts,
        cost_model=level.cost_model,
        sp_above=level.sp_above,
    )


def _cost(snapshot: Snapshot, partitions: Sequence[Partition]) -> float:
    """Return what the best of the partitions costs for the next seconds.

    Requests that have stopped coming are not expected back: memory can move when they are here.
    """
    assert snapshot.cost_model is not None
    usual = min(snapshot.usual_rate, snapshot.recent_rate)
    forecast = Forecast(replace(snapshot, usual_rate=usual), snapshot.cost_model, partitions)
    return min(map(forecast.cost, partitions))


def _price(snapshot: Snapshot) -> float:
    """Return the seconds of requests that a change must save, whichever way it goes.

    A second of each request is within the noise of the load. All of them stop for a moment. If KV
    is given up, the requests that have some of it are computed again, unless there is room for it
    elsewhere. Blocks of any request are anywhere, so these are taken to be all, and to find no
    room. What caches hold there must come again as well. More KV costs the same, because the way
    back will.
    """
    price = (SURE_SECONDS + STOP_SECONDS) * snapshot.requests
    found = snapshot.hit_share * snapshot.usual_rate * usual_prompt(snapshot)
    lost = CACHE_SECONDS * found / len(snapshot.units)
    for unit in snapshot.units:
        used = (unit.total_blocks - unit.free_blocks) * unit.block_tokens
        seconds = (used + lost) * prices_of(snapshot, unit.unit.layout).prompt
        price += seconds * (1 + unit.requests)
    return max(LEAST_SAVED, price)
