"""ASGI middleware that refuses requests that are too large before anything works on them."""

import sys
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.server.errors import error_response
from shoal.server.gate.access import is_loopback
from shoal.server.gate.bodies import DECODED_BODY
from shoal.server.gate.body_room import BodyRoom, NoBodyRoomError
from shoal.server.gate.bounds import Bounds, BoundsError
from shoal.server.gate.placement import route_path
from shoal.server.rejections import CountRejection, Rejection

Check = Callable[[bytes], dict[str, Any] | None]
"""Checks a body."""


Refuse = Callable[[str], Awaitable[ASGIApp]]
"""Returns the answer to a request for whose body there is no room, given why."""


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


PAGE_HEADER = "x-shoal-page"
"""Header that the live page sends. A browser lets no other site's page send it unasked."""


class SameOriginMiddleware:
    """Refuses what a page of another site has a browser send to the admin port.

    A browser names the site of a page in ``Origin`` and ``Sec-Fetch-Site``, and lets only pages of
    the same site set ``PAGE_HEADER``. A foreign name that was made to lead to this machine (DNS
    rebinding) stands in ``Host``. Other programs send none of the first three, and may do without.

    Args:
        app: the application behind this middleware.
        any_host: whether ``Host`` may be any name. That is safe where a key is needed: a page under
            a foreign name has none.
        page: the path to which a link on any site may lead.
    """

    def __init__(self, app: ASGIApp, *, any_host: bool, page: str = "/") -> None:
        self._app = app
        self._any_host = any_host
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI event stream."""
        refusal = self._refusal(scope, Headers(scope=scope)) if scope["type"] == "http" else None
        response = None if refusal is None else error_response(403, refusal)
        await (response or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers) -> str | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if host and not self._any_host and not is_loopback(_name_of(host)):
            return "without --admin-key-file, this port answers to names of its own machine only"
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return "this port does not answer pages of other sites"
        if origin is not None and PAGE_HEADER not in headers:
            return f"a page must send the header {PAGE_HEADER}"
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            follows_link = headers.get("sec-fetch-mode") == "navigate" and scope["method"] == "GET"
            if not follows_link or route_path(scope) != self._page:
                return "this port does not answer pages of other sites"
        return None


def _name_of(host: str) -> str:
    """Return the name or address in a ``Host`` header, without the port; empty if it is wrong."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


class BodyMiddleware:
    """Reads the body of every POST, up to a limit, and checks it.

    Args:
        app: the application behind this middleware.
        limit: the most bytes of a body.
        check: raises ``BoundsError`` for a body that is refused, and returns the decoded body, or
            None if it did not decode it. An empty body is left to its route.
        checks: the checks of paths that need another one, by path.
        streamed: paths whose routes read their bodies themselves, and limit them.
        room: of all bodies together; None: they are so small that they are not counted.
        refuse: refuses a request for whose body there is no room.
    """

    def __init__(
        self,
        app: ASGIApp,
        limit: int,
        check: Check,
        checks: Mapping[str, Check] | None = None,
        streamed: Collection[str] = (),
        room: BodyRoom | None = None,
        refuse: Refuse | None = None,
    ) -> None:
        self._app = app
        self._limit = limit
        self._check = check
        self._checks = checks or {}
        self._streamed = frozenset(streamed)
        self._room = room or BodyRoom(sys.maxsize)
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI event stream."""
        reads = scope["type"] == "http" and scope["method"] == "POST"
        if not reads or route_path(scope) in self._streamed:
            await self._app(scope, receive, send)
            return
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            taken += size
            self._room.take(size)

        try:
            await self._serve(scope, receive, send, take)
        finally:
            self._room.give_back(taken)

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, take: Callable[[int], None]
    ) -> None:
        try:
            body, receive = await read_body(receive, self._limit, take)
            check = self._checks.get(route_path(scope), self._check)
            decoded = check(body) if body else None
        except TooLargeError as error:
            await error_response(413, str(error), {"Connection": "close"})(scope, receive, send)
        except NoBodyRoomError as error:
            assert self._refuse is not None
            response = await self._refuse(str(error))
            await response(scope, receive, send)
        except BoundsError as error:
            await error_response(400, str(error), param=error.param)(scope, receive, send)
        else:
            await self._app({**scope, DECODED_BODY: decoded}, receive, send)


async def read_body(
    receive: Receive, limit: int, take: Callable[[int], None]
) -> tuple[bytes, Receive]:
    """Return a request's body, and a ``receive`` that delivers it again.

    Args:
        receive: delivers the body.
        limit: the most bytes.
        take: called for every piece, with its size; it may raise.

    Raises:
        TooLargeError: the body has more than ``limit`` bytes; reading stopped there.
        BoundsError: the client had gone, or counted as gone, before the body was complete.
    """
    messages: list[Message] = []
    size = 0
    while not messages or (messages[-1].get("more_body", False) and size <= limit):
        messages.append(await receive())
        piece = len(messages[-1].get("body", b""))
        size += piece
        if size <= limit:
            take(piece)
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
