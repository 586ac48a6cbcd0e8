"""Replays as an HTML page, with figures as text and a picture. The page needs no script."""

from collections.abc import Sequence
from html import escape

from shoal.loadgen import plot, text_tables
from shoal.loadgen.replay_results import Result
from shoal.loadgen.summary import EVERYTHING, Distribution, Objective, Report

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1c1c1c}
body{max-width:1100px;margin:2em auto;padding:0 1em}
h1{font-size:1.5em;margin-bottom:.2em}h2{font-size:1.15em;margin:1.6em 0 .3em}
table{border-collapse:collapse;margin:1em 0;font-variant-numeric:tabular-nums}
th,td{padding:.3em .8em;text-align:right;border-bottom:1px solid #ddd}
th{font-weight:600;color:#555;vertical-align:bottom}
th:first-child,td:first-child{text-align:left;font-weight:600}
pre{font-size:12px;line-height:1.35;overflow-x:auto;background:#f7f7f7;padding:.8em;border-radius:4px}
svg{max-width:100%;height:auto}summary{cursor:pointer;color:#0072b2}
.invalid{color:#b00020;font-weight:600}.quiet{color:#666}
"""


def title_of(results: Sequence[Result]) -> str:
    """Return the names of the workloads."""
    return " and ".join(dict.fromkeys(result.workload for result in results))


def page(results: Sequence[Result], objectives: Sequence[Objective] = ()) -> str:
    """Return a page that shows replays side by side."""
    title = title_of(results)
    reports = [result.report(objectives) for result in results]
    parts = [
        f"<h1>Replay of {escape(title)}</h1>",
        *(_verdict(result, named=len(results) > 1) for result in results),
        _table(results, reports),
        plot.draw(title, [result.timeline() for result in results], objectives),
        _folded("All figures, by priority and phase", text_tables.side_by_side(reports)),
        *(
            _folded(f"{result.name}, as vllm bench serve prints it", result.summary(objectives))
            for result in results
        ),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def _table(results: Sequence[Result], reports: Sequence[Report]) -> str:
    """Return the figures that are looked at first: a row for each run."""
    rows = [_row(result, one) for result, one in zip(results, reports, strict=True)]
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row.values()) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _row(result: Result, one: Report) -> dict[str, str]:
    everything, done = one.groups[EVERYTHING], one.switching
    return {
        "run": result.name,
        "requests": f"{everything.requests:,}",
        "failed": f"{everything.requests - everything.finished:,}",
        "TTFT mean, ms": _ms(everything.ttft, "mean"),
        "P90": _ms(everything.ttft, "p90"),
        "TPOT mean, ms": _ms(everything.tpot, "mean"),
        "P90 ": _ms(everything.tpot, "p90"),
        "request P90, ms": _ms(everything.e2el, "p90"),
        "output tokens/s": f"{one.output_throughput:,.0f}",
        "targets kept": "-" if everything.attainment is None else f"{everything.attainment:.1%}",
        "switches": "-" if done is None else f"{done.switches:,}",
    }


def _ms(values: Distribution | None, which: str) -> str:
    return "-" if values is None else f"{1000 * getattr(values, which):,.1f}"


def _verdict(result: Result, *, named: bool) -> str:
    verdict = result.verdict
    problems = "".join(f'<p class="invalid">Invalid: {escape(one)}</p>' for one in verdict.problems)
    name = f"{result.name}: " if named else ""
    return (
        f'{problems}<p class="quiet">{escape(name + result.model)} by {escape(result.endpoint)}. '
        f"Sending lagged {verdict.send_lag}, the event loop {verdict.loop_lag}.</p>"
    )
