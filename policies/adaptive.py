"""The layout in which requests cost the least time, of all degrees, by a forecast of the node.

``forecast.py`` predicts for every candidate how long requests will take, or how many promises will
be broken if there are targets. Running requests are carried to their new units, so a switch costs
no more than a short stop. The policy decides as if it had to pay for that stop out of what it saves
(as in the ski rental problem): it adds up, over time, by how much a candidate would have been
better than the current layout, and changes to it when that sum has reached the price of the switch.
So a clear gain is taken within milliseconds, a gain that is within the noise of the load never adds
up, and the regret about a layout that was kept too long is about the price of a switch.

A switch that is soon taken back has brought nothing. So the price doubles whenever a switch goes
the other way than the last one, and returns to its true value within seconds.

The candidates are one layout for all engines. While requests are urgent, or too long for a narrow
unit, one group beside narrower units is a candidate too.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shoal.policies.flow import NEAR_SECONDS
from shoal.policies.flying import FLYING
from shoal.policies.forecast import Forecast
from shoal.policies.static import (
    Preference,
    dispatch_least_loaded,
    place_group,
    with_singles,
)
from shoal.policies.values.layouts import Layout, layouts_up_to
from shoal.policies.values.partition import Partition, units_of
from shoal.policies.values.plan import Plan, Policy, SwitchReason
from shoal.policies.values.snapshot import NORMAL_PRIORITY, PoolRequest, Snapshot

REVIEW_SECONDS = 0.05
"""How often the layout is judged."""
LONGEST_REVIEW_SECONDS = 1.0
"""A judgement counts for at most this time, if the policy was not asked for longer."""
LEAST_SECONDS = 0.5
"""Least time between two switches, unless the current units are too small for a request."""
FORGET_SECONDS = 10.0
"""Time constant with which it is forgotten what a candidate would have saved."""
LEAST_PROMISES = 0.1
"""Broken promises that a switch must save beyond its price, if there are targets. What is predicted
to be broken while all promises are safe is noise."""
DOUBT = 2.0
"""Factor by which a switch that goes the other way than the last one makes the next one dearer."""
MOST_DOUBT = 16.0
DOUBT_SECONDS = 10.0
"""Time constant with which the price returns to its true value."""
LINGER_SECONDS = 5.0
"""How long after the last urgent request a group of their own is a candidate."""
SHARE_SECONDS = 10.0
"""Time constant of the smoothed share of urgent requests."""
LEAST_SHARE = 0.02
"""Least share of urgent requests that is assumed while there are any."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What the policy remembers from one plan to the next."""

    at: float
    """When the layout was last judged."""
    saved: tuple[tuple[Partition, float], ...] = ()
    """What each candidate would have saved so far if it had been the layout."""
    doubt: float = 1.0
    """Factor of the price of the next switch; 1 if there was no change of mind for long."""
    wider: bool | None = None
    """Whether the last switch went to fewer and wider units; None: there was none."""
    urgent: float = 0.0
    """Smoothed share of the requests that are urgent."""


def _plan(snapshot: Snapshot, /) -> Plan:
    model = snapshot.cost_model
    if model is None:
        return FLYING.plan(snapshot)
    dispatches = dispatch_least_loaded(snapshot, prefer=_preference(snapshot))
    memory = snapshot.memory
    if not isinstance(memory, Memory):
        memory = Memory(snapshot.now - REVIEW_SECONDS)
    if snapshot.switching:
        return Plan(dispatches, memory=replace(_aged(memory, snapshot), at=snapshot.now, saved=()))
    needed = _size_for_all(snapshot)
    stuck = max(unit.size for unit in snapshot.partition) < needed
    if snapshot.now - memory.at < REVIEW_SECONDS and not stuck:
        return Plan(dispatches, memory=memory)
    memory = _aged(memory, snapshot)
    candidates = [c for c in _candidates(snapshot, needed) if c != snapshot.partition]
    forecast = Forecast(snapshot, model, memory.urgent)
    if stuck:
        target = min(candidates, key=forecast.cost, default=snapshot.partition)
    else:
        target, memory = _judged(snapshot, forecast, candidates, memory)
    if target == snapshot.partition:
        return Plan(dispatches, memory=memory)
    reason: SwitchReason = "long" if stuck else _reason(snapshot, target)
    wider = len(target) < len(snapshot.partition)
    turned = memory.wider is not None and memory.wider != wider
    doubt = min(MOST_DOUBT, DOUBT * memory.doubt) if turned else memory.doubt
    memory = replace(memory, at=snapshot.now, saved=(), doubt=doubt, wider=wider)
    return Plan(dispatches, target, "carry", reason, memory)


