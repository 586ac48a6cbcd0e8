"""Surges: sudden times in which requests come at a much higher rate.

A sequential test finds them: the likelihood ratio of CUSUM (Page, "Continuous inspection schemes",
1954) for a new rate of a Poisson process.

Nobody knows how long a surge will last. But those of a node are often alike, so it is taken to last
as long as the latest did, until it has lasted much longer. Then it is like none of them, and goes
on for at least x times as long as it has lasted with a probability of 1 / (1 + x).
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, log

from shoal.policies.hindsight import Hindsight, clump_size

Lasting = tuple[tuple[float, float], ...]
"""For how many times as long as it has lasted a surge will go on, each after its probability."""
UNKNOWN_LENGTHS: Lasting = ((1 / 2, 0.3), (1 / 3, 2.0), (1 / 6, 11.0))
"""What ``Surges.lasting`` returns of a surge that is like none before. The lengths are the medians
of those below 1, of those from 1 to 5, and of those above 5."""
KEPT = 3
"""So many of the latest surges say how long the next one may last."""
ALIKE = 1.5
"""A surge may still be like one that was so many times shorter."""
LEAST_LEFT = 0.25
"""It then goes on for this share of its time, at least."""
WINDOWS = (0.1, 0.2, 0.4, 0.8, 1.6)
"""A surge is looked for that began so many seconds ago."""
END_WINDOWS = (*WINDOWS, 3.2, 6.4)
"""The end of a surge is looked for so many seconds ago."""
FACTOR = 2.0
"""In a surge at least so many times as many requests come as ever in such a time before it."""
SURE_NATS = 10.0
"""Logarithm of how much likelier the latest requests are in a surge than without one, when it
begins, and after it than in it, when it ends. The latter is tested ten times a second, so a gap of
a moment is hindsight as an end now and then if less is enough."""
LEAST_BEFORE = 10
"""So many requests must have come before it, or nobody knows what is usual."""
BUSY_RATE = 6.4
"""Requests per second. What comes suddenly when fewer came before is most often a clump, which is
over soon."""
PAUSE = 0.1
"""Share of a surge's time until now after which it is worth another look."""
LONGEST_SECONDS = 10.0
"""What has lasted for so long is no surge any more, but usual."""


@dataclass(frozen=True, slots=True)
class Surges:
    """The present surge, and how long the latest ones have lasted."""

    began: float | None = None
    """When the present one began, seconds; None: there is none."""
    usual_rate: float = 0.0
    """Requests per second before it."""
    count: int = 0
    """Requests that have come in it."""
    clumps: float = 1.0
    """How many requests came at once before it (``hindsight.clump_size``)."""
    lengths: tuple[float, ...] = ()
    """For how many seconds the latest ones lasted, the oldest first; at most ``KEPT``."""
    ended: float = -inf
    """When the latest one ended, seconds."""

    def at(self, hindsight: Hindsight, new: int) -> "Surges":
        """Return them as they are now.

        Args:
            hindsight: it has the requests of the last seconds.
            new: how many have come since the last time.
        """
        if self.began is None or self.began < hindsight.began:
            return replace(self, began=None)._begun(hindsight)
        age, count = self._age(hindsight.at), self.count + new
        ended = self._ended_before(hindsight, age, count)
        if ended is None and age < LONGEST_SECONDS:
            return replace(self, count=count)
        return self._over(hindsight.at - (ended or 0.0))

    def _ended_before(self, hindsight: Hindsight, age: float, count: int) -> float | None:
        """Return how many seconds ago the surge has ended; None: it has not, as far as one sees.

        Args:
            hindsight: see ``at``.
            age: for how many seconds it has lasted.
            count: how many requests have come in it.
        """
        ages, best, least = _ages(hindsight), None, SURE_NATS * self.clumps
        for window in END_WINDOWS:
            if window >= age:
                break
            lately = bisect_right(ages, window)
            rate = (count - lately) / (age - window)
            if rate > self.usual_rate:
                nats = _nats(lately, self.usual_rate * window, rate * window)
                if nats > least:
                    best, least = window, nats
        return best

    @property
    def follows_traffic(self) -> bool:
        """Whether requests also came all the time before the present surge."""
        return self.usual_rate >= BUSY_RATE

    def pause(self, now: float) -> float:
        """Return how many seconds to wait between two looks at what it will bring."""
        return PAUSE * self._age(now)

    def lasting(self, now: float) -> Lasting:
        """Return for how long the present one will go on; empty: there is none."""
        if self.began is None:
            return ()
        age = self._age(now)
        alike = sorted(length for length in self.lengths if age < ALIKE * length)
        if not alike:
            return UNKNOWN_LENGTHS
        return ((1.0, max(LEAST_LEFT, alike[len(alike) // 2] / age - 1)),)

    def _age(self, now: float) -> float:
        return 0.0 if self.began is None else max(WINDOWS[0], now - self.began)

    def _begun(self, hindsight: Hindsight) -> "Surges":
        """Return them with a surge, if requests suddenly come at a much higher rate, beyond doubt.

        Where requests come in clumps, so many of them come at once that the likelihood ratio says
        less. So its logarithm is divided by their ``clump_size``. The test for the end of a surge
        is the same.
        """
        ages, span = _ages(hindsight), hindsight.span
        for window in WINDOWS:
            if window > hindsight.at - self.ended:
                break
            count = bisect_right(ages, window)
            before = len(ages) - count
            usual = before * window / max(window, span - window)  # requests in such a window
            if before < LEAST_BEFORE or count < FACTOR * _most_in(window, ages[count:]):
                continue
            clumps = clump_size(ages[count:], window, usual)
            if _nats(count, count, usual) > SURE_NATS * clumps:
                began, rate = hindsight.at - window, usual / window
                return Surges(began, rate, count, clumps, self.lengths, self.ended)
        return self

    def _over(self, at: float) -> "Surges":
        length = 0.0 if self.began is None else at - self.began
        return Surges(lengths=(*self.lengths, length)[-KEPT:], ended=at)


def _nats(count: int, expected: float, otherwise: float) -> float:
    """Return the logarithm of how much likelier it is that so many requests come.

    Args:
        count: how many.
        expected: their mean number at one rate.
        otherwise: the same at the rate with which it is compared.
    """
    return count * log(expected / otherwise) - expected + otherwise


def _ages(hindsight: Hindsight) -> list[float]:
    """Return how many seconds ago each of the latest requests came, the latest one first."""
    return [max(0.0, hindsight.at - job.start) for job in reversed(hindsight.latest)]


def _most_in(window: float, ages: Sequence[float]) -> int:
    """Return how many requests have come in one window at most, wherever it began.

    Windows that begin at fixed times would count clumps of every three seconds one by one, where
    those of the latest window are two.
    """
    return max(bisect_right(ages, ago + window) - first for first, ago in enumerate(ages))
