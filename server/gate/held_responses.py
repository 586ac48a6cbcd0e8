"""Holds each response back until its request has left the task pool, and tells what became of it.

``placement.py`` has what is known of the engine requests of an HTTP request.
"""

from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.runtime.protocol.messages import Outcome
from shoal.server.errors import ERROR_EVENTS, error_body, refusal_response, retold_event
from shoal.server.gate.placement import Placement, Placements, route_path
from shoal.server.rejections import CountRejection, Refused, Rejection

_STREAM = "text/event-stream"
_AT_ANY_TIME = (Outcome.HANDED_BACK, Outcome.UNAVAILABLE)
"""Outcomes that a request can have both before and after a unit has had it."""
_TOO_MANY = 429
"""Status with which ``PoolDoor`` refuses a caller that is at its limit; it counts that itself."""


_REJECTIONS = {
    outcome: Rejection(outcome.value)
    for outcome in (
        *(Outcome.TOO_LONG, Outcome.EXPIRED, Outcome.POOL_FULL, Outcome.CALLER_FULL),
        *(Outcome.HANDED_BACK, Outcome.UNAVAILABLE),
    )
}


class PlacementMiddleware:
    """Tells the callers of generating routes what became of their requests in the task pool.

    A response's head is held back until its request has left the pool. Then the head says with
    which priority and where the request runs, or the whole response is replaced by the error with
    which the controller ended the request. So even a stream that never began has the right status.

    Args:
        app: the application behind this middleware.
        placements: the HTTP requests in progress.
        paths: the generating routes.
        rejected: counts refused requests, except those that ``PoolDoor`` refuses.
    """

    def __init__(
        self,
        app: ASGIApp,
        placements: Placements,
        paths: Collection[str],
        rejected: CountRejection,
    ) -> None:
        self._app = app
        self._rejected = rejected
        self._placements = placements
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI event stream."""
        if scope["type"] != "http" or route_path(scope) not in self._paths:
            await self._app(scope, receive, send)
            return
        placement = self._placements.open()
        held = _HeldHead(scope, receive, send, placement)
        try:
            await self._app(scope, receive, held)
        except Exception:
            if not await held.end_with_reason():
                raise
        finally:
            self._placements.close(placement)
        reason = _rejection(held.status, placement)
        if reason is not None:
            self._rejected(reason)


def _rejection(status: int, placement: Placement) -> Rejection | None:
    """Return why a request was refused, from the controller's note or its response's status."""
    ended = placement.ended
    if ended is not None:
        ran = ended.outcome in _AT_ANY_TIME and placement.is_placed
        return None if ran else _REJECTIONS.get(ended.outcome)
    if placement.refused is not None and placement.refused.status == _TOO_MANY:
        return Rejection.CALLER_LIMIT
    invalid = 400 <= status < 500 and status != _TOO_MANY
    return Rejection.INVALID if invalid else None


class _HeldHead:
    """An ASGI ``send`` that holds back the beginning of a response until its status is certain."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, placement: Placement) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._placement = placement
        self._held: list[Message] = []
        self._replaced = False
        self.status = 0
        """Status of the response that was sent; 0 while there is none."""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._held = [message]
        elif self._held:
            self._held.append(message)
            if not self._is_too_early(message):
                await self._release()
        elif not self._replaced:
            await self._send(await self._explained(message))

    @property
    def _streams(self) -> bool:
        content_type = Headers(raw=self._held[0]["headers"]).get("content-type", "")
        return content_type.startswith(_STREAM)

    def _is_too_early(self, message: Message) -> bool:
        """Return whether a stream sends before it has engine requests, as in the Responses API."""
        more = message.get("more_body", False)
        return more and self._streams and not self._placement.request_ids

    async def _explained(self, message: Message) -> Message:
        """Put the controller's reason into an error in the middle of a stream."""
        body = message.get("body", b"")
        if not body.startswith(ERROR_EVENTS):
            return message
        await self._placement.wait(for_all=True)
        ended = self._placement.ended
        if ended is None or ended.status is None:
            return message
        event, _, rest = body.partition(b"\n\n")
        error = error_body(ended.status, ended.message)
        return {**message, "body": retold_event(event, error) + rest}

    async def _release(self) -> None:
        """Once the notes have come, send the messages held back, or an error in their place."""
        placement = self._placement
        streams = self._streams
        if not placement.in_background:
            await placement.wait(for_all=not streams)
        reason, held, self._held = self._reason, self._held, []
        self.status = held[0]["status"]
        # vLLM's own answer to what the front end refused names the field, too.
        if reason is not None and (placement.ended is not None or reason.status != self.status):
            await self._replace(reason)
            return
        MutableHeaders(raw=held[0]["headers"]).update(placement.headers)
        for message in held:
            await self._send(message)

    async def end_with_reason(self) -> bool:
        """End a response that broke off before its head was sent; return False without a reason.

        vLLM's stream of the Responses API begins before its request is checked.
        """
        if not self._held:
            return False
        await self._placement.wait(for_all=False)
        if (reason := self._reason) is None:
            return False
        self._held = []
        await self._replace(reason)
        return True

    @property
    def _reason(self) -> Refused | None:
        """Why the controller, or else the front end, refused the request; None: neither did."""
        ended, refused = self._placement.ended, self._placement.refused
        if ended is not None and ended.status is not None:
            return Refused(ended.status, ended.message, ended.retry_after)
        return None if self._placement.request_ids else refused

    async def _replace(self, refused: Refused) -> None:
        """Send an error in place of the response."""
        self._replaced, self.status = True, refused.status
        response = refusal_response(refused.status, refused.message, refused.retry_after)
        response.headers.update(self._placement.headers)
        await response(self._scope, self._receive, self._send)
