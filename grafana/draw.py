"""Draws the dashboards with data from Prometheus: ``python -m shoal.grafana.draw FOLDER``.

The pictures show whether panels show what they should, without Grafana.
"""

import sys
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import httpx
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    EngFormatter,
    Formatter,
    FuncFormatter,
    MaxNLocator,
    PercentFormatter,
)
from numpy.typing import NDArray
from PIL import Image

from shoal.grafana.api import Prometheus, PrometheusError, Series
from shoal.grafana.boards import FOLDER, Board, PanelSpec, Window, read_boards
from shoal.grafana.panels import COUNT, MISSING, NO_DATA
from shoal.grafana.verify import ask, parser, window_of

COLUMNS = 24
GRID_INCHES = (0.62, 0.36)
"""Width and height of a cell of Grafana's grid."""
MARGIN = 0.55
DPI = 72
COLOURS = ("#3274d9", "#e0752d", "#629e51", "#ba43a9", "#e5ac0e", "#65c5db", "#e24d42", "#6d1f62")
NAMED = {"blue": COLOURS[0], "orange": COLOURS[1], "green": COLOURS[2], "purple": COLOURS[3]}
NAMED |= {"yellow": COLOURS[4], "red": COLOURS[6], MISSING: MISSING}
MEASURES = {"s": "s", "bytes": "B", "hertz": "Hz", "watt": "W"}
"""Units that have thousandths; what is counted has none."""
RATES = {"reqps": " req/s", "ops": " /s", "binBps": " B/s"}
PALETTE = 128
"""Number of colours in a picture's file: few, so that the file is small."""

Named = Sequence[tuple[str, Series]]
"""Series with their names."""


def draw(board: Board, prometheus: Prometheus, window: Window) -> Figure:
    """Return a picture of a dashboard.

    Raises:
        PrometheusError: Prometheus does not answer.
    """
    rows = max(panel.y + panel.height for panel in board.panels)
    figure = Figure(figsize=(COLUMNS * GRID_INCHES[0], rows * GRID_INCHES[1]), dpi=DPI)
    figure.suptitle(board.title, x=0.01, y=0.998, ha="left", fontsize=14)
    for panel in board.panels:
        axes = figure.add_axes(_place(panel, rows))
        axes.set_title(panel.title, fontsize=8, loc="left")
        axes.tick_params(labelsize=7)
        named = [
            (panel.names.get(name, name), series)
            for target in panel.targets
            for series in ask(prometheus, target, window)
            for name in [target.name(series.labels)]
            if series.has_data
        ]
        if named:
            DRAWN_AS[panel.kind](axes, panel, named, window)
        else:
            _write(axes, NO_DATA)
            if panel.kind == "stat":
                axes.set_facecolor(NAMED[panel.steps[0][1]])
    return figure


def _place(panel: PanelSpec, rows: int) -> tuple[float, float, float, float]:
    """Return left, bottom, width and height as fractions of the picture."""
    left, right = panel.x + MARGIN * 2, panel.x + panel.width - MARGIN / 2
    top, bottom = panel.y + 2 * MARGIN, panel.y + panel.height - MARGIN * 1.3
    return left / COLUMNS, 1 - bottom / rows, (right - left) / COLUMNS, (bottom - top) / rows


def _curves(axes: Axes, panel: PanelSpec, named: Named, window: Window) -> None:
    times = np.arange(window.start, window.end + window.step / 2, window.step) - window.end
    curves = [_on_grid(series, window, len(times)) for _, series in named]
    names = [name for name, _ in named]
    if panel.stacked:
        axes.stackplot(times, np.nan_to_num(curves), labels=names, colors=COLOURS, alpha=0.7)
    else:
        marker = "." if panel.style == "points" else ""
        for name, curve, colour in zip(names, curves, cycle(COLOURS), strict=False):
            axes.plot(times, curve, label=name, c=colour, lw=1, marker=marker)
    axes.set_xlim(times[0], 0)
    axes.set_ylim(0, None if np.nanmax(curves) else 1)
    axes.grid(alpha=0.3)
    axes.yaxis.set_major_formatter(_formatter(panel.unit))
    if panel.unit == COUNT:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=6, loc="upper left", framealpha=0.5)


def _formatter(unit: str) -> Formatter:
    if unit == "percentunit":
        return PercentFormatter(1.0)
    if unit in MEASURES:
        return EngFormatter(MEASURES[unit])
    above = EngFormatter(RATES.get(unit, "").strip())
    return FuncFormatter(
        lambda value, _: above(value) if value >= 1 else f"{value:g}{RATES.get(unit, '')}"
    )


