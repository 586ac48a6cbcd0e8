"""A request's JSON body, decoded once: by the middleware that checks it, for the route as well.

A prompt of token ids makes a body of hundreds of kilobytes, and FastAPI would decode it with
Python's ``json`` a second time. The route and the request here are FastAPI's own way to change how
a body is read ("Custom Request and APIRoute class"). The route also sends what
``logprob_answers.py`` makes of large answers.
"""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from shoal.server.gate.logprob_answers import ANSWER, large_response

DECODED_BODY = "shoal.body"
"""Key of an ASGI scope: what a body that was checked says, a JSON object."""


class DecodedRequest(Request):
    """A request whose body may be decoded already."""

    async def json(self) -> Any:
        """Return what the body says."""
        decoded = self.scope.get(DECODED_BODY)
        return await super().json() if decoded is None else decoded


class DecodedBodyRoute(APIRoute):
    """A route that takes the body as it was decoded before, and sends large answers in pieces."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, which asks the request for its JSON."""
        handle = super().get_route_handler()

        async def handle_decoded(request: Request) -> Response:
            response = await handle(DecodedRequest(request.scope, request.receive))
            pieces = request.scope.pop(ANSWER, None)
            return response if pieces is None else large_response(response, pieces)

        return handle_decoded


class DecodedBodyRouter(APIRouter):
    """Makes ``DecodedBodyRoute`` of all routes, those of routers that it includes too."""

    def add_api_route(self, *args: Any, **options: Any) -> None:
        """See ``APIRouter.add_api_route``."""
        options["route_class_override"] = DecodedBodyRoute
        super().add_api_route(*args, **options)
