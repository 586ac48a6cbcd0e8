"""When a group's first step begins, on a device that is made up: the host runs ahead of it."""

from pathlib import Path

import pytest

from shoal.runtime.clock import ManualClock
from shoal.runtime.engine.runner.bound_phases import (
    BEGAN,
    FREED,
    BoundPhases,
    EventMarks,
    HostMarks,
)
from shoal.runtime.protocol.recording import BoundPhase, phases_file, read_phases

ENGINE = 1
STARTED = 1_700_000_000.0
"""Wall-clock time of the device's first tick."""


class Device:
    """A stream of work, and a clock of its own that is too fast.

    Args:
        wall: the host's clock, which waiting for the device moves.
        drift: seconds that the device's clock gains per second.
    """

    def __init__(self, wall: ManualClock, drift: float = 0.0) -> None:
        self.wall, self.drift = wall, drift
        self.done_at = 0.0
        """Wall-clock time at which all work is done that was queued."""
        self.waited = 0

    def queue(self, seconds: float) -> None:
        self.done_at = max(self.done_at, self.wall.now) + seconds

    def event(self) -> "Event":
        return Event(self)


class Event:
    """``torch.cuda.Event(enable_timing=True)``, as far as it is used."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._at: float | None = None

    def record(self) -> None:
        self._at = max(self._device.done_at, self._device.wall.now)

    def synchronize(self) -> None:
        assert self._at is not None
        self._device.waited += 1
        self._device.wall.now = max(self._device.wall.now, self._at)

    def elapsed_time(self, end_event: "Event") -> float:
        assert self._at is not None
        assert end_event._at is not None
        assert end_event._at <= self._device.wall.now, "the device has not come to it yet"
        return 1000 * (end_event._at - self._at) * (1 + self._device.drift)


@pytest.fixture
def wall() -> ManualClock:
    return ManualClock(STARTED)


@pytest.fixture
def device(wall: ManualClock) -> Device:
    return Device(wall)


@pytest.fixture
def phases(tmp_path: Path, wall: ManualClock, device: Device) -> BoundPhases:
    return BoundPhases(phases_file(tmp_path, ENGINE), EventMarks(device.event, wall), wall)


def written(directory: Path) -> list[BoundPhase]:
    return read_phases(directory, ENGINE)


def since_start(phase: BoundPhase) -> list[float | None]:
    """Return its times in milliseconds since ``STARTED``."""
    times = (phase.freed, phase.taken, phase.began)
    return [None if time is None else round(1000 * (time - STARTED), 3) for time in times]


# --- marks ---


def test_a_mark_is_where_the_device_comes_to_after_what_is_queued(
    wall: ManualClock, device: Device
) -> None:
    marks = EventMarks(device.event, wall)
    device.queue(0.006)
    marks.set(FREED)
    device.queue(0.002)
    marks.set(BEGAN)
    assert (device.waited, wall.now) == (0, STARTED), "the host goes on"
    device.queue(0.010)
    times = marks.take()
    assert times == {
        FREED: pytest.approx(STARTED + 0.006, abs=1e-6),
        BEGAN: pytest.approx(STARTED + 0.008, abs=1e-6),
    }
    assert (device.waited, wall.now) == (1, pytest.approx(STARTED + 0.018))


def test_a_mark_counts_once_and_where_it_was_set_last(wall: ManualClock, device: Device) -> None:
    marks = EventMarks(device.event, wall)
    marks.set(FREED)
    wall.advance(1.0)
    marks.set(FREED)
    assert marks.take() == {FREED: pytest.approx(STARTED + 1.0, abs=1e-6)}
    assert marks.take() == {}


def test_clocks_of_host_and_device_need_not_keep_in_step(wall: ManualClock) -> None:
    device = Device(wall, drift=5e-5)
    marks = EventMarks(device.event, wall)
    marks.take()
    wall.advance(600.0)
    # By what was read when the runner started, the device would be 30 ms ahead by now.
    marks.set(BEGAN)
    device.queue(0.030)
    assert marks.take() == {BEGAN: pytest.approx(STARTED + 600.0, abs=5e-6)}


def test_where_the_device_is_the_host_a_mark_is_set_when_it_is_reached(wall: ManualClock) -> None:
    marks = HostMarks(wall)
    marks.set(FREED)
    wall.advance(1.0)
    marks.set(BEGAN)
    wall.advance(1.0)
    assert marks.take() == {FREED: STARTED, BEGAN: STARTED + 1.0}
    assert marks.take() == {}


# --- phases ---


def test_a_first_step_begins_when_it_is_taken_up_and_the_device_is_free(
    tmp_path: Path, wall: ManualClock, device: Device, phases: BoundPhases
) -> None:
    device.queue(0.006)
    phases.step_queued()
    wall.advance(0.001)
    phases.bound(5)
    wall.advance(0.001)
    phases.group_step(1)
    device.queue(0.003)
    assert device.waited == 0
    assert written(tmp_path) == []
    wall.advance(0.001)
    phases.left()
    (phase,) = written(tmp_path)
    assert phase.epoch == 5
    assert since_start(phase) == [6.0, 2.0, 6.0]


def test_a_step_that_comes_late_to_a_free_device_begins_when_it_comes(
    tmp_path: Path, wall: ManualClock, device: Device, phases: BoundPhases
) -> None:
    device.queue(0.001)
    phases.step_queued()
    phases.bound(5)
    wall.advance(0.004)
    phases.group_step(7)
    phases.left()
    assert since_start(*written(tmp_path)) == [1.0, 4.0, 4.0]


def test_only_the_first_step_of_any_tokens_counts(
    tmp_path: Path, wall: ManualClock, phases: BoundPhases
) -> None:
    phases.bound(5)
    for tokens in (0, 0, 4, 1, 1):
        wall.advance(0.001)
        phases.group_step(tokens)
    phases.left()
    assert since_start(*written(tmp_path)) == [None, 3.0, 3.0]


def test_a_bind_after_which_the_group_runs_no_step_is_written_too(
    tmp_path: Path, phases: BoundPhases
) -> None:
    phases.step_queued()
    phases.bound(5)
    phases.left()
    phases.bound(8)
    phases.group_step(0)
    phases.left()
    assert [(p.epoch, since_start(p)) for p in written(tmp_path)] == [
        (5, [0.0, None, None]),
        (8, [None, None, None]),
    ]


def test_own_steps_among_those_of_a_group_do_not_hold_up_its_first(
    tmp_path: Path, wall: ManualClock, device: Device, phases: BoundPhases
) -> None:
    device.queue(0.001)
    phases.step_queued()
    phases.bound(5)
    wall.advance(0.002)
    phases.group_step(1)
    device.queue(0.003)
    phases.step_queued()
    phases.left()
    wall.advance(1.0)
    phases.step_queued()
    phases.bound(8)
    phases.left()
    first, second = written(tmp_path)
    assert since_start(first) == [1.0, 2.0, 2.0]
    assert since_start(second)[0] == pytest.approx(1005.0)


def test_what_no_bind_began_is_no_phase(
    tmp_path: Path, device: Device, phases: BoundPhases
) -> None:
    phases.group_step(16)
    phases.left()
    assert written(tmp_path) == []
    assert device.waited == 0


def test_a_bind_after_a_group_that_was_lost_is_a_phase_of_its_own(
    tmp_path: Path, wall: ManualClock, phases: BoundPhases
) -> None:
    phases.bound(5)
    phases.group_step(1)
    phases.bound(8)
    wall.advance(0.002)
    phases.group_step(1)
    phases.left()
    (phase,) = written(tmp_path)
    assert (phase.epoch, since_start(phase)) == (8, [None, 2.0, 2.0])


def test_phases_of_a_former_start_are_gone(tmp_path: Path, phases: BoundPhases) -> None:
    phases.bound(5)
    phases.left()
    assert len(written(tmp_path)) == 1
    BoundPhases(phases_file(tmp_path, ENGINE), HostMarks())
    assert written(tmp_path) == []
