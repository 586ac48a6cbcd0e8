"""A node with one group or two single engines, and its shadows, for tests of ``adaptive``."""

from dataclasses import replace
from math import inf

from shoal.policies.hindsight import LATEST_SECONDS, Hindsight
from shoal.policies.jobs import Job
from shoal.policies.shadow import Queue, Shadow
from shoal.policies.terms import Terms
from shoal.policies.unit_costs import Prices
from shoal.policies.values.layouts import Layout, alone
from shoal.policies.values.pace import Pace
from tests.units import tp

NOW = 100.0
STEP = 0.01
PACE = Pace(
    members=1,
    weights=STEP,
    token=0.0,
    latency=0.0,
    moved=0.0,
    read=0.0,
    attend=0.0,
    host=0.0,
    mixed_host=0.0,
    overhead=0.0,
)
"""Every step takes 10 ms."""
SINGLES, GROUP = (alone(0), alone(1)), (tp(0, 1),)


def terms(layout: Layout) -> Terms:
    """Return a unit: a group is the faster one for fewer than 12 requests, and two units above."""
    grouped = layout.tp == 2
    token, overhead = (6e-4, 0.004) if grouped else (2e-4, 0.01)
    pace = replace(PACE, weights=0.0, token=token, overhead=overhead)
    free = Pace(1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.001)
    return Terms(pace, free, free, inf, 256, 1e9, 8192, 8192, Prices(1e-6, 1e-9), 100.0)


TERMS = {layout: terms(layout) for layout in (Layout(), Layout(2))}


def seen(*latest: float, began: float = 0.0) -> Hindsight:
    """Return a group that has nothing to do, after requests came at these times."""
    jobs = tuple(Job(at, 10, 10, 100) for at in latest)
    current = Shadow([Queue(GROUP[0].layout, NOW)])
    return Hindsight(NOW, GROUP, current, (), TERMS, latest=jobs, began=began)


def rate(per_second: float, seconds: float, until: float = NOW) -> list[float]:
    count = round(per_second * seconds)
    return [until - (count - k - 0.5) / per_second for k in range(count)]


def after(quiet: list[float], seconds: float, per_second: float) -> Hindsight:
    """Return a group to which requests came at some times, and then at another rate."""
    return seen(*(at - seconds for at in quiet), *rate(per_second, seconds))


QUIET = rate(24, LATEST_SECONDS)
