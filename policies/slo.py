"""The partition that is predicted to break the fewest promises.

Given a target of TTFT and TPOT per priority class and the node's cost model, every candidate
partition is judged by what it would do, over the next seconds, to the requests there are and to
those that keep coming. A candidate first computes again what it moves (soft preempt). The most
urgent class has the widest units to itself where others are narrower.
Without targets or a cost model it does what ``flying`` does.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from policies.cost_model import Batch, CostModel
from policies.flying import FLYING
from policies.partition import Group, Partition, degrees, groups_of
from policies.plan import Plan, Policy
from policies.snapshot import PoolRequest, Snapshot, Target
from policies.static import dispatch_least_loaded, place_group, with_singles

HORIZON_SECONDS = 10.0
"""How long the load is taken to stay as it is."""
GAIN = 0.01
"""Part of the requests that a switch must save: less is within the model's error."""
WORTH = 0.2
"""Part of the broken promises that it must save: where all is lost, a switch only adds to it."""
SETTLE_SECONDS = 10.0
"""A switch this long after the last one must save twice that part, an earlier one more."""
USUAL = 16
"""Requests of the usual length that are added to those there are: a few say little of the next."""
FULL = 0.95
"""Load from which on a queue grows."""
TTFT_SHARPNESS, TPOT_SHARPNESS = 4, 16
"""How suddenly a promise gets unsafe as the prediction of the mean comes near it: TTFT differs much
more from one request to the next than TPOT."""
PAUSES = 2.0
SURGES = ((1.0, 1.0), (2.0, 0.1), (4.0, 0.02))
"""By how much the load may rise, and what that counts for: a layout should be ready for it."""


@dataclass(frozen=True, slots=True)
class Class:
    """The requests of one target."""

    target: Target
    running: float
    waiting: float


