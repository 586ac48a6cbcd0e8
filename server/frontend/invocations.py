"""``/invocations``: the only route that hosts of containers such as SageMaker use for requests.

vLLM tries to read the body as each kind of request in turn (``vllm.entrypoints.serve.sagemaker``).
Here the field that a kind of request must have decides, so that errors are about that kind.
"""

from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.routing import BaseRoute

from shoal.server.errors import error_response
from shoal.server.gate.bodies import DECODED_BODY, DecodedBodyRouter

INVOCATIONS_PATH = "/invocations"
PING_PATH = "/ping"
"""The route by which such a host asks whether the server is alive."""

_PATHS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}
"""The route that serves a request, by a field of its body: the first that the body has decides."""

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def invocations_router(routes: Iterable[BaseRoute]) -> APIRouter:
    """Return the router of ``/invocations``, which is empty if no route is there to serve it.

    Args:
        routes: the application's routes.
    """
    found = {route.path: route for route in routes if isinstance(route, APIRoute)}
    router = DecodedBodyRouter()
    if found.keys() >= set(_PATHS.values()):
        handlers = {field: found[path].get_route_handler() for field, path in _PATHS.items()}
        router.add_api_route(INVOCATIONS_PATH, _dispatch(handlers), methods=["POST"])
    return router


def _dispatch(handlers: Mapping[str, Handler]) -> Handler:
    async def invocations(request: Request) -> Response:
        fields = request.scope.get(DECODED_BODY) or {}
        for field, handle in handlers.items():
            if field in fields:
                return await handle(request)
        return error_response(400, f"the body has none of the fields {', '.join(handlers)}")

    return invocations
