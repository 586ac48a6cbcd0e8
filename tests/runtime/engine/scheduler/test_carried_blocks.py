"""Blocks that requests get before they come, on vLLM's schedulers and a model of a few lines."""

import pytest
from msgspec import structs

from tests.runtime.engine.prompts import random_prompts
from tests.runtime.engine.scheduler.toy_engines import Make, ToyEngines, undisturbed

(PROMPT,) = random_prompts((32,), seed=7)
LEASE = 40


def running(make: Make, steps: int = 6) -> ToyEngines:
    """Return engines of which the first has computed a request, and the group expects it."""
    engines = make()
    engines.submit(engines.own[0], "r", PROMPT)
    engines.step(engines.own[0], steps)
    engines.bind(LEASE)
    engines.group.expect("r", engines.frames["r"])
    return engines


def free(engines: ToyEngines) -> int:
    return engines.group.load.free_blocks


def cached(engines: ToyEngines, request: str) -> int:
    """Return how many tokens of a request were found in the prefix cache."""
    stats = engines.outputs[request][0].prefill_stats
    assert stats is not None
    return int(stats.num_cached_tokens)


def test_only_the_rest_is_exported(make: Make) -> None:
    engines = running(make)
    announced = engines.foretell(engines.own[0], engines.group, ["r"])
    before = free(engines)
    assert before < LEASE
    (rest,) = engines.own[0].export(["r"])
    assert rest.is_rest
    assert rest.blocks == {}
    whole = rest.after(announced["r"])
    assert whole.tokens == engines.tokens["r"]
    assert whole.length == len(PROMPT) + len(whole.tokens) == whole.computed + 1
    engines.group.adopt(engines.own[0].unit, whole, with_kv=True)
    assert free(engines) == before, "adopted into the blocks that it had"


def test_without_steps_in_flight_nothing_is_foretold_wrong(make: Make) -> None:
    engines = running(make)
    (announced,) = engines.own[0].announce(["r", "unknown"])
    (rest,) = engines.own[0].export(["r"])
    assert (rest.tokens, rest.is_rest) == ([], True)
    assert rest.after(announced).tokens == engines.tokens["r"]


def test_a_request_that_ends_with_its_last_step_is_not_exported(make: Make) -> None:
    engines = running(make)
    request = engines.own[0]._scheduler.requests["r"]
    request.max_tokens = len(engines.tokens["r"]) + 1
    assert engines.foretell(engines.own[0], engines.group, ["r"]).keys() == {"r"}
    assert engines.own[0].export(["r"]) == []
    engines.group.abort(["r"])
    assert free(engines) == LEASE
    assert engines.audit() == []


def test_what_was_foretold_wrong_is_exported_whole(make: Make) -> None:
    engines = running(make)
    announced = engines.foretell(engines.own[0], engines.group, ["r"])
    carried = engines.own[0]._carried
    carried._announced["r"] = structs.replace(announced["r"], computed=8)
    (whole,) = engines.own[0].export(["r"])
    assert not whole.is_rest
    assert whole.blocks
    assert engines.group.adopt(engines.own[0].unit, whole, with_kv=True)
    engines.finish(engines.group)
    assert engines.tokens["r"] == undisturbed(make, PROMPT)


def test_blocks_for_other_tokens_than_come_are_given_back(make: Make) -> None:
    engines = running(make)
    (announced,) = engines.own[0].announce(["r"])
    assert engines.group.allot(announced)
    engines.step(engines.own[0], 8)  # it goes on after all
    engines.carry(engines.own[0], engines.group, ["r"], expected=True)
    engines.finish(engines.group)
    assert engines.tokens["r"] == undisturbed(make, PROMPT)
    engines.release()
    assert engines.audit() == []


