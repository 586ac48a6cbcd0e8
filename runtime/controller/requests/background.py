"""Background requests: they run where nobody else does, and leave when others come.

A request of the least urgent priority is worth nothing to be early. So policies, which decide for
people, see a node without such requests: their seats and blocks count as free. Background requests
have the units that people can spare (``spared_units.py``). To policies these seem to have much
to do, so people's requests go to the others. When a person's request comes to a spared unit
nevertheless, and when the unit is wanted back, the background requests are taken out, but for a few
in a spared unit that slow its steps down by no more than ``SLOWDOWN``. While others run there, new
ones follow these only now and then (``PROMPT_SHARE``). Those that are taken out go back into the
task pool with the tokens that they have. They find their KV in the unit's prefix cache when they
come back, as long as nobody else has needed the room.

A request that has waited so long that a person's new request would come after it
(``pool.TaskPool``) counts as a person's, so that it does not wait for ever.
"""

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice

from shoal.policies.cost.cost_model import CostModel
from shoal.policies.crowding import STEPS_AHEAD
from shoal.policies.values.batch import Batch
from shoal.policies.values.layouts import Unit
from shoal.policies.values.plan import Dispatch, Plan
from shoal.policies.values.snapshot import PoolRequest, Snapshot, UnitState
from shoal.runtime.config import BACKGROUND_PRIORITY
from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.capacity import Capacity
from shoal.runtime.controller.books.core_book import CoreBook
from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.controller.requests.spared_units import Occupancy, SparedUnits
from shoal.runtime.protocol import messages as m

SLOWDOWN = 0.01
"""Share by which background requests that decode may lengthen a step of other requests."""
PROMPT_SHARE = 0.0025
"""Share of the time that their prompts may take where other requests run. A prompt delays few of
these for long, so the 90th percentile notices more of it than the mean."""
RESERVE = 8
"""One part in so many of a unit's seats and KV blocks is left to others."""
PROMPT_TOKENS = 512
"""Prompt tokens of background requests that may be on their way to a unit: others that come wait
for the step that computes them."""
CONSIDERED = 32
"""Background requests that are considered at once, in the order of the pool."""
RETURN_SECONDS = 2.0
"""How long a request that was taken out waits for the unit that has its KV."""
TRIED = 8
"""Requests by which the time that one adds to a step is estimated."""


