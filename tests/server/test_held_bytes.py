"""What requests may take of the node's memory, over HTTP: bodies in the front end, and the pool."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.held_steps import VARIABLE, held_steps, holdable_shoal
from tests.server.node import ServedNode, served_node, until

MOST = 16_000


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file that holds the engine's steps."""
    return tmp_path_factory.mktemp("hold") / "hold"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, hold: Path) -> Iterator[ServedNode]:
    with served_node(
        tmp_path_factory.mktemp("held"),
        *("--engines", "1", "--fake-step-ms", "50", "--max-held-bytes", str(MOST)),
        last_line="try it:",
        main=holdable_shoal,
        **{VARIABLE: str(hold)},
    ) as served:
        yield served


@pytest.fixture
async def http(node: ServedNode) -> AsyncIterator[httpx.AsyncClient]:
    async with node.async_client() as client:
        yield client


def ask(tokens: int, **fields: Any) -> dict[str, Any]:
    """Return a body of 5 bytes for each token of its prompt, which become 3 bytes of a request."""
    prompt = {"prompt": [1000] * tokens, "max_tokens": 1, "ignore_eos": True}
    return {"model": "shoal-demo", **prompt, **fields}


async def held(http: httpx.AsyncClient) -> float:
    text = (await http.get("/metrics")).text
    (line,) = (row for row in text.splitlines() if 'held_bytes{state="unfinished"}' in row)
    return float(line.rpartition(" ")[2])


def requests_of(view: dict[str, Any]) -> int:
    (unit,) = view["units"]
    return int(unit["running"] + unit["waiting"])


def check_refused(response: httpx.Response, reason: str) -> None:
    assert response.status_code == 503, response.text
    assert reason in response.json()["error"]["message"]
    assert int(response.headers["retry-after"]) >= 1


async def test_bodies_of_requests_that_run_leave_room_for_so_many_others(
    http: httpx.AsyncClient, hold: Path
) -> None:
    with held_steps(hold):
        answers = [asyncio.create_task(http.post("/v1/completions", json=ask(2000)))]
        await until(http, lambda view: requests_of(view) == 1)
        assert await held(http) > 5_000
        check_refused(await http.post("/v1/completions", json=ask(2000)), "front end is full")
        answers.append(asyncio.create_task(http.post("/v1/completions", json=ask(10))))
        await until(http, lambda view: requests_of(view) == 2)
    assert [(await answer).status_code for answer in answers] == [200, 200]
    while await held(http):
        await asyncio.sleep(0.01)
    assert (await http.post("/v1/completions", json=ask(2000))).status_code == 200


async def test_a_request_that_becomes_many_is_refused_by_what_they_take(
    http: httpx.AsyncClient,
) -> None:
    check_refused(await http.post("/v1/completions", json=ask(2000, n=8)), "the node is full")
    while await held(http):
        await asyncio.sleep(0.01)
    assert (await http.post("/v1/completions", json=ask(2000, n=2))).status_code == 200


async def test_a_body_that_never_fits_is_not_asked_to_come_again(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", content=b" " * (MOST + 1))
    assert response.status_code == 413
    assert "retry-after" not in response.headers
