"""uvicorn's HTTP/1.1 with bounds on what it keeps and reads of a request.

uvicorn's default parser has no limit of its own, and reports a header only once it is complete. If
a request is answered before all of its body is there, uvicorn would read the body to its end.
"""

import json
import logging
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shoal.server.connections.request_parser import RequestParser
from shoal.server.errors import error_body

# uvicorn warns of everything that is not HTTP: any client could fill the log. A filter stays, where
# uvicorn's configuration, which comes later, would change a level.
_log = logging.getLogger("uvicorn.error.clients")
_log.addFilter(lambda record: record.levelno >= logging.ERROR)

UNWANTED_BYTES = 64 << 10
"""A body that may be larger is not read to its end once its request is answered."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Ends a connection whose request has too many bytes outside its body.

    The limit is ``h11_max_incomplete_event_size`` for the bytes of a request line with its headers,
    of trailers, or of what frames a chunk.

    A response that begins before the whole body of its request is there is the last of its
    connection, unless the body is small: nobody needs the rest of the body.
    """

    _pending = 0
    """Bytes received since the last piece of a request that the application can see."""
    _in_body = False
    """Whether the latest request's head is complete, and its body is not."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.logger = _log
        self.parser = RequestParser(self)  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Take what the client sent."""
        self._pending += len(data)
        super().data_received(data)
        limit = self.config.h11_max_incomplete_event_size
        if limit is not None and self._pending > limit and not self.transport.is_closing():
            self._refuse(431, f"the head of the request is larger than {limit} bytes")

    def on_headers_complete(self) -> None:
        """Start to work on a request."""
        self._pending = 0
        super().on_headers_complete()  # it raises if the URL is none
        self._in_body = True

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        async def answer(scope: Any, receive: Any, send: Any) -> None:
            async def send_last(message: Any) -> None:
                if cycle.more_body:
                    cycle.keep_alive = False
                await send(message)

            await app(scope, receive, send_last)

        super()._start_asgi_task(cycle, answer if _may_be_large(cycle.scope) else app)

    def on_body(self, body: bytes) -> None:
        """Take a piece of a request's body."""
        self._pending = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the reading of a request."""
        self._pending = 0
        self._in_body = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP."""
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        """Answer an invalid request, unless another response has to come first, and close.

        If the body of a request is wrong, the application is told that the client has gone.
        """
        cycle = self.cycle
        if self._in_body and not (cycle.response_started or self.pipeline):
            cycle.disconnected = True
            cycle.message_event.set()
        elif self._in_body or (bool(cycle) and not cycle.response_complete):
            self.transport.close()
            return
        self.answer_and_close(status, message)

    def answer_and_close(self, status: int, message: str) -> None:
        """Answer in place of the application, and close the connection."""
        body = json.dumps(error_body(status, message)).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def _may_be_large(scope: Any) -> bool:
    """Return whether the body of a request may be larger than ``UNWANTED_BYTES``."""
    lengths = [value for name, value in scope["headers"] if name == b"content-length"]
    if any(name == b"transfer-encoding" for name, _ in scope["headers"]):
        return True
    return any(int(length) > UNWANTED_BYTES for length in lengths)
