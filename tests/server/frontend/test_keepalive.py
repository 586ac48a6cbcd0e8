"""Streams that send nothing for a while send a comment; nothing else does."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from starlette.types import Message, Receive, Scope, Send

from shoal.loadgen.stream import EventStream
from shoal.runtime.clock import ManualClock
from shoal.server.frontend.keepalive import COMMENT, QUIET_SECONDS, KeepAliveMiddleware, Streams

PATH = "/v1/completions"
EVENT = b'data: {"choices": []}\n\n'


class Served:
    """One response, whose application does what the test wants between its messages."""

    def __init__(self, content_type: bytes = b"text/event-stream; charset=utf-8") -> None:
        self.clock = ManualClock(10.0)
        self.streams = Streams(self.clock)
        self.sent: list[bytes] = []
        self.taking = asyncio.Event()
        self.taking.set()
        self._type = content_type
        self.talk: Send

    async def send(self, message: Message) -> None:
        await self.taking.wait()
        if message["type"] == "http.response.body":
            self.sent.append(message["body"])

    async def run(self, between: Callable[[], Awaitable[None]], path: str = PATH) -> list[bytes]:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            self.talk = send
            headers = [(b"content-type", self._type)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": EVENT, "more_body": True})
            await between()
            await send({"type": "http.response.body", "body": EVENT, "more_body": False})

        async def never() -> Message:
            raise AssertionError("nothing is received")

        middleware = KeepAliveMiddleware(app, self.streams, [PATH])
        await middleware({"type": "http", "path": path}, never, self.send)
        await self.pass_time(10 * QUIET_SECONDS)
        return self.sent

    async def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.streams.keep_alive()
        for _ in range(3):
            await asyncio.sleep(0)


async def test_a_quiet_stream_sends_a_comment_each_time() -> None:
    served = Served()

    async def be_quiet() -> None:
        await served.pass_time(QUIET_SECONDS - 0.1)
        assert served.sent == [EVENT]
        await served.pass_time(0.1)
        assert served.sent == [EVENT, COMMENT]
        await served.pass_time(QUIET_SECONDS - 0.1)
        assert served.sent == [EVENT, COMMENT]
        await served.pass_time(0.1)

    assert await served.run(be_quiet) == [EVENT, COMMENT, COMMENT, EVENT]


async def test_clients_skip_it() -> None:
    stream = EventStream()
    assert len(list(stream.feed(EVENT + COMMENT + EVENT))) == 2


async def test_what_a_stream_has_sent_counts() -> None:
    served = Served()

    async def talk() -> None:
        for _ in range(20):
            await served.pass_time(QUIET_SECONDS - 0.1)
            await served.talk({"type": "http.response.body", "body": EVENT, "more_body": True})

    assert await served.run(talk) == [EVENT] * 22


@pytest.mark.parametrize(
    ("content_type", "path"), [(b"application/json", PATH), (b"text/event-stream", "/v1/models")]
)
async def test_other_responses_send_none(content_type: bytes, path: str) -> None:
    served = Served(content_type)

    async def be_quiet() -> None:
        await served.pass_time(10 * QUIET_SECONDS)

    assert await served.run(be_quiet, path) == [EVENT, EVENT]


async def test_a_client_that_takes_nothing_has_one_comment_on_its_way_and_holds_nobody_up() -> None:
    served = Served()

    async def be_quiet() -> None:
        served.taking.clear()
        for _ in range(5):
            await served.pass_time(QUIET_SECONDS)
        assert served.sent == [EVENT]
        served.taking.set()
        await served.pass_time(1.0)

    assert await served.run(be_quiet) == [EVENT, COMMENT, EVENT]


async def test_a_stream_that_ends_just_then_sends_none_after_its_end() -> None:
    served = Served()

    async def be_quiet() -> None:
        served.clock.advance(QUIET_SECONDS)
        served.streams.keep_alive()

    assert await served.run(be_quiet) == [EVENT, EVENT]


async def test_a_stream_that_is_cut_is_forgotten() -> None:
    served = Served()

    async def be_cut() -> None:
        raise OSError

    with pytest.raises(OSError):  # noqa: PT011 - it has no message
        await served.run(be_cut)
    assert not served.streams.open
