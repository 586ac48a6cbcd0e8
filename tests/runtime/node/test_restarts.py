"""When a dead engine is started again: the policy, and the supervisor that follows it."""

import itertools
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from shoal.runtime.node import supervisor
from shoal.runtime.node.restarts import (
    JITTER,
    LONGEST_BACKOFF_SECONDS,
    WINDOW_SECONDS,
    Restart,
    Restarts,
)
from tests.runtime.node.test_supervisor import (
    Node,
    interrupt,
    is_alive,
    played_processes,
    wait_for,
    when,
)

__all__ = ["played_processes"]


# --- the policy -----------------------------------------------------------------------------------


def test_each_pause_is_twice_as_long_up_to_the_longest() -> None:
    restarts = Restarts(limit=10, backoff_seconds=2.0, rng=lambda: 0.0)
    pauses = []
    for _ in range(8):
        restart = restarts.plan(0, now=100.0)
        assert restart is not None
        pauses.append(restart.at - 100.0)
        restarts.begun(restart)
    assert pauses == [2.0, 4.0, 8.0, 16.0, 32.0, *[LONGEST_BACKOFF_SECONDS] * 3]


def test_jitter_only_lengthens_a_pause() -> None:
    restarts = Restarts(limit=1, backoff_seconds=2.0, rng=lambda: 1.0)
    assert restarts.plan(0, now=0.0) == Restart(0, 1, 2.0 * (1 + JITTER))


def test_an_engine_is_not_restarted_too_often_in_a_while() -> None:
    restarts = Restarts(limit=2, backoff_seconds=1.0, rng=lambda: 0.0)
    for now in (0.0, 10.0):
        restart = restarts.plan(0, now)
        assert restart is not None
        restarts.begun(restart)
    assert restarts.plan(0, now=20.0) is None
    assert restarts.plan(1, now=20.0) == Restart(1, 1, 21.0), "others have their own"
    assert restarts.plan(0, now=WINDOW_SECONDS + 5.0) is not None


def test_none_is_ever_restarted_without_a_limit() -> None:
    restarts = Restarts(limit=0, backoff_seconds=1.0)
    assert restarts.plan(0, now=0.0) is None
    assert not restarts.pending


def test_restarts_come_due_and_are_counted_when_they_begin() -> None:
    restarts = Restarts(limit=3, backoff_seconds=1.0, rng=lambda: 0.0)
    assert restarts.seconds_left(5.0) is None
    restart = restarts.plan(2, now=5.0)
    assert restarts.seconds_left(5.5) == 0.5
    assert restarts.due(5.5) == []
    assert restarts.due(6.0) == [restart]
    assert restarts.incarnation(2) == 0
    assert restart is not None
    restarts.begun(restart)
    assert restarts.incarnation(2) == 1
    assert not restarts.pending


# --- the supervisor -------------------------------------------------------------------------------


def restarting_node(tmp_path: Path, limit: int, **wanted: object) -> Node:
    node = Node(tmp_path, **wanted)
    node.config = msgspec.structs.replace(
        node.config, restart_limit=limit, restart_backoff_seconds=0.01
    )
    return node


def when_up(node: Node, engine: int, act: Callable[[], None]) -> threading.Thread:
    """Start a thread that calls ``act`` once the restarted engine's processes are there."""
    parts = [node.pids_dir / f"{role}-{engine}.1" for role in ("scheduler", "runner")]
    return when(parts[0], lambda: when(parts[1], act).join())


@pytest.mark.parametrize("part", ["scheduler-1", "runner-1"])
def test_a_dead_engine_is_started_again_whole(tmp_path: Path, part: str) -> None:
    node = restarting_node(tmp_path, 1)
    former = ("scheduler-1", "runner-1")
    left: list[bool] = []

    def end() -> None:
        left.extend(is_alive(node.pid(name)) for name in former)
        wait_for("restarted", node.log)
        interrupt()

    watcher = when_up(node, 1, end)
    assert node.run(lambda: node.kill(part)) == 0
    watcher.join()
    name = part.replace("-1", "")
    assert node.log.read_text().splitlines() == [
        f"1: engine 1 {name}: killed by SIGKILL",
        "1: restarted, 1",
    ]
    assert left == [False, False]
    assert "engine 1 is lost, to be restarted in 0.0 s: " in node.said[-2]
    assert node.said[-1] == "shoal: engine 1 is restarted (1)"
    assert node.leftovers() == []


