"""Every alert fires when it should and only then, by promtool; and says what to do."""

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.grafana.scraper import RULES, need

RUNBOOK = Path(__file__).parents[2] / "docs" / "alerts.md"
NODE = "a:8000"
INSTANCE = f'instance="{NODE}"'

ALERTS: Mapping[str, dict[str, Any]] = {
    rule["alert"]: rule
    for group in yaml.safe_load((RULES / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
}


@dataclass(frozen=True)
class Case:
    """Series of one node, in promtool's notation (a value a minute), and whether an alert fires.

    ``labels`` are its labels beside those that are in every case; None: it does not fire.
    """

    alert: str
    minute: int
    series: Mapping[str, str]
    labels: Mapping[str, str] | None = None
    summary: str = ""


def fires(alert: str, minute: int, summary: str, series: Mapping[str, str], **labels: str) -> Case:
    return Case(alert, minute, series, labels, summary)


def quiet(alert: str, minute: int, series: Mapping[str, str]) -> Case:
    return Case(alert, minute, series)


TTFT = "shoal_time_to_first_token_seconds"
TPOT = "shoal_time_per_output_token_seconds"


CASES = (
    fires("ShoalDown", 2, "a:8000 cannot be scraped", {'up{job="shoal"}': "0+0x9"}, job="shoal"),
    quiet("ShoalDown", 1, {'up{job="shoal"}': "1 0 1+0x9", 'up{job="other"}': "0+0x9"}),
    fires("ShoalNotReady", 2, "a:8000 takes no requests", {"shoal_ready": "0+0x9"}),
    quiet("ShoalNotReady", 1, {"shoal_ready": "1 0 1+0x9"}),
    fires(
        "ShoalEngineDown",
        3,
        "Engine 1 of a:8000 is dead",
        {'shoal_engine_state{engine="1", state="dead"}': "0 1+0x9"},
        engine="1",
        state="dead",
    ),
    quiet(
        "ShoalEngineDown",
        5,
        {
            'shoal_engine_state{engine="0", state="starting"}': "1+0x9",
            'shoal_engine_state{engine="0", state="dead"}': "0+0x9",
        },
    ),
    fires(
        "ShoalBudgetBurnFast",
        10,
        "a:8000 spends its budget of success 20 times too fast",
        {
            'shoal_requests_total{outcome="finished"}': "0+98x20",
            'shoal_requests_total{outcome="poisoned"}': "0+1x20",
            'shoal_requests_total{outcome="pool_full"}': "0+1x20",
            'shoal_requests_total{outcome="aborted"}': "0+900x20",
        },
        objective="success",
    ),
    fires(
        "ShoalBudgetBurnFast",
        10,
        "a:8000 spends its budget of ttft 20 times too fast",
        {
            f'{TTFT}_bucket{{priority="normal", layout="dp", le="2.5"}}': "0+80x20",
            f'{TTFT}_count{{priority="normal", layout="dp"}}': "0+100x20",
        },
        objective="ttft",
    ),
    fires(
        "ShoalBudgetBurnFast",
        10,
        "a:8000 spends its budget of tpot 20 times too fast",
        {
            f'{TPOT}_bucket{{priority="urgent", layout="tp2", le="0.1"}}': "0+80x20",
            f'{TPOT}_count{{priority="urgent", layout="tp2"}}': "0+100x20",
        },
        objective="tpot",
    ),
    quiet(
        "ShoalBudgetBurnFast",
        10,
        {
            'shoal_requests_total{outcome="finished"}': "0+99x20",
            'shoal_requests_total{outcome="lost"}': "0+1x20",
            f'{TTFT}_bucket{{priority="background", le="2.5"}}': "0+0x20",
            f'{TTFT}_count{{priority="background"}}': "0+100x20",
        },
    ),
    quiet(  # it is over
        "ShoalBudgetBurnFast",
        40,
        {
            'shoal_requests_total{outcome="finished"}': "0+10x60",
            'shoal_requests_total{outcome="lost"}': "0+10x30 300+0x30",
        },
    ),
    fires(
        "ShoalBudgetBurnSlow",
        60,
        "a:8000 has spent its budget of success 8 times too fast for hours",
        {
            'shoal_requests_total{outcome="finished"}': "0+992x90",
            'shoal_requests_total{outcome="expired"}': "0+8x90",
        },
        objective="success",
    ),
    quiet(
        "ShoalBudgetBurnSlow",
        60,
        {
            'shoal_requests_total{outcome="finished"}': "0+995x90",
            'shoal_requests_total{outcome="expired"}': "0+5x90",
        },
    ),
    fires(
        "ShoalRequestsLost",
        10,
        "a:8000 lost 3 requests in ten minutes",
        {
            'shoal_requests_total{outcome="lost"}': "0+0x4 2+0x9",
            'shoal_requests_total{outcome="poisoned"}': "0+0x4 1+0x9",
        },
    ),
    quiet("ShoalRequestsLost", 12, {'shoal_requests_total{outcome="lost"}': "3+0x20"}),
    fires(
        "ShoalRequestsWaitLong",
        5,
        "A request of class normal has waited 300 s on a:8000",
        {'shoal_pool_oldest_seconds{priority="normal"}': "0+60x9"},
        priority="normal",
    ),
    quiet(
        "ShoalRequestsWaitLong",
        5,
        {
            'shoal_pool_oldest_seconds{priority="background"}': "0+60x9",
            'shoal_pool_oldest_seconds{priority="urgent"}': "50+0x9",
        },
    ),
    fires(
        "ShoalKVCacheFull",
        15,
        "Engine 0 of a:8000 preempts requests for want of KV blocks",
        {
            'vllm:kv_cache_usage_perc{engine="0", model_name="m"}': "1+0x20",
            'vllm:num_preemptions_total{engine="0", model_name="m"}': "0+1x20",
        },
        engine="0",
    ),
    quiet(
        "ShoalKVCacheFull",
        15,
        {
            'vllm:kv_cache_usage_perc{engine="0", model_name="m"}': "1+0x20",
            'vllm:num_preemptions_total{engine="0", model_name="m"}': "0+0x20",
            'vllm:kv_cache_usage_perc{engine="1", model_name="m"}': "0.5+0x20",
            'vllm:num_preemptions_total{engine="1", model_name="m"}': "0+1x20",
        },
    ),
    fires(
        "ShoalSwitchesFail",
        15,
        "a:8000 failed to switch 15 times in 15 minutes",
        {'shoal_switches_total{outcome="failed", reason="load"}': "0+1x20"},
    ),
    quiet(
        "ShoalSwitchesFail",
        15,
        {
            'shoal_switches_total{outcome="done", reason="load"}': "0+1x20",
            'shoal_switches_total{outcome="failed", reason="load"}': "0 1 2+0x20",
        },
    ),
    fires(
        "ShoalSwitchesTooOften",
        30,
        "a:8000 switches more than once in five seconds",
        {
            'shoal_switches_total{outcome="done", reason="load"}': "0+7x40",
            'shoal_switches_total{outcome="done", reason="quiet"}': "0+7x40",
        },
    ),
    quiet(
        "ShoalSwitchesTooOften",
        30,
        {
            'shoal_switches_total{outcome="done", reason="load"}': "0+5x40",
            'shoal_switches_total{outcome="done", reason="quiet"}': "0+5x40",
        },
    ),
    fires(
        "ShoalSwitchSlow",
        15,
        "A tenth of the switches of a:8000 take longer than 1.9 s",
        {
            'shoal_switch_seconds_bucket{treatment="carry", le="1.0"}': "0+0x20",
            'shoal_switch_seconds_bucket{treatment="carry", le="2.0"}': "0+10x20",
            'shoal_switch_seconds_bucket{treatment="carry", le="+Inf"}': "0+10x20",
        },
    ),
    quiet(
        "ShoalSwitchSlow",
        15,
        {
            'shoal_switch_seconds_bucket{treatment="hard", le="1.0"}': "0+10x20",
            'shoal_switch_seconds_bucket{treatment="hard", le="2.0"}': "0+10x20",
            'shoal_switch_seconds_bucket{treatment="hard", le="+Inf"}': "0+10x20",
            'shoal_switch_seconds_bucket{treatment="sequential", le="1.0"}': "0+0x20",
            'shoal_switch_seconds_bucket{treatment="sequential", le="2.0"}': "0+10x20",
            'shoal_switch_seconds_bucket{treatment="sequential", le="+Inf"}': "0+10x20",
        },
    ),
    fires(
        "ShoalSwitchesStallStreams",
        20,
        "Switches of a:8000 stall streams for a second or more",
        {
            'shoal_stream_stall_seconds_count{cause="switch"}': "0+1x30",
            'shoal_request_seconds_count{priority="normal", layout="mixed"}': "0+10x30",
        },
    ),
    quiet(
        "ShoalSwitchesStallStreams",
        20,
        {
            'shoal_stream_stall_seconds_count{cause="other"}': "0+5x30",
            'shoal_request_seconds_count{priority="normal", layout="mixed"}': "0+10x30",
        },
    ),
    fires(
        "ShoalRequestsPausedLong",
        12,
        "Requests of engine 0 of a:8000 have been paused for two minutes",
        {'shoal_engine_requests{engine="0", state="paused"}': "0 2+0x20"},
        engine="0",
    ),
    quiet(
        "ShoalRequestsPausedLong",
        12,
        {
            'shoal_engine_requests{engine="0", state="paused"}': "2 2 0 2 2 0 2 2 0 2 2 0 2 2",
            'shoal_engine_requests{engine="0", state="running"}': "2+0x20",
        },
    ),
    fires(
        "ShoalPolicyErrors",
        10,
        "The policy of a:8000 made 10 decisions that could not be used",
        {"shoal_policy_errors_total": "0+1x20"},
    ),
    quiet("ShoalPolicyErrors", 12, {"shoal_policy_errors_total": "5+0x20"}),
    fires(
        "ShoalControllerSlow",
        20,
        "Turns of the controller of a:8000 take 0.199 s (p99)",
        {
            'shoal_controller_loop_seconds_bucket{le="0.1"}': "0+0x30",
            'shoal_controller_loop_seconds_bucket{le="0.2"}': "0+10x30",
            'shoal_controller_loop_seconds_bucket{le="+Inf"}': "0+10x30",
        },
    ),
    quiet(
        "ShoalControllerSlow",
        20,
        {
            'shoal_controller_loop_seconds_bucket{le="0.05"}': "0+10x30",
            'shoal_controller_loop_seconds_bucket{le="+Inf"}': "0+10x30",
        },
    ),
    fires(
        "ShoalStepTimesMispredicted",
        40,
        "a:8000 predicts tp2 decode steps 80% wrong",
        {
            'shoal_step_time_relative_error{layout="tp2", kind="decode"}': "0.8+0x50",
            'shoal_policy_info{policy="adaptive"}': "1+0x50",
        },
        layout="tp2",
        kind="decode",
    ),
    quiet(
        "ShoalStepTimesMispredicted",
        40,
        {
            'shoal_step_time_relative_error{layout="tp2", kind="decode"}': "0.8+0x50",
            'shoal_policy_info{policy="adaptive"}': "0+0x50",
        },
    ),
)


def of_node(series: str) -> str:
    """Return a series with the label that Prometheus adds."""
    name, _, labels = series.removesuffix("}").partition("{")
    return f"{name}{{{', '.join(filter(None, [INSTANCE, labels]))}}}"


def expected(case: Case) -> list[dict[str, Any]]:
    if case.labels is None:
        return []
    rule = ALERTS[case.alert]
    annotations = {"summary": case.summary, "runbook": rule["annotations"]["runbook"]}
    labels = {"instance": NODE, **rule["labels"], **case.labels}
    return [{"exp_labels": labels, "exp_annotations": annotations}]


def verdict(folder: Path, case: Case, alerts: list[dict[str, Any]]) -> tuple[bool, str]:
    """Return whether promtool finds just these alerts, and what it says."""
    series = [{"series": of_node(name), "values": v} for name, v in case.series.items()]
    test = {
        "interval": "1m",
        "input_series": series,
        "alert_rule_test": [
            {"eval_time": f"{case.minute}m", "alertname": case.alert, "exp_alerts": alerts}
        ],
    }
    path = folder / "test.yml"
    files = [str(RULES / "recording.yml"), str(RULES / "alerts.yml")]
    path.write_text(json.dumps({"rule_files": files, "tests": [test]}))  # which is YAML, too
    done = subprocess.run(
        [need("promtool"), "test", "rules", str(path)], capture_output=True, text=True, check=False
    )
    return done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "case", CASES, ids=[f"{c.alert}-{'quiet' if c.labels is None else 'fires'}" for c in CASES]
)
def test_alert(case: Case, tmp_path: Path) -> None:
    holds, said = verdict(tmp_path, case, expected(case))
    assert holds, said


def test_a_case_can_fail(tmp_path: Path) -> None:
    loud = CASES[0]
    assert loud.labels is not None
    holds, said = verdict(tmp_path, loud, [])
    assert not holds
    assert "ShoalDown" in said


def test_every_alert_has_both_kinds_of_cases() -> None:
    assert {case.alert for case in CASES if case.labels is None} == ALERTS.keys()
    assert {case.alert for case in CASES if case.labels is not None} == ALERTS.keys()


def test_every_alert_has_a_section_of_the_runbook_that_says_what_to_do() -> None:
    sections = re.split(r"^## (\w+)\n", RUNBOOK.read_text(), flags=re.MULTILINE)[1:]
    texts = dict(zip(sections[::2], sections[1::2], strict=True))
    assert list(texts) == list(ALERTS)
    for name, rule in ALERTS.items():
        assert rule["annotations"]["runbook"].endswith(f": docs/alerts.md#{name.lower()}")
        severity = rule["labels"]["severity"].capitalize()
        assert texts[name].startswith(f"\n*{severity}.* "), name
        assert "- **Look at** " in texts[name], name
        assert "- **Do:** " in texts[name], name
