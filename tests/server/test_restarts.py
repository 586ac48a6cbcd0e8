"""Engines of a served node die and come back, and their group with them."""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.node import ServedNode, children_of, served_node

BODY = {"model": "shoal-demo", "prompt": "The sea", "max_tokens": 24, "temperature": 0}
SINGLES, PAIR = [[0], [1]], [[0, 1]]
LOOK_SECONDS = 0.05
"""Between two looks at the node, which would take the time of engines that start."""


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")  # a short name: sockets are in it


@contextmanager
def served(cache: Path, *arguments: str, **options: Any) -> Iterator[tuple[ServedNode, Any]]:
    """Serve, and check that nothing is left over in the end."""
    common = ("--engines", "2", "--restart-backoff", "0.1")
    with served_node(cache, *common, *arguments, **options) as node:
        with node.client() as http:
            yield node, http
        node.children += children_of(node.process.pid)
        last = node.stop()
    assert node.process.returncode == 0, "\n".join(last)
    assert node.leftovers() == []


def layout(http: httpx.Client) -> Any:
    return http.get("/admin/layout").json()


def switch(http: httpx.Client, units: list[list[int]]) -> httpx.Response:
    return http.post("/admin/layout", json={"units": units})


def text(http: httpx.Client, unit: str) -> str:
    answer = http.post("/v1/completions", json=BODY)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-shoal-unit"] == unit
    return str(answer.json()["choices"][0]["text"])


def wait_until_whole(http: httpx.Client, restarts: list[int]) -> None:
    """Ask until every engine serves and every group can be formed."""
    while True:  # bounded by the test's time limit
        view = layout(http)
        states = [engine["state"] for engine in view["engines"]]
        if states == ["serving", "serving"] and not view["unavailable"]:
            break
        time.sleep(LOOK_SECONDS)
    assert [engine["restarts"] for engine in view["engines"]] == restarts


def test_a_killed_engine_comes_back(cache: Path) -> None:
    # So long a pause that all is seen that is asked about in it.
    with served(cache, "--restart-backoff", "10") as (node, http):
        assert http.get("/ready").json() == {"ready": True}
        node.kill("engine 1")
        while not (view := layout(http))["unavailable"]:
            pass  # bounded by the test's time limit
        assert view["unavailable"] == [
            {"engines": [0, 1], "layout": "tp2", "reason": "engines [1] are restarting"},
        ]
        ready = http.get("/ready")
        assert ready.status_code == 200
        assert "unavailable" in ready.json()
        text(http, "0")

        wait_until_whole(http, [0, 1])
        assert http.get("/ready").json() == {"ready": True}
        metrics = http.get("/metrics").text
        assert 'shoal_engine_restarts_total{engine="1"} 1.0' in metrics
        assert 'shoal_groups_unavailable{layout="tp2"} 0.0' in metrics
        assert switch(http, PAIR).status_code == 200
        text(http, "0,1")


def test_an_engine_that_cannot_be_restarted_is_left_out(cache: Path) -> None:
    with served(cache, "--restart-limit", "0") as (node, http):
        node.kill("engine 1")
        while layout(http)["engines"][1]["state"] != "dead":
            pass  # bounded by the test's time limit
        refused = switch(http, PAIR)
        assert refused.status_code == 503
        assert "engines [1] are lost" in refused.json()["error"]["message"]
        assert http.get("/ready").json()["engines"] == {"1": "dead"}
        text(http, "0")


def check_that_a_stream_ends_without_engines(node: ServedNode, http: httpx.Client) -> None:
    """Lose both engines under a stream: it ends long before one has loaded its model."""
    of = {Path(f"/proc/{pid}/comm").read_text()[:13]: pid for pid in children_of(node.process.pid)}
    endless = {**BODY, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=endless) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: {"))
        next(lines)
        os.kill(of["engine 0 runn"], signal.SIGSTOP)
        os.kill(of["engine 1 runn"], signal.SIGKILL)
        *_, last = lines
    assert json.loads(last.removeprefix("data: "))["error"] == {
        "message": "no engine has served for 2 s",
        "type": "ServiceUnavailableError",
        "param": None,
        "code": 503,
    }
    assert "serving" not in {engine["state"] for engine in layout(http)["engines"]}


def test_a_real_engine_comes_back_with_the_same_tokens(cache: Path) -> None:
    options = ("--outage-limit", "2")
    with served(cache, *options, real=True, VLLM_LOGGING_LEVEL="CRITICAL") as (node, http):
        expected = text(http, "0")
        _, _, _, runner, *_ = node.children
        os.kill(runner, signal.SIGKILL)
        while layout(http)["engines"][1]["restarts"] == 0:
            time.sleep(LOOK_SECONDS)  # bounded by the test's time limit
        wait_until_whole(http, [0, 1])
        assert switch(http, PAIR).status_code == 200
        assert text(http, "0,1") == expected
        assert switch(http, SINGLES).status_code == 200
        assert http.post("/admin/audit").json() == {"clean": True, "problems": []}
        check_that_a_stream_ends_without_engines(node, http)
