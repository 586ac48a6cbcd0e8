"""Blocks that are copied ahead of a carry, on vLLM's schedulers and a model of a few lines."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest

from shoal.policies.values.layouts import Unit, alone
from shoal.runtime.config import LayoutConfigs
from shoal.runtime.engine.agent.copies_ahead import Prefixes
from shoal.runtime.engine.agent.interface import RunnerDied
from shoal.runtime.engine.agent.results import Copied
from shoal.runtime.engine.link import instructions
from shoal.runtime.engine.scheduler.vllm_core import VllmCore
from shoal.runtime.protocol.messages import AheadRequest, CarriedRequest
from tests.runtime.engine.prompts import random_prompts
from tests.runtime.engine.scheduler.toy_engines import (
    BLOCKS,
    GROUP,
    TOKENS,
    Make,
    ToyEngines,
    undisturbed,
)

PROMPTS = random_prompts((5, 21, 32, 50), seed=5)
CARRY = 7


def reserve(
    engines: ToyEngines, source: VllmCore, target: VllmCore, requests: Sequence[str]
) -> list[AheadRequest]:
    """Pin what requests have filled in one core, and reserve room for it in another."""
    pinned = source.pin(CARRY, requests)
    for request_id in requests:
        target.expect(request_id, engines.frames[request_id])
    return target.reserve(CARRY, source.unit, pinned)


def copy(source: VllmCore, target: VllmCore, found: list[AheadRequest], *through: VllmCore) -> None:
    """Copy what is reserved, by units whose members together are those of the target."""
    for core in through:
        core.copy_ahead(CARRY, source.unit, target.unit, found)
        assert [carry for carry, _ in core.copied_ahead()] == [CARRY]


def settle(source: VllmCore, target: VllmCore, *, copied: bool = True) -> None:
    target.settle(CARRY, copied=copied)
    source.unpin(CARRY)


def lend_group(engines: ToyEngines, blocks: int) -> None:
    """Let the lease of the group, which is not bound, grow."""
    engines.group.grow({core.unit.leader: core.lend(blocks) for core in engines.own})


def ahead_to_group(engines: ToyEngines, requests: Sequence[str]) -> list[AheadRequest]:
    """Copy what requests have filled on the first engine to the group, which is not bound."""
    lend_group(engines, 40)
    found = reserve(engines, engines.own[0], engines.group, requests)
    copy(engines.own[0], engines.group, found, *engines.own)
    settle(engines.own[0], engines.group)
    return found


def read_from(engines: ToyEngines, unit: Unit) -> dict[str, int]:
    """Return the first token that a unit's members were last told to read, by request."""
    sent = engines.runners[unit].sent
    carries = [each for each in sent if isinstance(each, instructions.Carry)]
    return {one.request_id: one.begin for carry in carries for one in carry.requests if one.source}


def ends(found: list[AheadRequest]) -> dict[str, int]:
    return {one.request_id: one.end for one in found}


def cached(engines: ToyEngines, core: VllmCore, prompt: list[int], **options: Any) -> int:
    """Return how many tokens of a prompt a core finds in its prefix cache."""
    request_id = f"again {len(engines.tokens)}"
    core.add(engines.frames_of(request_id, prompt, max_tokens=1, **options))
    engines.finish(core)
    stats = engines.outputs[request_id][0].prefill_stats
    assert stats is not None
    return int(stats.num_cached_tokens)


def submit_all(engines: ToyEngines, **sampling: Any) -> list[str]:
    return [
        engines.submit(engines.own[0], f"r{number}", prompt, **sampling)
        for number, prompt in enumerate(PROMPTS)
    ]


# --- the whole way ---


def assert_ends_well(
    engines: ToyEngines, core: VllmCore, requests: Sequence[str], expected: list[list[int]]
) -> None:
    """Let the group go, run the requests to their ends, and see that all blocks are free again."""
    engines.release()
    engines.finish(core)
    assert [engines.tokens[request] for request in requests] == expected
    assert engines.audit() == []
    assert [each.load.free_blocks for each in engines.cores.values()] == [BLOCKS, BLOCKS, 0]


