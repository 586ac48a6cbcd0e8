"""Whether the controller turns: what counts as silence, and what does not."""

from pathlib import Path

import pytest

from shoal.runtime.clock import ManualClock
from shoal.runtime.node.heartbeat import LOOKS, Heartbeat, HeartbeatMonitor, heartbeat_path
from shoal.runtime.node.runtime_dir import make_runtime_dir, remove_runtime_dir

TIMEOUT = 8.0


class Watched:
    """A loop and its reader, which looks every half second."""

    def __init__(self, path: Path, timeout: float | None = TIMEOUT) -> None:
        self.clock = ManualClock(50.0)
        self.monitor = HeartbeatMonitor(path, timeout, self.clock)
        self.heartbeat: Heartbeat | None = None
        self.path = path

    def begin(self) -> None:
        self.heartbeat = Heartbeat(self.path)
        self.heartbeat.beat()

    def run(self, seconds: float, *, turning: bool) -> None:
        for _ in range(int(2 * seconds)):
            self.clock.advance(0.5)
            if turning and self.heartbeat is not None:
                self.heartbeat.beat()
            self.monitor.look()


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "turns")


def test_a_loop_that_turns_is_not_silent(watched: Watched) -> None:
    watched.begin()
    watched.run(10 * TIMEOUT, turning=True)
    assert not watched.monitor.is_silent


def test_one_that_does_not_is_silent_after_the_limit_and_not_before(watched: Watched) -> None:
    watched.begin()
    watched.run(TIMEOUT, turning=True)
    watched.run(TIMEOUT - 1.0, turning=False)
    assert not watched.monitor.is_silent
    watched.run(TIMEOUT / LOOKS, turning=False)
    assert watched.monitor.is_silent


def test_one_turn_ends_the_silence_at_once(watched: Watched) -> None:
    watched.begin()
    watched.run(2 * TIMEOUT, turning=False)
    assert watched.monitor.is_silent
    watched.run(0.5, turning=True)
    assert not watched.monitor.is_silent
    watched.run(TIMEOUT - 1.0, turning=False)
    assert not watched.monitor.is_silent, "the former silence does not count"


def test_a_long_turn_within_the_limit_is_no_silence(watched: Watched) -> None:
    watched.begin()
    for _ in range(20):
        watched.run(TIMEOUT - 1.0, turning=False)
        assert not watched.monitor.is_silent
        watched.run(0.5, turning=True)


def test_time_in_which_the_reader_did_not_run_does_not_count(watched: Watched) -> None:
    watched.begin()
    watched.run(TIMEOUT, turning=True)
    for _ in range(LOOKS - 1):
        watched.clock.advance(1000 * TIMEOUT)  # the machine was suspended, again and again
        watched.monitor.look()
        assert not watched.monitor.is_silent
    watched.run(0.5, turning=True)
    watched.run(TIMEOUT - 1.0, turning=False)
    assert not watched.monitor.is_silent


def test_the_start_does_not_count(watched: Watched) -> None:
    watched.run(100 * TIMEOUT, turning=False)
    assert not watched.monitor.is_silent, "there is no controller yet"
    watched.heartbeat = Heartbeat(watched.path)
    watched.run(100 * TIMEOUT, turning=False)
    assert not watched.monitor.is_silent, "it has not begun to turn"
    watched.heartbeat.beat()
    watched.run(2 * TIMEOUT, turning=False)
    assert watched.monitor.is_silent


def test_without_a_limit_nothing_is_too_long(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "turns", None)
    watched.begin()
    watched.run(1000.0, turning=False)
    assert not watched.monitor.is_silent


def test_the_count_is_private_and_goes_with_the_nodes_directory() -> None:
    directory = make_runtime_dir()
    path = heartbeat_path(directory)
    Heartbeat(path).beat()
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        Heartbeat(path)
    remove_runtime_dir(directory)
    assert not path.exists()
