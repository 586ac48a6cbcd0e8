"""Keeps quiet streams alive: a stream with nothing to send sends a comment, which clients skip.

A stream pauses when its engine has died or when its engines are regrouped. Proxies cut connections
that are quiet for a minute or less, and a client cannot tell a pause from a server that is gone. A
line of an event stream that begins with a colon is a comment (HTML Standard, 9.2.6).
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.runtime.clock import Clock, monotonic
from shoal.server.gate.placement import route_path

QUIET_SECONDS = 15.0
"""A stream sends a comment after it has sent nothing for so long."""
COMMENT = b": the stream goes on\n\n"
LOOK_SECONDS = 1.0
"""How often streams are checked."""

_EVENT_STREAM = "text/event-stream"


@dataclass(eq=False)
class _Stream:
    """An event stream in progress."""

    send: Send
    sent_at: float
    is_sending: bool = False
    """Whether a message is being sent, which takes long if the connection is blocked."""


class Streams:
    """The event streams in progress of one front end.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Clock = monotonic) -> None:
        self.clock = clock
        self.open: set[_Stream] = set()
        self._comments: set[asyncio.Future[None]] = set()
        """Comments being sent; asyncio keeps no reference to them."""

    def keep_alive(self) -> None:
        """Have quiet streams send a comment. Call it every ``LOOK_SECONDS``."""
        now = self.clock()
        for stream in self.open:
            if now - stream.sent_at >= QUIET_SECONDS and not stream.is_sending:
                stream.is_sending, stream.sent_at = True, now
                # Not awaited here: a client that reads nothing must not hold up the others.
                self._comments.add(comment := asyncio.ensure_future(self._comment(stream)))
                comment.add_done_callback(self._comments.discard)

    async def _comment(self, stream: _Stream) -> None:
        if stream in self.open:  # it may have ended before this task began
            await stream.send({"type": "http.response.body", "body": COMMENT, "more_body": True})
            stream.is_sending = False


class KeepAliveMiddleware:
    """Notes which responses are streams, and when each last sent something.

    Every message of a stream must consist of whole events, as in vLLM's streams.

    Args:
        app: the application behind this middleware.
        streams: the streams in progress.
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
