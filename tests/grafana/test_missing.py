"""What panels make of series, by promtool: nothing of none, whole counts, and true shares."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from shoal.grafana.boards import FOLDER, Window, read_boards
from tests.grafana.scraper import RULES, need

BOARDS = read_boards(FOLDER)
WINDOW = Window(start=0.0, end=600.0, step=15.0, scrape=5.0)
"""Two points of a curve are 15 s apart, so that ``$__rate_interval`` is 20 s."""
ALL_RULES = ("recording.yml", "alerts.yml")
UP = {'up{job="shoal", instance="a"}': "1+0x200"}

Sample = tuple[str, float]


def queries(title: str, board: str = "Shoal: Serving") -> list[str]:
    """Return the queries of a panel."""
    (found,) = (b for b in BOARDS if b.title == board)
    (panel,) = (p for p in found.panels if p.title == title)
    return [WINDOW.fill(target.expr) for target in panel.targets]


def differences(
    folder: Path,
    expected: Mapping[str, Sequence[Sample]],
    series: Mapping[str, str],
    rules: Sequence[str] = ALL_RULES,
) -> str:
    """Return what promtool says if queries do not give these samples, two seconds after a scrape.

    Args:
        folder: for its file.
        expected: the labels and value of every sample, for each query.
        series: what was scraped, every 5 seconds.
        rules: files of rules that are loaded.
    """
    asked = [
        {
            "expr": query,
            "eval_time": "602s",
            "exp_samples": [{"labels": labels, "value": value} for labels, value in samples],
        }
        for query, samples in expected.items()
    ]
    scraped = [{"series": name, "values": values} for name, values in series.items()]
    test = {"interval": "5s", "input_series": scraped, "promql_expr_test": asked}
    path = folder / "test.yml"
    path.write_text(json.dumps({"rule_files": [str(RULES / r) for r in rules], "tests": [test]}))
    done = subprocess.run(
        [need("promtool"), "test", "rules", str(path)], capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_no_panel_makes_up_a_value(tmp_path: Path) -> None:
    """Also where Prometheus has loaded all rules, but has never scraped a node."""
    asked = [WINDOW.fill(t.expr) for b in BOARDS for panel in b.panels for t in panel.targets]
    assert len(asked) > 100
    assert differences(tmp_path, dict.fromkeys(asked, ()), {}) == ""
    made_up = {"sum(shoal_ready) or vector(0)": ()}
    assert "vector(0)" in differences(tmp_path, made_up, {})


def test_no_alerts_are_only_seen_where_alerts_are_evaluated(tmp_path: Path) -> None:
    (query,) = queries("Alerts")
    assert differences(tmp_path, {query: ()}, UP, ["recording.yml"]) == ""
    assert differences(tmp_path, {query: [('{alertname="none"}', 0)]}, UP) == ""
    down = {'up{job="shoal", instance="a"}': "0+0x200"}
    assert differences(tmp_path, {query: [('{alertname="ShoalDown"}', 1)]}, down) == ""


def test_a_burn_rate_is_only_seen_where_it_is_recorded(tmp_path: Path) -> None:
    (query,) = queries("SLO burn, last hour")
    requests = 'shoal_requests_total{instance="a", outcome='
    ended = {f'{requests}"lost"}}': "0+0x200", f'{requests}"finished"}}': "0+1x200"}
    assert differences(tmp_path, {query: [("{}", 0)]}, UP | ended) == ""
    assert differences(tmp_path, {query: ()}, UP | ended, ["alerts.yml"]) == ""
    idle = dict.fromkeys(ended, "0+0x200")
    assert differences(tmp_path, {query: ()}, UP | idle) == ""


@pytest.mark.parametrize(
    "outcome", ["lost", "poisoned", "expired", "pool_full", "unavailable", "garbled"]
)
def test_what_users_lose_is_a_failure(tmp_path: Path, outcome: str) -> None:
    (query,) = queries("Failed, last 5 minutes")
    ended = {
        'shoal_requests_total{instance="a", outcome="finished"}': "0+3x200",
        f'shoal_requests_total{{instance="a", outcome="{outcome}"}}': "0+1x200",
        'shoal_requests_total{instance="a", outcome="aborted"}': "0+100x200",
    }
    (burn,) = queries("SLO burn, last hour")  # a quarter fails, where a thousandth may
    assert differences(tmp_path, {query: [("{}", 0.25)], burn: [("{}", 250)]}, ended) == ""


def test_an_event_is_one_event(tmp_path: Path) -> None:
    """``increase`` alone says 1.33, for scrapes show 15 seconds of 20."""
    (query,) = queries("Engine deaths, by cause", "Shoal: Engines")
    died = {'shoal_engine_deaths_total{instance="a", cause="hung"}': "5+0x119 6+0x80"}
    raw = query.removeprefix("round(").removesuffix(")")
    one = '{cause="hung"}'
    assert differences(tmp_path, {query: [(one, 1)]}, died) == ""
    assert "1.3333" in differences(tmp_path, {raw: [(one, 1)]}, died)


def test_a_share_is_at_most_all(tmp_path: Path) -> None:
    """Steps are reported in bursts, so more seconds may come in a window than it has."""
    (busy,) = queries("Busy part of each engine", "Shoal: Engines")
    steps = {'shoal_step_seconds_total{instance="a", engine="0"}': "0+6x200"}
    engine = '{instance="a", engine="0"}'
    assert differences(tmp_path, {busy: [(engine, 1)]}, steps) == ""
    (found,) = queries("Prefix cache: share of prompt tokens found")
    tokens = {
        'vllm:prefix_cache_hits_total{instance="a", engine="0"}': "0+115x200",
        'vllm:prefix_cache_queries_total{instance="a", engine="0"}': "0+100x200",
    }
    assert differences(tmp_path, {found: [("{}", 1)]}, tokens) == ""


def test_the_99th_percentile_needs_requests(tmp_path: Path) -> None:
    (query,) = queries("p99 TTFT (target 2.5 s)")
    name = 'shoal_time_to_first_token_seconds_bucket{instance="a", priority="normal", le='
    answered = {f'{name}"2.5"}}': "0+1x200", f'{name}"+Inf"}}': "0+1x200"}
    assert differences(tmp_path, {query: [("{}", 2.475)]}, answered) == ""
    idle = dict.fromkeys(answered, "7+0x200")
    assert differences(tmp_path, {query: ()}, idle) == ""
