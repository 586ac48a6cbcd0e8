"""Pictures of runs over time, as SVG: requests on the node, its layout, throughput, and TTFT."""

import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.loadgen.summary import Record, quantile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""One colour per run. Colour-blind people can tell them apart (Okabe and Ito)."""
_WIDTH_INCHES, _PANEL_INCHES = 10.0, 1.9
_POINTS = 300
_LEGEND_COLUMNS = 4

Curve = list[tuple[float, float]]
"""Times, and the value from each time on."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The data of one run that is drawn."""

    run: str
    """Its name."""
    records: Sequence[Record]
    tokens: Mapping[int, float]
    """Output tokens by the second in which they came."""
    widths: Sequence[tuple[float, float]] = ()
    """Times, and the mean engines per unit from each time on; empty if not known."""


def draw(title: str, timelines: Sequence[Timeline]) -> str:
    """Return an SVG document with one curve per run in each panel.

    The panel of the layout is left out if no run has a layout.
    """
    from matplotlib import rc_context  # slow to import, and only pictures need it

    # The same runs give the same bytes, and text stays text: people search and copy it.
    with (
        rc_context({"svg.fonttype": "none", "svg.hashsalt": "shoal"}),
        io.StringIO() as document,
    ):
        figure(title, timelines).savefig(document, format="svg", metadata={"Date": None})
        svg = document.getvalue()
    return svg[svg.index("<svg") :]  # an HTML page takes the element without XML's prologue


def figure(title: str, timelines: Sequence[Timeline]) -> "Figure":
    """Return the figure that ``draw`` saves: panels below each other, by seconds of the run."""
    from matplotlib.figure import Figure

    ends = [r.ended for line in timelines for r in line.records if r.ended is not None]
    end = max(ends, default=1.0)
    panels = _panels(timelines, end / _POINTS)
    size = (_WIDTH_INCHES, 1.0 + _PANEL_INCHES * len(panels))
    made = Figure(figsize=size, layout="constrained")
    made.suptitle(title, parse_math=False)
    for axes, (name, curves) in zip(made.subplots(len(panels), sharex=True), panels, strict=True):
        axes.set_title(name, loc="left", fontsize="medium")
        for number, (line, curve) in enumerate(zip(timelines, curves, strict=True)):
            times, values = zip(*_until(curve, end), strict=True) if curve else ((), ())
            colour = COLOURS[number % len(COLOURS)]
            axes.step(times, values, where="post", color=colour, label=line.run, linewidth=1.2)
        axes.set_xlim(0.0, end)
        axes.set_ylim(bottom=0.0)
        axes.grid(visible=True, color="#dddddd")
    axes.set_xlabel("seconds since the start")
    names = made.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=_LEGEND_COLUMNS
    )
    for text in names.get_texts():
        text.set_parse_math(False)
    return made


def _panels(timelines: Sequence[Timeline], window: float) -> list[tuple[str, list[Curve]]]:
    panels = [
        ("requests on the node", [_concurrency(line.records, window) for line in timelines]),
        ("output tokens per second", [_throughput(line.tokens, 4 * window) for line in timelines]),
        ("P90 TTFT by arrival, s", [_ttft(line.records, 4 * window) for line in timelines]),
    ]
    if any(line.widths for line in timelines):
        panels.insert(1, ("engines per unit (mean)", [list(line.widths) for line in timelines]))
    return panels


def _until(curve: Curve, end: float) -> Curve:
    """Return the curve with its last value kept until ``end``."""
    time, value = curve[-1]
    return [*curve, (max(time, end), value)]


def _concurrency(records: Sequence[Record], window: float) -> Curve:
    """Return the most requests in progress in every window."""
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
