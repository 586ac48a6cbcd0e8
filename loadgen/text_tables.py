"""Reports as text: several side by side, or one as ``vllm bench serve`` prints it."""

from collections.abc import Iterator, Mapping, Sequence

from shoal.loadgen.counters import Count
from shoal.loadgen.summary import EVERYTHING, Distribution, Figures, Report

_LABEL_WIDTH = 40
_RULE_WIDTH = 50
_TOTALS_HEAD = (
    f"{'peak tok/s':>11}{'mean tok/s':>11}{'switches':>9}{'failed':>7}"
    f"{'ms each':>9}{'paused':>8}{'moved':>7}{'carried':>9}   error of predicted step times"
)


def side_by_side(reports: Sequence[Report]) -> str:
    """Return reports as tables, group by group. Times in milliseconds, queue time in seconds."""
    names = dict.fromkeys(name for one in reports for name in one.groups)
    rows = [
        (name, one.run, one.groups[name]) for name in names for one in reports if name in one.groups
    ]
    width = max((len(run) for _, run, _ in rows), default=0) + 2
    blocks = [
        [
            _head(width, ("TTFT", "TPOT")) + f"{'queue s':>9}{'p99':>8}{'SLO':>7}{'cached':>8}",
            *(_label(width, row) + _served(row[2]) for row in rows),
        ],
        [
            _head(width, ("E2EL", "ITL")),
            *(_label(width, row) + _times(row[2].e2el) + _times(row[2].itl) for row in rows),
        ],
        [
            f"{'run':<{width}}" + _TOTALS_HEAD,
            *(_totals(width, one) for one in reports),
        ],
    ]
    return "\n\n".join("\n".join(line.rstrip() for line in block) for block in blocks)


def _head(width: int, metrics: Sequence[str]) -> str:
    columns = "".join(f"{f'{name} mean':>12}{'p50':>9}{'p90':>9}{'p99':>9}" for name in metrics)
    return f"{'group':<14}{'run':<{width}}{'requests':>9}{columns}"


def _label(width: int, row: tuple[str, str, Figures]) -> str:
    group, run, figures = row
    return f"{group:<14}{run:<{width}}{figures.requests:>9}"


def _served(figures: Figures) -> str:
    unfinished = figures.requests - figures.finished
    note = f"   {unfinished} did not finish" if unfinished else ""
    queue = figures.queue_time
    waits = "" if queue is None else f"{queue.mean:>9.2f}{queue.p99:>8.2f}"
    met = "" if figures.attainment is None else f"{figures.attainment:>7.1%}"
    hits = "" if figures.hit_rate is None else f"{figures.hit_rate:>8.1%}"
    return f"{_times(figures.ttft)}{_times(figures.tpot)}{waits:>17}{met:>7}{hits:>8}{note}"


def _times(values: Distribution | None) -> str:
    if values is None:
        return " " * 39
    first, *rest = (1000 * v for v in (values.mean, values.p50, values.p90, values.p99))
    return f"{first:>12.2f}" + "".join(f"{value:>9.2f}" for value in rest)


def _totals(width: int, one: Report) -> str:
    done = one.switching
    line = f"{one.run:<{width}}{one.peak_throughput:>11,.0f}{one.output_throughput:>11,.0f}"
    if done is None:
        return line
    each = f"{1000 * done.seconds / done.switches:.1f}" if done.switches else "-"
    errors = ", ".join(f"{layout} {error:.1%}" for layout, error in one.step_errors.items())
    return (
        f"{line}{done.switches:>9}{done.failed:>7}{each:>9}{done.paused:>8}{done.moved:>7}"
        f"{done.carried:>9}   {errors}"
    )


# --- one run --------------------------------------------------------------------------------------


def summary(
    one: Report, outcomes: Mapping[str, int], peaks: Mapping[str, float] | None = None
) -> str:
    """Return a run with the labels of ``vllm bench serve``, and P90 beside its percentiles.

    Args:
        one: the run.
        outcomes: how many requests ended in which way.
        peaks: figures to print between the throughputs, by label.
    """
    everything = one.groups[EVERYTHING]
    lines = [
        f"{' Serving Benchmark Result ':=^{_RULE_WIDTH}}",
        _line("Successful requests:", everything.finished),
        _line("Failed requests:", everything.requests - everything.finished),
        *(_line(f"  {name}:", count) for name, count in outcomes.items() if name != "ok"),
        _line("Benchmark duration (s):", one.duration),
        _line("Total input tokens:", one.prompt_tokens),
        _line("Total generated tokens:", one.output_tokens),
        _line("Request throughput (req/s):", one.request_throughput),
    ]
    if everything.goodput is not None:
        lines.append(_line("Request goodput (req/s):", everything.goodput))
    lines += [
        _line("Output token throughput (tok/s):", one.output_throughput),
        *(_line(f"{label}:", value) for label, value in (peaks or {}).items()),
        _line("Total token throughput (tok/s):", one.total_throughput),
    ]
    for title, name, values in (
        ("Time to First Token", "TTFT", everything.ttft),
        ("Time per Output Token (excl. 1st token)", "TPOT", everything.tpot),
        ("Inter-token Latency", "ITL", everything.itl),
        ("End-to-end Latency", "E2EL", everything.e2el),
    ):
        if values is not None:
            lines += [f"{title:-^{_RULE_WIDTH}}", *_percentiles(name, values)]
    return "\n".join([*lines, "=" * _RULE_WIDTH])


def counts(both: Sequence[Count]) -> list[str]:
    """Return a head, and a line for each thing that client and server both counted."""
    if not both:
        return []
    return [f"{'counted':<24}{'client':>12}{'server':>12}", *map(str, both)]


def _percentiles(name: str, values: Distribution) -> Iterator[str]:
    for label, value in (
        ("Mean", values.mean),
        ("Median", values.p50),
        ("P90", values.p90),
        ("P99", values.p99),
    ):
        yield _line(f"{label} {name} (ms):", 1000 * value)


def _line(label: str, value: float) -> str:
    number = f"{value}" if isinstance(value, int) else f"{value:.2f}"
    return f"{label:<{_LABEL_WIDTH}} {number:<10}".rstrip()