def test_only_tails_are_left_to_read_in_either_direction(make: Make) -> None:
    expected = [undisturbed(make, prompt, max_tokens=60) for prompt in PROMPTS]
    engines = make()
    own, group, requests = engines.own, engines.group, submit_all(engines, max_tokens=60)
    engines.step(own[0], 9)
    found = ahead_to_group(engines, requests)
    assert len(found) == 4
    before = sum(map(len, engines.tokens.values()))
    engines.step(own[0], 3)
    engines.bind(20)
    carried, _ = engines.carry(own[0], group, requests, expected=True)
    assert read_from(engines, GROUP) == ends(found)
    tails = [request.computed - ends(found)[request.request_id] for request in carried]
    since = sum(map(len, engines.tokens.values())) - before
    assert engines.runners[GROUP].read == sum(tails) <= since + 4 * 7
    engines.step(group, 3)
    found = reserve(engines, group, own[1], requests)
    copy(group, own[1], found, group)
    settle(group, own[1])
    engines.step(group, 5)
    engines.carry(group, own[1], requests, expected=True)
    assert read_from(engines, alone(1)) == ends(found)
    assert_ends_well(engines, own[1], requests, expected)


def test_blocks_that_went_ahead_are_not_looked_up_again(make: Make) -> None:
    engines = make()
    engines.submit(engines.own[0], "r", PROMPTS[3])
    engines.step(engines.own[0], 8)
    found = ahead_to_group(engines, ["r"])
    engines.bind(20)
    # Nobody finds them by their hashes any more; the carry has held them all the time.
    engines.group.evict_prefix_cache()
    engines.carry(engines.own[0], engines.group, ["r"], expected=True)
    assert read_from(engines, GROUP) == ends(found)
    engines.finish(engines.group)
    assert engines.tokens["r"] == undisturbed(make, PROMPTS[3])


def test_a_bound_engines_own_core_takes_blocks_that_it_has_not_lent(make: Make) -> None:
    engines = make()
    engines.bind(20)
    engines.submit(engines.group, "r", PROMPTS[3])
    engines.step(engines.group, 9)
    found = reserve(engines, engines.group, engines.own[0], ["r"])
    (blocks,) = found[0].target[0]
    assert engines.own[0].lent.isdisjoint(blocks)
    assert engines.own[0].load.free_blocks == BLOCKS - 20 - len(blocks)
    assert engines.own[0].lend(BLOCKS)
    assert engines.own[0].lent.isdisjoint(blocks), "lent to nobody"


def without_copy(found: list[AheadRequest]) -> list[AheadRequest]:
    return []


def into_other_blocks(found: list[AheadRequest]) -> list[AheadRequest]:
    """Exchange two blocks that are to have the KV."""
    blocks = found[0].target[1][0]
    blocks[0], blocks[1] = blocks[1], blocks[0]
    return found


def from_other_blocks(found: list[AheadRequest]) -> list[AheadRequest]:
    blocks = found[0].source[0][0]
    blocks[0], blocks[1] = blocks[1], blocks[0]
    return found


def tokens_after(engines: ToyEngines, copied: list[AheadRequest]) -> list[int]:
    """Let a request go to the group with what is copied ahead of it; return what it generates."""
    own, group = engines.own, engines.group
    copy(own[0], group, copied, *own)
    settle(own[0], group)
    engines.bind(20)
    engines.carry(own[0], group, ["r"], expected=True)
    engines.finish(group)
    return engines.tokens["r"]


@pytest.mark.parametrize("spoil", [without_copy, into_other_blocks, from_other_blocks])
def test_what_is_copied_ahead_decides_the_tokens(
    make: Make, spoil: Callable[[list[AheadRequest]], list[AheadRequest]]
) -> None:
    """The tests above can fail."""
    engines = make()
    own, group = engines.own, engines.group
    engines.submit(own[0], "r", PROMPTS[2])
    engines.step(own[0], 6)
    lend_group(engines, 20)
    found = reserve(engines, own[0], group, ["r"])
    assert tokens_after(engines, spoil(found)) != undisturbed(make, PROMPTS[2])


# --- pins ---


def test_only_tokens_of_collected_steps_are_pinned(make: Make) -> None:
    engines = make()
    own = engines.own[0]
    engines.submit(own, "r", PROMPTS[2])
    engines.step(own, 4)
    ahead = 0
    for _ in range(2 * TOKENS):
        while own.dispatch():
            pass
        (pinned,) = own.pin(CARRY, ["r", "unknown"])
        collected = len(PROMPTS[2]) + len(engines.tokens["r"]) - 1
        assert pinned.computed == collected // TOKENS * TOKENS
        assert len(pinned.blocks[0][0]) == pinned.computed // TOKENS
        assert (pinned.tokens, pinned.length) == (engines.tokens["r"], collected + 1)
        ahead += own._scheduler.requests["r"].num_computed_tokens // TOKENS * TOKENS > collected
        own.unpin(CARRY)
        engines._collect(own)
    assert ahead, "steps in flight did fill a block"


