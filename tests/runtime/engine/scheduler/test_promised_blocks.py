"""Blocks that requests get while their first ones are copied ahead of a carry."""

from collections.abc import Sequence

import pytest

from shoal.policies.values.layouts import Unit, alone
from shoal.runtime.engine.link import instructions
from shoal.runtime.engine.scheduler.carried_blocks import CarriedBlocks
from shoal.runtime.engine.scheduler.vllm_core import VllmCore
from shoal.runtime.protocol.messages import AHEAD_TOKENS, AheadRequest
from tests.runtime.engine.scheduler.test_blocks_ahead import (
    CARRY,
    PROMPTS,
    assert_ends_well,
    copy,
    lend_group,
    read_from,
    reserve,
    settle,
    submit_all,
)
from tests.runtime.engine.scheduler.toy_engines import BLOCKS, GROUP, Make, ToyEngines, undisturbed


def promise(
    engines: ToyEngines, source: VllmCore, target: VllmCore, requests: Sequence[str]
) -> list[AheadRequest]:
    """Reserve room for requests, and give them what else they will need."""
    found = reserve(engines, source, target, requests)
    for request_id in requests:
        target.promise(CARRY, request_id)
    return found


def begun(make: Make, steps: int = 9) -> tuple[ToyEngines, list[AheadRequest]]:
    """Return engines of which the first runs a request, whose blocks the second has promised."""
    engines = make()
    engines.submit(engines.own[0], "r", PROMPTS[3], max_tokens=60)
    engines.step(engines.own[0], steps)
    return engines, promise(engines, engines.own[0], engines.own[1], ["r"])


def assert_goes_on(engines: ToyEngines, make: Make) -> None:
    """See that the request ends as it would have, and that nothing is held afterwards."""
    engines.finish(engines.own[1])
    assert engines.tokens["r"] == undisturbed(make, PROMPTS[3], max_tokens=60)
    assert engines.own[1].load.free_blocks == BLOCKS
    assert engines.audit() == []


@pytest.mark.parametrize("foretold", [True, False])
def test_promised_requests_take_no_other_blocks(make: Make, foretold: bool) -> None:
    expected = [undisturbed(make, prompt, max_tokens=60) for prompt in PROMPTS]
    engines = make()
    own, group, requests = engines.own, engines.group, submit_all(engines, max_tokens=60)
    engines.step(own[0], 9)
    lend_group(engines, 40)
    found = promise(engines, own[0], group, requests)
    copy(own[0], group, found, *own)
    settle(own[0], group)
    engines.bind(20)
    engines.step(own[0], 3)
    before = group.load.free_blocks
    engines.carry(own[0], group, requests, expected=True, foretold=foretold)
    assert group.load.free_blocks == before
    assert read_from(engines, GROUP) == {each.request_id: each.end for each in found}
    engines.step(group, 3)
    copy(group, own[1], promise(engines, group, own[1], requests), group)
    settle(group, own[1])
    engines.step(group, 3)
    before = own[1].load.free_blocks
    engines.carry(group, own[1], requests, expected=True, foretold=foretold)
    assert own[1].load.free_blocks == before
    assert_ends_well(engines, own[1], requests, expected)


@pytest.mark.parametrize("foretold", [True, False])
def test_a_request_may_grow_beyond_what_was_promised(make: Make, foretold: bool) -> None:
    engines, found = begun(make, steps=5)
    own, promised = engines.own, len(engines.tokens["r"]) + AHEAD_TOKENS
    copy(own[0], own[1], found, own[1])
    settle(own[0], own[1])
    while len(engines.tokens["r"]) <= promised + 4:
        engines.step(own[0])
    engines.carry(own[0], own[1], ["r"], expected=True, foretold=foretold)
    assert read_from(engines, alone(1)) == {"r": found[0].end}
    assert_goes_on(engines, make)


def test_what_was_not_copied_is_no_longer_promised(make: Make) -> None:
    engines, _ = begun(make)
    own = engines.own
    settle(own[0], own[1], copied=False)
    assert own[1].load.free_blocks == BLOCKS
    engines.carry(own[0], own[1], ["r"], expected=True)
    assert read_from(engines, alone(1)) == {"r": 0}
    assert_goes_on(engines, make)


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("foretold", [True, False])
def test_a_request_that_comes_too_early_gets_other_blocks(
    make: Make, copied: bool, foretold: bool
) -> None:
    engines, found = begun(make)
    own = engines.own
    engines.carry(own[0], own[1], ["r"], expected=True, foretold=foretold)
    assert read_from(engines, alone(1)) == {"r": 0}
    copy(own[0], own[1], found, own[1])
    settle(own[0], own[1], copied=copied)
    assert_goes_on(engines, make)


