"""The unit of a group: an ``EngineCore`` whose KV blocks are virtual, and lent by the members."""

from collections.abc import Sequence

from vllm.config import VllmConfig

from shoal.policies.values.kv_need import blocks_for
from shoal.policies.values.layouts import Unit
from shoal.runtime.engine.agent.interface import Lease, plain_lease
from shoal.runtime.engine.kv.lease import GroupLease, num_uncached
from shoal.runtime.engine.link import instructions as steps
from shoal.runtime.engine.scheduler.vllm_core import VllmCore

LEASE_CHUNK = 16
"""A lease grows by at least so many virtual blocks, so that fewer messages ask for them."""
STEPS_AHEAD = 2
"""For so many full steps a lease has blocks that cache nothing: so many are dispatched before a
lease has grown."""


class VllmGroupCore(VllmCore):
    """Implements ``interface.GroupCore``. For its arguments see ``VllmCore``."""

    def __init__(self, unit: Unit, config: VllmConfig, *, log_stats: bool, max_sp: int) -> None:
        super().__init__(unit, config, log_stats=log_stats, max_sp=max_sp)
        self._lease = GroupLease(unit, self.block_pool)

    def _physical(self, blocks: Sequence[int]) -> dict[int, list[int]]:
        return self._lease.physical(blocks)

    def bind(self, epoch: int, lease: Lease, seed: int) -> None:
        """See ``interface.GroupCore.bind``."""
        virtual = self._lease.open(lease)
        self._executor.channel.send(steps.Bind(epoch, virtual, plain_lease(lease), seed))
        self._stalled = False

    def grow(self, lease: Lease) -> None:
        """See ``interface.GroupCore.grow``."""
        virtual = self._lease.open(lease)
        self._executor.channel.send(steps.Extend(virtual, plain_lease(lease)))
        self._stalled = False

    def release(self, epoch: int) -> None:
        """See ``interface.GroupCore.release``."""
        self._executor.channel.send(steps.Detach(epoch))

    def _is_beyond(self, block: int, beyond: int) -> bool:
        return self._lease.is_beyond(block, beyond)

    def surrender(self, beyond: int) -> Lease:
        """See ``interface.GroupCore.surrender``."""
        return self._lease.close_beyond(beyond)

    def shrink(self, blocks: int) -> Lease:
        """See ``interface.GroupCore.shrink``."""
        return self._lease.close(blocks)

    @property
    def blocks_lacking(self) -> int:
        """See ``interface.GroupCore.blocks_lacking``."""
        waiting = sum(
            blocks_for(
                self._carried.blocks.most_tokens(request) + 1, self._block_tokens, self.group_limits
            )
            for request in self._scheduler.waiting
        )
        lacking = self._num_holding + waiting - self._lease.num_free
        return max(lacking, LEASE_CHUNK) if lacking > 0 else 0

    @property
    def _num_holding(self) -> int:
        """New blocks that requests may cross into before the next chance to grow."""
        requests = len(self._scheduler.running) + len(self._scheduler.kv_holding_waiting)
        ahead = self._scheduler.num_lookahead_tokens
        tokens = self._depth * (1 + self._scheduler.num_spec_tokens) + ahead
        of_each = blocks_for(tokens, self._block_tokens)
        return requests * len(self.group_limits) * of_each

    @property
    def _block_tokens(self) -> int:
        return int(self.engine_core.vllm_config.cache_config.block_size)

    @property
    def blocks_wanted(self) -> int:
        """See ``interface.GroupCore.blocks_wanted``."""
        if not self.block_pool.enable_caching:
            return 0
        of_step = (self._step_tokens // self._block_tokens + 1) * len(self.group_limits)
        enough = self._num_holding + STEPS_AHEAD * of_step
        uncached = num_uncached(self.block_pool, enough)
        # One step's more than enough, so that not every step asks.
        return enough + of_step - uncached if uncached < enough else 0

    @property
    def _step_tokens(self) -> int:
        """Most tokens of a step."""
        return int(self.engine_core.vllm_config.scheduler_config.max_num_batched_tokens)

    @property
    def lease_blocks(self) -> int:
        """See ``interface.GroupCore.lease_blocks``."""
        return self._lease.num_open

    def check_integrity(self) -> list[str]:
        """See ``interface.Core.check_integrity``."""
        problems = self._lease.check_integrity() + super().check_integrity()
        held = self._lease.num_open - self._lease.num_free - self._ahead.num_held
        if self.num_requests == 0 and held:
            problems.append(f"{self._name}: {held} virtual blocks held by no request")
        return problems
