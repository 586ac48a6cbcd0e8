"""How much every unit can take now: the snapshot from which policies decide."""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from shoal.policies.values.batch import NO_PROMPTS
from shoal.policies.values.layouts import Layout, Unit, alone, tier_of
from shoal.policies.values.partition import Partition
from shoal.policies.values.plan import Policy
from shoal.policies.values.snapshot import (
    LayoutState,
    Move,
    PoolRequest,
    Snapshot,
    TierState,
    UnitState,
    requests_on,
)
from shoal.runtime.config import BACKGROUND_PRIORITY, NodeConfig
from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.carry_book import Carry
from shoal.runtime.controller.books.core_book import CoreBook, Uncounted
from shoal.runtime.controller.books.demand import NO_NEWS, Demand, Lengths, News, most_urgent
from shoal.runtime.controller.books.engine_book import EngineState
from shoal.runtime.controller.books.statistics import HANDOVER
from shoal.runtime.controller.books.step_costs import StepCosts
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire

POOL_HEAD = 256
"""Most requests of the pool that a policy sees. No node starts so many in one turn."""
LOOKED_UP = 64
"""Most requests of the pool whose prefixes are looked up at once: each takes some microseconds."""
BACKGROUND_LOOKED_UP = 8
"""The same of background requests, which wait even while units have seats."""
LEASE_BLOCKS = 64
"""Smallest number of blocks that each member of a new group is asked for."""


