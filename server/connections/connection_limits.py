"""The connections of a front end: how many there may be, and how long a client may take.

A client that sends or reads too slowly holds memory and a connection, and uvicorn would wait for it
for ever. So all connections are checked every second. The check includes what the kernel buffers
for a client, since the kernel holds the whole of a short response. While the front end drains,
every response says that its connection ends.
"""

import argparse
import enum
import socket
import struct
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal.runtime.clock import Clock, monotonic
from shoal.server.connections.http_protocol import BoundedHttpProtocol
from shoal.server.errors import refusal_response
from shoal.server.number_options import add_number, check_at_least

MAX_CONNECTIONS = 4096
CLIENT_SECONDS = 30.0
LOOK_SECONDS = 1.0
"""How often connections are checked."""
BODY_BYTES_PER_SECOND = 16 << 10
"""A client that sends a body more slowly than this is too slow."""
UNSENT_BYTES = 128 << 10
"""How much of a response the kernel buffers for a client that does not read it."""

_KERNEL_SECONDS = 5
"""How much later than Shoal, which counts it, the kernel ends a connection that is not read."""
_TCP_INFO = struct.Struct("=24xI92xQ16xI")
"""Three fields of ``struct tcp_info`` (``linux/tcp.h``): segments that are not acknowledged, bytes
that are acknowledged, and bytes that are not sent."""

_RETRY_SECONDS = 1
_PROBES = (b"/health", b"/ready", b"/ping")
"""Paths that are answered no matter how many connections there are."""
_MOST_TIMES_LIMIT = 2
"""Up to this multiple of the limit, surplus connections are accepted and answered with a 503."""


class Cutoff(enum.StrEnum):
    """Why a connection was ended, or a request refused because of it."""

    SLOW_REQUEST = "slow_request"
    """Its client took too long to send a request."""
    SLOW_RESPONSE = "slow_response"
    """Its client read nothing of a response for too long."""
    TOO_MANY = "too_many"
    """There were more connections than the limit."""


@dataclass(frozen=True)
class ConnectionLimits:
    """What clients may do with their connections."""

    connections: int = MAX_CONNECTIONS
    client_seconds: float = CLIENT_SECONDS
    """How long a client may take to send the head of a request, or may read nothing of a
    response."""


def add_connection_options(group: argparse._ArgumentGroup) -> None:
    """Add ``--max-connections`` and ``--client-timeout``; ``--shutdown-timeout`` is vLLM's."""
    add_number(
        group, "--max-connections", MAX_CONNECTIONS, "connections of clients to each front end"
    )
    add_number(
        group,
        "--client-timeout",
        CLIENT_SECONDS,
        "how long a client may take to send a request, or to take anything of a response",
    )


def check_connection_options(args: Namespace) -> None:
    """Refuse impossible values.

    Raises:
        UserError: the first such option; the message names it.
    """
    check_at_least(args, 1, "max_connections", "client_timeout")
    check_at_least(args, 0, "shutdown_timeout")


def prepare_listener(listener: socket.socket, client_seconds: float) -> None:
    """Have the kernel end connections whose other side has vanished, and buffer little for others.

    Without keep-alive probes, nothing shows that a client has vanished while nothing is sent to it.
    Without the limit, the kernel would buffer megabytes that a client does not read. Accepted
    sockets inherit these settings.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    half = max(1, int(client_seconds / 2))
    for option, value in (
        (socket.TCP_KEEPIDLE, half),
        (socket.TCP_KEEPINTVL, max(1, half // 2)),
        (socket.TCP_USER_TIMEOUT, int((client_seconds + _KERNEL_SECONDS) * 1000)),
        (socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES),
    ):
        listener.setsockopt(socket.IPPROTO_TCP, option, value)


def do_nothing() -> None:
    """Do nothing."""


def never() -> bool:
    """Return False."""
    return False


class Connections:
    """The open connections of one front end.

    Args:
        limits: what their clients may do.
        count: called for every connection that is ended, and every request that is refused.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        count: Callable[[Cutoff], None],
        clock: Clock = monotonic,
    ) -> None:
        self.limits = limits
        self.count = count
        self.clock = clock
        self.is_draining = False
        self.changed: Callable[[], None] = do_nothing
        """Called when the number of connections in use has changed."""
        self.are_too_uneven: Callable[[], bool] = never
        """Returns whether other front ends should have some of these connections."""
        self._open: set[ClientProtocol] = set()
        self._idle: dict[ClientProtocol, None] = {}
        """Those between two requests; the one that has been idle for longest comes first."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def in_use(self) -> int:
        """How many have a request, or have not had one yet."""
        return len(self._open) - len(self._idle)

    def protocol(self, **arguments: Any) -> "ClientProtocol":
        """Return the protocol of a new connection: uvicorn's ``http``."""
        return ClientProtocol(self, **arguments)

    def add(self, connection: "ClientProtocol") -> None:
        """Take a new connection. If there is no room, close the one idle for longest."""
        self._open.add(connection)
        if self.are_too_many and self._idle:
            longest = next(iter(self._idle))
            longest.transport.close()
            self.remove(longest)
        self.changed()

    def remove(self, connection: "ClientProtocol") -> None:
        """Forget a connection that has ended."""
        self._open.discard(connection)
        self._idle.pop(connection, None)
        self.changed()

    def rests(self, connection: "ClientProtocol") -> None:
        """Note that a connection has become idle."""
        self._idle[connection] = None
        self.changed()

    def wakes(self, connection: "ClientProtocol") -> None:
        """Note that the client of a connection has sent something."""
        if connection in self._idle:
            del self._idle[connection]
            self.changed()

    @property
    def are_too_many(self) -> bool:
        """Whether requests on new connections must be refused."""
        return len(self._open) > self.limits.connections

    @property
    def are_far_too_many(self) -> bool:
        """Whether new connections must be ended at once."""
        return len(self._open) > _MOST_TIMES_LIMIT * self.limits.connections

    def end_overdue(self) -> None:
        """End the connections of clients that are too slow. Call it every ``LOOK_SECONDS``."""
        now = self.clock()
        for connection in list(self._open):
            cutoff = connection.end_if_overdue(now)
            if cutoff is not None:
                self.count(cutoff)

    def drain(self) -> None:
        """Make every response, also one in progress, the last of its connection."""
        self.is_draining = True
        for connection in self._open:
            connection.end_with_response()

    @property
    def answering(self) -> "list[ClientProtocol]":
        """The connections with a response in progress."""
        return [connection for connection in self._open if connection.is_answering]


