"""Cycles of the policy ``batch``: first prompts, then outputs, with KV in the host's memory.

This is how Seesaw (3.1, 4.2) serves a batch. While a cycle *fills*, all engines are alone, and each
parks every request whose prompt it has computed in its tier. While it *drains*, all engines decode
in another layout, whose units read a request from a tier as soon as they have room for it. So their
batches are full until the last request has been read, however long outputs are.

Only the least urgent class of requests waits so. Others start in every phase, and go nowhere.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from shoal.policies.throughput import BACKGROUND, Work, cycle_service, of_job, uniform
from shoal.policies.values.layouts import Unit, alone
from shoal.policies.values.partition import Partition
from shoal.policies.values.plan import Dispatch
from shoal.policies.values.snapshot import (
    Move,
    Snapshot,
    StepPredictor,
    TierState,
    UnitState,
)

LINES_SECONDS = 1.5
"""After so long without lines there are none: the batch worker looks every second how many to send
(``server.batch.sending_window``)."""
SPARE_SHARE = 0.03
"""Share of a unit's blocks that requests from tiers are to leave free when they end."""


def best_cycle(
    snapshot: Snapshot, model: StepPredictor, work: Work
) -> tuple[float, Partition | None]:
    """Return the requests per second of the best cycle, and the partition in which it decodes.

    Behind lines of batches that wait there are others, of which no more come than the node runs.
    """
    endless = any(request.priority >= BACKGROUND for request in snapshot.pool)
    waiting = math.inf if endless else snapshot.waiting
    rates = {
        units: of_job(
            snapshot, model, work, cycle_service(snapshot, model, units[0].layout, work, waiting)
        )
        for units in uniform(snapshot)
        if units[0].is_group and snapshot.tiers
    }
    best = max(rates, key=rates.__getitem__, default=None)
    return (0.0, None) if best is None else (rates[best], best)


def prompts_wait(snapshot: Snapshot, least: float) -> bool:
    """Return whether requests wait that take part in a cycle, or may do."""
    are_seen = snapshot.waiting <= len(snapshot.pool)
    return not are_seen or any(request.priority >= least for request in snapshot.pool)


def is_full(snapshot: Snapshot, work: Work, least: float, *, starts: bool, since: float) -> bool:
    """Return whether a cycle has filled: no prompt is left, or there is no room for another one.

    Args:
        snapshot: the node.
        work: the mean request.
        least: the priority of those that take part; more urgent ones do not.
        starts: whether a request can start now.
        since: for how many seconds none of them has waited.
    """
    if any(unit.waiting for unit in snapshot.units):
        return False
    if prompts_wait(snapshot, least):
        return not starts and len(full_tiers(snapshot, work)) == len(snapshot.tiers)
    if least >= BACKGROUND and since < LINES_SECONDS:
        return False
    room = {alone(tier.unit.leader) for tier in snapshot.tiers} - full_tiers(snapshot, work)
    parts = (unit for unit in snapshot.units if any(of >= least for of, _ in unit.by_priority))
    return not any(unit.unit in room for unit in parts)


def full_tiers(snapshot: Snapshot, work: Work) -> set[Unit]:
    """Return the engines whose tiers have no room for one more request."""
    return {
        alone(tier.unit.leader)
        for tier in snapshot.tiers
        if tier.free_blocks < _blocks(work.prompt, tier.block_tokens)
    }


def least_urgent(snapshot: Snapshot) -> float:
    """Return the priority of the least urgent requests that wait or run."""
    running = (of for unit in snapshot.units for of, _ in unit.by_priority)
    return max(*(each.priority for each in snapshot.pool), *running, -math.inf, -math.inf)


def only_others(
    snapshot: Snapshot, least: float, dispatches: tuple[Dispatch, ...]
) -> tuple[Dispatch, ...]:
    """Return the dispatches of requests that are more urgent than those that take part."""
    priorities = {request.request_id: request.priority for request in snapshot.pool}
    return tuple(each for each in dispatches if priorities[each.request_id] < least)


def spared(snapshot: Snapshot, work: Work) -> Snapshot:
    """Return a node whose engines keep room for one more request once their tiers are full.

    To carry all requests to a group, an engine must have that (``carrying.py``).
    """
    full = full_tiers(snapshot, work)
    units = (
        replace(unit, free_blocks=unit.free_blocks - _blocks(work.prompt, unit.block_tokens))
        if unit.unit in full
        else unit
        for unit in snapshot.units
    )
    return replace(snapshot, units=tuple(units))


def parking(snapshot: Snapshot) -> Iterator[Move]:
    """Yield what single engines park in their tiers: all whose prompts are computed."""
    units = {unit.unit: unit for unit in snapshot.units}
    leaving = {move.source for move in snapshot.moves}
    for tier in snapshot.tiers:
        unit = units.get(alone(tier.unit.leader))
        if unit is not None and unit.serving and unit.running and unit.unit not in leaving:
            yield Move(unit.unit, tier.unit, unit.running)


def reading(snapshot: Snapshot, work: Work) -> Iterator[Move]:
    """Yield what units read from tiers: as many requests as they have room for, groups first."""
    leaving = {move.source for move in snapshot.moves}
    tiers = [tier for tier in snapshot.tiers if tier.tokens and tier.unit not in leaving]
    tiers.sort(key=lambda tier: (-len(tier.tokens), tier.unit))
    units = [unit for unit in snapshot.units if unit.serving]
    units.sort(key=lambda unit: (-unit.unit.size, -unit.free_blocks, unit.unit))
    while tiers and units:
        share = -(-len(tiers) // len(units))
        unit, mine, tiers = units.pop(0), tiers[:share], tiers[share:]
        yield from _read(snapshot, unit, mine, work)


def _read(
    snapshot: Snapshot, unit: UnitState, tiers: list[TierState], work: Work
) -> Iterator[Move]:
    room, slots = _room(snapshot, unit, work)
    for tier in tiers:
        count = 0
        for tokens in tier.tokens:
            blocks = _blocks(tokens + work.output, unit.block_tokens)
            is_first = not (unit.requests or count) and room > 0
            if slots < 1 or (blocks > room and not is_first):
                break
            room, slots, count = room - blocks, slots - 1, count + 1
        if count:
            yield Move(tier.unit, unit.unit, count)


def _room(snapshot: Snapshot, unit: UnitState, work: Work) -> tuple[int, int]:
    """Return for how many more blocks and requests a unit has room.

    Each of its requests is taken to get a whole output more: what has no room when it grows is
    preempted, and to compute it again takes as long as many steps of all others.
    """
    coming = sum(move.requests for move in snapshot.moves if move.destination == unit.unit)
    ends = unit.context_tokens + unit.requests * work.output
    taken = math.ceil(ends / unit.block_tokens) + unit.requests
    taken += coming * _blocks(work.prompt + work.output, unit.block_tokens)
    free = math.floor((1 - SPARE_SHARE) * unit.total_blocks) - taken
    return min(free, unit.free_blocks), unit.free_slots - coming


def _blocks(tokens: float, block_tokens: int) -> int:
    return math.ceil(tokens / block_tokens) + 1
