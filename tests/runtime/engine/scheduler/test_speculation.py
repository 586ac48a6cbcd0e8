"""Requests whose steps check drafts go from core to core, on vLLM's schedulers and a toy model."""

from pathlib import Path

import pytest

from shoal.runtime.config import LayoutConfigs
from shoal.runtime.engine.scheduler import scheduled_steps
from shoal.runtime.protocol.messages import Mode
from tests.runtime.engine.prompts import random_prompts
from tests.runtime.engine.real_node import configs_of
from tests.runtime.engine.scheduler.toy_engines import (
    GROUP,
    Make,
    ToyEngines,
    block_tokens,
    undisturbed,
)

PROMPTS = random_prompts((5, 21, 32, 50), seed=5)
DRAFTS = 3
NGRAMS = {"method": "ngram", "num_speculative_tokens": DRAFTS}


@pytest.fixture(scope="module")
def speculating(llama: Path) -> LayoutConfigs:
    return configs_of(str(llama), 2, max_num_batched_tokens=32, speculative_config=NGRAMS)


@pytest.fixture
def expected(configs: LayoutConfigs) -> list[list[int]]:
    """What is generated without speculation."""
    make: Make = lambda: ToyEngines(configs, asynchronous=False)  # noqa: E731
    return [undisturbed(make, prompt) for prompt in PROMPTS]


@pytest.fixture(params=["v1-sync", "v2-sync", "v2"])
def engines(
    speculating: LayoutConfigs, expected: list[list[int]], request: pytest.FixtureRequest
) -> ToyEngines:
    """With V1 model runners, vLLM schedules steps that check n-grams one at a time."""
    foreseen = {tuple(p): tokens for p, tokens in zip(PROMPTS, expected, strict=True)}
    kind = {"asynchronous": request.param == "v2", "v2": request.param != "v1-sync"}
    return ToyEngines(speculating, foreseen=foreseen, **kind)


def submit_all(engines: ToyEngines) -> list[str]:
    return [
        engines.submit(engines.own[0], f"r{number}", prompt)
        for number, prompt in enumerate(PROMPTS)
    ]


def test_tokens_are_those_without_drafts(engines: ToyEngines, expected: list[list[int]]) -> None:
    requests = submit_all(engines)
    engines.finish(engines.own[0])
    assert [engines.tokens[request] for request in requests] == expected
    (runners, *_) = engines.runners.values()
    assert runners.accepted > 0
    assert runners.rejected > 0
    steps = max(len(engines.outputs[request]) for request in requests)
    assert steps < len(expected[0]), "a step yields several tokens"
    assert engines.audit() == []


def test_steps_tell_what_they_checked_and_what_requests_got(
    engines: ToyEngines, expected: list[list[int]]
) -> None:
    submit_all(engines)
    engines.finish(engines.own[0])
    work, runners = engines.work, next(iter(engines.runners.values()))
    assert work.drafts == runners.accepted + runners.rejected
    assert 0 < work.accepted <= runners.accepted
    # The first token of each is of a step with its prompt. With steps in flight, one more may
    # compute a request that has just ended.
    got, late = sum(map(len, expected)) - len(PROMPTS), len(PROMPTS)
    assert work.decodes + work.accepted - late <= got <= work.decodes + work.accepted


def test_requests_go_on_without_their_drafts(
    engines: ToyEngines, expected: list[list[int]]
) -> None:
    own, group = engines.own, engines.group
    requests = submit_all(engines)
    engines.step(own[0], 6 // own[0]._depth)
    assert any(own[0]._scheduler.requests[request].spec_token_ids for request in requests)
    engines.bind(60)
    exported, _ = engines.carry(own[0], group, requests)
    assert all(carried.computed for carried in exported)
    engines.step(group, 2)
    engines.carry(group, own[1], requests)
    engines.release()
    engines.step(own[1])
    assert not any(
        tokens == full
        for tokens, full in zip(map(engines.tokens.get, requests), expected, strict=True)
    )
    engines.finish(own[1])
    assert [engines.tokens[request] for request in requests] == expected
    assert engines.audit() == []
    assert all(core.num_requests == 0 for core in engines.cores.values())


def test_requests_that_are_kept_go_on(engines: ToyEngines, expected: list[list[int]]) -> None:
    requests = submit_all(engines)
    engines.step(engines.own[0], 6)
    engines.own[0].export(requests)
    scheduler = engines.own[0]._scheduler
    assert not any(scheduler.requests[request].spec_token_ids for request in requests)
    engines.own[0].keep(requests)
    engines.finish(engines.own[0])
    assert [engines.tokens[request] for request in requests] == expected


def test_adopted_requests_have_room_for_the_drafts_of_their_first_step(
    engines: ToyEngines,
) -> None:
    """vLLM schedules them though nobody has proposed any.

    Without room, requests that hold blocks would wait for each other.
    """
    own, group = engines.own, engines.group
    requests = submit_all(engines)
    engines.step(own[0], 6)
    engines.bind(60)
    engines.carry(own[0], group, requests)
    known = [group._scheduler.requests[request] for request in requests]
    size = block_tokens(GROUP)
    assert any(-(-r.num_tokens // size) * size < r.num_tokens + DRAFTS for r in known)
    free = group.load.free_blocks
    group.dispatch()
    scheduled = group._in_flight[0].scheduled.num_scheduled_tokens
    assert scheduled == dict.fromkeys(requests, 1 + DRAFTS)
    assert group.load.free_blocks == free
    engines.step(group)
    engines.finish(group)
    assert engines.audit() == []


@pytest.mark.parametrize(("threshold", "mode"), [(15, Mode.SP), (16, Mode.TP)])
def test_drafts_are_among_the_tokens_that_choose_a_mode(
    engines: ToyEngines, threshold: int, mode: Mode
) -> None:
    own, group = engines.own, engines.group
    requests = submit_all(engines)
    engines.step(own[0], 6)
    engines.bind(60)
    engines.carry(own[0], group, requests)
    group.shift._floor, group.shift.threshold = 0, threshold
    group.dispatch()
    step = group._in_flight[0]
    assert step.scheduled.num_scheduled_tokens == dict.fromkeys(requests, 1 + DRAFTS)
    assert step.mode is mode
    engines.step(group)


def test_no_third_step_is_scheduled(
    engines: ToyEngines, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM's scheduler has the drafts of two steps at most to take back."""
    monkeypatch.setattr(scheduled_steps, "AHEAD_REQUESTS", 1)
    own, requests = engines.own[0], submit_all(engines)
    engines.step(own, 6)
    while own.dispatch():
        pass
    assert own.in_flight == own._depth
    assert own.load.running > 0
    assert not own.dispatch_ahead()
    engines.step(own)
    engines.finish(own)
    assert [engines.tokens[request] for request in requests] == expected


def test_a_lease_has_room_for_all_drafts_in_flight(
    engines: ToyEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = engines.group
    requests = submit_all(engines)
    engines.step(engines.own[0], 6)
    engines.bind(60)
    engines.carry(engines.own[0], group, requests)
    for drafts in (DRAFTS, 2 * DRAFTS):
        monkeypatch.setattr(group._scheduler, "num_spec_tokens", drafts)
        tokens = group._depth * (1 + drafts)
        of_each = -(-tokens // block_tokens(GROUP))
        assert group._num_holding == len(requests) * of_each
    assert of_each == group._depth
