"""The partition that is predicted to break the fewest promises.

Given a target of TTFT and TPOT per priority class and the node's cost model, every candidate
partition is judged by what its units would do to the requests there are and to those that keep
coming: one layout for all, or one group beside single engines, which then serves the most urgent.
Without targets or a cost model it does what ``flying`` does.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from policies.cost_model import Batch, CostModel
from policies.flying import FLYING
from policies.partition import Partition, degrees, groups_of
from policies.plan import Plan, Policy
from policies.snapshot import NORMAL_PRIORITY, PoolRequest, Snapshot, Target
from policies.static import dispatch_least_loaded, place_group, with_singles

GAIN = 0.1
"""Part of the requests that a new partition must save: less is within the model's error."""
SETTLE_SECONDS = 3.0
"""How long a layout is kept unless it breaks promises."""
HORIZON_SECONDS = 10.0
"""How long a queue that grows is looked at: half of it is what a request finds on average."""


@dataclass(frozen=True, slots=True)
class Class:
    """The requests of one target."""

    target: Target
    requests: float


@dataclass(frozen=True, slots=True)
class Work:
    """What one request of the node is, on average."""

    prompt: int
    queued_prompts: int
    arrivals: float
    """Per second."""


def _plan(snapshot: Snapshot, /) -> Plan:
    model = snapshot.cost_model
    if model is None or not snapshot.targets:
        return FLYING.plan(snapshot)
    dispatches = dispatch_least_loaded(snapshot, prefer=_preference)
    if snapshot.switching:
        return Plan(dispatches)
    target = _best(snapshot, model)
    return Plan(dispatches, None if target == snapshot.partition else target, "soft")


def _preference(request: PoolRequest) -> int:
    """Urgent requests go to the widest unit, all others leave it to them."""
    return -1 if request.priority < NORMAL_PRIORITY else 1


def _best(snapshot: Snapshot, model: CostModel) -> Partition:
    """Return the best candidate, or the partition there is when that gains too little."""
    needed = _degree_for_all(snapshot)
    candidates = [c for c in _candidates(snapshot) if max(map(len, c)) >= needed]
    classes, work = _classes(snapshot), _work(snapshot)
    scores = {c: _score(model, c, classes, work) for c in candidates}
    now = scores.get(snapshot.partition)
    if not candidates:
        return snapshot.partition
    best = min(candidates, key=lambda c: scores[c])
    if now is None:
        return best
    saved = now[0] - scores[best][0]
    if saved > GAIN * max(1.0, snapshot.requests):
        return best
    faster = scores[best] <= now and scores[best][1] < (1 - GAIN) * now[1]
    return best if faster and snapshot.since_switch > SETTLE_SECONDS else snapshot.partition


def _candidates(snapshot: Snapshot) -> Iterator[Partition]:
    """Yield one layout for all, and a group of every width beside single engines."""
    yield snapshot.partition
    for degree in degrees(snapshot.max_group):
        yield with_singles(snapshot, groups_of(snapshot.engines, degree))
        if 1 < degree < snapshot.engines:
            yield with_singles(snapshot, place_group(snapshot, degree))


def _degree_for_all(snapshot: Snapshot) -> int:
    """Return the narrowest layout that holds every request there is, as far as one does."""
    running = max((unit.longest_tokens for unit in snapshot.units), default=0)
    for layout in snapshot.layouts:
        if running <= layout.max_model_len and all(map(layout.can_hold, snapshot.pool)):
            return layout.degree
    return 1


def _classes(snapshot: Snapshot) -> list[Class]:
    members = list(Counter(request.priority for request in snapshot.pool).items())
    members += [pair for unit in snapshot.units for pair in unit.by_priority]
    # The pool is seen in part: what is not seen is of its last class.
    hidden = max(0, snapshot.waiting - len(snapshot.pool))
    counts = [0.0] * len(snapshot.targets)
    for priority, count in members:
        counts[_class_of(priority, snapshot.targets)] += count
    counts[-1] += hidden
    return [Class(t, n) for t, n in zip(snapshot.targets, counts, strict=True)]


def _class_of(priority: int, targets: Sequence[Target]) -> int:
    """Return the first class that is no more urgent than the priority, else the last."""
    return next((k for k, t in enumerate(targets) if priority <= t.priority), len(targets) - 1)


def _work(snapshot: Snapshot) -> Work:
    tokens = snapshot.waiting_tokens + sum(unit.context_tokens for unit in snapshot.units)
    queued = snapshot.waiting_tokens + sum(unit.prefill_tokens for unit in snapshot.units)
    return Work(int(tokens / max(1, snapshot.requests)), queued, snapshot.arrival_rate)


def _score(
    model: CostModel, candidate: Partition, classes: Sequence[Class], work: Work
) -> tuple[float, float]:
    """Return the promises that a partition breaks, and its mean share of them used."""
    broken = used = total = 0.0
    rest = sorted(candidate, key=len, reverse=True)
    for rank, members in enumerate(classes):
        # A more urgent class has the widest unit to itself, as long as one is left for the others.
        last = rank == len(classes) - 1 or len(rest) == 1
        units, rest = (rest, rest) if last or not members.requests else (rest[:1], rest[1:])
        engines = sum(map(len, units))
        for degree, count in Counter(map(len, units)).items():
            part = degree / engines
            ttft, tpot = _latency(model, degree, members.requests * part, work, part)
            share = max(ttft / members.target.ttft_seconds, tpot / members.target.tpot_seconds)
            weight = max(members.requests, 1.0) * part * count
            broken += weight * (share > 1) * (members.requests > 0)
            used += share * weight
            total += weight
    return broken, used / total


def _latency(
    model: CostModel, degree: int, requests: float, work: Work, part: float
) -> tuple[float, float]:
    """Return TTFT and TPOT on a unit that takes its part of the requests, queue and arrivals."""
    decodes = max(1, round(requests))
    step = model.step_seconds(degree, Batch(decodes, decodes * work.prompt))
    prompt = Batch(prefill_tokens=work.prompt, prefill_context=work.prompt // 2)
    prefill = model.step_seconds(degree, prompt)
    load = work.arrivals * part * prefill
    queue = work.queued_prompts / max(1, work.prompt) * part * prefill
    growth = max(0.0, load - 1) * HORIZON_SECONDS / 2
    return prefill + step + queue + growth, step / max(0.05, 1 - load)


SLO = Policy("slo", _plan, decides_layout=True)
"""See the module."""
