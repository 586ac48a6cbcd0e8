"""What a workload's requests met with, as figures: for people as a table, for machines as JSON."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loadgen.workload import Phase

PEAK_SECONDS = 5
"""The peak throughput is the best of windows this long: what was sustained, not one step's."""
EVERYTHING = "all"
"""Name of the group of all requests."""


@dataclass(frozen=True, slots=True)
class Record:
    """One request, as it was served. Times are seconds from the workload's start."""

    arrived: float
    started: float | None
    """First time in a batch."""
    first_token: float | None
    ended: float | None
    output_tokens: int
    finished: bool
    """Whether it got all of its tokens."""
    priority: int = 0
    phase: Phase = Phase.BETWEEN

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first batch."""
        return None if self.started is None else self.started - self.arrived

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def tpot(self) -> float | None:
        """Time per output token: (end-to-end - TTFT) / (output tokens - 1); None for one token."""
        if self.first_token is None or self.ended is None or self.output_tokens < 2:
            return None
        return (self.ended - self.first_token) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Objective:
    """What requests of a priority are owed, and those between it and the objective before."""

    priority: int
    ttft: float
    tpot: float

    def met_by(self, record: Record) -> bool:
        """Return whether the request got what it was owed."""
        on_time = record.ttft is not None and record.ttft <= self.ttft
        return record.finished and on_time and (record.tpot or 0.0) <= self.tpot


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and nearest-rank quantiles."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Distribution | None":
        """Return the distribution of these values, None if there are none."""
        ordered = sorted(values)
        if not ordered:
            return None
        return cls(sum(ordered) / len(ordered), *(quantile(ordered, q) for q in (0.5, 0.9, 0.99)))


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of the ascending values do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Figures:
    """A group of requests."""

    requests: int
    finished: int
    ttft: Distribution | None
    tpot: Distribution | None
    queue_time: Distribution | None
    attainment: float | None
    """Part of the requests that got what they were owed; None where nothing is."""


@dataclass(frozen=True, slots=True)
class Switching:
    """What a policy's switches did."""

    switches: int
    failed: int
    seconds: float
    """Sum of their durations, from the decision to the last engine's answer."""
    paused: int
    moved: int


@dataclass(frozen=True, slots=True)
class Report:
    """A workload under one policy."""

    policy: str
    peak_throughput: float
    """Output tokens per second, in the best window."""
    mean_throughput: float
    """From the first arrival to the last end."""
    switching: Switching
    groups: dict[str, Figures]
    """All requests, and those of each phase and priority if there are several."""
    step_errors: dict[str, float]
    """Smoothed relative error of the policy's cost model, by layout."""


def report(
    policy: str,
    records: Sequence[Record],
    tokens: Mapping[int, float],
    *,
    switching: Switching,
    objectives: Sequence[Objective] = (),
    step_errors: Mapping[str, float] | None = None,
) -> Report:
    """Return the report of a run.

    Args:
        policy: its name.
        records: every request.
        tokens: output tokens by the second in which they came.
        switching: what its switches did.
        objectives: the most urgent first; None of them for a priority: nothing is owed.
        step_errors: see ``Report``.
    """
    start = min((record.arrived for record in records), default=0.0)
    end = max((r.ended for r in records if r.ended is not None), default=start)
    produced = sum(record.output_tokens for record in records)
    return Report(
        policy=policy,
        peak_throughput=peak(tokens),
        mean_throughput=produced / (end - start) if end > start else 0.0,
        switching=switching,
        groups={name: _figures(group, objectives) for name, group in _groups(records).items()},
        step_errors=dict(step_errors or {}),
    )


def _groups(records: Sequence[Record]) -> dict[str, Sequence[Record]]:
    groups: dict[str, Sequence[Record]] = {EVERYTHING: records}
    phases = [phase for phase in Phase if any(r.phase is phase for r in records)]
    if len(phases) > 1:
        groups |= {phase.value: [r for r in records if r.phase is phase] for phase in phases}
    priorities = sorted({record.priority for record in records})
    if len(priorities) > 1:
        groups |= {f"priority {p}": [r for r in records if r.priority == p] for p in priorities}
    return groups


