"""A request's JSON body is decoded once: the middleware that checks it passes it to the route.

A prompt of token ids makes a body of hundreds of kilobytes, and FastAPI would decode it a second
time, with Python's ``json``. The route and the request here are FastAPI's own way to change how a
body is read ("Custom Request and APIRoute class"). The route also sends large answers in the pieces
that ``logprob_answers.py`` makes.
"""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from shoal.server.gate.logprob_answers import ANSWER, large_response

DECODED_BODY = "shoal.body"
"""Key of an ASGI scope: the JSON object in a body that was checked."""


class DecodedRequest(Request):
    """A request whose body may already be decoded."""

    async def json(self) -> Any:
        """Return the decoded body."""
        decoded = self.scope.get(DECODED_BODY)
        return await super().json() if decoded is None else decoded


class DecodedBodyRoute(APIRoute):
    """A route that takes a body that is already decoded, and sends large answers in pieces."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, which asks the request for its JSON."""
        handle = super().get_route_handler()

        async def handle_decoded(request: Request) -> Response:
            response = await handle(DecodedRequest(request.scope, request.receive))
            pieces = request.scope.pop(ANSWER, None)
            return response if pieces is None else large_response(response, pieces)

        return handle_decoded


class DecodedBodyRouter(APIRouter):
    """Makes every route a ``DecodedBodyRoute``, also those of routers that it includes."""

    def add_api_route(self, *args: Any, **options: Any) -> None:
        """See ``APIRouter.add_api_route``."""
        options["route_class_override"] = DecodedBodyRoute
        super().add_api_route(*args, **options)
