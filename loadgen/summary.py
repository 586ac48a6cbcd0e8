"""The figures of how a workload's requests were served.

The definitions are those of ``vllm.benchmarks.serve.calculate_metrics``: only finished requests
count for times and tokens, and percentiles are interpolated.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shoal.loadgen.workload import Phase

PEAK_SECONDS = 5
"""Length of the windows whose best is the peak throughput: long enough to be sustained."""
EVERYTHING = "all"
"""Name of the group of all requests."""


@dataclass(frozen=True, slots=True)
class Record:
    """One request, as it was served. Times are seconds from the workload's start."""

    arrived: float
    started: float | None
    """When it was first in a batch."""
    first_token: float | None
    ended: float | None
    output_tokens: int
    finished: bool
    """Whether it got all of its tokens."""
    priority: int = 0
    phase: Phase = Phase.BETWEEN
    prompt_tokens: int = 0
    itls: Sequence[float] = ()
    """Inter-token latencies, where they were measured."""
    cached_tokens: int | None = None
    """Prompt tokens that were found in a prefix cache, where that is known."""

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

    @property
    def e2el(self) -> float | None:
        """End-to-end latency."""
        return None if self.ended is None else self.ended - self.arrived


@dataclass(frozen=True, slots=True)
class Objective:
    """What is promised to requests up to this priority that no more urgent objective covers."""

    priority: int
    ttft: float
    tpot: float

    def met_by(self, record: Record) -> bool:
        """Return whether the request got what was promised."""
        on_time = record.ttft is not None and record.ttft <= self.ttft
        return record.finished and on_time and (record.tpot or 0.0) <= self.tpot


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean, standard deviation and interpolated percentiles, as ``vllm bench serve`` takes them."""

    mean: float
    std: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Distribution | None":
        """Return the distribution of these values, None if there are none."""
        taken = list(values)
        if not taken:
            return None
        shares = (quantile(taken, share) for share in (0.5, 0.9, 0.99))
        return cls(statistics.fmean(taken), statistics.pstdev(taken), *shares)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that ``share`` of the values do not exceed, interpolated."""
    ordered = sorted(values)
    low, part = divmod(share * (len(ordered) - 1), 1)
    pair = ordered[int(low) : int(low) + 2]
    return pair[0] + part * (pair[-1] - pair[0])


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a group of requests. Distributions are of the finished requests."""

    requests: int
    finished: int
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2el: Distribution | None
    queue_time: Distribution | None
    attainment: float | None
    """Share of the requests that got what was promised; None if nothing is promised."""
    goodput: float | None
    """Requests per second that got what was promised."""
    hit_rate: float | None = None
    """Share of the prompt tokens that were found in a prefix cache; None if that is not known."""


@dataclass(frozen=True, slots=True)
class Switching:
    """What a policy's switches did."""

    switches: int
    failed: int
    seconds: float
    """Sum of their durations, from the decision to the last engine's answer."""
    paused: int
    moved: int
    carried: int


@dataclass(frozen=True, slots=True)
class Report:
    """One run of a workload."""

    run: str
    """The run's name; in the simulator, the policy's."""
    duration: float
    """Seconds over which all throughputs are taken."""
    prompt_tokens: int
    output_tokens: int
    request_throughput: float
    output_throughput: float
    total_throughput: float
    """Prompt and output tokens per second."""
    peak_throughput: float
    """Output tokens per second, in the best window."""
    switching: Switching | None
    """What its switches did; None if the server has no layout."""
    groups: dict[str, Figures]
    """All requests, and those of each phase and priority if there are several."""
    step_errors: dict[str, float]
    """Smoothed relative error of the policy's cost model, by layout and kind of step."""


def report(
    run: str,
    records: Sequence[Record],
    tokens: Mapping[int, float],
    *,
    switching: Switching | None = None,
    objectives: Sequence[Objective] = (),
    step_errors: Mapping[str, float] | None = None,
    duration: float | None = None,
) -> Report:
    """Return the report of a run.

    Args:
        run: its name.
        records: every request.
        tokens: output tokens by the second in which they came.
        switching: what its switches did.
        objectives: the most urgent first; if there are none, nothing is promised.
        step_errors: see ``Report``.
        duration: seconds the run took; None: from the first arrival to the last end.
    """
    if duration is None:
        start = min((record.arrived for record in records), default=0.0)
        duration = max((r.ended for r in records if r.ended is not None), default=start) - start
    finished = [record for record in records if record.finished]
    prompt_tokens = sum(record.prompt_tokens for record in finished)
    output_tokens = sum(record.output_tokens for record in finished)
    return Report(
        run=run,
        duration=duration,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        request_throughput=_rate(len(finished), duration),
        output_throughput=_rate(output_tokens, duration),
        total_throughput=_rate(prompt_tokens + output_tokens, duration),
        peak_throughput=peak(tokens),
        switching=switching,
        groups={
            name: _figures(group, objectives, duration) for name, group in grouped(records).items()
        },
        step_errors=dict(step_errors or {}),
    )


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def grouped(records: Sequence[Record]) -> dict[str, Sequence[Record]]:
    """Return all requests, and those of each phase and priority if there are several, by name."""
    groups: dict[str, Sequence[Record]] = {EVERYTHING: records}
    phases = [phase for phase in Phase if any(r.phase is phase for r in records)]
    if len(phases) > 1:
        groups |= {phase.value: [r for r in records if r.phase is phase] for phase in phases}
    priorities = sorted({record.priority for record in records})
    if len(priorities) > 1:
        groups |= {f"priority {p}": [r for r in records if r.priority == p] for p in priorities}
    return groups


def _figures(
    records: Sequence[Record], objectives: Sequence[Objective], duration: float
) -> Figures:
    finished = [record for record in records if record.finished]
    owed = [(r, o) for r in records if (o := _objective(r, objectives)) is not None]
    good = sum(objective.met_by(record) for record, objective in owed)
    known = [(r.cached_tokens, r.prompt_tokens) for r in finished if r.cached_tokens is not None]
    prompts = sum(prompt for _, prompt in known)
    return Figures(
        requests=len(records),
        finished=len(finished),
        ttft=Distribution.of(r.ttft for r in finished if r.ttft is not None),
        tpot=Distribution.of(r.tpot for r in finished if r.tpot is not None),
        itl=Distribution.of(itl for r in finished for itl in r.itls),
        e2el=Distribution.of(r.e2el for r in finished if r.e2el is not None),
        queue_time=Distribution.of(r.queue_time for r in finished if r.queue_time is not None),
        attainment=good / len(owed) if owed else None,
        goodput=_rate(good, duration) if owed else None,
        hit_rate=sum(cached for cached, _ in known) / prompts if prompts else None,
    )


def _objective(record: Record, objectives: Sequence[Objective]) -> Objective | None:
    """Return the first objective that is no more urgent than the request, else the last."""
    fitting = (o for o in objectives if record.priority <= o.priority)
    return next(fitting, objectives[-1] if objectives else None)


def peak(tokens: Mapping[int, float]) -> float:
    """Return the most tokens per second over any ``PEAK_SECONDS`` consecutive seconds."""
    windows = (
        sum(tokens.get(second + k, 0.0) for k in range(PEAK_SECONDS))
        for second in range(min(tokens, default=0), max(tokens, default=0) + 1)
    )
    return max(windows, default=0.0) / PEAK_SECONDS


def as_json(reports: Sequence[Report], **about: Any) -> dict[str, Any]:
    """Return reports as JSON's types, beside the entries of ``about``."""
    return {**about, "reports": [asdict(one) for one in reports]}
