"""Shoal's FastAPI application: vLLM's routes that Shoal offers, and its own.

This module does not import vLLM: ``vllm_app.py`` has vLLM's routers. The paths that Shoal offers
are listed here, so that a new version of vLLM adds none by itself.
"""

import asyncio
import errno
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from itertools import chain
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import Metric
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from shoal.runtime.protocol.controller_client import CallError, ControlClient
from shoal.runtime.protocol.messages import SHUTTING_DOWN, LayoutView
from shoal.server.batch.batch_metrics import batch_metrics
from shoal.server.batch.batch_routes import BATCHES_PATH, batches_router
from shoal.server.batch.file_routes import FILES_PATH, files_router
from shoal.server.batch.list_answers import Batches, RefusedError
from shoal.server.errors import error_response
from shoal.server.frontend.anthropic_messages import MessagesErrorMiddleware, check_messages
from shoal.server.frontend.invocations import INVOCATIONS_PATH, PING_PATH, invocations_router
from shoal.server.frontend.keepalive import KeepAliveMiddleware, Streams
from shoal.server.gate.access import Access, MetricsAccess
from shoal.server.gate.bodies import DecodedBodyRouter
from shoal.server.gate.body_checks import check_body
from shoal.server.gate.body_room import BodyRoom
from shoal.server.gate.bounds import DEFAULTS as BOUNDS
from shoal.server.gate.bounds import Bounds
from shoal.server.gate.guard import BodyMiddleware, HeadMiddleware, SameOriginMiddleware
from shoal.server.gate.held_responses import PlacementMiddleware
from shoal.server.gate.json_objects import decode_object
from shoal.server.gate.key_ring import KeyRing
from shoal.server.gate.logprob_bounds import check_logprobs
from shoal.server.gate.middleware import ApiKeyMiddleware, TermsMiddleware
from shoal.server.gate.placement import Placements, route_path
from shoal.server.gate.pool_door import PoolDoor
from shoal.server.gate.quotas import Quotas
from shoal.server.operator.admin import add_admin_api
from shoal.server.operator.admin_answers import ReadyAnswer
from shoal.server.operator.metrics_page import page
from shoal.server.operator.page.live_page import PAGE_PATHS, page_router
from shoal.server.operator.page.page_feed import Feed
from shoal.server.operator.tracing import Traces, TracingMiddleware
from shoal.server.rejections import CountRejection

MESSAGES_PATH = "/v1/messages"
COUNT_TOKENS_PATH = f"{MESSAGES_PATH}/count_tokens"
MESSAGES_PATHS = (MESSAGES_PATH, COUNT_TOKENS_PATH)
"""Routes of Anthropic's API."""

_VLLM_GENERATING_PATHS = (
    *("/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions"),
    *("/v1/responses", MESSAGES_PATH),
)
GENERATING_PATHS = (*_VLLM_GENERATING_PATHS, INVOCATIONS_PATH)
"""Routes whose requests run on a unit."""

TOKENIZER_INFO_PATH = "/tokenizer_info"

VLLM_PATHS = frozenset(
    {
        *_VLLM_GENERATING_PATHS,
        COUNT_TOKENS_PATH,
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/cancel",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/version",
        "/load",
    }
)
"""Routes taken from vLLM's routers, whose other routes are left out."""

OPEN_PATHS = ("/health", "/ready", PING_PATH)
"""Routes that need no API key."""

METRICS_PATH = "/metrics"

ADMIN_BODY_BYTES = 64 << 10

READY_SECONDS = 2.0
"""How long ``/ready`` waits for the controller."""

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