def test_what_a_beginning_request_has_found_may_not_be_written_yet(make: Make) -> None:
    engines = make()
    own, prompt = engines.own[0], PROMPTS[3][:12]
    engines.submit(own, "first", prompt)
    own.dispatch()
    engines.submit(own, "second", prompt)
    if not own.dispatch():  # one step at a time
        engines._collect(own)
        own.dispatch()
    request = own._scheduler.requests["second"]
    assert (request.num_computed_tokens, request.num_in_flight_tokens) == (12, 4)
    # With two steps in flight, the first request has not begun for certain either.
    begun = ["first"] if own.in_flight == 1 else []
    assert [request.request_id for request in own.pin(CARRY, ["first", "second"])] == begun
    while own.in_flight:
        engines._collect(own)
    assert [request.computed for request in own.pin(CARRY, ["first", "second"])] == [12, 12]


def test_blocks_that_are_still_to_be_read_are_not_pinned(make: Make) -> None:
    engines = make()
    own = engines.own
    engines.submit(own[0], "r", PROMPTS[2])
    engines.step(own[0], 6)
    (carried,) = own[0].export(["r"])
    own[1].expect("r", engines.frames["r"])
    own[1].adopt(alone(0), carried, with_kv=True)
    assert own[1].pin(CARRY, ["r"]) == []
    engines.runners[alone(1)].copy_later = True
    own[1].copy()
    assert own[1].pin(CARRY, ["r"]) == []
    engines.runners[alone(1)].finish_copies()
    assert own[1].copied()
    assert len(own[1].pin(CARRY, ["r"])) == 1


def abort(engines: ToyEngines) -> None:
    engines.own[0].abort(["r"])


def end(engines: ToyEngines) -> None:
    engines.finish(engines.own[0])


def preempt(engines: ToyEngines) -> None:
    engines.own[0].take_back(engines.own[0].lend(BLOCKS, urgent=True))
    assert engines.own[0].load.running == 0


@pytest.mark.parametrize("event", [abort, end, preempt])
def test_pinned_blocks_stay_whatever_becomes_of_the_request(
    make: Make, event: Callable[[ToyEngines], None]
) -> None:
    engines = make()
    own = engines.own[0]
    engines.submit(own, "r", PROMPTS[3])
    engines.step(own, 9)
    (pinned,) = own.pin(CARRY, ["r"])
    (blocks,) = pinned.blocks[0]
    event(engines)
    assert engines.audit() == [], "they are accounted for"
    lent = own.lend(BLOCKS)
    assert len(lent) == BLOCKS - len(blocks)
    assert set(lent).isdisjoint(blocks)
    own.take_back(lent)
    own.unpin(CARRY)
    own.unpin(CARRY)
    assert own.load.free_blocks == BLOCKS
    assert engines.audit() == []
    own.abort(["r"])
    assert cached(engines, own, PROMPTS[3]) == len(PROMPTS[3]) // TOKENS * TOKENS


def test_a_pin_that_is_lost_is_noticed(make: Make) -> None:
    """The audits of these tests can fail."""
    engines = make()
    engines.submit(engines.own[0], "r", PROMPTS[3])
    engines.step(engines.own[0], 9)
    engines.own[0].pin(CARRY, ["r"])
    engines.own[0].abort(["r"])
    engines.own[0]._ahead.pinned._pinned.clear()
    (problem,) = engines.audit()
    assert "blocks free, lent, copied ahead or given up" in problem


def test_pinned_blocks_of_a_group_that_was_left_come_back_at_last(make: Make) -> None:
    engines = make()
    engines.bind(30)
    engines.submit(engines.group, "r", PROMPTS[3])
    engines.step(engines.group, 9)
    (pinned,) = engines.group.pin(CARRY, ["r"])
    engines.carry(engines.group, engines.own[1], ["r"])
    engines.release()
    assert set(pinned.blocks[0][0]) <= engines.own[0].lent
    assert engines.audit() == []
    engines.group.unpin(CARRY)
    engines.shrink()
    assert engines.own[0].load.free_blocks == BLOCKS
    assert engines.audit() == []


# --- reservations ---


def test_what_the_prefix_cache_has_is_held_and_not_copied(make: Make) -> None:
    engines = make()
    own = engines.own
    engines.submit(own[1], "before", PROMPTS[3][:30])
    engines.finish(own[1])
    engines.submit(own[0], "r", PROMPTS[3])
    engines.submit(own[0], "all", PROMPTS[3][:30])
    engines.step(own[0], 12)
    found = reserve(engines, own[0], own[1], ["r", "all"])
    assert [(one.request_id, one.begin) for one in found] == [("r", 28)]
    copy(own[0], own[1], found, own[1])
    assert engines.runners[alone(1)].read_ahead == found[0].end - 28
    lent = own[1].lend(BLOCKS)
    settle(own[0], own[1])
    assert own[1].load.free_blocks == 0
    own[1].take_back(lent)
    engines.carry(own[0], own[1], ["r", "all"], expected=True)
    engines.finish(own[1])
    for request_id, prompt in {"r": PROMPTS[3], "all": PROMPTS[3][:30]}.items():
        assert engines.tokens[request_id] == undisturbed(make, prompt)
    assert engines.audit() == []


