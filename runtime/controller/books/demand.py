"""What the controller remembers for policies and callers: demand, drain, cost of switches.

Everything here is a function of events and of the injected clock.
"""

import math
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shoal.policies.values.snapshot import (
    ALIKE_KEPT,
    NORMAL_PRIORITY,
    OUTPUT_TOKENS,
    OUTPUTS_KEPT,
    PROMPT_TOKENS,
    SMOOTHING_SECONDS,
    PoolRequest,
    UnitState,
)
from shoal.runtime.protocol.messages import Work

LENGTHS_KEPT = 300
"""After so many further requests, the weight of a request's length has fallen to about a third."""
LENGTHS_ASSUMED = 50
"""Number of requests of assumed length with which the averages start."""
LIMITS_ASSUMED = 4
"""Number of requests with which the share of outputs starts that come to their limit: half do."""
RATE_SECONDS = (10.0, SMOOTHING_SECONDS, 0.5)
"""Time constants of the arrival rates; the longest one is for steady arrivals."""
USUAL_SECONDS = 60.0
"""Time constant of the rate to which a burst returns."""
DEVIATIONS = 2.0
"""A rate may differ by so many standard deviations by chance; twice as many are not chance."""


class News(NamedTuple):
    """What has become of requests since the policy was last asked (``Snapshot``)."""

    arrived: tuple[PoolRequest, ...] = ()
    placed: tuple[tuple[str, int], ...] = ()
    ended: tuple[tuple[str, int], ...] = ()


NO_NEWS = News()


class Rates(NamedTuple):
    """What comes to the node, and what is on it (``Snapshot``)."""

    arrival_rate: float
    recent_rate: float
    usual_rate: float
    prompt_rate: float
    smoothed_requests: float
    since_urgent: float


