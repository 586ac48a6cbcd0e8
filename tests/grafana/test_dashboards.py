"""The dashboards that are committed are what the code makes, and read well."""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from shoal.grafana.boards import FOLDER
from shoal.grafana.generate_dashboards import Page, pages, render
from tests.grafana.scraper import RULES

DOCS = Path(__file__).parents[2] / "docs"
GLANCE_ROWS = 15
"""Grid rows of the first screen's figures, layout and reasons; a screen has about twenty."""
GREY = "#808080"

PAGES = pages()
NAMES = [page.name for page in PAGES]


def load(page: Page) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((FOLDER / f"{page.name}.json").read_text())
    return data


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all panels, those in folded rows too."""
    return [p for panel in board["panels"] for p in (panel, *panel.get("panels", []))]


def charts(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in panels(board) if panel["type"] != "row"]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_the_committed_json_is_what_the_code_makes(page: Page) -> None:
    committed = (FOLDER / f"{page.name}.json").read_text()
    assert render(page) == committed, "run `python -m shoal.grafana.generate_dashboards`"


def test_no_file_is_left_of_a_dashboard_that_is_gone() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(NAMES)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_panel_says_what_it_means_and_asks_the_chosen_source(page: Page) -> None:
    for panel in charts(load(page)):
        assert panel["description"].endswith("."), panel["title"]
        assert len(panel["description"]) > 40, panel["title"]
        assert panel["fieldConfig"]["defaults"].get("unit") or panel["type"] != "timeseries"
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_panels_do_not_overlap_and_have_numbers_of_their_own(page: Page) -> None:
    board = load(page)
    numbers = [panel["id"] for panel in panels(board)]
    assert len(set(numbers)) == len(numbers)
    for one, two in combinations([panel["gridPos"] for panel in panels(board)], 2):
        beside = one["x"] + one["w"] <= two["x"] or two["x"] + two["w"] <= one["x"]
        above = one["y"] + one["h"] <= two["y"] or two["y"] + two["h"] <= one["y"]
        assert beside or above, (one, two)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels(board))


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_the_first_screen_tells_whether_users_suffer_and_then_why(page: Page) -> None:
    first = [p["title"] for p in charts(load(page)) if p["gridPos"]["y"] < GLANCE_ROWS]
    assert first == [
        *("Node", "p99 TTFT (target 2.5 s)", "p99 TPOT (target 0.1 s)", "Requests waiting"),
        *("Oldest wait", "KV cache in use", "Output tokens per second", "Failed, last 5 minutes"),
        *("Alerts", "SLO burn, last hour", "Engines that do not serve", "Units now"),
        "Layout of each engine",
        "Why it switched (number of switches in the time shown)",
    ]


def test_the_targets_shown_are_those_of_the_objectives() -> None:
    """The limit of a figure and its title are the bound that the recording rules count by."""
    rules = (RULES / "recording.yml").read_text()
    shown = {panel["title"]: panel for panel in charts(load(PAGES[0]))}
    for name, metric in (("TTFT", "time_to_first_token"), ("TPOT", "time_per_output_token")):
        (bound,) = set(re.findall(rf'{metric}_seconds_bucket{{[^}}]*le="([\d.]+)"', rules))
        steps = shown[f"p99 {name} (target {bound} s)"]["fieldConfig"]["defaults"]["thresholds"]
        assert steps["steps"][-1] == {"color": "red", "value": float(bound)}
        within = shown["Goodput: requests per second within each target"]["targets"]
        assert any(
            f"{metric}_seconds_bucket" in t["expr"] and f'le="{bound}"' in t["expr"] for t in within
        )


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_a_figure_without_a_value_is_grey(page: Page) -> None:
    """Grafana gives a missing value the colour of the lowest threshold."""
    figures = [panel for panel in charts(load(page)) if panel["type"] == "stat"]
    assert figures
    for panel in figures:
        defaults = panel["fieldConfig"]["defaults"]
        lowest, *others = defaults["thresholds"]["steps"]
        assert lowest == {"color": GREY, "value": None}, panel["title"]
        assert others[0]["value"] == 0, panel["title"]
        assert defaults["noValue"] == "no data"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_counts_are_whole_numbers(page: Page) -> None:
    counts = [p for p in charts(load(page)) if any("increase(" in t["expr"] for t in p["targets"])]
    assert counts
    for panel in counts:
        defaults = panel["fieldConfig"]["defaults"]
        if defaults["unit"] != "percentunit":
            assert (defaults["unit"], defaults["decimals"]) == ("none", 0), panel["title"]
        for target in panel["targets"]:
            bare = re.sub(r"round\(sum(?: by \([^)]*\))? \(increase\(", "", target["expr"])
            assert "increase(" not in bare, target["expr"]


MILLI = {"s", "watt", "hertz"}
"""Units of the dashboards that Grafana writes in thousandths: times, and what is never so small."""
WHOLE = {"", "none", "short", "ops", "reqps", "percentunit", "bytes", "binBps"}
"""Those that it does not: 0.025 of ``binBps`` is ``0.0250 B/s``, where ``Bps`` is ``25 mB/s``."""


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_rates_are_not_written_in_thousandths(page: Page) -> None:
    """A thousandth of a byte reads like a million of them."""
    units = {panel["fieldConfig"]["defaults"].get("unit", "") for panel in charts(load(page))}
    assert units <= MILLI | WHOLE


def test_every_metric_of_ours_is_documented_and_shown() -> None:
    row = re.compile(r"^\| `(shoal_\w+)` \| (\w+) \|", re.MULTILINE)
    documented = {name for name, _ in row.findall((DOCS / "metrics.md").read_text())}
    shown = [target for page in PAGES for p in charts(load(page)) for target in p["targets"]]
    queries = "\n".join(target["expr"] for target in shown)
    rules = "\n".join(path.read_text() for path in RULES.glob("*.yml"))

    def used(text: str) -> set[str]:
        names = set(re.findall(r"\bshoal_\w+", text))
        return {re.sub(r"_(bucket|count|sum)$", "", name) for name in names}

    assert used(queries) | used(rules) <= documented
    assert documented == used(queries)


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        pytest.param("heatmap", r"shoal_time_to_first_token_seconds_bucket", id="ttft"),
        pytest.param("timeseries", r"by \(key, kind\) .*shoal_key_tokens_total", id="keys"),
        pytest.param("timeseries", r"vllm:prefix_cache_hits_total", id="prefixes"),
        pytest.param("timeseries", r"time_to_first_token_seconds_bucket.*le=", id="goodput"),
        pytest.param("timeseries", r"time_per_output_token_seconds_bucket.*le=", id="goodput-tpot"),
    ],
)
def test_the_board_for_users_has_a_panel_for(kind: str, asked: str) -> None:
    (board,) = (load(page) for page in PAGES if page.name == "shoal-serving")
    found = [
        panel["title"]
        for panel in charts(board)
        if panel["type"] == kind and any(re.search(asked, t["expr"]) for t in panel["targets"])
    ]
    assert found


def test_alerts_that_panels_name_exist() -> None:
    rules = (RULES / "alerts.yml").read_text()
    for page in PAGES:
        for name in re.findall(r"Shoal[A-Z]\w+", json.dumps(load(page))):
            assert f"alert: {name}\n" in rules