def test_a_prefix_that_requests_share_is_copied_once(make: Make) -> None:
    engines = make()
    own, group = engines.own, engines.group
    prompts = [PROMPTS[2] + tail for tail in random_prompts((9, 6, 12), seed=2)]
    requests = [engines.submit(own[0], f"r{n}", prompt) for n, prompt in enumerate(prompts)]
    engines.step(own[0], 14)
    lend_group(engines, 40)
    free = group.load.free_blocks
    found = reserve(engines, own[0], group, requests)
    assert [one.begin for one in found] == [0, len(PROMPTS[2]), len(PROMPTS[2])]
    assert free - group.load.free_blocks == sum(one.end - one.begin for one in found) // 8
    copy(own[0], group, found, *own)
    # What the others need of the first one's blocks stays.
    own[0].abort([found[0].request_id])
    group.abort([found[0].request_id])
    settle(own[0], group)
    engines.bind(10)
    left = [one.request_id for one in found[1:]]
    engines.carry(own[0], group, left, expected=True)
    assert read_from(engines, GROUP) == {one.request_id: one.end for one in found[1:]}
    engines.finish(group)
    for request_id in left:
        assert engines.tokens[request_id] == undisturbed(make, prompts[int(request_id[1:])])
    engines.release()
    assert engines.audit() == []


