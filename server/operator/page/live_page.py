"""The routes of the live page: its three files, its events, and its way to the model."""

import asyncio
from collections.abc import Callable, Coroutine
from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.server.errors import error_response
from shoal.server.gate.placement import Placements
from shoal.server.operator.page.page_feed import Feed, Viewer
from shoal.server.operator.page.prompt_route import PromptResponse

_FILES = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
PAGE_PATHS = tuple(_FILES)
"""Paths of the files, which hold nothing of the node and need no key."""
EVENTS_PATH = "/admin/events"
PROMPT_PATH = "/admin/chat/completions"

_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_NEEDS_KEY = b'data-needs-key="false"'
"""What the page says of itself where no key is needed."""


def page_router(
    feed: Feed, public: ASGIApp | None, placements: Placements, *, needs_key: bool
) -> APIRouter:
    """Return the routes, none of which is in the OpenAPI document of the admin API.

    Args:
        feed: the events.
        public: the application of the public port, which answers prompts; None: there is none.
        placements: the HTTP requests in progress.
        needs_key: whether the page has to ask for a key.
    """
    router = APIRouter(include_in_schema=False)
    for path, (name, kind) in _FILES.items():
        text = files(__package__).joinpath(name).read_bytes()
        if needs_key:
            text = text.replace(_NEEDS_KEY, _NEEDS_KEY.replace(b"false", b"true"))
        router.add_api_route(path, _file(text, kind))

    @router.get(EVENTS_PATH)
    async def events() -> Response:
        return EventsResponse(feed)

    @router.post(PROMPT_PATH)
    async def prompt() -> Response:
        if public is None:
            return error_response(503, "this port serves no model")
        return PromptResponse(public, placements)

    return router


def _file(text: bytes, kind: str) -> Callable[[], Coroutine[Any, Any, Response]]:
    async def file() -> Response:
        return Response(text, media_type=kind, headers=_HEADERS)

    return file


class EventsResponse(Response):
    """The feed's events, until the viewer has gone or the feed is closed.

    A viewer that reads slowly blocks only its own response: the feed drops what it has missed.
    """

    media_type = "text/event-stream"

    def __init__(self, feed: Feed) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI event stream, or refuse it."""
        if self._feed.is_full:  # nothing else runs until this viewer counts
            refusal = error_response(503, "too many pages watch this node: close one")
            await refusal(scope, receive, send)
            return
        with self._feed.watched() as viewer:
            await self._serve(viewer, receive, send)

    async def _serve(self, viewer: Viewer, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(viewer, send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            sending.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _send_all(self, viewer: Viewer, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for told in self._feed.events(viewer):
            await send({"type": "http.response.body", "body": told, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
