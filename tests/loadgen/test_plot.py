"""Pictures are well-formed and show what happened."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from shoal.loadgen.curves import Curve, Timeline
from shoal.loadgen.plot import TARGET_COLOUR, draw, draw_overview, figure
from shoal.loadgen.summary import Objective, Record
from shoal.loadgen.workload import Phase

SVG = "{http://www.w3.org/2000/svg}"
REQUESTS, TOKENS = "requests on the node", "output tokens per second"
TTFT, TPOT = "P90 TTFT by arrival, ms", "P90 TPOT by arrival, ms"
SHARES = ["TTFT: share of requests by ms", "TPOT: share of requests by ms"]
PANELS = [REQUESTS, TOKENS, TTFT, TPOT, *SHARES]
RECORDS = [
    Record(0.0, 0.1, 1.0, 10.0, 5, finished=True),
    Record(5.0, 5.1, 8.0, 10.0, 5, finished=True),
]
COUNTS = {1: 5.0, 9: 5.0}
ONE = Timeline("one", RECORDS, COUNTS)
LAYOUTS = [(0.0, [[0], [1], [2, 3]]), (5.0, [[0, 1], [2, 3]])]


def panels(*timelines: Timeline, targets: tuple[Objective, ...] = ()) -> dict[str, Axes]:
    return {axes.get_title("left"): axes for axes in figure("", timelines, targets).axes}


def curves(axes: Axes, *, targets: bool = False) -> list[Curve]:
    """Return the curves of a panel, or its targets."""
    lines = [line for line in axes.get_lines() if (line.get_color() == TARGET_COLOUR) is targets]
    return [list(map(tuple, line.get_xydata())) for line in lines]


def boxes(axes: Axes) -> list[tuple[float, float, float, int]]:
    """Return the bars of a panel of layouts: start, end, first row, rows."""
    found = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    return sorted(
        (box.get_x(), box.get_x() + box.get_width(), int(box.get_y()), round(box.get_height()))
        for box in found
        if box.zorder >= 0  # bursts lie below
    )


def test_one_curve_per_run_and_panel() -> None:
    drawn = panels(*(Timeline(name, RECORDS, COUNTS) for name in ("one", "two")))
    assert list(drawn) == PANELS
    assert [len(curves(axes)) for axes in drawn.values()] == [2] * 6


def test_engines_have_rows_and_a_unit_is_one_bar() -> None:
    axes = panels(replace(ONE, layouts=LAYOUTS))["layout"]
    assert boxes(axes) == [(0.0, 5.0, 0, 1), (0.0, 5.0, 1, 1), (0.0, 10.0, 2, 2), (5.0, 10.0, 0, 2)]
    assert [text.get_text() for text in axes.get_yticklabels()] == [f"engine {k}" for k in range(4)]
    assert [text.get_text() for text in axes.texts] == ["TP2", "TP2"]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["an engine alone", "TP2: 2 as one"]


def test_each_run_has_a_panel_for_its_layout_if_it_is_known() -> None:
    drawn = panels(replace(ONE, layouts=LAYOUTS), replace(ONE, run="two"))
    assert list(drawn) == ["layout: one", *PANELS]


def test_requests_on_the_node_are_counted_while_they_run() -> None:
    (curve,) = curves(panels(ONE)[REQUESTS])
    assert max(value for _, value in curve) == 2
    assert {value for time, value in curve if time < 5.0} == {1}


def test_requests_that_have_ended_are_not_counted_until_the_next_one_comes() -> None:
    records = [Record(0.0, 0.1, 1.0, 10.0, 5, finished=True)]
    records += [Record(0.0, 0.1, 1.0, 2.0, 5, finished=True) for _ in range(4)]
    (curve,) = curves(panels(Timeline("one", records, COUNTS))[REQUESTS])
    assert max(value for _, value in curve) == 5
    assert {value for time, value in curve if 2.0 < time < 9.9} == {1}


def test_requests_are_counted_in_whole_numbers() -> None:
    """Matplotlib's own marks would be 0, 2.5, 5 and so on here."""
    records = [Record(0.0, 0.1, 1.0 + k / 99, 10.0, 5, finished=True) for k in range(10)]
    axes = panels(Timeline("one", records, COUNTS))[REQUESTS]
    marks = axes.yaxis.get_ticklocs()
    assert max(marks) >= 10
    assert [mark for mark in marks if mark % 1] == []


