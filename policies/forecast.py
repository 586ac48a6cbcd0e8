"""Predicts for a partition, with the cost model, its broken promises and the time of requests.

A unit computes one step after another for its decoding requests, and each prompt makes one of these
steps longer. If ``load`` is the share of the time that prompts and the growth of the batch take, a
token takes ``step / (1 - load)``. Waiting requests, and those that a move computes again, come
first; they drain at the speed at which the unit computes prompts.

A step in SP costs the host the same for one prompt as for many. So a prompt that is alone in a step
takes longer than its share of a full step. The former time counts until every step has a prompt,
the latter for full units.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.policies.values.batch import Batch, Mode
from shoal.policies.values.layouts import Layout, Unit, layouts_up_to
from shoal.policies.values.partition import Partition
from shoal.policies.values.snapshot import Snapshot, StepPredictor, Target

NO_PROMISE = Target(0, math.inf, math.inf)
"""The target of requests without a promise."""
HORIZON_SECONDS = 10.0
"""How long the load is assumed to stay as it is."""
SURGES = ((1.0, 1.0), (2.0, 0.3), (4.0, 0.2), (8.0, 0.1))
"""Factors by which the load may rise, and their weights. A layout should be ready for a rise."""
USUAL = 16
"""Requests of the usual length that are added to the present ones, because a few requests say
little about the next ones."""
FULL = 0.95
"""Load above which a queue grows."""
TTFT_SHARPNESS, TPOT_SHARPNESS = 4, 16
"""How suddenly a promise becomes unsafe as the predicted mean comes near the target. TTFT varies
much more between requests than TPOT."""
LASTS_SECONDS = 60.0
"""How long the load is assumed to last when layouts are compared by speed. A move of running
requests must pay for itself in this time."""
TICKS = tuple(0.4 * 1.26**k for k in range(16))
"""The steps that divide this time. The first are the shortest, because the requests that are
present decide what happens first."""
CHUNK_TOKENS = 8192
"""Approximate limit of prompt tokens in one step: vLLM's usual bound."""
FEW, MANY = 8, 64
"""Sizes of two batches whose times tell the time of a step from what each request adds to it."""


@dataclass(frozen=True, slots=True)
class Class:
    """The requests of one target."""

    target: Target
    running: float
    waiting: float


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a unit of one layout is, in seconds."""

    step: float
    """The time of a step without requests."""
    decode: float
    """The time that each decoding request adds to a step."""
    prompt: float
    """The time that the mean prompt adds to a step if it is the only prompt."""
    batched: float
    """The time that the mean prompt adds if a step in SP batches as many prompts as it can."""

    def room(self, step: float, rate: float, growth: float = 0.0) -> float:
        """Return the share of the time that is left to decode; none is left if it is 0 or less.

        Args:
            step: time of a step that computes no prompt, in seconds.
            rate: prompts per second. If there are more prompts than steps, they share steps.
            growth: share of the time that the growth of the batch takes.
        """
        alone = max(1 - (rate * self.prompt + growth), step / (step + self.prompt))
        return min(1 - (rate * self.batched + growth), alone)


@dataclass(frozen=True, slots=True)
class Share:
    """The work of each of several equal units."""

    pace: Pace
    classes: Sequence[Class]
    part: float
    """One unit's share of the node's load."""
    requests: float
    """Share of the classes' requests that all of these units have together."""
    queued: float
    """What one unit computes first, in prompts of the usual length. For moved requests this
    includes their outputs so far."""
    waiting: float
    """Number of requests for which it computes that."""
    units: int
    """Number of these units."""
    seats: float
    """Requests of the usual length that one unit decodes at once."""


