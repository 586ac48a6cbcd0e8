"""Shadow nodes: what the real traffic costs in another layout.

A shadow has the units of one partition, each with its queue: prompts that wait, requests that
decode. It gets every request that comes, sends it to the unit where it costs least, as the node
does, and computes step after step, in the times of the cost model: chunks of prompts, of which long
ones let shorter ones pass as on the node, with a token for each decoding request. Steps that only
decode are taken many at once. So the spread of the prompts' lengths, bursts, placement and backlogs
count as they come.

How long an output will be is a guess until the request has ended on the node. Then every shadow is
told (``Shadow.expect``): a request that still decodes there gets its true end, and one that the
guess has ended too early decodes again.
"""

from bisect import insort_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from math import ceil, inf
from operator import attrgetter
from typing import NamedTuple

from shoal.policies.unit_costs import Prices, Start, latest, patience
from shoal.policies.values.batch import PromptWork
from shoal.policies.values.layouts import Layout
from shoal.policies.values.pace import Pace


class Job(NamedTuple):
    """A request whose prompt waits in a shadow."""

    start: float
    """When it came, or when the shadow began, seconds."""
    new: int
    """Tokens to compute before its first token."""
    prompt: int
    """Tokens of its prompt."""
    output: int
    """Tokens that it will generate."""
    key: str = ""
    """Its request, while ``output`` is a guess."""
    came: float = inf
    """When it came, if that was before ``start``; ``-inf``: its prompt had begun."""
    turn: float = 0.0
    """Prompts are computed in this order."""


class Decode(NamedTuple):
    """A request that decodes in a shadow."""

    end: int
    """The step of its unit that generates its last token."""
    start: float
    tokens: int
    """All its tokens at its end."""
    output: int = 0
    """Tokens that it generates until then."""
    key: str = ""
    """See ``Job``."""


class Guessed(NamedTuple):
    """A request that has ended in a shadow, and not yet on the node."""

    at: float
    """When it ended in the shadow, seconds."""
    start: float
    tokens: int
    output: int


class Terms(NamedTuple):
    """What a unit of one layout can do."""

    decode: Pace
    tp: Pace
    """Steps in TP with prompts."""
    sp: Pace
    above: float
    """Tokens above which a step with prompts runs in SP; infinite if none does."""
    seats: int
    """Requests that it decodes at once."""
    tokens: float
    """Tokens that its KV cache holds."""
    chunk: int
    """Most tokens of a step."""
    mixed: int
    """Most tokens of prompts, where others decode."""
    prices: Prices
    output: float = 0.0
    """Tokens of the mean output."""
    short_first: bool = True
    """See ``Snapshot``."""
    drafts: float = 0.0
    """See ``Speculation``."""

    def turn(self, job: "Job") -> float:
        """Return when it is a prompt's turn (``unit_costs.patience``)."""
        came = _came(job)
        if not self.short_first:
            return came
        return came + patience(self.prices.seconds(PromptWork.of(job.prompt, job.new)))

    def prompts(self, tokens: int, context: float, pairs: float, decodes: int) -> float:
        """Return the seconds of a step with prompts."""
        pace = self.sp if tokens + self.drafts * decodes > self.above else self.tp
        return pace.step(tokens, context, context + pairs, decodes)


_turn = attrgetter("turn")


def _came(job: Job) -> float:
    return min(job.came, job.start)


