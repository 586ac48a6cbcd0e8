"""Streams that have nothing to send say so: a comment, which clients skip, keeps them alive.

A stream pauses when its engine has died and when its engines are regrouped. Proxies cut connections
on which nothing comes for a minute or less, and nobody can tell a pause from a server that is gone.
A line of an event stream that begins with a colon is a comment (HTML Standard, 9.2.6).
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.runtime.clock import Clock, monotonic
from shoal.server.gate.placement import route_path

QUIET_SECONDS = 15.0
"""A stream that has sent nothing for so long sends a comment."""
COMMENT = b": the stream goes on\n\n"
LOOK_SECONDS = 1.0
"""How often streams are to be looked at."""

_EVENT_STREAM = "text/event-stream"


@dataclass(eq=False)
class _Stream:
    """A response that is an event stream, and in progress."""

    send: Send
    sent_at: float
    is_sending: bool = False
    """Whether something is on its way to the connection, which may not take it now."""


class Streams:
    """The event streams in progress of one front end.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Clock = monotonic) -> None:
        self.clock = clock
        self.open: set[_Stream] = set()
        self._comments: set[asyncio.Future[None]] = set()
        """On their way; asyncio keeps no reference."""

    def keep_alive(self) -> None:
        """Have the quiet ones send a comment; to be called every ``LOOK_SECONDS``."""
        now = self.clock()
        for stream in self.open:
            if now - stream.sent_at >= QUIET_SECONDS and not stream.is_sending:
                stream.is_sending, stream.sent_at = True, now
                # Not awaited here: a client that takes nothing must not hold up the others.
                self._comments.add(comment := asyncio.ensure_future(_comment(stream)))
                comment.add_done_callback(self._comments.discard)


async def _comment(stream: _Stream) -> None:
    await stream.send({"type": "http.response.body", "body": COMMENT, "more_body": True})
    stream.is_sending = False


class KeepAliveMiddleware:
    """Knows which responses are streams, and when they have last sent something.

    Every message of a stream has to be whole events, as those of vLLM's are.

    Args:
        app: the application behind this middleware.
        streams: those in progress.
        paths: the routes whose responses may be streams.
    """

    def __init__(self, app: ASGIApp, streams: Streams, paths: Collection[str]) -> None:
        self._app = app
        self._streams = streams
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI event stream."""
        if scope["type"] != "http" or route_path(scope) not in self._paths:
            await self._app(scope, receive, send)
            return
        streams, clock = self._streams, self._streams.clock
        stream = _Stream(send, clock())

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                if (
                    Headers(raw=message["headers"])
                    .get("content-type", "")
                    .startswith(_EVENT_STREAM)
                ):
                    streams.open.add(stream)
            elif not message.get("more_body", False):
                streams.open.discard(stream)
            stream.is_sending = True
            await send(message)
            stream.is_sending, stream.sent_at = False, clock()

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            streams.open.discard(stream)
