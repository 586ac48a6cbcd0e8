"""Pictures of runs over time, as SVG: requests on the node, its layout, throughput, and TTFT.

Written by hand because a few step curves do not justify a plotting library among the dependencies.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from loadgen.report import Record, quantile

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""One per run: told apart by those who do not see all colours."""
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 960, 150, 64, 36, 44
_POINTS = 300
_CHARACTER_WIDTH = 7

Curve = list[tuple[float, float]]
"""Times, and the value from each of them on."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """What is drawn of one run."""

    run: str
    """Its name."""
    records: Sequence[Record]
    tokens: Mapping[int, float]
    """Output tokens by the second in which they came."""
    widths: Sequence[tuple[float, float]] = ()
    """Times, and the mean engines per unit from each of them on; none: they are not known."""


def draw(title: str, timelines: Sequence[Timeline]) -> str:
    """Return an SVG document with one curve per run in each panel.

    There is no panel of the layout if no run has one.
    """
    ends = [r.ended for line in timelines for r in line.records if r.ended is not None]
    end = max(ends, default=1.0)
    window = end / _POINTS
    panels = [
        ("requests on the node", [_concurrency(line.records, window) for line in timelines]),
        ("output tokens per second", [_throughput(line.tokens, 4 * window) for line in timelines]),
        ("P90 TTFT by arrival, s", [_ttft(line.records, 4 * window) for line in timelines]),
    ]
    if any(line.widths for line in timelines):
        panels.insert(1, ("engines per unit (mean)", [list(line.widths) for line in timelines]))
    parts = [_text(_LEFT, 22, title, size=15), *_legend(timelines)]
    for number, (name, curves) in enumerate(panels):
        parts += _panel(_TOP + 20 + number * (_HEIGHT + _GAP), name, curves, end)
    height = _TOP + 20 + len(panels) * (_HEIGHT + _GAP)
    width = _LEFT + _WIDTH + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _concurrency(records: Sequence[Record], window: float) -> Curve:
    """Return the requests that have arrived and not ended, the most in every window."""
    changes = [(record.arrived, 1) for record in records]
    changes += [(record.ended, -1) for record in records if record.ended is not None]
    peaks: dict[int, int] = {}
    count = 0
    for time, change in sorted(changes):
        before, count = count, count + change
        k = int(time / window)
        peaks[k] = max(peaks.get(k, 0), before, count)
    return [(k * window, peak) for k, peak in sorted(peaks.items())]


def _throughput(tokens: Mapping[int, float], window: float) -> Curve:
    """Return the mean rate in windows of whole seconds."""
    seconds = max(1, round(window))
    sums: defaultdict[int, float] = defaultdict(float)
    for second, count in tokens.items():
        sums[second // seconds] += count
    return [(k * seconds, sums[k] / seconds) for k in range(max(sums, default=-1) + 1)]


def _ttft(records: Sequence[Record], window: float) -> Curve:
    by_window: defaultdict[int, list[float]] = defaultdict(list)
    for record in records:
        if record.ttft is not None:
            by_window[int(record.arrived / window)].append(record.ttft)
    return [(k * window, quantile(ttft, 0.9)) for k, ttft in sorted(by_window.items())]


def _legend(timelines: Sequence[Timeline]) -> list[str]:
    parts = []
    x = float(_LEFT)
    for number, line in enumerate(timelines):
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<rect x="{x:.0f}" y="30" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(x + 17, 40, line.run))
        x += 40 + _CHARACTER_WIDTH * len(line.run)
    return parts


def _panel(top: float, name: str, curves: Sequence[Curve], end: float) -> list[str]:
    highest = _nice(max((value for curve in curves for _, value in curve), default=1.0))
    bottom = top + _HEIGHT
    parts = [_text(_LEFT, top - 6, name)]
    for share in (0.0, 0.5, 1.0):
        y = bottom - share * _HEIGHT
        parts.append(_line(_LEFT, y, _LEFT + _WIDTH, y, "#dddddd"))
        parts.append(_text(_LEFT - 6, y + 4, f"{share * highest:g}", anchor="end"))
        x = _LEFT + share * _WIDTH
        parts.append(_text(x, bottom + 15, f"{share * end:.0f} s", anchor="middle"))
    for number, curve in enumerate(curves):
        points = _steps(curve, end, highest, bottom)
        colour = COLOURS[number % len(COLOURS)]
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.4"/>'
        )
    return parts


def _steps(curve: Curve, end: float, highest: float, bottom: float) -> str:
    """Return the points of a curve that keeps each value until the next one."""
    following = [*(time for time, _ in curve[1:]), end][: len(curve)]
    points = []
    for (time, value), until in zip(curve, following, strict=True):
        y = bottom - value / highest * _HEIGHT
        stretch = (time, max(time, min(until, end)))
        points += [f"{_LEFT + at / end * _WIDTH:.1f},{y:.1f}" for at in stretch]
    return " ".join(points)


def _nice(value: float) -> float:
    """Return the next number above ``value`` that reads well at the end of an axis."""
    if value <= 0:
        return 1.0
    unit: float = 10.0 ** math.floor(math.log10(value))
    return next(unit * step for step in (1, 2, 4, 5, 8, 10) if unit * step >= value)


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'
