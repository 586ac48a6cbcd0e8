"""What each candidate would have cost so far, with the requests that really came.

Every candidate has a shadow (``shadow.py``), and so has the current partition, so that what the
model does not know cancels out. A shadow begins with the requests that are on the node.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil, exp, inf
from typing import NamedTuple

from shoal.policies.guessed_outputs import drawn_output, longer_output, rest_of_output, uncensored
from shoal.policies.jobs import Decode, Job, kind_of
from shoal.policies.shadow import Population, Shadow, Units, shadow_of
from shoal.policies.terms import TermsOf
from shoal.policies.values.layouts import Unit
from shoal.policies.values.partition import Partition
from shoal.policies.values.snapshot import PoolRequest, Snapshot

HORIZONS = (1.25, 2.5)
"""``foreseen`` looks so many seconds ahead, and takes the time after which a switch has paid best.
What comes later can be judged later."""
SURGE_HORIZONS = (*HORIZONS, 5.0, 10.0)
"""The same in a surge, of which ``surges.py`` says how long it may last."""
AGAIN_SECONDS = SURGE_HORIZONS[-1]
"""It lets the requests of so many seconds come again."""
CLUMP_SECONDS = 0.25
"""Requests within such a time are a clump, as far as they are more than come evenly."""
LEAST_SECONDS = 1.0
"""The latest requests count as having come within at least this time."""
Length = tuple[str, int, bool]
"""A request, its tokens, and whether they are no guess."""
Lasting = tuple[tuple[float, float], ...]
"""How many times as long as until now a surge will last, each after its probability."""


class Beginning(NamedTuple):
    """The shadows as they were when a trial began. No time passes in them, and nobody comes."""

    there: Shadow
    """The candidate's."""
    here: Shadow
    """The current partition's."""
    unknown: frozenset[str]
    """The requests of which the node has not said how long they are."""

    def told(self, lengths: Iterable[Length], terms: TermsOf) -> "Beginning":
        """Return them with what has become known of the requests."""
        there, here, known = self.there.copy(), self.here.copy(), set[str]()
        for key, tokens, is_known in lengths:
            for shadow in (there, here):
                shadow.expect(key, tokens, terms, known=is_known)
            known |= {key} if is_known else set()
        return Beginning(there, here, self.unknown - known)

    def differ(self, terms: TermsOf) -> float:
        """Return by how many seconds more the requests take in the candidate, if no other comes."""
        return self.there.final_cost(terms) - self.here.final_cost(terms)


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate's shadow."""

    shadow: Shadow
    differ: float
    """By how many seconds more its requests were to take than the current partition's when it
    began: what only the requests of that moment would save is no saving."""
    raised: float = 0.0
    """What it counts as having saved beside that."""
    first: Beginning | None = None
    """From what ``differ`` follows, while some lengths in it are guesses. A wrong guess of how long
    these requests will be would otherwise be taken for a saving, or for a loss, when they end."""

    def told(self, lengths: Iterable[Length], terms: TermsOf) -> "Trial":
        """Return the trial after what has become known of requests."""
        if self.first is None:
            return self
        told = [one for one in lengths if one[0] in self.first.unknown]
        if not told:
            return self
        first = self.first.told(told, terms)
        return replace(self, differ=first.differ(terms), first=first if first.unknown else None)


@dataclass(frozen=True, slots=True)
class Hindsight:
    """The shadows. They are never changed: ``follow`` returns new ones."""

    at: float
    here: Partition
    current: Shadow
    trials: tuple[tuple[Partition, Trial], ...]
    drawn: int = 0
    """How many outputs were drawn."""
    latest: tuple[Job, ...] = ()
    """The jobs of the last ``AGAIN_SECONDS``."""
    began: float = 0.0
    """Since when ``latest`` knows of them."""
    lane: Unit | None = None
    """The group that urgent requests have to themselves, where a partition has it."""

    def is_of(self, here: Partition, candidates: Collection[Partition], lane: Unit | None) -> bool:
        """Return whether these are the shadows of these partitions, with this lane."""
        trials = {partition for partition, _ in self.trials}
        return (self.here, trials, self.lane) == (here, set(candidates), lane)

    def units(self, partition: Partition) -> Units:
        """Return a partition's units for its shadow."""
        return [(unit.layout, unit == self.lane) for unit in partition]

    @property
    def span(self) -> float:
        """The seconds of which the latest jobs are."""
        return min(AGAIN_SECONDS, max(LEAST_SECONDS, self.at - self.began))

    @property
    def period(self) -> float:
        """The seconds after which the latest jobs come again.

        A node that was watched for a short time was watched from its first request on, and is often
        judged when others have just come. So the time until the next ones counts, too. It is as
        long as the mean time between clumps of requests.
        """
        if self.span == AGAIN_SECONDS or not self.latest:
            return self.span
        count = len(self.latest)
        evenly = count * CLUMP_SECONDS / self.span
        clump = clump_size([job.start for job in self.latest], CLUMP_SECONDS, evenly)
        return min(AGAIN_SECONDS, self.span * (1 + clump / count))


