"""How an engine gives up its free KV blocks while its steps go on, and keeps what these cache.

Only the prefix cache knows what a free block holds. So all of it can be copied beside steps, before
it is found at its new place: until then it is found where it was. The books are changed in slices,
because an engine has thousands of blocks, and schedules no step meanwhile.
"""

from concurrent.futures import Future
from typing import Any

from vllm.v1.core.kv_cache_utils import get_group_id

from shoal.policies.values.kv_need import blocks_for
from shoal.runtime.engine.kv.lease import num_uncached
from shoal.runtime.engine.link import instructions
from shoal.runtime.engine.link.executor import UnitChannel, copied_by_all
from shoal.runtime.engine.scheduler.carried_blocks import PhysicalBlocks
from shoal.runtime.engine.scheduler.vacated_blocks import Blocks, Moved, copies_of

SLICE = 512
"""Blocks whose books are changed at once: vLLM takes some microseconds for each."""
STEPS_AHEAD = 2
"""While contents are copied, both places are taken. So many steps' blocks are left to requests."""


class GivenUpBlocks:
    """The blocks that an engine alone has given up.

    Args:
        scheduler: vLLM's, of the engine's own core.
        channel: the queue to the engine's runner.
        physical: what backs the core's blocks.
    """

    def __init__(self, scheduler: Any, channel: UnitChannel, physical: PhysicalBlocks) -> None:
        self._scheduler, self._channel, self._physical = scheduler, channel, physical
        self._pool = scheduler.kv_cache_manager.block_pool
        self._withheld: Blocks = []
        self._sought: Blocks | None = None
        """Free blocks that cache something and may move, those used last in the end; None: nobody
        has looked."""
        self._pairs: list[tuple[Any, Any]] = []
        """Blocks whose contents move, and where to, those used last first. Both are held, so that
        nobody writes to them; requests find what the first ones cache. Instead of the first one
        there is None if it is not given up any more."""
        self._copy: Future[Any] | None = None
        self._is_copied: bool | None = None
        """Whether the pairs' contents are at their new places; None: they are not, or not yet."""

    @property
    def num_held(self) -> int:
        """Blocks that are neither free nor anybody else's."""
        return len(self._withheld) + sum(1 + (block is not None) for block, _ in self._pairs)

    @property
    def is_clearing(self) -> bool:
        """Whether contents of free blocks move, or are about to."""
        return bool(self._sought or self._pairs)

    def clear(self, beyond: int, *, moves: bool) -> bool:
        """See ``interface.BlockLender.clear``."""
        free = [block for block in self._pool.blocks[beyond + 1 :] if block.ref_cnt == 0]
        if empty := [block for block in free if block.block_hash is None][:SLICE]:
            self._pool.touch(empty)
            self._withheld += empty
            return True
        if self._copy is not None or self._is_copied is not None:
            return self._copy is None  # ``tend`` goes on with it, slice by slice
        if self._sought is None:
            self._sought = self._cached(beyond) if moves else []
        if self._sought:
            self._pair_slice(self._sought)
        if self._pairs and not self._sought:
            self._begin_copy()
        return bool(self._sought)

    def _cached(self, beyond: int) -> Blocks:
        free = self._pool.free_block_queue.get_all_free_blocks()
        return [b for b in free if b.block_id > beyond and b.block_hash is not None]

    def _pair_slice(self, sought: Blocks) -> None:
        """Take blocks for the contents of others, as long as there are some that cache nothing."""
        room = num_uncached(self._pool, self._reserve + SLICE) - self._reserve
        if room <= 0:
            sought.clear()
        for block in [sought.pop() for _ in range(min(room, SLICE, len(sought)))]:
            if block.ref_cnt == 0 and block.block_hash is not None:  # as when it was looked up
                self._pool.touch([block])
                self._pairs.append((block, *self._pool.get_new_blocks(1)))

    @property
    def _reserve(self) -> int:
        """Blocks that running requests may need while contents are copied."""
        size = self._scheduler.block_size
        lengths = (r.num_tokens - r.num_computed_tokens for r in self._scheduler.running)
        groups = len(self._scheduler.kv_cache_config.kv_cache_groups)
        return groups * sum(STEPS_AHEAD + blocks_for(max(0, length), size) for length in lengths)

    def _begin_copy(self) -> None:
        groups = len(self._scheduler.kv_cache_config.kv_cache_groups)
        moved = [Moved([], []) for _ in range(groups)]
        for block, other in self._pairs:
            of_group = moved[get_group_id(block.block_hash)]
            of_group.source.append(block)
            of_group.target.append(other)
        copies = copies_of(moved, self._physical, self._scheduler.block_size)
        seq, self._copy = self._channel.expect(answers=1)
        self._channel.send(instructions.Move(seq, copies, beside=True))

    def tend(self) -> None:
        """Let requests find a slice of what has been copied at its new place.

        Raises:
            RunnerDied: the runner cannot answer.
        """
        if self._copy is not None and self._copy.done():
            copy, self._copy = self._copy, None
            self._is_copied = not copied_by_all([], copy).problem
        if self._is_copied is None:
            return
        for _ in range(min(SLICE, len(self._pairs))):
            self._end_pair(*self._pairs.pop())  # those used last come last, and so stay longest
        if not self._pairs:
            self._is_copied = None

    def _end_pair(self, block: Any | None, other: Any) -> None:
        pool = self._pool
        if block is None:
            pool.free_blocks([other])
            return
        is_held = block.ref_cnt > 1  # by requests that have found it meanwhile
        if self._is_copied and block.block_hash is not None and not is_held:
            pool.move_block_hashes(block, other)
        pool.free_blocks([other])
        if is_held:
            pool.free_blocks([block])
        else:
            pool.evict_blocks({block.block_id})
            self._withheld.append(block)

    def withhold(self, beyond: int) -> int:
        """See ``interface.BlockLender.withhold``."""
        pool = self._pool
        given_up = pool.num_gpu_blocks - 1 - beyond
        if len(self._withheld) < given_up:
            free = [block for block in pool.blocks[beyond + 1 :] if block.ref_cnt == 0]
            pool.evict_blocks({block.block_id for block in free})
            pool.touch(free)
            self._withheld += free
        return int(given_up - len(self._withheld))

    def restore(self) -> None:
        """See ``interface.BlockLender.restore``."""
        pool, self._sought = self._pool, None
        pool.free_blocks([block for block, _ in self._pairs if block is not None])
        if self._copy is None:
            pool.free_blocks([other for _, other in self._pairs])
            self._pairs, self._is_copied = [], None
        else:  # what is written to is freed when that is over
            self._pairs = [(None, other) for _, other in self._pairs]
        pool.free_blocks(self._withheld)
        self._withheld = []
