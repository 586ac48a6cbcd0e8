"""The task pool over HTTP: one engine with one seat, and slow steps."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.server.node import ServedNode, key_file, served_node, until

BUSY = 2
"""Requests that one seat runs or is given ahead: the next request waits in the pool."""
KEYS = [
    {"key": "free", "name": "free"},
    {"key": "batch", "name": "batch", "min_priority": 5, "max_waiting": 1},
]
LIMIT = 3


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    directory = tmp_path_factory.mktemp("pool")
    keys = key_file(directory / "keys.json", *KEYS)
    with served_node(
        directory,
        *("--engines", "1", "--max-num-seqs", "1", "--fake-step-ms", "50"),
        *("--api-key-file", str(keys), "--admin-key-file", str(keys)),
        *("--max-waiting-requests", str(LIMIT)),
        last_line="try it:",
    ) as served:
        yield served


@pytest.fixture
async def http(node: ServedNode) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": "Bearer free"}
    async with node.async_client(headers=headers) as client:
        await pool_of(client, 0)
        yield client


@pytest.fixture
async def busy(http: httpx.AsyncClient) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an engine whose seat is taken for as long as the test lasts."""
    clients = [
        asyncio.create_task(http.post("/v1/completions", json=ask(1000))) for _ in range(BUSY)
    ]
    await until(http, lambda view: loads(view) == (1, BUSY - 1))
    yield http
    await leave(clients)
    await until(http, lambda view: loads(view) == (0, 0))


async def leave(clients: list[asyncio.Task[httpx.Response]]) -> None:
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)


def loads(view: dict[str, Any]) -> tuple[int, int]:
    (unit,) = view["units"]
    return unit["running"], unit["waiting"]


def ask(max_tokens: int = 1) -> dict[str, Any]:
    return {"model": "shoal-demo", "prompt": "x", "max_tokens": max_tokens, "ignore_eos": True}


async def pool_of(http: httpx.AsyncClient, size: int) -> None:
    await until(http, lambda view: view["waiting"] == size)


@asynccontextmanager
async def waiting(http: httpx.AsyncClient, count: int, **headers: str) -> AsyncIterator[None]:
    """Have requests in the pool, whose clients leave at the end."""
    clients = [
        asyncio.create_task(http.post("/v1/completions", json=ask(), headers=headers))
        for _ in range(count)
    ]
    await pool_of(http, count)
    try:
        yield
    finally:
        await leave(clients)
        await pool_of(http, 0)


async def outcomes(http: httpx.AsyncClient) -> dict[str, float]:
    name = 'shoal_requests_total{outcome="'
    lines = (await http.get("/metrics")).text.splitlines()
    parts = [line.removeprefix(name).split('"} ') for line in lines if line.startswith(name)]
    return {outcome: float(count) for outcome, count in parts}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_a_deadline_in_the_pool_is_a_504(
    busy: httpx.AsyncClient, path: str, stream: bool
) -> None:
    body = ask() | {"stream": stream, "messages": [{"role": "user", "content": "x"}]}
    if path == "/v1/responses":
        body = {"model": "shoal-demo", "input": "x", "stream": stream}
    before = await outcomes(busy)
    response = await busy.post(path, json=body, headers={"x-shoal-deadline-ms": "50"})
    assert response.status_code == 504
    assert "deadline" in response.json()["error"]["message"]
    assert response.headers["x-shoal-priority"] == "0"
    assert (await outcomes(busy))["expired"] == before["expired"] + 1
    await pool_of(busy, 0)


async def test_one_of_several_prompts_that_expires_fails_the_request(
    busy: httpx.AsyncClient,
) -> None:
    body = ask() | {"prompt": ["x", "y"]}
    response = await busy.post("/v1/completions", json=body, headers={"x-shoal-deadline-ms": "50"})
    assert response.status_code == 504
    await pool_of(busy, 0)


