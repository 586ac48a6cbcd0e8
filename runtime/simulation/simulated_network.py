"""The messages of a simulated node: each message arrives a constant time after it was sent."""

import heapq
from collections import deque
from collections.abc import Callable, Hashable
from itertools import count
from typing import Protocol

from shoal.runtime.clock import ManualClock
from shoal.runtime.protocol.loopback import LoopbackNetwork
from shoal.runtime.protocol.messages import FromController
from shoal.runtime.protocol.transport import Channel, Frames

CONTROLLER = -1
"""The controller's number among the processes; an engine has its own number."""


class FrontEnd(Protocol):
    """The sender of a simulated node's requests."""

    def outputs(self, frames: Frames) -> None:
        """Take encoded ``EngineCoreOutputs``."""

    def note(self, message: FromController) -> None:
        """Take a message from the controller."""


class Events:
    """Planned actions in order of time. Actions of the same time keep the order of planning.

    Args:
        clock: is advanced to each action's time.
    """

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self._order = count()
        self._heap: list[tuple[float, int, Callable[[], Hashable]]] = []

    def at(self, time: float, action: Callable[[], Hashable]) -> None:
        """Plan an action, which returns the process that it concerns (or None)."""
        heapq.heappush(self._heap, (max(time, self.clock.now), next(self._order), action))

    def next(self) -> set[Hashable]:
        """Run all actions of the next time; return whom they concern, an empty set at the end."""
        if not self._heap:
            return set()
        self.clock.now = self._heap[0][0]
        concerned = set()
        while self._heap and self._heap[0][0] <= self.clock.now:
            concerned.add(heapq.heappop(self._heap)[2]())
        return concerned


class SimulatedNetwork(LoopbackNetwork):
    """A ``LoopbackNetwork`` whose messages take time to arrive.

    Args:
        events: where arrivals are planned.
        seconds: how long every message takes.
        front: the only front end.
    """

    def __init__(self, events: Events, seconds: float, front: FrontEnd) -> None:
        super().__init__()
        self._events = events
        self._seconds = seconds
        self._front = front

    def post(self, channel: Channel, peer: str, frames: Frames) -> None:
        """See ``LoopbackNetwork.post``."""
        queue = self.to_controller.setdefault((channel, peer), deque())
        self._send(queue, frames, CONTROLLER)

    def post_to_engine(self, engine: int, frames: Frames) -> None:
        """See ``LoopbackNetwork.post_to_engine``."""
        self._send(self.to_engines[engine], frames, engine)

    def post_to_front(self, index: int, frames: Frames) -> None:
        """See ``LoopbackNetwork.post_to_front``."""
        self._later(lambda: self._front.outputs(frames))

    def post_to_control(self, peer: str, message: FromController) -> None:
        """See ``LoopbackNetwork.post_to_control``."""
        self._later(lambda: self._front.note(message))

    def _send(self, queue: deque[Frames], frames: Frames, to: int) -> None:
        def arrive() -> int:
            queue.append(frames)
            return to

        self._events.at(self._events.clock.now + self._seconds, arrive)

    def _later(self, action: Callable[[], None]) -> None:
        self._events.at(self._events.clock.now + self._seconds, action)