class Forecast:
    """Judges partitions of the node of one snapshot.

    Args:
        snapshot: the node.
        model: predicts step times.
    """

    def __init__(self, snapshot: Snapshot, model: StepPredictor) -> None:
        self._snapshot = snapshot
        self._classes = _classes(snapshot, snapshot.targets or (NO_PROMISE,))
        self._prompt = usual_prompt(snapshot)
        units = snapshot.units
        layouts = {state.unit.layout for state in units} | set(layouts_up_to(snapshot.max_group))
        self._paces = {layout: self._pace(model, layout) for layout in layouts}
        # Running requests must be decoded even if no more arrive.
        coming = snapshot.arrival_rate * snapshot.output_tokens
        self._decodes = max(coming, self._produced())
        self._queued = snapshot.waiting_tokens + sum(unit.prefill_tokens for unit in units)

    @property
    def affected(self) -> float:
        """Number of requests that are on the node, or arrive before the horizon ends."""
        return self._snapshot.requests + self._snapshot.arrival_rate * HORIZON_SECONDS

    def broken(self, candidate: Partition) -> float:
        """Return how many promises a partition breaks, including weighted ones in case of a surge.

        Requests of units that are not in the partition are moved: all their tokens are recomputed.
        """
        shares = list(self._shares(candidate))
        return sum(
            weight * share.requests * self._broken_by(share, surge)
            for surge, weight in SURGES
            for share in shares
        )

    def seconds(self, candidate: Partition) -> float:
        """Return the sum of the seconds that requests spend on the node while its load lasts.

        At least one request is assumed to arrive, so that an idle node has a fastest partition.
        """
        return sum(share.units * self._seconds_by(share) for share in self._shares(candidate))

    def _pace(self, model: StepPredictor, layout: Layout) -> Pace:
        prompt = round(self._prompt)
        context = prompt + round(self._snapshot.output_tokens / 2)

        def seconds(batch: Batch) -> float:
            return model.step_seconds(layout, batch, self._snapshot.mode(layout, batch))

        few = seconds(Batch(FEW, FEW * context))
        many = seconds(Batch(MANY, MANY * context))
        decode = (many - few) / (MANY - FEW)

        def added(prompts: int) -> float:
            """Return the time that each of ``prompts`` prompts adds to a step."""
            mixed = seconds(Batch(FEW, FEW * context, prompts * prompt, prompt // 2))
            return max(0.0, mixed - few) / prompts

        alone = batched = added(1)
        if self._snapshot.mode(layout, Batch(prefill_tokens=CHUNK_TOKENS)) is Mode.SP:
            batched = min(alone, added(max(1, CHUNK_TOKENS // max(1, prompt))))
        return Pace(few - FEW * decode, decode, alone, batched)

    def _produced(self) -> float:
        """Return the tokens per second that the current units decode."""
        rate, produced = self._snapshot.arrival_rate / self._snapshot.engines, 0.0
        for unit in self._snapshot.units:
            pace = self._paces[unit.unit.layout]
            step = pace.step + pace.decode * unit.running
            left = pace.room(step, rate * unit.unit.size)
            produced += unit.running / step * max(1 - FULL, left)
        return produced

    def _shares(self, candidate: Partition) -> Iterator[Share]:
        moved = [unit for unit in self._snapshot.units if unit.unit not in candidate]
        context = self._snapshot.output_tokens / 2
        again = sum(unit.context_tokens + unit.requests * context for unit in moved)
        stay = [unit for unit in self._snapshot.units if unit.unit in candidate]
        first = self._snapshot.waiting + sum(unit.requests for unit in moved)
        first += sum(unit.waiting for unit in stay)
        for units, classes in served(candidate, self._classes):
            here = sum(c.running + c.waiting for c in classes)
            present = here / self._snapshot.requests if self._snapshot.requests else 1.0
            engines = sum(unit.size for unit in units)
            for layout, count in Counter(unit.layout for unit in units).items():
                size = layout.world_size
                part = present * size / engines
                queued = part * (self._queued + again) / self._prompt
                pace = self._paces[layout]
                requests = size * count / engines
                seats = self._seats(layout)
                yield Share(pace, classes, part, requests, queued, part * first, count, seats)

    def _seats(self, layout: Layout) -> float:
        """Return how many requests of the usual length a unit decodes at once."""
        state = self._snapshot.layout(layout)
        tokens = self._prompt + self._snapshot.output_tokens / 2
        return math.inf if state is None else state.seats(tokens)

    def _seconds_by(self, share: Share) -> float:
        """Return the seconds that requests spend on one of these units, by a fluid model.

        Requests flow in, wait and then decode. A token takes one step, which prompts make longer.
        """
        if not share.part:
            return 0.0  # no request is sent to these units
        pace, output = share.pace, self._snapshot.output_tokens
        rate = share.part * max(self._snapshot.arrival_rate, 1 / LASTS_SECONDS)
        chunk = max(1.0, CHUNK_TOKENS / self._prompt)
        work, waiting, spent = share.queued, share.waiting, 0.0
        decoding = max(0.0, share.part * self._snapshot.requests - waiting)
        for tick in TICKS:
            wanted, arriving = work / tick + rate, waiting / tick + rate
            step = pace.step + pace.decode * min(decoding, share.seats)
            left, longest = pace.room(step, wanted), step + chunk * pace.batched
            tpot = min(longest, step / left) if left > 0 else longest
            stay = output * tpot
            free = max(0.0, (share.seats - decoding) / tick + decoding / stay)
            done = min(1.0, chunk / tpot / wanted, free / arriving)
            started = done * arriving
            before, level = waiting + decoding, started * stay
            work, waiting = (1 - done) * tick * wanted, (1 - done) * tick * arriving
            decoding = level + (decoding - level) * math.exp(-tick / stay)
            spent += tick * ((before + waiting + decoding) / 2 + started * pace.prompt)
        return spent

    def _broken_by(self, share: Share, surge: float) -> float:
        """Return how many promises would be broken if all requests were on units of this share."""
        pace, output = share.pace, self._snapshot.output_tokens
        rate = surge * share.part * self._snapshot.arrival_rate
        growth = surge * share.part * self._decodes * pace.decode
        load = rate * pace.batched + growth
        room = max(1 - FULL, 1 - load)
        tpot = pace.step / max(1 - FULL, pace.room(pace.step, rate, growth))
        drain = share.queued * pace.batched / room
        growing = max(0.0, load - FULL) * HORIZON_SECONDS / 2
        ttft = growing + pace.prompt * (1 + rate * pace.prompt / 2 / room) + 1.5 * tpot
        stalled = tpot + drain / 2 / output
        # The promises of requests that are left over at the end of the horizon are broken.
        left_over = HORIZON_SECONDS * max(0.0, 1 - FULL / max(FULL, load))
        broken, node_rate = 0.0, self._snapshot.arrival_rate / self._snapshot.requests
        for members in share.classes:
            arriving = node_rate * (members.running + members.waiting)
            soon = members.waiting + arriving * min(HORIZON_SECONDS, drain)
            later = arriving * max(0.0, HORIZON_SECONDS - drain)
            broken += arriving * left_over
            broken += members.running * _risk(0.0, stalled, members.target)
            broken += soon * _risk(ttft + drain / 2, stalled, members.target)
            broken += later * _risk(ttft, tpot, members.target)
        return broken


def usual_prompt(snapshot: Snapshot) -> float:
    """Return the prompt tokens of the mean request, from the present and the latest requests."""
    here = snapshot.waiting_tokens + sum(unit.context_tokens for unit in snapshot.units)
    return (here + USUAL * snapshot.prompt_tokens) / (snapshot.requests + USUAL)


def served(
    partition: Partition, classes: Sequence[Class]
) -> Iterator[tuple[Sequence[Unit], Sequence[Class]]]:
    """Yield units and the classes that they serve.

    If units differ in size, the most urgent class has the widest ones to itself.
    """
    widest = max(unit.size for unit in partition)
    wide = [unit for unit in partition if unit.size == widest]
    rest = [unit for unit in partition if unit.size < widest]
    if not rest or len(classes) == 1:
        yield partition, classes
    else:
        yield wide, classes[:1]
        yield rest, classes[1:]


def _classes(snapshot: Snapshot, targets: Sequence[Target]) -> list[Class]:
    running, waiting = [0.0] * len(targets), [0.0] * len(targets)
    for unit in snapshot.units:
        for priority, count in unit.by_priority:
            running[_class_of(priority, targets)] += count
    for priority, count in Counter(request.priority for request in snapshot.pool).items():
        waiting[_class_of(priority, targets)] += count
    # The snapshot has only the head of the pool; the rest counts as the least urgent class.
    waiting[-1] += max(0, snapshot.waiting - len(snapshot.pool))
    return [Class(*each) for each in zip(targets, running, waiting, strict=True)]


def _class_of(priority: int, targets: Sequence[Target]) -> int:
    """Return the first class that is not more urgent than the priority, otherwise the last."""
    return next((k for k, t in enumerate(targets) if priority <= t.priority), len(targets) - 1)


def _risk(ttft: float, tpot: float, target: Target) -> float:
    """Return how likely it is, given the predicted means, that at least one target is missed."""
    late = min(9.0, ttft / target.ttft_seconds) ** TTFT_SHARPNESS
    slow = min(9.0, tpot / target.tpot_seconds) ** TPOT_SHARPNESS
    return 1 - 1 / (1 + late) / (1 + slow)
