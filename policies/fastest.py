"""The layout for the whole node in which requests take the least time, by the cost model.

``forecast.py`` says how long they take, what a move has to compute again included. A prediction has
its error and the rate of arrivals its noise: a layout is left for one that is faster by a margin,
and by a larger one soon after a switch.
"""

from collections.abc import Iterable

from shoal.policies.forecast import Forecast
from shoal.policies.static import with_singles
from shoal.policies.values.layouts import layouts_up_to
from shoal.policies.values.partition import Partition, units_of
from shoal.policies.values.snapshot import Snapshot

MARGIN = 0.1
"""Part of the time that a switch must save."""
SETTLE_SECONDS = 20.0
"""A switch so long after the last one must save twice the margin, an earlier one more."""
LEAST_SECONDS = 1.0
"""No switch comes sooner after the last one."""


def uniform(snapshot: Snapshot) -> tuple[Partition, ...]:
    """Return the partitions into groups of one size, narrowest first, as far as they can be."""
    every = (units_of(snapshot.engines, layout) for layout in layouts_up_to(snapshot.max_group))
    return tuple(dict.fromkeys(with_singles(snapshot, groups) for groups in every))


def fastest(
    snapshot: Snapshot,
    forecast: Forecast,
    now: Partition,
    candidates: Iterable[Partition],
) -> Partition:
    """Return the fastest candidate, or ``now`` where that gains too little.

    Args:
        snapshot: the node.
        forecast: of this snapshot.
        now: the partition that is left for a faster one.
        candidates: what it may be left for.
    """
    if snapshot.since_switch < LEAST_SECONDS:
        return now
    seconds = {candidate: forecast.seconds(candidate) for candidate in (now, *candidates)}
    best = min(seconds, key=seconds.__getitem__)
    margin = MARGIN * (1 + SETTLE_SECONDS / snapshot.since_switch)
    return best if seconds[best] < (1 - margin) * seconds[now] else now
