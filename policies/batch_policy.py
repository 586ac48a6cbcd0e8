"""The partition that serves most requests per second while there are always more of them.

Seesaw (3.1) finds that prompts are computed fastest without exchanges between engines, and outputs
where a group reads the weights together. It re-shards all engines between the two, and needs a
buffer in the host's memory, because a switch pays only if it is rare. In Shoal every engine has all
weights, so both layouts may be there at once: single engines compute prompts, and hand requests
over to groups, which stay full however long outputs are (``throughput.py``). No switch is needed
while the work stays alike, and no output waits for prompts.

The policy predicts what each partition would serve, by the cost model and by the lengths of the
requests that wait and of the outputs that ended, and takes the best. Layouts for all engines are
among them, pipelines too. A split must be clearly better than these, and every partition clearly
better than the present one. If the node can change its level of memory, that is judged first
(``batch_level.py``). When nothing waits any more, the last requests go to the layout in which they
end soonest, which is mostly the widest one that holds them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shoal.policies.batch_level import best_level
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
    holds,
    holds_pool,
    longest_output,
    partitions,
    prompts_left,
    seconds_to_end,
    uniform,
    usual_work,
)
from shoal.policies.values.layouts import DP
from shoal.policies.values.level import Level
from shoal.policies.values.partition import Partition, singles
from shoal.policies.values.plan import Dispatch, Plan, Policy, SwitchReason
from shoal.policies.values.snapshot import (
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
FEW_SHARE = 0.25
"""If for each request that runs fewer prompts than this are left, no partition is compared any
more: the node soon goes where the last requests end soonest."""
SOONER = 1.15
"""When nothing waits, the last requests must take so many times as long in the present partition
as in another one, its switch included."""
FULL_SHARE = 0.02
"""Share of a group's blocks that stays free when requests are handed over, so that they can grow.
"""
CARRY_ROOM = 0.05
"""Share of each unit's blocks that must be free before the last requests are carried elsewhere."""
CYCLE_ROOM = 0.3
"""The same before the next cycle begins."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What the policy remembers from one plan to the next."""

    at: float = -math.inf
    """When partitions were last compared."""
    target: Partition | None = None
    """The partition that was found to be the best; None: the present one."""
    goal: Level | None = None
    """The level of memory that was found to be the best; None: the present one."""
    here: Partition | None = None
    """The partition at the last look."""
    level: Level | None = None
    """The level of memory at the last look."""
    turns: int = 0
    """How often one of both has changed since the node was idle, without what is forgotten."""
    changed: float = 0.0
    """When the last change was noted or forgotten."""
    filling: bool = False
    """Whether a cycle computes prompts (``cycle.py``). It drains as long as tiers have requests."""
    decode: Partition | None = None
    """The partition in which a cycle decodes; None: there is no cycle."""
    least: float = math.inf
    """The priority of the requests that take part in the cycle, and of less urgent ones."""
    longest: float = 0.0
    """Most tokens that an output may have of the requests that were in the pool since the node was
    idle; 0: there were none."""
    waited: float = 0.0
    """When such a request was last seen to wait."""


def _plan(snapshot: Snapshot, /) -> Plan:
    model, memory = snapshot.cost_model, snapshot.memory
    memory = _noted(snapshot, memory if isinstance(memory, Memory) else Memory())
    stuck = not holds(snapshot, snapshot.partition)
    if memory.filling or snapshot.parked or _ends(snapshot, memory):
        return _go_on(snapshot, memory, stuck=stuck)
    if memory.decode is not None:
        memory = replace(memory, at=-math.inf, decode=None)
    if model is not None and snapshot.now - memory.at >= REVIEW_SECONDS:
        memory = _reviewed(snapshot, model, memory, stuck=stuck)
        if memory.filling:
            return _go_on(snapshot, memory, stuck=stuck)
    dispatches, target = _dispatches(snapshot), memory.target
    is_new = target is not None and target != snapshot.partition and _can_form(snapshot, target)
    if memory.goal is None and not is_new:
        return Plan(dispatches, memory=memory, moves=tuple(_moves(snapshot)))
    if not snapshot.switching or memory.level != snapshot.level:
        # What starts now would be spread over units that soon are no more.
        dispatches = only_others(snapshot, least_urgent(snapshot), dispatches)
    if snapshot.switching:  # moves may be under way, and none begins before the change
        return Plan(dispatches, memory=memory)
    if memory.goal is not None:
        return _plan_for_level(snapshot, memory, dispatches)
    reason: SwitchReason = "long" if stuck else "load" if prompts_left(snapshot) else "quiet"
    return Plan(dispatches, target, "carry", reason, memory)


def _cycle(snapshot: Snapshot, model: StepPredictor, work: Work) -> Partition | None:
    """Return the partition in which a cycle decodes; None: none is clearly the best."""
    rate, decode = best_cycle(snapshot, model, work)
    alone = singles(snapshot.engines)
    if decode is None or not holds(snapshot, alone) or not _can_form(snapshot, decode):
        return None
    others = max(other for _, other in partitions(snapshot, model, work))
    return decode if rate > SPLIT_GAIN * others else None