@dataclass(frozen=True)
class AppOptions:
    """What the command line says about the application."""

    access: Access = field(default_factory=Access)
    bounds: Bounds = BOUNDS
    tokenizer_info: bool = False
    """Whether to offer ``/tokenizer_info``."""
    front_ends: int = 1
    """How many of them share an API key's limits."""
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
    feed: Feed
    """The live page's events."""
    vllm_routers: Sequence[APIRouter] = field(default_factory=tuple)
    traces: Traces | None = None
    """None: requests are not traced."""
    streams: Streams = field(default_factory=Streams)
    """The event streams in progress."""
    batches: Batches | None = None
    """None: the node takes no batches."""


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
    paths = VLLM_PATHS | ({TOKENIZER_INFO_PATH} if options.tokenizer_info else set())
    for router in backstage.vllm_routers:
        app.include_router(_only(router, paths))
    app.include_router(invocations_router(app.routes))
    app.include_router(_health_router(backstage))
    if options.access.metrics is not MetricsAccess.OFF:
        app.include_router(_metrics_router(backstage))
    if backstage.batches is not None:
        app.include_router(files_router(backstage.batches))
        app.include_router(batches_router(backstage.batches))
        app.add_exception_handler(RefusedError, _refused)
        app.add_exception_handler(OSError, _not_written)
    _add_middleware(app, backstage, options)
    http_error = partial(_http_error, takes_batches=backstage.batches is not None)
    app.add_exception_handler(HTTPException, http_error)  # vLLM's handles a subclass of it
    return app


def build_admin_app(backstage: Backstage, access: Access, public: ASGIApp | None = None) -> FastAPI:
    """Return the application of the admin API and the live page, for a port of its own.

    A foreign web page in a browser on this machine must not be able to use it, so requests that a
    browser sends across origins are refused.

    Args:
        backstage: what the routes talk to.
        access: who may call.
        public: the application of the public port, which answers the live page's prompts.
    """
    needs_key = access.admin_key_file is not None
    app = FastAPI(title="Shoal admin", openapi_url=None)
    add_admin_api(app, backstage.control)
    app.include_router(
        page_router(backstage.feed, public, backstage.placements, needs_key=needs_key)
    )
    app.add_middleware(
        BodyMiddleware,
        limit=ADMIN_BODY_BYTES,
        check=partial(decode_object, nesting=BOUNDS.nesting),
    )
    if access.admin_key_file is not None:
        app.add_middleware(
            ApiKeyMiddleware,
            keys=KeyRing((), access.admin_key_file),
            quotas=Quotas(),
            open_paths=PAGE_PATHS,
            rejected=backstage.rejected,
        )
    app.add_middleware(SameOriginMiddleware, any_host=needs_key)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _failure)
    return app


def build_metrics_app(backstage: Backstage, bounds: Bounds) -> FastAPI:
    """Return the application of the port that has the metrics alone, and asks for no key."""
    app = FastAPI(title="Shoal metrics", openapi_url=None)
    app.include_router(_metrics_router(backstage))
    app.add_middleware(HeadMiddleware, bounds=bounds, rejected=backstage.rejected)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _failure)
    return app


def _check(body: bytes, bounds: Bounds) -> dict[str, Any]:
    """Check a body of OpenAI's API: first each field, then the product of those that multiply."""
    fields = check_body(body, bounds)
    check_logprobs(fields, bounds)
    return fields


async def _http_error(
    request: Request, error: Exception, *, takes_batches: bool = True
) -> Response:
    """Answer a request for an unknown path or method, in the shape of the other errors."""
    assert isinstance(error, HTTPException)
    if not takes_batches and route_path(request.scope).startswith((FILES_PATH, BATCHES_PATH)):
        return error_response(404, "this server takes no batches: --batch-dir turns them on")
    return error_response(error.status_code, str(error.detail), dict(error.headers or {}))


async def _refused(request: Request, error: Exception) -> Response:
    """Answer a request about a file or a batch that is refused."""
    del request
    assert isinstance(error, RefusedError)
    return error_response(error.status, str(error), param=error.param)


async def _not_written(request: Request, error: Exception) -> Response:
    """Answer a request about a file or a batch for which the disk has no room."""
    del request
    assert isinstance(error, OSError)
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        raise error
    return error_response(HTTPStatus.INSUFFICIENT_STORAGE, "the disk of the files is full")