@dataclass(slots=True)
class Queue:
    """One unit of a shadow.

    Attributes:
        clock: when its present step ends, seconds.
        steps: how many steps have ended then.
        waiting: requests whose prompts are not computed, in order.
        computed: tokens of the first of them that are.
        queued: prompt tokens that are still to be computed.
        running: requests that decode; a heap.
        context: tokens whose KV a step of them reads.
        ended: seconds that the requests have spent here that have ended.
        guessed: those of them of which the node has not said how long they are.
    """

    layout: Layout
    clock: float
    steps: int = 0
    waiting: list[Job] = field(default_factory=list)
    computed: int = 0
    queued: int = 0
    running: list[Decode] = field(default_factory=list)
    context: int = 0
    ended: float = 0.0
    guessed: dict[str, Guessed] = field(default_factory=dict)

    def copy(self) -> "Queue":
        """Return a copy that shares nothing that changes."""
        return replace(
            self,
            waiting=self.waiting.copy(),
            running=self.running.copy(),
            guessed=self.guessed.copy(),
        )

    def put(self, job: Job, terms: Terms) -> None:
        """Take a request whose prompt is to be computed."""
        job = job._replace(turn=terms.turn(job))
        # What is computed of the first one is not left for others.
        insort_right(self.waiting, job, lo=bool(self.computed), key=_turn)
        self.queued += job.new

    def decode(
        self, start: float, tokens: int, left: int, *, output: int = 0, key: str = ""
    ) -> None:
        """Take a request that decodes, and that has ``left`` more tokens to generate."""
        self.context += tokens
        heappush(self.running, Decode(self.steps + left, start, tokens + left, output, key))

    def find_cached(self, key: str, tokens: int, terms: Terms) -> None:
        """Note how much of a prompt was cached, if it is not being computed."""
        for k, job in enumerate(self.waiting[1 if self.computed else 0 :], bool(self.computed)):
            if job.key == key:
                del self.waiting[k]
                self.queued -= job.new
                self.put(job._replace(new=max(1, job.prompt - tokens)), terms)
                return

    def expect(self, key: str, output: int, terms: Terms, *, known: bool) -> bool:
        """Note how many tokens a request will get, or has got; return False if it is not here.

        Args:
            key: the request.
            output: its tokens; 0 if it has ended, and nobody knows how many it got.
            terms: what the unit can do.
            known: whether this is no guess.
        """
        then = "" if known else key
        for k, job in enumerate(self.waiting):
            if job.key == key:
                self.waiting[k] = job._replace(output=max(1, output), key=then)
                return True
        for k, one in enumerate(self.running):
            if one.key == key:
                self._expect_running(k, output or one.output - one.end + self.steps, then, terms)
                return True
        end = self.guessed.pop(key, None)
        if end is None or not output:
            return end is not None
        more = output - end.output
        if more <= 0:
            self.ended += more * self._pace(terms)
        else:
            # It has not been here since its guessed end, so that time does not count.
            self.ended -= end.at - end.start
            start = end.start + self.clock - end.at
            self.decode(start, end.tokens, more, output=output, key=then)
        return True

    def _expect_running(self, k: int, output: int, key: str, terms: Terms) -> None:
        one = self.running[k]
        more = output - one.output
        late = self.steps - one.end - more
        if late < 0:
            self.running[k] = Decode(one.end + more, one.start, one.tokens + more, output, key)
        else:
            self.running[k] = self.running[-1]
            self.running.pop()
            self.context -= one.tokens - (one.end - self.steps)
            self.ended += max(0.0, self.clock - one.start - late * self._pace(terms))
        heapify(self.running)

    def _pace(self, terms: Terms) -> float:
        """Return the seconds of a step that decodes what is here, and at least one request."""
        count = max(1, len(self.running))
        return terms.decode.step(count, self.context, self.context, count)

    def advance(self, until: float, terms: Terms) -> None:
        """Compute steps until one ends at ``until`` or later."""
        while self.clock < until and (self.waiting or self.running):
            if self.waiting and self._has_room(terms):
                self._prompts(terms)
            else:
                self._decodes(until, terms)
        if self.clock < until < inf:
            self.clock = until

    def _has_room(self, terms: Terms) -> bool:
        if not self.running:
            return True
        fits = self.context + self.waiting[0].prompt <= terms.tokens
        return fits and len(self.running) < terms.seats

    def _decodes(self, until: float, terms: Terms) -> None:
        count = len(self.running)
        steps = self.running[0].end - self.steps
        if until < inf or steps <= 1:
            seconds = self._turns(self.context, terms)
            seconds *= terms.decode.step(count, self.context, self.context, count)
            steps = min(steps, ceil((until - self.clock) / seconds)) if until < inf else steps
        if steps > 1:
            context = self.context + count * (steps - 1) / 2
            seconds = self._turns(context, terms)
            seconds *= terms.decode.step(count, context, context, count)
        self._step(steps, steps * seconds)

    def _turns(self, context: float, terms: Terms) -> float:
        """Return how many times as long each waits as if there were room for all at once.

        A switch may bring more than there is room for.
        """
        return max(1.0, len(self.running) / terms.seats, context / terms.tokens)

    def _step(self, steps: int, seconds: float) -> None:
        """Let time pass in which every running request gets ``steps`` tokens."""
        self.clock += seconds
        self.steps += steps
        self.context += steps * len(self.running)
        while self.running and self.running[0].end <= self.steps:
            _, start, tokens, output, key = heappop(self.running)
            self.ended += self.clock - start
            self.context -= tokens
            if key:
                self.guessed[key] = Guessed(self.clock, start, tokens, output)

    def _prompts(self, terms: Terms) -> None:
        """Compute a step that has as many tokens of waiting prompts as find room."""
        decodes = len(self.running)
        budget = max(1, min(terms.chunk - decodes, terms.mixed if decodes else terms.chunk))
        space = terms.tokens - self.context if decodes else inf
        tokens, pairs, done = 0, 0.0, 0
        for job in self.waiting[: terms.seats - decodes]:
            if job.prompt > space or not budget:
                break
            space -= job.prompt
            left = job.new - self.computed
            share = min(left, budget)
            pairs += share * (job.prompt - left + share / 2)
            tokens += share
            budget -= share
            if share < left:
                self.computed += share
                break
            self.computed = 0
            done += 1
        self.queued -= tokens
        self._step(1, terms.prompts(decodes + tokens, self.context, pairs, decodes))
        for job in self.waiting[:done]:
            if job.output > 1:
                left = job.output - 1
                self.decode(job.start, job.prompt + 1, left, output=job.output, key=job.key)
                continue
            self.ended += self.clock - job.start
            if job.key:
                self.guessed[job.key] = Guessed(self.clock, job.start, job.prompt + 1, 1)
        del self.waiting[:done]

    @property
    def keys(self) -> list[str]:
        """The requests whose length is a guess."""
        here = [one.key for one in self.running] + [job.key for job in self.waiting]
        return [*filter(None, here), *self.guessed]

    def spent(self, now: float) -> float:
        """Return the seconds that requests have spent here until now."""
        here = sum(now - job.start for job in self.waiting)
        return self.ended + here + sum(now - one.start for one in self.running)

    def start(self, job: Job, terms: Terms) -> Start:
        """Return what this unit makes of a request (``unit_costs.py``).

        It also waits for the present step, which may compute prompts of some of ``running``.
        """
        prompt, read = terms.prices.prompt, terms.prices.read
        output, queued = terms.output, self.queued
        others = len(self.waiting) + len(self.running)
        step = self.clock - job.start
        wait = (step if step > 0.0 else 0.0) + queued * prompt
        reads = output * (self.context + queued) * read + others * output / 2 * read * job.prompt
        own = terms.prices.seconds(PromptWork.of(job.prompt, job.new))
        return Start(wait + own, wait + reads + (1 + others) * own)


