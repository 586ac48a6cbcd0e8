"""Traces of a served node, as a collector sees them."""

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.node import ServedNode, served_node
from tests.server.otlp import Collector, Span, grpc_collector, http_collector

MODEL = "shoal-demo"
LONG = 300
"""Tokens of a stream that mostly goes on for as long as a switch takes."""
ALONE, PAIR = [[0], [1]], [[0, 1]]
PARENT = "b7ad6b7169203331"
ROOT = "POST /v1/completions"
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with http_collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def node(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    """Two front ends: each exports the requests that it serves, one of them the switches."""
    cache = tmp_path_factory.mktemp("cache")
    with served_node(
        cache,
        *("--fake-step-ms", "10", "--api-server-count", "2", "--max-num-seqs", "2"),
        *("--max-waiting-requests", "1"),
        OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=collector.url,
        OTEL_EXPORTER_OTLP_TRACES_PROTOCOL="http/protobuf",
        OTEL_BSP_SCHEDULE_DELAY="50",
    ) as served:
        yield served


def new_trace() -> str:
    return f"{next(_numbers):032x}"


def headers(trace: str, sampled: bool = True) -> dict[str, str]:
    return {"traceparent": f"00-{trace}-{PARENT}-0{int(sampled)}"}


async def ask(url: str, trace: str, tokens: int = 5, **more: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": "x y z", "max_tokens": tokens, "ignore_eos": True, **more}
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        return await http.post("/v1/completions", json=body, headers=headers(trace))


async def start(url: str, trace: str, tokens: int) -> "asyncio.Task[None]":
    """Begin a stream; return, once it has begun, the task that reads it to its end."""
    begun = asyncio.Event()

    async def read() -> None:
        body = {"model": MODEL, "prompt": "x", "max_tokens": tokens, "ignore_eos": True}
        async with (
            httpx.AsyncClient(base_url=url, timeout=60) as http,
            http.stream(
                "POST", "/v1/completions", json={**body, "stream": True}, headers=headers(trace)
            ) as response,
        ):
            async for _ in response.aiter_lines():
                begun.set()

    task = asyncio.create_task(read())
    await begun.wait()
    return task


async def switch_counted(
    node: ServedNode, units: list[list[int]], preempt: str
) -> tuple[int, dict[str, Any]]:
    """Return the epoch of the switch, and how many requests it treated how."""
    async with node.async_client() as http:
        answer = await http.post("/admin/layout", json={"units": units, "preempt": preempt})
    assert answer.status_code == 200, answer.text
    return int(answer.json()["epoch"]), answer.json()["requests"]


async def switch(node: ServedNode, units: list[list[int]], preempt: str) -> int:
    """Return the epoch of the switch."""
    return (await switch_counted(node, units, preempt))[0]


async def start_and_bind(
    node: ServedNode, preempt: str, treated: str
) -> tuple[str, "asyncio.Task[None]", int]:
    """Begin a stream and have both engines bound under it: again, if it has ended before.

    Returns:
        The stream's trace, the task that reads it, and the epoch of the switch.
    """
    while True:
        trace = new_trace()
        stream = await start(node.url, trace, LONG)
        epoch, requests = await switch_counted(node, PAIR, preempt)
        if requests[treated]:
            return trace, stream, epoch
        await stream
        await switch(node, ALONE, "sequential")


def named(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


def assert_tree(spans: list[Span]) -> Span:
    """Check that all is below the HTTP request's span and within it; return that."""
    (root,) = named(spans, ROOT)
    assert root.parent == PARENT
    for span in spans:
        assert span.service == "shoal"
        assert span is root or span.parent == root.id
        assert root.start <= span.start <= span.end <= root.end, span.name
    return root


async def test_a_request_is_one_trace(node: ServedNode, collector: Collector) -> None:
    trace = new_trace()
    answer = await ask(node.url, trace, 7, priority=-2)
    spans = collector.of_trace(trace)
    root = assert_tree(spans)
    unit, layout = answer.headers["x-shoal-unit"], answer.headers["x-shoal-layout"]
    assert root.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "shoal.priority": -2,
        "shoal.unit": f"[{unit}]",
        "shoal.layout": layout,
        "shoal.outcome": "finished",
        "gen_ai.usage.completion_tokens": 7,
    }
    assert not root.failed
    steps = [
        span for span in spans if span.name in ("pool_wait", "dispatch", "first_token", "decode")
    ]
    assert [span.name for span in steps] == ["pool_wait", "dispatch", "first_token", "decode"]
    for before, after in itertools.pairwise(steps):
        assert before.end == after.start
    (llm,) = named(spans, "llm_request")
    prompt_tokens = answer.json()["usage"]["prompt_tokens"]
    assert llm.attributes["gen_ai.usage.prompt_tokens"] == prompt_tokens
    assert llm.attributes["gen_ai.usage.completion_tokens"] == 7
    assert llm.attributes["gen_ai.request.id"] == steps[0].attributes["gen_ai.request.id"]
    assert len(spans) == 6


async def test_every_completion_of_a_request_has_its_spans(
    node: ServedNode, collector: Collector
) -> None:
    trace = new_trace()
    await ask(node.url, trace, 4, n=2)
    spans = collector.of_trace(trace)
    root = assert_tree(spans)
    assert root.attributes["gen_ai.usage.completion_tokens"] == 8
    for name in ("pool_wait", "dispatch", "first_token", "decode", "llm_request"):
        assert len(named(spans, name)) == 2


async def test_a_stop_string_finishes_a_request(node: ServedNode, collector: Collector) -> None:
    whole = (await ask(node.url, new_trace(), 30)).json()["choices"][0]["text"]
    trace = new_trace()
    await ask(node.url, trace, 30, stop=whole[10:14])
    spans = collector.of_trace(trace)
    assert assert_tree(spans).attributes["shoal.outcome"] == "finished"
    assert len(named(spans, "llm_request")) == 1


async def test_a_hard_switch_pauses_and_is_linked(node: ServedNode, collector: Collector) -> None:
    trace, stream, bound = await start_and_bind(node, "hard", "paused")
    epochs = [bound, await switch(node, ALONE, "hard")]
    await stream
    spans = collector.of_trace(trace)
    assert_tree(spans)
    ((bind,), (paused,), (release,)) = (named(spans, n) for n in ("bind", "paused", "release"))
    assert bind.end == paused.start
    assert paused.end == release.end
    for span, epoch in ((bind, epochs[0]), (paused, epochs[0]), (release, epochs[1])):
        assert span.attributes["shoal.switch.epoch"] == epoch
        assert span.attributes["shoal.switch.treatment"] == "hard"
        assert span.attributes["shoal.switch.reason"] == "manual"
        (link,) = span.links
        (switched,) = collector.wait(lambda s, link=link: s.id == link.span)  # type: ignore[misc]
        assert (switched.name, switched.trace, switched.parent) == ("switch", link.trace, "")
        assert switched.attributes["shoal.switch.epoch"] == epoch
    phases = [span for span in collector.spans if span.parent == bind.links[0].span]
    assert [span.name for span in phases] == ["drain", "lease", "commit"]
    for span in phases:
        assert bind.start <= span.start <= span.end <= bind.end
        assert span.attributes == {"shoal.unit": "[0,1]", "shoal.layout": "tp2"}
    (switched,) = collector.wait(lambda span: span.id == bind.links[0].span)
    assert switched.attributes["shoal.switch.before"] == "[0] [1]"
    assert switched.attributes["shoal.switch.after"] == "[0,1]"
    assert switched.attributes["shoal.switch.paused"] == 1
    assert switched.attributes["shoal.switch.outcome"] == "done"


async def test_a_moved_request_has_spans_of_both_units(
    node: ServedNode, collector: Collector
) -> None:
    trace, stream, epoch = await start_and_bind(node, "soft", "moved")
    await stream
    await switch(node, ALONE, "soft")
    spans = collector.of_trace(trace)
    root = assert_tree(spans)
    assert root.attributes["shoal.layout"] == "dp tp2"
    decodes = named(spans, "decode")
    assert [span.attributes["shoal.layout"] for span in decodes] == ["dp", "tp2"]
    assert sum(span.attributes["gen_ai.usage.completion_tokens"] for span in decodes) == LONG
    for name in ("pool_wait", "dispatch", "first_token"):
        assert len(named(spans, name)) == 2
    (bind,) = named(spans, "bind")
    assert bind.attributes["shoal.switch.epoch"] == epoch
    assert bind.start <= named(spans, "pool_wait")[1].start <= bind.end
    assert named(spans, "paused") == []
    (llm,) = named(spans, "llm_request")
    assert llm.attributes["gen_ai.usage.completion_tokens"] == LONG


async def test_a_carried_request_has_spans_of_both_units(
    node: ServedNode, collector: Collector
) -> None:
    trace, stream, epoch = await start_and_bind(node, "carry", "carried")
    await stream
    await switch(node, ALONE, "carry")
    spans = collector.of_trace(trace)
    root = assert_tree(spans)
    assert root.attributes["shoal.layout"] == "dp tp2"
    before, after = named(spans, "decode")
    assert [span.attributes["shoal.layout"] for span in (before, after)] == ["dp", "tp2"]
    (carry,) = named(spans, "carry")
    assert (carry.start, carry.end) == (before.end, after.start)
    assert len(named(spans, "pool_wait")) == 1
    (bind,) = named(spans, "bind")
    (switched,) = collector.wait(lambda span: span.id == bind.links[0].span)
    assert switched.attributes["shoal.switch.epoch"] == epoch
    assert switched.attributes["shoal.switch.carried"] == 1
    (llm,) = named(spans, "llm_request")
    assert llm.attributes["gen_ai.usage.completion_tokens"] == LONG


async def test_refusals_are_errors(node: ServedNode, collector: Collector) -> None:
    invalid, unknown, expired, full = (new_trace() for _ in range(4))
    assert (await ask(node.url, unknown, model="nobody")).status_code == 404
    async with node.async_client() as http:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 2}
        bad = {"x-vllm-priority": "much", **headers(invalid)}
        assert (await http.post("/v1/completions", json=body, headers=bad)).status_code == 400
        # Two engines with two seats each, and one request ahead for each; one may wait.
        busy = [await start(node.url, new_trace(), 2000) for _ in range(4)]
        ahead = [asyncio.create_task(ask(node.url, new_trace(), 2000)) for _ in range(2)]
        late = {"x-shoal-deadline-ms": "50", **headers(expired)}
        while True:
            view = (await http.get("/admin/layout")).json()
            if sum(unit["running"] + unit["waiting"] for unit in view["units"]) == 6:
                break
        assert (await http.post("/v1/completions", json=body, headers=late)).status_code == 504
        ahead.append(asyncio.create_task(ask(node.url, new_trace(), 2000)))
        while not (await http.get("/admin/layout")).json()["waiting"]:
            pass
        assert (await ask(node.url, full)).status_code == 503
    for task in (*busy, *ahead):
        task.cancel()
    await asyncio.gather(*busy, *ahead, return_exceptions=True)
    expected = (
        (invalid, 400, "invalid"),
        (unknown, 404, "invalid"),
        (expired, 504, "expired"),
        (full, 503, "pool_full"),
    )
    for trace, status, outcome in expected:
        spans = collector.of_trace(trace)
        root = assert_tree(spans)
        assert root.failed
        assert root.attributes["http.response.status_code"] == status
        assert root.attributes["shoal.outcome"] == outcome
        # vLLM would take the end of the one that waited for its first token.
        assert {span.name for span in spans} <= {ROOT, "pool_wait"}
    assert named(collector.of_trace(expired), "pool_wait")


# --- sampling, gRPC, and the end ---


async def test_the_last_spans_are_sent_and_nothing_that_is_not_sampled(tmp_path: Path) -> None:
    kept, dropped = new_trace(), new_trace()
    with grpc_collector() as collector:
        served = ServedNode(
            tmp_path,
            *("--otlp-traces-endpoint", collector.url),
            OTEL_SERVICE_NAME="mine",
            # Nothing is sent but what the end of the node sends.
            OTEL_BSP_SCHEDULE_DELAY="3600000",
            OTEL_BSP_MAX_EXPORT_BATCH_SIZE="2048",
        )
        assert served.url, served.lines
        async with served.async_client() as http:
            body = {"model": MODEL, "prompt": "x", "max_tokens": 3}
            for trace in (dropped, kept):
                head = headers(trace, sampled=trace == kept)
                await http.post("/v1/completions", json=body, headers=head)
        assert not [span for span in collector.spans if span.name == ROOT]
        output = served.stop()
    assert served.process.returncode == 0, output
    assert {span.service for span in collector.spans} == {"mine"}
    assert len([span for span in collector.spans if span.trace == kept]) == 6
    assert dropped not in {span.trace for span in collector.spans}
    assert len([span for span in collector.spans if span.name == "llm_request"]) == 1


async def test_without_an_endpoint_nothing_is_traced(tmp_path: Path) -> None:
    """The general endpoint of OpenTelemetry's switches nothing on: it may be for metrics."""
    with http_collector() as collector:
        served = ServedNode(
            tmp_path,
            "--log-format",
            "json",
            OTEL_EXPORTER_OTLP_ENDPOINT=collector.url.removesuffix("/v1/traces"),
            OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf",
        )
        assert served.url, served.lines
        assert (await ask(served.url, new_trace())).status_code == 200
        await switch(served, PAIR, "hard")
        output = served.stop()
    assert collector.spans == []
    assert [json.loads(line) for line in output]
    assert served.process.returncode == 0
