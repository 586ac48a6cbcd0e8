"""What the controller remembers, for policies and callers: demand, drain, cost of switches.

All of it is a function of events and of the injected clock.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.policies.values.snapshot import (
    NORMAL_PRIORITY,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    SMOOTHING_SECONDS,
    PoolRequest,
    UnitState,
)
from shoal.runtime.protocol.messages import Work

LENGTHS_KEPT = 300
"""Requests after which the length of one counts for a third."""
LENGTHS_ASSUMED = 50
"""Requests of the lengths assumed that are taken to have ended before the first one."""
RATE_SECONDS = (10.0, SMOOTHING_SECONDS, 0.5)
"""Time constants of the rates at which requests come: the longest one for steady arrivals."""
DEVIATIONS = 2.0
"""Standard deviations of a rate that are taken for chance; twice as many are no chance."""


class Demand:
    """Smoothed figures of what is asked of the node.

    Args:
        now: the clock.
    """

    def __init__(self, now: float) -> None:
        self.smoothed_requests = 0.0
        self._rates = [0.0] * len(RATE_SECONDS)
        self._prompt_rate = 0.0
        self._began = self._rate_at = now
        self._requests = 0
        self._seen_at = now
        self._urgent_at = -math.inf

    def arrive(self, now: float, prompt_tokens: int) -> None:
        """Count a request that arrives."""
        self._rates = [
            rate * self._kept(now, seconds) + 1 / seconds
            for rate, seconds in zip(self._rates, RATE_SECONDS, strict=True)
        ]
        self._prompt_rate = self.prompt_rate(now) + prompt_tokens / SMOOTHING_SECONDS
        self._rate_at = now

    def arrival_rate(self, now: float) -> float:
        """Return requests per second.

        Of steady arrivals the latest seconds tell mostly chance, but of a burst all. So it is the
        rate over the longest time, moved into what the latest seconds can be by chance; or theirs,
        where they are too far from it for any chance.
        """
        # An average over more time than there was is too low.
        known = 1 - math.exp((self._began - now) / RATE_SECONDS[0])
        nearest = self._rates[0] * self._kept(now, RATE_SECONDS[0]) / known if known else 0.0
        for latest, seconds in zip(self._rates[1:], RATE_SECONDS[1:], strict=True):
            rate = latest * self._kept(now, seconds)
            # Of the higher rate: that none came for a moment says little.
            within = DEVIATIONS * math.sqrt(max(rate, nearest) / 2 / seconds)
            if abs(rate - nearest) > 2 * within:
                nearest = rate
            nearest = min(max(nearest, rate - within), rate + within)
        return nearest

    def prompt_rate(self, now: float) -> float:
        """Return prompt tokens per second."""
        return self._prompt_rate * self._kept(now)

    def _kept(self, now: float, seconds: float = SMOOTHING_SECONDS) -> float:
        return math.exp((self._rate_at - now) / seconds)

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


class Lengths:
    """How long requests are: of an output nobody knows before it ends."""

    def __init__(self) -> None:
        self._started = self._ended = float(LENGTHS_ASSUMED)
        self._prompt = LENGTHS_ASSUMED * PROMPT_TOKENS
        self._output = LENGTHS_ASSUMED * OUTPUT_TOKENS

    def see(self, done: Work, *, started: int, ended: int) -> None:
        """Take note of what steps computed.

        That takes outputs to end at random: while ever more of them run, their length is
        overestimated, which is the safe side.

        Args:
            done: what they computed.
            started: requests whose prompts came into a batch, again included.
            ended: requests that got their last token.
        """
        kept = (1 - 1 / LENGTHS_KEPT) ** started
        self._started = kept * self._started + started
        self._prompt = kept * self._prompt + done.prefill_tokens
        kept = (1 - 1 / LENGTHS_KEPT) ** ended
        self._ended = kept * self._ended + ended
        self._output = kept * self._output + done.decodes

    @property
    def prompt(self) -> float:
        """Prompt tokens that are computed for the mean request."""
        return self._prompt / self._started

    @property
    def output(self) -> float:
        """Tokens that the mean request is given."""
        return self._output / self._ended


def most_urgent(waiting: Iterable[PoolRequest], units: Iterable[UnitState]) -> int | None:
    """Return the lowest priority of requests that wait or are on a unit."""
    first = [request.priority for request in waiting]
    running = [unit.by_priority[0][0] for unit in units if unit.by_priority]
    return min([*first, *running], default=None)


DRAIN_SECONDS = 30.0
"""Time constant of the rate at which the pool empties: longer than most requests run."""
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1, 60


class Drain:
    """How long what waits takes to leave the pool, by how much of it left lately.

    Only the time counts in which something waits, and only what had to wait: the requests of a
    burst that find free seats say nothing of how soon the next seat is free.

    Args:
        now: the clock.
    """

    def __init__(self, now: float) -> None:
        self._at = now
        self._waits = False
        self._seconds = 0.0
        self._started = 0.0

    def see(self, now: float, *, started: int, waits: bool) -> None:
        """Take note of what happened since the last call.

        Args:
            now: the clock.
            started: requests that left the pool for a unit.
            waits: whether any wait from now on.
        """
        if self._waits:
            kept = math.exp((self._at - now) / DRAIN_SECONDS)
            self._seconds = kept * self._seconds + (1 - kept) * DRAIN_SECONDS
            self._started = kept * self._started + started
        self._at, self._waits = now, waits

    def retry_after(self, waiting: int) -> int:
        """Return in how many seconds so many requests will have left, within 1 and 60.

        While none has left yet it is assumed that one is about to.
        """
        seconds = waiting * self._seconds / max(1.0, self._started)
        return min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, math.ceil(seconds)))


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
    """

    def __init__(self, now: float) -> None:
        self._settings = BudgetSettings()
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
