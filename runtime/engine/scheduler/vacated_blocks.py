"""How blocks of certain ids are emptied: what they hold moves to other blocks of the same core.

Here vLLM's books change, at once. The members' runners then copy the KV, before they do anything
else, and requests get their new blocks with their next step, as preempted ones do.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.request import Request

from shoal.runtime.engine.agent.interface import RunnerDied
from shoal.runtime.engine.kv.carry_plan import NULL_BLOCK
from shoal.runtime.engine.kv.lease import num_uncached
from shoal.runtime.engine.link import instructions
from shoal.runtime.engine.link.executor import UnitChannel, copied_by_all
from shoal.runtime.engine.link.instructions import Arrival
from shoal.runtime.engine.scheduler.block_holders import holders, preempt
from shoal.runtime.engine.scheduler.carried_blocks import PhysicalBlocks
from shoal.runtime.engine.scheduler.carried_requests import CarriedRequests

IsGivenUp = Callable[[int], bool]
"""Whether a block, named by its id, is given up."""
Blocks = list[Any]
"""vLLM's ``KVCacheBlock``s."""


class Moved(NamedTuple):
    """What moves of one KV group."""

    source: Blocks
    target: Blocks


class Vacated(NamedTuple):
    """What became of the contents of the blocks."""

    moved: list[Moved]
    """For each KV group."""
    requests: set[Request]
    """Requests that have other blocks now."""
    preempted: int
    """Requests for whose KV there was no room: they have no blocks any more."""


class VacatedBlocks:
    """Empties blocks of one core.

    Args:
        scheduler: vLLM's, of the core.
        channel: the queues to the members' runners.
        carried: lets requests begin again with other blocks.
        physical: what backs the core's blocks.
    """

    def __init__(
        self,
        scheduler: Any,
        channel: UnitChannel,
        carried: CarriedRequests,
        physical: PhysicalBlocks,
    ) -> None:
        self._scheduler, self._channel = scheduler, channel
        self._carried, self._physical = carried, physical
        self._moves: list[Future[Any]] = []

    def vacate(self, is_given_up: IsGivenUp, *, moves: bool) -> int:
        """See ``interface.Core.vacate``."""
        if not (moves and self._carried.shares_kv) or self._carried.unread:
            lost = holders(self._scheduler, is_given_up)
            preempt(self._scheduler, lost)
            return len(lost)
        vacated = vacate(self._scheduler, is_given_up)
        self._carried.begin_again(vacated.requests)
        copies = copies_of(vacated.moved, self._physical, self._scheduler.block_size)
        if copies:
            seq, future = self._channel.expect(answers=len(self._channel.unit.engines))
            self._channel.send(instructions.Move(seq, copies))
            self._moves.append(future)
        return vacated.preempted

    @property
    def is_moving(self) -> bool:
        """See ``interface.Core.is_moving``.

        Raises:
            RunnerDied: a member cannot copy, or cannot answer.
        """
        for future in [future for future in self._moves if future.done()]:
            self._moves.remove(future)
            if problem := copied_by_all([], future).problem:
                raise RunnerDied(f"KV could not be moved: {problem}")
        return bool(self._moves)


def vacate(scheduler: Any, is_given_up: IsGivenUp) -> Vacated:
    """Empty the blocks that are given up.

    First those that requests hold move. If there is too little room, requests are preempted, the
    last of them first, and only as many as have to be. Then those that only cache something move,
    the last used first, as far as there are free blocks that cache nothing. The emptied blocks are
    free and cache nothing.

    Only while no step is in flight, or if no request holds such a block.
    """
    pool, managers = scheduler.kv_cache_manager.block_pool, _managers(scheduler)
    free = _free(pool, is_given_up)
    lacking = _lacking_room(scheduler, is_given_up, pool.get_num_free_blocks() - len(free))
    if lacking:
        preempt(scheduler, lacking)
        free = _free(pool, is_given_up)
    pool.touch(free)  # so that nobody gets them
    moved = [_move_held(pool, manager, is_given_up) for manager in managers]
    emptied = [block for of_group in moved for block in of_group.source]
    requests = _give_others(scheduler, managers, moved)
    cached = _move_cached(pool, [block for block in free if block.block_hash is not None])
    for block, other in cached:
        of_group = moved[get_group_id(other.block_hash)]
        of_group.source.append(block)
        of_group.target.append(other)
    pool.free_blocks([other for _, other in cached])
    pool.evict_blocks({block.block_id for block in free})
    pool.free_blocks([*emptied, *free])
    return Vacated(moved, requests, len(lacking))


