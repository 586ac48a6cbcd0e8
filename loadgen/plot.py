"""Pictures of runs, as SVG: layouts, requests, throughput and latencies over time."""

import io
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.loadgen import curves
from shoal.loadgen.curves import Timeline
from shoal.loadgen.summary import Objective, Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""One colour for each run, or for each priority of one run. Colour-blind people can tell them apart
(Okabe and Ito)."""
DASHES: tuple[str, ...] = ("-", "--", ":", "-.")
"""One style for each priority, where colours stand for runs."""
WIDTH_COLOURS = {1: "#d5dee8", 2: "#9ecae1", 4: "#4292c6", 8: "#08519c"}
"""Colours of units by their engines: the darker, the wider."""
BURST_COLOUR, TARGET_COLOUR, GRID_COLOUR = "#fdf1cf", "#b00020", "#e6e6e6"
_WIDTH_INCHES = 11.0
_PANEL_INCHES, _ROW_INCHES = 1.6, 0.26
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.75, 0.15, 0.75, 0.65
_GAP, _BELOW_TIME = 0.45, 0.25
"""Inches between panels, and what the axis of time needs more."""
_POINTS = 300
_LABEL_SHARE = 0.035
"""Share of the picture's width from which on a bar has a label."""
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.titleweight": "bold",
    "axes.titlesize": 9.5,
    # The same runs give the same bytes, and text stays text: people search and copy it.
    "svg.fonttype": "none",
    "svg.hashsalt": "shoal",
}


def draw(title: str, timelines: Sequence[Timeline], objectives: Sequence[Objective] = ()) -> str:
    """Return an SVG document. Panels for layouts are left out if no run has layouts.

    Args:
        title: of the picture.
        timelines: the runs.
        objectives: what is drawn as targets.
    """
    return _document(lambda: figure(title, timelines, objectives))


def draw_overview(title: str, timelines: Sequence[Timeline]) -> str:
    """Return an SVG document with layouts, requests and throughput, but without latencies."""
    return _document(lambda: figure(title, timelines, latencies=False))


def _document(make: "Callable[[], Figure]") -> str:
    from matplotlib import rc_context  # slow to import, and only pictures need it

    with rc_context(_STYLE), io.StringIO() as document:
        make().savefig(document, format="svg", metadata={"Date": None})
        svg = document.getvalue()
    return svg[svg.index("<svg") :]  # an HTML page takes the element without XML's prologue


def figure(
    title: str,
    timelines: Sequence[Timeline],
    objectives: Sequence[Objective] = (),
    *,
    latencies: bool = True,
) -> "Figure":
    """Return the figure that ``draw`` saves: panels by time, and distributions below them."""
    with_layouts = [line for line in timelines if line.layouts]
    rows = [_ROW_INCHES * max(2, _engines(line)) for line in with_layouts]
    rows += [_PANEL_INCHES] * (4 if latencies else 2)
    made, over_time, distributions = _panels(rows, _PANEL_INCHES if latencies else 0.0)
    made.suptitle(title, parse_math=False, fontsize=12, fontweight="bold")
    end = max((line.end for line in timelines), default=0.0) or 1.0
    for axes, line in zip(over_time, with_layouts, strict=False):
        _draw_layouts(axes, line, end, named=len(timelines) > 1)
    requests, tokens, *by_arrival = over_time[len(with_layouts) :]
    _draw_load(requests, tokens, timelines, end)
    for axes, latency in zip(by_arrival, _LATENCIES, strict=False):
        _draw_latency(axes, latency, timelines, objectives, end)
    for axes in over_time:
        for start, stop in curves.bursts(timelines[0].records) if timelines else ():
            axes.axvspan(start, stop, color=BURST_COLOUR, zorder=-1, linewidth=0)
        axes.set_xlim(0.0, end)
        axes.tick_params(labelbottom=axes is over_time[-1])
    over_time[-1].set_xlabel("seconds since the start (bursts are shaded)")
    for axes, latency in zip(distributions, _LATENCIES, strict=False):
        _draw_distribution(axes, latency, timelines, objectives)
    _draw_legend(made, by_arrival[0] if latencies else requests)
    return made


