"""When a group's first step begins on one member: what a recording runner notes of every bind.

A step begins when the runner has taken it up and the device is free for it. The host runs ahead of
a GPU, so the moment at which it takes a step up does not say when the device is free.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, Self

from shoal.runtime.clock import Clock
from shoal.runtime.protocol.recording import BoundPhase, append_phase

FREED, BEGAN = "freed", "began"
"""Marks: the end of the engine's latest own step, and the beginning of the group's first one."""


class Marks(Protocol):
    """Marks in the order of a device's work."""

    def set(self, name: str) -> None:
        """Set a mark after the work queued so far; it replaces the former one of this name."""

    def take(self) -> Mapping[str, float]:
        """Wait until the device has done all its queued work.

        Returns:
            For each mark set since the last call, when the device came to it, in seconds of the
            wall clock.
        """


class HostMarks:
    """Marks of a device that is the host (CPUs): a step has ended when its call returns.

    Args:
        wall: seconds since the epoch.
    """

    def __init__(self, wall: Clock = time.time) -> None:
        self._wall = wall
        self._times: dict[str, float] = {}

    def set(self, name: str) -> None:
        """See ``Marks.set``."""
        self._times[name] = self._wall()

    def take(self) -> Mapping[str, float]:
        """See ``Marks.take``."""
        times, self._times = self._times, {}
        return times


class TimingEvent(Protocol):
    """The methods used of ``torch.cuda.Event(enable_timing=True)``."""

    def record(self) -> None:
        """Put the event into the current stream."""

    def synchronize(self) -> None:
        """Wait until the device has come to it."""

    def elapsed_time(self, end_event: Self) -> float:
        """Return the milliseconds from this event to a later one."""


class EventMarks:
    """Marks of a GPU: timing events in the stream that the layouts' steps run on.

    Nothing waits for the device until ``take``. An event's time is known only relative to another
    event, so ``take`` records one more event, reads the wall clock when the device reaches it, and
    counts back. The clocks of host and device drift by some microseconds per second: one reading at
    the runner's start would be off by milliseconds within minutes. So no more than the tens of
    milliseconds of a bound phase should lie between a mark and ``take``. All times are too late by
    the few microseconds that the host takes to notice the last event.

    Args:
        event: makes a timing event.
        wall: seconds since the epoch.
    """

    def __init__(self, event: Callable[[], TimingEvent], wall: Clock = time.time) -> None:
        self._make, self._wall = event, wall
        self._events: dict[str, TimingEvent] = {}
        self._set: set[str] = set()
        self._end = event()

    def set(self, name: str) -> None:
        """See ``Marks.set``."""
        if name not in self._events:
            self._events[name] = self._make()
        self._events[name].record()
        self._set.add(name)

    def take(self) -> Mapping[str, float]:
        """See ``Marks.take``."""
        self._end.record()
        self._end.synchronize()
        now = self._wall()
        names, self._set = self._set, set()
        return {name: now - self._events[name].elapsed_time(self._end) / 1e3 for name in names}


class BoundPhases:
    """Notes a runner's phases in groups, and writes each when it is over.

    What a former runner of the engine has written is erased: it belongs to another start.

    Args:
        path: see ``recording.phases_file``.
        marks: marks of the runner's device.
        wall: seconds since the epoch.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, marks: Marks, wall: Clock = time.time) -> None:
        path.write_bytes(b"")
        self._path, self._marks, self._wall = path, marks, wall
        self._epoch: int | None = None
        self._taken: float | None = None

    def step_queued(self) -> None:
        """Take note that the device has been given a step; does nothing in a group."""
        if self._epoch is None:
            self._marks.set(FREED)

    def bound(self, epoch: int) -> None:
        """Take note of a bind."""
        self._epoch, self._taken = epoch, None

    def group_step(self, tokens: int) -> None:
        """Take note of a step just before it runs; does nothing outside a group.

        Args:
            tokens: the step's tokens; a step of none only tells which requests have ended.
        """
        if self._epoch is not None and self._taken is None and tokens:
            self._taken = self._wall()
            self._marks.set(BEGAN)

    def left(self) -> None:
        """Take note that the group is left, and write the phase; waits for the group's steps."""
        epoch, self._epoch = self._epoch, None
        if epoch is None:  # the end of the start of a layout's core, which no bind began
            return
        times = self._marks.take()
        phase = BoundPhase(epoch, times.get(FREED), self._taken, times.get(BEGAN))
        append_phase(self._path, phase)