def _managers(scheduler: Any) -> Sequence[Any]:
    managers: Sequence[Any] = scheduler.kv_cache_manager.coordinator.single_type_managers
    return managers


def _free(pool: Any, is_given_up: IsGivenUp) -> Blocks:
    """Return the free blocks that are given up, in the order in which the pool would use them."""
    return [b for b in pool.free_block_queue.get_all_free_blocks() if is_given_up(b.block_id)]


def _lacking_room(scheduler: Any, is_given_up: IsGivenUp, staying: int) -> list[str]:
    """Return the requests that have to be preempted so that the others' blocks find room.

    Args:
        scheduler: vLLM's.
        is_given_up: which blocks are.
        staying: how many free blocks are not.
    """
    managers = _managers(scheduler)
    held = {
        block.block_id
        for manager in managers
        for blocks in manager.req_to_blocks.values()
        for block in blocks
        if is_given_up(block.block_id)
    }
    room = staying - len(held)
    lacking = list[str]()
    for request_id in reversed(holders(scheduler, is_given_up)):
        if room >= 0:
            break
        lacking.append(request_id)
        # It gives room back, and what is given up of it need not move. Nobody else has these.
        room += sum(
            block.ref_cnt == 1 and not block.is_null
            for manager in managers
            for block in manager.req_to_blocks.get(request_id, ())
        )
    return lacking


def _move_held(pool: Any, manager: Any, is_given_up: IsGivenUp) -> Moved:
    """Let other blocks stand for those that requests hold of one KV group."""
    held = {
        block.block_id: block
        for blocks in manager.req_to_blocks.values()
        for block in blocks
        if is_given_up(block.block_id)
    }
    source = list(held.values())
    if len(source) > pool.get_num_free_blocks():
        # Some are those of requests in no queue, such as exported ones, which are not preempted.
        return Moved([], [])
    target = pool.get_new_blocks(len(source))
    for block, other in zip(source, target, strict=True):
        pool.move_block_hashes(block, other)
        block.ref_cnt, other.ref_cnt = 1, block.ref_cnt
    return Moved(source, target)


def _give_others(scheduler: Any, managers: Sequence[Any], moved: Sequence[Moved]) -> set[Request]:
    """Put the other blocks into the requests' tables; return these requests."""
    requests = set[Request]()
    for manager, (source, target) in zip(managers, moved, strict=True):
        others = {b.block_id: other for b, other in zip(source, target, strict=True)}
        for request_id, blocks in manager.req_to_blocks.items():
            if others.keys().isdisjoint(block.block_id for block in blocks):
                continue
            blocks[:] = [others.get(block.block_id, block) for block in blocks]
            requests.add(scheduler.requests[request_id])
    return requests


def _move_cached(pool: Any, cached: Blocks) -> list[tuple[Any, Any]]:
    """Let free blocks cache what those cache that are given up, which are the last used last."""
    room = num_uncached(pool, len(cached))
    source = cached[len(cached) - room :]
    target = pool.get_new_blocks(room)
    for block, other in zip(source, target, strict=True):
        pool.move_block_hashes(block, other)
    return list(zip(source, target, strict=True))


def copies_of(moved: Sequence[Moved], physical: PhysicalBlocks, block_tokens: int) -> list[Arrival]:
    """Return what runners have to read, and where to.

    It is described as the KV of one request for each KV group, which has null blocks, that are not
    read, in all other groups.

    Args:
        moved: what moves, for each KV group.
        physical: what backs the core's blocks.
        block_tokens: tokens of a block.
    """
    groups = len(moved)

    def of(group: int, blocks: Blocks) -> dict[int, list[list[int]]]:
        nothing = [NULL_BLOCK] * len(blocks)
        backing = physical([block.block_id for block in blocks])
        return {
            member: [ids if each == group else nothing for each in range(groups)]
            for member, ids in backing.items()
        }

    return [
        Arrival(
            request_id=f"moved/{group}",
            prompt=[],
            tokens=[],
            computed=len(source) * block_tokens,
            sampling=None,
            source=of(group, source),
            target=of(group, target),
        )
        for group, (source, target) in enumerate(moved)
        if source
    ]
