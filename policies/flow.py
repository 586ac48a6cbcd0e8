"""How requests flow through a unit: how many are there, and how long a token takes, over time.

A unit computes one step after another. Each step gives every decoding request a token, and has room
for prompts, which make the step longer. This follows means: requests arrive, wait, have their
prompts computed, decode and leave. While all prompts find room, some steps have one prompt and the
others none. If there are more prompts, every step has some, up to its limit; the rest waits.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.policies.values.batch import Batch, Mode
from shoal.policies.values.layouts import Layout
from shoal.policies.values.snapshot import Snapshot, StepPredictor

CHUNK_TOKENS = 8192
"""Limit of the tokens of one step: vLLM's usual bound."""
SIZES = (1, 16, 64, 160, 256)
"""Numbers of decoding requests for which the time of a step is predicted; the time of other numbers
follows from the two nearest."""
FEW, MANY = SIZES[1], SIZES[-1]
"""Numbers of decoding requests for which it is predicted what prompts add to a step."""
_TICKS = tuple(0.1 * 1.4**k for k in range(16))
NEAR, FAR = _TICKS[:9], _TICKS[9:]
"""Stretches of time, in seconds, that are looked at one after another: the next five seconds, and
the fifty after these. The first are the shortest, because the requests that are present decide what
happens first."""
NEAR_SECONDS = sum(NEAR)
NOW_SECONDS, RECENT_SECONDS = 3.0, 10.0
"""Time constants with which the rate of arrivals returns from its present to its recent value, and
from that to the usual one. So a burst is expected to last longer, the longer it has lasted. Many
bursts of real traffic end within seconds."""
LEAST_SLOPE = 0.01
"""A prompt token of a long step adds at least this share of what it adds in a short prompt."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a unit has to do. These are means, so a unit may have a part of a request."""

    decoding: float
    """Requests that decode."""
    waiting: float
    """Requests whose prompts are still to be computed."""
    tokens: float
    """Prompt tokens of the waiting requests."""
    rate: float
    """Requests per second that arrive now."""
    recent: float
    """Requests per second that arrived over the last seconds."""
    usual: float
    """Requests per second to which the rate returns."""
    prompt: float
    """Prompt tokens of a request."""
    output: float
    """Output tokens of a request."""

    def part(self, share: float) -> "Work":
        """Return the share of this work that one of several units has."""
        return Work(
            self.decoding * share,
            self.waiting * share,
            self.tokens * share,
            self.rate * share,
            self.recent * share,
            self.usual * share,
            self.prompt,
            self.output,
        )

    def rate_at(self, seconds: float) -> float:
        """Return the requests per second that are expected after some time."""
        now = (self.rate - self.recent) * math.exp(-seconds / NOW_SECONDS)
        recent = (self.recent - self.usual) * math.exp(-seconds / RECENT_SECONDS)
        return max(0.0, self.usual + recent + now)


@dataclass(frozen=True, slots=True)
class Added:
    """By how many seconds prompts make a step of one mode longer."""

    few: float
    """If it has any prompt token, and ``FEW`` requests decode."""
    many: float
    """If it has any prompt token, and ``MANY`` requests decode."""
    token: float
    """For each prompt token."""

    def fixed(self, decoding: float) -> float:
        """Return the seconds that do not depend on the number of prompt tokens."""
        share = (min(decoding, MANY) - FEW) / (MANY - FEW)
        return max(0.0, self.few + share * (self.many - self.few))


@dataclass(frozen=True, slots=True)
class UnitPace:
    """How fast a unit of one layout is."""

    steps: tuple[float, ...]
    """Seconds of a step without prompts, for each of ``SIZES``."""
    tp: Added
    sp: Added
    above: float
    """Tokens above which a step runs in SP; infinite if none does."""
    seats: float
    """Requests that the unit decodes at once."""
    chunk: int = CHUNK_TOKENS
    """Most prompt tokens of a step."""
    checked: float = 1.0
    """Tokens that a decode computes in a step: its own, and the proposed ones that it checks."""

    def added(self, decoding: float, prompts: float) -> Added:
        """Return what prompts of so many tokens add to a step in which requests decode."""
        return self.sp if self.checked * decoding + prompts > self.above else self.tp

    def step(self, decoding: float) -> float:
        """Return the seconds of a step without prompts."""
        if decoding <= SIZES[0]:
            return self.steps[0]
        k = min(bisect_right(SIZES, decoding), len(SIZES) - 1)
        share = (decoding - SIZES[k - 1]) / (SIZES[k] - SIZES[k - 1])
        return self.steps[k - 1] + share * (self.steps[k] - self.steps[k - 1])


@dataclass(frozen=True, slots=True)
class Moment:
    """What happens in one tick, and what is left at its end."""

    seconds: float
    """The seconds that all requests together spend on the unit in this tick."""
    tpot: float
    """Seconds between two tokens of a request."""
    decoding: float
    waiting: float
    tokens: float
    """Prompt tokens of the waiting requests."""


