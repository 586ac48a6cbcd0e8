"""What it costs to start a request in a unit, which may have its prefix cached or not.

The cost is the time that all requests of the unit lose together. The request itself waits for the
prompts before it, computes what is not cached of its own, and then decodes beside the others, whose
context every step reads, too. The others wait while its prompt is computed, and then read its
context. So a request goes where its prefix is cached unless more is lost there than the prefix
saves, and the more requests a unit has, the more a prefix must save.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shoal.policies.values.batch import Batch
from shoal.policies.values.layouts import Layout
from shoal.policies.values.plan import Room
from shoal.policies.values.snapshot import PoolRequest, Snapshot

READS_PER_PROMPT_TOKEN = 700
"""Without a cost model: tokens of context that a step reads in the time of a prompt's token. It is
about that of an 8B model on an H200."""
_DECODES, _CONTEXT, _CHUNK = 32, 4096, 2048

Cost = Callable[[PoolRequest, Room], float]


@dataclass(frozen=True, slots=True)
class Prices:
    """What tokens cost one unit."""

    prompt: float
    """Seconds, or another unit of time, to compute a token of a prompt."""
    read: float
    """The same, for a step to read a token of context."""


def costs(snapshot: Snapshot) -> Cost:
    """Return the function that tells what it costs to start a request in a unit."""
    known: dict[Layout, Prices] = {}

    def cost(request: PoolRequest, room: Room) -> float:
        layout = room.unit.unit.layout
        if layout not in known:
            known[layout] = _prices(snapshot, layout)
        return _cost(request, room, known[layout], snapshot.output_tokens)

    return cost


def _cost(request: PoolRequest, room: Room, prices: Prices, output: float) -> float:
    unit = room.unit
    new = room.new_tokens(request)
    own = (unit.prefill_tokens + room.queued + new) * prices.prompt
    own += output * (unit.context_tokens + room.context) * prices.read
    # On average, half of the others' outputs are still to come.
    each = new * prices.prompt + output / 2 * request.prompt_tokens * prices.read
    return own + (unit.requests + room.taken) * each


def _prices(snapshot: Snapshot, layout: Layout) -> Prices:
    model = snapshot.cost_model
    if model is None:
        return Prices(1 / layout.world_size, 1 / layout.world_size / READS_PER_PROMPT_TOKEN)

    def more(small: Batch, large: Batch) -> float:
        mode = snapshot.mode(layout, large)
        seconds = (model.step_seconds(layout, batch, mode) for batch in (large, small))
        return max(0.0, next(seconds) - next(seconds))

    prefill = (Batch(0, 0, count * _CHUNK, _CONTEXT) for count in (1, 2))
    decode = (Batch(_DECODES, count * _DECODES * _CONTEXT) for count in (1, 2))
    return Prices(more(*prefill) / _CHUNK, more(*decode) / (_DECODES * _CONTEXT))
