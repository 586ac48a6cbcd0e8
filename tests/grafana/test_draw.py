"""Pictures of dashboards show a panel for each of theirs, and say which ones have no data."""

import re
from typing import Any

import httpx
import pytest
from matplotlib.colors import to_rgba

from shoal.grafana.api import Prometheus, PrometheusError
from shoal.grafana.boards import FOLDER, Window, read_boards
from shoal.grafana.draw import draw
from shoal.grafana.panels import MISSING

BOARDS = read_boards(FOLDER)
TARGETS = [target for board in BOARDS for panel in board.panels for target in panel.targets]
LABELS = re.findall(r"\{\{(\w+)\}\}", "".join(target.legend for target in TARGETS))
WINDOW = Window(start=1000.0, end=1060.0, step=10.0, scrape=5.0)


def answering(has_data: bool) -> httpx.Client:
    """Return a Prometheus that says 1 to everything, or nothing."""

    def answer(request: httpx.Request) -> httpx.Response:
        points = [[1000.0 + 10 * k, "1"] for k in range(7)]
        values = {"values": points} if "range" in request.url.path else {"value": points[-1]}
        series = [{"metric": dict.fromkeys(LABELS, "x") | {"le": "0.5"}, **values}]
        result: dict[str, Any] = {"resultType": "vector", "result": series if has_data else []}
        return httpx.Response(200, json={"status": "success", "data": result})

    return httpx.Client(base_url="http://prometheus", transport=httpx.MockTransport(answer))


@pytest.mark.slow
@pytest.mark.parametrize("has_data", [True, False])
@pytest.mark.parametrize("board", BOARDS, ids=[board.title for board in BOARDS])
def test_panels_without_data_say_so(board: Any, has_data: bool) -> None:
    with answering(has_data) as http:
        picture = draw(board, Prometheus(http), WINDOW)
    assert [axes.get_title("left") for axes in picture.axes] == [p.title for p in board.panels]
    empty = [a for a in picture.axes if any(t.get_text() == "no data" for t in a.texts)]
    assert len(empty) == (0 if has_data else len(board.panels))
    figures = [a for a, p in zip(picture.axes, board.panels, strict=True) if p.kind == "stat"]
    grey = [axes for axes in figures if axes.get_facecolor() == to_rgba(MISSING)]
    assert len(grey) == (0 if has_data else len(figures))


def test_queries_have_no_variables_left() -> None:
    queries = [target.expr for target in TARGETS]
    assert any("$__rate_interval" in query for query in queries)
    assert not [query for query in queries if re.search(r"\$", WINDOW.fill(query))]
    assert WINDOW.fill("x[$__rate_interval]") == "x[20s]"


def test_a_prometheus_that_does_not_answer_is_one_line() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(502, text="<html>")

    transport = httpx.MockTransport(answer)
    with (
        httpx.Client(base_url="http://prometheus", transport=transport) as http,
        pytest.raises(PrometheusError, match="http://prometheus does not answer"),
    ):
        Prometheus(http).rules()
