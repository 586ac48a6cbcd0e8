"""What the parts of a front end are told of its requests, and how they are told."""

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
    """A part of a front end. Each method is an event; only those that a part overrides are called.

    An engine request is named by vLLM's internal id.
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
            unit: who made them; None: the controller, which only ends requests.
            outputs: vLLM's ``EngineCoreOutput``, at most one for each request.
        """

    def finished(self, request_ids: Sequence[str]) -> None:
        """Requests have had their last output, which did not say so: it had a stop string."""

    def aborted(self, request_ids: Sequence[str]) -> None:
        """The clients of these requests have gone, or the requests could not be sent."""

    def ended(self, note: Ended) -> None:
        """The controller has the last word on an engine request."""

    def interrupted(self, note: Interrupted) -> None:
        """The engines of requests have died."""

    def late(self, outputs: int) -> None:
        """So many outputs of dead engines were dropped, for their requests have begun again."""

    def limits(self, note: PoolLimits) -> None:
        """What the task pool takes has changed."""

    def switching(self, note: Switching) -> None:
        """A switch begins, or has ended."""

    def refused(self, reason: Rejection) -> None:
        """The HTTP request that the current context serves is refused."""


class Event(Generic[P]):
    """One event of ``Observer``: a call reaches all that hear it, in the order of ``add``.

    Args:
        method: that of ``Observer``.
    """

    def __init__(self, method: Callable[Concatenate[Any, P], None]) -> None:
        self._method = method
        self._hearers: list[Callable[P, None]] = []

    def add(self, observer: Observer) -> None:
        """Let an observer hear the event, if it overrides its method."""
        name = self._method.__name__
        if getattr(type(observer), name) is not self._method:
            self._hearers.append(getattr(observer, name))

    def __call__(self, *args: P.args, **more: P.kwargs) -> None:
        """Tell all that hear it."""
        for hear in self._hearers:
            hear(*args, **more)


class Observers:
    """The observers of one front end. Each event is called like ``Observer``'s method."""

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
        """Tell these, too, of all that happens from now on."""
        for observer in observers:
            for event in vars(self).values():
                event.add(observer)

    def take_note(self, note: Note) -> None:
        """Tell of what the controller has said."""
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