def _judged(
    snapshot: Snapshot, forecast: Forecast, candidates: list[Partition], memory: Memory
) -> tuple[Partition, Memory]:
    """Return the partition to have, and the memory with what candidates have saved by now."""
    here, before = snapshot.partition, dict(memory.saved)
    now = forecast.cost(here)
    costs = {candidate: forecast.cost(candidate) for candidate in candidates}
    elapsed = min(LONGEST_REVIEW_SECONDS, snapshot.now - memory.at)
    kept = math.exp(-elapsed / FORGET_SECONDS)
    saved = {
        candidate: max(
            0.0, kept * before.get(candidate, 0.0) + elapsed * (now - cost) / NEAR_SECONDS
        )
        for candidate, cost in costs.items()
    }
    memory = replace(memory, at=snapshot.now, saved=tuple(saved.items()))
    if snapshot.since_switch < LEAST_SECONDS:
        return here, memory

    def pays(candidate: Partition) -> bool:
        if not saved[candidate] or costs[candidate] >= now or not forecast.has_room(candidate):
            return False
        stall = forecast.stall(candidate)
        stop = forecast.cost(candidate, stall) - costs[candidate]
        price = memory.doubt * (stop + (LEAST_PROMISES if snapshot.targets else 0.0))
        return saved[candidate] > price and now - costs[candidate] > price

    best = sorted(candidates, key=costs.__getitem__)
    return next(filter(pays, best), here), memory


def _aged(memory: Memory, snapshot: Snapshot) -> Memory:
    """Return the memory as it is now: less doubt, and the latest share of urgent requests."""
    elapsed = snapshot.now - memory.at
    doubt = 1 + (memory.doubt - 1) * math.exp(-elapsed / DOUBT_SECONDS)
    if snapshot.since_urgent > LINGER_SECONDS:
        return replace(memory, doubt=doubt, urgent=0.0)
    urgent = sum(request.priority < NORMAL_PRIORITY for request in snapshot.pool)
    for unit in snapshot.units:
        urgent += sum(n for priority, n in unit.by_priority if priority < NORMAL_PRIORITY)
    share = urgent / max(1, snapshot.requests)
    kept = math.exp(-elapsed / SHARE_SECONDS) if memory.urgent else 0.0
    share = max(LEAST_SHARE, min(1 - LEAST_SHARE, kept * memory.urgent + (1 - kept) * share))
    return replace(memory, doubt=doubt, urgent=share)


def _preference(snapshot: Snapshot) -> Preference:
    """Send the most urgent class to the widest units and all others elsewhere, if units differ."""
    if snapshot.targets:
        bound = snapshot.targets[0].priority if len(snapshot.targets) > 1 else None
    else:
        bound = NORMAL_PRIORITY - 1 if snapshot.since_urgent <= LINGER_SECONDS else None

    def prefer(request: PoolRequest) -> int:
        if bound is None:
            return 0
        return -1 if request.priority <= bound else 1

    return prefer


def _candidates(snapshot: Snapshot, needed: int) -> Iterator[Partition]:
    """Yield each layout for all engines, and groups beside narrower units where somebody needs one.

    Args:
        snapshot: the node.
        needed: engines of the narrowest unit that holds every request.
    """
    layouts = layouts_up_to(snapshot.max_group)
    seen: set[Partition] = set()
    urgent = len(snapshot.targets) > 1 or snapshot.since_urgent <= LINGER_SECONDS
    for wide in layouts:
        if wide.world_size < needed:
            continue
        options = [with_singles(snapshot, units_of(snapshot.engines, wide))]
        if (urgent or wide.world_size == needed > 1) and 1 < wide.world_size < snapshot.engines:
            options += _beside(snapshot, wide)
        for option in options:
            if option not in seen and max(unit.size for unit in option) >= needed:
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


def _reason(snapshot: Snapshot, target: Partition) -> SwitchReason:
    if len({unit.size for unit in target}) > 1:
        return "urgent"
    if snapshot.targets:
        return "slo"
    return "load" if len(target) > len(snapshot.partition) else "quiet"


def _size_for_all(snapshot: Snapshot) -> int:
    """Return the size of the smallest unit that holds every request; 1 if none does."""
    running = max((unit.longest_tokens for unit in snapshot.units), default=0)
    for state in snapshot.layouts:
        longest = min(state.max_model_len, state.total_blocks * state.block_tokens)
        if running <= longest and all(map(state.can_hold, snapshot.pool)):
            return state.layout.world_size
    return 1


ADAPTIVE = Policy("adaptive", _plan, decides_layout=True)
"""See the module."""
