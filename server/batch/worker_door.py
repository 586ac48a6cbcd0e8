"""The batch worker's way into a front end: a Unix socket in the node's private directory.

Only the node's own user can reach it, as all other sockets between the node's processes. So what
comes through it needs no key: a header says for whom the worker asks. From then on such a request
passes everything that others pass.
"""

import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import unquote

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.runtime.protocol.controller_client import CallError, ControlClient
from shoal.server.gate.middleware import BATCH_OWNER

OWNER_HEADER = "x-shoal-batch-owner"
"""The header that says for whom the worker asks, percent-encoded: a name may have any characters.
"""
RUNNING_PATH = "/running"
COUNTED_STATES = {"running", "parked"}
"""Labels of ``shoal_engine_requests``: those that wait in the host's memory make room for others.
"""


def door_path(runtime_dir: str | Path, front_end: int) -> Path:
    """Return the socket of a front end."""
    return Path(runtime_dir, f"batch-{front_end}")


def door_listener(runtime_dir: str | Path, front_end: int) -> socket.socket:
    """Return that socket, bound."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(door_path(runtime_dir, front_end)))
    return listener


class WorkerDoor:
    """Marks requests with the tenant whose batch they are of, and says how busy the node is.

    Args:
        app: the front end's application.
        running: returns how many requests the node runs.
    """

    def __init__(self, app: ASGIApp, running: Callable[[], Awaitable[int]]) -> None:
        self._app = app
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI event stream."""
        if scope["type"] == "http" and scope["path"] == RUNNING_PATH:
            await (await self._busy())(scope, receive, send)
            return
        if scope["type"] == "http":
            owner = unquote(Headers(scope=scope).get(OWNER_HEADER, ""))
            scope = {**scope, BATCH_OWNER: owner}
        await self._app(scope, receive, send)

    async def _busy(self) -> Response:
        try:
            return Response(json.dumps(await self._running()))
        except CallError as error:
            return Response(str(error), status_code=error.status)


async def running_on(control: ControlClient) -> int:
    """Return how many requests the units of a node run, with those in the host's memory.

    Raises:
        CallError: the controller did not answer.
    """
    metrics = await control.get_metrics()
    return int(
        sum(
            sample.value
            for family in metrics.families
            if family.name == "shoal_engine_requests"
            for sample in family.samples
            if not COUNTED_STATES.isdisjoint(sample.labels)
        )
    )
