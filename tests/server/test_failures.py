"""Processes of a served node die: streams go on, or end with a reason, and nothing is left over."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.bench.failures import counter
from tests.server.node import ServedNode

STREAMS = 8
PINNED = 4
TOKENS = 120
EARLY = 5
"""Chunks that every stream has got before an engine goes."""


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")  # a short name: sockets are in it


def body(number: int, **more: Any) -> dict[str, Any]:
    return {
        "model": "shoal-demo",
        "prompt": f"The sea, number {number}: " * 3,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        **more,
    }


class Stream:
    """One streamed completion."""

    def __init__(self, client: httpx.AsyncClient, request: dict[str, Any]) -> None:
        self._client = client
        self._request = request
        self.texts: dict[int, str] = {}
        self.chunks = 0
        self.started = asyncio.Event()
        self.error: str | None = None

    async def run(self) -> None:
        async with self._client.stream("POST", "/v1/completions", json=self._request) as response:
            assert response.status_code == 200, await response.aread()
            async for event in self._events(response):
                if "error" in event:
                    self.error = event["error"]["message"]
                for choice in event.get("choices", []):
                    index, text = choice["index"], choice["text"]
                    self.texts[index] = self.texts.get(index, "") + text
                self.chunks += 1
                if self.chunks == EARLY:
                    self.started.set()

    @staticmethod
    async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def requests() -> list[dict[str, Any]]:
    """Return requests with one possible answer, one of them with two choices, then seeded ones."""
    twice = body(STREAMS, n=2, temperature=1, top_k=1)
    return (
        [body(k) for k in range(STREAMS - 1)]
        + [twice]
        + [body(100 + k, seed=k, temperature=0.8) for k in range(PINNED)]
    )


async def run_streams(node: ServedNode, act: Any = None) -> list[Stream]:
    """Run all streams at a time; act when each has begun."""
    async with node.async_client() as client:
        streams = [Stream(client, request) for request in requests()]
        tasks = [asyncio.create_task(stream.run()) for stream in streams]
        if act is not None:
            await asyncio.gather(*(stream.started.wait() for stream in streams))
            act()
        await asyncio.gather(*tasks)
    return streams


def check_streams(node: ServedNode, act: Any) -> None:
    """Have a part of the node die under streams: their clients see nothing of it, or the reason."""
    undisturbed = asyncio.run(run_streams(node))
    streams = asyncio.run(run_streams(node, act))
    greedy = slice(0, STREAMS)
    assert [stream.error for stream in streams[greedy]] == [None] * STREAMS
    assert [s.texts for s in streams[greedy]] == [s.texts for s in undisturbed[greedy]]
    reasons = [stream.error for stream in streams[STREAMS:] if stream.error is not None]
    assert 0 < len(reasons) < PINNED
    assert all("cannot go on elsewhere" in reason for reason in reasons)
    with node.client() as http:
        metrics = http.get("/metrics").text
    assert counter(metrics, "shoal_requests_migrated_total") > 0
    outcomes = 'shoal_requests_total{outcome="%s"}'
    assert counter(metrics, outcomes % "lost") == len(reasons)
    assert counter(metrics, outcomes % "poisoned") == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_go_on_when_an_engine_dies(cache: Path, number: signal.Signals) -> None:
    node = ServedNode(cache, "--fake-step-ms", "20")
    check_streams(node, lambda: os.kill(node.children[0], number))
    cause = {signal.SIGKILL: "ended", signal.SIGSTOP: "stopped"}[number]
    with node.client() as http:
        metrics = http.get("/metrics").text
    assert counter(metrics, f'shoal_engine_deaths_total{{cause="{cause}"}}') == 1
    node.stop()
    assert node.leftovers() == []


def test_streams_go_on_when_a_real_engine_dies(cache: Path) -> None:
    node = ServedNode(cache, real=True, VLLM_LOGGING_LEVEL="CRITICAL")
    assert node.url, "\n".join(node.lines)
    scheduler, runner, *_ = node.children
    check_streams(node, lambda: os.kill(runner, signal.SIGKILL))
    assert not Path(f"/proc/{scheduler}").exists(), "an engine dies whole"
    node.stop()
    assert node.leftovers() == []


def test_a_killed_server_takes_its_processes_along_and_the_next_one_cleans_up(cache: Path) -> None:
    node = ServedNode(cache)
    node.process.kill()
    node.wait()  # until nobody is left who could write
    assert node.runtime_dir.exists()
    following = ServedNode(cache)
    assert not node.runtime_dir.exists()
    following.stop()
    assert following.leftovers() == []