class Capacity:
    """Computes what the engines' last reports, and the requests sent since then, leave free.

    Attributes:
        costs: how long steps take.

    Args:
        config: the node.
        books: engines, units and requests.
    """

    def __init__(self, config: NodeConfig, books: Books) -> None:
        self._config = config
        self._engines = books.engines
        self._units = books.units
        self._requests = books.requests
        self._pool = books.requests.pool
        self._leases = books.leases
        self._carries = books.carries
        self._prefixes = books.prefixes
        self.costs = StepCosts(config, books)
        self._forms_groups = True
        self._lengths = Lengths()
        self.latest: Snapshot | None = None
        self._states: dict[Unit, tuple[Uncounted, Any, UnitState]] = {}
        """The latest state of every unit, with what it was computed from."""

    def follow(self, policy: Policy) -> None:
        """From now on count groups as available only if this policy forms groups."""
        self._forms_groups = policy.forms_groups

    def snapshot(
        self,
        now: float,
        demand: Demand,
        *,
        switching: bool,
        busy: Collection[int],
        pending: Partition | None,
        since_switch: float = math.inf,
        sp_above: tuple[tuple[Layout, int], ...] = (),
        news: News = NO_NEWS,
    ) -> Snapshot:
        """Return what a policy may know.

        Args:
            now: the clock.
            demand: provides smoothed figures, and is told the current ones.
            switching: whether no switch can start.
            busy: the engines that a running switch regroups.
            pending: the target of the running switch.
            since_switch: seconds since the last switch ended.
            sp_above: see ``Snapshot``.
            news: what has become of requests.
        """
        self._prefixes.fit()
        engines, pool, units = self._engines, self._pool.head(POOL_HEAD), self._unit_states(busy)
        demand.see(now, self._people(units), most_urgent(pool, units))
        self.latest = Snapshot(
            now=now,
            **news._asdict(),
            engines=self._config.engines,
            max_group=self._config.max_group,
            dead=engines.gone | engines.in_state(EngineState.SILENT) | engines.drained,
            broken=frozenset(engines.unformed(self._possible_groups)),
            partition=self._units.partition,
            switching=switching,
            units=units,
            pool=self._with_cached(pool, units),
            pending=pending,
            waiting=len(self._pool),
            waiting_tokens=self._pool.tokens,
            **demand.rates(now)._asdict(),
            **self._lengths.known._asdict(),
            **self._prefixes.hits._asdict(),
            since_switch=since_switch,
            layouts=self._layouts,
            cost_model=self.costs.model,
            targets=self._config.targets,
            short_first=self._config.short_first,
            schedules_ahead=self._config.schedules_ahead,
            copies_ahead=self._config.copies_ahead,
            urgent_engines=self._config.urgent_engines,
            sp_above=sp_above,
            moves=self._moves,
            tiers=self._tiers,
            step_tokens=self.step_tokens,
        )
        return self.latest

    @property
    def _moves(self) -> tuple[Move, ...]:
        """Return the handovers that are under way."""
        moves = (carry for carry in self._carries if carry.reason == HANDOVER)
        return tuple(Move(move.source, move.destination, len(move.ids)) for move in moves)

    @property
    def _tiers(self) -> tuple[TierState, ...]:
        """Return the tiers of the engines that serve."""
        states = map(self.tier, sorted(self._engines.open))
        return tuple(state for state in states if state is not None)

    def tier(self, engine: int) -> TierState | None:
        """Return the state of an engine's tier; None if it has none, or it has not reported yet."""
        blocks = self._engines.tier_blocks(engine)
        if not blocks:
            return None
        core, limits = self._requests.core(tier_of(engine)), self._engines.limits(alone(engine))
        return _tier_state(core, blocks, limits)

    def _people(self, units: Iterable[UnitState]) -> int:
        """Return the requests on the node without background requests, which wait for nothing."""
        parked = self._requests.parked
        priorities = (
            *(each for unit in units for each in unit.by_priority),
            *(each for core in parked for each in core.figures.by_priority),
        )
        background = sum(count for of, count in priorities if of >= BACKGROUND_PRIORITY)
        all_requests = requests_on(len(self._pool) - self._pool.background, units)
        return all_requests + sum(len(core.requests) for core in parked) - background

    def _with_cached(
        self, pool: tuple[PoolRequest, ...], units: tuple[UnitState, ...]
    ) -> tuple[PoolRequest, ...]:
        """Say of the requests that may start now where their prefixes are cached."""
        seats = min(LOOKED_UP, sum(unit.free_slots for unit in units if unit.serving))
        if not (seats and pool and self._config.place_by_prefix):
            return pool
        if self._pool.background:
            urgent = sum(one.priority < BACKGROUND_PRIORITY for one in pool)
            seats = min(seats, urgent + BACKGROUND_LOOKED_UP)
        serving = [unit.unit for unit in units if unit.serving]
        return (*(self._one_with_cached(one, serving) for one in pool[:seats]), *pool[seats:])

    def _one_with_cached(self, seen: PoolRequest, units: Sequence[Unit]) -> PoolRequest:
        request = self._pool.get(seen.request_id)
        found = {} if request is None else self._prefixes.where(request.prompt, units)
        if request is None or not found:
            return seen
        cached = tuple((unit, request.prompt.common_tokens(count)) for unit, count in found.items())
        return replace(seen, cached=cached, prefix=request.prompt.hashes[max(found.values()) - 1])

    @cached_property
    def _layouts(self) -> tuple[LayoutState, ...]:
        """What every layout holds on idle engines; computed again when they are resized."""
        blocks = min(self._engines.num_blocks(engine.number) for engine in self._engines)
        return self.layouts_with(blocks)

    def layouts_with(self, blocks: int) -> tuple[LayoutState, ...]:
        """Return what every layout holds if engines have so many KV blocks each."""
        limits = map(self._engines.limits_of, self._config.layouts)
        return tuple(_layout_state(each, blocks) for each in limits)

    def idle(self, group: Unit, blocks: int | None = None) -> LayoutState:
        """Return what a group holds while nothing runs on its engines.

        Args:
            group: the group.
            blocks: if its engines had no more KV blocks than this each; None: what they have.
        """
        limits = self._engines.limits(group)
        has = min(self._engines.num_blocks(engine) for engine in group.engines)
        return _layout_state(limits, has if blocks is None else min(has, blocks))

    def resized(self) -> None:
        """Take note that engines have more or fewer KV blocks now."""
        self.__dict__.pop("_layouts", None)
        self._states.clear()

    def observe(self, core: CoreBook, load: m.Load) -> None:
        """Learn from the steps between a core's last report and this one."""
        if core.load is not None:
            known = self.costs.observe(core, load)
            self._lengths.see(known, started=core.begun_since(load), ended=len(load.finished))

    def see_lengths(self, ended: Collection[tuple[int, int, int | None]]) -> None:
        """Note the tokens of requests that have ended (``Lengths.end``)."""
        self._lengths.end(ended)

    def _unit_states(self, busy: Collection[int]) -> tuple[UnitState, ...]:
        paused = self._requests.paused
        return tuple(
            self.unit_state(
                group,
                serving=self._engines.takes(group)
                and not any(engine in busy for engine in group.engines),
                paused=paused[group],
            )
            for group in self._units.partition
        )

    def unit_state(self, group: Unit, *, serving: bool, paused: int) -> UnitState:
        """Return a unit's state. If nothing has changed, this is the object of the last call."""
        core = self._requests.core(group)
        serving, blocks = serving and core.load is not None, self._startable_blocks(core)
        told = serving, blocks, paused, self._prefixes.tokens(group)
        uncounted, before, known = self._states.get(group, (None, None, None))
        if known is None or core.uncounted is not uncounted or before != told:
            known = self._state(core, *told)
            self._states[group] = core.uncounted, told, known
        return known

    def _state(
        self, core: CoreBook, serving: bool, free_blocks: int, paused: int, cached_tokens: int
    ) -> UnitState:
        group, limits = core.unit, self._engines.limits(core.unit)
        figures, uncounted = core.figures, core.uncounted
        room = free_blocks * limits.block_tokens - figures.prompt_tokens
        places = limits.max_num_seqs + self._config.queued_ahead
        return UnitState(
            unit=group,
            serving=serving,
            requests=len(core.requests),
            free_slots=max(0, places - len(core.requests)),
            free_blocks=free_blocks,
            total_blocks=min(self._engines.num_blocks(engine) for engine in group.engines),
            block_tokens=limits.block_tokens,
            max_model_len=limits.max_model_len,
            running=len(core.requests) - len(uncounted.requests),
            waiting=len(uncounted.requests),
            context_tokens=figures.prompt_tokens,
            prefill_tokens=uncounted.prompt_tokens,
            begun=core.load.begun if core.load else NO_PROMPTS,
            prompts=tuple(request.seen.prompt_tokens for request in uncounted.requests),
            by_priority=figures.by_priority,
            longest_tokens=figures.longest_tokens,
            paused=paused,
            cached_tokens=cached_tokens,
            portable_tokens=self.costs.portable_tokens(group, room),
            group_limits=limits.group_limits,
        )

    def _startable_blocks(self, core: CoreBook) -> int:
        """Return how many blocks a request that is sent now could get.

        A group's lease can grow by the blocks that every member has free. An idle group can get all
        blocks that no other group holds, because its members preempt their own paused requests.
        """
        if not core.unit.is_group:
            return self._free_blocks(core)
        if not core.requests:
            return min(self._unleased(engine, core.unit) for engine in core.unit.engines)
        return self._free_blocks(core) + max(0, self._spare(core.unit.engines))

    def _free_blocks(self, core: CoreBook) -> int:
        if core.load is None:
            return 0
        limits = self._engines.limits(core.unit)
        return core.load.free_blocks - core.uncounted.blocks(limits)

    def _unleased(self, engine: int, group: Unit) -> int:
        lent = self._leases.lent_by(engine)
        return self._engines.num_blocks(engine) - sum(n for g, n in lent.items() if g != group)

    def lease_for(self, group: Unit) -> int:
        """Return how many blocks to ask a new group's members for.

        The group needs them for the requests that wait, and for those that are carried to it: for
        each of these two more, as its last block may be nearly empty, and it may need the next one
        before the lease can grow. It has the blocks to which KV was copied ahead.
        """
        limits = self._engines.limits(group)
        waiting = self._pool.head(limits.max_num_seqs)
        need = sum(limits.blocks(r.prompt_tokens + 1) for r in waiting)
        need += self._carried_blocks(group)
        return max(LEASE_BLOCKS, min(need, self._spare(group.engines)))

    def _spare(self, engines: Iterable[int]) -> int:
        """Return how many blocks each of these engines could lend now."""
        return min(self._free_blocks(self._requests.core(alone(engine))) for engine in engines)

    def lacks_room(self, group: Unit) -> bool:
        """Return whether a bound group's lease is too small for all that is carried to it.

        A lease begins with blocks for that if the members have them (``lease_for``).
        """
        opened = self._leases.opened.get(group)
        return opened is not None and opened < self._carried_blocks(group)

    def _carried_blocks(self, unit: Unit) -> int:
        """Return how many blocks a unit needs for the requests that are carried to it."""
        limits = self._engines.limits(unit)
        tokens, more = limits.block_tokens, 2 * len(limits.group_limits)
        return sum(
            -(-self._tokens_of(carry) // tokens) + more * len(carry.ids) - carry.reserved
            for carry in self._carries
            if carry.destination == unit
        )

    def room_wanted(self) -> dict[Unit, int]:
        """Return which bound groups hold blocks that requests need which are carried elsewhere.

        Their members are engines of the requests' next units, and have not blocks enough.

        Returns:
            How many blocks each should give back.
        """
        wanted = dict[Unit, int]()
        for unit in {carry.destination for carry in self._carries} - self._units.bound.keys():
            for group in self._units.bound:
                if shared := set(group.engines).intersection(unit.engines):
                    ended = self._carries.ended_blocks(unit, self._engines.limits(unit))
                    lacking = self._carried_blocks(unit) + ended - self._spare(shared)
                    wanted[group] = max(lacking, wanted.get(group, 0))
        return {group: blocks for group, blocks in wanted.items() if blocks > 0}

    def _tokens_of(self, carry: Carry) -> int:
        """Return at most how many tokens' KV a carry takes along: its share of what is in use.

        Tokens count once for each KV group that has them.
        """
        source = carry.source
        if source.tier:
            found = filter(None, map(self._requests.find, carry.ids))
            return sum(request.seen.prompt_tokens for request in found)
        core, tokens = self._requests.core(source), self._engines.limits(source).block_tokens
        if core.load is None or not core.requests:
            return 0
        if source.is_group:
            blocks = self._leases.opened.get(source, 0)
        else:
            lent = sum(self._leases.lent_by(source.leader).values())
            blocks = self._engines.num_blocks(source.leader) - lent
        used = max(0, blocks - core.load.free_blocks)
        share = -(-used * tokens * len(carry.ids) // len(core.requests))
        if not self._carries.pins_cached(source):
            return share
        return min(share, core.tokens(carry.ids) * len(self._engines.limits(source).group_limits))

    def can_hold(self, unit: Unit, request: PoolRequest) -> bool:
        """Return whether a unit holds the request while nothing else runs on its engines."""
        return self.idle(unit).can_hold(request)

    def can_hold_with(self, blocks: int, unit: Unit, request: PoolRequest) -> bool:
        """Return whether a unit would hold the request, all of it, with so few KV blocks."""
        state = self.idle(unit, blocks)
        return state.can_hold(request) and request.total_tokens <= state.longest

    def longest_with(self, blocks: int) -> int:
        """Return what ``longest`` would be if engines had no more KV blocks than this each."""
        return max(self.idle(group, blocks).longest for group in self._possible_groups)

    @cached_property
    def step_tokens(self) -> int:
        """Most tokens of a step, by what the first engine said when it was ready first."""
        return wire.step_tokens(self._engines.at_start(0).ready_response)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence that a group of this node holds; see ``_layouts``."""
        return max(self._engines.limits(group).max_model_len for group in self._possible_groups)

    @property
    def longest_now(self) -> int:
        """Tokens of the longest sequence that a group holds which can form now or later."""
        return max((self.idle(group).longest for group in self._lasting_groups()), default=0)

    def holds(self, request: PoolRequest, *, formed: bool = False) -> bool:
        """Return whether the request fits a group that can form now or later.

        Args:
            request: the request.
            formed: whether groups count that the policy does not form.
        """
        groups = self._lasting_groups(formed=formed)
        return any(self.idle(group).can_hold(request) for group in groups)

    def _lasting_groups(self, *, formed: bool = False) -> Iterator[Unit]:
        """Yield the groups that can be formed now, or when engines are back."""
        lost, refused = self._engines.lost, self._engines.refused
        for group in self._possible_groups:
            chosen = self._forms_groups and group.layout.pp == 1  # policies form no others
            is_formed = formed or chosen or not group.is_group
            if is_formed and not lost.intersection(group.engines) and group not in refused:
                yield group

    @cached_property
    def _possible_groups(self) -> tuple[Unit, ...]:
        return self._config.units


def _tier_state(core: CoreBook, blocks: int, limits: m.LayoutLimits) -> TierState | None:
    """Return the state of a tier; None: it has not reported yet.

    Args:
        core: its book.
        blocks: all of its blocks.
        limits: those of its engine alone.
    """
    if core.load is None:
        return None
    free = core.load.free_blocks - core.uncounted.blocks(limits)
    tokens = (request.seen.prompt_tokens for request in core.requests.values())
    return TierState(core.unit, tuple(tokens), free, blocks, limits.block_tokens)


def _layout_state(limits: m.LayoutLimits, blocks: int) -> LayoutState:
    return LayoutState(
        limits.layout,
        limits.max_num_seqs,
        blocks,
        limits.block_tokens,
        limits.max_model_len,
        limits.group_limits,
        limits.mixed_tokens,
    )