def clump_size(times: Collection[float], window: float, evenly: float) -> float:
    """Return how many requests come at once, at least 1.

    It is the variance of their number in a window, as a multiple of its mean, which is 1 if they
    come one by one at random.

    Args:
        times: when requests came, in seconds from any moment; at least one.
        window: seconds.
        evenly: their mean number in a window.
    """
    windows = Counter(int(at / window) for at in times).values()
    return max(1.0, sum(n * n for n in windows) / len(times) - evenly)


class News(NamedTuple):
    """What has become of requests (``Snapshot``)."""

    arrived: tuple[PoolRequest, ...]
    placed: tuple[tuple[str, int], ...]
    ended: tuple[tuple[str, int], ...]


def begin(
    snapshot: Snapshot,
    candidates: Collection[Partition],
    terms: TermsOf,
    lane: Unit | None = None,
) -> Hindsight:
    """Return shadows that begin with what is on the node now.

    Args:
        snapshot: the node.
        candidates: the partitions that get a shadow.
        terms: what units can do.
        lane: see ``Hindsight``.
    """
    now, here = snapshot.now, snapshot.partition
    seen = Hindsight(now, here, Shadow([]), (), began=now, lane=lane)
    current = shadow_of(seen.units(here), on_node(snapshot), now, terms)
    trials = tuple((candidate, Trial(current, 0.0)) for candidate in candidates)
    return renewed(replace(seen, current=current, trials=trials), candidates, terms)


def follow(seen: Hindsight, snapshot: Snapshot, news: News, terms: TermsOf) -> Hindsight:
    """Return the shadows as they are now, after what has become of requests."""
    current = seen.current.copy()
    trials = [(partition, trial, trial.shadow.copy()) for partition, trial in seen.trials]
    running = [
        (one.tokens - one.output, one.output - (one.end - queue.steps))
        for queue in current.queues
        for one in queue.running
        if one.output
    ]
    likely = uncensored(snapshot, running)
    shadows = [current, *(shadow for _, _, shadow in trials)]
    drawn, found = seen.drawn, dict(news.placed)
    latest = [job for job in seen.latest if job.start > snapshot.now - AGAIN_SECONDS]
    for request in news.arrived:
        drawn += 1
        prompt = request.prompt_tokens
        cached = found.pop(request.request_id, round(snapshot.hit_share * prompt))
        output = drawn_output(likely, drawn, prompt)
        kind = kind_of(request.priority, snapshot.targets, snapshot.output_tokens)
        new, key = max(1, prompt - cached), request.request_id
        job = Job(request.arrival, new, prompt, output, key, kind=kind)
        latest.append(job)
        for shadow in shadows:
            shadow.advance(request.arrival, terms)
            shadow.put(job, terms)
    for key, cached in found.items():
        for shadow in shadows:
            shadow.find_cached(key, cached, terms)
    lengths = [(key, tokens, True) for key, tokens in news.ended]
    for shadow in shadows:
        shadow.advance(snapshot.now, terms)
        for key, tokens in news.ended:
            shadow.expect(key, tokens, terms, known=True)
        if not snapshot.requests:
            shadow.end_all(terms)
    # The current shadow goes as the node does: what has not ended on the node is longer.
    for key, prompt, tokens in current.guesses():
        drawn += 1
        longer = longer_output(likely, drawn, prompt, tokens)
        lengths.append((key, longer, False))
        for shadow in shadows:
            shadow.expect(key, longer, terms, known=False)
    told = tuple((p, replace(t.told(lengths, terms), shadow=shadow)) for p, t, shadow in trials)
    seen = replace(seen, current=current, trials=told)
    return replace(seen, at=snapshot.now, drawn=drawn, latest=tuple(latest))


