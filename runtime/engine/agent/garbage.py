"""When a scheduler's process looks for garbage: in all of its memory while nothing runs.

Python frees most objects when their last reference goes. For cycles of objects it looks through all
lists now and then, and whatever the process does stands still meanwhile. A scheduler has the tokens
of its requests in lists, also those of the latest that have ended, so that a switch can take their
caches along (``scheduler/pinned_blocks.py``). To look through two million of them takes 0.2 s.

To look through new objects takes 5 ms if these are the tokens of requests that have just come from
another unit. So Python does not look at all while requests stand still in a switch.
"""

import gc
from collections.abc import Callable

from shoal.runtime.clock import Clock

PAUSE_SECONDS = 60.0
"""The shortest time between two collections: a request that comes in one of them waits for it."""
LONGEST_SECONDS = 3600.0
"""The longest time between two collections of an engine that is never without requests. Serving
with vLLM's scheduler leaves no cycles, as far as was seen."""
NEVER = 2**31 - 1


def collect_only_young() -> None:
    """Let Python look by itself through new objects only; the others are left to ``Garbage``."""
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)


def let_python_collect(automatic: bool) -> None:
    """Let Python look for garbage by itself, or keep it from that."""
    if automatic:
        gc.enable()
    else:
        gc.disable()


class Garbage:
    """Collects the garbage of an engine's scheduler.

    Args:
        clock: seconds.
        collect: frees all cycles that nothing refers to.
        automatic: lets Python look for garbage by itself, or keeps it from that.
    """

    def __init__(
        self,
        clock: Clock,
        collect: Callable[[], object] = gc.collect,
        automatic: Callable[[bool], object] = let_python_collect,
    ) -> None:
        self._clock = clock
        self._collect = collect
        self._automatic = automatic
        self._is_automatic = True
        self._collected = clock()
        self._has_worked = False
        self._idle = True

    def hold(self, *, hurries: bool) -> None:
        """Keep Python from collecting by itself, or let it do so again.

        Args:
            hurries: whether requests stand still, or are about to, until the engine goes on.
        """
        if self._is_automatic is hurries:
            self._is_automatic = not hurries
            self._automatic(self._is_automatic)

    def tend(self, *, idle: bool) -> None:
        """Collect, if it is time for that.

        Args:
            idle: whether the engine has no requests.
        """
        self._idle = idle
        self._has_worked |= not idle
        if self._due_in() <= 0:
            self._collect()
            self._collected, self._has_worked = self._clock(), not idle

    def due_in(self) -> float | None:
        """Return seconds until ``tend`` has something to do without a message; None: never."""
        return max(0.0, self._due_in()) if self._idle and self._has_worked else None

    def _due_in(self) -> float:
        pause = PAUSE_SECONDS if self._idle and self._has_worked else LONGEST_SECONDS
        return self._collected + pause - self._clock()
