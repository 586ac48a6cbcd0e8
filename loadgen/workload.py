"""Workloads: requests and when they arrive, made up from a seed or read from a trace."""

import enum
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

URGENT = -10
"""Priority of the urgent requests of ``priorities``; all others have 0."""
WINDOW_SECONDS = 10.0
"""A trace's bursts are looked for in windows of this length."""
BURST_RATIO = 1.5
"""A window is a burst from this multiple of the trace's mean rate on, and quiet below the mean."""


class Phase(enum.StrEnum):
    """What the load is like when a request arrives."""

    QUIET = "quiet"
    BURST = "burst"
    BETWEEN = "between"
    """Neither of both."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request."""

    at: float
    """Seconds from the start of the workload."""
    prompt_tokens: int
    output_tokens: int
    priority: int = 0
    phase: Phase = Phase.BETWEEN


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their arrival."""

    name: str
    arrivals: tuple[Arrival, ...]

    def scaled(self, factor: float) -> "Workload":
        """Return the workload at ``factor`` times its rate: everything happens sooner.

        Raises:
            ValueError: ``factor`` is not positive.
        """
        if not factor > 0:
            raise ValueError(f"a rate cannot be scaled by {factor:g}")
        return replace(self, arrivals=tuple(replace(a, at=a.at / factor) for a in self.arrivals))


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of made-up requests, drawn evenly between bounds that are included."""

    prompt: tuple[int, int] = (128, 2048)
    output: tuple[int, int] = (64, 512)

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Return prompt and output tokens of one request."""
        return rng.randint(*self.prompt), rng.randint(*self.output)


@dataclass(frozen=True, slots=True)
class Bursts:
    """Phases that take turns; each draws its rate, requests per second, evenly from a range."""

    quiet_rate: tuple[float, float] = (2.0, 5.0)
    burst_rate: tuple[float, float] = (10.0, 30.0)
    quiet_seconds: float = 60.0
    burst_seconds: float = 30.0


def bursty(
    seed: int,
    *,
    requests: int = 4000,
    bursts: Bursts = Bursts(),
    lengths: Lengths = Lengths(),
) -> Workload:
    """Return quiet phases and bursts in turn (Flying Serving, 6.1.3), Poisson within each."""
    rng = random.Random(seed)
    arrivals: list[Arrival] = []
    for phase, start, end, rate in _phases(rng, bursts):
        arrivals += [
            Arrival(at, *lengths.draw(rng), phase=phase) for at in _poisson(rng, start, end, rate)
        ]
        if len(arrivals) >= requests:
            break
    return Workload("bursty", tuple(arrivals[:requests]))


def _phases(rng: random.Random, bursts: Bursts) -> Iterator[tuple[Phase, float, float, float]]:
    start = 0.0
    while True:
        for phase, seconds, rates in (
            (Phase.QUIET, bursts.quiet_seconds, bursts.quiet_rate),
            (Phase.BURST, bursts.burst_seconds, bursts.burst_rate),
        ):
            yield phase, start, start + seconds, rng.uniform(*rates)
            start += seconds


def _poisson(rng: random.Random, start: float, end: float, rate: float) -> Iterator[float]:
    at = start + rng.expovariate(rate)
    while at < end:
        yield at
        at += rng.expovariate(rate)


def priorities(
    seed: int,
    *,
    requests: int = 4000,
    rate: tuple[float, float] = (3.0, 5.0),
    rate_seconds: float = 30.0,
    urgent_share: float = 0.2,
    lengths: Lengths = Lengths(),
) -> Workload:
    """Return urgent requests among others (Flying Serving, 6.3); the rate is drawn again and again.

    Args:
        seed: of everything drawn.
        requests: how many.
        rate: bounds of the rate, requests per second.
        rate_seconds: how long each rate is kept.
        urgent_share: part of the requests that is urgent.
        lengths: of the requests.
    """
    rng = random.Random(seed)
    arrivals: list[Arrival] = []
    start = 0.0
    while len(arrivals) < requests:
        for at in _poisson(rng, start, start + rate_seconds, rng.uniform(*rate)):
            priority = URGENT if rng.random() < urgent_share else 0
            arrivals.append(Arrival(at, *lengths.draw(rng), priority=priority))
        start += rate_seconds
    return Workload("priority", tuple(arrivals[:requests]))


def with_phases(arrivals: Sequence[Arrival]) -> tuple[Arrival, ...]:
    """Return arrivals with their phases, told by the rate in the window each is in."""
    if not arrivals:
        return ()
    counts = Counter(int(arrival.at / WINDOW_SECONDS) for arrival in arrivals)
    seconds = max(WINDOW_SECONDS, arrivals[-1].at)
    mean = len(arrivals) / seconds * WINDOW_SECONDS

    def phase(arrival: Arrival) -> Phase:
        count = counts[int(arrival.at / WINDOW_SECONDS)]
        if count >= BURST_RATIO * mean:
            return Phase.BURST
        return Phase.QUIET if count < mean else Phase.BETWEEN

    return tuple(replace(arrival, phase=phase(arrival)) for arrival in arrivals)
