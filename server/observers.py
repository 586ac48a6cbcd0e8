"""The events of a front end's requests, and how they reach the parts that observe them."""

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec

from shoal.policies.values.layouts import Unit
from shoal.runtime.protocol.messages import (
    Ended,
    Interrupted,
    Note,
    Placed,
    PoolLimits,
    Switching,
)
from shoal.server.rejections import Rejection

P = ParamSpec("P")


class Observer:
    """A part of a front end that observes events. Only the methods that it overrides are called.

    Engine requests are identified by vLLM's internal id.
    """

    def sending(self, request: Any, arrival: float) -> None:
        """An engine request is sent now, in the context of its HTTP request.

        Args:
            request: vLLM's ``EngineCoreRequest``.
            arrival: when the HTTP request came, in seconds of the monotonic clock.
        """

    def placed(self, note: Placed) -> None:
        """The controller has handed an engine request to a unit."""

    def outputs(self, unit: Unit | None, outputs: Sequence[Any]) -> None:
        """Outputs of one message go to their clients now.

        Args:
            unit: the unit that made them; None: the controller, which only ends requests.
            outputs: vLLM's ``EngineCoreOutput``, at most one for each request.
        """

    def finished(self, request_ids: Sequence[str]) -> None:
        """Requests have ended with a stop string, which their last output did not show."""

    def aborted(self, request_ids: Sequence[str]) -> None:
        """The clients of these requests have gone, or the requests could not be sent."""

    def ended(self, note: Ended) -> None:
        """The controller says how an engine request has ended."""

    def interrupted(self, note: Interrupted) -> None:
        """The engines of requests have died."""

    def late(self, outputs: int) -> None:
        """Outputs of dead engines were dropped, because their requests were begun again."""

    def limits(self, note: PoolLimits) -> None:
        """The limits of the task pool have changed."""

    def switching(self, note: Switching) -> None:
        """A switch begins, or has ended."""

    def refused(self, reason: Rejection) -> None:
        """The HTTP request that the current context serves is refused."""


class Event(Generic[P]):
    """One event of ``Observer``: a call reaches all its observers, in the order of ``add``.

    Args:
        method: the method of ``Observer``.
    """

    def __init__(self, method: Callable[Concatenate[Any, P], None]) -> None:
        self._method = method
        self._hearers: list[Callable[P, None]] = []

    def add(self, observer: Observer) -> None:
        """Add an observer, if it overrides the method."""
        name = self._method.__name__
        if getattr(type(observer), name) is not self._method:
            self._hearers.append(getattr(observer, name))

    def __call__(self, *args: P.args, **more: P.kwargs) -> None:
        """Call the method of every observer."""
        for hear in self._hearers:
            hear(*args, **more)


class Observers:
    """The observers of one front end. Each event is called like the method of ``Observer``."""

    def __init__(self) -> None:
        self.sending = Event(Observer.sending)
        self.placed = Event(Observer.placed)
        self.outputs = Event(Observer.outputs)
        self.finished = Event(Observer.finished)
        self.aborted = Event(Observer.aborted)
        self.ended = Event(Observer.ended)
        self.interrupted = Event(Observer.interrupted)
        self.late = Event(Observer.late)
        self.limits = Event(Observer.limits)
        self.switching = Event(Observer.switching)
        self.refused = Event(Observer.refused)

    def add(self, *observers: Observer) -> None:
        """Tell these observers, too, of all events from now on."""
        for observer in observers:
            for event in vars(self).values():
                event.add(observer)

    def take_note(self, note: Note) -> None:
        """Raise the event of a note from the controller."""
        match note:
            case Placed():
                self.placed(note)
            case Ended():
                self.ended(note)
            case Interrupted():
                self.interrupted(note)
            case PoolLimits():
                self.limits(note)
            case Switching():
                self.switching(note)
