"""Every request ends in one outcome, whatever a server does, and none waits for another."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from shoal.loadgen.client import Client, ClientError, Endpoint, Settings
from shoal.loadgen.exchange import Exchange, Flaw, Outcome
from shoal.loadgen.workload import Arrival
from tests.loadgen.stand_in import DONE, StandIn, event, events, stand_in, stream, token, usage


@pytest_asyncio.fixture
async def server() -> AsyncIterator[StandIn]:
    async with stand_in() as running:
        yield running


async def send(server: StandIn, **settings: Any) -> Exchange:
    exchange = Exchange(0, Arrival(0.0, 3, 2, priority=settings.pop("priority", 0)))
    async with Client(Settings(server.url, **settings), time.monotonic) as client:
        await client.find_model()
        chat = client.settings.endpoint is Endpoint.CHAT
        await client.send(exchange, client.body("hi" if chat else [1, 2, 3], 2))
    return exchange


async def test_a_whole_answer(server: StandIn) -> None:
    exchange = await send(server)
    assert exchange.outcome is Outcome.OK
    assert (exchange.prompt_tokens, exchange.output_tokens) == (3, 2)
    assert len(exchange.chunk_times) == 2
    assert exchange.sent is not None
    assert exchange.ended is not None
    assert exchange.sent <= exchange.chunk_times[0] <= exchange.chunk_times[1] <= exchange.ended
    assert list(exchange.flaws()) == []


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (429, Outcome.REFUSED_429),
        (503, Outcome.REFUSED_503),
        (504, Outcome.EXPIRED_504),
        (500, Outcome.ERROR_STATUS),
        (400, Outcome.ERROR_STATUS),
        (529, Outcome.ERROR_STATUS),
    ],
)
async def test_an_error_status(server: StandIn, status: int, outcome: Outcome) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=status, text="no\nway")

    server.answer = refuse
    exchange = await send(server)
    assert (exchange.outcome, exchange.status, exchange.error) == (outcome, status, "no way")


async def test_a_key_that_is_no_header_is_a_connection_error(server: StandIn) -> None:
    exchange = Exchange(0, Arrival(0.0, 3, 2))
    async with Client(Settings(server.url, api_key="two\nlines"), time.monotonic) as client:
        await client.send(exchange, client.body([1, 2, 3], 2))
    assert exchange.outcome is Outcome.CONNECTION_ERROR
    assert exchange.error.startswith("ValueError: ")


@pytest.mark.parametrize(
    ("parts", "outcome"),
    [
        ([token(), token("length"), usage(3, 2)], Outcome.TRUNCATED),  # no [DONE]
        ([token()], Outcome.TRUNCATED),
        ([], Outcome.TRUNCATED),
        ([DONE], Outcome.TRUNCATED),  # no token
        ([token(), token("abort"), usage(3, 2), DONE], Outcome.TRUNCATED),
        ([token(), b"data: <html>\n\n"], Outcome.TRUNCATED),
        ([token(), event(error={"message": "m", "code": 500}), DONE], Outcome.ERROR_STATUS),
        ([token(), event(error={"message": "m", "code": 504}), DONE], Outcome.EXPIRED_504),
        ([token(), event(error={"message": None, "code": "x"})], Outcome.ERROR_STATUS),
    ],
)
async def test_a_stream_that_is_not_whole(
    server: StandIn, parts: list[bytes], outcome: Outcome
) -> None:
    server.answer = lambda request: stream(request, *parts)
    assert (await send(server)).outcome is outcome


async def test_a_connection_that_is_cut_in_the_stream(server: StandIn) -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        response = await stream(request, token())
        assert request.transport is not None
        request.transport.abort()
        return response

    server.answer = cut
    assert (await send(server)).outcome is Outcome.TRUNCATED


async def test_a_connection_that_is_cut_before_the_answer(server: StandIn) -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    server.answer = cut
    assert (await send(server)).outcome is Outcome.CONNECTION_ERROR


async def test_no_answer_in_time(server: StandIn) -> None:
    async def wait(request: web.Request) -> web.StreamResponse:
        response = await stream(request, token())
        await asyncio.Event().wait()
        return response

    server.answer = wait
    assert (await send(server, timeout_seconds=0.2)).outcome is Outcome.TIMEOUT


async def test_a_cancelled_request(server: StandIn) -> None:
    arrived = asyncio.Event()

    async def wait(_: web.Request) -> web.StreamResponse:
        arrived.set()
        await asyncio.Event().wait()
        raise AssertionError

    server.answer = wait
    exchange = Exchange(0, Arrival(0.0, 3, 2))
    async with Client(Settings(server.url), time.monotonic) as client:
        task = asyncio.create_task(client.send(exchange, client.body([1], 1)))
        await arrived.wait()
        task.cancel()
        await task
    assert exchange.outcome is Outcome.CANCELLED
    assert exchange.ended is not None


async def test_hundreds_of_requests_wait_for_no_connection(server: StandIn) -> None:
    together = asyncio.Barrier(300)

    async def wait_for_all(request: web.Request) -> web.StreamResponse:
        await together.wait()
        return await stream(request, *events(1, 1))

    server.answer = wait_for_all
    exchanges = [Exchange(k, Arrival(0.0, 1, 1)) for k in range(300)]
    async with Client(Settings(server.url), time.monotonic) as client:
        body = client.body([1], 1)
        await asyncio.gather(*(client.send(exchange, body) for exchange in exchanges))
    assert {exchange.outcome for exchange in exchanges} == {Outcome.OK}


async def test_what_a_completion_asks_for(server: StandIn) -> None:
    await send(server, priority=-5, deadline_ms=700, api_key="k")
    body, headers = server.requests[0]
    assert body == {
        "model": "stand-in",
        "prompt": [1, 2, 3],
        "max_tokens": 2,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert headers["X-Vllm-Priority"] == "-5"
    assert headers["x-shoal-deadline-ms"] == "700"
    assert headers["Authorization"] == "Bearer k"


async def test_without_extensions_only_openais_own_is_sent(server: StandIn) -> None:
    await send(server, priority=-5, extensions=False)
    body, headers = server.requests[0]
    assert "ignore_eos" not in body
    assert "X-Vllm-Priority" not in headers


async def test_a_chat(server: StandIn) -> None:
    server.answer = lambda request: stream(request, *events(3, 2))
    exchange = await send(server, endpoint=Endpoint.CHAT)
    body, _ = server.requests[0]
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert body["max_completion_tokens"] == 2
    assert exchange.outcome is Outcome.OK


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_the_base_url_may_have_its_version(server: StandIn, suffix: str) -> None:
    async with Client(Settings(server.url + suffix), time.monotonic) as client:
        assert await client.find_model() == "stand-in"
        assert await client.find_model("mine") == client.model == "mine"


async def test_a_server_that_cannot_be_used_is_one_line(server: StandIn) -> None:
    async def nothing(_: web.Request) -> web.Response:
        return web.json_response({"data": []})

    async def page(_: web.Request) -> web.Response:
        return web.Response(text="<html>")

    for url, answer, message in (
        ("http://127.0.0.1:1", nothing, "cannot reach http://127.0.0.1:1/v1/models"),
        (server.url, nothing, "names no model"),
        (server.url, page, "not JSON"),
        (server.url + "/x", page, "answered 404"),
    ):
        server.routes["/v1/models"] = answer
        async with Client(Settings(url), time.monotonic) as client:
            with pytest.raises(ClientError, match=message) as caught:
                await client.find_model()
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("parts", "flaws"),
    [
        (events(3, 2), []),
        ([token(), token("stop"), usage(3, 2), DONE], []),
        ([token("length"), usage(3, 2), DONE], []),  # two tokens in one chunk
        (events(4, 2), [Flaw.PROMPT_LENGTH]),
        ([token("stop"), usage(3, 1), DONE], [Flaw.ENDED_EARLY]),
        ([token("length"), usage(3, 1), DONE], [Flaw.MISCOUNTED]),
        ([token(), token(), token(), token("stop"), usage(3, 2), DONE], [Flaw.MISCOUNTED]),
        ([token(), token("length"), DONE], [Flaw.NO_USAGE]),
    ],
)
async def test_token_counts_are_checked_against_the_stream(
    server: StandIn, parts: list[bytes], flaws: list[Flaw]
) -> None:
    server.answer = lambda request: stream(request, *parts)
    exchange = await send(server)
    assert exchange.outcome is Outcome.OK
    assert list(exchange.flaws()) == flaws
