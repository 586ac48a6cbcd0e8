"""A request's JSON body, decoded once: by the middleware that checks it, for the route as well.

A prompt of token ids makes a body of hundreds of kilobytes, and FastAPI would decode it with
Python's ``json`` a second time. The route and the request here are FastAPI's own way to change how
a body is read ("Custom Request and APIRoute class").
"""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

DECODED_BODY = "shoal.body"
"""Key of an ASGI scope: what a body that was checked says, a JSON object."""


class DecodedRequest(Request):
    """A request whose body may be decoded already."""

    async def json(self) -> Any:
        """Return what the body says."""
        decoded = self.scope.get(DECODED_BODY)
        return await super().json() if decoded is None else decoded


class DecodedBodyRoute(APIRoute):
    """A route that takes the body as it was decoded before."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, which asks the request for its JSON."""
        handle = super().get_route_handler()

        async def handle_decoded(request: Request) -> Response:
            return await handle(DecodedRequest(request.scope, request.receive))

        return handle_decoded


class DecodedBodyRouter(APIRouter):
    """Makes ``DecodedBodyRoute`` of all routes, those of routers that it includes too."""

    def add_api_route(self, *args: Any, **options: Any) -> None:
        """See ``APIRouter.add_api_route``."""
        options["route_class_override"] = DecodedBodyRoute
        super().add_api_route(*args, **options)
