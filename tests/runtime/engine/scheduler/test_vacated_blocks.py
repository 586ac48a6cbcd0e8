"""Blocks that are given up are emptied: their KV moves, on vLLM's schedulers and a small model."""

import pytest

from shoal.runtime.engine.agent.interface import RunnerDied
from tests.runtime.engine.prompts import random_prompts
from tests.runtime.engine.scheduler.test_block_holders import backing, give_back
from tests.runtime.engine.scheduler.toy_engines import (
    BLOCKS,
    TOKENS,
    Make,
    ToyEngines,
    undisturbed,
)

PROMPTS = random_prompts((5, 21, 32, 50), seed=5)
WINDOWED = (None, 8)


def on_high_blocks(engines: ToyEngines, left: int) -> list[str]:
    """Let requests run on blocks above an id; those below are free."""
    own = engines.own[0]
    low = own.lend(left)
    assert max(low) == left
    requests = [engines.submit(own, f"r{n}", prompt) for n, prompt in enumerate(PROMPTS)]
    engines.step(own, 8)
    own.take_back(low)
    return requests


def lose(engines: ToyEngines, engine: int, left: int) -> None:
    """Let nothing be left of the blocks that are given up, as if their memory were gone."""
    blocks = engines.memories[engine].blocks
    for block in [block for block in blocks if block > left]:
        del blocks[block]


def computed(engines: ToyEngines) -> int:
    return sum(runners.computed for runners in engines.runners.values())


@pytest.mark.parametrize(
    ("windows", "left"), [((None,), 70), (WINDOWED, 100)], ids=["one group", "two groups"]
)
def test_requests_keep_their_kv_where_there_is_room(
    make: Make, windows: tuple[int | None, ...], left: int
) -> None:
    engines = make(windows=windows)
    requests = [engines.submit(engines.own[0], f"r{n}", p) for n, p in enumerate(PROMPTS)]
    engines.finish(engines.own[0])
    expected, plain = [engines.tokens[request] for request in requests], computed(engines)

    engines = make(windows=windows)
    requests, own = on_high_blocks(engines, left), engines.own[0]
    assert set(own.holders(left)) == {r for r in requests if engines.tokens[r]}
    assert own.vacate(left, moves=True) == 0
    assert own.holders(left) == []
    assert own.withhold(left) == 0
    assert engines.runners[own.unit].moved > 0
    assert not own.is_moving
    lose(engines, 0, left)
    engines.finish(own)
    assert [engines.tokens[request] for request in requests] == expected
    assert computed(engines) == plain, "nothing is computed again"
    assert engines.audit() == []
    own.restore()
    assert own.load.free_blocks == BLOCKS


def test_without_moving_they_are_computed_again(make: Make) -> None:
    """The negative control."""
    plain = make()
    for number, prompt in enumerate(PROMPTS):
        plain.submit(plain.own[0], f"r{number}", prompt)
    plain.finish(plain.own[0])

    engines, left = make(), 70
    requests, own = on_high_blocks(engines, left), engines.own[0]
    begun = sum(bool(engines.tokens[request]) for request in requests)
    assert own.vacate(left, moves=False) == begun > 0
    assert own.withhold(left) == 0
    engines.finish(own)
    assert computed(engines) > computed(plain)
    assert engines.tokens == plain.tokens


def test_kv_that_is_not_copied_would_be_wrong(make: Make) -> None:
    """The negative control of the copy."""
    expected = [undisturbed(make, prompt) for prompt in PROMPTS]
    engines, left = make(), 70
    requests, own = on_high_blocks(engines, left), engines.own[0]
    engines.runners[own.unit]._pull = lambda *_: None  # type: ignore[method-assign]
    own.vacate(left, moves=True)
    engines.finish(own)
    assert [engines.tokens[request] for request in requests] != expected


def test_only_requests_without_room_are_computed_again(make: Make) -> None:
    expected = [undisturbed(make, prompt) for prompt in PROMPTS]
    engines, left = make(), 24
    requests, own = on_high_blocks(engines, left), engines.own[0]
    holders = own.holders(left)
    assert 0 < own.vacate(left, moves=True) < len(holders)
    assert own.holders(left) == []
    assert own.withhold(left) == 0
    kept = {request.request_id for request in own._scheduler.kv_holding_waiting}
    assert requests[0] in kept, "the last lose theirs"
    lose(engines, 0, left)
    engines.finish(own)
    assert [engines.tokens[request] for request in requests] == expected
    assert engines.audit() == []