def _ends(snapshot: Snapshot, memory: Memory) -> bool:
    """Return whether a cycle decodes until the next one has room to carry what is left."""
    decodes = snapshot.partition == memory.decode and snapshot.waiting > 0
    return decodes and not _has_room(snapshot, CYCLE_ROOM)


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
    """Return the memory with the changes of partition and level since the last look."""
    now, turns = snapshot.now, memory.turns
    longest = max(memory.longest, longest_output(snapshot) if snapshot.pool else 0.0)
    memory = replace(memory, longest=longest if snapshot.requests else 0.0)
    offered = [each.level for each in snapshot.share_levels]
    if not (memory.goal in offered or snapshot.switching):
        memory = replace(memory, goal=None)
    here = replace(memory, here=snapshot.partition, level=snapshot.level, changed=now)
    if not snapshot.requests:
        return replace(here, turns=0)
    if memory.level not in (None, snapshot.level):
        if snapshot.switching:  # the change is under way, and steps are not yet those of the level
            return replace(memory, at=now)
        return replace(here, at=-math.inf, turns=min(MOST_TURNS, turns + 1))
    if memory.here != snapshot.partition and snapshot.pending is None:
        return replace(here, turns=0 if memory.here is None else min(MOST_TURNS, turns + 1))
    if turns and now - memory.changed > TURN_SECONDS:
        return replace(memory, turns=turns - 1, changed=now)
    return memory


def _can_form(snapshot: Snapshot, target: Partition) -> bool:
    """Return whether a partition that was chosen earlier can still be formed."""
    return all(snapshot.can_form(unit) for unit in target if unit.is_group)


def _only_decodes(snapshot: Snapshot) -> bool:
    """Return whether no prompt is left, neither in the pool nor in a unit."""
    waits = prompts_left(snapshot) or any(unit.begun.tokens for unit in snapshot.units)
    return bool(snapshot.requests) and not waits


def _has_room(snapshot: Snapshot, share: float) -> bool:
    """Return whether a carry finds room: where KV is full, it computes some requests again."""
    return all(unit.free_blocks >= share * unit.total_blocks for unit in snapshot.units)


def _reviewed(snapshot: Snapshot, model: StepPredictor, memory: Memory, *, stuck: bool) -> Memory:
    """Return the memory with what serves the requests best: a level, a cycle or a partition."""
    left = prompts_left(snapshot)
    few = left < max(snapshot.engines, FEW_SHARE * (snapshot.requests - left))
    if few and not stuck:
        if not (_only_decodes(snapshot) and _has_room(snapshot, CARRY_ROOM)):
            return memory
        return replace(memory, at=snapshot.now, target=_soonest(snapshot, model))
    gain = 0.0 if stuck else 1 + SWITCH_GAIN * 2**memory.turns
    work = usual_work(snapshot, memory.longest or math.inf)
    if level := best_level(snapshot, model, work, gain):
        return replace(memory, at=snapshot.now, target=None, goal=level.level)
    if decode := None if stuck else _cycle(snapshot, model, work):
        least = least_urgent(snapshot)
        return replace(memory, target=None, filling=True, decode=decode, least=least)
    return replace(memory, at=snapshot.now, target=_best(snapshot, model, work, gain))


def _plan_for_level(snapshot: Snapshot, memory: Memory, dispatches: tuple[Dispatch, ...]) -> Plan:
    level = next(each for each in snapshot.share_levels if each.level == memory.goal)
    here, there = (sum(of.total_blocks for of in each.layouts) for each in (snapshot, level))
    return Plan(
        dispatches,
        memory=memory,
        share_weights=level.share,
        share_stages=level.stages,
        share_reason="kv" if there > here else "steps",
    )


def _best(snapshot: Snapshot, model: StepPredictor, work: Work, gain: float) -> Partition | None:
    """Return the partition to change to; None: the present one is about the best.

    Args:
        snapshot: the node.
        model: its steps.
        work: the mean request.
        gain: how many times as many requests another partition must serve.
    """
    rates = dict(partitions(snapshot, model, work))
    rates = {units: rate for units, rate in rates.items() if holds(snapshot, units)} or rates
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
        if units != snapshot.partition and holds(snapshot, units)
    }
    best = min(found, key=found.__getitem__, default=snapshot.partition)
    return best if SOONER * found.get(best, math.inf) < here else None


def _dispatches(snapshot: Snapshot) -> tuple[Dispatch, ...]:
    """Return what can start: in single engines, while groups get what these hand over."""
    working = any(unit.running or unit.waiting for unit in snapshot.units if unit.unit.size == 1)
    narrow = snapshot.layout(DP)
    fits = narrow is None or holds_pool(narrow, snapshot.pool)
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
