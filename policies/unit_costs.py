"""What it costs to start a request in a unit, which may have its prefix cached or not.

The cost is the time that all requests of the unit lose together. The request itself waits for the
prompts before it, computes what is not cached of its own, and then decodes beside the others, whose
context every step reads, too. The others wait while its prompt is computed, and then read its
context. So a request goes where its prefix is cached unless more is lost there than the prefix
saves, and the more requests a unit has, the more a prefix must save.

So long prompts go to the unit with the fewest requests, and wait there for each other. In a burst
their first tokens would come far later than in the order of arrival. So a request goes to no unit
where its first token comes much later than it could (``latest_first_token``), whatever the others
lose.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from operator import mul
from typing import NamedTuple

from shoal.policies.values.batch import Batch, PromptWork
from shoal.policies.values.layouts import Layout, Unit
from shoal.policies.values.plan import Room
from shoal.policies.values.snapshot import PoolRequest, Snapshot

READS_PER_PROMPT_TOKEN = 700
"""Without a cost model: tokens of context that a step reads in the time of a prompt's token. It is
about that of an 8B model on an H200."""
PATIENCE, MOST_PATIENCE = 8.0, 1.0
"""A prompt lets shorter ones pass that came up to so many times its own time after it, and at most
so many seconds (docs/policies.md)."""
LATER, LATER_SECONDS = 0.5, 0.2
"""By which share, and how many seconds, a first token may come later so that others need not wait.
They are a trade of the slowest first tokens for the mean request (docs/policies.md)."""
_DECODES, _CONTEXT, _LONG_STEP, _LONG_CONTEXT = 32, 4096, 4096, 32768
"""Steps of which tokens have their prices: requests that decode, tokens of context, tokens of a
prompt, and tokens of a long context."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What tokens cost one unit."""

    prompt: float
    """Seconds, or another unit of time, to compute a token of a prompt."""
    read: float
    """The same, for a step to read a token of context."""
    attend: float = 0.0
    """The same, for a token of a prompt to attend to one more token than ``_CONTEXT``."""

    def seconds(self, work: PromptWork) -> float:
        """Return the time to compute what is left of prompts."""
        more = work.pairs - _CONTEXT * work.tokens
        return max(0.0, self.prompt * work.tokens + self.attend * more)


class Start(NamedTuple):
    """What a unit makes of a request that starts there, in seconds or another unit of time."""

    first_token: float
    """Until its first token."""
    cost: float
    """The time that all requests of the unit lose together."""


def latest_first_token(earliest: float) -> float:
    """Return how long a request may wait for its first token, seconds.

    Args:
        earliest: how long it waits in the unit where that comes first, seconds.
    """
    return earliest * (1.0 + LATER) + LATER_SECONDS


def patience(own: float) -> float:
    """Return how long after a prompt others may come that units compute before it, seconds.

    Units compute prompts in the order of arrival plus patience. So short prompts need not wait for
    long ones that came shortly before, and no prompt waits for others without end.

    Args:
        own: how long the prompt itself takes, seconds.
    """
    return min(PATIENCE * own, MOST_PATIENCE)


class _UnitPart(NamedTuple):
    """The part of a cost that depends on the unit, and not on the request."""

    taken: int
    """Requests that the plan had sent to the unit."""
    prices: Prices
    wait: float
    """Time until the unit has computed the prompts that it has."""
    own_reads: float
    """Time in which the request's steps read the contexts of the unit's requests."""
    others: int
    """Requests that the unit has."""
    others_read: float
    """Time in which the steps of these read a token of the request."""


