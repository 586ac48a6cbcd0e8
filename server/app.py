"""Shoal's FastAPI application: vLLM's routes that Shoal offers, and its own.

This module imports no vLLM: ``frontend.py`` hands in vLLM's routers. The routes are a list of what
is offered, so that a new vLLM adds none by itself.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import Metric
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from runtime.client import CallError, ControlClient
from server.admin import admin_router
from server.errors import error_response
from server.keys import ApiKey
from server.metrics import page
from server.middleware import ApiKeyMiddleware, TermsMiddleware
from server.placement import CountRejection, PlacementMiddleware, Placements
from server.pool_door import PoolDoor
from server.tracing import Traces, TracingMiddleware

GENERATING_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Routes whose requests run on a unit."""

VLLM_PATHS = frozenset(
    {
        *GENERATING_PATHS,
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/cancel",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/version",
    }
)
"""Routes taken from vLLM's routers; each router's others are left out."""

OPEN_PATHS = ("/health", "/ready")
"""Routes that need no API key."""

READY_SECONDS = 2.0
"""How long ``/ready`` waits for the controller."""

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


@dataclass(frozen=True)
class AppOptions:
    """What the command line says about the application."""

    api_keys: Sequence[ApiKey] = ()
    root_path: str = ""
    allowed_origins: Sequence[str] = ()
    allowed_methods: Sequence[str] = ("*",)
    allowed_headers: Sequence[str] = ("*",)
    allow_credentials: bool = False


@dataclass(frozen=True)
class Backstage:
    """What the routes talk to."""

    control: ControlClient
    placements: Placements
    door: PoolDoor
    is_alive: Callable[[], bool]
    """Whether the front end's link to the engines works."""
    registered: Callable[[], Iterable[Metric]]
    """The metrics of vLLM and of the front ends."""
    rejected: CountRejection
    """Counts refused requests."""
    vllm_routers: Sequence[APIRouter] = field(default_factory=tuple)
    traces: Traces | None = None
    """None: requests are not traced."""


def build_app(
    backstage: Backstage, options: AppOptions, lifespan: Lifespan | None = None
) -> FastAPI:
    """Return the application, without vLLM's state and exception handlers."""
    app = FastAPI(
        title="Shoal",
        root_path=options.root_path,
        lifespan=lifespan,
        openapi_url=None,  # and with it no documentation pages: docs/api.md
    )
    for router in backstage.vllm_routers:
        app.include_router(_only(router, VLLM_PATHS))
    app.include_router(_node_router(backstage))
    app.include_router(admin_router(backstage.control))
    _add_middleware(app, backstage, options)
    return app


def _add_middleware(app: FastAPI, backstage: Backstage, options: AppOptions) -> None:
    # The last one added is the first to see a request.
    placements = backstage.placements
    app.add_middleware(TermsMiddleware, placements=placements, door=backstage.door)
    app.add_middleware(
        PlacementMiddleware,
        placements=placements,
        paths=GENERATING_PATHS,
        rejected=backstage.rejected,
    )
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_credentials=options.allow_credentials,
            allow_methods=options.allowed_methods,
            allow_headers=options.allowed_headers,
        )
    if options.api_keys:
        app.add_middleware(
            ApiKeyMiddleware,
            keys=options.api_keys,
            open_paths=OPEN_PATHS,
            rejected=backstage.rejected,
        )
    if backstage.traces is not None:
        app.add_middleware(TracingMiddleware, traces=backstage.traces, paths=GENERATING_PATHS)


def _only(router: APIRouter, paths: Iterable[str]) -> APIRouter:
    chosen = APIRouter()
    chosen.routes.extend(
        route for route in router.routes if isinstance(route, APIRoute) and route.path in paths
    )
    return chosen


def _node_router(backstage: Backstage) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        if not backstage.is_alive():
            return error_response(503, "the link to the engines is broken")
        return Response(status_code=200)

    @router.get("/ready")
    async def ready() -> Response:
        try:
            view = await backstage.control.get_layout(READY_SECONDS)
        except CallError as error:
            return error_response(503, str(error))
        if not view.ready:
            return error_response(503, view.reason or "the node is not ready")
        return JSONResponse({"ready": True})

    @router.get("/metrics")
    async def metrics() -> Response:
        try:
            node = await backstage.control.get_metrics()
        except CallError as error:
            return error_response(error.status, str(error))
        text = page(backstage.registered(), node)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    return router