class Background:
    """Starts background requests, and takes them out of units that others need.

    Args:
        env: the transport to engines, and how fast requests age.
        books: where every request is.
        capacity: has the cost model.
    """

    def __init__(self, env: Environment, books: Books, capacity: Capacity) -> None:
        self._transport = env.transport
        self._aging = env.config.aging_seconds
        self._requests = books.requests
        self._pool = books.requests.pool
        self._capacity = capacity
        self._leaving: dict[str, Unit] = {}
        """Requests that are being taken out, and of which unit."""
        self._spared = SparedUnits()
        """Those that people do without."""
        self._next: dict[Unit, float] = {}
        """When the next one may start in a unit where others run."""

    def without(self, snapshot: Snapshot) -> Snapshot:
        """Return the node as it is without background requests: what policies see."""
        pool = tuple(r for r in snapshot.pool if not self._is_ours(r, snapshot))
        units = tuple(self._without(unit, snapshot) for unit in snapshot.units)
        if len(pool) == len(snapshot.pool) and all(map(operator.is_, units, snapshot.units)):
            return snapshot
        return replace(
            snapshot,
            pool=pool,
            units=units,
            waiting=max(len(pool), snapshot.waiting - self._pool.background),
            waiting_tokens=max(
                sum(r.prompt_tokens for r in pool),
                snapshot.waiting_tokens - self._pool.background_tokens,
            ),
        )

    def plan(self, snapshot: Snapshot, plan: Plan) -> Plan:
        """Take out what is in the way, and return which background requests start now.

        Args:
            snapshot: the node, with all its requests.
            plan: what the policy does with the others.
        """
        here = bool(self._pool.background) or any(
            unit.by_priority and unit.by_priority[-1][0] >= BACKGROUND_PRIORITY
            for unit in snapshot.units
        )
        if not here:
            units = [Occupancy(unit.unit, unit.requests, 0) for unit in snapshot.units]
            self._see_people(snapshot, units, needed=False)
            return Plan()
        self._leaving = {
            name: unit for name, unit in self._leaving.items() if self._requests.where(name) == unit
        }
        coming = {dispatch.request_id for dispatch in plan.dispatches}
        # A request that needs a wider unit gains nothing if these units are cleared.
        waits = any(
            r.request_id not in coming
            and not self._yields(r, snapshot.now)
            and any(unit.can_hold(r) for unit in snapshot.units)
            for r in snapshot.pool
        )
        rooms = [_Room(self, unit, snapshot) for unit in snapshot.units]
        rooms = [room for room in rooms if room.unit.serving]
        units = [self._occupancy(room, is_only=len(rooms) == 1) for room in rooms]
        self._see_people(snapshot, units, needed=True)
        for room in rooms:
            spared = room.unit.unit in self._spared.units
            self._take_out(room, everything=waits or not spared)
        rooms = [room for room in rooms if room.unit.unit in self._spared.units]
        if waits or plan.target is not None or not self._pool.background:
            return Plan()
        return Plan(dispatches=tuple(self._starts(snapshot, rooms)))

    def _occupancy(self, room: "_Room", *, is_only: bool) -> Occupancy:
        waiting = self._pool.background
        mean = self._pool.background_tokens / waiting if waiting else 0.0
        return Occupancy(
            room.unit.unit,
            room.others,
            len(room.staying),
            room.wait_of_next(waiting, mean) if is_only else 0.0,
            room.waited,
            room.queued,
        )

    def _see_people(self, snapshot: Snapshot, units: Sequence[Occupancy], *, needed: bool) -> None:
        arrived = [seen for seen in snapshot.arrived if not self._yields(seen, snapshot.now)]
        self._spared.see(snapshot, units, arrived, needed=needed)

    def of(self, core: CoreBook, now: float) -> list[PoolRequest]:
        """Return a core's background requests, in the order in which they were sent."""
        if not any(priority >= BACKGROUND_PRIORITY for priority in core.figures.priorities):
            return []
        every = (request.seen for request in core.requests.values())
        return [seen for seen in every if self._yields(seen, now)]

    def core(self, unit: Unit) -> CoreBook:
        """Return the book of a unit's core."""
        return self._requests.core(unit)

    @property
    def cost_model(self) -> CostModel | None:
        """Predicts steps."""
        return self._capacity.costs.model

    def is_leaving(self, seen: PoolRequest) -> bool:
        """Return whether a request is being taken out of its unit."""
        return seen.request_id in self._leaving

    def _is_ours(self, seen: PoolRequest, snapshot: Snapshot) -> bool:
        """Return whether a waiting request yields; one that needs a wider unit is the policy's."""
        if not self._yields(seen, snapshot.now):
            return False
        return any(unit.can_hold(seen) for unit in snapshot.units)

    def _yields(self, seen: PoolRequest, now: float) -> bool:
        waited = now - seen.arrival
        return seen.priority >= BACKGROUND_PRIORITY and waited < seen.priority * self._aging

    def _without(self, unit: UnitState, snapshot: Snapshot) -> UnitState:
        """Return a unit's state; the more context its steps read, the later it is chosen."""
        hidden = self.of(self.core(unit.unit), snapshot.now)
        if unit.unit in self._spared.units:
            own = unit.context_tokens - sum(seen.prompt_tokens for seen in hidden)
            # Among units that are spared alike, one with few background requests is free earlier.
            context = max(0, own) + self._spared.context_of(snapshot) + len(hidden)
            unit = replace(unit, context_tokens=context)
        if not hidden:
            return unit
        count, kept = len(hidden), dict(unit.by_priority)
        for seen in hidden:
            kept[seen.priority] -= 1
        blocks = sum(unit.blocks_for(seen) for seen in hidden)
        return replace(
            unit,
            requests=unit.requests - count,
            running=max(0, unit.running - count),
            waiting=max(0, unit.waiting - sum(self.is_leaving(seen) for seen in hidden)),
            free_slots=unit.free_slots + count,
            free_blocks=min(unit.total_blocks, unit.free_blocks + blocks),
            by_priority=tuple((p, n) for p, n in kept.items() if n),
        )

    def _take_out(self, room: "_Room", *, everything: bool) -> None:
        """Take requests out of a unit that others need: the latest first."""
        if not everything and room.others == 0:
            return
        most = 0 if everything else room.most_beside_others()
        surplus = room.staying[most:]
        if surplus:
            names = [seen.request_id for seen in surplus]
            self._leaving |= dict.fromkeys(names, room.unit.unit)
            room.staying = room.staying[:most]
            self._transport.to_engine(room.unit.unit.leader, m.MoveOut(room.unit.unit, names))

    def _starts(self, snapshot: Snapshot, rooms: "list[_Room]") -> Iterator[Dispatch]:
        rooms = [room for room in rooms if self._is_open(room, snapshot.now)]
        ours = (seen for seen in snapshot.pool if self._is_ours(seen, snapshot))
        for seen in islice(ours, CONSIDERED) if rooms else ():
            if not rooms:
                return
            awaited = self._waits_for(seen, snapshot.now)
            able = [
                room for room in rooms if awaited in (None, room.unit.unit) and room.takes(seen)
            ]
            if able:
                best = min(able, key=lambda room: room.rank(seen))
                if best.others:
                    pause = best.prompt_seconds(seen) / PROMPT_SHARE
                    self._next[best.unit.unit] = snapshot.now + pause
                best.take(seen)
                yield Dispatch(seen.request_id, best.unit.unit)
                rooms = [room for room in rooms if self._is_open(room, snapshot.now)]

    def _is_open(self, room: "_Room", now: float) -> bool:
        """Return whether any background request could start in a unit now."""
        if not room.unit.serving or (room.others and self._next.get(room.unit.unit, now) > now):
            return False
        return room.is_ready and room.slots > 0

    def _waits_for(self, seen: PoolRequest, now: float) -> Unit | None:
        """Return the unit that a request still waits for, because its KV is there."""
        request = self._pool.get(seen.request_id)
        moved_at = None if request is None else request.moved_at
        if moved_at is None or now - moved_at > RETURN_SECONDS or not seen.cached:
            return None
        return max(seen.cached, key=lambda found: found[1])[0]


