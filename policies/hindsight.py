"""What each candidate would have cost so far, with the requests that really came.

Every candidate has a shadow (``shadow.py``), and so has the current partition, so that what the
model does not know cancels out. A shadow begins with the requests that are on the node.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shoal.policies.guessed_outputs import UNLIMITED, Outputs
from shoal.policies.jobs import Decode, Job, kind_of
from shoal.policies.shadow import Population, Shadow, Units, shadow_of
from shoal.policies.terms import TermsOf
from shoal.policies.values.layouts import Unit
from shoal.policies.values.partition import Partition
from shoal.policies.values.snapshot import PoolRequest, Snapshot

LATEST_SECONDS = 10.0
"""The requests of so many seconds are remembered. ``foresight.py`` lets them come again."""
LEAST_SPAN_SECONDS = 1.0
"""They count as having come within at least this time."""


class News(NamedTuple):
    """What has become of requests; the fields are those of ``Snapshot``."""

    arrived: tuple[PoolRequest, ...] = ()
    """Requests that have come."""
    placed: tuple[tuple[str, int], ...] = ()
    """Requests that were sent to units, each with the cached tokens of its prompt."""
    ended: tuple[tuple[str, int], ...] = ()
    """Requests that have left the node, each with the tokens that it got; 0: unknown."""

    def and_of(self, later: "Snapshot | News") -> "News":
        """Return it with what a snapshot tells, or with later news."""
        return News(
            self.arrived + later.arrived,
            self.placed + later.placed,
            self.ended + later.ended,
        )


class Length(NamedTuple):
    """How long the output of a request is."""

    key: str
    """The request."""
    tokens: int
    """0: it has ended, and nobody knows."""
    is_known: bool
    """Whether the node has said so; otherwise it is a guess."""


class Beginning(NamedTuple):
    """The shadows as they were when a trial began. No time passes in them, and nobody comes."""

    trial: Shadow
    """The candidate's."""
    current: Shadow
    """The current partition's."""
    guessed: frozenset[str]
    """The requests of which the node has not said how long they are."""

    def told(self, lengths: Iterable[Length], terms: TermsOf) -> "Beginning":
        """Return them with what has become known of the requests."""
        both, known = (self.trial.copy(), self.current.copy()), set[str]()
        for length in lengths:
            for shadow in both:
                shadow.expect(length.key, length.tokens, terms, known=length.is_known)
            if length.is_known:
                known.add(length.key)
        return Beginning(*both, self.guessed - known)

    def extra_cost(self, terms: TermsOf) -> float:
        """Return by how many seconds more the requests cost in the candidate, if no other comes."""
        return self.trial.final_cost(terms) - self.current.final_cost(terms)


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate's shadow, and from where its savings count."""

    shadow: Shadow
    baseline: float = 0.0
    """By how many seconds more the requests of the moment when it began cost in it than in the
    current partition: what only these would save is no saving."""
    credit: float = 0.0
    """Seconds that it counts as having saved beside that."""
    began: float = 0.0
    """Since when its savings count, seconds."""
    beginning: Beginning | None = None
    """From what ``baseline`` follows, while some lengths in it are guesses. A wrong guess of how
    long these requests will be would otherwise be taken for a saving, or for a loss, when they end.
    """

    @classmethod
    def begun(cls, shadow: Shadow, current: Shadow, terms: TermsOf, now: float) -> "Trial":
        """Return the trial of a shadow that has saved nothing so far beside the current one."""
        beginning = Beginning(shadow, current, frozenset(shadow.keys + current.keys))
        return cls(shadow, beginning.extra_cost(terms), began=now, beginning=beginning)

    def told(self, lengths: Iterable[Length], terms: TermsOf) -> "Trial":
        """Return the trial after what has become known of requests."""
        if self.beginning is None:
            return self
        news = [length for length in lengths if length.key in self.beginning.guessed]
        if not news:
            return self
        beginning = self.beginning.told(news, terms)
        kept = beginning if beginning.guessed else None
        return replace(self, baseline=beginning.extra_cost(terms), beginning=kept)


