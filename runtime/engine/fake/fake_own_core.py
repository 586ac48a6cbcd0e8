"""The fake core of an engine alone, which lends its blocks."""

from collections.abc import Sequence

from shoal.policies.values.layouts import alone
from shoal.runtime.engine.fake.fake_blocks import FakeBlocks
from shoal.runtime.engine.fake.fake_core import FakeCore
from shoal.runtime.engine.fake.faults import Seam
from shoal.runtime.engine.fake.surroundings import Surroundings
from shoal.runtime.protocol.messages import LayoutLimits

SLICE = 64
"""Free blocks that are given up at once."""


class FakeOwnCore(FakeCore):
    """``OwnCore``: an engine alone, on blocks of its own, which it lends."""

    def __init__(self, engine: int, limits: LayoutLimits, surroundings: Surroundings) -> None:
        num_blocks = surroundings.settings.num_blocks
        self._pool = FakeBlocks(range(1, num_blocks + 1))
        self._num_blocks = num_blocks
        self._lent: set[int] = set()
        self._withheld: list[int] = []
        super().__init__(alone(engine), limits, surroundings, self._pool)

    def _physical(self, blocks: Sequence[int]) -> dict[int, list[int]]:
        return {self.unit.leader: list(blocks)}

    def lend(self, blocks: int, *, urgent: bool = False) -> list[int]:
        """See ``BlockLender.lend``."""
        faults = self._around.faults
        faults.strike(Seam.LEND)
        if urgent:
            self._scheduler.preempt_until(blocks)
        if faults.double_lend and self._lent:
            return sorted(self._lent)[:blocks]
        taken = self._pool.take(blocks)
        self._lent.update(taken)
        return taken

    def take_back(self, blocks: Sequence[int]) -> None:
        """See ``BlockLender.take_back``."""
        faults = self._around.faults
        faults.strike(Seam.TAKE_BACK)
        for block in blocks:
            self._lent.remove(block)
        self._pool.give(blocks[1:] if faults.drop_block else blocks)

    def _is_beyond(self, block: int, beyond: int) -> bool:
        return block > beyond

    is_clearing = False
    """See ``BlockLender.is_clearing``: what is cached is forgotten, and not copied."""

    def clear(self, beyond: int, *, moves: bool) -> bool:
        """See ``BlockLender.clear``."""
        del moves
        if self._around.faults.keep_blocks:
            return False
        free = [block for block in self._pool.ids if block > beyond]
        self._withheld += self._pool.take_out(free[:SLICE])
        return bool(free)

    def withhold(self, beyond: int) -> int:
        """See ``BlockLender.withhold``."""
        self._around.faults.strike(Seam.CLOSE)
        if self._around.faults.keep_blocks:
            return 0
        self._withheld += self._pool.take_out(range(beyond + 1, self._num_blocks + 1))
        return self._num_blocks - beyond - len(self._withheld)

    def restore(self) -> None:
        """See ``BlockLender.restore``."""
        self._around.faults.strike(Seam.OPEN)
        self._pool.give(self._withheld)
        self._withheld = []

    @property
    def lent(self) -> frozenset[int]:
        """See ``BlockLender.lent``."""
        return frozenset(self._lent)

    def check_integrity(self) -> list[str]:
        """See ``Core.check_integrity``."""
        engine = self.unit.leader
        problems = super().check_integrity()
        blocks = [*self._pool.ids, *set(self.held), *self._lent, *self._withheld]
        if len(set(blocks)) != len(blocks):
            problems.append(f"engine {engine}: a block is free, held, lent or given up at once")
        missing = self._num_blocks - len(set(blocks))
        if missing:
            problems.append(f"engine {engine}: {missing} blocks are lost")
        return problems