class _Room:
    """What background requests may have of a unit."""

    def __init__(self, background: Background, unit: UnitState, snapshot: Snapshot) -> None:
        core = background.core(unit.unit)
        own = background.of(core, snapshot.now)
        self.unit = unit
        self.staying = [seen for seen in own if not background.is_leaving(seen)]
        self.others = len(core.requests) - len(own)
        self._others_before = unit.requests - len(own)
        self._step_tokens = snapshot.chunk(unit.unit.layout)
        self._core = core
        self._model = background.cost_model
        self._queued = unit.prefill_tokens if unit.waiting else 0
        self._leaves = len(own) > len(self.staying)

    @cached_property
    def slots(self) -> int:
        """Background requests that may start here."""
        if self._leaves:
            return 0  # what is left of its prefixes is known when they have gone
        if self.others:
            return self.most_beside_others() - len(self.staying)
        return self._seats

    @property
    def _seats(self) -> int:
        """Return how many more requests may be here while nobody else is."""
        limit = self.unit.free_slots + self.unit.requests
        return self.unit.free_slots - math.ceil(limit / RESERVE)

    def most_beside_others(self) -> int:
        """Return how many background requests the others hardly notice."""
        if self._model is None or self.unit.free_blocks < self.unit.total_blocks // RESERVE:
            return 0
        layout, alone = self.unit.unit.layout, self._batch_of_others
        tokens = sum(seen.prompt_tokens for seen in self.staying)
        mean = tokens // len(self.staying) if self.staying else PROMPT_TOKENS
        more = Batch(alone.decodes + TRIED, alone.context_tokens + TRIED * mean)
        step = self._model.step_seconds(layout, alone)
        added = (self._model.step_seconds(layout, more) - step) / TRIED
        most = self.unit.free_slots + len(self.staying)
        return most if added <= 0 else min(most, int(step * SLOWDOWN / added))

    @property
    def _batch_of_others(self) -> Batch:
        tokens = sum(seen.prompt_tokens for seen in self.staying)
        return Batch(max(1, self.others), max(0, self._core.figures.prompt_tokens - tokens))

    def wait_of_next(self, waiting: int, mean: float) -> float:
        """Return for how long a person's request would wait if only background requests were here.

        Args:
            waiting: background requests in the pool.
            mean: their prompts' tokens, in the mean.
        """
        if self._model is None or self.others:
            return 0.0
        blocks = self.unit.free_blocks - self.unit.total_blocks // RESERVE
        fit = int(blocks * self.unit.block_tokens / max(1.0, mean))
        more = max(0, min(self._seats, waiting, fit))
        context = self.unit.context_tokens + more * mean
        return self._wait(len(self.staying) + more, context, mean)

    @property
    def waited(self) -> float:
        """For how long the first of the others waits for background requests that are here."""
        if self._model is None or self._others_before or not (self.others and self.unit.requests):
            return 0.0
        return self._wait(self.unit.running, self.unit.context_tokens, self._queued)

    @property
    def queued(self) -> float:
        """For how long the others that have just come wait for prompts of those before."""
        came = self.others - self._others_before
        if self._model is None or came <= 0 or not (self._others_before and self._queued):
            return 0.0
        prompts = Batch(0, 0, self._queued, self._queued // 2)
        return came * self._model.step_seconds(self.unit.unit.layout, prompts)

    def _wait(self, decodes: int, context: float, prompt: float) -> float:
        """Return the seconds of the steps that are under way when a request comes."""
        assert self._model is not None
        new = min(self._step_tokens, round(prompt))
        batch = Batch(decodes, round(context), new, new // 2)
        return STEPS_AHEAD * self._model.step_seconds(self.unit.unit.layout, batch)

    def prompt_seconds(self, seen: PoolRequest) -> float:
        """Return by how much a request's prompt lengthens a step of the others."""
        if self._model is None:
            return math.inf
        layout, alone, new = self.unit.unit.layout, self._batch_of_others, self._new(seen)
        both = replace(alone, prefill_tokens=new, prefill_context=seen.prompt_tokens - new // 2)
        step = self._model.step_seconds
        return max(0.0, step(layout, both) - step(layout, alone))

    @property
    def is_ready(self) -> bool:
        """Whether the prompts on their way are few enough for one more."""
        return self._queued < (1 if self.others else PROMPT_TOKENS)

    def takes(self, seen: PoolRequest) -> bool:
        """Return whether a request may start here now."""
        if self._queued and self._queued + self._new(seen) > PROMPT_TOKENS:
            return False
        spare = self.unit.free_blocks - self.unit.total_blocks // RESERVE
        return self.unit.can_hold(seen) and self._blocks(seen) <= spare

    def take(self, seen: PoolRequest) -> None:
        """Take a request's share."""
        self.slots -= 1
        self._queued += self._new(seen)
        self.unit = replace(self.unit, free_blocks=self.unit.free_blocks - self._blocks(seen))

    def rank(self, seen: PoolRequest) -> tuple[int, int, int]:
        """Return what makes the unit a worse one for a request."""
        return self._new(seen), self.others, len(self.staying)

    def _new(self, seen: PoolRequest) -> int:
        return max(1, seen.prompt_tokens - seen.cached_in(self.unit.unit))

    def _blocks(self, seen: PoolRequest) -> int:
        return -(-seen.total_tokens // self.unit.block_tokens)
