"""A server of which a test decides how it answers, and a clock of which it decides the time."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from shoal.loadgen.open_loop import TICK_SECONDS

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

DONE = b"data: [DONE]\n\n"


def event(**fields: Any) -> bytes:
    """Return an event of a stream."""
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(finish_reason: str | None = None) -> bytes:
    """Return a chunk with one token."""
    return event(choices=[{"index": 0, "text": "x", "finish_reason": finish_reason}])


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    """Return the chunk with the token counts."""
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return event(choices=[], usage=counts)


def events(prompt_tokens: int, output_tokens: int) -> list[bytes]:
    """Return the stream of a whole answer."""
    tokens = [token() for _ in range(output_tokens - 1)] + [token("length")]
    return [*tokens, usage(prompt_tokens, output_tokens), DONE]


async def stream(request: web.Request, *parts: bytes) -> web.StreamResponse:
    """Send these parts of a stream, and end the response."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for part in parts:
        await response.write(part)
    return response


async def complete(request: web.Request) -> web.StreamResponse:
    """Answer as a server that does what it is asked for."""
    body = await request.json()
    return await stream(request, *events(len(body["prompt"]), body["max_tokens"]))


class StandIn:
    """A running server. ``requests`` are the bodies and headers of the completions asked for."""

    def __init__(self) -> None:
        self.answer: Handler = complete
        self.routes: dict[str, Handler] = {}
        self.requests: list[tuple[Any, dict[str, str]]] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a request to any route."""
        if request.path in self.routes:
            return await self.routes[request.path](request)
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "stand-in"}]})
        if not request.path.endswith("/completions"):
            return web.Response(status=404)
        self.requests.append((await request.json(), dict(request.headers)))
        return await self.answer(request)


@asynccontextmanager
async def stand_in() -> AsyncIterator[StandIn]:
    """Run a server on a free port."""
    server = StandIn()
    app = web.Application(client_max_size=2**24)
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}"
    try:
        yield server
    finally:
        await runner.cleanup()


class Clock:
    """Time stands still but when someone sleeps, and then goes on by as much, and ``late`` more.

    Args:
        late: how much longer a sleep takes than it should.
        sends: those who wait longer than for a tick wake up so many times; None: always.
        tick_lags: how late the replay's ticks are, from ``tick`` on; no more ticks than these.
    """

    def __init__(
        self, late: float = 0.0, *, sends: int | None = None, tick_lags: Sequence[float] = ()
    ) -> None:
        self.time = 100.0
        self.ticked = asyncio.Event()
        """All ticks are over."""
        self._ticking = asyncio.Event()
        self._late = late
        self._sends = sends
        self._tick_lags = list(tick_lags)

    def now(self) -> float:
        """Return the time."""
        return self.time

    def tick(self) -> None:
        """Let the ticks begin."""
        self._ticking.set()

    async def sleep(self, seconds: float) -> None:
        """Let time go on, once everybody has done what was to be done before."""
        await asyncio.sleep(0)
        if seconds == TICK_SECONDS:
            await self._sleep_for_a_tick()
            return
        if self._sends is not None:
            if self._sends == 0:
                await asyncio.Event().wait()
            self._sends -= 1
        self.time += seconds + self._late

    async def _sleep_for_a_tick(self) -> None:
        await self._ticking.wait()
        if not self._tick_lags:
            self.ticked.set()
            await asyncio.Event().wait()
        self.time += TICK_SECONDS + self._tick_lags.pop(0)