@pytest.mark.parametrize("with_kv", [True, False])
def test_nobody_finds_a_prefix_before_it_is_read(make: Make, with_kv: bool) -> None:
    engines = running(make)
    announced = engines.foretell(engines.own[0], engines.group, ["r"])
    engines.submit(engines.group, "alike", PROMPT)
    engines.step(engines.group, 4)
    assert cached(engines, "alike") == 0
    (rest,) = engines.own[0].export(["r"])
    whole = rest.after(announced["r"])
    assert engines.group.adopt(engines.own[0].unit, whole, with_kv=with_kv)
    engines.finish(engines.group)
    assert engines.tokens["alike"] == engines.tokens["r"] == undisturbed(make, PROMPT)


def test_a_prefix_is_found_once_the_request_has_come(make: Make) -> None:
    engines = running(make)
    engines.carry(engines.own[0], engines.group, ["r"], expected=True, foretold=True)
    engines.submit(engines.group, "alike", PROMPT)
    engines.step(engines.group, 4)
    assert cached(engines, "alike") > 0


def test_a_wrong_block_that_was_announced_changes_the_tokens(make: Make) -> None:
    """The control."""
    engines = running(make)
    announced = engines.foretell(engines.own[0], engines.group, ["r"])
    blocks = announced["r"].blocks[0][0]
    blocks[3], blocks[4] = blocks[4], blocks[3]
    (rest,) = engines.own[0].export(["r"])
    engines.group.adopt(engines.own[0].unit, rest.after(announced["r"]), with_kv=True)
    engines.finish(engines.group)
    assert engines.tokens["r"] != undisturbed(make, PROMPT)


def test_where_there_is_no_room_nothing_is_allotted(make: Make) -> None:
    engines = running(make)
    engines._return(engines.group.shrink(LEASE - 2))
    (announced,) = engines.own[0].announce(["r"])
    assert not engines.group.allot(announced)
    assert free(engines) == 2
    engines.group.abort(["r"])
    engines.release()
    assert engines.audit() == []


def test_nobody_else_gets_allotted_blocks_whose_copy_fails(make: Make) -> None:
    engines = running(make)
    announced = engines.own[0].announce(["r"])
    assert engines.group.allot(announced[0])
    blocks = engines.group._carried.blocks
    (first, *_) = blocks._allotted["r"].groups[0]
    assert not blocks.are_allotted({first}), "it is new: what fills it comes later"
    engines.group.abort(["r"])
    engines.carry(engines.own[0], engines.group, ["r"], foretold=True)
    engines.submit(engines.own[0], "alike", PROMPT)
    engines.step(engines.own[0], 6)
    engines.group.expect("alike", engines.frames["alike"])
    (announced,) = engines.own[0].announce(["alike"])
    assert engines.group.allot(announced)
    (found, *_) = blocks._allotted["alike"].groups[0]
    assert blocks.are_allotted({found})
    engines.group.abort(["alike"])
    assert not blocks.are_allotted({found})


def test_requests_that_begin_alike_share_blocks_as_without_foretelling(make: Make) -> None:
    def left(*, foretold: bool) -> int:
        engines = make()
        for name in ("r", "s"):
            engines.submit(engines.own[0], name, PROMPT)
        engines.step(engines.own[0], 6)
        engines.bind(LEASE)
        engines.carry(engines.own[0], engines.group, ["r", "s"], foretold=foretold)
        remaining = free(engines)
        engines.finish(engines.group)
        assert engines.tokens["r"] == engines.tokens["s"] == undisturbed(make, PROMPT)
        return remaining

    assert left(foretold=True) == left(foretold=False)


def test_a_step_zeroes_no_blocks_that_were_given_back(make: Make) -> None:
    engines = running(make)
    (announced,) = engines.own[0].announce(["r"])
    assert engines.group.allot(announced)
    blocks = engines.group._carried.blocks
    (manager, *_) = blocks.managers
    manager.new_block_ids = [*blocks._allotted["r"].groups[0], 39]
    engines.group.abort(["r"])
    assert manager.new_block_ids == [39]
