"""The partition that is predicted to break the fewest promises.

Given a target of TTFT and TPOT per priority class and the node's cost model, every candidate
partition is judged by what it would do (``forecast.py``): one layout for all, or one group beside
narrower units, which then serves the most urgent class alone. Moving what runs has its price, and
a prediction its error: a switch must save enough, the more so soon after another. Where promises
are as safe in another layout for all engines, bursts included, while no load grows and nothing had
to be moved for a while, it takes the one in which requests take the least time (``fastest.py``).
With nothing promised that is all it does. Without a cost model it does what ``flying`` does.
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
"""Part of the requests that a switch must save: less is within the model's error."""
WORTH = 0.2
"""Part of the broken promises that it must save: where all is lost, a switch only adds to it."""
TIE = 0.001
"""Part of the requests whose promises a partition may break more than another and be as good."""
SETTLE_SECONDS = 60.0
"""A switch so long after the last one must save twice ``GAIN``, an earlier one more. None for speed
alone comes earlier: after it promises are kept by the next switch, if load comes."""
LEAST_SECONDS = 1.0
"""No switch comes sooner after the last one, unless a request fits nowhere."""


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
    return Plan(dispatches, target, "soft", "slo")


def _target(snapshot: Snapshot, model: StepPredictor) -> Partition:
    """Return the best candidate, or the partition there is when that gains too little."""
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
    """Yield what there is, one layout for all, and a group of every width beside narrower ones."""
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
    """Return of how many engines a unit must be that holds every request, if any does."""
    running = max((unit.longest_tokens for unit in snapshot.units), default=0)
    for state in snapshot.layouts:
        if running <= state.max_model_len and all(map(state.can_hold, snapshot.pool)):
            return state.layout.world_size
    return 1


SLO = Policy("slo", _plan, decides_layout=True)
"""See the module."""
