"""A process of the node, and what it has started."""

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from shoal.runtime.node.child_process import (
    Child,
    choose_context,
    end_helper,
    signals_held,
)


class Helped:
    """A target that starts a process, says which, and waits for its end."""

    def __init__(self, pid_file: Path) -> None:
        self._pid_file = pid_file

    def __call__(self, ready: Callable[[], None]) -> None:
        self._pid_file.write_text(str(subprocess.Popen(["sleep", "600"]).pid))
        ready()
        while True:
            signal.pause()


def helped(tmp_path: Path) -> tuple[Child, int]:
    """Return a child that is ready, and a file descriptor of the process that it has started."""
    with signals_held():
        child = Child(choose_context(), "helped", Helped(tmp_path / "pid"))
    while not child.is_ready:
        assert wait([child.reports], 120.0), "it is ready"
        child.read_report()
    return child, os.pidfd_open(int((tmp_path / "pid").read_text()))


def has_ended(helper: int) -> bool:
    return bool(wait([helper], 120.0))


def test_what_a_process_has_left_is_killed_when_it_is_found_to_have_ended(tmp_path: Path) -> None:
    child, helper = helped(tmp_path)
    assert child.is_alive
    os.kill(child.pid, signal.SIGKILL)
    assert child.join(120.0)
    assert has_ended(helper)


@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, "SIGKILL"), (40, "signal 40")])
def test_the_cause_of_an_end_names_any_signal(tmp_path: Path, number: int, name: str) -> None:
    child, _ = helped(tmp_path)
    os.kill(child.pid, number)
    assert child.join(120.0)
    assert child.cause == f"killed by {name}"


def test_it_is_if_another_process_is_started_before(tmp_path: Path) -> None:
    child, helper = helped(tmp_path)
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    (tmp_path / "other").mkdir()
    other, others_helper = helped(tmp_path / "other")
    assert not child.is_alive
    assert has_ended(helper)
    other.kill()
    assert other.join(120.0)
    assert has_ended(others_helper)


def test_it_is_if_the_process_ends_while_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child, helper = helped(tmp_path)
    waitid = os.waitid

    def ends_after(kind: int, pid: int, options: int) -> os.waitid_result | None:
        found = waitid(kind, pid, options)
        os.kill(child.pid, signal.SIGKILL)
        waitid(kind, pid, os.WEXITED | os.WNOWAIT)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(os, "waitid", ends_after)
        assert child.is_alive, "it was"
    assert not child.is_alive
    assert has_ended(helper)


class Locked:
    """A target that makes a lock, as progress bars do, says what it is called, and waits."""

    def __init__(self, name_file: Path) -> None:
        self._name_file = name_file

    def __call__(self, ready: Callable[[], None]) -> None:
        lock: Any = multiprocessing.RLock()
        self._name_file.write_text(lock._semlock.name or "")
        ready()
        while True:
            signal.pause()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_that_is_killed_leaves_no_semaphore(tmp_path: Path, method: str) -> None:
    """However it was started: those of a restarted engine are spawned."""
    with signals_held():
        child = Child(multiprocessing.get_context(method), "locked", Locked(tmp_path / "name"))
    while not child.is_ready:
        assert wait([child.reports], 120.0), "it is ready"
        child.read_report()
        assert child.is_ready or child.is_alive, child.cause
    child.kill()
    assert child.join(120.0)
    name = (tmp_path / "name").read_text().removeprefix("/")
    assert not name or not Path(f"/dev/shm/sem.{name}").exists()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_signals_are_held_until_a_process_is_set_up_for_them(tmp_path: Path, method: str) -> None:
    """Also beside the first spawned one, with which multiprocessing starts its own helper."""
    end_helper()
    with signals_held():
        child = Child(multiprocessing.get_context(method), "locked", Locked(tmp_path / "name"))
        held = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    child.kill()
    assert child.join(120.0)
    assert {signal.SIGINT, signal.SIGTERM} <= held
    assert not {signal.SIGINT, signal.SIGTERM} & signal.pthread_sigmask(signal.SIG_BLOCK, [])
