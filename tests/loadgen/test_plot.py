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


def test_one_curve_per_policy_and_panel() -> None:
    records = [
        Record(0.0, 0.1, 1.0, 10.0, 5, finished=True),
        Record(5.0, 5.1, 8.0, 10.0, 5, finished=True),
    ]
    widths = [(0.0, 1.0), (5.0, 8.0)]
    document = draw("a < b", [Timeline("one", records, widths), Timeline("two", records, widths)])
    drawn = curves(document)
    assert len(drawn) == 6
    layout = drawn[2]
    # From the bottom eighth to the top, half way through, and all within the panel.
    assert layout[0][1] > layout[-1][1]
    assert layout[-1][0] > layout[0][0]
    texts = [t.text for t in ElementTree.fromstring(document).iter(f"{SVG}text")]
    assert "a < b" in texts
    assert {"one", "two"} <= set(texts)


def test_a_run_of_nothing_can_be_drawn() -> None:
    assert curves(draw("", [Timeline("p", [], [])])) == [[], [], []]
