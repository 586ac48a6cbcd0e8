"""``python -m shoal.loadgen.bench.lease_times``: the host's time for leases, by their size.

It times what engines, messages and the controller's book do when a group of two is lent blocks and
gives them back: for one portion (``binding.PORTION``), and for all blocks of a lease at once. All
blocks cache something when they go back, and their ids are in no order. Times are summed over
processes that work side by side in a node.
"""

import gc
import random
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from vllm.v1.core.block_pool import BlockPool

from shoal.policies.values.layouts import tensor_parallel
from shoal.runtime.controller.books.leases import Leases
from shoal.runtime.engine.agent.binding import PORTION
from shoal.runtime.engine.kv.kv_cache import BlockMap
from shoal.runtime.engine.kv.lease import GroupLease
from shoal.runtime.protocol import messages as m

GROUP = tensor_parallel((0, 1))
LEASES = (1_000, 10_000, 100_000)
TOKENS = 16
ROUNDS = 5
RESERVE = 512
"""Blocks that cache nothing for two steps of 8,192 tokens in TP2."""


class Node:
    """What holds the blocks of two engines, all of them lent or about to be."""

    def __init__(self, blocks: int) -> None:
        self.own = [_shuffled(blocks, seed) for seed in (0, 1)]
        self.pool: Any = BlockPool(blocks + 1, enable_caching=True, hash_block_size=2 * TOKENS)
        self.lease = GroupLease(GROUP, self.pool)
        self.maps = BlockMap(), BlockMap()
        self.book = Leases(
            cast(Any, _Engines()),
            cast(Any, SimpleNamespace(bound={GROUP: 1})),
            cast(Any, SimpleNamespace(to_engine=lambda *_: None)),
        )
        self._lent: list[dict[int, Any]] = [{}, {}]

    def grow(self, blocks: int) -> None:
        """Lend the group so many blocks of each engine."""
        lease = dict[int, list[int]]()
        for engine, pool in enumerate(self.own):
            taken = pool.get_new_blocks(blocks)
            self._lent[engine].update((block.block_id, block) for block in taken)
            lent = m.Lent(1, engine, GROUP, [block.block_id for block in taken])
            answer = m.decode_to_controller(m.encode(lent))
            assert isinstance(answer, m.Lent)
            self.book.add(engine, GROUP, answer.blocks)
            lease[engine] = answer.blocks
        self.book.open(GROUP, blocks)
        grow = m.decode_to_engine(m.encode(m.Grow(1, GROUP, lease)))
        assert isinstance(grow, m.Grow)
        virtual = self.lease.open(grow.lease)
        for engine, table in enumerate(self.maps):
            table.extend(virtual, grow.lease[engine])

    def cache_all(self) -> None:
        """Let every free block of the group cache something."""
        blocks = self.pool.get_new_blocks(self.pool.get_num_free_blocks())
        hashes = [b"%032d" % index for index in range(len(blocks))]
        request = cast(Any, SimpleNamespace(block_hashes=hashes))
        self.pool.cache_full_blocks(
            request, blocks, 0, len(blocks), 2 * TOKENS, kv_cache_group_id=0
        )
        self.pool.free_blocks(reversed(blocks))

    def give_back(self, blocks: int) -> None:
        """Let the leader return so many blocks, and the engines have them again."""
        released = m.Released(1, GROUP, self.lease.close(blocks), 0)
        answer = m.decode_to_controller(m.encode(released))
        assert isinstance(answer, m.Released)
        self.book.close(GROUP, answer.returned)
        for engine, ids in answer.returned.items():
            resume = m.decode_to_engine(m.encode(m.Resume(1, GROUP, ids)))
            assert isinstance(resume, m.Resume)
            self.own[engine].free_blocks([self._lent[engine].pop(id_) for id_ in resume.blocks])


class _Engines(list[Any]):
    """Two engines, as far as leases know them."""

    gone = frozenset[int]()

    def __init__(self) -> None:
        super().__init__((0, 1))


def _shuffled(blocks: int, seed: int) -> Any:
    pool: Any = BlockPool(blocks + 1, enable_caching=True, hash_block_size=TOKENS)
    taken = pool.get_new_blocks(blocks)
    random.Random(seed).shuffle(taken)
    pool.free_blocks(taken)
    return pool


def lease_seconds(blocks: int) -> dict[str, float]:
    """Return the time of each step in the life of a lease that grows to so many blocks."""
    portion = min(PORTION, blocks)
    node, rest = Node(blocks), blocks - portion
    node.grow(rest)
    seconds = {"grow by a portion": _seconds(node.grow, portion)}
    seconds["look for blocks that cache nothing"] = _seconds(node.lease.num_uncached, RESERVE)
    node.cache_all()
    seconds["give a portion back"] = _seconds(node.give_back, portion)
    seconds["give the rest back at once"] = _seconds(node.give_back, rest)
    assert not node.lease.num_open
    return seconds


def _seconds(call: Any, *args: Any) -> float:
    begun = time.perf_counter()
    call(*args)
    return time.perf_counter() - begun


def main() -> None:
    """Print the table."""
    gc.disable()
    print(f"{'blocks of the lease, ms':<40}" + "".join(f"{blocks:>10,}" for blocks in LEASES))
    rounds = [[lease_seconds(blocks) for _ in range(ROUNDS)] for blocks in LEASES]
    for name in rounds[0][0]:
        best = [min(times[name] for times in of_size) * 1e3 for of_size in rounds]
        _print(name, best)


def _print(name: str, milliseconds: Sequence[float]) -> None:
    print(f"  {name:<38}" + "".join(f"{value:>10.3f}" for value in milliseconds))


if __name__ == "__main__":
    main()
