"""Where a request ran: from the controller's notes to the headers of the HTTP response.

One HTTP request may become several engine requests (``n``, lists of prompts). The middleware opens
a ``Placement`` for each HTTP request; the front end's engine client, called in the same context,
adds the ids of the engine requests; the controller's ``Placed`` notes add the units.
"""

import asyncio
from collections.abc import Collection
from contextvars import ContextVar

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from policies.partition import Group
from runtime.messages import Placed

UNIT_HEADER = "x-shoal-unit"
LAYOUT_HEADER = "x-shoal-layout"

NOTE_TIMEOUT_SECONDS = 1.0
"""How long a response with output waits for the note of its dispatch. The note is sent before the
request reaches its engine, so only a stalled controller can make it later than the output."""


class Placement:
    """Where the engine requests of one HTTP request run."""

    def __init__(self) -> None:
        self.request_ids: set[str] = set()
        self._units: list[tuple[Group, str]] = []
        self._known = asyncio.Event()

    def add(self, unit: Group, layout: str) -> None:
        """Note that an engine request was handed to ``unit``, which runs in ``layout``."""
        if (unit, layout) not in self._units:
            self._units.append((unit, layout))
        self._known.set()

    async def wait(self, timeout: float) -> None:
        """Return when a unit is known, no engine request is awaited, or ``timeout`` seconds on."""
        if not self.request_ids or self._known.is_set():
            return
        try:
            await asyncio.wait_for(self._known.wait(), timeout)
        except TimeoutError:
            return

    @property
    def headers(self) -> dict[str, str]:
        """The response headers: distinct units in order of dispatch, and their layouts."""
        if not self._units:
            return {}
        units = (",".join(map(str, unit)) for unit, _ in self._units)
        layouts = (layout for _, layout in self._units)
        return {UNIT_HEADER: ";".join(units), LAYOUT_HEADER: ";".join(layouts)}


class Placements:
    """The placements of the HTTP requests in progress, by engine request."""

    def __init__(self) -> None:
        self._current: ContextVar[Placement | None] = ContextVar("placement", default=None)
        self._by_request: dict[str, Placement] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def open(self) -> Placement:
        """Start the placement of the HTTP request that the current context serves."""
        placement = Placement()
        self._current.set(placement)
        return placement

    def close(self, placement: Placement) -> None:
        """Forget a placement: its response has ended."""
        for request_id in placement.request_ids:
            self._by_request.pop(request_id, None)

    def expect(self, request_id: str) -> None:
        """Count an engine request towards the HTTP request of the current context, if any."""
        placement = self._current.get()
        if placement is not None:
            placement.request_ids.add(request_id)
            self._by_request[request_id] = placement

    def placed(self, note: Placed) -> None:
        """Take a note of the controller; one for a request that has ended is ignored."""
        placement = self._by_request.get(note.request_id)
        if placement is not None:
            placement.add(note.unit, note.layout)


class PlacementMiddleware:
    """Adds ``x-shoal-unit`` and ``x-shoal-layout`` to the responses of generating routes.

    A response's head leaves together with its first body bytes: a stream's head would otherwise be
    sent before its request has even reached the task pool.
    """

    def __init__(self, app: ASGIApp, placements: Placements, paths: Collection[str]) -> None:
        self._app = app
        self._placements = placements
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI event stream."""
        if scope["type"] != "http" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        placement = self._placements.open()
        try:
            await self._app(scope, receive, _HeldHead(send, placement))
        finally:
            self._placements.close(placement)


class _HeldHead:
    """An ASGI ``send`` that keeps the response's head until its first body message."""

    def __init__(self, send: Send, placement: Placement) -> None:
        self._send = send
        self._placement = placement
        self._head: Message | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            return
        if self._head is not None:
            head, self._head = self._head, None
            await self._placement.wait(NOTE_TIMEOUT_SECONDS)
            MutableHeaders(raw=head["headers"]).update(self._placement.headers)
            await self._send(head)
        await self._send(message)
