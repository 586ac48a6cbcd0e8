"""What every unit can take now: the snapshot that policies decide on."""

from collections.abc import Collection

from policies.partition import Group, groups_of
from policies.snapshot import PoolRequest, Snapshot, UnitState
from runtime.config import NodeConfig
from runtime.controller.book import Book, CoreBook, EngineState
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

    def snapshot(self, now: float, *, switching: bool, busy: Collection[int]) -> Snapshot:
        """Return what a policy may know.

        Args:
            now: the clock.
            switching: whether a switch is running.
            busy: the engines that it regroups.
        """
        book = self._book
        return Snapshot(
            now=now,
            engines=self._config.engines,
            max_group=self._config.max_group,
            dead=book.in_state(EngineState.DEAD, EngineState.SILENT),
            partition=book.partition,
            switching=switching,
            units=tuple(
                self._unit(group, serving=book.serves(group) and not set(busy) & set(group))
                for group in book.partition
            ),
            pool=self._pool.head(POOL_HEAD),
        )

    def _unit(self, group: Group, *, serving: bool) -> UnitState:
        core, limits = self._book.core(group), self._book.limits(group)
        reported = core.load is not None
        return UnitState(
            group=group,
            serving=serving and reported,
            requests=len(core.requests),
            free_slots=max(0, limits.max_num_seqs - len(core.requests)),
            free_blocks=self._startable_blocks(core),
            total_blocks=min(self._book.num_blocks(engine) for engine in group),
            block_tokens=limits.block_tokens,
            max_model_len=limits.max_model_len,
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
        taken = sum(-(-(r.seen.prompt_tokens + 1) // tokens) for r in core.uncounted)
        return core.load.free_blocks - taken

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
        return max(self._book.limits(group).max_model_len for group in self._possible_groups())

    def holds(self, request: PoolRequest) -> bool:
        """Return whether some group of engines that are not dead could hold the request."""
        dead = self._book.in_state(EngineState.DEAD)
        return any(
            self._unit(group, serving=True).can_hold(request)
            for group in self._possible_groups()
            if not dead.intersection(group)
        )

    def _possible_groups(self) -> list[Group]:
        config = self._config
        return [g for degree in config.degrees for g in groups_of(config.engines, degree)]