@dataclass(frozen=True, slots=True)
class Hindsight:
    """The shadows of one moment. They are never changed: methods return new ones."""

    at: float
    """The moment, seconds."""
    here: Partition
    """The current partition."""
    current: Shadow
    """Its shadow."""
    trials: tuple[tuple[Partition, Trial], ...]
    """Those of the candidates."""
    terms: TermsOf
    """What units can do."""
    drawn: int = 0
    """How many outputs were drawn."""
    latest: tuple[Job, ...] = ()
    """The jobs of the last ``LATEST_SECONDS``."""
    began: float = 0.0
    """Since when ``latest`` knows of them, seconds."""
    lane: Unit | None = None
    """The group that urgent requests have to themselves, where a partition has it."""

    @classmethod
    def of(
        cls,
        snapshot: Snapshot,
        candidates: Collection[Partition],
        terms: TermsOf,
        lane: Unit | None,
    ) -> "Hindsight":
        """Return shadows that begin with what is on the node now.

        Args:
            snapshot: the node.
            candidates: the partitions that get a shadow.
            terms: what units can do.
            lane: see ``Hindsight``.
        """
        now, here = snapshot.now, snapshot.partition
        current = shadow_of(_units(here, lane), population_of(snapshot), now, terms)
        trials = tuple((candidate, Trial(current)) for candidate in candidates)
        blank = cls(now, here, current, trials, terms, began=now, lane=lane)
        return blank.restarted(candidates)

    def is_of(self, here: Partition, candidates: Collection[Partition], lane: Unit | None) -> bool:
        """Return whether these are the shadows of these partitions, with this lane."""
        trials = {partition for partition, _ in self.trials}
        return (self.here, trials, self.lane) == (here, set(candidates), lane)

    def units(self, partition: Partition) -> Units:
        """Return a partition's units for its shadow."""
        return _units(partition, self.lane)

    @property
    def rest(self) -> float:
        """What the present requests will still cost if no other comes, in seconds."""
        return self.current.final_cost(self.terms) - self.current.cost_so_far(self.at)

    @property
    def span(self) -> float:
        """The seconds in which the latest jobs came."""
        return min(LATEST_SECONDS, max(LEAST_SPAN_SECONDS, self.at - self.began))

    def savings(self) -> dict[Partition, float]:
        """Return the seconds of requests that each candidate would have saved.

        They include those of requests that are still there, as if no other came.
        """
        cost = self.current.final_cost(self.terms)
        return {
            partition: trial.credit + trial.baseline + cost - trial.shadow.final_cost(self.terms)
            for partition, trial in self.trials
        }

    def age(self, partition: Partition) -> float:
        """Return for how many seconds the savings of a candidate have counted."""
        return self.at - dict(self.trials)[partition].began

    def followed(self, snapshot: Snapshot, news: News) -> "Hindsight":
        """Return the shadows as they are now, after what has become of requests."""
        shadows = [self.current.copy(), *(trial.shadow.copy() for _, trial in self.trials)]
        current = shadows[0]
        outputs = Outputs.of(snapshot).with_running(_running(current))
        cached, drawn = dict(news.placed), self.drawn + len(news.arrived)
        arrived = [
            _job_of(
                snapshot,
                request,
                cached.pop(request.request_id, round(snapshot.hit_share * request.prompt_tokens)),
                outputs,
                serial,
            )
            for serial, request in enumerate(news.arrived, self.drawn + 1)
        ]
        for shadow in shadows:
            self._advance(shadow, snapshot, arrived, cached, news.ended)
        lengths = [Length(key, tokens, is_known=True) for key, tokens in news.ended]
        # The current shadow goes as the node does: what has not ended on the node is longer.
        for key, prompt, tokens, limit in current.guesses():
            drawn += 1
            longer = outputs.longer(drawn, prompt, tokens, limit)
            lengths.append(Length(key, longer, is_known=False))
            for shadow in shadows:
                shadow.expect(key, longer, self.terms, known=False)
        trials = tuple(
            (partition, replace(trial.told(lengths, self.terms), shadow=shadow))
            for (partition, trial), shadow in zip(self.trials, shadows[1:], strict=True)
        )
        kept = (job for job in self.latest if job.start > snapshot.now - LATEST_SECONDS)
        return replace(
            self,
            at=snapshot.now,
            current=current,
            trials=trials,
            drawn=drawn,
            latest=(*kept, *arrived),
        )

    def _advance(
        self,
        shadow: Shadow,
        snapshot: Snapshot,
        arrived: Iterable[Job],
        cached: Mapping[str, int],
        ended: Iterable[tuple[str, int]],
    ) -> None:
        """Bring a shadow to the moment of a snapshot.

        Args:
            shadow: the shadow.
            snapshot: the node.
            arrived: the requests that have come.
            cached: of earlier requests, the tokens that their units have in the prefix cache.
            ended: see ``Snapshot.ended``.
        """
        for job in arrived:
            shadow.advance(job.start, self.terms)
            shadow.put(job, self.terms)
        for key, tokens in cached.items():
            shadow.find_cached(key, tokens, self.terms)
        shadow.advance(snapshot.now, self.terms)
        for key, tokens in ended:
            shadow.expect(key, tokens, self.terms, known=True)
        if not snapshot.requests:
            shadow.end_all(self.terms)

    def restarted(self, partitions: Collection[Partition]) -> "Hindsight":
        """Return the shadows when those of some candidates begin again, from where the node is."""
        requests = self.current.population()

        def restart(partition: Partition) -> Trial:
            shadow = shadow_of(self.units(partition), requests, self.at, self.terms)
            return Trial.begun(shadow, self.current, self.terms, self.at)

        trials = tuple((p, restart(p) if p in partitions else t) for p, t in self.trials)
        return replace(self, trials=trials)

    def credited(self, by: Mapping[Partition, float]) -> "Hindsight":
        """Return the shadows when candidates count as having saved so many seconds more."""
        trials = tuple((p, replace(t, credit=t.credit + by.get(p, 0.0))) for p, t in self.trials)
        return replace(self, trials=trials)

    def after_switch(self, to: Partition) -> "Hindsight":
        """Return the shadows after a switch, from which on the current one is of the new partition.

        It begins with the requests of the old one, because the node took them along: the shadow
        that always had the new partition has other ones. What each has saved beside it is to be
        ``levelled``, but not before ``followed`` has told all which requests are longer than was
        guessed.
        """
        requests = self.current.population()
        current = shadow_of(self.units(to), requests, self.at, self.terms)
        shadows = {p: t.shadow for p, t in self.trials if p != to} | {self.here: self.current}
        trials = tuple((partition, Trial(shadow)) for partition, shadow in shadows.items())
        return replace(self, here=to, current=current, trials=trials)

    def levelled(self) -> "Hindsight":
        """Return the shadows when nobody has saved anything beside the current partition."""
        trials = tuple(
            (partition, Trial.begun(trial.shadow, self.current, self.terms, self.at))
            for partition, trial in self.trials
        )
        return replace(self, trials=trials)


