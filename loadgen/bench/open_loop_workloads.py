"""The open-loop workloads of the comparison."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from shoal.loadgen.shapes import make_up
from shoal.loadgen.traces import read_trace
from shoal.loadgen.workload import Workload

_QUIET_SHARE, _BURST_SHARE = 1 / 3, 1 / 6
"""Shares of the duration: two quiet phases and two bursts, two to one as in the paper."""


def bursty(seed: int, seconds: float, scale: float) -> Workload:
    """Return Flying Serving's bursty workload (6.1.3) at ``scale`` times its rates."""
    return make_up(
        "bursty",
        seed,
        seconds=seconds,
        rate=(2 * scale, 5 * scale),
        burst_rate=(10 * scale, 30 * scale),
        quiet_seconds=seconds * _QUIET_SHARE,
        burst_seconds=seconds * _BURST_SHARE,
    )


def priority(seed: int, seconds: float, scale: float) -> Workload:
    """Return the paper's priority workload (6.3) at ``scale`` times its rate, drawn four times."""
    rate = (3 * scale, 5 * scale)
    return make_up("priority", seed, seconds=seconds, rate=rate, rate_seconds=seconds / 4)


MADE_UP: dict[str, Callable[[int, float, float], Workload]] = {
    "bursty": bursty,
    "priority": priority,
}
"""Workloads made up from a seed, a duration and a scale, by name."""
TRACE = "trace"
WORKLOADS = (*MADE_UP, TRACE)


def trace_cut(path: Path, seconds: float, scale: float) -> Workload:
    """Return the part of a trace, at ``scale`` times its rate, in which most requests come.

    Raises:
        TraceError: the trace cannot be read.
    """
    return busiest(read_trace(path).scaled(scale), seconds)


def busiest(workload: Workload, seconds: float) -> Workload:
    """Return the stretch of this length with the most requests, with times that begin at 0."""
    times = [arrival.at for arrival in workload.arrivals]
    counts = [bisect_left(times, at + seconds) - index for index, at in enumerate(times)]
    first = counts.index(max(counts)) if counts else 0
    part = workload.arrivals[first : first + (counts[first] if counts else 0)]
    return replace(workload, arrivals=tuple(replace(a, at=a.at - times[first]) for a in part))
