"""How the controller and the engines reach each other and the front ends.

``controller`` and ``engine.agent`` know only two small protocols. The classes here carry them over
ZMQ sockets; ``loopback.py`` carries them in memory for tests and simulated time. Every
implementation keeps the order of messages between any two processes.
"""

import enum
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import zmq

from shoal.runtime.config import Addresses
from shoal.runtime.protocol.messages import Message, encode

Frames = list[bytes]

_MAX_PER_TURN = 256
"""Messages taken from one socket before the process does its other work."""


class Channel(enum.Enum):
    """The kind of sender of a message to the controller."""

    ENGINE = "engine"
    CONTROL = "control"
    """A front end or the supervisor, with calls and reports."""
    FRONT = "front"
    """A front end, with requests in vLLM's own format."""


class Arrival(NamedTuple):
    """One message to the controller."""

    channel: Channel
    peer: str
    """Identity of the sender: on ``CONTROL`` the address for the answer."""
    frames: Frames


class ControllerTransport(Protocol):
    """The controller's connections to engines, front ends and the supervisor."""

    def wait(self, timeout: float | None, *, eager: bool = False) -> None:
        """Block until a message may be there, at most ``timeout`` seconds (None: for ever).

        ``eager``: a message is due within the time that it takes to fall asleep and wake up.
        """

    def receive(self) -> list[Arrival]:
        """Return messages that had arrived when the last wait ended, or later; do not block."""

    def to_engine(self, engine: int, message: Message, frames: Sequence[bytes] = ()) -> None:
        """Send to an engine; an engine that is not connected is ignored."""

    def meet(self, engine: int, incarnation: int) -> None:
        """From now on send to this incarnation of an engine and not to earlier ones."""

    def to_control(self, peer: str, message: Message) -> None:
        """Send to a front end or the supervisor; one that is not connected is ignored."""

    def greet_front(self, index: int, payload: bytes) -> None:
        """Present the node to a front end as its engine core."""

    def to_front(self, index: int, frames: Sequence[bytes]) -> None:
        """Send encoded ``EngineCoreOutputs`` to a front end."""

    def close(self) -> None:
        """Free the sockets."""


class AgentTransport(Protocol):
    """An engine's connections to the controller and the front ends."""

    def wait(self, timeout: float | None, *, eager: bool = False) -> None:
        """Block until something may be due, at most ``timeout`` seconds (None: for ever).

        ``eager``: something is due within the time that it takes to fall asleep and wake up.
        """

    def receive(self) -> list[Frames]:
        """Return the controller's messages, as ``ControllerTransport.receive`` does."""

    def to_controller(self, message: Message) -> None:
        """Send to the controller."""

    def to_front(self, index: int, frames: Sequence[Any]) -> None:
        """Send encoded ``EngineCoreOutputs`` to a front end."""

    def close(self) -> None:
        """Free the sockets, after giving sent messages up to a second to leave."""


def engine_identity(engine: int, incarnation: int = 0) -> str:
    """Return an engine's identity on the controller's socket after ``incarnation`` restarts."""
    return f"engine-{engine}.{incarnation}"


def parse_engine_identity(identity: str) -> tuple[int, int]:
    """Return the engine and the incarnation that an ``engine_identity`` names."""
    engine, _, incarnation = identity.removeprefix("engine-").partition(".")
    return int(engine), int(incarnation)


def front_identity(index: int) -> str:
    """Return the name of a front end on the controller's control socket."""
    return f"front-{index}"


SUPERVISOR = "supervisor"
"""Name of the supervisor on the controller's control socket."""

_VLLM_ENGINE_IDENTITY = (0).to_bytes(2, "little")
"""The identity that vLLM's client expects of its engine core of rank 0."""


def open_socket(
    context: zmq.Context[Any], kind: int, *, identity: bytes | None = None
) -> zmq.Socket[Any]:
    """Return a socket without queue limits; at close, sent messages have one second to leave."""
    socket: zmq.Socket[Any] = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 1000)
    if identity is not None:
        socket.setsockopt(zmq.IDENTITY, identity)
    return socket


def drain(socket: zmq.Socket[Any]) -> Iterator[Frames]:
    """Yield the messages that a socket holds, at most ``_MAX_PER_TURN``, without blocking."""
    for _ in range(_MAX_PER_TURN):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return


LONGEST_WAIT_SECONDS = 0.5
"""Longest uninterrupted wait on a socket.

A signal may arrive while ZMQ works inside the process, for example when a peer ends. It does not
end the wait that follows, so without a bound its handler would not run before the next message.
"""


EAGER_SECONDS = 0.002 if len(os.sched_getaffinity(0)) >= 16 else 0.0
"""How long an eager wait keeps its core busy before it sleeps like any other wait.

On a machine with few cores, a busy wait would keep the answering process from running.
"""


def _poll(poller: zmq.Poller, timeout: float | None, *, eager: bool) -> set[Any]:
    """Return the sockets that can be read, so that no time is spent on trying to read others."""
    if eager:
        end = time.perf_counter() + min(EAGER_SECONDS, math.inf if timeout is None else timeout)
        while time.perf_counter() < end:
            if ready := poller.poll(0):
                return {socket for socket, _ in ready}
    return {socket for socket, _ in poller.poll(_milliseconds(timeout))}


def _milliseconds(timeout: float | None) -> int:
    bounded = LONGEST_WAIT_SECONDS if timeout is None else min(timeout, LONGEST_WAIT_SECONDS)
    return max(0, round(bounded * 1000))


