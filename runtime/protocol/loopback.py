"""The transports of a whole node in memory: for tests, and for simulated time.

Messages are encoded and decoded as they are on sockets. With a random source, every receiver sees a
random prefix of what each sender sent, so any order that processes and sockets allow can occur.
"""

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

from shoal.runtime.protocol.messages import FromController, Message, decode_from_controller, encode
from shoal.runtime.protocol.transport import (
    Arrival,
    Channel,
    Frames,
    engine_identity,
    front_identity,
)
from shoal.runtime.protocol.wire import RequestType


class LoopbackNetwork:
    """All queues of one node.

    Args:
        rng: decides the order of arrival; None delivers everything at once.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self.controller = LoopbackControllerTransport(self)
        self.to_engines: dict[int, deque[Frames]] = {}
        self.incarnations: dict[int, int] = {}
        """Incarnations of the engines that have a transport."""
        self.to_controller: dict[tuple[Channel, str], deque[Frames]] = {}
        self.front_outputs: dict[int, list[Frames]] = {}
        """Encoded ``EngineCoreOutputs`` that each front end received."""
        self.greetings: dict[int, bytes] = {}
        """The ready response that each front end received."""
        self.control_replies: dict[str, list[FromController]] = {}
        """Messages that front ends and the supervisor received on the control socket."""
        self._rng = rng

    def agent(self, engine: int, incarnation: int = 0) -> "LoopbackAgentTransport":
        """Return the transport of an engine; messages to earlier incarnations are lost."""
        self.to_engines[engine] = deque()
        self.incarnations[engine] = incarnation
        return LoopbackAgentTransport(self, engine, incarnation)

    def front_sends(self, index: int, kind: RequestType, frames: Sequence[bytes]) -> None:
        """Send a request message as front end ``index`` would."""
        self.post(Channel.FRONT, front_identity(index), [kind.value, *frames])

    def control_sends(self, peer: str, message: Message) -> None:
        """Send a call as a front end or the supervisor would."""
        self.post(Channel.CONTROL, peer, [encode(message)])

    def post(self, channel: Channel, peer: str, frames: Frames) -> None:
        """Queue a message for the controller."""
        self.to_controller.setdefault((channel, peer), deque()).append(frames)

    def post_to_engine(self, engine: int, frames: Frames) -> None:
        """Queue a message for an engine; an engine without a transport is ignored."""
        queue = self.to_engines.get(engine)
        if queue is not None:
            queue.append(frames)

    def post_to_front(self, index: int, frames: Frames) -> None:
        """Hand ``EngineCoreOutputs`` to a front end."""
        self.front_outputs.setdefault(index, []).append(frames)

    def post_to_control(self, peer: str, message: FromController) -> None:
        """Hand a reply or a note to a front end or the supervisor."""
        self.control_replies.setdefault(peer, []).append(message)

    def take(self, queue: deque[Frames]) -> list[Frames]:
        """Take a prefix of a queue: the messages that have "arrived"."""
        count = len(queue) if self._rng is None else self._rng.randint(0, len(queue))
        return [queue.popleft() for _ in range(count)]


class LoopbackControllerTransport:
    """``ControllerTransport`` on a ``LoopbackNetwork``."""

    def __init__(self, network: LoopbackNetwork) -> None:
        self._network = network
        self._incarnations: dict[int, int] = {}

    def wait(self, timeout: float | None, *, eager: bool = False) -> None:
        """Return at once: time is the test's."""

    def receive(self) -> list[Arrival]:
        """See ``ControllerTransport.receive``."""
        network = self._network
        return [
            Arrival(channel, peer, frames)
            for (channel, peer), queue in list(network.to_controller.items())
            for frames in network.take(queue)
        ]

    def to_engine(self, engine: int, message: Message, frames: Sequence[bytes] = ()) -> None:
        """See ``ControllerTransport.to_engine``."""
        known = self._incarnations.get(engine, 0)
        if known == self._network.incarnations.get(engine, known):
            self._network.post_to_engine(engine, [encode(message), *frames])

    def meet(self, engine: int, incarnation: int) -> None:
        """See ``ControllerTransport.meet``."""
        self._incarnations[engine] = incarnation

    def to_control(self, peer: str, message: Message) -> None:
        """See ``ControllerTransport.to_control``."""
        self._network.post_to_control(peer, decode_from_controller(encode(message)))

    def greet_front(self, index: int, payload: bytes) -> None:
        """See ``ControllerTransport.greet_front``."""
        self._network.greetings[index] = payload

    def to_front(self, index: int, frames: Sequence[bytes]) -> None:
        """See ``ControllerTransport.to_front``."""
        self._network.post_to_front(index, list(frames))

    def close(self) -> None:
        """See ``ControllerTransport.close``: nothing to free."""


class LoopbackAgentTransport:
    """``AgentTransport`` on a ``LoopbackNetwork``."""

    def __init__(self, network: LoopbackNetwork, engine: int, incarnation: int) -> None:
        self._network = network
        self._identity = engine_identity(engine, incarnation)
        self._queue = network.to_engines[engine]

    def wait(self, timeout: float | None, *, eager: bool = False) -> None:
        """Return at once: time is the test's."""

    def receive(self) -> list[Frames]:
        """See ``AgentTransport.receive``."""
        return self._network.take(self._queue)

    def to_controller(self, message: Message) -> None:
        """See ``AgentTransport.to_controller``."""
        self._network.post(Channel.ENGINE, self._identity, [encode(message)])

    def to_front(self, index: int, frames: Sequence[Any]) -> None:
        """See ``AgentTransport.to_front``."""
        self._network.post_to_front(index, [bytes(frame) for frame in frames])

    def close(self) -> None:
        """See ``AgentTransport.close``: nothing to free."""
