"""The layout for the whole node in which requests take the least time, by the cost model.

``forecast.py`` predicts how long they take, including what a move computes again. Predictions have
errors and arrival rates have noise. So the node changes its layout only if another is faster by a
margin, and the margin is larger soon after a switch.
"""

from collections.abc import Iterable

from shoal.policies.forecast import Forecast
from shoal.policies.static import with_singles
from shoal.policies.values.layouts import layouts_up_to
from shoal.policies.values.partition import Partition, units_of
from shoal.policies.values.snapshot import Snapshot

MARGIN = 0.1
"""Share of the time that a switch must save if the last one was long ago."""
SETTLE_SECONDS = 20.0
"""A switch this long after the last one must save twice the margin; an earlier one even more."""
LEAST_SECONDS = 1.0
"""Least time between two switches."""


def uniform(snapshot: Snapshot) -> tuple[Partition, ...]:
    """Return the partitions into groups of one size, as far as these can form, narrowest first."""
    every = (units_of(snapshot.engines, layout) for layout in layouts_up_to(snapshot.max_group))
    return tuple(dict.fromkeys(with_singles(snapshot, groups) for groups in every))


def fastest(
    snapshot: Snapshot,
    forecast: Forecast,
    now: Partition,
    candidates: Iterable[Partition],
) -> Partition:
    """Return the fastest candidate, or ``now`` if that candidate gains too little.

    Args:
        snapshot: the node.
        forecast: the forecast for this snapshot.
        now: the current partition.
        candidates: the partitions that may replace it.
    """
    if snapshot.since_switch < LEAST_SECONDS:
        return now
    seconds = {candidate: forecast.seconds(candidate) for candidate in (now, *candidates)}
    best = min(seconds, key=seconds.__getitem__)
    margin = MARGIN * (1 + SETTLE_SECONDS / snapshot.since_switch)
    return best if seconds[best] < (1 - margin) * seconds[now] else now