def test_blocks_that_requests_share_move_once(make: Make) -> None:
    long = PROMPTS[3]
    prompts = [[*long, 7], [*long, 8], [*long, 9]]
    expected = [undisturbed(make, prompt) for prompt in prompts]
    engines, left = make(), 70
    own = engines.own[0]
    low = own.lend(left)
    engines.submit(own, "before", long)
    engines.finish(own)
    requests = [engines.submit(own, f"r{n}", prompt) for n, prompt in enumerate(prompts)]
    engines.step(own, 4)
    own.take_back(low)
    shared = set.intersection(
        *(set(own._scheduler.kv_cache_manager.get_block_ids(r)[0]) for r in requests)
    )
    assert shared
    assert own.vacate(left, moves=True) == 0
    assert own.withhold(left) == 0
    after = set.intersection(
        *(set(own._scheduler.kv_cache_manager.get_block_ids(r)[0]) for r in requests)
    )
    assert len(after) == len(shared)
    assert max(after) <= left
    lose(engines, 0, left)
    engines.finish(own)
    assert [engines.tokens[request] for request in requests] == expected
    assert own.load.free_blocks == left
    assert engines.audit() == []


def test_prefixes_that_nobody_uses_move_while_there_is_room(make: Make) -> None:
    engines, left = make(), 70
    own = engines.own[0]
    low = own.lend(left)
    engines.submit(own, "first", PROMPTS[3])
    engines.finish(own)
    own.take_back(low)
    before = computed(engines)
    assert own.vacate(left, moves=True) == 0
    assert own.withhold(left) == 0
    lose(engines, 0, left)
    engines.submit(own, "again", PROMPTS[3])
    engines.finish(own)
    assert engines.tokens["again"] == engines.tokens["first"]
    assert computed(engines) < before + len(PROMPTS[3]), "the prompt was found"
    assert engines.audit() == []


def test_of_a_prefix_the_beginning_moves_if_there_is_little_room(make: Make) -> None:
    engines, left = make(), 6
    own = engines.own[0]
    low = own.lend(left)
    engines.submit(own, "first", PROMPTS[3])
    engines.finish(own)
    own.take_back(low)
    own.vacate(left, moves=True)
    assert own.withhold(left) == 0
    own.restore()
    before = computed(engines)
    engines.submit(own, "again", PROMPTS[3])
    engines.finish(own)
    assert engines.tokens["again"] == engines.tokens["first"]
    assert computed(engines) == 2 * before - left * TOKENS


def test_prefixes_without_room_are_forgotten(make: Make) -> None:
    engines, left = make(), 6
    own = engines.own[0]
    low = own.lend(left)
    engines.submit(own, "first", PROMPTS[3])
    engines.finish(own)
    own.vacate(left, moves=True)
    assert own.withhold(left) == 0
    assert own.load.free_blocks == 0
    own.take_back(low)
    own.restore()
    before = computed(engines)
    engines.submit(own, "again", PROMPTS[3])
    engines.finish(own)
    assert engines.tokens["again"] == engines.tokens["first"]
    assert computed(engines) == 2 * before
    assert engines.audit() == []


def test_a_group_moves_within_its_lease(make: Make) -> None:
    expected = [undisturbed(make, prompt) for prompt in PROMPTS]
    engines, left = make(), 90
    group, own = engines.group, engines.own
    first = [core.lend(50) for core in own]
    engines.bind(60)  # with ids from 51 to 110
    requests = [engines.submit(group, f"r{n}", prompt) for n, prompt in enumerate(PROMPTS)]
    engines.step(group, 12)
    held = group.lease_blocks - group.load.free_blocks
    for core, blocks in zip(own, first, strict=True):
        core.take_back(blocks)
    group.grow({engine: own[engine].lend(held) for engine in (0, 1)})
    before, fewer = computed(engines), group.holders(left)
    give = group.surrender(left)
    give_back(engines, give)
    assert group.vacate(left, moves=True) == 0
    assert group.holders(left) == []
    give_back(engines, group.surrender(left))
    for engine in (0, 1):
        assert own[engine].withhold(left) == 0
        lose(engines, engine, left)
    engines.finish(group)
    assert [engines.tokens[request] for request in requests] == expected
    total = sum(len(p) + len(engines.tokens[r]) - 1 for p, r in zip(PROMPTS, requests, strict=True))
    assert computed(engines) == total, (before, fewer)
    assert max(backing(engines)) <= left
    engines.release()
    assert engines.audit() == []


def test_blocks_are_empty_when_all_members_have_copied(make: Make) -> None:
    engines, left = make(), 70
    own = engines.own[0]
    on_high_blocks(engines, left)
    engines.runners[own.unit].copy_later = True
    own.vacate(left, moves=True)
    assert own.is_moving
    engines.runners[own.unit].finish_copies()
    assert not own.is_moving


def test_a_copy_that_fails_ends_the_engine(make: Make) -> None:
    engines, left = make(), 70
    own = engines.own[0]
    on_high_blocks(engines, left)
    engines.runners[own.unit].copy_later = True
    own.vacate(left, moves=True)
    engines.runners[own.unit].finish_copies("no memory")
    with pytest.raises(RunnerDied, match="KV could not be moved: no memory"):
        own.is_moving  # noqa: B018
