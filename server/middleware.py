"""ASGI middleware of the front end: who may call, and with which priority."""

import hashlib
import re
import secrets
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import error_response

PRIORITY_HEADER = "x-vllm-priority"
PRIORITY_LIMIT = 2**31
"""Priorities are signed 32-bit integers; lower is earlier."""

_INTEGER = re.compile(r"[+-]?[0-9]{1,10}")


class ApiKeyMiddleware:
    """Asks for ``Authorization: Bearer KEY`` on every path but the open ones.

    Unlike vLLM's ``--api-key``, which guards ``/v1`` and a few other prefixes, this guards all that
    is not listed, the metrics and the admin routes included. As with vLLM, several keys may be
    valid, and ``OPTIONS`` (a browser's preflight) is let through.

    Args:
        app: the application behind this middleware.
        keys: the valid keys.
        open_paths: paths that need no key.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Collection[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI event stream."""
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self._app(scope, receive, send)
            return
        response = error_response(
            401,
            "a valid API key is needed: send the header 'Authorization: Bearer KEY'",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await response(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope["method"] == "OPTIONS":
            return True
        return scope["path"] in self._open_paths or self._has_key(Headers(scope=scope))

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        # Digests have one length, and every key is compared: the time tells nothing about a key.
        offered = _digest(key)
        matches = [secrets.compare_digest(offered, digest) for digest in self._digests]
        return any(matches)


class PriorityMiddleware:
    """Refuses an ``X-Vllm-Priority`` that is no integer in range; vLLM would ignore it.

    A valid one is left to vLLM (``GenerateBaseServing._get_priority``), where it overrides the
    body's ``priority``.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI event stream."""
        values = Headers(scope=scope).getlist(PRIORITY_HEADER) if scope["type"] == "http" else []
        if not values or (len(values) == 1 and is_priority(values[0])):
            await self._app(scope, receive, send)
            return
        response = error_response(
            400,
            f"X-Vllm-Priority is {', '.join(values)!r}: it must be one integer from "
            f"{-PRIORITY_LIMIT} to {PRIORITY_LIMIT - 1}",
        )
        await response(scope, receive, send)


def is_priority(text: str) -> bool:
    """Return whether ``text`` is an integer that a priority may be."""
    return bool(_INTEGER.fullmatch(text)) and -PRIORITY_LIMIT <= int(text) < PRIORITY_LIMIT


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