class Demand:
    """Smoothed figures of the load on the node.

    Args:
        now: the clock.
    """

    def __init__(self, now: float) -> None:
        self._smoothed_requests = 0.0
        self._rates = [0.0] * len(RATE_SECONDS)
        self._usual = 0.0
        self._prompt_rate = 0.0
        self._began = self._rate_at = now
        self._requests = 0
        self._seen_at = now
        self._urgent_at = -math.inf
        self._arrived: list[PoolRequest] = []
        self._placed: dict[str, int] = {}
        self._ended: dict[str, int] = {}

    def take_news(self) -> News:
        """Return what has become of requests since the last call."""
        news = News(tuple(self._arrived), tuple(self._placed.items()), tuple(self._ended.items()))
        self._arrived, self._placed, self._ended = [], {}, {}
        return news

    def place(self, request_id: str, cached: int) -> None:
        """Note that a request was sent to a unit that has so many of its prompt's tokens cached."""
        self._placed[request_id] = cached

    def end(self, ended: Mapping[str, int]) -> None:
        """Note requests that have left, with the tokens that they got; 0: unknown."""
        self._ended |= ended

    def arrive(self, now: float, request: PoolRequest) -> None:
        """Count a request that arrives."""
        self._arrived.append(request)
        self._rates = [
            rate * self._kept(now, seconds) + 1 / seconds
            for rate, seconds in zip(self._rates, RATE_SECONDS, strict=True)
        ]
        self._usual = self._usual * self._kept(now, USUAL_SECONDS) + 1 / USUAL_SECONDS
        self._prompt_rate = self.prompt_rate(now) + request.prompt_tokens / SMOOTHING_SECONDS
        self._rate_at = now

    def arrival_rate(self, now: float) -> float:
        """Return requests per second.

        With steady arrivals the latest seconds show mostly chance, but only they show a burst. So
        this starts from the rate over the longest time, and moves it into the range that chance
        allows around each more recent rate. A recent rate that is too far away replaces it.
        """
        nearest = self.recent_rate(now)
        for latest, seconds in zip(self._rates[1:], RATE_SECONDS[1:], strict=True):
            rate = latest * self._kept(now, seconds)
            # The higher rate decides the range, because a moment without arrivals says little.
            within = DEVIATIONS * math.sqrt(max(rate, nearest) / 2 / seconds)
            if abs(rate - nearest) > 2 * within:
                nearest = rate
            nearest = min(max(nearest, rate - within), rate + within)
        return nearest

    def recent_rate(self, now: float) -> float:
        """Return requests per second, over the longest of ``RATE_SECONDS``."""
        return self._average(now, self._rates[0], RATE_SECONDS[0])

    def usual_rate(self, now: float) -> float:
        """Return requests per second, over a time that is longer than most bursts."""
        return self._average(now, self._usual, USUAL_SECONDS)

    def _average(self, now: float, rate: float, seconds: float) -> float:
        """Return a smoothed rate as it is now. If less time has passed, the average is over that.

        An average over more time than has passed would be too low.
        """
        known = 1 - math.exp((self._began - now) / seconds)
        return rate * self._kept(now, seconds) / known if known else 0.0

    def rates(self, now: float) -> Rates:
        """Return what comes to the node, and what is on it."""
        requests = self.arrival_rate(now), self.recent_rate(now), self.usual_rate(now)
        since_urgent = now - self._urgent_at
        return Rates(*requests, self.prompt_rate(now), self._smoothed_requests, since_urgent)

    def prompt_rate(self, now: float) -> float:
        """Return prompt tokens per second."""
        return self._prompt_rate * self._kept(now)

    def _kept(self, now: float, seconds: float = SMOOTHING_SECONDS) -> float:
        return math.exp((self._rate_at - now) / seconds)

    def see(self, now: float, requests: int, most_urgent: int | None) -> None:
        """Note the requests that are on the node from now on.

        Args:
            now: the clock.
            requests: number of requests on the node.
            most_urgent: the lowest priority among them.
        """
        kept = math.exp((self._seen_at - now) / SMOOTHING_SECONDS)
        self._smoothed_requests = kept * self._smoothed_requests + (1 - kept) * self._requests
        self._seen_at, self._requests = now, requests
        if most_urgent is not None and most_urgent < NORMAL_PRIORITY:
            self._urgent_at = now


class KnownLengths(NamedTuple):
    """What is known of the lengths of requests; the fields are those of ``Snapshot``."""

    prompt_tokens: float
    output_tokens: float
    outputs: tuple[int, ...]
    outputs_by_prompt: tuple[tuple[int, ...], ...]
    limit_share: float


