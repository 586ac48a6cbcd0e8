"""The page of a served node: its names, that they are documented, and that its totals are true."""

import asyncio
import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import prometheus_client
import pytest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from shoal.runtime.protocol.messages import NodeMetrics, Outcome
from shoal.runtime.protocol.messages.metrics import EngineGauges
from shoal.server.operator.metrics_page import SCHEDULER_GAUGES, page
from tests.server.node import ServedNode, served_node, until
from tests.turns import counted_turns

MODEL = "shoal-demo"
ALONE, PAIR = [[0], [1]], [[0, 1]]
DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    """Two front ends, whose counts every page shows together; logs for machines."""
    cache = tmp_path_factory.mktemp("cache")
    with served_node(
        cache,
        *("--fake-step-ms", "10", "--max-model-len", "512", "--api-server-count", "2"),
        *("--log-format", "json", "--max-num-seqs", "8"),
    ) as served:
        yield served


def scrape(url: str) -> dict[str, Metric]:
    """Return the families of a page, by name."""
    text = httpx.get(f"{url}/metrics", timeout=60).text
    return {family.name: family for family in text_string_to_metric_families(text)}


def total(families: dict[str, Metric], name: str, **labels: str) -> float:
    """Return the sum of the samples of this name that have these labels."""
    return sum(
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


# --- names ---


def label_names(family: Metric) -> set[str]:
    return {name for sample in family.samples for name in sample.labels} - {"le"}


def documented() -> dict[str, tuple[str, set[str]]]:
    """Return type, and words of the labels' column, of every metric in the tables."""
    row = re.compile(r"^\| `(shoal_\w+)` \| (\w+) \|([^|]*)\|", re.MULTILINE)
    return {
        name: (kind, set(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels in row.findall(DOCS.read_text())
    }


def test_the_docs_list_what_is_on_the_page(node: ServedNode) -> None:
    families = {
        name + "_total" * (family.type == "counter"): family
        for name, family in scrape(node.url).items()
        if name.startswith("shoal_")
    }
    docs = documented()
    assert docs.keys() == families.keys()
    for name, family in families.items():
        kind, words = docs[name]
        assert kind == family.type, name
        if not family.samples:
            assert name == "shoal_step_time_relative_error"  # without a cost model
            continue
        labels = label_names(family)
        values = {value for sample in family.samples for value in sample.labels.values()}
        assert labels <= words, name
        assert words - labels <= values, name


def test_vllms_names_are_stock_vllms(node: ServedNode) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    from shoal.server.options import vllm_options
    from shoal.server.options.serve_options import DEMO_CHECKPOINT

    demo = AsyncEngineArgs(model=str(DEMO_CHECKPOINT), served_model_name=[MODEL])
    config = vllm_options.make_vllm_config(demo)
    logger = PrometheusStatLogger(config, [0, 1])
    logger.log_engine_initialized()
    text = prometheus_client.generate_latest().decode()
    stock = {
        family.name: family
        for family in text_string_to_metric_families(text)
        if family.name.startswith("vllm:") and not family.name.endswith("_created")
    }
    ours = {name: f for name, f in scrape(node.url).items() if name.startswith("vllm:")}
    assert len(stock) > 30
    # vLLM's serving layer has one more where tools are parsed, as for the demo model.
    assert ours.keys() - stock.keys() == {"vllm:tool_call_parser_invocations"}
    assert stock.keys() <= ours.keys()
    for name, family in stock.items():
        assert (name, ours[name].type) == (name, family.type)
        assert ours[name].documentation == family.documentation
        assert label_names(ours[name]) == label_names(family), name
        engines = {sample.labels.get("engine") for sample in family.samples}
        assert {sample.labels.get("engine") for sample in ours[name].samples} == engines, name
    assert set(SCHEDULER_GAUGES) <= stock.keys()


def test_promtool_finds_nothing(node: ServedNode) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        assert "CI" not in os.environ, "CI has to install promtool"
        pytest.skip("promtool is not on PATH (Debian and Ubuntu: apt-get install prometheus)")

    def complaints(text: str) -> list[str]:
        command = [promtool, "check", "metrics"]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        return (done.stdout + done.stderr).splitlines()

    assert complaints("# HELP shoal_bad Bad.\n# TYPE shoal_bad counter\nshoal_bad 1\n")
    # vLLM's own names break the rules: they have a colon, and one histogram ends in "_total".
    said = complaints(httpx.get(f"{node.url}/metrics", timeout=60).text)
    assert [line for line in said if not line.startswith("vllm:")] == []


# --- what vLLM's gauges show ---


class Families(Collector):
    """What a registry collects."""

    def __init__(self, families: list[GaugeMetricFamily]) -> None:
        self._families = families

    def collect(self) -> list[GaugeMetricFamily]:
        return self._families


def family(name: str, *labels: str) -> GaugeMetricFamily:
    metric = GaugeMetricFamily(name, "As vLLM left it.", labels=["engine", "reason"][: len(labels)])
    metric.add_metric(list(labels), 77)
    return metric


async def test_a_front_end_does_other_things_between_families() -> None:
    families = [family(f"shoal_{n}", "1") for n in range(5)]
    async with counted_turns() as turns:
        text = await page(iter(families), NodeMetrics(1, [], []))
    assert turns.count >= len(families)
    assert text == prometheus_client.generate_latest(Families(families))


async def test_gauges_of_the_scheduler_show_what_the_controller_says() -> None:
    registered = [
        family("vllm:num_requests_running", "1"),
        family("vllm:num_requests_waiting", "1"),
        family("vllm:num_requests_waiting_by_reason", "1", "capacity"),
        family("vllm:num_requests_waiting_by_reason", "1", "deferred"),
        family("vllm:kv_cache_usage_perc", "1"),
        family("vllm:engine_sleep_state", "1"),
    ]
    node = NodeMetrics(1, [], [EngineGauges(0, 9, 9, 9, 0.9), EngineGauges(1, 2, 3, 4, 0.5)])
    lines = (await page(registered, node)).decode().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        'vllm:num_requests_running{engine="1"} 2.0',
        'vllm:num_requests_waiting{engine="1"} 7.0',
        'vllm:num_requests_waiting_by_reason{engine="1",reason="capacity"} 3.0',
        'vllm:num_requests_waiting_by_reason{engine="1",reason="deferred"} 4.0',
        'vllm:kv_cache_usage_perc{engine="1"} 0.5',
        'vllm:engine_sleep_state{engine="1"} 77.0',
    ]


# --- totals ---


async def complete(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    """Return the answer to a streamed completion: usage, text, and finish reason."""
    asked = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}, **body}
    text, reason, usage = "", None, None
    async with http.stream("POST", "/v1/completions", json=asked) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                text += choice["text"]
                reason = choice["finish_reason"] or reason
    assert usage is not None
    return {"text": text, "reason": reason, **usage}


async def load(node: ServedNode) -> list[dict[str, Any]]:
    """Have 41 requests of all classes answered while the layout changes six times."""
    limits = httpx.Limits(max_connections=100, max_keepalive_connections=0)
    async with node.async_client(limits=limits) as http:
        whole = await complete(http, prompt="Stop", max_tokens=60)
        bodies: list[dict[str, Any]] = [
            {
                "prompt": "word " * (1 + k % 7),
                "max_tokens": 20 + 7 * (k % 11),
                "priority": k % 3 - 1,
            }
            for k in range(35)
        ]
        stops = [
            {"prompt": "Stop", "max_tokens": 60, "stop": whole["text"][30 + k]} for k in range(5)
        ]
        # One goes on for as long as the first switches take on a busy machine.
        bodies.append({"prompt": "word", "max_tokens": 500})
        answers = asyncio.gather(*(complete(http, **body) for body in bodies + stops))
        await until(http, lambda view: any(unit["running"] for unit in view["units"]))
        for units, preempt in zip((PAIR, ALONE) * 3, ("carry", "soft", "hard") * 2, strict=True):
            answer = await http.post("/admin/layout", json={"units": units, "preempt": preempt})
            assert answer.status_code == 200, answer.text
        # Some may be paused where a hard switch left them: their unit comes back.
        await http.post("/admin/layout", json={"units": PAIR, "preempt": "hard"})
        await http.post("/admin/layout", json={"units": ALONE, "preempt": "sequential"})
        return [whole, *await answers]


async def settled(
    url: str, before: dict[str, Metric], ended: int, finished: int | None = None
) -> dict[str, Metric]:
    """Return a page on which so many more requests have ended, and so many of them finished.

    The engines tell the controller, and vLLM counts in another process, after the client's answer.
    """
    wanted = {
        "shoal_requests_total": ended,
        "vllm:request_success_total": ended if finished is None else finished,
    }
    while True:
        families = scrape(url)
        if all(total(families, n) >= total(before, n) + more for n, more in wanted.items()):
            return families


async def test_totals_equal_what_clients_saw(node: ServedNode) -> None:
    before = scrape(node.url)
    answers = await load(node)
    assert [answer["reason"] for answer in answers].count("stop") == 5
    finished = total(before, "shoal_requests_total", outcome="finished") + len(answers)
    after = await settled(node.url, before, len(answers))

    def gained(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    assert total(after, "shoal_requests_total", outcome="finished") == finished
    assert gained("shoal_requests_total", outcome="aborted") == 0
    prompts = sum(answer["prompt_tokens"] for answer in answers)
    generated = sum(answer["completion_tokens"] for answer in answers)
    assert gained("vllm:prompt_tokens_total") == prompts
    assert gained("vllm:generation_tokens_total") == generated
    assert gained("vllm:request_success_total", finished_reason="stop") == 5
    assert gained("vllm:request_success_total") == len(answers)
    assert gained("shoal_request_seconds_count") == len(answers)
    assert gained("shoal_time_to_first_token_seconds_count") == len(answers)
    assert gained("shoal_request_queue_seconds_count") == len(answers)
    # Fake engines send one token per output.
    assert gained("shoal_inter_token_latency_seconds_count") == generated - len(answers)
    moved = gained("shoal_moved_requests_total")
    assert moved > 0
    assert gained("shoal_carried_requests_total", outcome="carried") > 0
    assert gained("shoal_step_tokens_total", kind="prefill") > prompts
    assert gained("shoal_switches_total", outcome="done", reason="manual") == 8
    # No time is negative, however often a request moved.
    assert gained("vllm:request_queue_time_seconds_sum") >= 0
    assert gained("vllm:request_queue_time_seconds_bucket", le="600.0") in (0, len(answers))
    assert (
        total(after, "vllm:num_requests_running") == total(after, "vllm:num_requests_waiting") == 0
    )


async def test_every_front_end_shows_all(node: ServedNode) -> None:
    before = scrape(node.url)
    async with node.async_client() as http:
        await complete(http, prompt="x", max_tokens=3)
    await settled(node.url, before, 1)
    names = ("vllm:generation_tokens_total", "shoal_request_seconds_count", "shoal_requests_total")
    seen = Counter(
        tuple(total(families, name) for name in names)
        for families in (scrape(node.url) for _ in range(12))  # each a new connection
    )
    assert len(seen) == 1
    assert all(next(iter(seen)))


async def test_what_clients_give_up_is_aborted_and_in_no_latency(node: ServedNode) -> None:
    before = scrape(node.url)
    body = {"model": MODEL, "prompt": "x", "max_tokens": 400, "stream": True}
    async with (
        node.async_client() as http,
        http.stream("POST", "/v1/completions", json=body) as response,
    ):
        await anext(response.aiter_lines())
    after = await settled(node.url, before, 1, finished=0)

    def gained(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    assert gained("shoal_requests_total", outcome="aborted") == 1
    assert gained("shoal_request_seconds_count") == 0
    assert gained("shoal_time_to_first_token_seconds_count") == 1


async def test_what_is_refused_is_counted_by_reason_and_measured_nowhere(node: ServedNode) -> None:
    before = scrape(node.url)
    async with node.async_client() as http:
        ask = {"model": MODEL, "prompt": "x", "max_tokens": 400, "ignore_eos": True}
        running = [asyncio.create_task(http.post("/v1/completions", json=ask)) for _ in range(40)]
        late = {"x-shoal-deadline-ms": "30"}
        while (answer := await http.post("/v1/completions", json=ask, headers=late)).is_success:
            pass
        wrong = await http.post("/v1/completions", json={**ask, "max_tokens": -1})
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    assert wrong.status_code == 400
    after = scrape(node.url)

    def gained(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    assert answer.status_code == 504
    assert gained("shoal_rejected_requests_total", reason="invalid") == 1
    assert gained("shoal_rejected_requests_total", reason="expired") == 1
    assert gained("shoal_requests_total", outcome="expired") == 1
    for reason in ("error", "abort"):
        assert gained("vllm:request_success_total", finished_reason=reason) == 0


def test_outcomes_are_the_enum(node: ServedNode) -> None:
    samples = scrape(node.url)["shoal_requests"].samples
    assert {sample.labels["outcome"] for sample in samples} == {
        outcome.value for outcome in Outcome
    }


# --- logs: last, for it ends the server ---


def test_every_line_of_the_log_is_json_and_a_switch_is_one(node: ServedNode) -> None:
    http = node.client()
    assert http.post("/admin/layout", json={"units": PAIR}).status_code == 200
    http.close()
    lines = [json.loads(line) for line in node.lines + node.stop()]
    assert {"time", "level", "process", "logger", "message"} <= set.intersection(*map(set, lines))
    assert lines[0]["message"] == "Starting Shoal"
    (last,) = [line for line in lines if line.get("switch")][-1:]
    assert (last["process"], last["level"]) == ("controller", "info")
    assert last["message"].startswith("switch ")
    assert (last["switch"]["after"], last["switch"]["reason"]) == (PAIR, "manual")
