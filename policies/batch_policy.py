"""The partition that serves most requests per second while there are always more of them.

Seesaw (3.1) finds that prompts are computed fastest without exchanges between engines, and outputs
where a group reads the weights together. It re-shards all engines between the two, and needs a
buffer in the host's memory, because a switch pays only if it is rare. In Shoal every engine has all
weights, so both layouts may be there at once: single engines compute prompts, and hand requests
over to groups, which stay full however long outputs are (``throughput.py``). No switch is needed
while the work stays alike, and no output waits for prompts.

The policy predicts what each partition would serve, by the cost model and by the lengths of the
requests that wait and of the outputs that ended, and takes the best. Layouts for all engines are
among them. A split must be clearly better than these, and every partition clearly better than the
present one. When nothing waits any more, the last requests go to the layout in which they end
soonest, which is mostly the widest one that holds them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shoal.policies.cycle import (
    best_cycle,
    is_full,
    least_urgent,
    only_others,
    parking,
    prompts_wait,
    reading,
    spared,
)
from shoal.policies.static import dispatch_least_loaded
from shoal.policies.throughput import (
    SWITCH_SECONDS,
    Work,
    partitions,
    seconds_to_end,
    uniform,
    usual_work,
)
from shoal.policies.values.layouts import DP
from shoal.policies.values.partition import Partition, singles
from shoal.policies.values.plan import Dispatch, Plan, Policy, SwitchReason
from shoal.policies.values.snapshot import (
    LayoutState,
    Move,
    PoolRequest,
    Snapshot,
    StepPredictor,
    UnitState,
)

REVIEW_SECONDS = 2.0
"""How often partitions are compared."""
SPLIT_GAIN = 1.05
"""A split must serve so many times as many requests as every layout for all engines."""
SWITCH_GAIN = 0.05
"""Another partition must serve by so much more than the present one, as a share of this. That
doubles with every switch, because predictions change when steps have been measured."""
MOST_TURNS = 4
TURN_SECONDS = 120.0
"""After so long one switch is forgotten."""
SOONER = 1.3
"""When nothing waits, the last requests must take so many times as long in the present partition
as in another one, its switch included."""
FULL_SHARE = 0.02
"""Share of a group's blocks that stays free when requests are handed over, so that they can grow.
"""
CARRY_ROOM = 0.3
"""Share of each unit's blocks that must be free before the last requests are carried elsewhere."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What the policy remembers from one plan to the next."""

    at: float = -math.inf
    """When partitions were last compared."""
    target: Partition | None = None
    """The partition that was found to be the best; None: the present one."""
    here: Partition | None = None
    """The partition at the last look."""
    turns: int = 0
    """How often it has changed since the node was idle, without what is forgotten."""
    changed: float = 0.0
    """When the last change was noted or forgotten."""
    filling: bool = False
    """Whether a cycle computes prompts (``cycle.py``). It drains as long as tiers have requests."""
    decode: Partition | None = None
    """The partition in which a cycle decodes; None: there is no cycle."""
    least: float = math.inf
    """The priority of the requests that take part in the cycle, and of less urgent ones."""
    waited: float = 0.0
    """When such a request was last seen to wait."""


def _plan(snapshot: Snapshot, /) -> Plan:
    model, memory = snapshot.cost_model, snapshot.memory
    memory = _noted(snapshot, memory if isinstance(memory, Memory) else Memory())
    stuck = not _holds(snapshot, snapshot.partition)
    if memory.filling or snapshot.parked or _ends(snapshot, memory):
        return _go_on(snapshot, memory, stuck=stuck)
    if memory.decode is not None:
        memory = replace(memory, at=-math.inf, decode=None)
    if model is not None and snapshot.now - memory.at >= REVIEW_SECONDS:
        many = snapshot.waiting >= snapshot.engines and not stuck
        if decode := _cycle(snapshot, model) if many else None:
            least = least_urgent(snapshot)
            memory = replace(memory, target=None, filling=True, decode=decode, least=least)
            return _go_on(snapshot, memory, stuck=stuck)
        if stuck or snapshot.waiting >= snapshot.engines:
            gain = 0.0 if stuck else 1 + SWITCH_GAIN * 2**memory.turns
            memory = replace(memory, at=snapshot.now, target=_best(snapshot, model, gain))
        elif _only_decodes(snapshot) and _has_room(snapshot):
            memory = replace(memory, at=snapshot.now, target=_soonest(snapshot, model))
    dispatches, target = _dispatches(snapshot), memory.target
    if target is None or target == snapshot.partition or not _can_form(snapshot, target):
        return Plan(dispatches, memory=memory, moves=tuple(_moves(snapshot)))
    if snapshot.switching:  # moves may be under way, and none begins before the switch
        return Plan(dispatches, memory=memory)
    reason: SwitchReason = "long" if stuck else "load" if snapshot.waiting else "quiet"
    return Plan(dispatches, target, "carry", reason, memory)