async def _failure(request: Request, error: Exception) -> Response:
    """Answer a request at which the server failed, in the shape of the other errors."""
    del request
    return error_response(500, f"the server failed at this request: {type(error).__name__}")


def _add_middleware(app: FastAPI, backstage: Backstage, options: AppOptions) -> None:
    # The middleware that is added last is the first to see a request.
    placements, access, bounds = backstage.placements, options.access, options.bounds
    app.add_middleware(
        TermsMiddleware,
        placements=placements,
        door=backstage.door,
        bounds=bounds,
        share_prefix_cache=access.share_prefix_cache,
    )
    app.add_middleware(
        BodyMiddleware,
        limit=bounds.body_bytes,
        check=partial(_check, bounds=bounds),
        checks=dict.fromkeys(MESSAGES_PATHS, partial(check_messages, bounds=bounds)),
        streamed=(FILES_PATH,),
        room=BodyRoom(bounds.bodies_bytes),
        refuse=lambda reason: backstage.door.no_room(reason),
    )
    app.add_middleware(
        PlacementMiddleware,
        placements=placements,
        paths=GENERATING_PATHS,
        rejected=backstage.rejected,
    )
    app.add_middleware(KeepAliveMiddleware, streams=backstage.streams, paths=GENERATING_PATHS)
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_credentials=options.allow_credentials,
            allow_methods=options.allowed_methods,
            allow_headers=options.allowed_headers,
        )
    if access.needs_key:
        metrics_open = access.metrics is MetricsAccess.OPEN
        app.add_middleware(
            ApiKeyMiddleware,
            keys=KeyRing(access.keys, access.key_file),
            quotas=Quotas(options.front_ends),
            open_paths=(*OPEN_PATHS, METRICS_PATH) if metrics_open else OPEN_PATHS,
            rejected=backstage.rejected,
        )
    app.add_middleware(HeadMiddleware, bounds=bounds, rejected=backstage.rejected)
    app.add_middleware(MessagesErrorMiddleware, paths=MESSAGES_PATHS)
    if backstage.traces is not None:
        app.add_middleware(TracingMiddleware, traces=backstage.traces, paths=GENERATING_PATHS)


def _only(router: APIRouter, paths: Iterable[str]) -> APIRouter:
    chosen, served = APIRouter(), DecodedBodyRouter()
    chosen.routes.extend(
        route for route in router.routes if isinstance(route, APIRoute) and route.path in paths
    )
    served.include_router(chosen)
    return served


def _health_router(backstage: Backstage) -> APIRouter:
    router = APIRouter()

    @router.get(PING_PATH)
    @router.post(PING_PATH)
    @router.get("/health")
    async def health() -> Response:
        if not backstage.is_alive():
            return error_response(503, "the link to the engines is broken")
        if backstage.door.unavailable is not None:
            return error_response(503, backstage.door.unavailable)
        return Response(status_code=200)

    @router.get("/ready", response_model=ReadyAnswer, response_model_exclude_defaults=True)
    async def ready() -> LayoutView | Response:
        if backstage.door.is_closed:
            return error_response(503, SHUTTING_DOWN)
        try:
            view = await backstage.control.get_layout(READY_SECONDS)
        except CallError as error:
            return error_response(503, str(error))
        if not view.ready:
            return error_response(503, view.reason or "the node is not ready")
        return view

    return router


def _metrics_router(backstage: Backstage) -> APIRouter:
    router = APIRouter()

    @router.get(METRICS_PATH)
    async def metrics() -> Response:
        try:
            node = await backstage.control.get_metrics()
        except CallError as error:
            return error_response(error.status, str(error))
        batches = backstage.batches
        found = [] if batches is None else await asyncio.to_thread(batches.store.unfinished)
        text = await page(chain(backstage.registered(), batch_metrics(found)), node)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    return router
