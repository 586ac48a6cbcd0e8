"""Which running requests go from one unit to another because the units' load is uneven.

Requests that begin are spread evenly (``unit_costs.py``), but nobody knows how long their outputs
will be. So after a burst one unit may have all the long ones, run slowly and even preempt some of
them for want of KV blocks, while another one has little to do. This compares what requests would
gain if some of them went there with what the move costs them.

Free blocks may also be spread over units so that none has enough for a request that waits in the
pool. Then some requests of one unit go to another, and the request finds room.

It is a rule of its own and no part of policies: all of them need it, and none has to know of it.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from shoal.policies.lane import lane_of
from shoal.policies.switch_costs import LEAST_ROOM, SWITCH_SECONDS
from shoal.policies.values.batch import Batch
from shoal.policies.values.layouts import Layout, Unit
from shoal.policies.values.snapshot import Snapshot, StepPredictor, UnitState

MOST_AT_ONCE = 8
"""Requests that go in one move; the next one begins when they have arrived."""
MARGIN = 2.0
"""How many times as much as it costs a move must gain."""
LEAST_SHARE = 0.05
"""Share of the two units' time that a move must gain: less is within the error of predictions."""


@dataclass(frozen=True, slots=True)
class Rebalance:
    """Carry some requests of a unit to another one of the same layout."""

    source: Unit
    destination: Unit
    requests: int
    """How many."""


@dataclass(frozen=True, slots=True)
class Side:
    """One unit's requests, as far as they decide what a move brings."""

    running: int
    """Requests in the unit's batch."""
    waiting: int
    """Requests that are in no batch; they have been preempted, if the unit's batch has seats."""
    tokens: float
    """Tokens whose KV a running request has, in the mean."""
    prompt: float
    """Tokens that a waiting request has to compute, in the mean."""

    def without(self, requests: int) -> "Side":
        """Return this unit after so many requests have left it, first those that wait."""
        waiting = max(0, self.waiting - requests)
        running = self.running - (requests - (self.waiting - waiting))
        return Side(running, waiting, self.tokens, self.prompt)

    def joined(self, requests: int, tokens: float) -> "Side":
        """Return this unit after requests with so many tokens in the mean have come to it."""
        running = self.running + requests
        mean = (self.running * self.tokens + requests * tokens) / running
        return Side(running, self.waiting, mean, self.prompt)


def rebalance(snapshot: Snapshot) -> Rebalance | None:
    """Return the move that gains most; None if none is worth it.

    While requests wait in the pool, load is not evened out, because these are spread as units have
    room for them. Only a move that makes room for the first of them may be worth it.
    """
    model = snapshot.cost_model
    if model is None:
        return None
    moves = _moves_for_room if snapshot.waiting else _moves_for_balance
    found = [
        move
        for layout, units in _by_layout(snapshot).items()
        for move in moves(snapshot, model, layout, units)
    ]
    _, best = max(found, key=itemgetter(0), default=(0.0, None))
    return best


def _by_layout(snapshot: Snapshot) -> dict[Layout, list[UnitState]]:
    """Return the units between which requests may move. Nobody else's go to the lane or from it."""
    units = defaultdict[Layout, list[UnitState]](list)
    lane = lane_of(snapshot)
    for unit in snapshot.units:
        if unit.serving and unit.unit != lane:
            units[unit.unit.layout].append(unit)
    return units


