"""When a dead engine is restarted: after a pause that doubles, and a limited number of times."""

import random
from collections.abc import Callable

import msgspec

WINDOW_SECONDS = 600.0
"""Older restarts are forgotten."""
LONGEST_BACKOFF_SECONDS = 60.0
"""Longest pause before a restart, without the jitter."""
JITTER = 0.25
"""Largest share of a pause that is added to it, so that engines that died together do not start
together."""


class Restart(msgspec.Struct, frozen=True):
    """A planned restart."""

    engine: int
    incarnation: int
    at: float
    """Monotonic seconds."""


class Restarts:
    """The restarts of one node's engines.

    Args:
        limit: most restarts of one engine within the window; 0: none.
        backoff_seconds: pause before the first restart; each further pause is twice as long.
        rng: the source of the jitter.
    """

    def __init__(
        self, limit: int, backoff_seconds: float, rng: Callable[[], float] = random.random
    ) -> None:
        self._limit = limit
        self._backoff = backoff_seconds
        self._rng = rng
        self._past: dict[int, list[float]] = {}
        self._due: dict[int, Restart] = {}
        self._incarnations: dict[int, int] = {}

    def incarnation(self, engine: int) -> int:
        """Return how often an engine has been restarted."""
        return self._incarnations.get(engine, 0)

    def plan(self, engine: int, now: float) -> Restart | None:
        """Plan and return the restart of a dead engine; None: it has had too many."""
        past = [at for at in self._past.get(engine, []) if at > now - WINDOW_SECONDS]
        if len(past) >= self._limit:
            return None
        pause = min(self._backoff * 2 ** len(past), LONGEST_BACKOFF_SECONDS)
        at = now + pause * (1 + JITTER * self._rng())
        self._past[engine] = [*past, at]
        self._due[engine] = Restart(engine, self.incarnation(engine) + 1, at)
        return self._due[engine]

    @property
    def pending(self) -> bool:
        """Whether a restart is planned."""
        return bool(self._due)

    def seconds_left(self, now: float) -> float | None:
        """Return the time until the next restart; None: none is planned."""
        return min((max(0.0, restart.at - now) for restart in self._due.values()), default=None)

    def due(self, now: float) -> list[Restart]:
        """Return the restarts whose time has come."""
        return [restart for restart in self._due.values() if restart.at <= now]

    def begun(self, restart: Restart) -> None:
        """Note that a restart is under way."""
        del self._due[restart.engine]
        self._incarnations[restart.engine] = restart.incarnation