def _panels(rows: Sequence[float], pair: float) -> "tuple[Figure, list[Axes], list[Axes]]":
    """Return a figure, its panels over time from the top, and the two below them.

    Every place is computed here: matplotlib's own layouts differ from run to run in the last bit.

    Args:
        rows: heights of the panels over time, in inches.
        pair: height of the two others, which are side by side; 0: there are none.
    """
    from matplotlib.figure import Figure

    below = _GAP + pair if pair else 0.0
    height = _TOP + sum(rows) + _GAP * (len(rows) - 1) + _BELOW_TIME + below + _BOTTOM
    made = Figure(figsize=(_WIDTH_INCHES, height))
    whole = _WIDTH_INCHES - _LEFT - _RIGHT
    half = (whole - _GAP) / 2

    def panel(left: float, top: float, width: float, tall: float, like: "Axes | None") -> "Axes":
        place = (left / _WIDTH_INCHES, (top - tall) / height, width / _WIDTH_INCHES, tall / height)
        return made.add_axes(place, sharex=like)

    over_time: list[Axes] = []
    top = height - _TOP
    for tall in rows:
        over_time.append(panel(_LEFT, top, whole, tall, over_time[0] if over_time else None))
        top -= tall + _GAP
    places = (_LEFT, _LEFT + half + _GAP) if pair else ()
    return made, over_time, [panel(x, top - _BELOW_TIME, half, pair, None) for x in places]


class _Latency(NamedTuple):
    name: str
    of: Callable[[Record], float | None]
    """Returns it in seconds; None: the request has none."""
    target: Callable[[Objective], float]


_LATENCIES = (
    _Latency("TTFT", lambda record: record.ttft, lambda objective: objective.ttft),
    _Latency("TPOT", lambda record: record.tpot, lambda objective: objective.tpot),
)


def _engines(line: Timeline) -> int:
    return 1 + max((e for _, units in line.layouts for unit in units for e in unit), default=0)


# --- layouts --------------------------------------------------------------------------------------


def _draw_layouts(axes: "Axes", line: Timeline, end: float, *, named: bool) -> None:
    """Draw a row for each engine; a unit is one bar over the rows of its engines."""
    from matplotlib.patches import Rectangle

    engines, widths = _engines(line), set()
    for bar in curves.bars(line.layouts, end):
        first, size, seconds = bar.engines[0], len(bar.engines), bar.end - bar.start
        widths.add(size)
        place = (bar.start, first + 0.06)
        colour = WIDTH_COLOURS.get(size, WIDTH_COLOURS[8])
        axes.add_patch(Rectangle(place, seconds, size - 0.12, facecolor=colour, edgecolor="none"))
        if size > 1 and seconds > _LABEL_SHARE * end:
            white = "white" if size > 2 else "black"
            middle = (bar.start + seconds / 2, first + size / 2)
            axes.annotate(_name(size), middle, ha="center", va="center", color=white, fontsize=8)
    axes.set_ylim(engines, 0)
    axes.set_yticks([k + 0.5 for k in range(engines)], [f"engine {k}" for k in range(engines)])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    title = f"layout: {line.run}" if named else "layout"
    axes.set_title(title, loc="left", parse_math=False)
    patches = [
        Rectangle((0, 0), 1, 1, facecolor=WIDTH_COLOURS.get(w, "#08519c")) for w in sorted(widths)
    ]
    names = ["an engine alone" if w == 1 else f"{_name(w)}: {w} as one" for w in sorted(widths)]
    axes.legend(
        *(patches, names),
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=4,
        frameon=False,
        borderpad=0.0,
        fontsize=8,
    )


def _name(engines: int) -> str:
    return "DP" if engines == 1 else f"TP{engines}"


# --- curves over time -----------------------------------------------------------------------------


def _draw_load(requests: "Axes", tokens: "Axes", timelines: Sequence[Timeline], end: float) -> None:
    from matplotlib.ticker import MaxNLocator

    window = end / _POINTS
    requests.yaxis.set_major_locator(MaxNLocator("auto", integer=True))
    requests.set_title("requests on the node", loc="left")
    tokens.set_title("output tokens per second", loc="left")
    for number, line in enumerate(timelines):
        # The colours of one run's curves stand for priorities, which these two do not tell apart.
        colour = COLOURS[number % len(COLOURS)] if len(timelines) > 1 else "#444444"
        for axes, curve in (
            (requests, curves.concurrency(line.records, window)),
            (tokens, curves.throughput(line.tokens, 4 * window)),
        ):
            times, values = curves.steps(curves.until(curve, end))
            axes.step(times, values, where="post", color=colour, label=line.run, linewidth=1.2)
    for axes in (requests, tokens):
        axes.set_ylim(bottom=0.0)
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.grid(visible=True, color=GRID_COLOUR, linewidth=0.6)