@dataclass(slots=True)
class Shadow:
    """The units of one partition."""

    queues: list[Queue]

    def copy(self) -> "Shadow":
        """Return a copy that shares nothing that changes."""
        return Shadow([queue.copy() for queue in self.queues])

    def advance(self, until: float, terms: Mapping[Layout, Terms]) -> None:
        """Compute steps until ``until``."""
        for queue in self.queues:
            if queue.clock < until:
                queue.advance(until, terms[queue.layout])

    def put(self, job: Job, terms: Mapping[Layout, Terms]) -> None:
        """Send a request to the unit where it costs least."""
        best = self.queues[0]
        if len(self.queues) > 1:
            starts = [queue.start(job, terms[queue.layout]) for queue in self.queues]
            bound = latest(min([start.first_token for start in starts]))
            costs = [inf if start.first_token > bound else start.cost for start in starts]
            best = self.queues[costs.index(min(costs))]
        best.put(job, terms[best.layout])

    def expect(self, key: str, output: int, terms: Mapping[Layout, Terms], *, known: bool) -> None:
        """Note how many tokens a request will get (``Queue.expect``)."""
        for queue in self.queues:
            if queue.expect(key, output, terms[queue.layout], known=known):
                return

    def find_cached(self, key: str, tokens: int, terms: Mapping[Layout, Terms]) -> None:
        """Note how much of a prompt was in the node's cache."""
        for queue in self.queues:
            queue.find_cached(key, tokens, terms[queue.layout])

    def guesses(self) -> list[tuple[str, int, int]]:
        """Return the requests that only a guess has ended here, with their prompts' tokens, too.

        The last number is that of the guess.
        """
        ended = (item for queue in self.queues for item in queue.guessed.items())
        return [(key, one.tokens - one.output, one.output) for key, one in ended]

    def end_all(self, terms: Mapping[Layout, Terms]) -> None:
        """Note that no request is on the node: those that nobody has told the end of are gone."""
        for queue in self.queues:
            queue.guessed.clear()
            for key in queue.keys:
                queue.expect(key, 0, terms[queue.layout], known=True)

    def spent(self, now: float) -> float:
        """Return the seconds that requests have spent on all units until now."""
        return sum(queue.spent(now) for queue in self.queues)

    @property
    def keys(self) -> list[str]:
        """The requests whose length is a guess."""
        return [key for queue in self.queues for key in queue.keys]

    @property
    def requests(self) -> int:
        """How many requests are there."""
        return sum(len(queue.waiting) + len(queue.running) for queue in self.queues)

    def all_in_all(self, terms: Mapping[Layout, Terms]) -> float:
        """Return the seconds that requests will have spent on all units if no other comes."""
        rest = self.copy()
        rest.advance(inf, terms)
        return sum(queue.ended for queue in rest.queues)


