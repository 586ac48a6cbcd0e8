"""Pictures are well-formed and show what happened."""

from xml.etree import ElementTree

from shoal.loadgen.plot import Curve, Timeline, draw, figure
from shoal.loadgen.summary import Record

SVG = "{http://www.w3.org/2000/svg}"
PANELS = ["requests on the node", "output tokens per second", "P90 TTFT by arrival, s"]
LAYOUT = "engines per unit (mean)"
RECORDS = [
    Record(0.0, 0.1, 1.0, 10.0, 5, finished=True),
    Record(5.0, 5.1, 8.0, 10.0, 5, finished=True),
]
TOKENS = {1: 5.0, 9: 5.0}


def curves(*timelines: Timeline) -> dict[str, list[Curve]]:
    """Return what is drawn in each panel: a curve for each run."""
    return {
        axes.get_title("left"): [list(map(tuple, line.get_xydata())) for line in axes.get_lines()]
        for axes in figure("", timelines).axes
    }


def test_one_curve_per_run_and_panel() -> None:
    widths = [(0.0, 1.0), (5.0, 8.0)]
    drawn = curves(*(Timeline(name, RECORDS, TOKENS, widths) for name in ("one", "two")))
    assert list(drawn) == [PANELS[0], LAYOUT, *PANELS[1:]]
    assert all(len(panel) == 2 for panel in drawn.values())
    assert drawn[LAYOUT][0] == [(0.0, 1.0), (5.0, 8.0), (10.0, 8.0)], "the last value is kept"


def test_requests_on_the_node_are_counted_while_they_run() -> None:
    (curve,) = curves(Timeline("one", RECORDS, TOKENS))[PANELS[0]]
    assert max(value for _, value in curve) == 2
    assert [value for time, value in curve if time < 5.0] == [1]


def test_throughput_falls_to_nothing_between_tokens() -> None:
    (curve,) = curves(Timeline("one", RECORDS, TOKENS))[PANELS[1]]
    assert [value for _, value in curve] == [0.0, 5.0, *[0.0] * 7, 5.0, 5.0]


def test_no_panel_for_a_layout_that_nobody_knows() -> None:
    assert list(curves(Timeline("one", RECORDS, TOKENS))) == PANELS


def test_a_run_of_nothing_can_be_drawn() -> None:
    assert curves(Timeline("p", [], {})) == {name: [[]] for name in PANELS}


def test_the_document_names_the_runs_in_text_and_is_the_same_each_time() -> None:
    names = ["one & only", "$two$ <b>"]
    lines = [Timeline(name, RECORDS, TOKENS) for name in names]
    document = draw("a < b", lines)
    texts = [text.text for text in ElementTree.fromstring(document).iter(f"{SVG}text")]
    assert {"a < b", *names, *PANELS} <= set(texts)
    assert draw("a < b", lines) == document
