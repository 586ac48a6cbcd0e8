"""Outputs that a front end cannot read end their requests only, seen over HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from tests.server.node import ServedNode, served_node, until
from tests.server.spoil import GARBAGE, UNDECODABLE, UNPROCESSABLE, spoiling_shoal

BAD = [UNDECODABLE, UNPROCESSABLE]
LONG = 200
"""Tokens of an answer that goes on for longer than a spoiled one."""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    options = ("--engines", "1", "--fake-step-ms", "5")
    with served_node(
        tmp_path_factory.mktemp("c"), *options, last_line="try it:", main=spoiling_shoal
    ) as found:
        yield found


@pytest.fixture
async def http(node: ServedNode) -> AsyncIterator[httpx.AsyncClient]:
    async with node.async_client() as client:
        yield client


async def ask(
    http: httpx.AsyncClient, name: str = "", tokens: int = LONG, **more: Any
) -> httpx.Response:
    body = {"model": "shoal-demo", "prompt": "x", "max_tokens": tokens, "temperature": 0}
    return await http.post(
        "/v1/completions",
        json={**body, "ignore_eos": True, **more},
        headers={"X-Request-Id": name} if name else {},
    )


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    return [json.loads(line) for line in lines if line.startswith("{")]


async def count(http: httpx.AsyncClient, outcome: str) -> float:
    page = (await http.get("/metrics")).text
    name = f'shoal_requests_total{{outcome="{outcome}"}} '
    (line,) = (each for each in page.splitlines() if each.startswith(name))
    return float(line.removeprefix(name))


async def counts(http: httpx.AsyncClient) -> tuple[float, ...]:
    await until(http, lambda view: all(not unit["running"] for unit in view["units"]))
    return tuple([await count(http, each) for each in ("finished", "garbled", "aborted")])


@pytest.mark.parametrize("kind", BAD)
async def test_a_bad_output_ends_its_own_request(http: httpx.AsyncClient, kind: str) -> None:
    expected = text(await ask(http))
    before = await counts(http)
    others = [asyncio.create_task(ask(http)) for _ in range(3)]
    answer = await ask(http, f"{kind}-1")
    assert answer.status_code == 500, answer.text
    assert "could not read" in answer.json()["error"]["message"]
    assert [text(each) for each in await asyncio.gather(*others)] == [expected] * 3
    finished, garbled, aborted = before
    assert await counts(http) == (finished + 3, garbled + 1, aborted)


@pytest.mark.parametrize("kind", BAD)
async def test_a_stream_ends_with_an_error_event(http: httpx.AsyncClient, kind: str) -> None:
    answer = await ask(http, f"{kind}-2", stream=True)
    assert answer.status_code == 200
    *texts, last = events(answer)
    assert texts, "tokens come before the bad output"
    assert "could not read" in last["error"]["message"]
    assert last["error"]["code"] == 500


@pytest.mark.parametrize("kind", BAD)
async def test_all_answers_of_a_request_end_with_it(http: httpx.AsyncClient, kind: str) -> None:
    answer = await ask(http, f"{kind}-3", n=3, temperature=1)
    assert answer.status_code == 500, answer.text
    assert text(await ask(http))


async def test_a_lost_message_costs_no_token(http: httpx.AsyncClient) -> None:
    expected = text(await ask(http))
    _, garbled, _ = await counts(http)
    others = [asyncio.create_task(ask(http)) for _ in range(2)]
    assert text(await ask(http, f"{GARBAGE}-1")) == expected
    assert [text(each) for each in await asyncio.gather(*others)] == [expected] * 2
    assert (await counts(http))[1] == garbled


async def test_a_lost_last_message_costs_no_token(http: httpx.AsyncClient) -> None:
    """The engine has reported the request's end, so the controller no longer has it."""
    expected = text(await ask(http, tokens=3))
    assert text(await ask(http, f"{GARBAGE}-2", tokens=3)) == expected


async def test_the_node_is_well_after_all_of_it(http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).status_code == 200
    assert (await http.post("/admin/audit")).json()["problems"] == []
