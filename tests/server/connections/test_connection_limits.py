"""Slow, dead and too many clients of a real HTTP server, by a clock that the test holds."""

import asyncio
import selectors
import socket
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import pytest
import uvicorn

from shoal.runtime.clock import ManualClock
from shoal.server.connections import accepting
from shoal.server.connections.accepting import Tally
from shoal.server.connections.connection_limits import (
    BODY_BYTES_PER_SECOND,
    UNSENT_BYTES,
    ConnectionLimits,
    Connections,
    Cutoff,
    check_connection_options,
    prepare_listener,
)
from shoal.server.connections.http_server import DrainingServer
from shoal.server.errors import UserError

SECONDS = 30.0
LIMITS = ConnectionLimits(connections=2, client_seconds=SECONDS)
CHUNK = b"x" * (64 << 10)
GET = b"GET /small HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /small HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


class Site:
    """A server with an application that the test steers.

    ``/small`` reads the body and answers; ``/held`` answers when the test lets it; ``/endless``
    sends until its client is gone; ``/long`` answers with so much that a client has to read, and
    ``/growing`` begins with that, and sends more as the test lets it.
    """

    def __init__(self) -> None:
        self.clock = ManualClock(100.0)
        self.cutoffs: list[Cutoff] = []
        self.connections = Connections(LIMITS, self.cutoffs.append, self.clock)
        self.started = asyncio.Event()
        """A request has reached the application."""
        self.let_go = asyncio.Event()
        self.more = asyncio.Semaphore(0)
        self.gone = asyncio.Event()
        """The client of a response in progress has gone."""
        self.draining = asyncio.Event()
        self.server: DrainingServer
        self.port = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        while message.get("more_body"):
            self.started.set()
            message = await receive()
        self.started.set()
        if message["type"] == "http.disconnect":
            self.gone.set()
            return
        if scope["path"] == "/endless":
            await self._send_for_ever(receive, send)
            return
        if scope["path"] == "/held":
            await self.let_go.wait()
        if scope["path"] in ("/long", "/growing"):
            grows = scope["path"] == "/growing"
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": CHUNK, "more_body": grows})
            while grows:
                await self.more.acquire()
                await send({"type": "http.response.body", "body": b"more", "more_body": True})
            return
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})

    async def _send_for_ever(self, receive: Any, send: Any) -> None:
        async def pour() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
                await asyncio.sleep(0)  # sending does not wait where there is room, or nobody

        pouring = asyncio.create_task(pour())
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.gone.set()
        finally:
            pouring.cancel()

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.connections.end_overdue()


@asynccontextmanager
async def served(**more: Any) -> AsyncIterator[Site]:
    site = Site()
    listener = socket.create_server(("127.0.0.1", 0))
    prepare_listener(listener, SECONDS)
    site.port = listener.getsockname()[1]
    config = uvicorn.Config(
        site,
        http=site.connections.protocol,  # type: ignore[arg-type]
        lifespan="off",
        log_config=None,
        timeout_keep_alive=3600,
        timeout_graceful_shutdown=1,
    )
    listening = asyncio.Event()
    site.server = DrainingServer(
        config,
        site.connections,
        listening.set,
        site.draining.set,
        **{"request_seconds": 60, **more},
    )
    task = asyncio.create_task(site.server.serve(sockets=[listener]))
    await listening.wait()
    try:
        yield site
    finally:
        site.let_go.set()
        site.server.handle_exit(15, None)
        site.server.handle_exit(15, None)
        await task


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with served() as site:
        yield site


Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def client(site: Site, data: bytes = b"") -> AsyncIterator[Client]:
    before = set(site.connections._open)
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    while site.connections._open <= before:
        await asyncio.sleep(0)
    writer.write(data)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def arrives(site: Site, happens: Callable[[], bool]) -> None:
    """Let the event loop run until what was sent has arrived, which the time limit bounds."""
    while not happens():
        await asyncio.sleep(0)


def received(site: Site) -> int:
    return sum(connection._received for connection in site.connections._open)


async def status(reader: asyncio.StreamReader) -> int:
    head = await reader.readuntil(b"\r\n\r\n")
    return int(head.split(b" ")[1])


# --- requests that come slowly ---


