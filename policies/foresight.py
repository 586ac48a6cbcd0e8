"""What a switch now will bring, if the latest requests come again.

A node that fills up, or a burst that has not ended, will have more requests than now, and the
layout that was best with few may not be best with many. Nobody knows what comes. So the requests of
the last seconds come again to a shadow that stays in the present layout, and to one that switches
(``shadow.py``): once backwards, as if what is happening went on, and once as they came.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, exp, inf, sqrt
from statistics import median
from typing import NamedTuple

from shoal.policies.hindsight import LATEST_SECONDS, Hindsight, clump_size
from shoal.policies.jobs import Job
from shoal.policies.shadow import Shadow, shadow_of
from shoal.policies.surges import Lasting
from shoal.policies.values.partition import Partition

HORIZONS = (1.25, 2.5)
"""Seconds to look ahead; the time after which a switch has paid best counts. What comes later can
be judged later."""
SURGE_HORIZONS = (*HORIZONS, 5.0, LATEST_SECONDS)
"""The same in a surge, of which ``surges.py`` says how long it may last."""
TURNS = 5.0
"""A look for what has gone on for some time is no longer than so many times as long as the present
requests still need in the mean. Those that come after that are others, of which little is known."""
RISE_DEVIATIONS = 3.0
"""By how many standard deviations more must have come in the later half of the latest seconds than
in the earlier one, so that the load is taken to rise."""
CLUMP_SECONDS = 0.25
"""Requests within such a time are a clump, as far as they are more than come evenly."""


@dataclass(slots=True)
class EmptyCaches:
    """Caches that were empty when the first request came."""

    memory: float
    """Of what requests find usually, the share that was last used more than so many tokens of
    prompts ago is 1/e. 0: they lose nothing."""
    tokens: int = 0
    """Tokens of prompts since then."""

    def job(self, job: Job) -> Job:
        """Return a request with the tokens that it has to compute because they are not back yet."""
        if not self.memory:
            return job
        lost = exp(-self.tokens / self.memory)
        self.tokens += job.prompt
        return job._replace(new=job.new + round(lost * (job.prompt - job.new)))


class Future(NamedTuple):
    """How the latest requests are taken to come again."""

    stretch: float = 1.0
    """What took a second takes so many seconds, in which so many times as many come."""
    backwards: bool = True
    """Whether the latest ones come first, or those of ``LATEST_SECONDS`` ago."""

    def arrivals(self, hindsight: Hindsight) -> Iterator[tuple[float, Job]]:
        """Yield when jobs come, in seconds of the clock, and which of the latest ones."""
        return mirrored(hindsight, self.stretch) if self.backwards else repeated(hindsight)


FUTURES = (Future(), Future(backwards=False))
"""What is happening goes on, or it is as it was ``LATEST_SECONDS`` ago. Nobody knows which: a burst
may last, and a clump of requests is over when it has come."""


class Outcome(NamedTuple):
    """What has become of a shadow when it was looked ahead for some time."""

    cost: float
    """What all requests will have cost if no other comes after that, seconds."""
    requests: int
    """How many are there then."""


class Foresight:
    """Tells of candidates what a switch now will bring. What staying costs is computed only once.

    Args:
        hindsight: the shadows, and the latest requests.
        lasting: how long the present surge will last (``surges.py``); empty: there is none. A surge
            does go on, and nobody knows for how long.
        caches: what requests find after a switch; None: what they find now.
        far: whether to look as far as the present requests take, if that is long (``_horizons``).
    """

    def __init__(
        self,
        hindsight: Hindsight,
        lasting: Lasting = (),
        caches: EmptyCaches | None = None,
        *,
        far: bool = False,
    ) -> None:
        self._hindsight = hindsight
        self._lasting = lasting
        self._caches = EmptyCaches(0.0) if caches is None else caches
        self._horizons = SURGE_HORIZONS if lasting else _horizons(hindsight, far=far)
        self._futures = FUTURES[:1] if rises(hindsight) else FUTURES
        self._staying: dict[tuple[Future, float], tuple[Outcome, ...]] = {}

    def gain(self, to: Partition, stop: float, seen: float = 0.0) -> float:
        """Return the seconds of requests that a switch now will save.

        It must pay in both futures, and the worse one counts. In a surge, the mean over the times
        counts for which it may go on. If a switch pays only for a time, it is taken back after
        that, for another stop.

        Args:
            to: the partition to which the node would switch.
            stop: seconds for which the switch stops requests.
            seen: for how many seconds this partition has been better. What has gone on for some
                time is taken to go on for as long again, so one more look is that long.
        """
        caches, horizons = replace(self._caches), self._horizons_after(seen)
        switched, so_far = self._switched(to, stop, caches)

        def gain_in(future: Future) -> float:
            stays = self._stays(future, horizons)
            goes = self._outcomes(switched.copy(), future, replace(caches), horizons)
            return max(
                stay.cost - so_far - go.cost - (stop * go.requests if at < LATEST_SECONDS else 0.0)
                for at, stay, go in zip(horizons, stays, goes, strict=True)
            )

        if self._lasting:
            return sum(share * gain_in(Future(stretch)) for share, stretch in self._lasting)
        return min(map(gain_in, self._futures))

    def _switched(self, to: Partition, stop: float, caches: EmptyCaches) -> tuple[Shadow, float]:
        """Return the shadow after a switch, and what requests have cost when it begins, in seconds.

        Args:
            to: see ``gain``.
            stop: see ``gain``.
            caches: what requests find after it; those that wait now are the first that come to it.
        """
        hindsight = self._hindsight
        # Until the switch stops them, units go on with the steps that they have begun.
        until = hindsight.current.copy()
        until.advance(hindsight.at + stop, hindsight.terms)
        begin = max(queue.clock for queue in until.queues)
        requests = until.population()
        # A prompt that has begun is carried. The others wait in the order of their turns.
        waiting = [job if job.came == -inf else caches.job(job) for job in requests.waiting]
        moved = requests._replace(waiting=waiting)
        switched = shadow_of(hindsight.units(to), moved, begin, hindsight.terms)
        return switched, until.cost_so_far(begin)

    def _horizons_after(self, seen: float) -> tuple[float, ...]:
        """Return the seconds to look ahead for a candidate (``gain``)."""
        hindsight = self._hindsight
        last = min(seen, hindsight.span, TURNS * needed_seconds(hindsight))
        longer = not self._lasting and last > self._horizons[-1]
        return (*self._horizons, last) if longer else self._horizons

    def _stays(self, future: Future, horizons: tuple[float, ...]) -> tuple[Outcome, ...]:
        """Return what becomes of the present layout, at each horizon."""
        key = future, horizons[-1]
        if key not in self._staying:
            current = self._hindsight.current.copy()
            outcomes = self._outcomes(current, future, EmptyCaches(0.0), horizons)
            self._staying[key] = tuple(outcomes)
        return self._staying[key]

    def _outcomes(
        self, shadow: Shadow, future: Future, caches: EmptyCaches, horizons: tuple[float, ...]
    ) -> Iterator[Outcome]:
        """Yield what becomes of a shadow, at each horizon.

        Args:
            shadow: it is changed.
            future: what comes to it.
            caches: what requests find in it.
            horizons: after how many seconds.
        """
        hindsight = self._hindsight
        coming = future.arrivals(hindsight)
        at, job = next(coming, (inf, None))
        for horizon in horizons:
            while job is not None and at < hindsight.at + horizon:
                shadow.advance(at, hindsight.terms)
                comes = Job(at, job.new, job.prompt, job.output, kind=job.kind)
                shadow.put(caches.job(comes), hindsight.terms)
                at, job = next(coming, (inf, None))
            yield Outcome(shadow.final_cost(hindsight.terms), shadow.requests)


def _horizons(hindsight: Hindsight, *, far: bool) -> tuple[float, ...]:
    """Return the seconds to look ahead without a surge.

    What long requests still need depends on those that will come beside them. So where the present
    ones still need long in the mean, a third look ends then, though not after longer than the node
    was watched. Short looks would have them alone soon, and the layout that is best for few.
    """
    if not far:
        return HORIZONS
    third = min(hindsight.span, needed_seconds(hindsight))
    return (*HORIZONS, third) if third > HORIZONS[-1] else HORIZONS


def needed_seconds(hindsight: Hindsight) -> float:
    """Return how many seconds the present requests still need in the mean, if no other comes."""
    return hindsight.rest / max(1, hindsight.current.requests)


def rises(hindsight: Hindsight) -> bool:
    """Return whether the load has clearly grown within the latest seconds, and not in one burst.

    It is then not taken to be again as it was at their beginning. No second counts as more than
    twice the median one.
    """
    if hindsight.span < LATEST_SECONDS:
        return False
    since = hindsight.at - hindsight.span
    times = [job.start - since for job in hindsight.latest]
    each = Counter(min(int(at), int(LATEST_SECONDS) - 1) for at in times)
    counts = [each[second] for second in range(int(LATEST_SECONDS))]
    most = 2 * median(counts)
    usual = [min(count, most) for count in counts]
    half = len(usual) // 2
    more = sum(usual[half:]) - sum(usual[:half])
    if more <= 0.0:
        return False
    evenly = len(times) * CLUMP_SECONDS / LATEST_SECONDS
    variance = sum(usual) * clump_size(times, CLUMP_SECONDS, evenly)
    return more > RISE_DEVIATIONS * sqrt(variance)


def period(hindsight: Hindsight) -> float:
    """Return the seconds after which the latest jobs come again.

    A node that was watched for a short time was watched from its first request on, and is often
    judged when others have just come. So the time until the next ones counts, too. It is as long as
    the mean time between clumps of requests.
    """
    span, count = hindsight.span, len(hindsight.latest)
    if span == LATEST_SECONDS or not count:
        return span
    evenly = count * CLUMP_SECONDS / span
    clump = clump_size([job.start for job in hindsight.latest], CLUMP_SECONDS, evenly)
    return min(LATEST_SECONDS, span * (1 + clump / count))


def mirrored(hindsight: Hindsight, stretch: float = 1.0) -> Iterator[tuple[float, Job]]:
    """Yield when the latest jobs come again: at first backwards, from the last one to the first.

    Of a node that was watched for less than that, the time before is not known. So they come to and
    fro.

    Args:
        hindsight: the shadows, and the latest jobs.
        stretch: see ``Future``.
    """
    span, due = period(hindsight), 0.0
    for k in range(ceil(LATEST_SECONDS / span / stretch)):
        forwards, last = k % 2, 0.0
        for job in hindsight.latest if forwards else reversed(hindsight.latest):
            ago = max(0.0, hindsight.at - job.start)
            after = max(0.0, span - ago) if forwards else ago
            due += stretch
            times = int(due)
            due -= times
            for n in range(1, times + 1):
                place = k * span + last + (after - last) * n / times
                yield hindsight.at + stretch * place, job
            last = after


def repeated(hindsight: Hindsight) -> Iterator[tuple[float, Job]]:
    """Yield when the latest jobs come again as they came, from the first one to the last."""
    span, now = period(hindsight), hindsight.at
    for k in range(ceil(LATEST_SECONDS / span)):
        for job in hindsight.latest:
            yield max(now + k * span, job.start + (k + 1) * span), job