async def test_a_deadline_does_not_touch_what_runs(http: httpx.AsyncClient) -> None:
    """It has a seat long before its deadline, and runs until long after it."""
    for seconds in (3, 6, 12):  # on a busy machine it may not have a seat by then
        tokens = 80 * seconds // 3
        headers = {"x-shoal-deadline-ms": f"{seconds}000"}
        response = await http.post("/v1/completions", json=ask(tokens), headers=headers)
        if response.status_code == 200:
            break
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] == tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_out_of_the_pool(
    busy: httpx.AsyncClient, stream: bool
) -> None:
    before = await outcomes(busy)
    body = ask() | {"stream": stream}
    client = asyncio.create_task(busy.post("/v1/completions", json=body))
    await pool_of(busy, 1)
    await leave([client])
    await pool_of(busy, 0)
    assert (await outcomes(busy))["aborted"] == before["aborted"] + 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_seat(http: httpx.AsyncClient, stream: bool) -> None:
    before = await outcomes(http)
    body = ask(1000) | {"stream": stream}  # 50 s of steps
    client = asyncio.create_task(http.post("/v1/completions", json=body))
    await until(http, lambda view: loads(view) == (1, 0))
    await leave([client])
    await until(http, lambda view: loads(view) == (0, 0))
    after = await outcomes(http)
    assert after == before | {"aborted": before["aborted"] + 1}


async def test_a_full_pool_is_a_503_with_retry_after(busy: httpx.AsyncClient) -> None:
    before = await outcomes(busy)
    async with waiting(busy, LIMIT):
        for body in (ask(), ask() | {"stream": True}):
            response = await busy.post("/v1/completions", json=body)
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) >= 1
            assert f"{LIMIT} requests" in response.json()["error"]["message"]
        assert (await outcomes(busy))["pool_full"] == before["pool_full"] + 2
    async with waiting(busy, 1):
        pass


@pytest.mark.parametrize("stream", [False, True])
async def test_an_urgent_request_pushes_the_last_one_out_with_all_its_answers(
    busy: httpx.AsyncClient, stream: bool
) -> None:
    before = await outcomes(busy)
    body = ask() | {"stream": stream}

    def post(body: dict[str, Any], **headers: str) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(busy.post("/v1/completions", json=body, headers=headers))

    first = post(body)
    await pool_of(busy, 1)
    last = post(body | {"n": 2})
    await pool_of(busy, LIMIT)
    urgent = post(body, **{"X-Vllm-Priority": "-5"})
    response = await last
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert "more urgent" in response.json()["error"]["message"]
    await pool_of(busy, 2)
    assert (await outcomes(busy))["pool_full"] == before["pool_full"] + 2
    await leave([first, urgent])
    await pool_of(busy, 0)
    after = await outcomes(busy)
    assert after["aborted"] == before["aborted"] + 2
    assert sum(after.values()) == sum(before.values()) + 4


async def test_a_burst_is_cut_at_the_limit_and_nobody_hangs(busy: httpx.AsyncClient) -> None:
    burst = [
        asyncio.create_task(busy.post("/v1/completions", json=ask() | {"stream": k % 2 == 0}))
        for k in range(12)
    ]
    answers = asyncio.as_completed(burst)
    for _ in range(len(burst) - LIMIT):
        response = await next(answers)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
    await pool_of(busy, LIMIT)
    await leave(burst)
    await pool_of(busy, 0)


async def test_a_caller_over_its_limit_gets_a_429(busy: httpx.AsyncClient) -> None:
    batch = {"Authorization": "Bearer batch"}
    async with waiting(busy, 1, **batch):
        response = await busy.post("/v1/completions", json=ask(), headers=batch)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert (await outcomes(busy))["caller_full"] == 1


async def test_the_effective_priority_comes_back(http: httpx.AsyncClient) -> None:
    async def priority(key: str, **headers: str) -> str:
        headers["Authorization"] = f"Bearer {key}"
        response = await http.post("/v1/completions", json=ask() | {"priority": 3}, headers=headers)
        assert response.status_code == 200
        return response.headers["x-shoal-priority"]

    assert await priority("free") == "3"
    assert await priority("free", **{"X-Vllm-Priority": "-7"}) == "-7"
    assert await priority("batch") == "5"
    assert await priority("batch", **{"X-Vllm-Priority": "9"}) == "9"


async def test_a_prompt_that_nothing_holds_is_a_400_with_the_limit(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", json=ask() | {"prompt": [5] * 5000})
    assert response.status_code == 400
    assert any(c.isdigit() for c in response.json()["error"]["message"])
