"""``/invocations``: the one route by which a host of containers such as SageMaker asks for answers.

vLLM tries every kind of request on the body in turn (``vllm.entrypoints.serve.sagemaker``). Here
the field decides that each kind must have, so that an error says what is wrong with it.
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
"""Where such a host asks whether the server is alive."""

_PATHS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}
"""The routes that a request may become, by the field that makes it one; the first that it has."""

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def invocations_router(routes: Iterable[BaseRoute]) -> APIRouter:
    """Return the router of ``/invocations``; it is empty if it has no route to lead to.

    Args:
        routes: those of the application.
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
