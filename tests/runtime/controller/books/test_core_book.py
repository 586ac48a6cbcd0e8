"""Which of a unit's requests have begun, as far as its reports and their turns tell."""

import pytest

from shoal.policies.values.layouts import alone
from shoal.policies.values.snapshot import PoolRequest
from shoal.runtime.controller.books.core_book import CoreBook
from shoal.runtime.controller.books.request import Request
from shoal.runtime.protocol import messages as m


def request(name: str, arrival: float, priority: int = 0) -> Request:
    return Request(name, 0, [], PoolRequest(name, 10, 20, priority, arrival))


def report(core: CoreBook, waiting: int) -> None:
    running = len(core.requests) - waiting
    core.report(m.Load(0, core.unit, running, waiting, 100, core.sent, [], {}))


@pytest.fixture
def core() -> CoreBook:
    """Return the book of a core that computes a prompt."""
    core = CoreBook(alone(0))
    core.put(request("runs", 0.0), patience=1.0)
    report(core, 0)
    return core


def waiting(core: CoreBook) -> list[str]:
    return [each.id for each in core.uncounted.requests]


def computed(core: CoreBook) -> list[str]:
    return [each.id for each in core.computed]


@pytest.mark.parametrize(("patience", "waits"), [(0.0, "short"), (0.5, "long")])
def test_a_long_prompt_that_lets_a_short_one_pass_is_the_one_that_waits(
    core: CoreBook, patience: float, waits: str
) -> None:
    core.put(request("long", 0.1), patience=patience)
    core.put(request("short", 0.2))
    report(core, 2)
    assert len(waiting(core)) == 2
    report(core, 1)
    assert waiting(core) == [waits]
    core.put(request("new", 0.15))
    assert waiting(core) == [waits, "new"], "no report has counted it"


def test_an_engine_may_have_died_of_who_passed_others_and_not_of_who_waits(core: CoreBook) -> None:
    core.put(request("long", 0.1), patience=0.5)
    core.put(request("short", 0.2))
    report(core, 1)
    assert computed(core) == ["runs", "short"]


def test_urgent_requests_have_begun_first(core: CoreBook) -> None:
    core.put(request("usual", 0.1))
    core.put(request("urgent", 0.2, priority=-1))
    report(core, 1)
    assert waiting(core) == ["usual"]


def test_if_more_wait_than_have_not_begun_the_latest_were_preempted(core: CoreBook) -> None:
    core.put(request("late", 0.1))
    report(core, 0)
    core.put(request("new", 0.2))
    report(core, 2)
    assert waiting(core) == ["late", "new"]
