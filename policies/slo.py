"""The partition that is predicted to break the fewest promises.

A promise is the TTFT and TPOT target of a request's priority class. With the node's cost model the
policy predicts the effect of every candidate partition (``forecast.py``). A candidate has one
layout for all engines, or one wide group, which serves the most urgent class alone, beside narrower
units. Moving running requests has a price and predictions have errors, so a switch must save
enough, and more soon after another switch. If the load does not grow, the last switch was long ago
and several layouts for all engines are equally safe, also in bursts, the policy takes the one in
which requests take the least time (``fastest.py``). Without targets this is all that it does.
Without a cost model it does the same as ``flying``.
"""

import math
from collections.abc import Iterator

from shoal.policies.fastest import fastest, uniform
from shoal.policies.flying import FLYING, STEADY
from shoal.policies.forecast import Forecast
from shoal.policies.static import dispatch_least_loaded, place_group, with_singles
from shoal.policies.values.layouts import layouts_up_to
from shoal.policies.values.partition import Partition, units_of
from shoal.policies.values.plan import Plan, Policy
from shoal.policies.values.snapshot import PoolRequest, Snapshot, StepPredictor

GAIN = 0.02
"""Share of the requests whose promises a switch must save. Less is within the model's error."""
WORTH = 0.2
"""Share of the broken promises that a switch must save. If most are lost anyway, a switch only adds
to the loss."""
TIE = 0.001
"""A partition counts as equally good if it breaks the promises of at most this share of the
requests more."""
SETTLE_SECONDS = 60.0
"""A switch this long after the last one must save twice ``GAIN``; an earlier one even more. No
switch for speed alone comes earlier, so that the next switch can keep promises if load comes."""
LEAST_SECONDS = 1.0
"""Least time between two switches, unless the current units are too small for a request."""


def _plan(snapshot: Snapshot, /) -> Plan:
    model = snapshot.cost_model
    if model is None:
        return FLYING.plan(snapshot)

    def prefer(request: PoolRequest) -> int:
        """Send the most urgent class to the widest units, all others elsewhere."""
        if len(snapshot.targets) < 2:
            return 0
        return -1 if request.priority <= snapshot.targets[0].priority else 1

    dispatches = dispatch_least_loaded(snapshot, prefer=prefer)
    if snapshot.switching or not snapshot.requests:
        return Plan(dispatches)
    target = _target(snapshot, model)
    if target == snapshot.partition:
        return Plan(dispatches)
    return Plan(dispatches, target, "carry", "slo")


def _target(snapshot: Snapshot, model: StepPredictor) -> Partition:
    """Return the best candidate, or the current partition if that candidate gains too little."""
    needed = _size_for_all(snapshot)
    candidates = dict.fromkeys(_candidates(snapshot))
    fitting = [c for c in candidates if max(unit.size for unit in c) >= needed]
    forecast = Forecast(snapshot, model)
    if snapshot.partition not in fitting:
        return min(fitting, key=forecast.broken, default=snapshot.partition)
    if snapshot.since_switch < LEAST_SECONDS:
        return snapshot.partition
    now = forecast.broken(snapshot.partition)
    saved = max(
        WORTH * now, GAIN * forecast.affected * (1 + SETTLE_SECONDS / snapshot.since_switch)
    )
    grows = snapshot.requests > STEADY * snapshot.smoothed_requests
    settled = not grows and snapshot.since_switch >= SETTLE_SECONDS
    for_speed = settled or not snapshot.targets
    if saved >= now and not for_speed:
        return snapshot.partition
    judged = fitting if saved < now else [c for c in uniform(snapshot) if c in fitting]
    scores = {c: now if c == snapshot.partition else forecast.broken(c) for c in judged}
    best = min(scores, key=scores.__getitem__, default=snapshot.partition)
    if scores.get(best, now) < now - saved:
        return best
    if not for_speed:
        return snapshot.partition
    worst = now + TIE * forecast.affected
    as_good = [c for c in uniform(snapshot) if scores.get(c, math.inf) <= worst]
    return fastest(snapshot, forecast, snapshot.partition, as_good)


def _candidates(snapshot: Snapshot) -> Iterator[Partition]:
    """Yield the current partition, each layout for all engines, and groups beside narrower ones."""
    yield snapshot.partition
    for wide in layouts_up_to(snapshot.max_group):
        yield with_singles(snapshot, units_of(snapshot.engines, wide))
        group = place_group(snapshot, wide) if wide.world_size < snapshot.engines else ()
        taken = {engine for unit in group for engine in unit.engines}
        for narrow in layouts_up_to(wide.world_size // 2) if group else ():
            units = units_of(snapshot.engines, narrow)
            rest = [unit for unit in units if not taken.intersection(unit.engines)]
            yield with_singles(snapshot, [*group, *rest])


def _size_for_all(snapshot: Snapshot) -> int:
    """Return the size of the smallest unit that holds every request; 1 if none does."""
    running = max((unit.longest_tokens for unit in snapshot.units), default=0)
    for state in snapshot.layouts:
        if running <= state.max_model_len and all(map(state.can_hold, snapshot.pool)):
            return state.layout.world_size
    return 1


SLO = Policy("slo", _plan, decides_layout=True)
"""See the module."""
