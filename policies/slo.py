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

from shoal.policies.cost.cost_model import CostModel
from shoal.policies.fastest import fastest, uniform
from shoal.policies.flying import FLYING, STEADY
from shoal.policies.forecast import Forecast
from shoal.policies.static import dispatch_least_loaded, place_group, with_singles
from shoal.policies.values.partition import Partition, degrees, groups_of
from shoal.policies.values.plan import Plan, Policy
from shoal.policies.values.snapshot import PoolRequest, Snapshot

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


def _target(snapshot: Snapshot, model: CostModel) -> Partition:
    """Return the best candidate, or the partition there is when that gains too little."""
    needed = _degree_for_all(snapshot)
    fitting = [c for c in dict.fromkeys(_candidates(snapshot)) if max(map(len, c)) >= needed]
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
    candidates = fitting if saved < now else [c for c in uniform(snapshot) if c in fitting]
    scores = {c: now if c == snapshot.partition else forecast.broken(c) for c in candidates}
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
    for wide in degrees(snapshot.max_group):
        yield with_singles(snapshot, groups_of(snapshot.engines, wide))
        group = place_group(snapshot, wide) if wide < snapshot.engines else ()
        engines = {engine for members in group for engine in members}
        for narrow in degrees(wide // 2) if group else ():
            rest = [g for g in groups_of(snapshot.engines, narrow) if not engines.intersection(g)]
            yield with_singles(snapshot, [*group, *rest])


def _degree_for_all(snapshot: Snapshot) -> int:
    """Return the narrowest layout that holds every request there is, as far as one does."""
    running = max((unit.longest_tokens for unit in snapshot.units), default=0)
    for layout in snapshot.layouts:
        if running <= layout.max_model_len and all(map(layout.can_hold, snapshot.pool)):
            return layout.degree
    return 1


SLO = Policy("slo", _plan, decides_layout=True)
"""See the module."""
