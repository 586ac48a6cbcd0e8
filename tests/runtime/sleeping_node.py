"""A node whose processes sleep as long as they say, on a clock that goes on while they compute.

Elsewhere in these tests every process has a turn whenever it could use one. So a process that asks
to be woken too late, or not at all, is not noticed there. Here it sleeps for ever.
"""

import random
from typing import Any

from shoal.runtime.clock import ManualClock
from tests.runtime.loopback_node import LoopbackNode

LEAST_SECONDS = 1e-6
JUMPS = (0.0, 0.0, 0.0, 1e-5, 1e-3)
CONTROLLER = -1


class RunningClock(ManualClock):
    """A clock that is a little later each time that somebody looks at it, and sometimes a lot."""

    def __init__(self, now: float, rng: random.Random) -> None:
        super().__init__(now)
        self._rng = rng

    def __call__(self) -> float:
        """Return the time."""
        self.now += LEAST_SECONDS + self._rng.choice(JUMPS)
        return self.now


class SleepingNode(LoopbackNode):
    """See the module. Nobody is pinged: a ping would wake whoever overslept.

    Args:
        engines: number of engines.
        seed: order of arrivals and turns, and how the clock goes.
        limits: see ``LoopbackNode``.
    """

    def __init__(self, engines: int = 4, *, seed: int, **limits: Any) -> None:
        clock = RunningClock(1000.0, random.Random(seed))
        super().__init__(engines, seed=seed, clock=clock, engine_timeout_seconds=None, **limits)
        self._wakes_at: dict[int, float | None] = dict.fromkeys([CONTROLLER, *self.agents], 0.0)

    def live(self, seconds: float, *, until_done: bool = False) -> bool:
        """Let processes have their turns for a while, or until all requests have ended.

        Returns:
            Whether all requests have ended.
        """
        end = self.clock.now + seconds
        while self.clock.now < end and not (until_done and not self.missing):
            awake = self._awake()
            if awake:
                self._turn(self.rng.choice(awake))
                self.collect()
                continue
            alarms = [at for at in self._wakes_at.values() if at is not None]
            self.clock.now = max(self.clock.now, min([end, *alarms]))
        return not self.missing

    def _awake(self) -> list[int]:
        """Return the processes that have a message, or whose time to wake has come."""
        network, now = self.network, self.clock.now
        awake = [who for who, at in self._wakes_at.items() if at is not None and at <= now]
        awake += [engine for engine in self.agents if network.to_engines[engine]]
        arrived = any(network.to_controller.values())
        return sorted({*awake, *([CONTROLLER] if arrived else [])})

    def _turn(self, who: int) -> None:
        process = self.controller if who == CONTROLLER else self.agents[who]
        process.turn()
        seconds = process.next_wakeup()
        self._wakes_at[who] = None if seconds is None else self.clock.now + seconds