class ClientProtocol(BoundedHttpProtocol):
    """uvicorn's HTTP/1.1 on one connection; ``Connections.protocol`` builds it."""

    def __init__(self, connections: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._connections = connections
        self._is_surplus = False
        """Whether there were too many connections when this one was made."""
        self._asking_since: float | None = None
        """When its client began to send a request; None: no request is incomplete."""
        self._received = 0
        """Bytes since then."""
        self._waiting: tuple[float, int] | None = None
        """Since when bytes have waited for the client, and how many it had acknowledged by then."""

    # --- events -------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """Take a new connection, whose client is now expected to send a request."""
        super().connection_made(transport)
        self._begin()
        self._connections.add(self)
        self._is_surplus = self._connections.are_too_many
        if self._connections.are_far_too_many:
            self._connections.count(Cutoff.TOO_MANY)
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection."""
        self._connections.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what the client sent."""
        self._connections.wakes(self)
        if self._asking_since is None:
            self._begin()
        self._received += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        """Take the beginning of a request."""
        if self._asking_since is None:
            self._begin()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Start to work on a request, or to refuse it."""
        self.app = self._application()
        super().on_headers_complete()
        if self._connections.is_draining or self._should_move():
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        """Take the end of a request."""
        self._asking_since = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """End a response; without a request of its client, the connection is idle."""
        super().on_response_complete()
        if not (self.transport.is_closing() or self.is_answering or self._asking_since is not None):
            self._connections.rests(self)

    def _should_move(self) -> bool:
        """Return whether its client is to go on with a new connection, maybe to another process."""
        return not self.pipeline and self._connections.are_too_uneven()

    def _begin(self) -> None:
        self._asking_since = self._connections.clock()
        self._received = 0

    def _application(self) -> Any:
        refused = self._is_surplus and self._connections.are_too_many
        if not refused or self.url.partition(b"?")[0] in _PROBES:
            return self.config.loaded_app
        self._connections.count(Cutoff.TOO_MANY)
        most = self._connections.limits.connections
        response = refusal_response(503, f"more than {most} connections are open", _RETRY_SECONDS)
        response.headers["Connection"] = "close"
        return response

    # --- state --------------------------------------------------------------------------------

    @property
    def is_answering(self) -> bool:
        """Whether a request was taken whose response is not complete."""
        cycle = self.cycle
        return bool(cycle) and not cycle.response_complete and not cycle.disconnected

    def end_with_response(self) -> None:
        """Let the connection end with the response in progress, if there is one."""
        if self.is_answering:
            self.cycle.keep_alive = False

    def end_if_overdue(self, now: float) -> Cutoff | None:
        """End the connection if its client is too slow, and return the reason."""
        if self._takes_nothing(now):
            self.transport.abort()
            return Cutoff.SLOW_RESPONSE
        if self._asks_too_slowly(now) and not self.transport.is_closing():
            self._end_slow_request()
            return Cutoff.SLOW_REQUEST
        return None

    def _takes_nothing(self, now: float) -> bool:
        """Return whether bytes wait for the client, and it has acknowledged none for too long."""
        connected = self.transport.get_extra_info("socket")
        try:
            info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        except OSError:
            return False  # it has just been closed
        unacknowledged, taken, unsent = _TCP_INFO.unpack(info)
        if not (unacknowledged or unsent or self.transport.get_write_buffer_size()):
            self._waiting = None
            return False
        if self._waiting is None or self._waiting[1] != taken:
            self._waiting = now, taken
        return now - self._waiting[0] >= self._connections.limits.client_seconds

    def _asks_too_slowly(self, now: float) -> bool:
        if self._asking_since is None:
            return False
        if self.flow.read_paused or (self.is_answering and not self.cycle.more_body):
            self._begin()  # what comes before it takes time
        allowed = self._connections.limits.client_seconds + self._received / BODY_BYTES_PER_SECOND
        return now - self._asking_since >= allowed

    def _end_slow_request(self) -> None:
        cycle = self.cycle
        responded = bool(cycle) and cycle.more_body and cycle.response_started
        if self._received and not responded:
            seconds = self._connections.limits.client_seconds
            self.answer_and_close(408, f"the request was not there within {seconds:g} seconds")
        else:
            self.transport.close()
