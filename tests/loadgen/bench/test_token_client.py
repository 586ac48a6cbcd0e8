"""The benchmarks' client says in one line what a server did not do."""

import socket

import pytest
from aiohttp import web

from shoal.loadgen.bench.token_client import Client, RequestFailedError
from tests.loadgen.stand_in import stand_in


async def test_a_server_that_is_gone_is_a_failed_request() -> None:
    with socket.socket() as gone:  # its port is nobody else's meanwhile, and does not listen
        gone.bind(("127.0.0.1", 0))
        await check_gone(f"http://127.0.0.1:{gone.getsockname()[1]}")


async def check_gone(url: str) -> None:
    async with Client(url, "model") as client:
        assert not await client.is_up("/ready")
        with pytest.raises(
            RequestFailedError, match="no whole answer of /admin/layout: Connection ref"
        ):
            await client.call("GET", "/admin/layout")
        with pytest.raises(
            RequestFailedError, match="no whole answer of /metrics: Connection refused"
        ):
            await client.text("/metrics")
        with pytest.raises(
            RequestFailedError, match="no whole answer of /v1/completions: Connection"
        ):
            await client.generate([1, 2], 1)


async def test_an_answer_that_breaks_off_is_a_failed_request() -> None:
    async def break_off(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"usage": {"completion_tokens": 1}}\n\n')
        assert request.transport is not None
        request.transport.close()
        return response

    async with stand_in() as server, Client(server.url, "model") as client:
        server.answer = break_off
        with pytest.raises(RequestFailedError, match="no whole answer of /v1/completions: "):
            await client.generate([1, 2], 2, stream=True)
