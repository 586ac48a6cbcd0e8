"""A reverse proxy that tries a request again elsewhere, as those in front of replicas do."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

RETRIED = 503
_DROPPED = frozenset({"connection", "content-length", "transfer-encoding"})


class RetryingProxy:
    """Sends each request to the first of its upstreams that takes it.

    It is tried again, elsewhere, when there is no answer (no connection, or one that ends before
    the answer begins) or the answer is a 503. Once an answer has begun it is passed on as it comes.
    Connections to upstreams are kept alive and used again.

    Attributes:
        upstreams: base URLs; may be changed at any time.
        url: its own.
        retries: how often a request was tried again, by status; 0: there was no answer.
    """

    def __init__(self, upstreams: Sequence[str]) -> None:
        self.upstreams = list(upstreams)
        self.url = ""
        self.retries: list[int] = []
        self._session: aiohttp.ClientSession

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        while True:
            for upstream in list(self.upstreams):
                try:
                    answer = await self._session.request(
                        request.method,
                        upstream + request.path_qs,
                        data=body,
                        headers={"Content-Type": request.headers.get("Content-Type", "")},
                    )
                except aiohttp.ClientError:
                    self.retries.append(0)
                    continue
                async with answer:
                    if answer.status != RETRIED:
                        return await self._pass_on(request, answer)
                    self.retries.append(answer.status)
            await asyncio.sleep(0)

    async def _pass_on(
        self, request: web.Request, answer: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        kept = {k: v for k, v in answer.headers.items() if k.lower() not in _DROPPED}
        response = web.StreamResponse(status=answer.status, headers=kept)
        await response.prepare(request)
        async for data in answer.content.iter_any():
            await response.write(data)
        await response.write_eof()
        return response


@asynccontextmanager
async def retrying_proxy(*upstreams: str) -> AsyncIterator[RetryingProxy]:
    """Run a proxy on a free port."""
    proxy = RetryingProxy(upstreams)
    app = web.Application(client_max_size=2**24)
    app.router.add_route("*", "/{path:.*}", proxy._handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        proxy._session = session
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        proxy.url = f"http://{host}:{port}"
        try:
            yield proxy
        finally:
            await runner.cleanup()
