"""Who is told of an event, and in which order."""

from collections.abc import Sequence
from typing import Any

import pytest

from shoal.policies.values.layouts import alone
from shoal.runtime.protocol.messages import (
    Ended,
    Interrupted,
    Note,
    Outcome,
    Placed,
    PoolLimits,
    Switching,
)
from shoal.server.observers import Observer, Observers
from shoal.server.rejections import Rejection
from tests.units import tp

HEARD = list[tuple[str, Any]]


class Ear(Observer):
    """Writes down what it hears."""

    def __init__(self, name: str, heard: HEARD) -> None:
        self.name, self.heard = name, heard

    def outputs(self, unit: Any, outputs: Sequence[Any]) -> None:
        self.heard.append((self.name, (unit, outputs)))

    def refused(self, reason: Rejection) -> None:
        self.heard.append((self.name, reason))


class LateEar(Ear):
    """Hears one event more, and those of its parent."""

    def late(self, outputs: int) -> None:
        self.heard.append((self.name, outputs))


class Deaf(Observer):
    """Hears nothing; to call it would fail."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not callable(found) or name.startswith("__"):
            return found
        raise AssertionError(f"{name} is called")


def test_events_reach_those_alone_that_hear_them_in_the_order_they_were_added() -> None:
    heard: HEARD = []
    observers = Observers()
    observers.add(LateEar("a", heard), Deaf(), Ear("b", heard))
    outputs = [object()]
    observers.outputs(tp(0, 1), outputs)
    observers.late(3)
    observers.refused(Rejection.EXPIRED)
    observers.finished(["r"])
    assert heard == [
        ("a", (tp(0, 1), outputs)),
        ("b", (tp(0, 1), outputs)),
        ("a", 3),
        ("a", Rejection.EXPIRED),
        ("b", Rejection.EXPIRED),
    ]


def test_an_observer_that_is_added_later_hears_what_comes_then() -> None:
    heard: HEARD = []
    observers = Observers()
    observers.refused(Rejection.INVALID)
    observers.add(Ear("a", heard))
    observers.refused(Rejection.EXPIRED)
    assert heard == [("a", Rejection.EXPIRED)]


def test_there_is_an_event_for_every_method() -> None:
    methods = {name for name in vars(Observer) if not name.startswith("_")}
    assert set(vars(Observers())) == methods


@pytest.mark.parametrize(
    ("note", "event"),
    [
        (Placed("r", alone(0)), "placed"),
        (Ended("r", Outcome.FINISHED), "ended"),
        (Interrupted({"r": 1}), "interrupted"),
        (PoolLimits(), "limits"),
        (Switching([0], over=False), "switching"),
    ],
)
def test_a_note_of_the_controller_is_the_event_of_its_kind(note: Note, event: str) -> None:
    heard: HEARD = []

    def hear(self: Observer, told: Any) -> None:
        heard.append((event, told))

    observers = Observers()
    observers.add(type("Listener", (Observer,), {event: hear})())
    observers.take_note(note)
    assert heard == [(event, note)]