def _figures(records: Sequence[Record], objectives: Sequence[Objective]) -> Figures:
    owed = [(r, o) for r in records if (o := _objective(r, objectives)) is not None]
    return Figures(
        requests=len(records),
        finished=sum(record.finished for record in records),
        ttft=Distribution.of(r.ttft for r in records if r.ttft is not None),
        tpot=Distribution.of(r.tpot for r in records if r.tpot is not None),
        queue_time=Distribution.of(r.queue_time for r in records if r.queue_time is not None),
        attainment=sum(o.met_by(r) for r, o in owed) / len(owed) if owed else None,
    )


def _objective(record: Record, objectives: Sequence[Objective]) -> Objective | None:
    """Return the first objective that is no more urgent than the request, else the last."""
    fitting = (o for o in objectives if record.priority <= o.priority)
    return next(fitting, objectives[-1] if objectives else None)


def peak(tokens: Mapping[int, float]) -> float:
    """Return the most tokens per second in any ``PEAK_SECONDS`` seconds that follow each other."""
    windows = (
        sum(tokens.get(second + k, 0.0) for k in range(PEAK_SECONDS))
        for second in range(min(tokens, default=0), max(tokens, default=0) + 1)
    )
    return max(windows, default=0.0) / PEAK_SECONDS


# --- for people and for machines ------------------------------------------------------------------


def as_json(reports: Sequence[Report], **about: Any) -> dict[str, Any]:
    """Return reports as JSON's types, beside what they are ``about``."""
    return {**about, "reports": [asdict(one) for one in reports]}


def table(reports: Sequence[Report]) -> str:
    """Return reports side by side, group by group. Times in milliseconds, queue time in seconds."""
    head = (
        f"{'group':<14}{'policy':<12}{'requests':>9}"
        f"{'TTFT mean':>11}{'p50':>9}{'p90':>9}{'p99':>9}"
        f"{'TPOT mean':>11}{'p50':>8}{'p90':>8}{'p99':>8}{'queue s':>9}{'p99':>8}{'SLO':>7}"
    )
    lines = [head]
    for name in dict.fromkeys(name for one in reports for name in one.groups):
        lines += [_line(name, one.policy, one.groups[name]) for one in reports]
    lines.append("")
    lines.append(
        f"{'policy':<12}{'peak tok/s':>11}{'mean tok/s':>11}{'switches':>9}{'failed':>7}"
        f"{'ms each':>9}{'paused':>8}{'moved':>7}   error of predicted step times"
    )
    lines += [_totals(one) for one in reports]
    return "\n".join(lines)


def _line(name: str, policy: str, figures: Figures) -> str:
    unfinished = figures.requests - figures.finished
    note = f"   {unfinished} did not finish" if unfinished else ""
    queue = figures.queue_time
    waits = "" if queue is None else f"{queue.mean:>9.2f}{queue.p99:>8.2f}"
    met = "" if figures.attainment is None else f"{figures.attainment:>7.1%}"
    return (
        f"{name:<14}{policy:<12}{figures.requests:>9}"
        f"{_ms(figures.ttft, (11, 9), 0)}{_ms(figures.tpot, (11, 8), 2)}"
        f"{waits:>17}{met:>7}{note}"
    )


def _ms(values: Distribution | None, widths: tuple[int, int], digits: int) -> str:
    first, rest = widths
    if values is None:
        return " " * (first + 3 * rest)
    texts = [f"{1000 * v:.{digits}f}" for v in (values.mean, values.p50, values.p90, values.p99)]
    return texts[0].rjust(first) + "".join(text.rjust(rest) for text in texts[1:])


def _totals(one: Report) -> str:
    done = one.switching
    each = f"{1000 * done.seconds / done.switches:.1f}" if done.switches else "-"
    errors = ", ".join(f"{layout} {error:.1%}" for layout, error in one.step_errors.items())
    return (
        f"{one.policy:<12}{one.peak_throughput:>11,.0f}{one.mean_throughput:>11,.0f}"
        f"{done.switches:>9}{done.failed:>7}{each:>9}{done.paused:>8}{done.moved:>7}   {errors}"
    )