async def test_a_head_that_does_not_end_is_a_408(site: Site) -> None:
    async with client(site, b"GET /small HTTP/1.1\r\nX: 1") as (reader, writer):
        await arrives(site, lambda: received(site) > 0)
        site.pass_time(SECONDS - 1)
        writer.write(b"1")  # a byte now and then does not help
        await arrives(site, lambda: received(site) > len(b"GET /small HTTP/1.1\r\nX: 1"))
        assert site.cutoffs == []
        site.pass_time(1.1)
        assert await status(reader) == 408
        assert b'"code": 408' in await reader.read()
    assert site.cutoffs == [Cutoff.SLOW_REQUEST]


async def test_a_client_that_says_nothing_is_closed_without_a_word(site: Site) -> None:
    async with client(site) as (reader, _):
        site.pass_time(SECONDS)
        assert await reader.read() == b""
    assert site.cutoffs == [Cutoff.SLOW_REQUEST]


async def test_empty_lines_between_requests_keep_nothing_open(site: Site) -> None:
    async with client(site, GET) as (reader, writer):
        assert await status(reader) == 200
        assert await reader.readexactly(2) == b"ok"
        writer.write(b"\r\n")
        await arrives(site, lambda: received(site) == 2)
        site.pass_time(SECONDS + 0.1)
        await reader.read()
    assert site.cutoffs == [Cutoff.SLOW_REQUEST]


async def test_a_body_may_take_longer_the_more_there_is_of_it(site: Site) -> None:
    bytes_sent = 4 * BODY_BYTES_PER_SECOND
    async with client(site, POST % (1 << 20) + b"x" * bytes_sent) as (reader, _):
        await arrives(site, lambda: received(site) > bytes_sent)
        site.pass_time(SECONDS + 3.9)
        assert site.cutoffs == []
        site.pass_time(1.0)
        assert await status(reader) == 408
        await site.gone.wait()
    assert site.cutoffs == [Cutoff.SLOW_REQUEST]


async def test_a_request_that_is_whole_is_not_slow_however_long_its_answer_takes(
    site: Site,
) -> None:
    async with client(site, GET.replace(b"small", b"held") + b"\r\n") as (reader, _):
        await site.started.wait()
        site.pass_time(1000.0)
        site.pass_time(1000.0)
        site.let_go.set()
        assert await status(reader) == 200
    assert site.cutoffs == []


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_noticed(site: Site) -> None:
    async with client(site, POST % 1000 + b"x"):
        await site.started.wait()
    await site.gone.wait()
    assert site.cutoffs == []


# --- responses that are not read ---


async def test_a_client_that_takes_nothing_is_cut_off(site: Site) -> None:
    async with client(site, GET.replace(b"small", b"endless")):
        (connection,) = site.connections._open
        await arrives(site, lambda: connection.flow.write_paused)
        while not site.gone.is_set():  # buffers along the way may take some more
            site.pass_time(SECONDS / 2)
            await asyncio.sleep(0)
    assert site.cutoffs == [Cutoff.SLOW_RESPONSE]
    assert len(site.connections) == 0


@contextmanager
def silent_client(site: Site, path: bytes) -> Iterator[socket.socket]:
    """A client that reads nothing, and whose kernel takes little for it."""
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.setblocking(False)
        silent.connect_ex(("127.0.0.1", site.port))
        with selectors.DefaultSelector() as connected:
            connected.register(silent, selectors.EVENT_WRITE)
            connected.select()
        silent.send(GET.replace(b"small", path))
        yield silent


@pytest.mark.parametrize("path", [b"long", b"growing"])
async def test_a_client_is_cut_off_that_takes_nothing_of_what_the_kernel_holds(
    site: Site, path: bytes
) -> None:
    """The server's process has sent it all; the response is over, or goes on with a little."""
    with silent_client(site, path):
        await site.started.wait()
        (connection,) = site.connections._open
        for _ in range(50):  # what its kernel took by then is known after a few
            site.more.release()
            site.pass_time(SECONDS / 2)
            await asyncio.sleep(0.01)
            if site.cutoffs:
                break
            assert not connection.flow.write_paused
        await arrives(site, lambda: len(site.connections) == 0)
    assert site.cutoffs == [Cutoff.SLOW_RESPONSE]


async def test_a_client_that_reads_slowly_is_not_cut_off(site: Site) -> None:
    async with client(site, GET.replace(b"small", b"endless")) as (reader, _):
        (connection,) = site.connections._open
        await arrives(site, lambda: connection.flow.write_paused)
        for _ in range(4):
            site.pass_time(SECONDS - 1)
            await reader.readexactly(1 << 20)
    assert site.cutoffs == []


# --- connections ---


