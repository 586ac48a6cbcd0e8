"""Time as the processes see it: a function that returns monotonic seconds, so tests can own it."""

import os
import time
from collections.abc import Callable
from pathlib import Path

Clock = Callable[[], float]
"""Returns seconds that never go back; only differences mean anything."""

monotonic: Clock = time.monotonic


def process_seconds() -> float:
    """Return how long this process has run. All start-up times are measured with this clock.

    The kernel counts this time, so it includes the interpreter's own start and every import.
    """
    # The process name in parentheses may hold anything; ``starttime`` is field 22 of proc(5).
    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


class ManualClock:
    """A clock that moves only when told to: the clock of tests and of simulated time."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Move the clock forward.

        Raises:
            ValueError: ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError("a clock cannot go back")
        self.now += seconds
