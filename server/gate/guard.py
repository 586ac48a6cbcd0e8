"""ASGI middleware that refuses requests that are too large before anything works on them."""

from collections.abc import Callable, Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.server.errors import error_response
from shoal.server.gate.bodies import DECODED_BODY
from shoal.server.gate.bounds import Bounds, BoundsError
from shoal.server.gate.placement import route_path
from shoal.server.rejections import CountRejection, Rejection

Check = Callable[[bytes], dict[str, Any] | None]
"""Checks a body."""


class TooLargeError(ValueError):
    """A body is larger than it may be."""


class HeadMiddleware:
    """Refuses a request whose URL is too long, or whose headers are too many or too large.

    The server has already read them by then; ``http_protocol.py`` bounds how much it reads.

    Args:
        app: the application behind this middleware.
        bounds: the upper bounds.
        rejected: counts refused requests.
    """

    def __init__(self, app: ASGIApp, bounds: Bounds, rejected: CountRejection) -> None:
        self._app = app
        self._bounds = bounds
        self._rejected = rejected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI event stream."""
        response = self._refusal(scope) if scope["type"] == "http" else None
        if response is not None:
            self._rejected(Rejection.INVALID)
        await (response or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        bounds = self._bounds
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > bounds.url_bytes:
            return error_response(414, f"the URL is longer than {bounds.url_bytes} bytes")
        headers = scope["headers"]
        if len(headers) > bounds.headers:
            return error_response(431, f"more than {bounds.headers} headers")
        if sum(len(name) + len(value) for name, value in headers) > bounds.header_bytes:
            return error_response(431, f"the headers are larger than {bounds.header_bytes} bytes")
        return None


class NoBrowserMiddleware:
    """Refuses requests from web pages: only a browser adds an ``Origin`` header.

    Args:
        app: the application behind this middleware.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI event stream."""
        if scope["type"] == "http" and "origin" in Headers(scope=scope):
            await error_response(403, "this API is not for browsers")(scope, receive, send)
            return
        await self._app(scope, receive, send)


class BodyMiddleware:
    """Reads the body of every POST, up to a limit, and checks it.

    Args:
        app: the application behind this middleware.
        limit: the most bytes of a body.
        check: raises ``BoundsError`` for a body that is refused, and returns the decoded body, or
            None if it did not decode it. An empty body is left to its route.
        checks: the checks of paths that need another one, by path.
    """

    def __init__(
        self, app: ASGIApp, limit: int, check: Check, checks: Mapping[str, Check] | None = None
    ) -> None:
        self._app = app
        self._limit = limit
        self._check = check
        self._checks = checks or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI event stream."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            body, receive = await read_body(receive, self._limit)
            check = self._checks.get(route_path(scope), self._check)
            decoded = check(body) if body else None
        except TooLargeError as error:
            await error_response(413, str(error), {"Connection": "close"})(scope, receive, send)
        except BoundsError as error:
            await error_response(400, str(error), param=error.param)(scope, receive, send)
        else:
            await self._app({**scope, DECODED_BODY: decoded}, receive, send)


async def read_body(receive: Receive, limit: int) -> tuple[bytes, Receive]:
    """Return a request's body, and a ``receive`` that delivers it again.

    Raises:
        TooLargeError: the body has more than ``limit`` bytes; reading stopped there.
        BoundsError: the client had gone, or counted as gone, before the body was complete.
    """
    messages = [await receive()]
    size = len(messages[-1].get("body", b""))
    while messages[-1].get("more_body", False) and size <= limit:
        messages.append(await receive())
        size += len(messages[-1].get("body", b""))
    if messages[-1]["type"] == "http.disconnect":
        raise BoundsError(None, "the body is not whole")
    if size > limit:
        raise TooLargeError(f"the body is larger than {limit} bytes")
    told = iter(messages)

    async def receive_again() -> Message:
        for message in told:
            return message
        return await receive()

    return b"".join(message.get("body", b"") for message in messages), receive_again