class UnitCosts:
    """Tells what it costs to start a request in a unit.

    A plan may ask for hundreds of requests and eight units each. So what does not depend on the
    request is computed only once, and again when the plan has sent the unit something.

    Args:
        snapshot: the node.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._prices: dict[Layout, Prices] = {}
        self._queued: dict[int, PromptWork] = {}
        """What each unit had to compute of prompts before the plan, by its leader."""
        self._parts: dict[int, _UnitPart] = {}
        """By the unit's leader."""

    def __call__(self, request: PoolRequest, room: Room) -> Start:
        """Return what the unit makes of a request, by which units can be compared."""
        part = self._parts.get(room.unit.unit.leader)
        if part is None or part.taken != room.taken:
            part = self._parts[room.unit.unit.leader] = self._part_of(room)
        own = part.prices.seconds(room.work(request))
        lost = (1 + part.others) * own
        cost = part.wait + part.own_reads + lost + part.others_read * request.prompt_tokens
        return Start(part.wait + own, cost)

    def patience(self, request: PoolRequest, room: Room) -> float:
        """Return how long a request lets shorter ones pass in a unit, seconds (``patience``).

        Without a cost model times are not in seconds, and nobody lets others pass.
        """
        seen = self._snapshot
        if seen.cost_model is None or not seen.short_first:
            return 0.0
        return patience(self._prices_of(room).seconds(room.work(request)))

    def ranks(self, request: PoolRequest, rooms: Iterable[Room]) -> dict[Unit, tuple[bool, float]]:
        """Return by what units are compared: whether a first token is too late there, and the cost.

        Without a cost model times are not in seconds, and no first token is too late.
        """
        starts = {room.unit.unit: self(request, room) for room in rooms}
        bound = inf
        if starts and self._snapshot.cost_model is not None:
            bound = latest_first_token(min(start.first_token for start in starts.values()))
        return {unit: (start.first_token > bound, start.cost) for unit, start in starts.items()}

    def _part_of(self, room: Room) -> _UnitPart:
        unit, output = room.unit, self._snapshot.output_tokens
        prices = self._prices_of(room)
        if unit.unit.leader not in self._queued:
            pairs = sum(map(mul, unit.prompts, unit.prompts)) // 2
            queued = unit.begun.with_(PromptWork(unit.prefill_tokens, pairs))
            self._queued[unit.unit.leader] = queued
        wait = prices.seconds(self._queued[unit.unit.leader].with_(room.queued))
        others = unit.requests + room.taken
        own_reads = output * (unit.context_tokens + room.context) * prices.read
        # On average, half of the others' outputs are still to come.
        others_read = others * output / 2 * prices.read
        return _UnitPart(room.taken, prices, wait, own_reads, others, others_read)

    def _prices_of(self, room: Room) -> Prices:
        layout = room.unit.unit.layout
        if layout not in self._prices:
            self._prices[layout] = prices_of(self._snapshot, layout)
        return self._prices[layout]


def prices_of(snapshot: Snapshot, layout: Layout) -> Prices:
    """Return what tokens cost a unit of a layout.

    A prompt's token costs its share of what a long step takes more than one that computes next to
    nothing. Between two long steps there may be no difference: where both run in SP, and both wait
    for the host, prompts would cost nothing.
    """
    model = snapshot.cost_model
    if model is None:
        return Prices(1 / layout.world_size, 1 / layout.world_size / READS_PER_PROMPT_TOKEN)

    def more(small: Batch, large: Batch) -> float:
        low, high = (
            model.step_seconds(layout, batch, snapshot.mode(layout, batch))
            for batch in (small, large)
        )
        return max(0.0, high - low)

    prefill = (Batch(0, 0, tokens, _CONTEXT) for tokens in (1, _LONG_STEP))
    attention = (Batch(0, 0, _LONG_STEP, context) for context in (_CONTEXT, _LONG_CONTEXT))
    decode = (Batch(_DECODES, count * _DECODES * _CONTEXT) for count in (1, 2))
    return Prices(
        more(*prefill) / _LONG_STEP,
        more(*decode) / (_DECODES * _CONTEXT),
        more(*attention) / _LONG_STEP / (_LONG_CONTEXT - _CONTEXT),
    )
