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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from math import ceil, inf
from operator import attrgetter
from typing import NamedTuple

from shoal.policies.jobs import Decode, Guessed, Job, Kind
from shoal.policies.terms import Terms, TermsOf
from shoal.policies.unit_costs import Start, latest_first_token
from shoal.policies.values.batch import PromptWork
from shoal.policies.values.layouts import Layout

_turn = attrgetter("turn")


@dataclass(slots=True)
class Queue:
    """One unit of a shadow: what it computes, and what waits for that.

    Attributes:
        layout: the unit's.
        clock: when its present step ends, seconds.
        steps: how many steps have ended then.
        waiting: requests whose prompts are not computed, in order.
        computed: tokens of the first of them that are.
        queued: prompt tokens that are still to be computed.
        running: requests that decode; a heap.
        context: tokens whose KV a step of them reads.
        ended_cost: what the requests have cost here that have ended, seconds (``Decode.cost``).
        guessed: those of them of which the node has not said how long they are, by their keys.
        is_lane: whether it serves urgent requests, and no others.
    """

    layout: Layout
    clock: float
    steps: int = 0
    waiting: list[Job] = field(default_factory=list)
    computed: int = 0
    queued: int = 0
    running: list[Decode] = field(default_factory=list)
    context: int = 0
    ended_cost: float = 0.0
    guessed: dict[str, Guessed] = field(default_factory=dict)
    is_lane: bool = False

    def copy(self) -> "Queue":
        """Return a copy that shares nothing that changes."""
        return replace(
            self,
            waiting=self.waiting.copy(),
            running=self.running.copy(),
            guessed=self.guessed.copy(),
        )

    def add_prompt(self, job: Job, terms: Terms) -> None:
        """Take a request whose prompt is to be computed."""
        job = job._replace(turn=terms.turn(job))
        # What is computed of the first one is not left for others.
        insort_right(self.waiting, job, lo=bool(self.computed), key=_turn)
        self.queued += job.new

    def add_decode(self, one: Decode) -> None:
        """Take a request that decodes and has been in no unit: ``end`` counts its tokens."""
        self.context += one.tokens - one.end
        heappush(self.running, one._replace(end=self.steps + one.end))

    def find_cached(self, key: str, tokens: int, terms: Terms) -> None:
        """Note how much of a prompt was cached, if it is not being computed."""
        for k, job in enumerate(self.waiting[1 if self.computed else 0 :], bool(self.computed)):
            if job.key == key:
                del self.waiting[k]
                self.queued -= job.new
                self.add_prompt(job._replace(new=max(1, job.prompt - tokens)), terms)
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
        if key not in self.guessed:
            return False
        end = self.guessed.pop(key)
        if output:
            self._expect_ended(end, output, then, terms)
        return True

    def _expect_ended(self, end: Guessed, output: int, key: str, terms: Terms) -> None:
        """Note how many tokens a request will get, or has got, that a guess has ended here."""
        one = end.decode
        more = output - one.output
        if more <= 0:
            self.ended_cost += more * self._token_seconds(terms)
            return
        # It has not been here since its guessed end, so that time does not count.
        self.ended_cost -= one.cost(end.at)
        goes_on = one._replace(end=more, tokens=one.tokens + more, output=output, key=key)
        self.add_decode(goes_on.later(self.clock - end.at))

    def _expect_running(self, k: int, output: int, key: str, terms: Terms) -> None:
        """Note how many tokens the request at place ``k`` of ``running`` will get, or has got."""
        one = self.running[k]
        more = output - one.output
        late = self.steps - one.end - more
        then = one._replace(end=one.end + more, tokens=one.tokens + more, output=output, key=key)
        if late < 0:
            self.running[k] = then
        else:
            self.running[k] = self.running[-1]
            self.running.pop()
            self.context -= one.tokens - (one.end - self.steps)
            self.ended_cost += then.cost(
                max(one.start, self.clock - late * self._token_seconds(terms))
            )
        heapify(self.running)

    def _token_seconds(self, terms: Terms) -> float:
        """Return the seconds of a step that decodes what is here, and at least one request."""
        count = max(1, len(self.running))
        return terms.decode.step(count, self.context, self.context, count)

    def advance(self, until: float, terms: Terms) -> None:
        """Compute steps until one ends at ``until`` or later."""
        while self.clock < until and (self.waiting or self.running):
            if self.waiting and self._has_room(terms):
                self._step_with_prompts(terms)
            else:
                self._steps_of_decodes(until, terms)
        if self.clock < until < inf:
            self.clock = until

    def _has_room(self, terms: Terms) -> bool:
        if not self.running:
            return True
        fits = self.context + self.waiting[0].prompt <= terms.kv_tokens
        return fits and len(self.running) < terms.seats

    def _steps_of_decodes(self, until: float, terms: Terms) -> None:
        """Compute steps that only decode, until one ends at ``until`` or a request ends.

        They are taken at once: their mean context stands for each of theirs.
        """
        steps = self.running[0].end - self.steps
        if until < inf or steps <= 1:
            seconds = self._decode_seconds(self.context, terms)
            steps = min(steps, ceil((until - self.clock) / seconds)) if until < inf else steps
        if steps > 1:
            context = self.context + len(self.running) * (steps - 1) / 2
            seconds = self._decode_seconds(context, terms)
        self._pass_time(steps, steps * seconds)

    def _decode_seconds(self, context: float, terms: Terms) -> float:
        """Return the seconds of a step that decodes what is here and reads so many tokens.

        A switch may bring more requests than there is room for. They then take turns.
        """
        count = len(self.running)
        rounds = max(1.0, count / terms.seats, context / terms.kv_tokens)
        return rounds * terms.decode.step(count, context, context, count)

    def _pass_time(self, steps: int, seconds: float) -> None:
        """Let time pass in which every running request gets ``steps`` tokens."""
        self.clock += seconds
        self.steps += steps
        self.context += steps * len(self.running)
        while self.running and self.running[0].end <= self.steps:
            one = heappop(self.running)
            self.context -= one.tokens
            self._end(one)

    def _end(self, one: Decode) -> None:
        self.ended_cost += one.cost(self.clock)
        if one.key:
            self.guessed[one.key] = Guessed(self.clock, one)

    def _step_with_prompts(self, terms: Terms) -> None:
        """Compute a step with as many tokens of waiting prompts as find room (chunked prefill)."""
        decodes = len(self.running)
        budget = max(1, min(terms.chunk - decodes, terms.mixed_chunk if decodes else terms.chunk))
        space = terms.kv_tokens - self.context if decodes else inf
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
        self._pass_time(1, terms.prompt_step(decodes + tokens, self.context, pairs, decodes))
        for job in self.waiting[:done]:
            one = job.decoding(self.clock, self.steps)
            if one.output > 1:
                self.context += job.prompt + 1
                heappush(self.running, one)
            else:
                self._end(one)
        del self.waiting[:done]

    @property
    def keys(self) -> list[str]:
        """The requests whose length is a guess."""
        here = [one.key for one in self.running] + [job.key for job in self.waiting]
        return [*filter(None, here), *self.guessed]

    def cost_so_far(self, now: float) -> float:
        """Return what requests have cost here until now, in seconds.

        Broken promises of those that are still here are not in it.
        """
        here = sum(now - job.start for job in self.waiting)
        return self.ended_cost + here + sum(now - one.start for one in self.running)

    def predicted_start(self, job: Job, terms: Terms) -> Start:
        """Return what this unit makes of a request (``unit_costs.py``).

        It also waits for the present step, which may compute prompts of some of ``running``.
        """
        prompt, read = terms.prices.prompt, terms.prices.read
        output, queued = terms.output_tokens, self.queued
        others = len(self.waiting) + len(self.running)
        step = self.clock - job.start
        wait = (step if step > 0.0 else 0.0) + queued * prompt
        reads = output * (self.context + queued) * read + others * output / 2 * read * job.prompt
        own = terms.prices.seconds(PromptWork.of(job.prompt, job.new))
        return Start(wait + own, wait + reads + (1 + others) * own)