def saved(seen: Hindsight, terms: TermsOf) -> dict[Partition, float]:
    """Return the seconds of requests that each candidate would have saved.

    They include those of requests that are still there, as if no other came.
    """
    here = seen.current.final_cost(terms)
    return {
        partition: trial.raised + trial.differ + here - trial.shadow.final_cost(terms)
        for partition, trial in seen.trials
    }


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
        lost = exp(-self.tokens / self.memory) if self.memory else 0.0
        self.tokens += job.prompt
        return job._replace(new=job.new + round(lost * (job.prompt - job.new)))


class Future(NamedTuple):
    """How the latest requests are taken to come again."""

    length: float = 1.0
    """What took a second takes so many seconds, in which so many times as many come."""
    backwards: bool = True
    """Whether the latest ones come first, or those of ``AGAIN_SECONDS`` ago."""


FUTURES = (Future(), Future(backwards=False))
"""What is happening goes on, or it is as it was ``AGAIN_SECONDS`` ago. Nobody knows which: a burst
may last, and a clump of requests is over when it has come."""
Staying = dict[Future, tuple[tuple[float, int], ...]]
"""What ``_again`` says of the present layout."""


def foreseen(
    seen: Hindsight,
    to: Partition,
    stop: float,
    terms: TermsOf,
    lasting: Lasting = (),
    stays: Staying | None = None,
    caches: EmptyCaches | None = None,
) -> float:
    """Return the seconds of requests that a switch now will save if the latest requests come again.

    A node that fills up, or a burst that has not ended, will have more requests than now, and the
    layout that was best with few may not be best with many. What is happening may go on, or the
    next seconds are like those of ten seconds ago. A switch must pay in both futures, and the worse
    one counts. If it pays only for a time, it is taken back after that, for another stop.

    Args:
        seen: the shadows.
        to: the partition to which the node would switch.
        stop: seconds for which the switch stops requests.
        terms: what units can do.
        lasting: how long the present surge will last (``surges.py``); empty: there is none. A surge
            does go on, and nobody knows for how long.
        stays: what the look at another candidate has found out of the present layout. What this
            look finds out of it is added.
        caches: what requests find after the switch; None: what they find now.
    """
    known: Staying = {} if stays is None else stays
    caches = EmptyCaches(0.0) if caches is None else replace(caches)
    # Until the switch stops them, units go on with the steps that they have begun.
    until = seen.current.copy()
    until.advance(seen.at + stop, terms)
    begin = max(queue.clock for queue in until.queues)
    here = until.population()
    # A prompt that has begun is carried. The others wait in the order of their turns.
    waiting = [job if job.came == -inf else caches.job(job) for job in here.waiting]
    there = shadow_of(seen.units(to), here._replace(waiting=waiting), begin, terms)
    so_far = until.cost_so_far(begin)
    horizons = SURGE_HORIZONS if lasting else HORIZONS

    def worth(future: Future) -> float:
        if future not in known:
            known[future] = tuple(_again(seen, seen.current.copy(), terms, future, horizons))
        goes = _again(seen, there.copy(), terms, future, horizons, replace(caches))
        pairs = zip(horizons, known[future], goes, strict=True)
        return max(
            without - so_far - spent - (stop * back if horizon < AGAIN_SECONDS else 0.0)
            for horizon, (without, _), (spent, back) in pairs
        )

    if lasting:
        return sum(probability * worth(Future(length)) for probability, length in lasting)
    return min(map(worth, FUTURES))


def _again(
    seen: Hindsight,
    shadow: Shadow,
    terms: TermsOf,
    future: Future,
    horizons: Iterable[float],
    caches: EmptyCaches | None = None,
) -> Iterator[tuple[float, int]]:
    """Yield the seconds that requests will have spent on all units, and how many are there.

    This is yielded for each of ``horizons``, as if no other request came after it.
    """
    coming = _mirrored(seen, future.length) if future.backwards else _repeated(seen)
    at, job = next(coming, (inf, None))
    for horizon in horizons:
        while job is not None and at < seen.at + horizon:
            shadow.advance(at, terms)
            comes = Job(at, job.new, job.prompt, job.output, kind=job.kind)
            shadow.put(comes if caches is None else caches.job(comes), terms)
            at, job = next(coming, (inf, None))
        yield shadow.final_cost(terms), shadow.requests


