"""What every unit can take now: the snapshot that policies decide on."""

from collections.abc import Collection, Iterator
from functools import cached_property

from policies.cost_model import Correction, CostModel, Mode
from policies.partition import Group, Partition, groups_of, layout_name
from policies.snapshot import LayoutState, PoolRequest, Snapshot, UnitState
from runtime import messages as m
from runtime.config import NodeConfig
from runtime.controller.book import Book, CoreBook, EngineState
from runtime.controller.demand import Lengths
from runtime.controller.leases import Leases
from runtime.controller.pool import TaskPool

POOL_HEAD = 256
"""Requests of the pool that a policy sees: more than any node starts in one turn."""
LEASE_BLOCKS = 64
"""Least blocks that the members of a new group are asked for."""


class Capacity:
    """Counts what the engines' last reports and the requests sent since then leave free.

    Args:
        config: the node.
        book: engines, units and their requests.
        leases: blocks lent.
        pool: the task pool.
    """

    def __init__(self, config: NodeConfig, book: Book, leases: Leases, pool: TaskPool) -> None:
        self._config = config
        self._book = book
        self._leases = leases
        self._pool = pool
        self.cost_model: CostModel | None = config.cost_model
        """Corrected by what is measured (``observe``)."""
        self._lengths = Lengths()

    def snapshot(
        self, now: float, *, switching: bool, busy: Collection[int], pending: Partition | None
    ) -> Snapshot:
        """Return what a policy may know, but for what only time tells (``demand.py``).

        Args:
            now: the clock.
            switching: whether no switch can start.
            busy: the engines that a running one regroups.
            pending: where that leads to.
        """
        book = self._book
        return Snapshot(
            now=now,
            engines=self._config.engines,
            max_group=self._config.max_group,
            dead=book.gone | book.in_state(EngineState.SILENT),
            broken=frozenset(g for g in self._possible_groups if not book.is_formed(g)),
            partition=book.partition,
            switching=switching,
            units=tuple(
                self._unit(group, serving=book.serves(group) and not set(busy) & set(group))
                for group in book.partition
            ),
            pool=self._pool.head(POOL_HEAD),
            pending=pending,
            waiting=len(self._pool),
            waiting_tokens=self._pool.tokens,
            prompt_tokens=self._lengths.prompt,
            output_tokens=self._lengths.output,
            layouts=self._layouts,
            cost_model=self.cost_model,
            targets=self._config.targets,
        )

    @cached_property
    def _layouts(self) -> tuple[LayoutState, ...]:
        """What every layout takes on idle engines; it never changes once all are ready."""
        config, book = self._config, self._book
        blocks = min(book.num_blocks(engine.number) for engine in book.engines)
        limits = [book.limits(tuple(range(degree))) for degree in config.degrees]
        return tuple(
            LayoutState(lim.degree, lim.max_num_seqs, blocks, lim.block_tokens, lim.max_model_len)
            for lim in limits
        )

    def observe(self, core: CoreBook, load: m.Load) -> None:
        """Learn from the steps between a core's last report and this one."""
        before, degree = core.load, len(core.group)
        if before is None:
            return
        known = m.Work()
        for mode in load.work:
            done, seen = load.done(mode), before.done(mode)
            for news in (done.decoding - seen.decoding, done.prefilling - seen.prefilling):
                known += news
                if self.cost_model is not None and news.steps > 0 and news.seconds > 0:
                    seconds = news.seconds / news.steps
                    self.cost_model = self.cost_model.observe(degree, news.mean, seconds, mode)
        started = (load.added - load.waiting) - (before.added - before.waiting)
        self._lengths.see(known, started=max(0, started), ended=len(load.finished))

    @property
    def step_errors(self) -> dict[str, float]:
        """Smoothed relative error of the cost model's predictions (``messages.LayoutView``)."""
        corrections = () if self.cost_model is None else self.cost_model.corrections
        return {_steps_name(c): c.error for c in corrections}

    def _unit(self, group: Group, *, serving: bool) -> UnitState:
        core, limits = self._book.core(group), self._book.limits(group)
        reported = core.load is not None
        figures, uncounted = core.figures, core.uncounted
        places = limits.max_num_seqs + self._config.queued_ahead
        return UnitState(
            group=group,
            serving=serving and reported,
            requests=len(core.requests),
            free_slots=max(0, places - len(core.requests)),
            free_blocks=self._startable_blocks(core),
            total_blocks=min(self._book.num_blocks(engine) for engine in group),
            block_tokens=limits.block_tokens,
            max_model_len=limits.max_model_len,
            running=len(core.requests) - len(uncounted.requests),
            waiting=len(uncounted.requests),
            context_tokens=figures.prompt_tokens,
            prefill_tokens=uncounted.prompt_tokens,
            by_priority=figures.by_priority,
            longest_tokens=figures.longest_tokens,
            paused=self._book.paused_in(group),
        )

    def _startable_blocks(self, core: CoreBook) -> int:
        """Return the blocks that a request sent now would get.

        A group's lease grows by what every member has free. An idle group gets everything but what
        other groups hold: its members preempt their own paused requests for it.
        """
        if len(core.group) == 1:
            return self._free_blocks(core)
        if not core.requests:
            return min(self._unleased(engine, core.group) for engine in core.group)
        spare = min(self._free_blocks(self._book.core((engine,))) for engine in core.group)
        return self._free_blocks(core) + max(0, spare)

    def _free_blocks(self, core: CoreBook) -> int:
        if core.load is None:
            return 0
        tokens = self._book.limits(core.group).block_tokens
        return core.load.free_blocks - core.uncounted.blocks(tokens)

    def _unleased(self, engine: int, group: Group) -> int:
        lent = self._leases.lent_by(engine)
        return self._book.num_blocks(engine) - sum(n for g, n in lent.items() if g != group)

    def lease_for(self, group: Group) -> int:
        """Return the blocks to ask a new group's members for: what the waiting requests need."""
        limits = self._book.limits(group)
        waiting = self._pool.head(limits.max_num_seqs)
        need = sum(-(-(r.prompt_tokens + 1) // limits.block_tokens) for r in waiting)
        spare = min(self._free_blocks(self._book.core((engine,))) for engine in group)
        return max(LEASE_BLOCKS, min(need, spare))

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that some group of this node holds."""
        return max(self._book.limits(group).max_model_len for group in self._possible_groups)

    @property
    def longest_now(self) -> int:
        """Tokens of the longest sequence that some group holds which is there, or will be."""
        units = [self._unit(group, serving=True) for group in self._lasting_groups()]
        return max(
            (min(u.max_model_len, u.total_blocks * u.block_tokens) for u in units), default=0
        )

    def holds(self, request: PoolRequest) -> bool:
        """Return whether some group could hold the request that is there, or will be."""
        units = (self._unit(group, serving=True) for group in self._lasting_groups())
        return any(unit.can_hold(request) for unit in units)

    def _lasting_groups(self) -> Iterator[Group]:
        """Yield the groups that can be formed, or will be when engines are back."""
        lost, refused = self._book.lost, self._book.refused
        for group in self._possible_groups:
            if not lost.intersection(group) and group not in refused:
                yield group

    @cached_property
    def _possible_groups(self) -> list[Group]:
        config = self._config
        return [g for degree in config.degrees for g in groups_of(config.engines, degree)]


def _steps_name(steps: Correction) -> str:
    layout = layout_name(tuple(range(steps.degree)))
    return f"{layout} {steps.kind}" if steps.mode is Mode.TP else f"{layout} sp {steps.kind}"
