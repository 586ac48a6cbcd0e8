"""The live page's way to the model: a prompt goes through the public port's application.

So it passes all that guards a client's request, and nothing else knows it from one.
"""

from collections.abc import MutableMapping
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.policies.values.layouts import Unit
from shoal.server.gate.middleware import CALLER
from shoal.server.gate.placement import Placements
from shoal.server.gate.quotas import Caller
from shoal.server.operator.page.page_events import event, key_of

CHAT_PATH = "/v1/chat/completions"

_KEPT = (
    *("type", "asgi", "http_version", "server", "client", "scheme", "method", "headers", "state"),
    "extensions",
)
_NOT_KEPT = frozenset({b"authorization", b"x-api-key", b"origin", b"referer"})
"""Headers for the admin port alone."""


class PromptResponse(Response):
    """What the public application answers to the request as a chat completion.

    A stream has an event ``unit`` before the first output that comes from another unit.

    Args:
        public: the application of the public port.
        placements: the HTTP requests in progress.
    """

    def __init__(self, public: ASGIApp, placements: Placements) -> None:
        super().__init__()
        self._public = public
        self._placements = placements

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI event stream."""
        await self._public(_public_scope(scope), receive, _Annotated(send, self._placements))


def _public_scope(scope: Scope) -> MutableMapping[str, Any]:
    """Return the scope of the same request to the public port.

    Its caller is the holder of the admin key, under a name of the admin port's own: the holder of
    an API key of the same name shares neither limits nor cached prefixes with it.
    """
    inner = {key: scope[key] for key in _KEPT if key in scope}
    inner["headers"] = [(name, value) for name, value in scope["headers"] if name not in _NOT_KEPT]
    inner |= {"path": CHAT_PATH, "raw_path": CHAT_PATH.encode(), "query_string": b""}
    caller: Caller | None = scope.get(CALLER)
    if caller is not None:
        name = f"admin port: {caller.key.name}"
        inner[CALLER] = Caller(msgspec.structs.replace(caller.key, name=name), caller.quota)
    return inner


class _Annotated:
    """An ASGI ``send`` that says in a stream which unit computes the request now."""

    def __init__(self, send: Send, placements: Placements) -> None:
        self._send = send
        self._placements = placements
        self._streams = False
        self._told: Unit | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = Headers(raw=message["headers"]).get("content-type", "")
            self._streams = kind.startswith("text/event-stream")
        elif self._streams and message.get("body"):
            # Each message of such a stream has whole events (``KeepAliveMiddleware``).
            message = {**message, "body": self._news() + message["body"]}
        await self._send(message)

    def _news(self) -> bytes:
        placement = self._placements.current
        if placement is None or placement.unit is None or placement.unit == self._told:
            return b""
        self._told = unit = placement.unit
        return event(
            "unit",
            {
                "unit": ",".join(map(str, unit.engines)),
                "layout": unit.name,
                "requests": [key_of(request_id) for request_id in sorted(placement.request_ids)],
            },
        )
