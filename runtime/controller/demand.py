"""What the controller remembers for policies, which remember nothing: demand, cost of switches.

All of it is a function of events and of the injected clock.
"""

import math
from dataclasses import dataclass

from policies.snapshot import NORMAL_PRIORITY, SMOOTHING_SECONDS, Snapshot


class Demand:
    """Smoothed figures of what is asked of the node.

    Args:
        now: the clock.
    """

    def __init__(self, now: float) -> None:
        self.smoothed_requests = 0.0
        self._rate = 0.0
        self._rate_at = now
        self._requests = 0
        self._seen_at = now
        self._urgent_at = -math.inf

    def arrive(self, now: float) -> None:
        """Count a request that arrives."""
        self._rate = self.arrival_rate(now) + 1 / SMOOTHING_SECONDS
        self._rate_at = now

    def arrival_rate(self, now: float) -> float:
        """Return requests per second."""
        return self._rate * math.exp((self._rate_at - now) / SMOOTHING_SECONDS)

    def since_urgent(self, now: float) -> float:
        """Return the seconds since an urgent request was here."""
        return now - self._urgent_at

    def see(self, now: float, requests: int, most_urgent: int | None) -> None:
        """Take note of the requests on the node from now on.

        Args:
            now: the clock.
            requests: how many there are.
            most_urgent: the lowest priority among them.
        """
        kept = math.exp((self._seen_at - now) / SMOOTHING_SECONDS)
        self.smoothed_requests = kept * self.smoothed_requests + (1 - kept) * self._requests
        self._seen_at, self._requests = now, requests
        if most_urgent is not None and most_urgent < NORMAL_PRIORITY:
            self._urgent_at = now


def most_urgent(snapshot: Snapshot) -> int | None:
    """Return the lowest priority of the requests that the snapshot shows."""
    first = [request.priority for request in snapshot.pool]
    running = [unit.by_priority[0][0] for unit in snapshot.units if unit.by_priority]
    return min([*first, *running], default=None)


@dataclass(frozen=True, slots=True)
class BudgetSettings:
    """How often a policy may switch."""

    overhead: float = 0.05
    """Part of the node's time that switches may take."""
    per_minute: float = 30.0
    """Most switches per minute, were they free."""
    least_per_minute: float = 4.0
    """What is always allowed: a slow switch must not shut its policy out."""
    burst: int = 4
    """Switches that may follow each other at once."""


class SwitchBudget:
    """A token bucket of switches, refilled the slower the more they cost.

    At most ``burst + per_minute * t / 60`` switches start in any ``t`` seconds.

    Args:
        now: the clock.
        settings: see there.
    """

    def __init__(self, now: float, settings: BudgetSettings | None = None) -> None:
        self._settings = settings or BudgetSettings()
        self._tokens = float(self._settings.burst)
        self._at = now
        self.cost_seconds = 0.0
        """Smoothed cost of a switch."""

    @property
    def rate(self) -> float:
        """Switches per second that are sustained."""
        settings = self._settings
        most, least = settings.per_minute / 60, settings.least_per_minute / 60
        afforded = settings.overhead / self.cost_seconds if self.cost_seconds else most
        return max(least, min(most, afforded))

    def allows(self, now: float) -> bool:
        """Return whether a switch may start."""
        self._refill(now)
        return self._tokens >= 1

    def spend(self, now: float) -> None:
        """Count a switch that starts."""
        self._refill(now)
        self._tokens -= 1

    def learn(self, seconds: float) -> None:
        """Take note of what a switch cost: its time, and that of what is computed again."""
        first = not self.cost_seconds
        self.cost_seconds = seconds if first else 0.8 * self.cost_seconds + 0.2 * seconds

    def _refill(self, now: float) -> None:
        gained = (now - self._at) * self.rate
        self._tokens = min(float(self._settings.burst), self._tokens + gained)
        self._at = now
