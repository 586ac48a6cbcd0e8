"""What it costs to start a request in a unit, which may have its prefix cached or not.

The cost is the time that all requests of the unit lose together. The request itself waits for the
prompts before it, computes what is not cached of its own, and then decodes beside the others, whose
context every step reads, too. The others wait while its prompt is computed, and then read its
context. So a request goes where its prefix is cached unless more is lost there than the prefix
saves, and the more requests a unit has, the more a prefix must save.
"""

from dataclasses import dataclass

from shoal.policies.values.batch import Batch
from shoal.policies.values.layouts import Layout
from shoal.policies.values.plan import Room
from shoal.policies.values.snapshot import PoolRequest, Snapshot

READS_PER_PROMPT_TOKEN = 700
"""Without a cost model: tokens of context that a step reads in the time of a prompt's token. It is
about that of an 8B model on an H200."""
_DECODES, _CONTEXT, _CHUNK = 32, 4096, 2048


@dataclass(frozen=True, slots=True)
class Prices:
    """What tokens cost one unit."""

    prompt: float
    """Seconds, or another unit of time, to compute a token of a prompt."""
    read: float
    """The same, for a step to read a token of context."""


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
        self._terms: dict[int, tuple[int, float, float, float]] = {}
        """By the unit's leader: what the plan had sent there, the cost of waiting and reading, and
        what a token to compute and one to be read cost all requests there together."""

    def __call__(self, request: PoolRequest, room: Room) -> float:
        """Return the cost, by which units can be compared."""
        terms = self._terms.get(room.unit.unit.leader)
        if terms is None or terms[0] != room.taken:
            terms = self._terms_of(room)
        _, base, new, read = terms
        return base + new * room.new_tokens(request) + read * request.prompt_tokens

    def _terms_of(self, room: Room) -> tuple[int, float, float, float]:
        unit, output = room.unit, self._snapshot.output_tokens
        layout = unit.unit.layout
        if layout not in self._prices:
            self._prices[layout] = prices_of(self._snapshot, layout)
        prices = self._prices[layout]
        base = (unit.prefill_tokens + room.queued) * prices.prompt
        base += output * (unit.context_tokens + room.context) * prices.read
        others = unit.requests + room.taken
        # On average, half of the others' outputs are still to come.
        read = others * output / 2 * prices.read
        terms = room.taken, base, (1 + others) * prices.prompt, read
        self._terms[unit.unit.leader] = terms
        return terms


def prices_of(snapshot: Snapshot, layout: Layout) -> Prices:
    """Return what tokens cost a unit of a layout."""
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
