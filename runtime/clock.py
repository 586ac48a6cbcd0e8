"""Time as the processes see it: a function that returns monotonic seconds, so tests can own it."""

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Returns seconds that never go back; only differences mean anything."""

monotonic: Clock = time.monotonic


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