def pace_of(snapshot: Snapshot, model: StepPredictor, layout: Layout, work: Work) -> UnitPace:
    """Return how fast a unit of a layout computes requests of these lengths."""
    context = max(1, round(work.prompt + work.output / 2))
    prompt = max(1, round(work.prompt))
    short, full = min(prompt, CHUNK_TOKENS // 4), CHUNK_TOKENS
    steps = tuple(model.step_seconds(layout, Batch(size, size * context)) for size in SIZES)
    at = dict(zip(SIZES, steps, strict=True))

    def longer(decodes: int, tokens: int, mode: Mode) -> float:
        batch = Batch(decodes, decodes * context, tokens, prompt // 2)
        return max(0.0, model.step_seconds(layout, batch, mode) - at[decodes])

    def added(mode: Mode) -> Added:
        few, many = longer(FEW, short, mode), longer(FEW, full, mode)
        token = max(LEAST_SLOPE * few / short, (many - few) / (full - short))
        return Added(few - short * token, longer(MANY, short, mode) - short * token, token)

    above = dict(snapshot.sp_above).get(layout, math.inf)
    tp = added(Mode.TP)
    state = snapshot.layout(layout)
    seats = math.inf if state is None else state.seats(work.prompt + work.output / 2)
    sp = tp if math.isinf(above) else added(Mode.SP)
    return UnitPace(steps, tp, sp, above, seats, snapshot.chunk(layout), model.speculation.checked)


def flow(
    pace: UnitPace,
    work: Work,
    ticks: Sequence[float] = NEAR,
    *,
    at: float = 0.0,
) -> Iterator[Moment]:
    """Yield what happens in each tick.

    Args:
        pace: how fast the unit is.
        work: the work that it has at first, and that comes.
        ticks: the lengths of the ticks, in seconds.
        at: seconds from now until the first tick.
    """
    decoding, waiting, tokens = work.decoding, work.waiting, work.tokens
    chunk = min(work.prompt, pace.chunk)
    chunks = max(1.0, work.prompt / pace.chunk)
    for tick in ticks:
        arriving = tick * work.rate_at(at + tick / 2)
        at, here, needed = at + tick, decoding + waiting, tokens + arriving * work.prompt
        prompts = waiting + arriving
        length, tpot, done, wait = _steps(pace, decoding, needed / tick, chunk, prompts)
        stay = work.output * tpot
        kept = math.exp(-tick / stay)
        # A request that waits gets a seat when another one leaves.
        free = max(0.0, pace.seats - kept * decoding)
        started = done * (waiting + arriving)
        if started > free:
            done, started = done * free / started, free
        tokens, waiting = (1 - done) * needed, (1 - done) * (waiting + arriving)
        decoding = kept * decoding + (1 - kept) * started / tick * stay
        # Where prompts queue, the time in the queue includes that of their own steps.
        first = length * chunks + wait if done == 1.0 else 0.0
        spent = tick * (here + decoding + waiting) / 2 + started * first
        yield Moment(spent, tpot, decoding, waiting, tokens)


def _steps(
    pace: UnitPace, decoding: float, rate: float, chunk: float, prompts: float
) -> tuple[float, float, float, float]:
    """Return the seconds of a step with prompts and of a token, and what becomes of new prompts.

    These are the share of them that is done, and the seconds until the current step has ended.

    Args:
        pace: how fast the unit is.
        decoding: requests that decode.
        rate: prompt tokens per second that are to be computed.
        chunk: prompt tokens of a step that has one prompt.
        prompts: number of prompts that wait. Where they are few, units have one only at times.
    """
    step, added = pace.step(decoding), pace.added(decoding, chunk)
    fixed, often = added.fixed(decoding), rate / chunk
    longer = fixed + chunk * added.token
    if often * (step + longer) <= 1:
        length = step + longer
        wait = (often * length * length + min(1.0, decoding) * step) / 2
        return length, step / (1 - often * longer), 1.0, wait
    size = min(_size(added, step + fixed, rate, chunk), pace.chunk)
    if pace.added(decoding, size) is not added:
        added = pace.sp
        fixed = added.fixed(decoding)
        size = min(_size(added, step + fixed, rate, chunk), pace.chunk)
    length = step + fixed + size * added.token
    busy = 1 - math.exp(-prompts)
    tpot = 1 / (busy / length + (1 - busy) / step)
    return length, tpot, min(1.0, busy * size / length / rate), length / 2


def _size(added: Added, without: float, rate: float, chunk: float) -> float:
    """Return the prompt tokens of a step if every step has some; ``without`` is its other time."""
    slack = 1 - rate * added.token
    size = rate * without / slack if slack > 0 else math.inf
    return max(size, chunk)