def _cycle(snapshot: Snapshot, model: StepPredictor) -> Partition | None:
    """Return the partition in which a cycle decodes; None: none is clearly the best."""
    work = usual_work(snapshot)
    rate, decode = best_cycle(snapshot, model, work)
    alone = singles(snapshot.engines)
    if decode is None or not _holds(snapshot, alone) or not _can_form(snapshot, decode):
        return None
    others = max(other for _, other in partitions(snapshot, model, work))
    return decode if rate > SPLIT_GAIN * others else None


def _ends(snapshot: Snapshot, memory: Memory) -> bool:
    """Return whether a cycle decodes until the next one has room to carry what is left."""
    decodes = snapshot.partition == memory.decode and snapshot.waiting > 0
    return decodes and not _has_room(snapshot)


def _go_on(snapshot: Snapshot, memory: Memory, *, stuck: bool) -> Plan:
    """Go on with a cycle."""
    work = usual_work(snapshot)
    room = spared(snapshot, work) if memory.filling else snapshot
    dispatches = dispatch_least_loaded(room, prefer=_narrowest)
    if prompts_wait(snapshot, memory.least):
        memory = replace(memory, waited=snapshot.now)
    since, starts = snapshot.now - memory.waited, bool(dispatches)
    if stuck or is_full(snapshot, work, memory.least, starts=starts, since=since):
        memory = replace(memory, filling=False)
    filling = memory.filling
    target = singles(snapshot.engines) if filling else memory.decode
    if target is None or not _can_form(snapshot, target):
        target = snapshot.partition
    if not filling:
        dispatches = only_others(snapshot, memory.least, dispatches)
    if target == snapshot.partition:
        moves = parking(snapshot) if filling else reading(snapshot, work)
        return Plan(dispatches, memory=memory, moves=tuple(moves))
    if snapshot.switching:
        # Either moves are under way, and none begins before the switch, or there is no budget for
        # it. Then requests go on where they can.
        goes_on = not (filling or snapshot.moves or snapshot.pending)
        moves = reading(snapshot, work) if goes_on else iter(())
        return Plan(dispatches, memory=memory, moves=tuple(moves))
    return Plan(dispatches, target, "carry", "load", memory)


def _noted(snapshot: Snapshot, memory: Memory) -> Memory:
    """Return the memory with the changes of the partition since the last look."""
    now, turns = snapshot.now, memory.turns
    if not snapshot.requests:
        return replace(memory, here=snapshot.partition, turns=0, changed=now)
    if memory.here != snapshot.partition and snapshot.pending is None:
        turns = 0 if memory.here is None else min(MOST_TURNS, turns + 1)
        return replace(memory, here=snapshot.partition, turns=turns, changed=now)
    if turns and now - memory.changed > TURN_SECONDS:
        return replace(memory, turns=turns - 1, changed=now)
    return memory


def _holds(snapshot: Snapshot, units: Partition) -> bool:
    """Return whether the widest unit of a partition holds each request of the node."""
    state = snapshot.layout(max(units, key=lambda unit: unit.size).layout)
    longest = max((unit.longest_tokens for unit in snapshot.units), default=0)
    return state is None or (longest <= state.longest and _holds_pool(state, snapshot.pool))


def _holds_pool(state: LayoutState, pool: tuple[PoolRequest, ...]) -> bool:
    """Return whether a layout holds each of these requests: the one with the largest numbers."""
    if not pool:
        return True
    prompt = max(request.prompt_tokens for request in pool)
    total = max(request.total_tokens for request in pool)
    return state.can_hold(replace(pool[0], prompt_tokens=prompt, total_tokens=total))


def _can_form(snapshot: Snapshot, target: Partition) -> bool:
    """Return whether a partition that was chosen earlier can still be formed."""
    return all(snapshot.can_form(unit) for unit in target if unit.is_group)