class Lengths:
    """Mean lengths of requests; the length of an output is unknown before it ends."""

    def __init__(self) -> None:
        self._started = self._ended = float(LENGTHS_ASSUMED)
        self._prompt = LENGTHS_ASSUMED * PROMPT_TOKENS
        self._output = LENGTHS_ASSUMED * OUTPUT_TOKENS
        self._outputs: deque[int] = deque(maxlen=OUTPUTS_KEPT)
        self.outputs: tuple[int, ...] = ()
        """Tokens of the latest outputs, ascending."""
        self._by_prompt = defaultdict[int, deque[int]](lambda: deque(maxlen=ALIKE_KEPT))
        self.by_prompt: tuple[tuple[int, ...], ...] = ()
        """See ``Snapshot.outputs_by_prompt``."""
        self.limit_share = 0.5
        """See ``Snapshot``."""
        self._limited = float(LIMITS_ASSUMED)

    def see(self, done: Work, *, started: int, ended: int) -> None:
        """Note the work of steps.

        The estimate assumes that outputs end at random times. While the number of running requests
        grows, it is too high, which is the safe side.

        Args:
            done: what the steps computed.
            started: requests whose prompts came into a batch; a repeated prompt counts again.
            ended: requests that got their last token.
        """
        kept = (1 - 1 / LENGTHS_KEPT) ** started
        self._started = kept * self._started + started
        self._prompt = kept * self._prompt + done.prefill_tokens
        kept = (1 - 1 / LENGTHS_KEPT) ** ended
        self._ended = kept * self._ended + ended
        self._output = kept * self._output + done.decodes + done.accepted

    def end(self, ended: Collection[tuple[int, int, int | None]]) -> None:
        """Note the tokens of requests that have ended: prompt, output, and its limit, if any."""
        if not ended:
            return  # as with most messages: what is sorted stays
        by_prompt = [*self.by_prompt]
        for prompt, output, limit in ended:
            if limit is not None:
                self._limited = (1 - 1 / LENGTHS_KEPT) * self._limited + 1
                self.limit_share += ((output >= limit) - self.limit_share) / self._limited
            self._outputs.append(output)
            k = prompt.bit_length()
            by_prompt += [()] * (k + 1 - len(by_prompt))
            self._by_prompt[k].append(output)
            by_prompt[k] = tuple(sorted(self._by_prompt[k]))
        self.outputs, self.by_prompt = tuple(sorted(self._outputs)), tuple(by_prompt)

    @property
    def known(self) -> KnownLengths:
        """What snapshots say."""
        means = self.prompt, self.output
        return KnownLengths(*means, self.outputs, self.by_prompt, self.limit_share)

    @property
    def prompt(self) -> float:
        """Prompt tokens that are computed per request on average."""
        return self._prompt / self._started

    @property
    def output(self) -> float:
        """Output tokens per request on average."""
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
    """Estimates when waiting requests leave the pool, from how many left lately.

    Only time in which requests wait counts, and only requests that left in it: requests of a burst
    that start at once in free seats say nothing about when the next seat is free.

    Args:
        now: the clock.
    """

    def __init__(self, now: float) -> None:
        self._at = now
        self._waits = False
        self._seconds = 0.0
        self._started = 0.0

    def see(self, now: float, *, started: int, waits: bool) -> None:
        """Note what happened since the last call.

        Args:
            now: the clock.
            started: requests that left the pool for a unit.
            waits: whether any requests wait from now on.
        """
        if self._waits:
            kept = math.exp((self._at - now) / DRAIN_SECONDS)
            self._seconds = kept * self._seconds + (1 - kept) * DRAIN_SECONDS
            self._started = kept * self._started + started
        self._at, self._waits = now, waits

    def retry_after(self, waiting: int) -> int:
        """Return the seconds, from 1 to 60, after which ``waiting`` requests will have left.

        As long as no request has left, one is assumed to be about to leave.
        """
        seconds = waiting * self._seconds / max(1.0, self._started)
        return min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, math.ceil(seconds)))


@dataclass(frozen=True, slots=True)
class BudgetSettings:
    """How often a policy may switch."""

    overhead: float = 0.05
    """Fraction of the node's time that switches may take."""
    per_minute: float = 30.0
    """Most switches per minute, however cheap they are."""
    least_per_minute: float = 4.0
    """Switches per minute that are always allowed, so that slow switches do not stop the policy."""
    burst: int = 4
    """Switches that may follow each other without a pause."""


class SwitchBudget:
    """A token bucket of switches. The more switches cost, the more slowly it fills.

    At most ``burst + per_minute * t / 60`` switches start in any ``t`` seconds.

    Args:
        now: the clock.
    """

    def __init__(self, now: float) -> None:
        self._settings = BudgetSettings()
        self._tokens = float(self._settings.burst)
        self._at = now
        self.cost_seconds = 0.0
        """Smoothed cost of one switch."""

    @property
    def rate(self) -> float:
        """Switches per second that the budget sustains."""
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
        """Note the cost of a switch: how many seconds it took."""
        first = not self.cost_seconds
        self.cost_seconds = seconds if first else 0.8 * self.cost_seconds + 0.2 * seconds

    def _refill(self, now: float) -> None:
        gained = (now - self._at) * self.rate
        self._tokens = min(float(self._settings.burst), self._tokens + gained)
        self._at = now