Units = Collection[tuple[Layout, bool]]
"""The layout of each unit, and whether it is kept for urgent requests."""


class Population(NamedTuple):
    """The requests that are on a node or in a shadow, whatever its units."""

    decoding: Sequence[Decode]
    """Requests that decode; ``end`` is how many more tokens each will generate."""
    waiting: Sequence[Job]
    """Requests whose prompts are not computed, each with what is left of it."""
    guessed: Mapping[str, Guessed]
    """Requests that seem to have ended, by their keys."""


@dataclass(slots=True)
class Shadow:
    """The units of one partition, and the requests that are in them.

    Attributes:
        queues: one for each unit.
        has_lane: whether some of them are kept for urgent requests.
    """

    queues: list[Queue]
    has_lane: bool = False

    def copy(self) -> "Shadow":
        """Return a copy that shares nothing that changes."""
        return Shadow([queue.copy() for queue in self.queues], self.has_lane)

    def advance(self, until: float, terms: TermsOf) -> None:
        """Compute steps until ``until``."""
        for queue in self.queues:
            if queue.clock < until:
                queue.advance(until, terms[queue.layout])

    def put(self, job: Job, terms: TermsOf) -> None:
        """Send a request to the unit where it costs least."""
        queues = self.open_to(job.kind)
        best = queues[0]
        if len(queues) > 1:
            starts = [queue.predicted_start(job, terms[queue.layout]) for queue in queues]
            bound = latest_first_token(min([start.first_token for start in starts]))
            costs = [inf if start.first_token > bound else start.cost for start in starts]
            best = queues[costs.index(min(costs))]
        best.add_prompt(job, terms[best.layout])

    def open_to(self, kind: Kind) -> list[Queue]:
        """Return the queues to which a request may go."""
        if not self.has_lane:
            return self.queues
        return [queue for queue in self.queues if queue.is_lane is kind.is_urgent]

    def expect(self, key: str, output: int, terms: TermsOf, *, known: bool) -> None:
        """Note how many tokens a request will get (``Queue.expect``)."""
        for queue in self.queues:
            if queue.expect(key, output, terms[queue.layout], known=known):
                return

    def find_cached(self, key: str, tokens: int, terms: TermsOf) -> None:
        """Note how much of a prompt was in the node's cache."""
        for queue in self.queues:
            queue.find_cached(key, tokens, terms[queue.layout])

    def guesses(self) -> list[tuple[str, int, int, int]]:
        """Return the requests that only a guess has ended here, and that may be longer.

        The numbers are the tokens of the prompt, those of the guess, and the most that the output
        may have.
        """
        ended = ((key, end.decode) for queue in self.queues for key, end in queue.guessed.items())
        return [
            (key, one.tokens - one.output, one.output, one.limit)
            for key, one in ended
            if one.output < one.limit
        ]

    def end_all(self, terms: TermsOf) -> None:
        """Note that no request is on the node: those that nobody has told the end of are gone."""
        for queue in self.queues:
            queue.guessed.clear()
            for key in queue.keys:
                queue.expect(key, 0, terms[queue.layout], known=True)

    def cost_so_far(self, now: float) -> float:
        """Return what requests have cost on all units until now, in seconds."""
        return sum(queue.cost_so_far(now) for queue in self.queues)

    @property
    def keys(self) -> list[str]:
        """The requests whose length is a guess."""
        return [key for queue in self.queues for key in queue.keys]

    @property
    def requests(self) -> int:
        """How many requests are there."""
        return sum(len(queue.waiting) + len(queue.running) for queue in self.queues)

    def final_cost(self, terms: TermsOf) -> float:
        """Return what requests will have cost on all units if no other comes, in seconds."""
        rest = self.copy()
        rest.advance(inf, terms)
        return sum(queue.ended_cost for queue in rest.queues)

    def population(self) -> Population:
        """Return the requests that are in it."""
        decoding, waiting, guessed = [], [], dict[str, Guessed]()
        for queue in self.queues:
            decoding += [one._replace(end=one.end - queue.steps) for one in queue.running]
            guessed |= queue.guessed
            for k, job in enumerate(queue.waiting):
                computed = 0 if k else queue.computed
                came = -inf if computed else job.came
                waiting.append(job._replace(new=job.new - computed, came=came))
        return Population(decoding, waiting, guessed)


def shadow_of(units: Units, requests: Population, now: float, terms: TermsOf) -> Shadow:
    """Return the shadow of a partition in which these requests are.

    What they have cost before it begins does not count in it.

    Args:
        units: those of the partition.
        requests: those that decode are divided so that units have about equal work, and those that
            wait go where they cost least.
        now: when the shadow begins, seconds.
        terms: what units can do.
    """
    queues = [Queue(layout, now, is_lane=is_lane) for layout, is_lane in units]
    shadow = Shadow(queues, any(queue.is_lane for queue in queues))
    for one in sorted(requests.decoding, key=lambda one: -one.end):
        among = shadow.open_to(one.kind)
        emptiest = min(among, key=lambda queue: len(queue.running) / queue.layout.world_size)
        emptiest.add_decode(one._replace(start=now))
    for job in sorted(requests.waiting, key=attrgetter("since")):
        shadow.put(job._replace(start=now, came=job.since), terms)
    # Of these, only what comes after their guessed end will count.
    for key, end in requests.guessed.items():
        one = end.decode.later(now - end.at)._replace(start=now)
        shadow.open_to(one.kind)[0].guessed[key] = Guessed(now, one)
    return shadow
