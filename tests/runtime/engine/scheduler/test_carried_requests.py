"""Requests that go from core to core, on vLLM's schedulers and a model of a few lines."""

from functools import partial

import pytest

from shoal.policies.values.layouts import alone
from shoal.runtime.config import LayoutConfigs
from shoal.runtime.engine.agent.interface import RunnerDied
from shoal.runtime.engine.agent.results import Adoption, Copied
from shoal.runtime.engine.link import instructions
from shoal.runtime.protocol.messages import CarriedRequest, Fallback
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


def submit_all(engines: ToyEngines, core: int = 0) -> list[str]:
    return [
        engines.submit(engines.own[core], f"r{number}", prompt)
        for number, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("foretold", [False, True])
def test_requests_go_on_as_if_undisturbed_from_layout_to_layout(make: Make, foretold: bool) -> None:
    expected = [undisturbed(make, prompt) for prompt in PROMPTS]
    engines = make()
    own, group = engines.own, engines.group
    requests = submit_all(engines)
    engines.step(own[0], 8)
    assert 0 < len(engines.tokens["r0"]) < 40
    engines.bind(40)
    engines.carry(own[0], group, requests, foretold=foretold)
    engines.step(group, 5)
    engines.carry(group, own[1], requests[:2], foretold=foretold)
    engines.carry(group, own[0], requests[2:], foretold=foretold)
    engines.release()
    for core in (*own, *own):
        engines.step(core, 3)
    assert engines.audit() == []
    engines.bind(30)
    engines.carry(own[1], group, requests[:2], foretold=foretold)
    engines.finish(own[0])
    engines.finish(group)
    assert [engines.tokens[request] for request in requests] == expected
    engines.release()
    assert engines.audit() == []
    assert all(core.num_requests == 0 for core in engines.cores.values())


@pytest.mark.parametrize("foretold", [False, True])
def test_no_token_is_computed_twice(make: Make, foretold: bool) -> None:
    engines = make()
    requests = submit_all(engines)
    engines.step(engines.own[0], 8)
    engines.bind(40)
    engines.carry(engines.own[0], engines.group, requests, foretold=foretold)
    engines.finish(engines.group)
    computed = sum(runners.computed for runners in engines.runners.values())
    # The last output of each is not computed.
    assert computed == sum(map(len, PROMPTS)) + sum(map(len, engines.tokens.values())) - 4


def test_a_wrong_block_changes_the_tokens(make: Make) -> None:
    """The model sees what is in the blocks: the tests above can fail."""
    engines = make()
    engines.submit(engines.own[0], "r", PROMPTS[2])
    engines.step(engines.own[0], 6)
    engines.bind(40)
    (carried,) = engines.own[0].export(["r"])
    blocks = carried.blocks[0][0]
    blocks[3], blocks[4] = blocks[4], blocks[3]
    engines.group.expect("r", engines.frames["r"])
    engines.group.adopt(alone(0), carried, with_kv=True)
    assert engines.group.copies == 0, "not begun"
    engines.group.copy()
    assert engines.group.copies == 1
    engines.finish(engines.group)
    assert engines.tokens["r"] != undisturbed(make, PROMPTS[2])


def test_a_request_whose_prompt_is_half_computed_goes_on(make: Make) -> None:
    engines = make()
    engines.submit(engines.own[0], "r", PROMPTS[3])
    engines.own[0].dispatch()
    while engines.own[0].in_flight:
        engines._collect(engines.own[0])
    (carried,), _ = _carry_to_group(engines, "r")
    assert 0 < carried.computed < len(PROMPTS[3])
    assert carried.tokens == []
    engines.finish(engines.group)
    assert engines.tokens["r"] == undisturbed(make, PROMPTS[3])
    first, *_ = engines.outputs["r"]
    assert [event.type.name for event in first.events or ()] == ["QUEUED", "SCHEDULED"]


def test_a_request_goes_on_at_once_to_the_next_core(make: Make) -> None:
    engines = make()
    engines.submit(engines.own[0], "r", PROMPTS[1])
    engines.step(engines.own[0], 6)
    _carry_to_group(engines, "r")
    engines.group.export(["r"])
    engines.step(engines.group)
    assert engines.runners[GROUP].computed == 0
    engines.carry(engines.group, engines.own[1], ["r"])
    engines.release()
    assert engines.audit() == []
    engines.finish(engines.own[1])
    assert engines.tokens["r"] == undisturbed(make, PROMPTS[1])


def _carry_to_group(
    engines: ToyEngines, *requests: str
) -> tuple[list[CarriedRequest], list[Copied]]:
    engines.bind(40)
    return engines.carry(engines.own[0], engines.group, requests)


def test_requests_that_wait_go_on_too(make: Make) -> None:
    engines = make()
    engines.submit(engines.own[0], "r", PROMPTS[1])
    ((carried,), copied) = _carry_to_group(engines, "r")
    assert (carried.computed, carried.tokens, carried.blocks, copied) == (0, [], {}, [])
    engines.finish(engines.group)
    assert engines.tokens["r"] == undisturbed(make, PROMPTS[1])


# --- recomputed ---


def test_a_request_that_comes_with_tokens_goes_on(make: Make) -> None:
    expected = undisturbed(make, PROMPTS[1])
    engines = make()
    frames = engines.frames_of("r", PROMPTS[1])
    engines.own[1].add(frames, expected[:7])
    engines.finish(engines.own[1])
    assert engines.tokens["r"] == expected[7:]


def test_an_output_bound_counts_the_tokens_that_it_came_with(make: Make) -> None:
    engines = make()
    frames = engines.frames_of("r", PROMPTS[1], max_tokens=9)
    engines.own[1].add(frames, [100] * 7)
    engines.finish(engines.own[1])
    assert len(engines.tokens["r"]) == 2


def test_an_adopted_request_can_be_recomputed(make: Make) -> None:
    engines = make()
    engines.submit(engines.own[0], "r", PROMPTS[1])
    engines.step(engines.own[0], 6)
    engines.bind(40)
    (carried,) = engines.own[0].export(["r"])
    engines.group.expect("r", engines.frames["r"])
    adoption = engines.group.adopt(alone(0), carried, with_kv=False)
    assert adoption == Adoption(Fallback.NO_ROOM)
    engines.group.copy()
    assert (engines.group.copied(), engines.runners[GROUP].read) == ([], 0)
    engines.own[0].abort(["r"])
    engines.finish(engines.group)
    assert engines.tokens["r"] == undisturbed(make, PROMPTS[1])


def test_prompt_logprobs_that_were_not_sent_are_recomputed(make: Make) -> None:
    engines = make()
    engines.submit(engines.own[0], "r", PROMPTS[3], prompt_logprobs=1)
    engines.own[0].dispatch()
    while engines.own[0].in_flight:
        engines._collect(engines.own[0])
    (carried,) = engines.own[0].export(["r"])
    assert carried.computed
    engines.own[1].expect("r", engines.frames["r"])
    adoption = engines.own[1].adopt(alone(0), carried, with_kv=True)
    assert adoption == Adoption(Fallback.UNREADABLE)
    engines.own[0].abort(["r"])
    engines.finish(engines.own[1])
    assert engines.tokens["r"] == undisturbed(make, PROMPTS[3])


def test_kv_that_members_cannot_read_is_recomputed(make: Make) -> None:
    engines = make()
    engines.submit(engines.own[0], "r", PROMPTS[1])
    engines.step(engines.own[0], 6)
    (carried,) = engines.own[0].export(["r"])
    engines.own[1].share_kv(False)
    engines.own[1].expect("r", engines.frames["r"])
    adoption = engines.own[1].adopt(alone(0), carried, with_kv=True)
    assert adoption == Adoption(Fallback.NOT_SHARED)
    engines.finish(engines.own[1])
    assert engines.tokens["r"] == undisturbed(make, PROMPTS[1])


# --- room ---


def test_without_room_nothing_changes(make: Make) -> None:
    engines = make()
    engines.submit(engines.own[0], "r", PROMPTS[2])
    engines.step(engines.own[0], 6)
    engines.bind(4)  # of 8 tokens each: the request has more than 32
    (carried,) = engines.own[0].export(["r"])
    engines.group.expect("r", engines.frames["r"])
    assert engines.group.adopt(alone(0), carried, with_kv=True) is None
    assert engines.group.num_requests == 0
    assert engines.group.load.free_blocks == 4
    engines.group.grow({engine: engines.own[engine].lend(20) for engine in (0, 1)})
    assert engines.group.adopt(alone(0), carried, with_kv=True) == Adoption()
    engines.group.copy()
    engines.own[0].abort(["r"])
    engines.finish(engines.group)
    assert engines.tokens["r"] == undisturbed(make, PROMPTS[2])


def test_requests_that_fill_all_blocks_do_not_wait_for_each_other(make: Make) -> None:
    engines = make()
    prompts = random_prompts((31, 31, 31, 31), seed=9)
    requests = [
        engines.submit(engines.own[0], f"r{number}", prompt, max_tokens=20)
        for number, prompt in enumerate(prompts)
    ]
    engines.step(engines.own[0], 9)
    assert all(engines.tokens.values())
    computed = [len(PROMPT) for PROMPT in prompts]
    engines.bind(
        sum(-(-(n + len(engines.tokens[r])) // 8) for n, r in zip(computed, requests, strict=True))
    )
    engines.carry(engines.own[0], engines.group, requests)
    assert engines.group.load.free_blocks == 0
    engines.finish(engines.group)
    assert [engines.tokens[r] for r in requests] == [
        undisturbed(make, prompt, max_tokens=20) for prompt in prompts
    ]


# --- prefix caches ---


def test_what_the_destination_has_cached_is_not_read(make: Make) -> None:
    engines = make()
    engines.submit(engines.own[1], "before", PROMPTS[3])
    engines.finish(engines.own[1])
    engines.submit(engines.own[0], "r", PROMPTS[3])
    engines.step(engines.own[0], 8)
    (carried,), _ = engines.carry(engines.own[0], engines.own[1], ["r"])
    read = engines.runners[alone(1)].read
    # The last request ended with as many outputs and more, and they are cached too.
    assert read == carried.computed % TOKENS
    sent = engines.runners[alone(1)].sent
    (copy,) = [each for each in sent if isinstance(each, instructions.Carry)]
    (named,) = copy.requests
    blocks = [*named.source[0], *named.target[1]]
    assert [len(group) for group in blocks] == [1, 1], "runners are not told of others"
    engines.finish(engines.own[1])
    assert engines.tokens["r"] == engines.tokens["before"]


def test_a_prefix_that_requests_share_is_read_once(make: Make) -> None:
    engines = make()
    tails = random_prompts((6, 9), seed=2)
    requests = [
        engines.submit(engines.own[0], f"r{n}", PROMPTS[2] + tail) for n, tail in enumerate(tails)
    ]
    engines.step(engines.own[0], 9)
    carried, _ = _carry_to_group(engines, *requests)
    total = sum(request.computed for request in carried)
    assert engines.runners[GROUP].read == total - len(PROMPTS[2])
    engines.finish(engines.group)
    assert [engines.tokens[r] for r in requests] == [
        undisturbed(make, PROMPTS[2] + tail) for tail in tails
    ]


def test_carried_blocks_are_found_in_the_prefix_cache(make: Make) -> None:
    engines = make()
    engines.submit(engines.own[0], "r", PROMPTS[3])
    engines.step(engines.own[0], 9)
    _carry_to_group(engines, "r")
    before = engines.runners[GROUP].computed
    engines.submit(engines.group, "again", PROMPTS[3], max_tokens=1)
    engines.step(engines.group, 3)
    found = engines.outputs["again"][0].prefill_stats
    assert found is not None
    assert found.num_cached_tokens == 48
    engines.group.abort(["r"])
    assert engines.runners[GROUP].computed < before + 20
    assert engines.tokens["again"] == undisturbed(make, PROMPTS[3])[:1]


def test_a_wrong_hash_of_a_carried_block_changes_the_tokens_of_others(make: Make) -> None:
    """The test above can fail: a prompt is found whose KV is another's."""
    engines, prompt = make(), PROMPTS[3]
    other = [prompt[0] + 1, *prompt[1:]]
    engines.submit(engines.own[0], "r", prompt)
    engines.step(engines.own[0], 9)
    engines.frames_of("r", other)
    _carry_to_group(engines, "r")
    engines.submit(engines.group, "again", other)
    engines.step(engines.group, 3)
    found = engines.outputs["again"][0].prefill_stats
    assert found is not None
    assert found.num_cached_tokens == 48
    engines.finish(engines.group)
    assert engines.tokens["again"] != undisturbed(make, other)


def test_damaged_blocks_are_found_by_nobody(make: Make) -> None:
    """The KV of a request that is aborted before it is read may be overwritten where it was."""
    engines = make()
    engines.submit(engines.own[0], "r", PROMPTS[3])
    engines.step(engines.own[0], 9)
    engines.runners[alone(1)].copy_later = True
    engines.carry(engines.own[0], engines.own[1], ["r"])
    assert engines.own[1].copies == 1
    engines.own[1].abort(["r"])
    engines.submit(engines.own[1], "again", PROMPTS[3], max_tokens=1)
    engines.own[1].dispatch()
    engines.runners[alone(1)].finish_copies()
    engines.step(engines.own[1], 6)
    found = engines.outputs["again"][0].prefill_stats
    assert found is not None
    assert found.num_cached_tokens == 0


def test_blocks_of_an_aborted_request_are_read_before_another_gets_them(make: Make) -> None:
    engines = make()
    requests = [engines.submit(engines.own[0], f"r{n}", PROMPTS[n]) for n in (2, 3)]
    engines.step(engines.own[0], 9)
    engines.bind(11)
    first, second = engines.own[0].export(requests)
    for request in (first, second):
        engines.group.expect(request.request_id, engines.frames[request.request_id])
    assert engines.group.adopt(alone(0), first, with_kv=True)
    assert engines.group.adopt(alone(0), second, with_kv=True) is None
    engines.group.abort([first.request_id])
    assert engines.group.adopt(alone(0), second, with_kv=True)
    engines.group.copy()
    engines.own[0].abort(requests)
    engines.group.grow({engine: engines.own[engine].lend(20) for engine in (0, 1)})
    engines.finish(engines.group)
    assert engines.tokens[second.request_id] == undisturbed(make, PROMPTS[3])


# --- exported requests ---


def test_exported_requests_are_neither_running_nor_waiting(make: Make) -> None:
    engines = make()
    requests = submit_all(engines)
    own = engines.own[0]
    engines.step(own, 2)
    free = own.load.free_blocks
    first = own.export(requests[:3])
    assert own.export(requests[:3]) == first, "described again"
    assert own.num_requests == 4
    assert (own.load.running, own.load.waiting) in {(0, 1), (1, 0)}
    assert own.load.free_blocks == free
    assert own.check_integrity() == []
    engines.step(own, 3)
    assert own.export(requests[:3]) == first, "not computed meanwhile"
    assert len(own.lend(BLOCKS, urgent=True)) < BLOCKS - sum(len(r.blocks[0][0]) for r in first[:1])
    assert own.export(["unknown"]) == []


def test_requests_that_are_kept_go_on(make: Make) -> None:
    engines = make()
    requests, own = submit_all(engines), engines.own[0]
    engines.step(own, 3)
    own.export(requests)
    engines.submit(own, "new", PROMPTS[0])
    engines.step(own, 2)
    own.keep([*requests, "unknown"])
    assert own.check_integrity() == []
    engines.finish(own)
    assert [engines.tokens[r] for r in requests] == [undisturbed(make, p) for p in PROMPTS]


def test_more_requests_may_be_kept_than_run_at_once(make: Make) -> None:
    engines, own_requests = make(), []
    own = engines.own[0]
    prompts = random_prompts((5,) * 12, seed=4)
    for number, prompt in enumerate(prompts):
        own_requests.append(engines.submit(own, f"r{number}", prompt, max_tokens=8))
    engines.step(own, 6)
    own.export(own_requests)
    later = [engines.submit(own, f"l{n}", PROMPTS[0], max_tokens=30) for n in range(12)]
    engines.step(own, 6)
    own.keep(own_requests)
    engines.finish(own)
    assert [engines.tokens[r] for r in own_requests] == [
        undisturbed(make, prompt, max_tokens=8) for prompt in prompts
    ]
    assert all(len(engines.tokens[r]) == 30 for r in later)


def test_exported_and_expected_requests_can_be_aborted(make: Make) -> None:
    engines = make()
    requests, own = submit_all(engines), engines.own[0]
    engines.step(own, 4)
    exported = own.export(requests)
    for request in exported:
        engines.own[1].expect(request.request_id, engines.frames[request.request_id])
    assert engines.own[1].num_requests == 0
    for core in engines.own:
        core.abort(requests)
    assert own.load.free_blocks == BLOCKS
    assert engines.audit() == []
    with pytest.raises(KeyError):
        engines.own[1].adopt(alone(0), exported[0], with_kv=True)


def test_withdrawn_requests_say_all_their_tokens(make: Make) -> None:
    engines = make()
    frames = engines.frames_of("r", PROMPTS[0])
    engines.own[0].add(frames, [100, 200])
    engines.step(engines.own[0], 3)
    engines.own[0].export(["r"])
    withdrawn = engines.own[0].withdraw(["r"])
    assert withdrawn == {"r": [100, 200, *engines.tokens["r"]]}
    assert engines.own[0].num_requests == 0


# --- what front ends and runners are told ---


def test_the_first_output_says_how_many_tokens_came_before(make: Make) -> None:
    engines = make()
    engines.submit(engines.own[0], "r", PROMPTS[1])
    engines.step(engines.own[0], 6)
    had = len(engines.tokens["r"])
    _carry_to_group(engines, "r")
    engines.step(engines.group, 2)
    told = [output.prefill_stats for output in engines.outputs["r"]]
    said = [stats.num_prompt_tokens for stats in told if stats is not None]
    assert said == [len(PROMPTS[1]), len(PROMPTS[1]) + had]
    assert told[had] is not None, "with the first"
    assert [stats.num_cache_creation_tokens for stats in told if stats is not None] == [20, 0]


def test_a_recomputed_requests_first_output_says_so_too(make: Make) -> None:
    engines = make()
    engines.own[0].add(engines.frames_of("r", PROMPTS[1]), [100] * 30)
    engines.step(engines.own[0], 6)
    stats = engines.outputs["r"][0].prefill_stats
    assert stats is not None
    assert stats.num_prompt_tokens == len(PROMPTS[1]) + 30


def test_what_was_found_in_the_first_units_cache_is_said(make: Make) -> None:
    engines = make()
    engines.submit(engines.own[0], "before", PROMPTS[2])
    engines.finish(engines.own[0])
    engines.submit(engines.own[0], "r", PROMPTS[2] + PROMPTS[3])
    engines.own[0].dispatch()
    while engines.own[0].in_flight:
        engines._collect(engines.own[0])
    (carried,), _ = _carry_to_group(engines, "r")
    assert (carried.tokens, carried.cached) == ([], 32)
    engines.step(engines.group, 6)
    stats = engines.outputs["r"][0].prefill_stats
    assert stats is not None
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (82, 32)


def test_a_carried_request_is_queued_once_and_not_preempted(make: Make) -> None:
    engines = make()
    engines.submit(engines.own[0], "r", PROMPTS[1])
    engines.step(engines.own[0], 6)
    _carry_to_group(engines, "r")
    engines.step(engines.group, 2)
    events = [event.type.name for output in engines.outputs["r"] for event in output.events or ()]
    assert events == ["QUEUED", "SCHEDULED", "SCHEDULED"]


def test_a_copy_is_reported_when_every_member_has_ended_it(make: Make) -> None:
    engines = make()
    requests = submit_all(engines)
    engines.step(engines.own[0], 8)
    engines.runners[GROUP].copy_later = True
    _, copied = _carry_to_group(engines, *requests)
    assert (copied, engines.group.copies) == ([], 1)
    # The runners do what they are told in order, so the step need not wait; its outputs do.
    assert engines.group.dispatch()
    assert engines.group.collect() is None
    engines.runners[GROUP].finish_copies()
    assert engines.group.copies == 1, "until somebody has heard of it"
    assert engines.group.collect() is None
    assert engines.group.copied() == [Copied(requests, bytes=16, seconds=0.25)]
    assert (engines.group.copied(), engines.group.copies) == ([], 0)
    assert engines.group.collect() is not None


def test_requests_whose_copy_failed_are_forgotten_before_they_have_an_output(make: Make) -> None:
    engines = make()
    requests = submit_all(engines)
    engines.step(engines.own[0], 8)
    engines.runners[GROUP].copy_later = True
    _carry_to_group(engines, *requests)
    before = {request_id: list(tokens) for request_id, tokens in engines.tokens.items()}
    assert engines.group.dispatch()
    engines.runners[GROUP].finish_copies("engine 0 has ended")
    (copied,) = engines.group.copied()
    assert (copied.request_ids, copied.problem) == (requests, "engine 0 has ended")
    assert engines.group.num_requests == 0
    engines.step(engines.group)
    assert engines.tokens == before


def test_a_failed_copy_whose_blocks_others_use_ends_the_engine(make: Make) -> None:
    engines = make()
    submit_all(engines)
    engines.step(engines.own[0], 8)
    engines.runners[GROUP].copy_later = True
    _carry_to_group(engines, "r3")
    engines.group.add(engines.frames_of("new", PROMPTS[3]))
    assert engines.group.dispatch(), "it finds the blocks of r3 in the prefix cache"
    engines.runners[GROUP].finish_copies("engine 0 has ended")
    with pytest.raises(RunnerDied, match="other requests use"):
        engines.group.copied()


def test_runners_hear_of_a_request_before_the_step_that_resumes_it(make: Make) -> None:
    engines = make()
    engines.own[0].add(engines.frames_of("r", PROMPTS[1]), [100, 200])
    engines.step(engines.own[0])
    carries = [
        each for each in engines.runners[alone(0)].sent if isinstance(each, instructions.Carry)
    ]
    told = [one for carry in carries for one in carry.requests]
    if engines.runners[alone(0)].v2:
        assert told == [], "the step says it all"
    else:
        (one,) = told
        assert (one.prompt, one.tokens, one.computed) == (PROMPTS[1], [100, 200], 0)


def test_v2_runners_are_not_sent_the_tokens_of_a_carried_request(make: Make) -> None:
    engines = make()
    engines.submit(engines.own[0], "r", PROMPTS[3])
    engines.step(engines.own[0], 6)
    _carry_to_group(engines, "r")
    carry = next(x for x in engines.runners[GROUP].sent if isinstance(x, instructions.Carry))
    (one,) = carry.requests
    assert (one.prompt == PROMPTS[3]) is not engines.runners[GROUP].v2
    assert bool(one.tokens) is not engines.runners[GROUP].v2


# --- order ---


def test_requests_go_on_in_the_order_of_their_arrival(make: Make) -> None:
    engines = make()
    requests = submit_all(engines)
    engines.step(engines.own[0], 9)
    exported = engines.own[0].export(requests)
    engines.bind(40)
    for request in reversed(exported):
        engines.group.expect(request.request_id, engines.frames[request.request_id])
        engines.group.adopt(alone(0), request, with_kv=True)
    scheduler = engines.group._scheduler
    assert [request.request_id for request in scheduler.kv_holding_waiting] == requests
    assert engines.group.blocks_lacking == 0


# --- windows ---


@pytest.mark.parametrize("others", [(), (None,)], ids=["alone", "beside-all-tokens"])
@pytest.mark.parametrize("window", [6, 16])
def test_blocks_outside_the_window_are_neither_read_nor_found(
    configs: LayoutConfigs, window: int, others: tuple[None, ...]
) -> None:
    engines = ToyEngines(configs, windows=(*others, window))
    engines.submit(engines.own[0], "r", PROMPTS[3])
    engines.step(engines.own[0], 9)
    carried, _ = _carry_to_group(engines, "r")
    (arrival,) = next(
        each.requests
        for each in engines.runners[GROUP].sent
        if isinstance(each, instructions.Carry)
    )
    begin = carried[0].computed - window + 1
    assert arrival.begin == (0 if others else begin)
    source, target = arrival.source[0][-1], arrival.target[1][-1]
    assert not any(target[: (begin - arrival.since) // 8])
    read = range(begin - arrival.since, arrival.computed - arrival.since)
    assert all(source[at // TOKENS] for at in read)
    assert all(target[at // 8] for at in read)
    cached = {block.block_id for block in engines.group.block_pool.blocks if block.block_hash}
    table = engines.group._scheduler.kv_cache_manager.get_block_ids("r")[-1]
    assert table[begin // 8] not in cached or begin % 8 == 0
    assert engines.audit() == []


# --- several KV groups ---

SEVERAL = (None, 10, 6)
"""Windows of three groups, in tokens."""


@pytest.mark.parametrize("kind", ["v1", "v1-sync", "v2"])
def test_requests_of_a_model_with_several_kv_groups_go_on(
    configs: LayoutConfigs, kind: str
) -> None:
    make = partial(
        ToyEngines, configs, windows=SEVERAL, asynchronous=kind != "v1-sync", v2=kind == "v2"
    )
    expected = [undisturbed(make, prompt) for prompt in PROMPTS[:3]]
    assert expected != [undisturbed(partial(make, windows=(None,)), p) for p in PROMPTS[:3]]
    engines = make()
    own, group = engines.own, engines.group
    requests = [engines.submit(own[0], f"r{n}", prompt) for n, prompt in enumerate(PROMPTS[:3])]
    engines.step(own[0], 6)
    engines.bind(60)
    engines.carry(own[0], group, requests)
    engines.step(group, 5)
    engines.carry(group, own[1], requests[:1])
    engines.carry(group, own[0], requests[1:])
    engines.release()
    for core in (*own, *own):
        engines.step(core, 3)
    assert engines.audit() == []
    engines.bind(40)
    engines.carry(own[0], group, requests[1:])
    engines.finish(own[1])
    engines.finish(group)
    assert [engines.tokens[request] for request in requests] == expected
    # The last output of each is not computed.
    computed = sum(runners.computed for runners in engines.runners.values())
    assert computed == sum(map(len, PROMPTS[:3])) + 3 * 40 - 3
    # What was carried is in the prefix cache, and right.
    again = engines.submit(group, "again", PROMPTS[2])
    engines.finish(group)
    assert engines.tokens[again] == expected[2]
    engines.release()
    assert engines.audit() == []


def test_a_block_of_the_wrong_kv_group_changes_the_tokens(configs: LayoutConfigs) -> None:
    make = partial(ToyEngines, configs, windows=(None, 10))
    engines = make()
    engines.submit(engines.own[0], "r", PROMPTS[2])
    engines.step(engines.own[0], 6)
    engines.bind(60)
    (carried,) = engines.own[0].export(["r"])
    (whole, window) = carried.blocks[0]
    whole[-1], window[-1] = window[-1], whole[-1]
    engines.group.expect("r", engines.frames["r"])
    engines.group.adopt(alone(0), carried, with_kv=True)
    engines.finish(engines.group)
    assert engines.tokens["r"] != undisturbed(make, PROMPTS[2])


def test_a_group_asks_for_the_blocks_of_all_kv_groups(configs: LayoutConfigs) -> None:
    engines = ToyEngines(configs, windows=SEVERAL)
    group = engines.group
    engines.bind(10)
    engines.submit(group, "r", PROMPTS[3])
    engines.step(group)
    assert engines.runners[GROUP].computed == 0, "50 tokens take 7 blocks, and up to 7 of a window"
    lacking = group.blocks_lacking
    assert lacking >= 7 + 7 + 7 - 10
    engines.bind(lacking)
    engines.finish(group)
    assert engines.tokens["r"] == undisturbed(
        partial(ToyEngines, configs, windows=SEVERAL), PROMPTS[3]
    )
