"""Pictures are well-formed and show what happened."""

from xml.etree import ElementTree

from loadgen.plot import Timeline, draw
from loadgen.report import Record

SVG = "{http://www.w3.org/2000/svg}"


def curves(document: str) -> list[list[tuple[float, float]]]:
    root = ElementTree.fromstring(document)
    return [
        [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        for line in root.iter(f"{SVG}polyline")
    ]


RECORDS = [
    Record(0.0, 0.1, 1.0, 10.0, 5, finished=True),
    Record(5.0, 5.1, 8.0, 10.0, 5, finished=True),
]
TOKENS = {1: 5.0, 9: 5.0}


def test_one_curve_per_run_and_panel() -> None:
    widths = [(0.0, 1.0), (5.0, 8.0)]
    lines = [Timeline(name, RECORDS, TOKENS, widths) for name in ("one", "two")]
    document = draw("a < b", lines)
    drawn = curves(document)
    assert len(drawn) == 8
    layout = drawn[2]
    # From the bottom eighth to the top, half way through, and all within the panel.
    assert layout[0][1] > layout[-1][1]
    assert layout[-1][0] > layout[0][0]
    texts = [t.text for t in ElementTree.fromstring(document).iter(f"{SVG}text")]
    assert "a < b" in texts
    assert {"one", "two", "engines per unit (mean)"} <= set(texts)


def test_throughput_falls_to_nothing_between_tokens() -> None:
    heights = [y for _, y in curves(draw("", [Timeline("one", RECORDS, TOKENS)]))[1]]
    bottom = max(heights)
    assert heights.count(bottom) > heights.count(min(heights)) > 0


def test_no_panel_for_a_layout_that_nobody_knows() -> None:
    document = draw("", [Timeline("one", RECORDS, TOKENS)])
    assert len(curves(document)) == 3
    assert "engines per unit" not in document


def test_a_run_of_nothing_can_be_drawn() -> None:
    assert curves(draw("", [Timeline("p", [], {})])) == [[], [], []]
