"""Work of the policy beside the controller's loop: when it is done, when it fails, when it ends."""

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from shoal.policies import registry
from shoal.policies.values.plan import Plan, Policy
from shoal.policies.values.snapshot import Snapshot
from shoal.runtime.controller.loop import FINDINGS_SECONDS
from shoal.runtime.controller.studies import Studies
from shoal.runtime.protocol import messages as m
from tests.runtime.loopback_node import LoopbackNode


class ManualExecutor(Executor):
    """Does the oldest of its work when a test says so."""

    def __init__(self) -> None:
        self._work: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *_: Any, **__: Any) -> Future[Any]:
        """Take work, which has no arguments."""
        future: Future[Any] = Future()
        self._work.append((future, fn))
        return future

    def work(self) -> None:
        """Do the oldest work, unless it was cancelled."""
        future, function = self._work.pop(0)
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function())
        except ZeroDivisionError as error:
            future.set_exception(error)


@pytest.fixture
def thread() -> ManualExecutor:
    return ManualExecutor()


@pytest.fixture
def failures() -> list[str]:
    return []


@pytest.fixture
def studies(thread: ManualExecutor, failures: list[str]) -> Studies:
    return Studies(thread, lambda: failures.append("failed"))


def test_findings_are_there_when_the_study_is_done_and_stay(
    studies: Studies, thread: ManualExecutor
) -> None:
    assert studies.can_study
    studies.begin(lambda: 7)
    assert studies.findings() is None
    thread.work()
    assert [studies.findings(), studies.findings()] == [7, 7]


def test_a_study_takes_the_place_of_an_earlier_one(
    studies: Studies, thread: ManualExecutor
) -> None:
    done: list[int] = []
    for number in range(2):
        studies.begin(lambda number=number: done.append(number) or number)  # type: ignore[misc]
    thread.work()
    assert studies.findings() is None
    thread.work()
    assert studies.findings() == 1
    assert done == [1], "nobody needs the first one any more"


def test_a_study_that_raises_is_counted_once_and_has_no_findings(
    studies: Studies, thread: ManualExecutor, failures: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    studies.begin(lambda: 1 // 0)
    thread.work()
    with caplog.at_level(logging.ERROR):
        assert [studies.findings(), studies.findings()] == [None, None]
    assert failures == ["failed"]
    assert "a study of the policy failed" in caplog.text


def test_without_a_thread_there_are_no_studies() -> None:
    studies = Studies(None, lambda: None)
    assert not studies.can_study
    assert studies.findings() is None
    studies.forget()


def test_a_policy_gets_what_its_study_has_found_and_no_other_policy_does(
    thread: ManualExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, object]] = []

    def studious(snapshot: Snapshot, /) -> Plan:
        seen.append((snapshot.can_study, snapshot.findings))
        return Plan(study=(lambda: "found") if len(seen) == 1 else None)

    policy = Policy("test", studious, decides_layout=True)
    monkeypatch.setitem(registry.POLICIES, "test", policy)
    node = LoopbackNode(2, policy="test", thread=thread)
    node.send("a", 10, 5)
    node.settle()
    assert set(seen) == {(True, None)}
    thread.work()
    seen_before = len(seen)
    node.send("b", 10, 5)
    node.settle()
    assert set(seen[seen_before:]) == {(True, "found")}
    node.call(m.SetPolicy, "manual")
    node.call(m.SetPolicy, "test")
    seen.clear()
    seen.append((True, None))  # no further study
    node.settle()
    node.send("c", 10, 5)
    node.settle()
    assert set(seen) == {(True, None)}


def test_findings_are_asked_for_soon_though_no_message_comes(
    thread: ManualExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = iter([Plan(study=lambda: "found")])
    policy = Policy("test", lambda _: next(plans, Plan()), decides_layout=True)
    monkeypatch.setitem(registry.POLICIES, "test", policy)
    node = LoopbackNode(2, policy="test", thread=thread)
    node.send("a", 10, 5)
    node.settle()
    assert node.controller.next_wakeup() == pytest.approx(FINDINGS_SECONDS)
    thread.work()
    node.controller.turn(0.0)
    wakeup = node.controller.next_wakeup()
    assert wakeup is None or wakeup > FINDINGS_SECONDS


def test_where_there_is_no_thread_policies_know_that(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def looks(snapshot: Snapshot, /) -> Plan:
        seen.append(snapshot.can_study)
        return Plan()

    monkeypatch.setitem(registry.POLICIES, "test", Policy("test", looks, decides_layout=True))
    node = LoopbackNode(2, policy="test")
    node.send("a", 10, 5)
    node.settle()
    assert set(seen) == {False}


def test_a_study_without_a_thread_is_an_error_of_the_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def careless(snapshot: Snapshot, /) -> Plan:
        return Plan(study=lambda: "found")

    monkeypatch.setitem(registry.POLICIES, "test", Policy("test", careless, decides_layout=True))
    node = LoopbackNode(2, policy="test")
    node.send("a", 10, 5)
    node.settle()
    assert node.view().policy_errors > 0