def _draw_latency(
    axes: "Axes",
    latency: _Latency,
    timelines: Sequence[Timeline],
    objectives: Sequence[Objective],
    end: float,
) -> None:
    axes.set_title(f"P90 {latency.name} by arrival, ms", loc="left")
    for label, colour, dashes, records in _series(timelines):
        curve = curves.p90_by_arrival(records, latency.of, 4 * end / _POINTS)
        times, values = curves.steps(curves.until(curve, end))
        milliseconds = [1000 * value for value in values]
        style: dict[str, Any] = {"color": colour, "linestyle": dashes, "linewidth": 1.2}
        axes.step(times, milliseconds, where="post", label=label, **style)
    _logarithmic(axes, "y")
    for objective in objectives:
        height = 1000 * latency.target(objective)
        axes.axhline(height, color=TARGET_COLOUR, linewidth=1, dashes=(5, 3))
        axes.annotate(
            f"target: {height:g} ms" + _class(objective, objectives),
            (1.0, height),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            fontsize=8,
            color=TARGET_COLOUR,
            bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.5},
        )


def _class(objective: Objective, objectives: Sequence[Objective]) -> str:
    return f", priority {objective.priority}" if len(objectives) > 1 else ""


def _series(timelines: Sequence[Timeline]) -> Iterator[tuple[str, str, str, Sequence[Record]]]:
    """Yield name, colour, dashes and requests of each curve: of each run, one for each priority."""
    for number, line in enumerate(timelines):
        groups = curves.by_priority(line.records) or {0: []}
        for place, (priority, records) in enumerate(groups.items()):
            colour = place if len(timelines) == 1 else number
            style = 0 if len(timelines) == 1 else place
            name = "" if len(timelines) == 1 and len(groups) > 1 else line.run
            label = f"{name}, priority {priority}".lstrip(", ") if len(groups) > 1 else name
            yield label, COLOURS[colour % len(COLOURS)], DASHES[style % len(DASHES)], records


def _logarithmic(axes: "Axes", axis: str) -> None:
    """Scale an axis by factors, with plain numbers, if there is something on it."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.grid(visible=True, color=GRID_COLOUR, linewidth=0.6)
    if not math.isfinite(axes.dataLim.x0):
        return
    scaled = axes.yaxis if axis == "y" else axes.xaxis
    (axes.set_yscale if axis == "y" else axes.set_xscale)("log")
    scaled.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=9))
    scaled.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    scaled.set_minor_locator(NullLocator())


# --- distributions --------------------------------------------------------------------------------


def _draw_distribution(
    axes: "Axes",
    latency: _Latency,
    timelines: Sequence[Timeline],
    objectives: Sequence[Objective],
) -> None:
    """Draw for each time, in ms, the share of requests that took at most as long."""
    axes.set_title(f"{latency.name}: share of requests by ms", loc="left")
    for label, colour, dashes, records in _series(timelines):
        taken = [1000 * seconds for seconds in curves.known(records, latency.of)]
        times, values = curves.steps(curves.distribution(taken))
        axes.step(times, values, where="post", color=colour, linestyle=dashes, label=label)
    _logarithmic(axes, "x")
    axes.set_ylim(0.0, 1.02)
    axes.set_yticks([0.0, 0.5, 0.9, 1.0], ["0", "50 %", "90 %", "100 %"])
    for objective in objectives:
        place = 1000 * latency.target(objective)
        axes.axvline(place, color=TARGET_COLOUR, linewidth=1, dashes=(5, 3))


def _draw_legend(made: "Figure", axes: "Axes") -> None:
    """Name a panel's curves below all panels, unless there is only one curve."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) < 2:
        return
    legend = made.legend(handles, labels, loc="lower center", ncols=4, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)