def _mirrored(seen: Hindsight, length: float = 1.0) -> Iterator[tuple[float, Job]]:
    """Yield when the latest jobs come again: at first backwards, from the last one to the first.

    Of a node that was watched for less than that, the time before is not known. So they come to and
    fro. What took a second takes ``length`` seconds, in which so many times as many jobs come.
    """
    span, due = seen.period, 0.0
    for k in range(ceil(AGAIN_SECONDS / span / length)):
        last = 0.0
        for job in seen.latest if k % 2 else reversed(seen.latest):
            ago = max(0.0, seen.at - job.start)
            here = max(0.0, span - ago) if k % 2 else ago
            due += length
            times = int(due)
            due -= times
            for n in range(1, times + 1):
                yield seen.at + length * (k * span + last + (here - last) * n / times), job
            last = here


def _repeated(seen: Hindsight) -> Iterator[tuple[float, Job]]:
    """Yield when the latest jobs come again as they came, from the first one to the last."""
    span = seen.period
    for k in range(ceil(AGAIN_SECONDS / span)):
        for job in seen.latest:
            yield max(seen.at + k * span, job.start + (k + 1) * span), job


def renewed(seen: Hindsight, again: Collection[Partition], terms: TermsOf) -> Hindsight:
    """Return shadows of which those of some candidates begin again, from where the node is."""
    here = seen.current.population()
    trials = []
    for partition, trial in seen.trials:
        if partition in again:
            shadow = shadow_of(seen.units(partition), here, seen.at, terms)
            trial = _begun(shadow, seen.current, terms)
        trials.append((partition, trial))
    return replace(seen, trials=tuple(trials))


def _begun(there: Shadow, here: Shadow, terms: TermsOf) -> Trial:
    """Return the trial of a shadow that has saved nothing so far."""
    first = Beginning(there, here, frozenset(there.keys + here.keys))
    return Trial(there, first.differ(terms), first=first)


def raised(seen: Hindsight, by: Mapping[Partition, float]) -> Hindsight:
    """Return shadows of candidates that count as having saved so much more."""
    trials = tuple((p, replace(t, raised=t.raised + by.get(p, 0.0))) for p, t in seen.trials)
    return replace(seen, trials=trials)


def moved(seen: Hindsight, to: Partition, terms: TermsOf) -> Hindsight:
    """Return the shadows after a switch, from which on the current one is of the new partition.

    It begins with the requests of the old one, because the node took them along: the shadow that
    always had the new partition has other ones. What each has saved beside it is to be
    ``levelled``, but not before ``follow`` has told all which requests are longer than was guessed.
    """
    current = shadow_of(seen.units(to), seen.current.population(), seen.at, terms)
    shadows = {p: t.shadow for p, t in seen.trials if p != to} | {seen.here: seen.current}
    trials = tuple((p, Trial(shadow, 0.0)) for p, shadow in shadows.items())
    return replace(seen, here=to, current=current, trials=trials)


def levelled(seen: Hindsight, terms: TermsOf) -> Hindsight:
    """Return the shadows when nobody has saved anything beside the present partition."""
    trials = tuple((p, _begun(t.shadow, seen.current, terms)) for p, t in seen.trials)
    return replace(seen, trials=trials)


def on_node(snapshot: Snapshot) -> Population:
    """Return the requests that are on the node, as far as the snapshot tells.

    Those that no unit can hold are left out: they will be refused.
    """
    decoding, waiting, drawn = [], [], 0
    for unit in snapshot.units:
        mean = unit.context_tokens // max(1, unit.requests)
        for k in range(unit.running):
            left = rest_of_output(snapshot, (k + 0.5) / unit.running)
            decoding.append(Decode(left, snapshot.now, mean + left))
        for prompt in unit.prompts:
            drawn += 1
            waiting.append(_job(snapshot, prompt, drawn))
    states = snapshot.layouts
    for request in snapshot.pool:
        if states and not any(state.can_hold(request) for state in states):
            continue
        drawn += 1
        job = _job(snapshot, request.prompt_tokens, drawn)
        kind = kind_of(request.priority, snapshot.targets, snapshot.output_tokens)
        waiting.append(job._replace(key=request.request_id, kind=kind))
    return Population(decoding, waiting, {})


def _job(snapshot: Snapshot, prompt: int, drawn: int) -> Job:
    tokens = max(1, prompt)
    return Job(snapshot.now, tokens, tokens, drawn_output(snapshot, drawn, tokens))