def _only_decodes(snapshot: Snapshot) -> bool:
    """Return whether no prompt is left, neither in the pool nor in a unit."""
    waits = snapshot.waiting or any(unit.waiting or unit.begun.tokens for unit in snapshot.units)
    return bool(snapshot.requests) and not waits


def _has_room(snapshot: Snapshot) -> bool:
    """Return whether a carry finds room: where KV is full, it computes some requests again."""
    return all(unit.free_blocks >= CARRY_ROOM * unit.total_blocks for unit in snapshot.units)


def _best(snapshot: Snapshot, model: StepPredictor, gain: float) -> Partition | None:
    """Return the partition to change to; None: the present one is about the best.

    Args:
        snapshot: the node.
        model: its steps.
        gain: how many times as many requests another partition must serve.
    """
    rates = dict(partitions(snapshot, model, usual_work(snapshot)))
    rates = {units: rate for units, rate in rates.items() if _holds(snapshot, units)} or rates
    found = best = max(rates, key=rates.__getitem__)
    alike = [units for units in rates if not is_split(units)]
    if is_split(found) and alike:
        best = max(alike, key=rates.__getitem__)
        best = found if rates[found] > SPLIT_GAIN * rates[best] else best
    return best if rates[best] > gain * rates.get(snapshot.partition, 0.0) else None


def _soonest(snapshot: Snapshot, model: StepPredictor) -> Partition | None:
    """Return the partition in which the last requests end clearly sooner; None: the present one."""
    work = usual_work(snapshot)
    if snapshot.outputs:  # the mean falls slowly, and a job may have short outputs only
        work = replace(work, output=min(work.output, snapshot.outputs[-1]))
    here = seconds_to_end(snapshot, model, snapshot.partition, work)
    copy = model.carry_seconds(snapshot.requests * work.tokens, snapshot.engines)
    found = {
        units: seconds_to_end(snapshot, model, units, work) + copy + SWITCH_SECONDS
        for units in uniform(snapshot)
        if units != snapshot.partition and _holds(snapshot, units)
    }
    best = min(found, key=found.__getitem__, default=snapshot.partition)
    return best if SOONER * found.get(best, math.inf) < here else None


def _dispatches(snapshot: Snapshot) -> tuple[Dispatch, ...]:
    """Return what can start: in single engines, while groups get what these hand over."""
    working = any(unit.running or unit.waiting for unit in snapshot.units if unit.unit.size == 1)
    narrow = snapshot.layout(DP)
    fits = narrow is None or _holds_pool(narrow, snapshot.pool)
    if working and fits and is_split(snapshot.partition):
        units = (replace(u, serving=u.serving and not u.unit.is_group) for u in snapshot.units)
        snapshot = replace(snapshot, units=tuple(units))
    return dispatch_least_loaded(snapshot, prefer=_narrowest)


def _narrowest(_: PoolRequest) -> int:
    return 1


def is_split(units: Partition) -> bool:
    """Return whether some engines are single and others are in groups."""
    return len({unit.size for unit in units}) > 1


def _moves(snapshot: Snapshot) -> Iterator[Move]:
    """Yield what single engines hand over: as many requests as groups have room for."""
    if not is_split(snapshot.partition) or snapshot.pending is not None:
        return
    leaving = {move.source for move in snapshot.moves}
    sources = [
        unit
        for unit in snapshot.units
        if unit.serving and not unit.unit.is_group and unit.running and unit.unit not in leaving
    ]
    sources.sort(key=lambda unit: (-unit.running, unit.unit))
    groups = [unit for unit in snapshot.units if unit.serving and unit.unit.is_group]
    work = usual_work(snapshot)
    for group in groups:
        room = _room(snapshot, group, work)
        while room > 0 and sources:
            source = sources.pop(0)
            count = min(room, source.running)
            room -= count
            yield Move(source.unit, group.unit, count)


def _room(snapshot: Snapshot, group: UnitState, work: Work) -> int:
    """Return for how many more requests a group has room."""
    coming = sum(move.requests for move in snapshot.moves if move.destination == group.unit)
    each = math.ceil((work.prompt + work.output / 4) / group.block_tokens) + 1
    spare = group.free_blocks - math.ceil(FULL_SHARE * group.total_blocks)
    return min(group.free_slots, spare // each) - coming


BATCH = Policy("batch", _plan, decides_layout=True, serves_batches=True, parks=True)
"""See the module."""
