"""httptools' parser of requests, but one that never leaves HTTP/1.1.

A server may ignore a client's wish to go on in another protocol (RFC 9110, 7.8), such as Java's
``HttpClient`` has with its first request. httptools takes all that follows the head of such a
request for the other protocol: the request would lose its body, and a body that comes later would
count as the next request.
"""

from types import SimpleNamespace
from typing import Any

import httptools

_OF_A_HEAD = ("on_message_begin", "on_url", "on_header", "on_headers_complete")
_FRAMING = (b"connection", b"content-length", b"transfer-encoding")


class RequestParser:
    """Stands in for the ``httptools.HttpRequestParser`` of uvicorn's protocol.

    Args:
        protocol: uvicorn's ``HttpToolsProtocol``, which is told what was found.
    """

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._reads_head_again = False
        heads = {name: getattr(protocol, name) for name in _OF_A_HEAD}
        self._parser = self._made(heads)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def feed_data(self, data: bytes) -> None:
        """Parse what the client sent.

        Raises:
            httptools.HttpParserError: it is not HTTP.
        """
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                (head_bytes,) = upgrade.args
                self._read_head_again()
                data = data[head_bytes:]
            else:
                return

    def _made(self, heads: dict[str, Any]) -> Any:
        parser = httptools.HttpRequestParser(
            SimpleNamespace(
                **heads, on_body=self._protocol.on_body, on_message_complete=self._complete
            )
        )
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        return parser

    def _complete(self) -> None:
        if not self._parser.should_upgrade():
            self._protocol.on_message_complete()

    def _read_head_again(self) -> None:
        """Go on behind the head that was read last as if it had not asked for another protocol."""
        framing = [field for field in self._protocol.headers if field[0] in _FRAMING]
        version = self._parser.get_http_version().encode()
        lines = [b"POST / HTTP/" + version, *(b": ".join(field) for field in framing)]
        self._parser = self._made({name: self._unless_again(name) for name in _OF_A_HEAD})
        self._reads_head_again = True
        try:
            self._parser.feed_data(b"\r\n".join(lines) + b"\r\n\r\n")
        finally:
            self._reads_head_again = False

    def _unless_again(self, name: str) -> Any:
        callback = getattr(self._protocol, name)

        def call(*found: bytes) -> None:
            if not self._reads_head_again:
                callback(*found)

        return call
