"""The unit of an engine alone: an ``EngineCore`` on the engine's own KV blocks, which it lends."""

from collections.abc import Sequence
from typing import Any

from vllm.config import VllmConfig

from shoal.policies.values.layouts import Unit
from shoal.runtime.engine.agent.results import Collected
from shoal.runtime.engine.scheduler.block_holders import preempt
from shoal.runtime.engine.scheduler.given_up_blocks import GivenUpBlocks
from shoal.runtime.engine.scheduler.vllm_core import VllmCore


class VllmOwnCore(VllmCore):
    """Implements ``interface.OwnCore``: an engine alone, on blocks of its own, which it lends."""

    def __init__(self, unit: Unit, config: VllmConfig, *, log_stats: bool, max_sp: int = 1) -> None:
        super().__init__(unit, config, log_stats=log_stats, max_sp=max_sp)
        self._lent: dict[int, Any] = {}
        self._given_up = GivenUpBlocks(self._scheduler, self.channel, self._physical)

    @property
    def num_blocks(self) -> int:
        """Blocks of the engine, lent ones included."""
        return int(self.block_pool.num_gpu_blocks) - 1  # without the null block

    def lend(self, blocks: int, *, urgent: bool = False) -> list[int]:
        """See ``interface.BlockLender.lend``."""
        pool = self.block_pool
        while urgent and pool.get_num_free_blocks() < blocks and not self.in_flight:
            if not self._preempt_last():
                break
        taken = pool.get_new_blocks(min(blocks, pool.get_num_free_blocks()))
        self._lent.update((block.block_id, block) for block in taken)
        return [block.block_id for block in taken]

    def _preempt_last(self) -> bool:
        """Preempt the latest running request; return whether there was one."""
        if not self._scheduler.running:
            return False
        preempt(self._scheduler, [self._scheduler.running[-1].request_id])
        self._stalled = False
        return True

    def take_back(self, blocks: Sequence[int]) -> None:
        """See ``interface.BlockLender.take_back``."""
        self.block_pool.free_blocks([self._lent.pop(block) for block in blocks])
        # The scheduler may have something to run again.
        self._stalled = False

    def clear(self, beyond: int, *, moves: bool) -> bool:
        """See ``interface.BlockLender.clear``."""
        self._stalled = False
        return self._given_up.clear(beyond, moves=moves and self._carried.shares_kv)

    @property
    def is_clearing(self) -> bool:
        """See ``interface.BlockLender.is_clearing``."""
        return self._given_up.is_clearing

    def collect(self) -> Collected | None:
        """See ``interface.Core.collect``."""
        self._given_up.tend()
        return super().collect()

    def withhold(self, beyond: int) -> int:
        """See ``interface.BlockLender.withhold``."""
        return self._given_up.withhold(beyond)

    def restore(self) -> None:
        """See ``interface.BlockLender.restore``."""
        self._given_up.restore()
        self._stalled = False

    @property
    def lent(self) -> frozenset[int]:
        """See ``interface.BlockLender.lent``."""
        return frozenset(self._lent)

    def check_integrity(self) -> list[str]:
        """See ``interface.Core.check_integrity``."""
        problems, engine = super().check_integrity(), self.unit.leader
        if self.num_requests == 0:
            free = self.block_pool.get_num_free_blocks()
            accounted = free + len(self._lent) + self._ahead.num_held + self._given_up.num_held
            if accounted != self.num_blocks:
                problems.append(
                    f"engine {engine}: {accounted} blocks free, lent, copied ahead or given up, "
                    f"expected {self.num_blocks}"
                )
        unheld = [block_id for block_id, block in self._lent.items() if block.ref_cnt != 1]
        if unheld:
            problems.append(f"engine {engine}: lent blocks not held once: {unheld[:8]}")
        return problems
