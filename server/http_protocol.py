"""uvicorn's HTTP/1.1, bounded: it keeps no more of a request's head than is allowed.

The parser that uvicorn takes by default has no limit of its own, and tells of a header only once it
is complete.
"""

import json
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.errors import error_body


class BoundedHttpProtocol(HttpToolsProtocol):
    """Ends a connection that sends more than ``h11_max_incomplete_event_size`` bytes for nothing.

    That is bytes that neither end a head nor are part of a body: request lines, headers, trailers,
    and what chunks have around their content.
    """

    _pending = 0
    """Bytes since the last piece of a request that the application can see."""

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
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a piece of a request's body."""
        self._pending = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the reading of a request."""
        self._pending = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP."""
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        """Answer, unless a response has begun, and close the connection."""
        responding = bool(self.cycle) and not self.cycle.response_complete
        if responding:
            self.transport.close()
        else:
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