def test_the_largest_requests_find_room_first(make: Make) -> None:
    engines = make()
    own, requests = engines.own, submit_all(engines)
    engines.step(own[0], 9)
    lengths = [len(engines.tokens[r]) + len(p) for r, p in zip(requests, PROMPTS, strict=True)]
    # Room to adopt r3 and r1, but not r2 beside r3.
    kept = own[1].lend(BLOCKS - lengths[3] // TOKENS - 1 - lengths[1] // TOKENS - 1)
    found = reserve(engines, own[0], own[1], requests)
    assert [one.request_id for one in found] == ["r3", "r1"]
    tails = [lengths[n] // TOKENS + 1 - ends(found)[f"r{n}"] // TOKENS for n in (3, 1)]
    assert own[1].load.free_blocks == sum(tails) > 0
    copy(own[0], own[1], found, own[1])
    settle(own[0], own[1])
    engines.carry(own[0], own[1], ["r1", "r3"], expected=True)
    own[1].abort(requests)
    own[0].abort(requests)
    own[1].take_back(kept)
    assert engines.audit() == []


def test_a_group_is_lent_more_for_tails(make: Make) -> None:
    engines = make()
    requests = submit_all(engines)
    engines.step(engines.own[0], 9)
    pinned = engines.own[0].pin(CARRY, requests)
    whole = sum(request.computed // 8 for request in pinned)
    lend_group(engines, whole)
    assert len(reserve(engines, engines.own[0], engines.group, requests)) == 4
    assert engines.group.load.free_blocks == 0
    settle(engines.own[0], engines.group, copied=False)
    engines.group.abort(requests)
    engines.own[0].abort(requests)
    engines.shrink()
    assert engines.audit() == []
    assert engines.own[0].load.free_blocks == BLOCKS


def test_running_requests_keep_a_block_each(make: Make) -> None:
    engines = make()
    own = engines.own
    engines.submit(own[0], "r", PROMPTS[3])
    engines.submit(own[1], "runs", PROMPTS[2], max_tokens=60)
    for core in own:
        engines.step(core, 6)
    needed = (len(PROMPTS[3]) + len(engines.tokens["r"])) // TOKENS + 1
    own[1].lend(own[1].load.free_blocks - needed)
    assert reserve(engines, own[0], own[1], ["r"]) == []
    own[1].take_back([min(own[1].lent)])
    assert len(reserve(engines, own[0], own[1], ["r"])) == 1


def test_what_was_not_copied_is_free_and_found_by_nobody(make: Make) -> None:
    engines = make()
    own, requests = engines.own, submit_all(engines)
    engines.step(own[0], 9)
    reserve(engines, own[0], own[1], requests)
    assert own[1].load.free_blocks < BLOCKS
    settle(own[0], own[1], copied=False)
    assert own[1].load.free_blocks == BLOCKS
    assert cached(engines, own[1], PROMPTS[3]) == 0
    engines.carry(own[0], own[1], requests, expected=True)
    engines.finish(own[1])
    assert [engines.tokens[r] for r in requests] == [undisturbed(make, p) for p in PROMPTS]
    assert engines.audit() == []


def test_blocks_of_an_aborted_request_stay_while_somebody_writes_to_them(make: Make) -> None:
    engines = make()
    own = engines.own
    engines.submit(own[0], "r", PROMPTS[3])
    engines.step(own[0], 9)
    found = reserve(engines, own[0], own[1], ["r"])
    own[1].abort(["r"])
    assert engines.audit() == []
    (blocks,) = found[0].target[1]
    assert set(own[1].lend(BLOCKS)).isdisjoint(blocks)
    own[1].take_back(sorted(own[1].lent))
    copy(own[0], own[1], found, own[1])
    settle(own[0], own[1])
    assert own[1].load.free_blocks == BLOCKS
    assert cached(engines, own[1], PROMPTS[3]) == 48
    assert engines.audit() == []


def test_a_settled_request_that_does_not_come_leaves_its_blocks_in_the_cache(make: Make) -> None:
    engines = make()
    own = engines.own
    engines.submit(own[0], "r", PROMPTS[3])
    engines.step(own[0], 9)
    copy(own[0], own[1], reserve(engines, own[0], own[1], ["r"]), own[1])
    settle(own[0], own[1])
    assert own[1].load.free_blocks < BLOCKS
    own[1].abort(["r"])
    assert own[1].load.free_blocks == BLOCKS
    assert cached(engines, own[1], PROMPTS[3]) == 48


@pytest.mark.parametrize("copied", [True, False])
def test_a_request_may_come_before_its_blocks_are_settled(make: Make, copied: bool) -> None:
    """A reader was late, and the switch went on."""
    engines = make()
    own = engines.own
    engines.submit(own[0], "r", PROMPTS[3])
    engines.step(own[0], 9)
    found = reserve(engines, own[0], own[1], ["r"])
    (reserved,) = found[0].target[1]
    engines.carry(own[0], own[1], ["r"], expected=True)
    assert read_from(engines, alone(1)) == {"r": 0}
    engines.step(own[1], 2)
    assert set(own[1].lend(BLOCKS)).isdisjoint(reserved)
    own[1].take_back(sorted(own[1].lent))
    copy(own[0], own[1], found, own[1])
    settle(own[0], own[1], copied=copied)
    engines.finish(own[1])
    assert engines.tokens["r"] == undisturbed(make, PROMPTS[3])
    assert own[1].load.free_blocks == BLOCKS
    assert engines.audit() == []


def test_unknown_carries_are_ignored(make: Make) -> None:
    engines = make()
    for core in engines.cores.values():
        settle(core, core)
        settle(core, core, copied=False)
    assert engines.audit() == []


def test_a_carry_reserves_once_for_each_request(make: Make) -> None:
    engines = make()
    own = engines.own
    engines.submit(own[0], "r", PROMPTS[3])
    engines.step(own[0], 9)
    pinned = own[0].pin(CARRY, ["r"])
    own[1].expect("r", engines.frames["r"])
    assert own[1].reserve(CARRY, alone(0), pinned)
    assert own[1].reserve(CARRY, alone(0), pinned) == []
    own[1].settle(CARRY, copied=True)
    assert own[1].reserve(CARRY, alone(0), pinned) == [], "nobody would settle it"
    own[1].abort(["r"])
    assert own[1].load.free_blocks == BLOCKS


# --- who is left out ---


def test_requests_that_do_not_look_prefixes_up_are_left_out(make: Make) -> None:
    engines = make()
    own = engines.own
    engines.submit(own[0], "r", PROMPTS[2], prompt_logprobs=1)
    engines.submit(own[0], "plain", PROMPTS[2])
    engines.step(own[0], 9)
    pinned = own[0].pin(CARRY, ["r", "plain"])
    assert [request.request_id for request in pinned] == ["plain"]
    for request_id in ("r", "plain"):
        own[1].expect(request_id, engines.frames[request_id])
    also = msgspec.structs.replace(pinned[0], request_id="r")
    unknown = msgspec.structs.replace(pinned[0], request_id="unknown")
    found = own[1].reserve(CARRY, alone(0), [also, unknown, *pinned])
    assert [one.request_id for one in found] == ["plain"]


@pytest.mark.parametrize("caching", [True, False])
def test_nothing_goes_ahead_where_no_prefixes_are_cached(make: Make, caching: bool) -> None:
    engines = make(caching=caching)
    own = engines.own
    engines.submit(own[0], "r", PROMPTS[2])
    engines.step(own[0], 6)
    pinned = own[0].pin(CARRY, ["r"])
    assert bool(pinned) == caching
    blocks: dict[int, list[list[int]]] = {0: [list(range(1, 9))]}
    told = pinned or [CarriedRequest("r", [], 32, blocks, 33)]
    own[1].expect("r", engines.frames["r"])
    assert bool(own[1].reserve(CARRY, alone(0), told)) == caching


def test_nothing_is_reserved_where_members_cannot_read_other_engines_kv(make: Make) -> None:
    engines = make()
    engines.submit(engines.own[0], "r", PROMPTS[2])
    engines.step(engines.own[0], 6)
    engines.own[1].share_kv(False)
    assert reserve(engines, engines.own[0], engines.own[1], ["r"]) == []
    assert engines.own[1].load.free_blocks == BLOCKS


def test_less_than_a_block_is_left_out(make: Make) -> None:
    engines = make()
    own = engines.own
    engines.submit(own[0], "r", PROMPTS[0][:2])
    engines.step(own[0])
    assert own[0].pin(CARRY, ["r"]) == []
    engines.step(own[0], 2)
    (pinned,) = own[0].pin(CARRY, ["r"])
    assert pinned.computed == TOKENS
    lend_group(engines, 10)
    engines.group.expect("r", engines.frames["r"])
    assert engines.group.reserve(CARRY, alone(0), [pinned]) == []
    settle(own[0], engines.group)
    assert engines.group.load.free_blocks == 10


# --- what blocks are known by ---


def test_a_salt_goes_along(make: Make) -> None:
    engines = make()
    own = engines.own
    engines.submit(own[0], "r", PROMPTS[3], salt="ours")
    engines.step(own[0], 9)
    found = reserve(engines, own[0], own[1], ["r"])
    copy(own[0], own[1], found, own[1])
    settle(own[0], own[1])
    assert cached(engines, own[1], PROMPTS[3]) == 0
    assert cached(engines, own[1], PROMPTS[3], salt="theirs") == 0
    assert cached(engines, own[1], PROMPTS[3], salt="ours") == 48
    engines.carry(own[0], own[1], ["r"], expected=True)
    assert read_from(engines, alone(1)) == ends(found)


# --- windows ---


WINDOWS = [(9,), (16,), (None, 10, 6), (10, 6)]
"""Of each KV group, in tokens; None: it keeps all."""


def forget_free(core: VllmCore) -> None:
    """Let a core forget what is cached in blocks that nobody holds."""
    manager = core._scheduler.kv_cache_manager
    free = manager.block_pool.free_block_queue.get_all_free_blocks()
    manager.block_pool.evict_blocks({block.block_id for block in free})


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("evicted", [False, True], ids=["cached", "evicted"])
def test_windows_are_copied_whole_or_not_at_all(
    configs: LayoutConfigs, windows: tuple[int | None, ...], evicted: bool
) -> None:
    """A source lets go of blocks that the destination needs, and may not have them any more."""
    copied, make = 0, partial(ToyEngines, configs, windows=windows)
    expected = undisturbed(make, PROMPTS[3])
    for steps in range(6, 6 + 2 * TOKENS):
        engines = make()
        own, group = engines.own, engines.group
        engines.submit(own[0], "r", PROMPTS[3])
        engines.step(own[0], steps)
        if evicted:
            forget_free(own[0])
        found = ahead_to_group(engines, ["r"])
        engines.bind(60)
        (carried,), _ = engines.carry(own[0], group, ["r"], expected=True)
        needed = [max(0, carried.computed - (window or 99) + 1) for window in windows]
        begin = read_from(engines, GROUP)["r"]
        if found:
            firsts = [max(0, found[0].end - (window or 99) + 1) // 8 * 8 for window in windows]
            assert found[0].begin == min(firsts)
            assert begin == max(found[0].end, min(needed))
            copied += 1
        else:
            assert begin == min(needed)
        engines.finish(group)
        assert engines.tokens["r"] == expected
        engines.release()
        assert engines.audit() == []
    assert (copied < 2 * TOKENS) == evicted


@pytest.mark.parametrize("kind", ["v1", "v1-sync", "v2"])
def test_several_kv_groups_go_ahead_in_either_direction(configs: LayoutConfigs, kind: str) -> None:
    windows = (None, 10, 6)
    make = partial(
        ToyEngines, configs, windows=windows, asynchronous=kind != "v1-sync", v2=kind == "v2"
    )
    shared = PROMPTS[3][:24] + PROMPTS[1]
    prompts = [PROMPTS[2], PROMPTS[3], shared]
    expected = [undisturbed(make, prompt) for prompt in prompts]
    engines = make()
    own, group = engines.own, engines.group
    requests = [engines.submit(own[0], f"r{n}", prompt) for n, prompt in enumerate(prompts)]
    engines.step(own[0], 9)
    lend_group(engines, 60)
    found = reserve(engines, own[0], group, requests)
    assert len(found) == 3
    ids = [block for one in found for table in one.target[0] for block in table if block]
    assert len(ids) - len(set(ids)) == 3, "the group's three blocks of the shared prefix"
    copy(own[0], group, found, *own)
    settle(own[0], group)
    engines.bind(20)
    engines.carry(own[0], group, requests, expected=True)
    assert read_from(engines, GROUP) == ends(found)
    engines.step(group, 3)
    found = reserve(engines, group, own[1], requests)
    assert len(found) == 3
    copy(group, own[1], found, group)
    settle(group, own[1])
    engines.step(group, 2)
    engines.carry(group, own[1], requests, expected=True)
    assert read_from(engines, alone(1)) == ends(found)
    assert_ends_well(engines, own[1], requests, expected)


def test_a_block_of_the_wrong_kv_group_that_went_ahead_changes_the_tokens(
    configs: LayoutConfigs,
) -> None:
    make = partial(ToyEngines, configs, windows=(None, 10))
    engines = make()
    own, group = engines.own, engines.group
    engines.submit(own[0], "r", PROMPTS[3])
    engines.step(own[0], 9)
    lend_group(engines, 40)
    (found,) = reserve(engines, own[0], group, ["r"])
    (whole, window) = found.source[0]
    whole[-1], window[-1] = window[-1], whole[-1]
    assert tokens_after(engines, [found]) != undisturbed(make, PROMPTS[3])


# --- answers ---


def test_a_copy_is_reported_when_every_member_has_ended_it(make: Make) -> None:
    engines = make()
    own = engines.own
    engines.bind(20)
    engines.submit(engines.group, "r", PROMPTS[3])
    engines.step(engines.group, 9)
    found = reserve(engines, engines.group, own[1], ["r"])
    runners = engines.runners[GROUP]
    runners.copy_later = True
    for carry in (1, 2):
        engines.group.copy_ahead(carry, GROUP, alone(1), found)
    assert runners.sent[-1].target == alone(1)
    assert (engines.group.copied_ahead(), engines.group.copies) == ([], 0)
    engines.step(engines.group, 2)
    assert engines.outputs["r"], "steps do not wait for it"
    first, second = runners.late
    runners.late = [first]
    runners.finish_copies()
    # Only engine 1 belongs to the target.
    assert engines.group.copied_ahead() == [(1, Copied(["r"], bytes=8, seconds=0.25))]
    runners.late = [second]
    runners.finish_copies("engine 0 has ended")
    assert engines.group.copied_ahead() == [(2, Copied(["r"], 8, 0.25, "engine 0 has ended"))]
    assert engines.group.copied_ahead() == []


def test_a_member_that_cannot_answer_is_a_problem_of_the_copy(make: Make) -> None:
    engines = make()
    own = engines.own
    engines.submit(own[0], "r", PROMPTS[3])
    engines.step(own[0], 9)
    found = reserve(engines, own[0], own[1], ["r"])
    engines.runners[alone(1)].copy_later = True
    own[1].copy_ahead(CARRY, alone(0), alone(1), found)
    ((future, _),) = engines.runners[alone(1)].late
    future.set_exception(RunnerDied("runner of engine 1: gone"))
    assert own[1].copied_ahead() == [(CARRY, Copied(["r"], 0, 0.0, "runner of engine 1: gone"))]


# --- what is cached of requests that have ended ---


OLD = Prefixes({"old": "r"}, 100)
"""What is cached of the request ``r``, which has ended."""


def prefix_ahead(
    engines: ToyEngines, source: VllmCore, target: VllmCore, request_id: str
) -> list[AheadRequest]:
    """Pin what is cached of a request that has ended, and reserve room for it in another core."""
    pinned = source.pin(CARRY, [], Prefixes({"old": request_id, "nobody's": "unknown"}, 100))
    target.expect_prefix("old", engines.frames[request_id])
    return target.reserve(CARRY, source.unit, pinned)


def ended(make: Make) -> ToyEngines:
    """Return engines of which the first has run a request to its end."""
    engines = make()
    engines.submit(engines.own[0], "r", PROMPTS[3])
    engines.finish(engines.own[0])
    return engines


@pytest.mark.parametrize("is_copied", [True, False])
def test_what_is_cached_of_an_ended_request_goes_along(make: Make, is_copied: bool) -> None:
    engines = ended(make)
    own, group = engines.own, engines.group
    said = PROMPTS[3] + engines.tokens["r"] + PROMPTS[0]
    lend_group(engines, 20)
    found = prefix_ahead(engines, own[0], group, "r")
    copy(own[0], group, found if is_copied else [], *own)
    held = group.load.free_blocks
    settle(own[0], group)
    assert group.load.free_blocks == held + sum(len(one.target[0][0]) for one in found)
    group.abort(["old"])
    engines.bind(20)
    engines.submit(group, "next turn", said)
    engines.finish(group)
    assert engines.outputs["next turn"][0].prefill_stats.num_cached_tokens == found[0].end
    is_right = engines.tokens["next turn"] == undisturbed(make, said)
    assert is_right == is_copied, "what was copied decides the tokens"
    engines.release()
    assert engines.audit() == []


def test_ended_requests_take_no_more_blocks_than_there_is_room_for(make: Make) -> None:
    """Their answers count, too, and blocks that somebody holds anyway do not."""
    engines = make()
    own, prompts = engines.own[0], random_prompts((16, 16, 16), seed=9)
    for name, prompt in zip("abc", prompts, strict=True):
        engines.submit(own, name, prompt, max_tokens=16)
    engines.finish(own)
    each = (16 + 16) // TOKENS - 1  # the last token has no KV
    found = own.pin(CARRY, [], Prefixes({"old a": "a"}, 2 * each))
    found += own.pin(CARRY, [], Prefixes({"old b": "b", "old c": "c"}, 2 * each))
    assert [request.request_id for request in found] == ["old a", "old b"]
    again = own.pin(CARRY + 1, [], Prefixes({"old a": "a", "old c": "c"}, 0))
    assert [request.request_id for request in again] == ["old a"]
    for carry in (CARRY, CARRY + 1):
        assert own.unpin(carry)
    assert len(own.pin(CARRY, [], Prefixes({"old c": "c"}, each))) == 1
    assert own.unpin(CARRY)
    assert engines.audit() == []


def test_what_is_cached_of_an_ended_request_goes_along_once_more(make: Make) -> None:
    """The unit that it was copied to has never run it."""
    engines = ended(make)
    own, group = engines.own, engines.group
    lend_group(engines, 20)
    copy(own[0], group, prefix_ahead(engines, own[0], group, "r"), *own)
    settle(own[0], group)
    group.abort(["old"])
    own[1].evict_prefix_cache()
    engines.bind(20)
    copy(group, own[1], prefix_ahead(engines, group, own[1], "r"), group)
    settle(group, own[1])
    engines.release()
    said = PROMPTS[3] + engines.tokens["r"] + PROMPTS[0]
    engines.submit(own[1], "next turn", said)
    engines.finish(own[1])
    assert engines.outputs["next turn"][0].prefill_stats.num_cached_tokens > len(PROMPTS[3])
    assert engines.tokens["next turn"] == undisturbed(make, said)


def test_a_unit_keeps_the_answer_of_a_request_whose_cache_comes_back(make: Make) -> None:
    """What comes may be less than what it has."""
    engines = ended(make)
    own = engines.own[0]
    (before,) = own.pin(CARRY, [], OLD)
    assert own.unpin(CARRY)
    own.expect_prefix("back", engines.frames["r"])
    own.abort(["back"])
    assert own.pin(CARRY, [], OLD) == [before]
    assert len(before.tokens) == len(engines.tokens["r"])
    assert own.unpin(CARRY)


def test_what_could_not_be_copied_is_not_cached(make: Make) -> None:
    engines = ended(make)
    lend_group(engines, 20)
    assert prefix_ahead(engines, engines.own[0], engines.group, "r")
    settle(engines.own[0], engines.group, copied=False)
    engines.group.abort(["old"])
    engines.bind(20)
    assert cached(engines, engines.group, PROMPTS[3]) == 0


def test_what_a_step_in_flight_writes_is_not_pinned(make: Make) -> None:
    """It is in the prefix cache as soon as the step is scheduled."""
    engines = ended(make)
    own = engines.own[0]
    own.evict_prefix_cache()
    assert own.pin(CARRY, [], OLD) == []
    engines.submit(own, "again", PROMPTS[3])
    assert own.dispatch()
    assert own.pin(CARRY, [], OLD) == []
    own.abort(["again"])
    assert own.pin(CARRY, [], OLD) == [], "the step goes on, for nobody"
    while own.in_flight:
        own.collect()
    engines.submit(own, "once more", PROMPTS[3])
    engines.finish(own)
    (pinned,) = own.pin(CARRY, [], OLD)
    assert (pinned.request_id, pinned.is_prefix) == ("old", True)
    assert pinned.computed == pinned.length >= len(PROMPTS[3]) // 4 * 4
    own.unpin(CARRY)
