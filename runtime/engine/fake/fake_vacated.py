"""How a fake core empties blocks of certain ids: what requests hold moves to other blocks.

Unlike a real core, it forgets what is only cached there.
"""

from collections.abc import Callable, Mapping, Sequence

from shoal.runtime.engine.fake.fake_kv import KvMemory
from shoal.runtime.engine.fake.fake_request import FakeRequest
from shoal.runtime.engine.fake.fake_scheduler import FakeScheduler

IsGivenUp = Callable[[int], bool]
"""Whether a block, named by its id, is given up."""
Physical = Callable[[Sequence[int]], Mapping[int, Sequence[int]]]
"""From ids of the core to each member's own."""


def holders(scheduler: FakeScheduler, is_given_up: IsGivenUp) -> list[FakeRequest]:
    """Return the requests that hold a block that is given up."""
    return [r for r in scheduler.requests if any(map(is_given_up, r.blocks))]


def vacate(
    scheduler: FakeScheduler,
    memory: KvMemory,
    physical: Physical,
    is_given_up: IsGivenUp,
    *,
    moves: bool,
) -> int:
    """See ``Core.vacate``.

    Args:
        scheduler: the core's.
        memory: what the blocks of all engines hold.
        physical: what backs the core's blocks.
        is_given_up: which blocks.
        moves: see ``Core.vacate``.
    """
    found = holders(scheduler, is_given_up)
    lost = 0
    while found and not (moves and _has_room(scheduler, found, is_given_up)):
        _preempt(scheduler, found.pop())
        lost += 1
    if not found:
        return lost
    old = _held(found, is_given_up)
    free = [block for block in scheduler.pool.ids if not is_given_up(block)]
    others = dict(zip(old, scheduler.pool.take_out(free[: len(old)]), strict=True))
    before, after = physical(old), physical(list(others.values()))
    for engine, blocks in before.items():
        memory.move(engine, dict(zip(blocks, after[engine], strict=True)))
    for request in found:
        request.blocks[:] = [others.get(block, block) for block in request.blocks]
    scheduler.pool.replace(others)
    return lost


def _held(requests: Sequence[FakeRequest], is_given_up: IsGivenUp) -> list[int]:
    return list({b: None for request in requests for b in request.blocks if is_given_up(b)})


def _has_room(
    scheduler: FakeScheduler, found: Sequence[FakeRequest], is_given_up: IsGivenUp
) -> bool:
    room = sum(not is_given_up(block) for block in scheduler.pool.ids)
    return room >= len(_held(found, is_given_up))


def _preempt(scheduler: FakeScheduler, request: FakeRequest) -> None:
    if request in scheduler.running:
        scheduler.preempt(request)
    else:
        scheduler.free(request)