class ZmqAgentTransport:
    """``AgentTransport`` over ZMQ.

    Args:
        engine: this engine's number.
        addresses: the node's endpoints.
        api_servers: number of front ends.
        pollables: further sockets that end a wait (the backend's).
        incarnation: how often the engine was restarted.
    """

    def __init__(
        self,
        engine: int,
        addresses: Addresses,
        api_servers: int,
        pollables: Sequence[Any] = (),
        *,
        incarnation: int = 0,
    ) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        identity = engine_identity(engine, incarnation).encode()
        self._controller = open_socket(self._context, zmq.DEALER, identity=identity)
        self._controller.connect(addresses.engines)
        self._fronts = []
        for index in range(api_servers):
            front = open_socket(self._context, zmq.PUSH)
            front.connect(addresses.front_output(index))
            self._fronts.append(front)
        self._poller = zmq.Poller()
        self._readable: set[Any] = set()
        for socket in (self._controller, *pollables):
            self._poller.register(socket, zmq.POLLIN)

    def wait(self, timeout: float | None, *, eager: bool = False) -> None:
        """See ``AgentTransport.wait``."""
        self._readable = _poll(self._poller, timeout, eager=eager)

    def receive(self) -> list[Frames]:
        """See ``AgentTransport.receive``."""
        return list(drain(self._controller)) if self._controller in self._readable else []

    def to_controller(self, message: Message) -> None:
        """See ``AgentTransport.to_controller``."""
        self._controller.send(encode(message))

    def to_front(self, index: int, frames: Sequence[Any]) -> None:
        """See ``AgentTransport.to_front``."""
        self._fronts[index].send_multipart(frames)

    def close(self) -> None:
        """See ``AgentTransport.close``."""
        self._context.destroy(linger=1000)


class ZmqControllerTransport:
    """``ControllerTransport`` over ZMQ: two ROUTERs, and a DEALER and a PUSH per front end.

    Args:
        addresses: the node's endpoints.
        api_servers: number of front ends.
        beat: called at the end of every wait, which is once in every turn of the controller's loop.
            A wait lasts at most ``LONGEST_WAIT_SECONDS``.
    """

    def __init__(
        self,
        addresses: Addresses,
        api_servers: int,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._addresses = addresses
        self._beat = beat
        self._engines = self._router(addresses.engines)
        self._control = self._router(addresses.control)
        self._incarnations: dict[int, int] = {}
        self._inputs: dict[int, zmq.Socket[Any]] = {}
        self._outputs = [open_socket(self._context, zmq.PUSH) for _ in range(api_servers)]
        for index, output in enumerate(self._outputs):
            output.connect(addresses.front_output(index))
        self._poller = zmq.Poller()
        self._readable: set[Any] = set()
        self._poller.register(self._engines, zmq.POLLIN)
        self._poller.register(self._control, zmq.POLLIN)

    def _router(self, address: str) -> zmq.Socket[Any]:
        router = open_socket(self._context, zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.bind(address)
        return router

    def wait(self, timeout: float | None, *, eager: bool = False) -> None:
        """See ``ControllerTransport.wait``."""
        self._readable = _poll(self._poller, timeout, eager=eager)
        self._beat()

    def receive(self) -> list[Arrival]:
        """See ``ControllerTransport.receive``."""
        arrivals = []
        for channel, router in (
            (Channel.ENGINE, self._engines),
            (Channel.CONTROL, self._control),
        ):
            for identity, *frames in drain(router) if router in self._readable else ():
                arrivals.append(Arrival(channel, identity.decode(), frames))
        for index, dealer in self._inputs.items():
            if dealer in self._readable:
                name = front_identity(index)
                arrivals += (Arrival(Channel.FRONT, name, frames) for frames in drain(dealer))
        return arrivals

    def to_engine(self, engine: int, message: Message, frames: Sequence[bytes] = ()) -> None:
        """See ``ControllerTransport.to_engine``."""
        identity = engine_identity(engine, self._incarnations.get(engine, 0))
        self._route(self._engines, identity, [encode(message), *frames])

    def meet(self, engine: int, incarnation: int) -> None:
        """See ``ControllerTransport.meet``."""
        self._incarnations[engine] = incarnation

    def to_control(self, peer: str, message: Message) -> None:
        """See ``ControllerTransport.to_control``."""
        self._route(self._control, peer, [encode(message)])

    @staticmethod
    def _route(router: zmq.Socket[Any], peer: str, frames: Sequence[bytes]) -> None:
        try:
            router.send_multipart([peer.encode(), *frames])
        except zmq.ZMQError as error:
            # It is no error if a peer is gone or not there yet: the supervisor reports deaths, and
            # time-outs cover the rest.
            if error.errno != zmq.EHOSTUNREACH:
                raise

    def greet_front(self, index: int, payload: bytes) -> None:
        """See ``ControllerTransport.greet_front``."""
        dealer = open_socket(self._context, zmq.DEALER, identity=_VLLM_ENGINE_IDENTITY)
        dealer.connect(self._addresses.front_input(index))
        dealer.send(payload)
        self._inputs[index] = dealer
        self._poller.register(dealer, zmq.POLLIN)

    def to_front(self, index: int, frames: Sequence[bytes]) -> None:
        """See ``ControllerTransport.to_front``."""
        self._outputs[index].send_multipart(frames)

    def close(self) -> None:
        """See ``ControllerTransport.close``."""
        self._context.destroy(linger=1000)