def _moves_for_balance(
    snapshot: Snapshot, model: StepPredictor, layout: Layout, units: Sequence[UnitState]
) -> Iterator[tuple[float, Rebalance]]:
    """Yield what the most loaded unit may give the least loaded one, and what each move gains.

    Gains are in seconds of requests.
    """
    source = max(units, key=lambda unit: (unit.requests, unit.unit))
    target = min(units, key=lambda unit: (unit.requests, unit.unit))
    if source.requests - target.requests < 2 or target.waiting or not source.running:
        return
    giver, taker = side_of(source), side_of(target)
    left = tokens_left(snapshot, source)
    before = [_token_cost(model, layout, side) for side in (giver, taker)]
    even = -(-sum(unit.requests for unit in units) // len(units))
    most = min(MOST_AT_ONCE, even - target.requests, target.free_slots)
    for count in range(1, most + 1):
        if not _has_room(target, giver, count):
            return
        after = [
            _token_cost(model, layout, side)
            for side in (giver.without(count), taker.joined(count, giver.tokens))
        ]
        gain = left * (sum(before) - sum(after))
        if gain > max(
            MARGIN * _move_cost(model, layout, giver, taker, count),
            LEAST_SHARE * left * sum(before),
        ):
            yield gain, Rebalance(source.unit, target.unit, count)


def _moves_for_room(
    snapshot: Snapshot, model: StepPredictor, layout: Layout, units: Sequence[UnitState]
) -> Iterator[tuple[float, Rebalance]]:
    """Yield the move after which a unit has room for the pool's first request, and what it gains.

    All that a move gains, in seconds of requests, is the time for which this request would wait for
    others to end.
    """
    if not snapshot.pool:
        return
    first = snapshot.pool[0]
    able = [unit for unit in units if unit.free_slots and unit.can_hold(first)]
    if not able or any(unit.blocks_for(first) <= unit.free_blocks for unit in able):
        return
    source = max(able, key=lambda unit: (unit.free_blocks, unit.unit))
    giver = side_of(source)
    of_each = giver.tokens // source.block_tokens
    if not source.running or not of_each:
        return
    count = math.ceil((source.blocks_for(first) - source.free_blocks) / of_each)
    others = [unit for unit in units if unit.unit != source.unit and not unit.waiting]
    takers = [u for u in others if u.free_slots >= count and _has_room(u, giver, count)]
    if count > min(MOST_AT_ONCE, source.running) or not takers:
        return
    target = max(takers, key=lambda unit: (unit.free_blocks, unit.unit))
    step = model.step_seconds(layout, Batch(giver.running, round(giver.running * giver.tokens)))
    gain = tokens_left(snapshot, source) * step * count / source.running
    if gain > MARGIN * _move_cost(model, layout, giver, side_of(target), count):
        yield gain, Rebalance(source.unit, target.unit, count)


def side_of(unit: UnitState) -> Side:
    """Return what a unit's requests are like."""
    running = max(1, unit.running)
    used = (unit.total_blocks - unit.free_blocks) * unit.block_tokens
    context = (unit.context_tokens - unit.prefill_tokens) / running
    # Requests may share the blocks of a prefix, so there is no less than their prompts.
    tokens = max(context, used / running) if unit.running else 0.0
    prompt = unit.prefill_tokens / unit.waiting if unit.waiting else 0.0
    return Side(unit.running, unit.waiting, tokens, prompt)


def tokens_left(snapshot: Snapshot, unit: UnitState) -> float:
    """Return how many tokens a unit's requests are still to generate, in the mean.

    A request that has had many will have many more: lengths of outputs have long tails.
    """
    side = side_of(unit)
    context = (unit.context_tokens - unit.prefill_tokens) / max(1, unit.running)
    return max(snapshot.output_tokens / 2, side.tokens - context)


def _token_cost(model: StepPredictor, layout: Layout, side: Side) -> float:
    """Return the seconds that a unit's requests together spend for a token of each.

    A request that waits gets its tokens when one that runs has had all of its own.
    """
    if not side.running:
        return 0.0
    batch = Batch(side.running, round(side.running * side.tokens))
    return model.step_seconds(layout, batch) * (side.running + 2 * side.waiting)


def _move_cost(model: StepPredictor, layout: Layout, giver: Side, taker: Side, count: int) -> float:
    """Return the seconds that all requests together lose by a move.

    Those that run stop for a step and the copy, for which the other unit waits, too. Those that
    wait are computed there, as they would be here.
    """
    idle = min(count, giver.waiting)
    stopped = count - idle
    copy = model.carry_seconds(stopped * giver.tokens, layout.world_size)
    step = model.step_seconds(layout, Batch(giver.running, round(giver.running * giver.tokens)))
    cost = stopped * (SWITCH_SECONDS + step + copy) + taker.running * copy
    if idle and giver.prompt:
        prompts = Batch(0, 0, round(idle * giver.prompt), round(giver.prompt / 2))
        cost += (taker.running + idle) * model.step_seconds(layout, prompts)
    return cost


def _has_room(target: UnitState, giver: Side, count: int) -> bool:
    """Return whether a unit has blocks for more requests, and some to let all of them grow."""
    needed = count * (-(-max(giver.tokens, giver.prompt) // target.block_tokens) + 1)
    return target.free_blocks - needed >= LEAST_ROOM * target.total_blocks
