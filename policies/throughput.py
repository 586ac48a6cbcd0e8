"""How many requests per second partitions serve while there are always more requests waiting.

All requests are taken to have the mean prompt and the mean output, and every unit to be full. In a
layout for all engines, a unit computes the prompt of the next request, in steps in which all others
decode, whenever one has ended. In a *split*, single engines compute prompts and hand requests over
to groups, where these decode. A group's steps wait while the KV of a request is read. What time the
single engines have left they use as in DP.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shoal.policies.static import with_singles
from shoal.policies.values.batch import Batch
from shoal.policies.values.layouts import DP, Layout, layouts_up_to
from shoal.policies.values.partition import Partition, units_of
from shoal.policies.values.snapshot import USUAL_STEP_TOKENS, Snapshot, StepPredictor

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


def usual_work(snapshot: Snapshot) -> Work:
    """Return the mean of the requests that wait, with outputs as those that ended lately.

    No output is taken to be longer than those that wait may become.
    """
    waits = snapshot.waiting_tokens / snapshot.waiting if snapshot.waiting else 0.0
    most = snapshot.step_tokens or USUAL_STEP_TOKENS
    output = min(snapshot.output_tokens, _longest_output(snapshot))
    return Work(max(1.0, waits or snapshot.prompt_tokens), max(1.0, output), most)


def _longest_output(snapshot: Snapshot) -> float:
    """Return the most tokens that an output of the pool may have; infinity if nobody said."""
    limits = [request.output_limit for request in snapshot.pool]
    known = [limit for limit in limits if limit is not None]
    return max(known) if known and len(known) == len(limits) else math.inf


@dataclass(frozen=True, slots=True)
class Full:
    """A full unit."""

    decodes: float
    """How many decode, in the mean."""
    decode: float
    """Seconds of a step in which all decode."""
    prompt: float
    """Seconds of the steps that compute a prompt."""
    steps: float
    """Their number; less than one if a step computes several prompts."""

    @property
    def added(self) -> float:
        """Seconds by which a prompt lengthens the steps of the others."""
        return max(0.0, self.prompt - self.steps * self.decode)

    def rate(self, output: float) -> float:
        """Return requests per second if outputs have so many tokens."""
        return 1 / (self.added + output / self.decodes * self.decode)


def full_unit(
    snapshot: Snapshot, model: StepPredictor, layout: Layout, work: Work, taken: float = 0.0
) -> Full:
    """Return a full unit of a layout, which computes prompts.

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
    return Full(decodes, decode, steps * both, steps)


def _seats(snapshot: Snapshot, layout: Layout, work: Work) -> float:
    state = snapshot.layout(layout)
    return 1.0 if state is None else state.seats(work.tokens)


def _decoding(decodes: float, work: Work) -> Batch:
    return Batch(max(1, round(decodes)), round(decodes * work.tokens))


def _step(snapshot: Snapshot, model: StepPredictor, layout: Layout, batch: Batch) -> float:
    return model.step_seconds(layout, batch, snapshot.mode(layout, batch))


def uniform_rate(snapshot: Snapshot, model: StepPredictor, layout: Layout, work: Work) -> float:
    """Return the requests per second if all engines are in one layout."""
    units = (snapshot.engines - len(snapshot.dead)) // layout.world_size
    return units * full_unit(snapshot, model, layout, work).rate(work.output)


def split_rate(
    snapshot: Snapshot, model: StepPredictor, layout: Layout, groups: int, work: Work
) -> float:
    """Return the requests per second if so many groups decode and all other engines are single."""
    alone = snapshot.engines - groups * layout.world_size - len(snapshot.dead)
    if alone < 1:
        return 0.0
    seats = _seats(snapshot, layout, work)
    step = _step(snapshot, model, layout, _decoding(seats, work))
    read = model.carry_seconds(work.prompt, 1)
    decoded = groups / (read + work.output / seats * step)
    single = full_unit(snapshot, model, DP, work)
    each, most = decoded / alone, alone / single.prompt
    # A request has a seat while its prompt is computed, and until it can leave.
    single = full_unit(snapshot, model, DP, work, taken=each * 2 * single.prompt)
    own = alone * max(0.0, 1 - each * single.added) * single.rate(work.output)
    return min(decoded + own, most)


def uniform(snapshot: Snapshot) -> Iterator[Partition]:
    """Yield the partitions of one layout for all engines that can be formed."""
    for layout in layouts_up_to(snapshot.max_group):
        target = with_singles(snapshot, units_of(snapshot.engines, layout))
        if {unit.layout for unit in target} == {layout}:
            yield target


def seconds_to_end(snapshot: Snapshot, model: StepPredictor, units: Partition, work: Work) -> float:
    """Return in how many seconds the running requests end if none comes.

    Each is taken to have a mean output before it, and half of the requests to run in the mean. They
    are spread over units by what these hold; if they do not fit, they never end.
    """
    layouts = Counter(unit.layout for unit in units)
    seats = {layout: _seats(snapshot, layout, work) for layout in layouts}
    room = sum(count * seats[layout] for layout, count in layouts.items())
    if snapshot.requests > room and units != snapshot.partition:
        return math.inf
    decodes = {of: snapshot.requests / 2 * seats[of] / room for of in layouts}
    steps = (_step(snapshot, model, of, _decoding(decodes[of], work)) for of in layouts)
    return work.output * max(steps)


def partitions(
    snapshot: Snapshot, model: StepPredictor, work: Work
) -> Iterator[tuple[Partition, float]]:
    """Yield partitions that can be formed, each with the requests per second."""
    for target in uniform(snapshot):
        yield target, uniform_rate(snapshot, model, target[0].layout, work)
    for layout in layouts_up_to(snapshot.max_group):
        wide = [unit for unit in units_of(snapshot.engines, layout) if snapshot.can_form(unit)]
        for groups in range(1, len(wide) + 1) if layout != DP else ():
            target = with_singles(snapshot, wide[:groups])
            if not target[-1].is_group:
                yield target, split_rate(snapshot, model, layout, groups, work)


def cycle_rate(
    snapshot: Snapshot, model: StepPredictor, layout: Layout, work: Work, waiting: float
) -> float:
    """Return the requests per second of a cycle; 0 if the host's memory is no help.

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
    units, seats = engines // layout.world_size, _seats(snapshot, layout, work)
    tokens = sum(tier.total_blocks * tier.block_tokens for tier in snapshot.tiers)
    parked = min(tokens / (work.prompt + 1), waiting + snapshot.requests - units * seats)
    if parked < units * seats or not units:
        return 0.0
    chunk = min(work.prompt, work.step_tokens)
    batch = Batch(0, 0, prefill_tokens=round(chunk), prefill_context=round(work.prompt / 2))
    prompt = work.prompt / chunk * _step(snapshot, model, DP, batch)
    step = _step(snapshot, model, layout, _decoding(seats, work))
    read = model.carry_seconds(work.prompt, layout.world_size)
    carried = model.carry_seconds(units * seats * work.tokens, engines)
    each = prompt / engines + (read + work.output / seats * step) / units
    return parked / (parked * each + 2 * (SWITCH_SECONDS + carried))
