"""The fake core of a group, over blocks that its members lend."""

from collections.abc import Sequence

from shoal.policies.values.layouts import Unit
from shoal.runtime.engine.agent.interface import Lease
from shoal.runtime.engine.fake.fake_blocks import FakeBlocks
from shoal.runtime.engine.fake.fake_core import FakeCore
from shoal.runtime.engine.fake.faults import Seam
from shoal.runtime.engine.fake.surroundings import Surroundings
from shoal.runtime.protocol.messages import LayoutLimits


class FakeGroupCore(FakeCore):
    """``GroupCore``: virtual blocks of a lease, each backed by one block of every member."""

    def __init__(self, unit: Unit, limits: LayoutLimits, surroundings: Surroundings) -> None:
        self._pool = FakeBlocks()
        self._backing: dict[int, tuple[int, ...]] = {}
        self._next_virtual = 1
        self._bound = False
        super().__init__(unit, limits, surroundings, self._pool)

    def _physical(self, blocks: Sequence[int]) -> dict[int, list[int]]:
        rows = [self._backing[block] for block in blocks]
        return {engine: [row[k] for row in rows] for k, engine in enumerate(self.unit.engines)}

    def dispatch(self) -> bool:
        """See ``Core.dispatch``; nothing is dispatched while the group is not bound."""
        return self._bound and super().dispatch()

    def bind(self, epoch: int, lease: Lease, seed: int) -> None:
        """See ``GroupCore.bind``."""
        self._around.faults.strike(Seam.BIND)
        self._bound = True
        self.grow(lease)

    def grow(self, lease: Lease) -> None:
        """See ``GroupCore.grow``."""
        opened = []
        for physical in zip(*(lease[engine] for engine in self.unit.engines), strict=True):
            self._backing[self._next_virtual] = physical
            opened.append(self._next_virtual)
            self._next_virtual += 1
        self._pool.give(opened)

    def release(self, epoch: int) -> None:
        """See ``GroupCore.release``."""
        self._around.faults.strike(Seam.RELEASE)
        self._bound = False

    def _is_beyond(self, block: int, beyond: int) -> bool:
        return any(physical > beyond for physical in self._backing[block])

    def surrender(self, beyond: int) -> Lease:
        """See ``GroupCore.surrender``."""
        given_up = [block for block in self._backing if self._is_beyond(block, beyond)]
        return self._close(self._pool.take_out(given_up))

    def shrink(self, blocks: int) -> Lease:
        """See ``GroupCore.shrink``."""
        return self._close(self._pool.take(blocks))

    def _close(self, closed: Sequence[int]) -> Lease:
        returned = self._physical(closed)
        for block in closed:
            del self._backing[block]
        return returned

    @property
    def blocks_lacking(self) -> int:
        """See ``GroupCore.blocks_lacking``."""
        return self._scheduler.blocks_lacking

    @property
    def blocks_wanted(self) -> int:
        """See ``GroupCore.blocks_wanted``."""
        return self._scheduler.blocks_wanted

    @property
    def lease_blocks(self) -> int:
        """See ``GroupCore.lease_blocks``."""
        return len(self._backing)

    def check_integrity(self) -> list[str]:
        """See ``Core.check_integrity``."""
        problems = super().check_integrity()
        blocks = [*set(self.held), *self._pool.ids]
        if len(set(blocks)) != len(blocks):
            problems.append(f"core {self.unit.engines}: a block is in two places")
        if set(blocks) != set(self._backing):
            problems.append(f"core {self.unit.engines}: leased blocks are neither free nor held")
        return problems