def _spread(axes: Axes, _panel: PanelSpec, named: Named, window: Window) -> None:
    """Draw the events between two bounds of a histogram, whose series have those up to a bound."""
    times = np.arange(window.start, window.end + window.step / 2, window.step) - window.end
    ascending = sorted(named, key=lambda one: float(one[0]))
    counts = np.nan_to_num([_on_grid(series, window, len(times)) for _, series in ascending])
    buckets = np.diff(counts, axis=0, prepend=0)
    axes.imshow(
        np.where(buckets > 0, buckets, np.nan),
        aspect="auto",
        origin="lower",
        cmap="Oranges",
        interpolation="nearest",
        extent=(times[0], 0, -0.5, len(ascending) - 0.5),
    )
    axes.set_yticks(range(0, len(ascending), 4), [name for name, _ in ascending[::4]])
    axes.set_ylabel("at most, s", fontsize=6)


def _on_grid(series: Series, window: Window, length: int) -> NDArray[np.float64]:
    """Return a value for each point of the window; NaN where the series has none."""
    values = np.full(length, np.nan)
    for at, value in series.points:
        values[round((at - window.start) / window.step)] = value
    return values


def _timeline(axes: Axes, panel: PanelSpec, named: Named, window: Window) -> None:
    for row, (name, series) in enumerate(named):
        for at, value in series.points:
            colour = NAMED[panel.states[f"{value:g}"]["color"]]
            axes.barh(row, window.step, left=at - window.end, color=colour, height=0.7)
        axes.text(window.start - window.end, row, f" {name}", fontsize=7, va="center")
    axes.set_yticks([])
    axes.invert_yaxis()
    axes.set_xlim(window.start - window.end, 0)
    for state in panel.states.values():
        axes.bar(0, 0, color=NAMED[state["color"]], label=state["text"])
    axes.legend(fontsize=6, loc="upper center", ncols=5, bbox_to_anchor=(0.5, -0.12))


def _bars(axes: Axes, _panel: PanelSpec, named: Named, _window: Window) -> None:
    values = [series.points[-1][1] for _, series in named]
    axes.barh(range(len(named)), values, color=COLOURS[5])
    for row, (name, _) in enumerate(named):
        axes.text(0, row, f" {values[row]:.0f}  {name}", fontsize=7, va="center")
    axes.set_xlim(left=0)
    axes.set_yticks([])
    axes.invert_yaxis()


def _figures(axes: Axes, panel: PanelSpec, named: Named, _window: Window) -> None:
    texts = []
    for name, series in named:
        value = series.points[-1][1]
        figure = f"{value:.1%}" if panel.unit == "percentunit" else f"{value:.3g}"
        figure = f"{value:.0f}" if panel.unit == COUNT else figure
        state = panel.states.get(f"{value:g}")
        named_value = {"name": name, "value_and_name": f"{name}  {figure}"}.get(panel.style, figure)
        texts.append(state["text"] if state else named_value)
        reached = [colour for limit, colour in panel.steps if limit is None or value >= limit]
        axes.set_facecolor(NAMED[state["color"] if state else reached[-1]])
    _write(axes, "\n".join(texts))


def _write(axes: Axes, text: str) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, text, size=12, ha="center", va="center", transform=axes.transAxes)


DRAWN_AS = {
    "timeseries": _curves,
    "heatmap": _spread,
    "state-timeline": _timeline,
    "bargauge": _bars,
    "stat": _figures,
}
"""How each kind of panel is drawn."""


def main() -> int:
    """Write one picture for each dashboard."""
    arguments = parser("Draw the dashboards with what Prometheus has for them.")
    arguments.add_argument("folder", type=Path)
    args = arguments.parse_args()
    window = window_of(args)
    with httpx.Client(base_url=args.prometheus) as http:
        for board in read_boards(FOLDER):
            path = args.folder / f"{board.title.rpartition(' ')[2].lower()}.png"
            try:
                draw(board, Prometheus(http), window).savefig(path)
            except PrometheusError as error:
                print(error, file=sys.stderr)
                return 1
            with Image.open(path) as picture:
                few = picture.convert("RGB").quantize(PALETTE, Image.Quantize.MAXCOVERAGE)
                few.save(path, optimize=True)
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