def test_throughput_falls_to_nothing_between_tokens() -> None:
    (curve,) = curves(panels(ONE)[TOKENS])
    assert [value for _, value in curve] == [0.0, 5.0, *[0.0] * 7, 5.0, 5.0]


def test_each_priority_has_a_curve_and_a_name() -> None:
    urgent = [replace(RECORDS[0], priority=-10), RECORDS[1]]
    made = figure("", [Timeline("one", urgent, COUNTS)])
    drawn = {axes.get_title("left"): axes for axes in made.axes}
    assert [curve[0][1] for curve in curves(drawn[TTFT])] == [1000.0, 3000.0]
    assert [len(curves(drawn[name])) for name in (REQUESTS, TPOT, *SHARES)] == [1, 2, 2, 2]
    (legend,) = made.legends
    assert [text.get_text() for text in legend.get_texts()] == ["priority -10", "priority 0"]
    both = figure("", [Timeline(name, urgent, COUNTS) for name in ("one", "two")])
    assert "two, priority -10" in [text.get_text() for text in both.legends[0].get_texts()]


def test_targets_are_lines() -> None:
    drawn = panels(ONE, targets=(Objective(-1, 0.5, 0.02), Objective(0, 2.0, 0.05)))
    for name, values in ((TTFT, [500.0, 2000.0]), (TPOT, [20.0, 50.0])):
        assert [line[0][1] for line in curves(drawn[name], targets=True)] == values
        assert f"target: {values[0]:g} ms, priority -1" in [t.get_text() for t in drawn[name].texts]
    assert [line[0][0] for line in curves(drawn[SHARES[0]], targets=True)] == [500.0, 2000.0]
    assert curves(drawn[REQUESTS], targets=True) == []


def test_bursts_are_shaded_in_all_panels_over_time() -> None:
    phases = [Phase.QUIET, Phase.BURST, Phase.BURST, Phase.BETWEEN, Phase.BURST]
    records = [replace(RECORDS[0], arrived=float(k), phase=one) for k, one in enumerate(phases)]
    drawn = panels(Timeline("one", records, COUNTS, LAYOUTS))
    for name in ("layout", REQUESTS, TTFT):
        spans = [p for p in drawn[name].patches if isinstance(p, Rectangle) and p.zorder == -1]
        assert [(p.get_x(), p.get_x() + p.get_width()) for p in spans] == [(1.0, 3.0), (4.0, 4.0)]
    assert not drawn[SHARES[0]].patches


def test_distributions_end_at_all_requests() -> None:
    (shares,) = curves(panels(ONE)[SHARES[0]])
    assert shares == [(1000.0, 0.5), (3000.0, 1.0)]
    unfinished = Timeline("one", [replace(RECORDS[0], finished=False)], COUNTS)
    assert curves(panels(unfinished)[SHARES[0]]) == [[]]


def test_an_overview_has_no_latencies() -> None:
    document = draw_overview("A node", [replace(ONE, layouts=LAYOUTS)])
    texts = {text.text for text in ElementTree.fromstring(document).iter(f"{SVG}text")}
    assert {"A node", "layout", REQUESTS, TOKENS} <= texts
    assert not {TTFT, TPOT, *SHARES} & texts


def test_a_run_of_nothing_can_be_drawn() -> None:
    assert [curves(axes) for axes in panels(Timeline("p", [], {})).values()] == [[[]]] * 6
    assert draw("nothing", [Timeline("p", [], {})]).startswith("<svg")


@pytest.mark.slow
def test_the_document_names_the_runs_in_text_and_is_the_same_each_time() -> None:
    names = ["one & only", "$two$ <b>"]
    lines = [Timeline(name, RECORDS, COUNTS, LAYOUTS) for name in names]
    document = draw("a < b", lines)
    texts = [text.text for text in ElementTree.fromstring(document).iter(f"{SVG}text")]
    assert {"a < b", *names, *PANELS, "layout: one & only"} <= set(texts)
    assert {draw("a < b", lines) for _ in range(5)} == {document}