class Present(NamedTuple):
    """The requests that are on a node."""

    decoding: Sequence[Decode]
    """Requests that decode; ``end`` is how many more tokens each will generate."""
    waiting: Sequence[Job]
    guessed: Mapping[str, Guessed]
    """Requests that seem to have ended."""


def fork(
    layouts: Iterable[Layout], here: Present, now: float, terms: Mapping[Layout, Terms]
) -> Shadow:
    """Return the shadow of a partition in which these requests are.

    Args:
        layouts: those of the partition's units.
        here: the requests; those that decode are divided so that units have about equal work.
        now: when the shadow begins, seconds.
        terms: what units can do.
    """
    shadow = Shadow([Queue(layout, now) for layout in layouts])
    for one in sorted(here.decoding, key=lambda one: -one.end):
        emptiest = min(shadow.queues, key=lambda one: len(one.running) / one.layout.world_size)
        tokens = one.tokens - one.end
        emptiest.decode(now, tokens, one.end, output=one.output, key=one.key)
    for job in sorted(here.waiting, key=_came):
        shadow.put(job._replace(start=now, came=_came(job)), terms)
    # None of their time counts in this shadow, except what comes after their guessed end.
    shadow.queues[0].guessed.update(
        (key, one._replace(at=now, start=now)) for key, one in here.guessed.items()
    )
    return shadow


def present(shadow: Shadow) -> Present:
    """Return the requests that are in a shadow."""
    decoding, waiting, guessed = [], [], dict[str, Guessed]()
    for queue in shadow.queues:
        decoding += [one._replace(end=one.end - queue.steps) for one in queue.running]
        guessed |= queue.guessed
        for k, job in enumerate(queue.waiting):
            computed = 0 if k else queue.computed
            came = -inf if computed else job.came
            waiting.append(job._replace(new=job.new - computed, came=came))
    return Present(decoding, waiting, guessed)