def clump_size(times: Collection[float], window: float, evenly: float) -> float:
    """Return how many requests come at once, at least 1.

    It is the variance of their number in a window, as a multiple of its mean (the index of
    dispersion for counts), which is 1 if they come one by one at random.

    Args:
        times: when requests came, in seconds from any moment; at least one.
        window: seconds.
        evenly: their mean number in a window.
    """
    windows = Counter(int(at / window) for at in times).values()
    return max(1.0, sum(n * n for n in windows) / len(times) - evenly)


def population_of(snapshot: Snapshot) -> Population:
    """Return the requests that are on the node, as far as the snapshot tells.

    Those that no unit can hold are left out: they will be refused.
    """
    decoding, waiting, drawn = [], [], 0
    outputs = Outputs.of(snapshot)
    for unit in snapshot.units:
        mean = unit.context_tokens // max(1, unit.requests)
        for k in range(unit.running):
            left = outputs.rest((k + 0.5) / unit.running)
            decoding.append(Decode(left, snapshot.now, mean + left))
        for prompt in unit.prompts:
            drawn += 1
            waiting.append(_waiting_job(snapshot.now, prompt, outputs, drawn))
    states = snapshot.layouts
    for request in snapshot.pool:
        if states and not any(state.can_hold(request) for state in states):
            continue
        drawn += 1
        job = _job_of(snapshot, request, 0, outputs, drawn)
        waiting.append(job._replace(start=snapshot.now))
    return Population(decoding, waiting, {})


def _waiting_job(now: float, prompt: int, outputs: Outputs, serial: int) -> Job:
    """Return a request whose prompt waits, and of which nothing is computed.

    Args:
        now: seconds.
        prompt: tokens of its prompt.
        outputs: what is known of the lengths of outputs.
        serial: numbers the draws.
    """
    tokens = max(1, prompt)
    return Job(now, tokens, tokens, outputs.drawn(serial, tokens))


def _job_of(
    snapshot: Snapshot, request: PoolRequest, cached: int, outputs: Outputs, serial: int
) -> Job:
    """Return a request that has come, for shadows.

    Args:
        snapshot: the node.
        request: the request.
        cached: tokens of its prompt that need not be computed.
        outputs: what is known of the lengths of outputs.
        serial: numbers the draws.
    """
    prompt, limit = request.prompt_tokens, request.output_limit or UNLIMITED
    kind = kind_of(request.priority, snapshot.targets, snapshot.output_tokens)
    output = outputs.drawn(serial, prompt, limit)
    new = max(1, prompt - cached)
    return Job(request.arrival, new, prompt, output, request.request_id, limit, kind=kind)


def _running(shadow: Shadow) -> Sequence[tuple[int, int]]:
    """Return of each request that decodes in a shadow the tokens of its prompt and those so far."""
    return [
        (one.tokens - one.output, one.output - (one.end - queue.steps))
        for queue in shadow.queues
        for one in queue.running
        if one.output
    ]


def _units(partition: Partition, lane: Unit | None) -> Units:
    return [(unit.layout, unit == lane) for unit in partition]
