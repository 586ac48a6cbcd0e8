"""Replays as an HTML page, with figures as text and a picture. The page needs no script."""

from collections.abc import Sequence
from html import escape

from shoal.loadgen import plot, text_tables
from shoal.loadgen.replay_results import Result
from shoal.loadgen.summary import Objective

_STYLE = (
    "body{font-family:sans-serif;margin:2em auto;max-width:1080px}"
    "pre{font-size:12px;overflow-x:auto}svg{max-width:100%;height:auto}"
    ".invalid{color:#b00020;font-weight:bold}"
)


def page(results: Sequence[Result], objectives: Sequence[Objective] = ()) -> str:
    """Return a page that shows replays side by side."""
    title = " and ".join(dict.fromkeys(result.workload for result in results))
    reports = [result.report(objectives) for result in results]
    parts = [
        f"<h1>Replay of {escape(title)}</h1>",
        plot.draw(title, [result.timeline() for result in results]),
        f"<pre>{escape(text_tables.side_by_side(reports))}</pre>",
        *(
            f"<h2>{escape(result.name)}</h2>\n{_verdict(result)}\n"
            f"<pre>{escape(result.summary(objectives))}</pre>"
            for result in results
        ),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _verdict(result: Result) -> str:
    verdict = result.verdict
    problems = "".join(f'<p class="invalid">Invalid: {escape(one)}</p>' for one in verdict.problems)
    return (
        f"{problems}<p>{escape(result.model)} by {escape(result.endpoint)}. "
        f"Sending lagged {verdict.send_lag}, the event loop {verdict.loop_lag}.</p>"
    )