@dataclass(frozen=True, slots=True)
class Work:
    """What is asked of the whole node, and what the mean request is."""

    requests: float
    prompt: int
    output: float
    rate: float
    """Requests per second."""
    decodes: float
    """Output tokens per second."""
    queued: float
    """Prompt tokens not computed yet."""

    def times(self, factor: float) -> "Work":
        """Return the work when everything comes faster by this factor."""
        return replace(self, rate=factor * self.rate, decodes=factor * self.decodes)


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a unit of one degree is, in seconds."""

    step: float
    """Of a step of no request."""
    decode: float
    """That each request adds to a step."""
    prompt: float
    """That the mean prompt adds to a step."""


def _plan(snapshot: Snapshot, /) -> Plan:
    model = snapshot.cost_model
    if model is None or not snapshot.targets:
        return FLYING.plan(snapshot)

    def prefer(request: PoolRequest) -> int:
        """Send the most urgent class to the widest units, and the others elsewhere."""
        if len(snapshot.targets) == 1:
            return 0
        return -1 if request.priority <= snapshot.targets[0].priority else 1

    dispatches = dispatch_least_loaded(snapshot, prefer=prefer)
    if snapshot.switching or not snapshot.requests:
        return Plan(dispatches)
    target = _best(snapshot, model)
    if target == snapshot.partition:
        return Plan(dispatches)
    return Plan(dispatches, target, "soft", "slo")


def _best(snapshot: Snapshot, model: CostModel) -> Partition:
    """Return the best candidate, or the partition there is when that gains too little."""
    needed = _degree_for_all(snapshot)
    candidates = {c: None for c in _candidates(snapshot) if max(map(len, c)) >= needed}
    if not candidates:
        return snapshot.partition
    work, paces = _work(snapshot, model)
    classes = _classes(snapshot)

    def broken(candidate: Partition) -> float:
        surges = ((weight, work.times(factor)) for factor, weight in SURGES)
        return sum(w * _broken(snapshot, candidate, classes, each, paces) for w, each in surges)

    affected = work.requests + work.rate * HORIZON_SECONDS
    least = GAIN * affected * (1 + SETTLE_SECONDS / max(0.1, snapshot.since_switch))
    now = broken(snapshot.partition) if snapshot.partition in candidates else math.inf
    bearable = min(now - least, (1 - WORTH) * now)
    if bearable <= 0:
        return snapshot.partition
    scores = {c: broken(c) for c in candidates if c != snapshot.partition}
    best = min(scores, key=scores.__getitem__, default=snapshot.partition)
    return best if scores.get(best, math.inf) < bearable else snapshot.partition


def _candidates(snapshot: Snapshot) -> Iterator[Partition]:
    """Yield what there is, one layout for all, and a group of every width beside narrower ones."""
    yield snapshot.partition
    for wide in degrees(snapshot.max_group):
        yield with_singles(snapshot, groups_of(snapshot.engines, wide))
        if wide == snapshot.engines:
            continue
        group = place_group(snapshot, wide)
        engines = {engine for members in group for engine in members}
        for narrow in degrees(wide // 2):
            rest = [g for g in groups_of(snapshot.engines, narrow) if not engines.intersection(g)]
            yield with_singles(snapshot, [*group, *rest])


def _degree_for_all(snapshot: Snapshot) -> int:
    """Return the narrowest layout that holds every request there is, as far as one does."""
    running = max((unit.longest_tokens for unit in snapshot.units), default=0)
    for layout in snapshot.layouts:
        if running <= layout.max_model_len and all(map(layout.can_hold, snapshot.pool)):
            return layout.degree
    return 1


# --- what is asked ---


def _classes(snapshot: Snapshot) -> list[Class]:
    targets = snapshot.targets
    running, waiting = [0.0] * len(targets), [0.0] * len(targets)
    for unit in snapshot.units:
        for priority, count in unit.by_priority:
            running[_class_of(priority, targets)] += count
    for request in snapshot.pool:
        waiting[_class_of(request.priority, targets)] += 1
    # The pool is seen in part: what is not seen is of its last class.
    waiting[-1] += max(0, snapshot.waiting - len(snapshot.pool))
    return [Class(*each) for each in zip(targets, running, waiting, strict=True)]


def _class_of(priority: int, targets: Sequence[Target]) -> int:
    """Return the first class that is no more urgent than the priority, else the last."""
    return next((k for k, t in enumerate(targets) if priority <= t.priority), len(targets) - 1)


def _work(snapshot: Snapshot, model: CostModel) -> tuple[Work, Mapping[int, Pace]]:
    """Return what is asked of the node, and how fast units of every degree do it."""
    units, requests = snapshot.units, snapshot.requests
    tokens = snapshot.waiting_tokens + sum(unit.context_tokens for unit in units)
    known, output = USUAL * snapshot.prompt_tokens, snapshot.output_tokens
    prompt = int((tokens + known) / (requests + USUAL)) + 1
    widths = {len(unit.group) for unit in units} | set(degrees(snapshot.max_group))
    paces = {degree: _pace(model, degree, prompt, output) for degree in widths}
    rate, produced = snapshot.arrival_rate, 0.0
    for unit in units:
        pace, part = paces[len(unit.group)], len(unit.group) / snapshot.engines
        step = pace.step + pace.decode * unit.running
        produced += unit.running / step * max(1 - FULL, 1 - rate * part * pace.prompt)
    queued = snapshot.waiting_tokens + sum(unit.prefill_tokens for unit in units)
    # What runs has to be decoded, also when no more comes.
    return Work(requests, prompt, output, rate, max(produced, rate * output), queued), paces


def _pace(model: CostModel, degree: int, prompt: int, output: float) -> Pace:
    few, many = 8, 64
    context = prompt + int(output / 2)
    step = model.step_seconds(degree, Batch(few, few * context))
    decode = (model.step_seconds(degree, Batch(many, many * context)) - step) / (many - few)
    mixed = model.step_seconds(degree, Batch(few, few * context, prompt, prompt // 2))
    return Pace(step - few * decode, decode, max(0.0, mixed - step))


# --- what comes of it ---


def _broken(
    snapshot: Snapshot,
    candidate: Partition,
    classes: Sequence[Class],
    work: Work,
    paces: Mapping[int, Pace],
) -> float:
    """Return how many promises are broken over the horizon."""
    moved = [unit for unit in snapshot.units if unit.group not in candidate]
    queued = work.queued + sum(u.context_tokens + u.requests * work.output / 2 for u in moved)
    # The steps in flight end first: that of a prompt where there are any.
    pause = max((PAUSES * paces[len(unit.group)].prompt for unit in moved), default=0.0)
    total = 0.0
    for units, served in _served(candidate, classes):
        engines = sum(map(len, units))
        present = sum(c.running + c.waiting for c in served) / work.requests
        for degree, count in Counter(map(len, units)).items():
            part = degree / engines
            total += count * part * _broken_by_unit(
                paces[degree], served, work, present * part, present * part * queued, pause
            )
    return total


def _served(
    candidate: Partition, classes: Sequence[Class]
) -> Iterator[tuple[Sequence[Group], Sequence[Class]]]:
    """Yield units and the classes that are sent to them (``_plan``)."""
    widest = max(map(len, candidate))
    wide = [group for group in candidate if len(group) == widest]
    rest = [group for group in candidate if len(group) < widest]
    if not rest or len(classes) == 1:
        yield candidate, classes
    else:
        yield wide, classes[:1]
        yield rest, classes[1:]


def _broken_by_unit(
    pace: Pace, classes: Sequence[Class], work: Work, part: float, queued: float, pause: float
) -> float:
    """Return the promises that are broken if all of these requests were on units like this one.

    Args:
        pace: the unit's.
        classes: whom it serves.
        work: of the node.
        part: of the node's load that this unit has.
        queued: prompt tokens that it computes first.
    """
    rate = work.rate * part
    load = rate * pace.prompt + part * work.decodes * pace.decode
    room = max(1 - FULL, 1 - load)
    tpot = pace.step / room
    drain = pause + queued / work.prompt * pace.prompt / room
    growing = max(0.0, load - FULL) * HORIZON_SECONDS / 2
    ttft = growing + pace.prompt * (1 + rate * pace.prompt / 2 / room) + 1.5 * tpot
    stalled = tpot + drain / 2 / work.output
    # What is left over when the horizon ends breaks the promises of those who come then.
    left_over = max(0.0, 1 - FULL / load) if load > 0 else 0.0
    broken = 0.0
    for members in classes:
        arriving = work.rate * (members.running + members.waiting) / work.requests
        soon = members.waiting + arriving * min(HORIZON_SECONDS, drain)
        later = arriving * max(0.0, HORIZON_SECONDS - drain)
        target = members.target
        broken += arriving * HORIZON_SECONDS * left_over
        broken += members.running * _risk(0.0, stalled, target)
        broken += soon * _risk(ttft + drain / 2, stalled, target)
        broken += later * _risk(ttft, tpot, target)
    return broken


def _risk(ttft: float, tpot: float, target: Target) -> float:
    """Return how likely a promise is broken, 1/2 where the prediction is what was promised."""
    late = min(9.0, ttft / target.ttft_seconds) ** TTFT_SHARPNESS
    slow = min(9.0, tpot / target.tpot_seconds) ** TPOT_SHARPNESS
    return 1 - 1 / (1 + late) / (1 + slow)


SLO = Policy("slo", _plan, decides_layout=True)
"""See the module."""