async def test_the_last_connections_are_told_that_there_are_too_many(site: Site) -> None:
    async with client(site) as (first, ask), client(site), client(site, GET) as (surplus, _):
        assert await status(surplus) == 503
        assert b"connections" in await surplus.read()
        async with client(site, GET.replace(b"small", b"health")) as (probe, _):
            assert await status(probe) == 200
        ask.write(GET)  # those before it are served
        assert await status(first) == 200
    assert site.cutoffs == [Cutoff.TOO_MANY]


async def test_a_new_connection_takes_the_place_of_the_one_idle_for_longest(site: Site) -> None:
    async with client(site, GET) as (first, _), client(site, GET) as (second, ask):
        for reader in (first, second):
            assert await status(reader) == 200
            assert await reader.readexactly(2) == b"ok"
        async with client(site, GET) as (latest, _):
            assert await status(latest) == 200
        assert await first.read() == b""
        ask.write(GET)
        assert await status(second) == 200
    assert site.cutoffs == []


@pytest.mark.parametrize("others", [0, 1])
async def test_a_connection_ends_with_its_response_where_others_have_far_fewer_in_use(
    others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepting, "FAR", 0)
    tally = Tally(2)
    async with served(share=(tally, 0)) as site, client(site, GET) as (reader, _):
        assert await status(reader) == 200
        assert await reader.readexactly(2) == b"ok"
        await arrives(site, lambda: tally.counts()[0] == 0)  # an idle connection is in no use
        tally.note(1, others)
        async with client(site, GET) as (second, _):
            head = await second.readuntil(b"\r\n\r\n")
            assert (b"connection: close" in head.lower()) == (others == 0)


async def test_far_too_many_are_closed_as_they_come(site: Site) -> None:
    async with client(site), client(site), client(site), client(site):
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        await arrives(site, lambda: len(site.connections) == 4)
    assert site.cutoffs == [Cutoff.TOO_MANY]


def test_accepted_sockets_notice_that_their_peer_has_vanished() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        prepare_listener(listener, 30.0)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            tcp = socket.IPPROTO_TCP
            # Later than the server would, which counts them.
            assert accepted.getsockopt(tcp, socket.TCP_USER_TIMEOUT) > 30_000
            assert accepted.getsockopt(tcp, socket.TCP_KEEPIDLE) == 15
            assert accepted.getsockopt(tcp, socket.TCP_NOTSENT_LOWAT) == UNSENT_BYTES


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"max_connections": 0}, "--max-connections 0"),
        ({"client_timeout": 0.0}, "--client-timeout 0"),
        ({"client_timeout": float("inf")}, "--client-timeout inf"),
        ({"shutdown_timeout": -1}, "--shutdown-timeout -1"),
    ],
)
def test_options_that_cannot_be_are_refused(wrong: dict[str, Any], named: str) -> None:
    right = {"max_connections": 1, "client_timeout": 1.0, "shutdown_timeout": 0}
    check_connection_options(Namespace(**right))
    with pytest.raises(UserError, match=named):
        check_connection_options(Namespace(**{**right, **wrong}))


# --- draining ---


async def test_a_draining_server_answers_what_comes_and_says_that_connections_end(
    site: Site,
) -> None:
    held = GET.replace(b"small", b"held")
    async with client(site, held) as (running, _), client(site, GET) as (idle, again):
        await site.started.wait()
        assert await status(idle) == 200
        await idle.readexactly(2)
        site.server.handle_exit(15, None)
        assert site.draining.is_set()
        again.write(GET)  # on a connection that was kept alive
        head = await idle.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in head
        assert await idle.read() == b"ok"
        async with client(site, GET) as (fresh, _):
            assert b"connection: close" in await fresh.readuntil(b"\r\n\r\n")
        site.let_go.set()
        assert b"connection: close" in await running.readuntil(b"\r\n\r\n")


async def test_a_server_ends_when_its_requests_are_done_and_not_before() -> None:
    async with served() as site, client(site, GET.replace(b"small", b"held")) as (reader, _):
        await site.started.wait()
        ending = asyncio.create_task(site.server.shutdown())
        await asyncio.wait({ending}, timeout=0.2)
        assert not ending.done()
        site.let_go.set()
        assert await status(reader) == 200
        await ending


async def test_a_request_that_is_not_over_in_time_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.server.connections.http_server.LAST_SECONDS", 0.0)
    held = GET.replace(b"small", b"held")
    async with served(request_seconds=0.0) as site, client(site, held) as (reader, _):
        await site.started.wait()
        await site.server.shutdown()
        assert await reader.read(12) in (b"", b"HTTP/1.1 500")
