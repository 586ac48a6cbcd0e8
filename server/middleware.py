"""ASGI middleware of the front end: who may call, and what they ask of the task pool."""

from collections.abc import Collection, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.clock import Clock, monotonic
from runtime.wire import Terms
from server.errors import error_response
from server.keys import ApiKey, KeyRing
from server.placement import CountRejection, Placements, Rejection
from server.pool_door import PoolDoor
from server.terms import PRIORITY_HEADER, Asked, BadTermsError, read_terms

_KEY = "shoal.api_key"
"""Where an ASGI scope holds the ``ApiKey`` that the request came with."""


class ApiKeyMiddleware:
    """Asks for ``Authorization: Bearer KEY`` on every path but the open ones.

    Unlike vLLM's ``--api-key``, which guards ``/v1`` and a few other prefixes, this guards all that
    is not listed, the metrics and the admin routes included. As with vLLM, several keys may be
    valid, and ``OPTIONS`` (a browser's preflight) is let through.

    Args:
        app: the application behind this middleware.
        keys: the valid keys.
        open_paths: paths that need no key.
        rejected: counts refused requests.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[ApiKey],
        open_paths: Collection[str],
        rejected: CountRejection,
    ) -> None:
        self._app = app
        self._rejected = rejected
        self._keys = KeyRing(keys)
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI event stream."""
        if scope["type"] == "lifespan" or self._is_open(scope):
            await self._app(scope, receive, send)
            return
        key = self._key_of(Headers(scope=scope))
        if key is not None:
            await self._app({**scope, _KEY: key}, receive, send)
            return
        self._rejected(Rejection.UNAUTHORIZED)
        response = error_response(
            401,
            "a valid API key is needed: send the header 'Authorization: Bearer KEY'",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await response(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        preflight = scope["type"] == "http" and scope["method"] == "OPTIONS"
        return preflight or scope["path"] in self._open_paths

    def _key_of(self, headers: Headers) -> ApiKey | None:
        scheme, _, offered = headers.get("authorization", "").partition(" ")
        return self._keys.find(offered) if scheme.lower() == "bearer" else None


class TermsMiddleware:
    """Reads what a request to a generating route asks of the task pool, and refuses what is wrong.

    vLLM ignores a priority header that is no integer, and takes any that is. Here a wrong one is
    refused, and the effective priority goes to vLLM in the header, which overrides the body's (see
    ``GenerateBaseServing._get_priority``). Runs inside ``PlacementMiddleware``, which it tells.

    Args:
        app: the application behind this middleware.
        placements: the HTTP requests in progress.
        door: says whether the task pool takes requests.
        clock: monotonic seconds, the same as the controller's.
    """

    def __init__(
        self, app: ASGIApp, placements: Placements, door: PoolDoor, clock: Clock = monotonic
    ) -> None:
        self._app = app
        self._placements = placements
        self._door = door
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI event stream."""
        placement = self._placements.current
        if placement is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        arrival = self._clock()
        body, receive = await _read_body(receive)
        key: ApiKey | None = scope.get(_KEY)
        try:
            asked = read_terms(Headers(scope=scope), body, key)
        except BadTermsError as error:
            await error_response(400, str(error))(scope, receive, send)
            return
        placement.priority = asked.priority
        placement.in_background = asked.in_background
        placement.terms = _terms(asked, key, arrival)
        refusal = await self._door.refusal(placement.terms.caller)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        headers = _headers_with_priority(scope, asked.priority)
        await self._app({**scope, "headers": headers}, receive, send)


def _terms(asked: Asked, key: ApiKey | None, arrival: float) -> Terms:
    seconds = asked.deadline_seconds
    return Terms(
        deadline=None if seconds is None else arrival + seconds,
        caller=None if key is None else key.name,
        max_waiting=None if key is None else key.max_waiting,
    )


def _headers_with_priority(scope: Scope, priority: int) -> list[tuple[bytes, bytes]]:
    name = PRIORITY_HEADER.encode()
    kept = [(key, value) for key, value in scope["headers"] if key != name]
    return [*kept, (name, b"%d" % priority)]


async def _read_body(receive: Receive) -> tuple[bytes, Receive]:
    """Return a request's body, and a ``receive`` that tells it again."""
    messages = [await receive()]
    while messages[-1].get("more_body", False):
        messages.append(await receive())
    told = iter(messages)

    async def receive_again() -> Message:
        for message in told:
            return message
        return await receive()

    return b"".join(message.get("body", b"") for message in messages), receive_again
