"""Blocks of certain ids that are given up: on vLLM's schedulers and a model of a few lines."""

from shoal.runtime.engine.agent.interface import Lease
from tests.runtime.engine.prompts import random_prompts
from tests.runtime.engine.scheduler.toy_engines import (
    BLOCKS,
    Make,
    ToyEngines,
    undisturbed,
)

PROMPTS = random_prompts((5, 21, 32, 50), seed=5)
LEFT = 30
"""Blocks that stay: too few for all requests."""


def submit_all(engines: ToyEngines, core: int = 0) -> list[str]:
    return [
        engines.submit(engines.own[core], f"r{number}", prompt)
        for number, prompt in enumerate(PROMPTS)
    ]


def lose(engines: ToyEngines, engine: int) -> None:
    """Let nothing be left of the blocks that are given up, as if their memory were gone."""
    blocks = engines.memories[engine].blocks
    for block in [block for block in blocks if block > LEFT]:
        del blocks[block]


def lost(engines: ToyEngines, engine: int) -> bool:
    """Return whether nothing has been written to these blocks since."""
    return max(engines.memories[engine].blocks) <= LEFT


def test_requests_go_on_without_the_blocks_that_are_given_up(make: Make) -> None:
    expected = [undisturbed(make, prompt) for prompt in PROMPTS]
    engines = make()
    own, requests = engines.own[0], submit_all(engines)
    engines.step(own, 8)
    holders = own.holders(LEFT)
    assert len(holders) > 0
    assert own.withhold(LEFT) > 0, "they hold some"
    assert own.vacate(LEFT, moves=False) == len(holders)
    assert own.holders(LEFT) == []
    assert own.withhold(LEFT) == 0
    lose(engines, 0)
    engines.finish(own)
    assert [engines.tokens[request] for request in requests] == expected
    assert lost(engines, 0)
    assert own.load.free_blocks == LEFT
    assert engines.audit() == []
    own.restore()
    assert own.load.free_blocks == BLOCKS
    assert engines.audit() == []


def test_requests_that_keep_such_blocks_go_wrong(make: Make) -> None:
    """The negative control: the model sees that the memory is gone."""
    expected = [undisturbed(make, prompt) for prompt in PROMPTS]
    engines = make()
    requests = submit_all(engines)
    engines.step(engines.own[0], 8)
    lose(engines, 0)
    engines.finish(engines.own[0])
    assert [engines.tokens[request] for request in requests] != expected


def test_prefixes_that_such_blocks_cached_are_not_found(make: Make) -> None:
    engines = make()
    own = engines.own[0]
    engines.submit(own, "first", PROMPTS[3])
    engines.finish(own)
    assert own.withhold(0) == 0
    own.restore()
    assert own.load.free_blocks == BLOCKS
    before = engines.runners[own.unit].computed
    engines.submit(own, "again", PROMPTS[3])
    engines.finish(own)
    assert engines.tokens["again"] == engines.tokens["first"]
    assert engines.runners[own.unit].computed == 2 * before, "all of it is computed again"


def test_a_group_returns_the_rows_that_such_blocks_back(make: Make) -> None:
    expected = [undisturbed(make, prompt) for prompt in PROMPTS]
    engines = make()
    group, own = engines.group, engines.own
    requests = submit_all(engines)
    engines.step(own[0], 3)
    own[1].lend(17)  # members lend unlike ids
    engines.bind(50)
    engines.carry(own[0], group, requests)
    engines.step(group, 4)
    holders = group.holders(LEFT)
    assert holders
    assert group.vacate(LEFT, moves=False) == len(holders)
    give_back(engines, group.surrender(LEFT))
    assert group.holders(LEFT) == []
    assert not any(group.surrender(LEFT).values())
    own[1].take_back([block for block in own[1].lent if block not in backing(engines)])
    for engine in (0, 1):
        assert own[engine].withhold(LEFT) == 0
        lose(engines, engine)
    rows = min(core.load.free_blocks for core in own)
    group.grow({engine: own[engine].lend(rows) for engine in (0, 1)})
    engines.finish(group)
    assert [engines.tokens[request] for request in requests] == expected
    assert lost(engines, 0)
    assert lost(engines, 1)
    engines.release()
    assert engines.audit() == []


def give_back(engines: ToyEngines, lease: Lease) -> None:
    for engine, blocks in lease.items():
        engines.own[engine].take_back(blocks)


def backing(engines: ToyEngines) -> set[int]:
    """Return what engine 1 has lent to the group."""
    return set(engines.group._lease._backing[1].values())


def test_requests_that_wait_with_their_kv_lose_it_too(make: Make) -> None:
    expected = [undisturbed(make, prompt) for prompt in PROMPTS]
    engines = make()
    own, requests = engines.own, submit_all(engines)
    engines.step(own[0], 8)
    engines.carry(own[0], own[1], requests)
    holders = own[1].holders(0)
    assert set(holders) == {request for request in requests if engines.tokens[request]}
    assert own[1].vacate(0, moves=False) == len(holders)
    assert own[1].withhold(LEFT) == 0
    lose(engines, 1)
    engines.finish(own[1])
    assert [engines.tokens[request] for request in requests] == expected
    assert lost(engines, 1)
    own[1].restore()
    assert engines.audit() == []


def test_the_first_that_ran_is_computed_first_again(make: Make) -> None:
    engines = make()
    own, requests = engines.own[0], submit_all(engines)
    engines.step(own, 8)
    assert own.vacate(0, moves=False) > 1
    waiting = [request.request_id for request in own._scheduler.waiting]
    assert waiting == [r for r in requests if r in waiting]
    engines.finish(own)
