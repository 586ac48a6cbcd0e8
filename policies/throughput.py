"""How many requests per second partitions serve while there are always more requests waiting.

All requests are taken to have the mean prompt and the mean output, and every unit to be full. In a
layout for all engines, a unit computes the prompt of the next request, in steps in which all others
decode, whenever one has ended. In a *split*, single engines compute prompts and hand requests over
to groups, where these decode. A group's steps wait while the KV of a request is read. What time the
single engines have left they use as in DP.

A pipeline has as many batches under way as stages. Each of them counts as a unit of its own, with
its part of the seats, whose steps take as long as a step does from the first stage to the last.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from shoal.policies.static import with_singles
from shoal.policies.values.batch import Batch
from shoal.policies.values.layouts import DP, Layout, layouts_up_to
from shoal.policies.values.partition import Partition, units_of
from shoal.policies.values.snapshot import (
    USUAL_STEP_TOKENS,
    LayoutState,
    PoolRequest,
    Snapshot,
    StepPredictor,
)

BACKGROUND = 100
"""Priority of the lines of batches (``runtime.config``)."""
SWITCH_SECONDS = 0.5
"""How long a switch takes besides the copy of KV."""


@dataclass(frozen=True, slots=True)
class Work:
    """The mean request."""

    prompt: float
    output: float
    step_tokens: int
    """Most tokens of a step."""

    @property
    def tokens(self) -> float:
        """Tokens whose KV it has, in the mean, while it decodes."""
        return self.prompt + self.output / 2


def prompts_left(snapshot: Snapshot) -> int:
    """Return how many requests wait for their prompts to be computed, in the pool or in units."""
    return snapshot.waiting + sum(unit.waiting for unit in snapshot.units)


def usual_work(snapshot: Snapshot, longest: float = math.inf) -> Work:
    """Return the mean of the requests that wait, with outputs as those that ended lately.

    No output is taken to be longer than those that wait in the pool may become.

    Args:
        snapshot: the node.
        longest: the same bound where none waits there.
    """
    tokens = snapshot.waiting_tokens + sum(unit.prefill_tokens for unit in snapshot.units)
    left = prompts_left(snapshot)
    waits = tokens / left if left else 0.0
    most = snapshot.step_tokens or USUAL_STEP_TOKENS
    output = min(snapshot.output_tokens, longest_output(snapshot) if snapshot.pool else longest)
    return Work(max(1.0, waits or snapshot.prompt_tokens), max(1.0, output), most)


def longest_output(snapshot: Snapshot) -> float:
    """Return the most tokens that an output of the pool may have; infinity if nobody said."""
    limits = [request.output_limit for request in snapshot.pool]
    known = [limit for limit in limits if limit is not None]
    return max(known) if known and len(known) == len(limits) else math.inf


@dataclass(frozen=True, slots=True)
class Full:
    """A full unit, or one of the batches of a full pipeline."""

    decodes: float
    """How many decode, in the mean."""
    decode: float
    """Seconds of a step in which all decode."""
    prompt: float
    """Seconds of the steps that compute a prompt."""
    steps: float
    """Their number; less than one if a step computes several prompts."""
    beside: int = 0
    """Other batches of the pipeline."""

    @property
    def added(self) -> float:
        """Seconds by which a prompt lengthens the steps of the others."""
        return max(0.0, self.prompt - self.steps * self.decode)

    def rate(self, output: float) -> float:
        """Return requests per second if outputs have so many tokens.

        The batches of a pipeline keep their order. So while one of them computes a prompt, the
        others, which wait behind it, gain nothing if they only decode.
        """
        all_steps = max(output / self.decodes, self.steps)
        have_none = (1 - self.steps / all_steps) ** (1 + self.beside)
        held_up = (1 - have_none) * all_steps / self.steps
        return 1 / (held_up * self.added + output / self.decodes * self.decode)


def full_unit(
    snapshot: Snapshot, model: StepPredictor, layout: Layout, work: Work, taken: float = 0.0
) -> Full:
    """Return a full unit of a layout, or one batch of a pipeline, which computes prompts.

    If prompts take all steps, outputs end before the unit is full, so fewer decode at a time.

    Args:
        snapshot: the node.
        model: its steps.
        layout: the unit's.
        work: the mean request.
        taken: seats of requests that do not decode here.
    """
    limit = snapshot.chunk(layout)
    most = work.output / work.prompt * limit
    seats = max(1.0, min(_seats(snapshot, layout, work) - taken, most))
    room = min(work.step_tokens - seats, limit)
    chunk = max(1.0, min(work.prompt * max(1.0, seats / work.output), room))
    steps = work.prompt / chunk
    decodes = max(1.0, min(seats, work.output / steps))
    only = _decoding(decodes, work)
    batch = replace(only, prefill_tokens=round(chunk), prefill_context=round(work.prompt / 2))
    decode, both = (_step(snapshot, model, layout, each) for each in (only, batch))
    return Full(decodes, decode, steps * both, steps, layout.pp - 1)


def _seats(snapshot: Snapshot, layout: Layout, work: Work) -> float:
    """Return how many requests each batch of a full unit has."""
    state = snapshot.layout(layout)
    return 1.0 if state is None else max(1.0, state.seats(work.tokens) / layout.pp)


def _decoding(decodes: float, work: Work) -> Batch:
    return Batch(max(1, round(decodes)), round(decodes * work.tokens))


def _step(snapshot: Snapshot, model: StepPredictor, layout: Layout, batch: Batch) -> float:
    return model.step_seconds(layout, batch, snapshot.mode(layout, batch))


class Service(NamedTuple):
    """What all units together do while requests wait."""

    rate: float
    """Requests per second."""
    running: float
    """Requests that decode, in the mean."""


def uniform_service(
    snapshot: Snapshot, model: StepPredictor, layout: Layout, work: Work
) -> Service:
    """Return what is served if all engines are in one layout."""
    batches = (snapshot.engines - len(snapshot.dead)) // layout.world_size * layout.pp
    full = full_unit(snapshot, model, layout, work)
    return Service(batches * full.rate(work.output), batches * full.decodes)


def split_service(
    snapshot: Snapshot, model: StepPredictor, layout: Layout, groups: int, work: Work
) -> Service:
    """Return what is served if so many groups decode and all other engines are single."""
    alone = snapshot.engines - groups * layout.world_size - len(snapshot.dead)
    if alone < 1:
        return Service(0.0, 0.0)
    seats = _seats(snapshot, layout, work)
    step = _step(snapshot, model, layout, _decoding(seats, work))
    read = model.carry_seconds(work.prompt, 1)
    decoded = groups / (read + work.output / (layout.pp * seats) * step)
    single = full_unit(snapshot, model, DP, work)
    each, most = decoded / alone, alone / single.prompt
    # A request has a seat while its prompt is computed, and until it can leave.
    single = full_unit(snapshot, model, DP, work, taken=each * 2 * single.prompt)
    own = alone * max(0.0, 1 - each * single.added) * single.rate(work.output)
    running = groups * layout.pp * seats + alone * single.decodes
    return Service(min(decoded + own, most), running)


def _layouts(snapshot: Snapshot) -> tuple[Layout, ...]:
    """Return the layouts of the node, pipelines among them."""
    known = tuple(state.layout for state in snapshot.layouts)
    return known or layouts_up_to(snapshot.max_group)


def uniform(snapshot: Snapshot) -> Iterator[Partition]:
    """Yield the partitions of one layout for all engines that can be formed."""
    for layout in _layouts(snapshot):
        target = with_singles(snapshot, units_of(snapshot.engines, layout))
        if {unit.layout for unit in target} == {layout}:
            yield target


def seconds_to_end(snapshot: Snapshot, model: StepPredictor, units: Partition, work: Work) -> float:
    """Return in how many seconds the requests of the node end if none comes.

    If they do not fit, they never end.
    """
    return _end(snapshot, model, units, work, snapshot.requests)


def _end(
    snapshot: Snapshot, model: StepPredictor, units: Partition, work: Work, requests: float
) -> float:
    """Return in how many seconds so many requests end that decode; infinity: they do not fit.

    Each is taken to have a mean output before it, and half of the requests to run in the mean. They
    are spread over units by what these hold.
    """
    layouts = Counter(unit.layout for unit in units)
    seats = {layout: _seats(snapshot, layout, work) for layout in layouts}
    room = sum(count * of.pp * seats[of] for of, count in layouts.items())
    if requests > room and units != snapshot.partition:
        return math.inf
    decodes = {of: requests / 2 * seats[of] / room for of in layouts}
    steps = (_step(snapshot, model, of, _decoding(decodes[of], work)) for of in layouts)
    return work.output * max(steps)


def partitions(
    snapshot: Snapshot, model: StepPredictor, work: Work
) -> Iterator[tuple[Partition, float]]:
    """Yield partitions that can be formed, each with the requests per second (``of_job``)."""
    for target in uniform(snapshot):
        found = uniform_service(snapshot, model, target[0].layout, work)
        yield target, of_job(snapshot, model, work, found)
    for layout in _layouts(snapshot):
        wide = [unit for unit in units_of(snapshot.engines, layout) if snapshot.can_form(unit)]
        for groups in range(1, len(wide) + 1) if layout != DP else ():
            target = with_singles(snapshot, wide[:groups])
            if not target[-1].is_group:
                found = split_service(snapshot, model, layout, groups, work)
                yield target, of_job(snapshot, model, work, found)


def of_job(snapshot: Snapshot, model: StepPredictor, work: Work, found: Service) -> float:
    """Return the requests per second of all requests of the node, to the end of the last one.

    When the last prompt has been computed, as many requests run as always, and these have half of
    their outputs. They go to the layout in which they end soonest. Behind lines of batches there
    are others, so their end does not count.

    Args:
        snapshot: the node.
        model: its steps.
        work: the mean request.
        found: what is served while prompts wait.
    """
    if not found.rate or any(request.priority >= BACKGROUND for request in snapshot.pool):
        return found.rate
    requests = max(1, snapshot.requests)
    last = min(found.running, requests)
    end = min(_end(snapshot, model, units, work, last) for units in uniform(snapshot))
    if math.isinf(end):
        return found.rate
    copy = model.carry_seconds(last * work.tokens, snapshot.engines)
    return requests / ((requests - last / 2) / found.rate + end + copy + SWITCH_SECONDS)


def holds(snapshot: Snapshot, units: Partition) -> bool:
    """Return whether the widest unit of a partition holds each request of the node."""
    state = snapshot.layout(max(units, key=lambda unit: unit.size).layout)
    longest = max((unit.longest_tokens for unit in snapshot.units), default=0)
    return state is None or (longest <= state.longest and holds_pool(state, snapshot.pool))


def holds_pool(state: LayoutState, pool: tuple[PoolRequest, ...]) -> bool:
    """Return whether a layout holds each of these requests: the one with the largest numbers."""
    if not pool:
        return True
    prompt = max(request.prompt_tokens for request in pool)
    total = max(request.total_tokens for request in pool)
    return state.can_hold(replace(pool[0], prompt_tokens=prompt, total_tokens=total))


def cycle_service(
    snapshot: Snapshot, model: StepPredictor, layout: Layout, work: Work, waiting: float
) -> Service:
    """Return what a cycle serves: nothing, if the host's memory is no help.

    All engines compute prompts alone, whose KV goes to the host's memory, until this is full or no
    prompt is left. Then all units of a layout decode, and are full until the last request has been
    read. What still runs then begins the next cycle.

    Args:
        snapshot: the node.
        model: its steps.
        layout: in which the cycle decodes.
        work: the mean request.
        waiting: the requests that wait.
    """
    engines = snapshot.engines - len(snapshot.dead)
    units, seats = engines // layout.world_size, layout.pp * _seats(snapshot, layout, work)
    tokens = sum(tier.total_blocks * tier.block_tokens for tier in snapshot.tiers)
    parked = min(tokens / (work.prompt + 1), waiting + snapshot.requests - units * seats)
    if parked < units * seats or not units:
        return Service(0.0, 0.0)
    chunk = min(work.prompt, work.step_tokens)
    batch = Batch(0, 0, prefill_tokens=round(chunk), prefill_context=round(work.prompt / 2))
    prompt = work.prompt / chunk * _step(snapshot, model, DP, batch)
    step = _step(snapshot, model, layout, _decoding(seats / layout.pp, work))
    read = model.carry_seconds(work.prompt, layout.world_size)
    carried = model.carry_seconds(units * seats * work.tokens, engines)
    each = prompt / engines + (read + work.output / seats * step) / units
    rate = parked / (parked * each + 2 * (SWITCH_SECONDS + carried))
    return Service(rate, units * seats)