def test_a_restart_that_is_overdue_is_said_to_come_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is on a busy machine: 0.1 s pass before each look at the clock."""
    node = restarting_node(tmp_path, 1)

    def slow_down_and_kill() -> None:
        seconds = itertools.count(1000.0, 0.1)
        monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
        node.kill("runner-1")

    watcher = when_up(node, 1, interrupt)
    assert node.run(slow_down_and_kill) == 0
    watcher.join()
    (lost,) = (line for line in node.said if "is lost" in line)
    assert lost.startswith("shoal: engine 1 is lost, to be restarted in 0.0 s: ")


def test_a_restart_that_fails_is_tried_again_and_not_for_ever(tmp_path: Path) -> None:
    node = restarting_node(tmp_path, 2, failing_restarts=5)

    def is_over(line: str) -> None:
        node.said.append(line)
        if "too often" in line:
            interrupt()

    assert node.run(lambda: node.kill("runner-0"), say=is_over) == 0
    assert "and was restarted too often to be restarted again; serving goes on" in node.said[-1]
    restarted = [line for line in node.said if "is restarted" in line]
    assert restarted == [f"shoal: engine 0 is restarted ({number})" for number in (1, 2)]
    assert node.said[-1].endswith(": OSError: out of blocks")
    assert node.leftovers() == []


def test_a_node_whose_engines_are_all_dead_waits_for_them(tmp_path: Path) -> None:
    node = restarting_node(tmp_path, 1, kill=[0, 1])
    watcher = when_up(node, 1, interrupt)
    assert node.run(node.ask_to_kill) == 0
    watcher.join()
    assert node.leftovers() == []


def test_engines_that_all_die_while_steps_are_timed_come_back(tmp_path: Path) -> None:
    """As those of a group do together. The node is not ready without any, and must not wait."""
    node = restarting_node(tmp_path, 1, times=True)

    def kill_all() -> None:
        for engine in range(2):
            node.kill(f"runner-{engine}")

    watcher = when(tmp_path / "timing", kill_all)
    assert node.run(interrupt) == 0
    watcher.join()
    restarted = sorted(line for line in node.said if "is restarted" in line)
    assert restarted == [f"shoal: engine {engine} is restarted (1)" for engine in range(2)]
    assert node.leftovers() == []


def test_the_last_engine_that_is_not_restarted_takes_the_node_with_it(tmp_path: Path) -> None:
    node = restarting_node(tmp_path, 1, kill=[0, 1], failing_restarts=1)
    assert node.run(node.ask_to_kill) == 1
    assert node.said[-1].startswith("shoal: no engine is left: engine ")
    assert node.leftovers() == []


def test_the_controller_cannot_kill_an_engine_for_what_it_was_before(tmp_path: Path) -> None:
    node = restarting_node(tmp_path, 1, kill=[1])
    asked: list[int] = []

    def ask_again() -> None:
        asked.append(node.pid("runner-1.1"))
        node.ask_to_kill()  # as it knows the engine: not restarted
        os.kill(node.pid("runner-0"), signal.SIGKILL)

    def is_over(line: str) -> None:
        node.said.append(line)
        if "engine 0 is restarted" in line:
            interrupt()

    watcher = when_up(node, 1, ask_again)
    assert node.run(node.ask_to_kill, say=is_over) == 0
    watcher.join()
    assert [line for line in node.said if "engine 1 is lost" in line] == [
        line for line in node.said if "their group broke" in line
    ]
    assert asked
    assert node.leftovers() == []
