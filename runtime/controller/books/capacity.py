"""What every unit can take now: the snapshot that policies decide on."""

import math
from collections.abc import Collection, Iterator
from functools import cached_property

from shoal.policies.cost.cost_model import Correction, CostModel
from shoal.policies.values.batch import Mode
from shoal.policies.values.layouts import Layout, Unit, alone
from shoal.policies.values.partition import Partition
from shoal.policies.values.plan import Policy
from shoal.policies.values.snapshot import (
    LayoutState,
    PoolRequest,
    Snapshot,
    UnitState,
    requests_on,
)
from shoal.runtime.config import NodeConfig
from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.core_book import CoreBook, Uncounted
from shoal.runtime.controller.books.demand import Demand, Lengths, most_urgent
from shoal.runtime.controller.books.engine_book import EngineState
from shoal.runtime.protocol import messages as m

POOL_HEAD = 256
"""Requests of the pool that a policy sees: more than any node starts in one turn."""
LEASE_BLOCKS = 64
"""Least blocks that the members of a new group are asked for."""


class Capacity:
    """Counts what the engines' last reports and the requests sent since then leave free.

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
        self.cost_model: CostModel | None = config.cost_model
        """Corrected by what is measured (``observe``)."""
        self._forms_groups = True
        self._lengths = Lengths()
        self._states: dict[Unit, tuple[Uncounted, UnitState]] = {}
        """The latest states of units, and the requests from which each was found."""

    def follow(self, policy: Policy) -> None:
        """Count on the groups that a policy forms, and on those alone."""
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
    ) -> Snapshot:
        """Return what a policy may know.

        Args:
            now: the clock.
            demand: knows what only time tells; is told what there is now.
            switching: whether no switch can start.
            busy: the engines that a running one regroups.
            pending: where that leads to.
            since_switch: seconds since the last one ended.
            sp_above: see ``Snapshot``.
        """
        engines, pool, units = self._engines, self._pool.head(POOL_HEAD), self._unit_states(busy)
        demand.see(now, requests_on(len(self._pool), units), most_urgent(pool, units))
        return Snapshot(
            now=now,
            engines=self._config.engines,
            max_group=self._config.max_group,
            dead=engines.gone | engines.in_state(EngineState.SILENT),
            broken=frozenset(engines.unformed(self._possible_groups)),
            partition=self._units.partition,
            switching=switching,
            units=units,
            pool=pool,
            pending=pending,
            waiting=len(self._pool),
            waiting_tokens=self._pool.tokens,
            arrival_rate=demand.arrival_rate(now),
            prompt_tokens=self._lengths.prompt,
            output_tokens=self._lengths.output,
            prompt_rate=demand.prompt_rate(now),
            smoothed_requests=demand.smoothed_requests,
            since_switch=since_switch,
            since_urgent=demand.since_urgent(now),
            layouts=self._layouts,
            cost_model=self.cost_model,
            targets=self._config.targets,
            sp_above=sp_above,
        )

    @cached_property
    def _layouts(self) -> tuple[LayoutState, ...]:
        """What every layout takes on idle engines; it never changes once all are ready."""
        blocks = min(self._engines.num_blocks(engine.number) for engine in self._engines)
        limits = map(self._engines.limits_of, self._config.layouts)
        return tuple(_layout_state(each, blocks) for each in limits)

    def _idle(self, group: Unit) -> LayoutState:
        """Return what a group takes while nothing runs on its engines."""
        limits = self._engines.limits(group)
        blocks = min(self._engines.num_blocks(engine) for engine in group.engines)
        return _layout_state(limits, blocks)

    def observe(self, core: CoreBook, load: m.Load) -> None:
        """Learn from the steps between a core's last report and this one."""
        before, layout = core.load, core.unit.layout
        if before is None:
            return
        known = m.Work()
        for mode in load.work:
            done, seen = load.done(mode), before.done(mode)
            for news in (done.decoding - seen.decoding, done.prefilling - seen.prefilling):
                known += news
                if self.cost_model is not None and news.steps > 0 and news.seconds > 0:
                    seconds = news.seconds / news.steps
                    self.cost_model = self.cost_model.observe(layout, news.mean, seconds, mode)
        started = (load.added - load.waiting) - (before.added - before.waiting)
        self._lengths.see(known, started=max(0, started), ended=len(load.finished))

    @property
    def step_errors(self) -> dict[str, float]:
        """Smoothed relative error of the cost model's predictions (``messages.LayoutView``)."""
        corrections = () if self.cost_model is None else self.cost_model.corrections
        return {_steps_name(c): c.error for c in corrections}

    def _unit_states(self, busy: Collection[int]) -> tuple[UnitState, ...]:
        paused = self._requests.paused
        return tuple(
            self._unit(
                group,
                serving=self._engines.serves(group)
                and not any(engine in busy for engine in group.engines),
                paused=paused[group],
            )
            for group in self._units.partition
        )

    def _unit(self, group: Unit, *, serving: bool, paused: int) -> UnitState:
        """Return a unit's state: that of the last call if nothing of it has changed since."""
        core = self._requests.core(group)
        serving, blocks = serving and core.load is not None, self._startable_blocks(core)
        uncounted, known = self._states.get(group, (None, None))
        if (
            known is None
            or core.uncounted is not uncounted
            or (known.serving, known.free_blocks, known.paused) != (serving, blocks, paused)
        ):
            known = self._state(core, serving=serving, free_blocks=blocks, paused=paused)
            self._states[group] = core.uncounted, known
        return known

    def _state(self, core: CoreBook, *, serving: bool, free_blocks: int, paused: int) -> UnitState:
        group, limits = core.unit, self._engines.limits(core.unit)
        figures, uncounted = core.figures, core.uncounted
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
            by_priority=figures.by_priority,
            longest_tokens=figures.longest_tokens,
            paused=paused,
        )

    def _startable_blocks(self, core: CoreBook) -> int:
        """Return the blocks that a request sent now would get.

        A group's lease grows by what every member has free. An idle group gets everything but what
        other groups hold: its members preempt their own paused requests for it.
        """
        if not core.unit.is_group:
            return self._free_blocks(core)
        if not core.requests:
            return min(self._unleased(engine, core.unit) for engine in core.unit.engines)
        spare = min(
            self._free_blocks(self._requests.core(alone(engine))) for engine in core.unit.engines
        )
        return self._free_blocks(core) + max(0, spare)

    def _free_blocks(self, core: CoreBook) -> int:
        if core.load is None:
            return 0
        tokens = self._engines.limits(core.unit).block_tokens
        return core.load.free_blocks - core.uncounted.blocks(tokens)

    def _unleased(self, engine: int, group: Unit) -> int:
        lent = self._leases.lent_by(engine)
        return self._engines.num_blocks(engine) - sum(n for g, n in lent.items() if g != group)

    def lease_for(self, group: Unit) -> int:
        """Return the blocks to ask a new group's members for: what the waiting requests need."""
        limits = self._engines.limits(group)
        waiting = self._pool.head(limits.max_num_seqs)
        need = sum(-(-(r.prompt_tokens + 1) // limits.block_tokens) for r in waiting)
        spare = min(
            self._free_blocks(self._requests.core(alone(engine))) for engine in group.engines
        )
        return max(LEASE_BLOCKS, min(need, spare))

    def leaves_room(self, group: Unit) -> bool:
        """Return whether requests of a group's single engines may go on beside it (interleave).

        What they will need up to their bounds is lent to no group, so they must leave it half of
        every member's blocks: else its own requests would wait until these end.
        """
        tokens = self._engines.limits(alone(group.leader)).block_tokens
        for engine in group.engines:
            totals = self._requests.core(alone(engine)).figures.totals
            needed = sum(count * -(-total // tokens) for total, count in totals.items())
            if 2 * needed > self._unleased(engine, group):
                return False
        return True

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence that some group of this node holds; see ``_layouts``."""
        return max(self._engines.limits(group).max_model_len for group in self._possible_groups)

    @property
    def longest_now(self) -> int:
        """Tokens of the longest sequence that some group holds which is there, or will be."""
        idle = [self._idle(group) for group in self._lasting_groups()]
        return max((min(i.max_model_len, i.total_blocks * i.block_tokens) for i in idle), default=0)

    def holds(self, request: PoolRequest, *, formed: bool = False) -> bool:
        """Return whether some group could hold the request that is there, or will be.

        Args:
            request: that.
            formed: whether groups count that the policy does not form.
        """
        groups = self._lasting_groups(formed=formed)
        return any(self._idle(group).can_hold(request) for group in groups)

    def _lasting_groups(self, *, formed: bool = False) -> Iterator[Unit]:
        """Yield the groups that can be formed, or will be when engines are back."""
        lost, refused = self._engines.lost, self._engines.refused
        for group in self._possible_groups:
            is_formed = formed or self._forms_groups or not group.is_group
            if is_formed and not lost.intersection(group.engines) and group not in refused:
                yield group

    @cached_property
    def _possible_groups(self) -> tuple[Unit, ...]:
        return self._config.units


def _layout_state(limits: m.LayoutLimits, blocks: int) -> LayoutState:
    return LayoutState(
        limits.layout, limits.max_num_seqs, blocks, limits.block_tokens, limits.max_model_len
    )


def _steps_name(steps: Correction) -> str:
    name = steps.layout.name
    return f"{name} {steps.kind}" if steps.mode is Mode.TP else f"{name} sp {steps.kind}"
