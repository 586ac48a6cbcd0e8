"""Shadow nodes: what the real traffic costs in another layout.

A shadow has the units of one partition, each with its queue: prompts that wait, requests that
decode. It gets every request that comes, sends it to the unit where it costs least, as the node
does, and computes step after step, in the times of the cost model: chunks of prompts, first come
first served, with a token for each decoding request. Steps that only decode are taken many at once.
So the spread of the prompts' lengths, bursts, placement and backlogs count as they come.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import ceil, inf
from typing import NamedTuple

from shoal.policies.unit_costs import Prices
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


class Decode(NamedTuple):
    """A request that decodes in a shadow."""

    end: int
    """The step of its unit that generates its last token."""
    start: float
    tokens: int
    """All its tokens at its end."""


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
    prices: Prices

    def prompts(self, tokens: int, context: float, pairs: float) -> float:
        """Return the seconds of a step with prompts."""
        pace = self.sp if tokens > self.above else self.tp
        return pace.step(tokens, context, context + pairs)


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

    def copy(self) -> "Queue":
        """Return a copy that shares nothing that changes."""
        return replace(self, waiting=self.waiting.copy(), running=self.running.copy())

    def put(self, job: Job) -> None:
        """Take a request whose prompt is to be computed."""
        self.waiting.append(job)
        self.queued += job.new

    def decode(self, start: float, tokens: int, left: int) -> None:
        """Take a request that decodes, and that has ``left`` more tokens to generate."""
        self.context += tokens
        heappush(self.running, Decode(self.steps + left, start, tokens + left))

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
        seconds = terms.decode.step(count, self.context, self.context)
        steps = self.running[0].end - self.steps
        if until < inf:
            steps = min(steps, ceil((until - self.clock) / seconds))
        if steps > 1:
            context = self.context + count * (steps - 1) / 2
            seconds = terms.decode.step(count, context, context)
        self._step(steps, steps * seconds)

    def _step(self, steps: int, seconds: float) -> None:
        """Let time pass in which every running request gets ``steps`` tokens."""
        self.clock += seconds
        self.steps += steps
        self.context += steps * len(self.running)
        while self.running and self.running[0].end <= self.steps:
            _, start, tokens = heappop(self.running)
            self.ended += self.clock - start
            self.context -= tokens

    def _prompts(self, terms: Terms) -> None:
        """Compute a step that has as many tokens of waiting prompts as find room."""
        decodes = len(self.running)
        budget = max(1, terms.chunk - decodes)
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
        self._step(1, terms.prompts(decodes + tokens, self.context, pairs))
        for job in self.waiting[:done]:
            if job.output > 1:
                self.decode(job.start, job.prompt + 1, job.output - 1)
            else:
                self.ended += self.clock - job.start
        del self.waiting[:done]

    def spent(self, now: float) -> float:
        """Return the seconds that requests have spent here until now."""
        here = sum(now - job.start for job in self.waiting)
        return self.ended + here + sum(now - one.start for one in self.running)

    def cost(self, job: Job, prices: Prices) -> float:
        """Return what a request costs all requests here (``unit_costs.py``)."""
        others = len(self.waiting) + len(self.running)
        base = self.queued * prices.prompt + job.output * self.context * prices.read
        read = others * job.output / 2 * prices.read
        return base + (1 + others) * job.new * prices.prompt + read * job.prompt


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
            best = min(self.queues, key=lambda one: one.cost(job, terms[one.layout].prices))
        best.put(job)

    def spent(self, now: float) -> float:
        """Return the seconds that requests have spent on all units until now."""
        return sum(queue.spent(now) for queue in self.queues)

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

    decoding: Sequence[tuple[int, int]]
    """Tokens of each request that decodes, and how many more it will generate."""
    waiting: Sequence[tuple[int, int, int]]
    """``new``, ``prompt`` and ``output`` of each job."""


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
    for tokens, left in sorted(here.decoding, key=lambda one: -one[1]):
        emptiest = min(shadow.queues, key=lambda one: len(one.running) / one.layout.world_size)
        emptiest.decode(now, tokens, left)
    for new, prompt, output in here.waiting:
        shadow.put(Job(now, new, prompt, output), terms)
    return shadow


def present(shadow: Shadow) -> Present:
    """Return the requests that are in a shadow."""
    decoding, waiting = [], []
    for queue in shadow.queues:
        for one in queue.running:
            left = one.end - queue.steps
            decoding.append((one.tokens - left, left))
        for k, job in enumerate(queue.waiting):
            computed = 0 if k else queue.computed
            waiting.append((job.new - computed, job.prompt, job.output))
    return Present(decoding, waiting)
