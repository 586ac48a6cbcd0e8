"""An engine's part in forming a group anew: one wish at a time, answered when it is done."""

from concurrent.futures import Future
from typing import Any, cast

import pytest

from shoal.policies.values.layouts import Unit
from shoal.runtime.engine.agent.forming import Forming
from shoal.runtime.engine.agent.interface import EngineBackend
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.transport import AgentTransport
from tests.units import tp

GROUP = tp(0, 1)
FORM = m.FormGroup(7, GROUP, 2)
START = m.StartGroup(7, GROUP)


class Backend:
    """Does what it is told when the test says so."""

    engine = 1

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.future: Future[Any] = Future()

    def form(self, group: Unit, generation: int) -> Future[str]:
        self.asked.append((group, generation))
        return self.future

    def start(self, group: Unit) -> Future[Any]:
        self.asked.append(group)
        return self.future


class Transport:
    def __init__(self) -> None:
        self.sent: list[m.Message] = []

    def to_controller(self, message: m.Message) -> None:
        self.sent.append(message)


class Bench:
    def __init__(self) -> None:
        self.backend, self.transport = Backend(), Transport()
        backend, transport = cast(EngineBackend, self.backend), cast(AgentTransport, self.transport)
        self.forming = Forming(backend, transport)


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize(
    ("wish", "asked", "result", "error"),
    [
        (FORM, (GROUP, 2), "", ""),
        (FORM, (GROUP, 2), "OSError: out of memory\nmore", "OSError: out of memory"),
        (START, GROUP, {"weights": 1.0}, ""),
    ],
)
def test_a_wish_is_answered_when_it_is_done(
    bench: Bench, wish: m.FormGroup | m.StartGroup, asked: Any, result: Any, error: str
) -> None:
    bench.forming.take(wish, alone=True)
    assert bench.backend.asked == [asked]
    assert bench.forming.tend() is None
    assert bench.forming.busy
    assert bench.transport.sent == []

    bench.backend.future.set_result(result)
    assert bench.forming.tend() == GROUP
    assert not bench.forming.busy
    assert bench.transport.sent == [m.Formed(7, 1, error)]
    assert bench.forming.tend() is None


@pytest.mark.parametrize("wish", [FORM, START])
def test_what_fails_is_answered_with_its_cause(
    bench: Bench, wish: m.FormGroup | m.StartGroup
) -> None:
    bench.forming.take(wish, alone=True)
    bench.backend.future.set_exception(ValueError("no room"))
    bench.forming.tend()
    assert bench.transport.sent == [m.Formed(7, 1, "no room")]


def test_an_engine_that_is_not_alone_refuses(bench: Bench) -> None:
    bench.forming.take(FORM, alone=False)
    assert bench.transport.sent == [m.Formed(7, 1, "engine 1 is not free")]
    assert bench.backend.asked == []


def test_a_second_wish_is_refused_and_the_first_goes_on(bench: Bench) -> None:
    bench.forming.take(FORM, alone=True)
    bench.forming.take(m.FormGroup(8, tp(0, 1, 2, 3), 1), alone=True)
    assert bench.transport.sent == [m.Formed(8, 1, "engine 1 is not free")]
    bench.backend.future.set_result("")
    assert bench.forming.tend() == GROUP
