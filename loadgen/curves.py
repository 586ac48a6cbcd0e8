"""What pictures of runs show, as numbers: curves over time, distributions, layouts, bursts."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shoal.loadgen.summary import Record, quantile
from shoal.loadgen.workload import Phase

Curve = list[tuple[float, float]]
"""Times, and the value from each time on."""
Layouts = Sequence[tuple[float, Sequence[Sequence[int]]]]
"""Times, and the engines of each unit from each time on."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The data of one run that is drawn."""

    run: str
    """Its name."""
    records: Sequence[Record]
    tokens: Mapping[int, float]
    """Output tokens by the second in which they came."""
    layouts: Layouts = ()
    """Empty if not known."""

    @property
    def end(self) -> float:
        """When the last request ended, seconds since the start."""
        return max((r.ended for r in self.records if r.ended is not None), default=0.0)


@dataclass(frozen=True, slots=True)
class Bar:
    """A unit, for as long as it was one."""

    start: float
    """Seconds since the start of the run."""
    end: float
    engines: tuple[int, ...]
    """Ascending, and consecutive."""


def bars(layouts: Layouts, end: float) -> Iterator[Bar]:
    """Yield every unit of a run; a unit that a switch leaves alone is one bar.

    Args:
        layouts: see ``Timeline``.
        end: of the run, seconds.
    """
    since: dict[tuple[int, ...], float] = {}
    for at, units in [*layouts, (end, ())]:
        present = {tuple(sorted(unit)) for unit in units}
        for unit in sorted(since.keys() - present):
            yield Bar(since.pop(unit), at, unit)
        since |= dict.fromkeys(present - since.keys(), at)


def bursts(records: Sequence[Record]) -> Iterator[tuple[float, float]]:
    """Yield when each burst begins and ends: its first arrival, and the first one after it."""
    ordered = sorted(records, key=lambda record: record.arrived)
    start: float | None = None
    for record in ordered:
        if record.phase is Phase.BURST and start is None:
            start = record.arrived
        elif record.phase is not Phase.BURST and start is not None:
            yield start, record.arrived
            start = None
    if start is not None:
        yield start, ordered[-1].arrived


def by_priority(records: Sequence[Record]) -> dict[int, list[Record]]:
    """Return the requests of each priority, the most urgent first."""
    found: defaultdict[int, list[Record]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record.priority):
        found[record.priority].append(record)
    return dict(found)


def until(curve: Curve, end: float) -> Curve:
    """Return the curve with its last value kept until ``end``."""
    return [*curve, (max(curve[-1][0], end), curve[-1][1])] if curve else []


def concurrency(records: Sequence[Record], window: float) -> Curve:
    """Return the most requests in progress in every window."""
    changes = [(record.arrived, 1) for record in records]
    changes += [(record.ended, -1) for record in records if record.ended is not None]
    peaks: dict[int, int] = {}
    count = 0
    for time, change in sorted(changes):
        before, count = count, count + change
        k = int(time / window)
        peaks[k] = max(peaks.get(k, 0), before, count)
        peaks[k + 1] = count  # which is kept if nothing changes there
    return [(k * window, peak) for k, peak in sorted(peaks.items())]


def throughput(tokens: Mapping[int, float], window: float) -> Curve:
    """Return the mean rate in windows of whole seconds."""
    seconds = max(1, round(window))
    sums: defaultdict[int, float] = defaultdict(float)
    for second, count in tokens.items():
        sums[second // seconds] += count
    return [(k * seconds, sums[k] / seconds) for k in range(max(sums, default=-1) + 1)]


def p90_by_arrival(
    records: Sequence[Record], value: Callable[[Record], float | None], window: float
) -> Curve:
    """Return the 90th percentile of a value in every window in which a request arrived."""
    by_window: defaultdict[int, list[float]] = defaultdict(list)
    for record in records:
        if (known := value(record)) is not None:
            by_window[int(record.arrived / window)].append(known)
    return [(k * window, quantile(values, 0.9)) for k, values in sorted(by_window.items())]


def distribution(values: Sequence[float]) -> Curve:
    """Return the share of the values that are at most as large, at each value."""
    ordered = sorted(values)
    return [(value, k / len(ordered)) for k, value in enumerate(ordered, start=1)]


def known(records: Sequence[Record], value: Callable[[Record], float | None]) -> list[float]:
    """Return a value of the requests that finished and have it."""
    found = ((record.finished, value(record)) for record in records)
    return [one for finished, one in found if finished and one is not None]


def steps(curve: Curve) -> tuple[list[float], list[float]]:
    """Return the times and the values of a curve."""
    return [time for time, _ in curve], [value for _, value in curve]
