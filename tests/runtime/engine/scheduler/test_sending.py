"""First steps that runners are sent before the scheduler has made them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.interface import PauseState

from shoal.runtime.config import LayoutConfigs
from shoal.runtime.engine.link import instructions
from shoal.runtime.engine.scheduler.sent_ahead import SentAhead, SentWronglyError
from shoal.runtime.engine.scheduler.vllm_core import VllmCore
from shoal.runtime.protocol.messages import CarriedRequest
from tests.runtime.engine.prompts import random_prompts
from tests.runtime.engine.scheduler.toy_engines import (
    ALL_TOKENS,
    Make,
    ToyEngines,
    Windows,
    undisturbed,
)

PROMPTS = random_prompts((20, 13, 22, 7), seed=2)
NAMES = ["a", "b", "c", "d"]
Coming = list[tuple[VllmCore, list[CarriedRequest]]]
"""The source and the requests of each carry."""


@pytest.fixture
def engines(configs: LayoutConfigs) -> ToyEngines:
    return running(ToyEngines(configs, v2=True))


def running(engines: ToyEngines, **sampling: Any) -> ToyEngines:
    """Let each engine run two requests, and lend the group blocks."""
    for name, prompt in zip(NAMES, PROMPTS, strict=True):
        engines.submit(engines.own[name in "cd"], name, prompt, **sampling)
    for own in engines.own:
        engines.step(own, 3)
    engines.bind(60)
    return engines


def expect(engines: ToyEngines, target: VllmCore, names: list[str] = NAMES) -> None:
    for name in names:
        target.expect(name, engines.frames[name])


def come(engines: ToyEngines, target: VllmCore, sources: dict[VllmCore, list[str]]) -> Coming:
    """Let expected requests stop as they were foretold; return what is said of them."""
    coming = Coming()
    for source, names in sources.items():
        announced = engines.foretell(source, target, names)
        coming.append((source, [each.whole(announced) for each in source.export(names)]))
    return coming


def to_group(engines: ToyEngines) -> Coming:
    """Let all requests come to the group."""
    expect(engines, engines.group)
    return come(engines, engines.group, dict(zip(engines.own, (NAMES[:2], NAMES[2:]), strict=True)))


def send(target: VllmCore, coming: Coming) -> bool:
    return target.send_first([(source.unit, requests) for source, requests in coming])


def adopt(target: VllmCore, coming: Coming) -> None:
    for source, requests in coming:
        for request in requests:
            assert target.adopt(source.unit, request, with_kv=True) is not None
        target.copy()


def begin(engines: ToyEngines, target: VllmCore, coming: Coming) -> bool:
    """Take requests over; return whether their step was sent before."""
    sent = send(target, coming)
    adopt(target, coming)
    assert target.dispatch()
    for source, requests in coming:
        source.abort([request.request_id for request in requests])
    return sent


def carries(engines: ToyEngines, target: VllmCore) -> list[instructions.Carry]:
    sent = engines.runners[target.unit].sent
    return [each for each in sent if isinstance(each, instructions.Carry)]


def assert_end_well(engines: ToyEngines, make: Make, core: VllmCore, **sampling: Any) -> None:
    """See that all requests of a core end with the tokens that they would have had."""
    engines.step(core)
    engines.finish(core)
    for name, prompt in zip(NAMES, PROMPTS, strict=True):
        assert engines.tokens[name] == undisturbed(make, prompt, **sampling)
    assert engines.audit() == []


@pytest.mark.parametrize("windows", [ALL_TOKENS, (None, 6)])
def test_a_step_is_sent_before_requests_are_adopted(make: Make, windows: Windows) -> None:
    windowed: Make = lambda **options: make(windows=windows, **options)  # noqa: E731
    engines = running(windowed())
    group, runners = engines.group, engines.runners[engines.group.unit]
    coming = to_group(engines)
    assert send(group, coming) is runners.v2
    assert (group.num_requests, runners.computed > 0) == (0, runners.v2)
    assert len(carries(engines, group)) == (2 if runners.v2 else 0)
    adopt(group, coming)
    assert group.dispatch()
    assert (group.in_flight, len(carries(engines, group))) == (1, 2)
    assert_end_well(engines, windowed, group)


def test_both_ways_have_the_same_steps(make: Make) -> None:
    """Released requests begin ahead, too, and those that have left may come back."""
    engines = running(make())
    v2, group = engines.runners[engines.group.unit].v2, engines.group
    assert begin(engines, group, to_group(engines)) is v2
    engines.step(group, 2)
    for own, names in zip(engines.own, (NAMES[:2], NAMES[2:]), strict=True):
        expect(engines, own, names)
        assert begin(engines, own, come(engines, own, {group: names})) is v2
    for own in engines.own:
        engines.step(own, 2)
    assert begin(engines, group, to_group(engines)) is v2
    assert_end_well(engines, make, group)


def test_requests_of_which_some_have_been_adopted_begin_together(engines: ToyEngines) -> None:
    first, second = to_group(engines)
    adopt(engines.group, [first])
    assert begin(engines, engines.group, [second])
    (step,) = engines.group._in_flight
    assert list(step.scheduled.num_scheduled_tokens) == NAMES


def test_what_ends_with_its_last_step_is_left_out(engines: ToyEngines) -> None:
    first, (source, requests) = to_group(engines)
    engines.group.abort(["c"])
    rest = [request for request in requests if request.request_id != "c"]
    assert begin(engines, engines.group, [first, (source, rest)])
    (step,) = engines.group._in_flight
    assert list(step.scheduled.num_scheduled_tokens) == ["a", "b", "d"]


# --- what is not sent ahead ---


def runs_another(engines: ToyEngines) -> None:
    engines.submit(engines.group, "other", PROMPTS[0][:5])
    engines.step(engines.group, 2)


def has_another_waiting(engines: ToyEngines) -> None:
    engines.submit(engines.group, "other", PROMPTS[0][:5])


def may_run_few(engines: ToyEngines) -> None:
    engines.group._scheduler.max_num_active_reqs = 3


def has_small_steps(engines: ToyEngines) -> None:
    engines.group._scheduler.max_num_scheduled_tokens = 3


def is_paused(engines: ToyEngines) -> None:
    engines.group._scheduler.set_pause_state(PauseState.PAUSED_NEW)


def cannot_read(engines: ToyEngines) -> None:
    engines.group.share_kv(False)


def zeroes_blocks(engines: ToyEngines) -> None:
    engines.group._scheduler.needs_kv_cache_zeroing = True


def has_a_connector(engines: ToyEngines) -> None:
    engines.group._scheduler.ec_connector = SimpleNamespace()


def has_stages(engines: ToyEngines) -> None:
    engines.group._scheduler.use_pp = True


def frees_images(engines: ToyEngines) -> None:
    engines.group._scheduler.encoder_cache_manager.freed.append("image")


def has_longest(engines: ToyEngines) -> None:
    longest = engines.group._carried.expected("c")
    assert longest is not None
    engines.group._scheduler.max_model_len = longest.num_tokens + 1


def has_an_adapter(engines: ToyEngines) -> None:
    request = engines.group._carried.expected("b")
    assert request is not None
    request.lora_request = LoRARequest("adapter", 1, "nowhere")


def has_lost_blocks(engines: ToyEngines) -> None:
    request = engines.group._carried.expected("b")
    assert request is not None
    engines.group._carried.blocks.forget(request)


def expects_a_seated_one(engines: ToyEngines) -> None:
    """The step would have to say that it does not begin."""
    beginnings = engines.group._beginnings
    beginnings._introduced["other"] = beginnings._introduced["a"]


REASONS = [
    runs_another,
    has_another_waiting,
    may_run_few,
    has_small_steps,
    is_paused,
    cannot_read,
    zeroes_blocks,
    has_a_connector,
    has_stages,
    frees_images,
    has_longest,
    has_an_adapter,
    has_lost_blocks,
    expects_a_seated_one,
]


@pytest.mark.parametrize("reason", REASONS)
def test_what_makes_a_step_another_one_is_looked_for(
    engines: ToyEngines, reason: Callable[[ToyEngines], None]
) -> None:
    coming = to_group(engines)
    reason(engines)
    computed = engines.runners[engines.group.unit].computed
    assert not send(engines.group, coming)
    assert engines.runners[engines.group.unit].computed == computed
    assert carries(engines, engines.group) == []


def test_nothing_is_sent_ahead_of_a_step_in_flight(engines: ToyEngines) -> None:
    engines.submit(engines.group, "other", PROMPTS[0][:5])
    assert engines.group.dispatch()
    assert not send(engines.group, to_group(engines))


@pytest.mark.parametrize(
    "change",
    [
        {"computed": 8},  # another one than was foretold
        {"blocks": {0: [[1, 2, 3, 4, 5, 6, 7]]}},
        {"tokens": [1, 2]},
        {"tokens": []},
    ],
)
def test_what_comes_otherwise_than_it_was_foretold_is_not_sent_ahead(
    engines: ToyEngines, change: dict[str, Any]
) -> None:
    (source, requests), second = to_group(engines)
    other = structs.replace(requests[0], **change)
    assert not send(engines.group, [(source, [other, *requests[1:]]), second])


@pytest.mark.parametrize("sampling", [{"frequency_penalty": 0.5}, {"prompt_logprobs": 1}])
def test_what_has_no_row_is_not_sent_ahead(
    configs: LayoutConfigs, sampling: dict[str, Any]
) -> None:
    engines = running(ToyEngines(configs, v2=True), **sampling)
    assert not send(engines.group, to_group(engines))


def test_what_was_not_foretold_is_not_sent_ahead(engines: ToyEngines) -> None:
    expect(engines, engines.group)
    coming = [
        (own, own.export(names)) for own, names in zip(engines.own, (["a"], ["c"]), strict=True)
    ]
    assert not send(engines.group, coming)


# --- what may not follow ---


def loses_one(engines: ToyEngines, coming: Coming) -> None:
    adopt(engines.group, coming)
    engines.group.abort(["b"])
    engines.group.dispatch()


def gets_one_more(engines: ToyEngines, coming: Coming) -> None:
    adopt(engines.group, coming)
    engines.submit(engines.group, "other", PROMPTS[0][:5])
    engines.group.dispatch()


def adopts_fewer(engines: ToyEngines, coming: Coming) -> None:
    (source, requests), *_ = coming
    adopt(engines.group, [(source, requests[1:])])


def adopts_in_another_order(engines: ToyEngines, coming: Coming) -> None:
    adopt(engines.group, coming[::-1])


def adopts_others(engines: ToyEngines, coming: Coming) -> None:
    (source, (first, *rest)), second = coming
    tokens = [*first.tokens[:-1], first.tokens[-1] + 1]
    adopt(engines.group, [(source, [structs.replace(first, tokens=tokens), *rest]), second])
    engines.group.dispatch()


@pytest.mark.parametrize(
    "follows",
    [
        loses_one,
        gets_one_more,
        adopts_fewer,
        adopts_in_another_order,
        adopts_others,
    ],
)
def test_a_core_does_not_go_on_if_something_else_follows(
    engines: ToyEngines, follows: Callable[[ToyEngines, Coming], None]
) -> None:
    coming = to_group(engines)
    assert send(engines.group, coming)
    with pytest.raises(SentWronglyError):
        follows(engines, coming)


def test_what_was_sent_is_said_once() -> None:
    sent = SentAhead()
    assert sent.take("first") is None
    sent.note("first", 1)
    sent.note("second", 2)
    assert sent.take("first") == 1
    with pytest.raises(SentWronglyError):
        sent.take("first")
    assert sent.take("second") is None
