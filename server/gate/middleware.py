"""ASGI middleware that checks API keys, and reads what requests ask of the task pool."""

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.runtime.clock import Clock, monotonic
from shoal.runtime.protocol.wire import Terms
from shoal.server.errors import error_response, refusal_response
from shoal.server.gate.bodies import DECODED_BODY
from shoal.server.gate.bounds import DEFAULTS, Bounds
from shoal.server.gate.key_ring import KeyRing
from shoal.server.gate.keys import ApiKey
from shoal.server.gate.logprob_bounds import LogprobBudget
from shoal.server.gate.placement import Placements, route_path
from shoal.server.gate.pool_door import PoolDoor
from shoal.server.gate.priority_and_deadline import (
    PRIORITY_HEADER,
    Asked,
    BadTermsError,
    read_terms,
)
from shoal.server.gate.quotas import Caller, Quotas
from shoal.server.rejections import CountRejection, Rejection

CALLER = "shoal.caller"
"""Key of an ASGI scope, which no client can set: the ``Caller`` whose key a request came with."""
BATCH_OWNER = "shoal.batch_owner"
"""Key of an ASGI scope: the tenant for whose batch the batch worker sends the request. Only the
worker's own socket sets it (``worker_door.py``)."""


def key_of(scope: Scope) -> ApiKey | None:
    """Return the API key that a request came with; None: the node asks for none."""
    caller: Caller | None = scope.get(CALLER)
    return None if caller is None else caller.key


def tenant_of(scope: Scope) -> str:
    """Return the tenant whose API key a request came with; empty: the node asks for none."""
    key = key_of(scope)
    return "" if key is None else key.tenant


class ApiKeyMiddleware:
    """Requires an API key on every path except the open ones.

    A client sends its key as ``Authorization: Bearer KEY``, or without that header as ``X-Api-Key:
    KEY``, as Anthropic's clients do.

    vLLM's ``--api-key`` guards ``/v1`` and a few other prefixes; this guards all paths that are not
    listed as open, even paths that do not exist. As in vLLM, several keys may be valid, and
    ``OPTIONS`` (a browser's preflight) needs no key. POSTs count towards the limits of their key,
    except those of batches, which have limits of their own. A request whose key the admin port has
    already checked (``prompt_route.py``) needs no other.

    Args:
        app: the application behind this middleware.
        keys: the valid keys.
        quotas: how much the holders of the keys use.
        open_paths: paths that need no key.
        rejected: counts refused requests.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing,
        quotas: Quotas,
        open_paths: Collection[str],
        rejected: CountRejection,
    ) -> None:
        self._app = app
        self._rejected = rejected
        self._keys = keys
        self._quotas = quotas
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI event stream."""
        if scope["type"] == "lifespan" or CALLER in scope or self._is_open(scope):
            await self._app(scope, receive, send)
            return
        owner = scope.get(BATCH_OWNER)
        if owner is not None:
            key = self._keys.of_tenant(owner)
        else:
            key = self._key_of(Headers(scope=scope))
        if key is not None:
            caller = self._quotas.caller(key)
            await self._serve({**scope, CALLER: caller}, receive, send, caller)
            return
        self._rejected(Rejection.UNAUTHORIZED)
        response = error_response(
            401,
            "a valid API key is needed: send the header 'Authorization: Bearer KEY' or 'X-Api-Key'",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await response(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, caller: Caller) -> None:
        if scope["method"] != "POST" or BATCH_OWNER in scope:
            await self._app(scope, receive, send)
            return
        over = caller.quota.over(caller.key)
        if over is not None:
            self._rejected(Rejection.CALLER_LIMIT)
            response = refusal_response(429, over.message, over.retry_after)
            await response(scope, receive, send)
            return
        with caller.quota.running():
            await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        preflight = scope["type"] == "http" and scope["method"] == "OPTIONS"
        return preflight or route_path(scope) in self._open_paths

    def _key_of(self, headers: Headers) -> ApiKey | None:
        authorization = headers.get("authorization")
        if authorization is None:
            offered = headers.get("x-api-key")
            return None if offered is None else self._keys.find(offered)
        scheme, _, offered = authorization.partition(" ")
        return self._keys.find(offered) if scheme.lower() == "bearer" else None


class TermsMiddleware:
    """Reads what a request to a generating route asks of the task pool, and refuses wrong values.

    vLLM ignores a priority header that is not an integer, and accepts any integer; here a wrong one
    is refused. vLLM is given the effective priority in the header, which overrides the body's (see
    ``GenerateBaseServing._get_priority``), and in the body, because a batch only uses the body's.
    This middleware runs inside ``PlacementMiddleware``, whose placement it fills in, and inside
    ``BodyMiddleware``, which has decoded the body.

    Args:
        app: the application behind this middleware.
        placements: the HTTP requests in progress.
        door: says whether the task pool takes requests.
        clock: monotonic seconds, the same as the controller's.
        bounds: the upper bounds.
        share_prefix_cache: whether callers may find each other's prefixes in the cache.
    """

    def __init__(
        self,
        app: ASGIApp,
        placements: Placements,
        door: PoolDoor,
        clock: Clock = monotonic,
        *,
        bounds: Bounds = DEFAULTS,
        share_prefix_cache: bool = False,
    ) -> None:
        self._app = app
        self._placements = placements
        self._door = door
        self._clock = clock
        self._bounds = bounds
        self._share_prefix_cache = share_prefix_cache

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI event stream."""
        placement = self._placements.current
        if placement is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        arrival = self._clock()
        caller: Caller | None = scope.get(CALLER)
        key = None if caller is None else caller.key
        fields = scope.get(DECODED_BODY) or {}
        try:
            asked = read_terms(Headers(scope=scope), fields, key)
        except BadTermsError as error:
            await error_response(400, str(error))(scope, receive, send)
            return
        placement.priority = asked.priority
        placement.in_background = asked.in_background
        counted = None if BATCH_OWNER in scope else key
        placement.terms = _terms(asked, counted, arrival, placement.number)
        placement.logprobs = LogprobBudget(fields, self._bounds)
        if caller is not None:
            placement.holder = caller.key.tenant
            if counted is not None:
                placement.spend_tokens = caller.spend_tokens
            placement.tenant = None if self._share_prefix_cache else caller.key.tenant
        refusal = await self._door.refusal(placement.terms.caller, asked.priority)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        fields["priority"] = asked.priority
        headers = _headers_with_priority(scope, asked.priority)
        await self._app({**scope, "headers": headers}, receive, send)


def _terms(asked: Asked, key: ApiKey | None, arrival: float, number: int) -> Terms:
    seconds = asked.deadline_seconds
    return Terms(
        deadline=None if seconds is None else arrival + seconds,
        caller=None if key is None else key.name,
        max_waiting=None if key is None else key.max_waiting,
        max_held_bytes=None if key is None else key.max_held_bytes,
        family=number if asked.several else None,
        begun=asked.in_background,
    )


def _headers_with_priority(scope: Scope, priority: int) -> list[tuple[bytes, bytes]]:
    name = PRIORITY_HEADER.encode()
    kept = [(key, value) for key, value in scope["headers"] if key != name]
    return [*kept, (name, b"%d" % priority)]
