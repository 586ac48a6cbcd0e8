"""The lease of a group: virtual KV blocks backed by one physical block of every member.

A group's core schedules over virtual block ids. All of them exist from the start, closed: held out
of the core's own block pool. Opening a virtual block gives it to the pool and pins, for every
member, the physical block that backs it there, so members need not lend the same ids (the KV cache
adaptor of Flying Serving, 4.2, without moving a byte).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.policies.values.layouts import Unit


def num_uncached(pool: Any, enough: int) -> int:
    """Return how many free blocks can be used before one that caches something is evicted.

    Args:
        pool: vLLM's ``BlockPool``.
        enough: where to stop counting.
    """
    queue, count = pool.free_block_queue, 0
    block = queue.fake_free_list_head.next_free_block
    while count < enough and block is not queue.fake_free_list_tail:
        if block.block_hash is not None:
            break
        count += 1
        block = block.next_free_block
    return count


class GroupLease:
    """Which virtual blocks of a group are open, and what backs them.

    ``pool`` is the ``vllm.v1.core.block_pool.BlockPool`` of the group's core. A block is *open*
    when it is in the pool's free queue or held by a request, else *closed*.
    """

    def __init__(self, group: Unit, pool: Any) -> None:
        self._group = group
        self._pool = pool
        self._closed: list[Any] = pool.get_new_blocks(pool.get_num_free_blocks())
        # Lowest id on top of the stack: small ids first keeps block tables readable in traces.
        self._closed.reverse()
        self._backing: dict[int, dict[int, int]] = {member: {} for member in group.engines}

    @property
    def num_open(self) -> int:
        """Virtual blocks open now."""
        return len(self._backing[self._group.leader])

    @property
    def num_free(self) -> int:
        """Open virtual blocks that no request holds."""
        return int(self._pool.get_num_free_blocks())

    def open(self, lease: Mapping[int, Sequence[int]]) -> list[int]:
        """Open one virtual block per row of ``lease`` and return their virtual ids in row order.

        Raises:
            ValueError: the lease does not name exactly the members, its columns differ in length,
                or it is larger than what is closed.
        """
        if set(lease) != set(self._group.engines):
            raise ValueError(f"lease of {sorted(lease)} for group {list(self._group.engines)}")
        lengths = {len(blocks) for blocks in lease.values()}
        if len(lengths) != 1:
            raise ValueError(f"members lent different numbers of blocks: {sorted(lengths)}")
        (count,) = lengths
        if count > len(self._closed):
            raise ValueError(f"lease of {count} blocks, but only {len(self._closed)} are closed")
        blocks = [self._closed.pop() for _ in range(count)]
        virtual = [block.block_id for block in blocks]
        for member, physical in lease.items():
            self._backing[member].update(zip(virtual, physical, strict=True))
        self._pool.free_blocks(blocks)
        return virtual

    def close(self, count: int) -> dict[int, list[int]]:
        """Close up to ``count`` free blocks, in the order in which the pool would use them.

        Returns the physical blocks that backed them, by member, rows aligned. Closing evicts the
        blocks from the group's prefix cache, because the members may overwrite their contents.
        """
        return self._close(self._pool.get_new_blocks(min(count, self.num_free)))

    def is_beyond(self, virtual: int, beyond: int) -> bool:
        """Return whether a block with an id above ``beyond`` backs an open virtual block."""
        return any(backing.get(virtual, 0) > beyond for backing in self._backing.values())

    def close_beyond(self, beyond: int) -> dict[int, list[int]]:
        """Close the free virtual blocks that a block with an id above ``beyond`` backs.

        Returns what ``close`` does.
        """
        # A set, because this is asked in every turn of a change, and a lease has many blocks.
        given_up = {
            virtual
            for backing in self._backing.values()
            for virtual, physical in backing.items()
            if physical > beyond
        }
        blocks = [self._pool.blocks[virtual] for virtual in sorted(given_up)]
        free = [block for block in blocks if block.ref_cnt == 0]
        self._pool.evict_blocks({block.block_id for block in free})
        self._pool.touch(free)
        return self._close(free)

    def _close(self, blocks: Sequence[Any]) -> dict[int, list[int]]:
        self._closed.extend(reversed(blocks))
        return {
            member: [backing.pop(block.block_id) for block in blocks]
            for member, backing in self._backing.items()
        }

    def physical(self, virtual: Sequence[int]) -> dict[int, list[int]]:
        """Return what backs virtual blocks, by member. The null block is every member's own."""
        null = self._pool.null_block.block_id
        return {
            member: [null if block == null else backing[block] for block in virtual]
            for member, backing in self._backing.items()
        }

    def check_integrity(self) -> list[str]:
        """Return one line per broken invariant."""
        problems, group = [], list(self._group.engines)
        blocks = self._pool.num_gpu_blocks - 1  # without the null block
        if self.num_open + len(self._closed) != blocks:
            problems.append(
                f"group {group}: {self.num_open} open + {len(self._closed)} closed "
                f"virtual blocks, expected {blocks}"
            )
        for member, backing in self._backing.items():
            if len(set(backing.values())) != len(backing):
                problems.append(f"group {group}: member {member} backs two virtual blocks with one")
            if len(backing) != self.num_open:
                problems.append(
                    f"group {group}: member {member} backs {len(backing)} virtual "
                    f"blocks, expected {self.num_open}"
                )
        return problems