def test_blocks_that_are_still_read_into_would_change_the_tokens(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A negative control of the test above."""
    engines, _ = begun(make)
    own = engines.own
    as_promised = CarriedBlocks._as_promised

    def trusting(blocks: CarriedBlocks, *args: object) -> object:
        blocks._doubtful.clear()
        return as_promised(blocks, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(CarriedBlocks, "_as_promised", trusting)
    engines.carry(own[0], own[1], ["r"], expected=True)
    engines.finish(own[1])
    assert engines.tokens["r"] != undisturbed(make, PROMPTS[3], max_tokens=60)


def test_a_request_that_does_not_come_gives_back_what_it_was_promised(make: Make) -> None:
    engines, found = begun(make)
    own = engines.own
    own[1].abort(["r"])
    copy(own[0], own[1], found, own[1])
    settle(own[0], own[1])
    assert own[1].load.free_blocks == BLOCKS
    assert engines.audit() == []


def test_nothing_is_promised_that_others_may_need(make: Make) -> None:
    engines = make()
    own = engines.own
    engines.submit(own[0], "r", PROMPTS[3], max_tokens=60)
    engines.step(own[0], 9)
    found = reserve(engines, own[0], own[1], ["r"])
    lent = own[1].lend(own[1].load.free_blocks - 2)
    free = own[1].load.free_blocks
    own[1].promise(CARRY, "r")
    assert own[1].load.free_blocks == free
    own[1].take_back(lent)
    own[1].promise(CARRY, "r")
    assert own[1].load.free_blocks < free + len(lent)
    copy(own[0], own[1], found, own[1])
    settle(own[0], own[1])
    engines.carry(own[0], own[1], ["r"], expected=True)
    assert_goes_on(engines, make)


def test_of_two_promised_requests_that_go_on_alike_one_waits_for_the_other(make: Make) -> None:
    """The second one finds the first one's blocks when it comes. What it had is free until then."""
    engines = make()
    own, requests = engines.own, ["r", "twin"]
    for request_id in requests:
        engines.submit(own[0], request_id, PROMPTS[3], max_tokens=60)
    engines.step(own[0], 9)
    found = promise(engines, own[0], own[1], requests)
    copy(own[0], own[1], found, own[1])
    settle(own[0], own[1])
    engines.step(own[0], 20)
    announced = engines.foretell(own[0], own[1], requests)
    exported = [each.whole(announced) for each in own[0].export(requests)]
    assert set(own[1]._carried.blocks._allotted) == {"r"}
    for request in exported:
        assert own[1].adopt(own[0].unit, request, with_kv=True) is not None
    own[1].copy()
    own[0].abort(requests)
    engines.finish(own[1])
    for request_id in requests:
        assert engines.tokens[request_id] == undisturbed(make, PROMPTS[3], max_tokens=60)
    assert own[1].load.free_blocks == BLOCKS
    assert engines.audit() == []


def test_promises_of_unknown_requests_are_ignored(make: Make) -> None:
    engines = make()
    engines.own[1].promise(CARRY, "r")
    assert engines.own[1].load.free_blocks == BLOCKS


def test_a_request_without_a_whole_block_is_promised_nothing(make: Make) -> None:
    engines = make()
    own = engines.own
    engines.submit(own[0], "r", PROMPTS[0])
    engines.step(own[0])
    lend_group(engines, 20)
    assert promise(engines, own[0], engines.group, ["r"]) == []
    assert engines.group.load.free_blocks == 20


def seated(engines: ToyEngines, unit: Unit) -> list[str]:
    """Return the requests that a unit's runners were told to give rows."""
    sent = engines.runners[unit].sent
    return [
        rest.request_id
        for each in sent
        if isinstance(each, instructions.Seat)
        for rest in each.requests
    ]


@pytest.mark.parametrize("copied", [True, False])
def test_a_group_is_told_of_promised_requests_before_it_is_bound(make: Make, copied: bool) -> None:
    engines = make()
    own, group = engines.own, engines.group
    if not group._scheduler.use_v2_model_runner:
        pytest.skip("V1 model runners give no rows before a step")
    engines.submit(own[0], "r", PROMPTS[3], max_tokens=60)
    engines.step(own[0], 9)
    lend_group(engines, 40)
    found = promise(engines, own[0], group, ["r"])
    copy(own[0], group, found, *own)
    assert seated(engines, GROUP) == []
    settle(own[0], group, copied=copied)
    assert seated(engines, GROUP) == (["r"] if copied else [])
    engines.bind(20)
    engines.carry(own[0], group, ["r"], expected=True)
    engines.finish(group)
    assert engines.tokens["r"] == undisturbed(make, PROMPTS[3], max_tokens=60)
