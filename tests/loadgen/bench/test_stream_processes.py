"""Streams that other processes read, from a server that this process is."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from shoal.loadgen.bench import stream_processes
from shoal.loadgen.bench.stream_processes import MOST_STREAMS, Running, followed
from shoal.loadgen.bench.token_client import Client, RequestFailedError

PROMPTS = [[number, 7] for number in range(MOST_STREAMS + 1)]
"""More than one process reads, if there are cores for it."""


class Server:
    """Streams the sum of the prompt as every token, and waits for ever before token ``pause``."""

    def __init__(self, *, pause: int | None = None, fails: bool = False) -> None:
        self._pause, self._fails = pause, fails
        self.running = 0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self._fails and body["prompt"] == PROMPTS[3]:
            raise web.HTTPServiceUnavailable(text="no engine")
        response = web.StreamResponse(headers={"x-shoal-unit": "0,1"})
        await response.prepare(request)
        self.running += 1
        try:
            for number in range(body["max_tokens"]):
                if number == self._pause:
                    await asyncio.Event().wait()
                token = sum(body["prompt"])
                await response.write(b'data: {"choices":[{"token_ids":[%d]}]}\n\n' % token)
        finally:
            self.running -= 1
        return response


@asynccontextmanager
async def client_of(server: Server) -> AsyncIterator[Client]:
    app = web.Application()
    app.router.add_post("/v1/completions", server.complete)
    # A handler ends when its client has gone.
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield Client(f"http://127.0.0.1:{runner.addresses[0][1]}", "model")
    finally:
        await runner.cleanup()


async def until(wanted: object, found: Running) -> None:
    while [stream.count for stream in found.streams] != wanted:
        assert not found.one_has_ended()
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("cores", [1, 64])
async def test_streams_are_seen_while_they_run(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_processes, "usable_cores", lambda: cores)
    server = Server(pause=5)
    async with client_of(server) as client, followed(client, PROMPTS, 9) as running:
        await until([5] * len(PROMPTS), running)
        assert [list(one.tokens) for one in running.streams] == [[sum(p)] * 5 for p in PROMPTS]
        assert all(sorted(one.times) == list(one.times) for one in running.streams)
        assert {one.unit for one in running.streams} == {"0,1"}
        assert server.running == len(PROMPTS)
    assert len(running.streams[0].tokens) == 5, "what came is kept"


async def test_streams_end_when_their_context_does() -> None:
    server = Server(pause=1)
    async with client_of(server) as client:
        async with followed(client, PROMPTS, 9) as running:
            await until([1] * len(PROMPTS), running)
        while server.running:
            await asyncio.sleep(0.001)


async def test_an_answer_with_all_of_its_tokens_has_ended() -> None:
    async with client_of(Server()) as client, followed(client, PROMPTS[:1], 3) as running:
        while not running.one_has_ended():
            await asyncio.sleep(0.001)
        assert running.streams[0].count == 3


async def test_what_the_server_says_of_a_failed_stream_is_told() -> None:
    server = Server(pause=1, fails=True)
    async with client_of(server) as client, followed(client, PROMPTS, 9) as running:
        with pytest.raises(RequestFailedError, match="answered 503: no engine"):
            await until([1] * len(PROMPTS), running)
