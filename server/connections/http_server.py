"""uvicorn's server, as a front end runs it: it drains before it ends.

While the server drains, it still listens: probes must get through, and a load balancer takes time
to notice. So new requests get a 503 (from ``PoolDoor``), not a closed port. Idle connections stay
open for a moment, since a request may be on its way on one of them.
"""

import asyncio
import logging
import math
import os
import signal
import socket
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import uvicorn

from shoal.runtime.clock import Clock, monotonic
from shoal.runtime.logs import LogFormat
from shoal.server.connections.accepting import Acceptor, Tally
from shoal.server.connections.connection_limits import Connections, do_nothing, never

IDLE_SECONDS = 75
"""How long a connection may be idle. vLLM's 5 seconds are shorter than most clients keep one
(aiohttp 15, load balancers often 60). A client that sends a request just when the server closes its
connection sees the request fail."""
CUT_OFF_SECONDS = 1
"""How long a connection that is cut off may take to end."""
LINGER_SECONDS = 1.0
"""How long idle connections stay open once nothing runs: longer than a request takes to arrive."""
LAST_SECONDS = 2.0
"""How long responses may take to end after the controller has handed their requests back."""
_POLL_SECONDS = 0.05

Share = tuple[Tally, int]
"""The connections of all front ends, and the number of the server's own front end."""


def idle_seconds() -> int:
    """Return how long a connection may be idle: what vLLM's variable says, if it is set."""
    return int(os.environ.get("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", IDLE_SECONDS))


def uvicorn_config(app: Any, args: Namespace, protocol: Any) -> uvicorn.Config:
    """Return uvicorn's configuration of a front end.

    Args:
        app: the application.
        args: the parsed arguments of ``shoal serve``.
        protocol: makes the protocol of each connection.
    """
    as_json = args.log_format is LogFormat.JSON
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        log_config=None if as_json else uvicorn.config.LOGGING_CONFIG,
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        timeout_keep_alive=idle_seconds(),
        timeout_graceful_shutdown=CUT_OFF_SECONDS,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        ssl_ciphers=args.ssl_ciphers or "TLSv1",
        h11_max_incomplete_event_size=args.h11_max_incomplete_event_size,
    )


class DrainingServer(uvicorn.Server):
    """A server that ends after SIGTERM once its requests are done; a second SIGTERM ends it sooner.

    Args:
        config: the application, and how it is served.
        connections: those of this server.
        on_started: called when connections are accepted.
        on_drain: called when the server begins to drain; requests are to be refused from then on.
        request_seconds: how long requests may go on. The controller ends them then; a response that
            is not over a little later is cut off.
        clock: monotonic seconds.
        share: the connections of all front ends, of which this server accepts its part; None: it
            accepts all that it can.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        connections: Connections,
        on_started: Callable[[], None],
        on_drain: Callable[[], None],
        request_seconds: float,
        clock: Clock = monotonic,
        *,
        share: Share | None = None,
    ) -> None:
        super().__init__(config)
        self._share = share
        self._acceptor: Acceptor | None = None
        self._accepting: set[asyncio.Task[object]] = set()
        self._connections = connections
        self._on_started = on_started
        self._on_drain = on_drain
        self._request_seconds = request_seconds
        self._clock = clock
        self._hurried_at = math.inf

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture SIGTERM only: the supervisor handles a terminal's SIGINT."""
        before = signal.signal(signal.SIGTERM, self.handle_exit)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal: drain at the first, and at the second end once clients have been told."""
        del sig, frame
        if self.should_exit:
            self._hurried_at = min(self._hurried_at, self._clock())
        self.should_exit = True
        self._begin_to_drain()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        shared = self._share is not None and sockets is not None
        await super().startup([] if shared else sockets)
        if self.started and self._share is not None and sockets is not None:
            (listener,) = sockets
            tally, front_end = self._share
            connections = self._connections
            self._acceptor = Acceptor(
                listener, tally, front_end, lambda: connections.in_use, self._serve_accepted
            )
            connections.changed = self._acceptor.note
            connections.are_too_uneven = self._acceptor.is_far_ahead
            self._acceptor.start(self.config.backlog)
        if self.started:
            self._on_started()

    def _serve_accepted(self, accepted: socket.socket) -> None:
        """Serve an accepted connection, as ``uvicorn.Server.startup`` would have its loop do."""
        loop = asyncio.get_running_loop()

        def protocol() -> asyncio.Protocol:
            make: Any = self.config.http_protocol_class
            made: asyncio.Protocol = make(
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
                _loop=loop,
            )
            return made

        async def connect() -> None:
            with suppress(OSError):  # its client has gone, or speaks no TLS
                await loop.connect_accepted_socket(protocol, accepted, ssl=self.config.ssl)

        task: asyncio.Task[object] = loop.create_task(connect())
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then end as uvicorn does."""
        self._begin_to_drain()
        await self._drain()
        # uvicorn cuts off clients that do not read their responses; no log line is needed.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        if self._acceptor is not None:
            self._connections.changed = do_nothing
            self._connections.are_too_uneven = never
            self._acceptor.stop()
        await super().shutdown(sockets)

    def _begin_to_drain(self) -> None:
        self._on_drain()
        self._connections.drain()

    async def _drain(self) -> None:
        cycles = [connection.cycle for connection in self._connections.answering]
        end = self._clock() + self._request_seconds
        while cycles and self._clock() < min(end, self._hurried_at) + LAST_SECONDS:
            await asyncio.sleep(_POLL_SECONDS)
            cycles = [c for c in cycles if not (c.response_complete or c.disconnected)]
        quiet = self._clock() + LINGER_SECONDS
        while not cycles and len(self._connections) and self._clock() < quiet:
            if self._hurried_at < math.inf:
                return
            await asyncio.sleep(_POLL_SECONDS)
