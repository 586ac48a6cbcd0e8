"""What each candidate would have cost so far, with the requests that really came.

Every candidate has a shadow (``shadow.py``), and so has the current partition, so that what the
model does not know cancels out. A shadow begins with the requests that are on the node.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from shoal.policies.shadow import Job, Present, Shadow, Terms, fork, present
from shoal.policies.unit_costs import prices_of
from shoal.policies.values.batch import Mode, StepKind
from shoal.policies.values.layouts import Layout
from shoal.policies.values.partition import Partition
from shoal.policies.values.snapshot import PoolRequest, Snapshot, StepPredictor

CHUNK_TOKENS = 8192
"""Limit of the tokens of one step: vLLM's usual bound."""
LEAST_OUTPUTS = 16
"""So many outputs must have ended before lengths are drawn from theirs; until then, all are the
mean.
"""
GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, are spread evenly, however many there are."""

TermsOf = Mapping[Layout, Terms]


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate's shadow."""

    shadow: Shadow
    kept: float
    """By how many seconds more its requests were to take than the current partition's when it
    began: what only the requests of that moment would save is no saving."""


@dataclass(frozen=True, slots=True)
class Hindsight:
    """The shadows. They are never changed: ``follow`` returns new ones."""

    at: float
    here: Partition
    current: Shadow
    trials: tuple[tuple[Partition, Trial], ...]
    drawn: int = 0
    """How many outputs were drawn."""


def terms_of(snapshot: Snapshot, model: StepPredictor, layouts: Iterable[Layout]) -> TermsOf:
    """Return what a unit of each layout can do."""
    above = dict(snapshot.sp_above)
    terms = {}
    for layout in layouts:
        state = snapshot.layout(layout)
        tp = model.pace(layout, StepKind.PREFILL)
        terms[layout] = Terms(
            decode=model.pace(layout, StepKind.DECODE),
            tp=tp,
            sp=model.pace(layout, StepKind.PREFILL, Mode.SP) if layout in above else tp,
            above=above.get(layout, inf),
            seats=256 if state is None else state.slots,
            tokens=inf if state is None else state.total_blocks * state.block_tokens,
            chunk=CHUNK_TOKENS,
            prices=prices_of(snapshot, layout),
        )
    return terms


def begin(snapshot: Snapshot, candidates: Collection[Partition], terms: TermsOf) -> Hindsight:
    """Return shadows that begin with what is on the node now."""
    here = on_node(snapshot)

    layouts = (unit.layout for unit in snapshot.partition)
    current = fork(layouts, here, snapshot.now, terms)
    trials = tuple((candidate, Trial(current, 0.0)) for candidate in candidates)
    seen = Hindsight(snapshot.now, snapshot.partition, current, trials)
    return renewed(seen, candidates, terms)


def follow(
    seen: Hindsight, snapshot: Snapshot, arrived: Sequence[PoolRequest], terms: TermsOf
) -> Hindsight:
    """Return the shadows as they are now, with the requests that have arrived."""
    current = seen.current.copy()
    trials = [(partition, trial, trial.shadow.copy()) for partition, trial in seen.trials]
    shadows = [current, *(shadow for _, _, shadow in trials)]
    drawn = seen.drawn
    for request in arrived:
        drawn += 1
        cached = round(snapshot.hit_share * request.prompt_tokens)
        prompt = request.prompt_tokens
        output = drawn_output(snapshot, drawn)
        job = Job(request.arrival, max(1, prompt - cached), prompt, output)
        for shadow in shadows:
            shadow.advance(request.arrival, terms)
            shadow.put(job, terms)
    for shadow in shadows:
        shadow.advance(snapshot.now, terms)
    kept = tuple((p, Trial(shadow, t.kept)) for p, t, shadow in trials)
    return Hindsight(snapshot.now, seen.here, current, kept, drawn)


def saved(seen: Hindsight, terms: TermsOf) -> dict[Partition, float]:
    """Return the seconds of requests that each candidate would have saved.

    They include those of requests that are still there, as if no other came.
    """
    here = seen.current.all_in_all(terms)
    return {
        partition: trial.kept + here - trial.shadow.all_in_all(terms)
        for partition, trial in seen.trials
    }


def fewer(seen: Hindsight) -> dict[Partition, int]:
    """Return how many requests fewer each candidate would have on the node now.

    By Little's law these are the seconds of requests that it saves in each second.
    """
    here = seen.current.requests
    return {partition: here - trial.shadow.requests for partition, trial in seen.trials}


def renewed(seen: Hindsight, again: Collection[Partition], terms: TermsOf) -> Hindsight:
    """Return shadows of which those of some candidates begin again, from where the node is."""
    here, base = present(seen.current), seen.current.all_in_all(terms)
    trials = []
    for partition, trial in seen.trials:
        if partition in again:
            shadow = fork((unit.layout for unit in partition), here, seen.at, terms)
            trial = Trial(shadow, shadow.all_in_all(terms) - base)
        trials.append((partition, trial))
    return Hindsight(seen.at, seen.here, seen.current, tuple(trials), seen.drawn)


def raised(seen: Hindsight, by: Mapping[Partition, float]) -> Hindsight:
    """Return shadows of candidates that count as having saved so much more."""
    trials = tuple((p, Trial(t.shadow, t.kept + by.get(p, 0.0))) for p, t in seen.trials)
    return Hindsight(seen.at, seen.here, seen.current, trials, seen.drawn)


def moved(seen: Hindsight, to: Partition, terms: TermsOf) -> Hindsight:
    """Return the shadows after a switch: nobody has saved anything beside the new partition."""
    shadows = {p: t.shadow for p, t in seen.trials} | {seen.here: seen.current}
    current = shadows.pop(to)
    base = current.all_in_all(terms)
    trials = tuple((p, Trial(s, s.all_in_all(terms) - base)) for p, s in shadows.items())
    return Hindsight(seen.at, to, current, trials, seen.drawn)


def on_node(snapshot: Snapshot) -> Present:
    """Return the requests that are on the node, as far as the snapshot tells."""
    decoding, waiting, drawn = [], [], 0
    for unit in snapshot.units:
        mean = unit.context_tokens // max(1, unit.requests)
        for k in range(unit.running):
            left = rest_of_output(snapshot, (k + 0.5) / unit.running)
            decoding.append((mean, left))
        for prompt in unit.prompts:
            drawn += 1
            waiting.append((max(1, prompt), max(1, prompt), drawn_output(snapshot, drawn)))
    for request in snapshot.pool:
        drawn += 1
        prompt = max(1, request.prompt_tokens)
        waiting.append((prompt, prompt, drawn_output(snapshot, drawn)))
    return Present(decoding, waiting)


def drawn_output(snapshot: Snapshot, serial: int) -> int:
    """Return the tokens that the next request is expected to generate."""
    known = snapshot.outputs
    if len(known) < LEAST_OUTPUTS:
        return max(1, round(snapshot.output_tokens))
    return max(1, known[int(serial * GOLDEN % 1 * len(known))])


def rest_of_output(snapshot: Snapshot, share: float) -> int:
    """Return what is left of the output of a running request; ``share`` numbers them from 0 to 1.

    A running request is more likely a long one, and is seen anywhere in its course.
    """
    known = snapshot.outputs
    if len(known) < LEAST_OUTPUTS:
        return max(1, round(share * snapshot.output_tokens))
    place = share * sum(known)
    for tokens in known:
        if place < tokens:
            return max(1, round(place))
        place -= tokens
    return known[-1]
