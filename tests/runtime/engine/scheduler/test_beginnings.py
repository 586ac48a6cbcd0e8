"""Requests that begin: of those that are expected, steps bring only what runners do not know."""

from array import array
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.request import Request

from shoal.runtime.config import LayoutConfigs
from shoal.runtime.engine.layouts.introductions import Introductions
from shoal.runtime.engine.link import instructions
from shoal.runtime.engine.link.executor import UnitChannel
from shoal.runtime.engine.scheduler import beginnings as beginnings_module
from shoal.runtime.engine.scheduler.beginnings import Beginnings
from shoal.runtime.engine.scheduler.block_holders import preempt
from shoal.runtime.engine.scheduler.scheduled_steps import beginning
from tests.runtime.engine.prompts import random_prompts
from tests.runtime.engine.scheduler.toy_engines import Make, ToyEngines, undisturbed

PROMPT = [*range(100_000, 104_000), 0]


class Sliced(list[int]):
    """A list that notes which parts of it are read."""

    def __init__(self, *values: Any) -> None:
        super().__init__(*values)
        self.parts: list[Any] = []

    def __getitem__(self, part: Any) -> Any:
        self.parts.append(part)
        return super().__getitem__(part)


class Pipe:
    """A unit's queue to one runner, which reads what was sent when a step comes."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.introductions = Introductions()

    def send(self, instruction: Any) -> None:
        self.sent.append(instructions.dumps(instruction))

    def step(self, told: SchedulerOutput, begun: instructions.Begun) -> SchedulerOutput:
        """Return a step as the runner sees it."""
        self.send(instructions.Step(1, told, None, sample=True, begun=begun))
        *introduced, step = map(instructions.loads, self.sent)
        self.sent.clear()
        for each in introduced:
            self.introductions.add(each.request)
        return self.introductions.complete(step.scheduler_output, step.begun)


def beginnings(*requests: Request, v2: bool = True) -> tuple[Beginnings, Pipe]:
    known = {request.request_id: request for request in requests}
    scheduler, pipe = SimpleNamespace(use_v2_model_runner=v2, requests=known), Pipe()
    return Beginnings(scheduler, cast("UnitChannel", pipe)), pipe


def made(outputs: int = 0, name: str = "r") -> Request:
    request = Request(name, list(PROMPT), SamplingParams(max_tokens=9, top_p=0.5), None)
    request.append_output_token_ids(list(range(outputs)))
    return request


def step_of(*requests: Request) -> SchedulerOutput:
    step = SchedulerOutput.make_empty()
    for request in requests:
        request.num_computed_tokens = request.num_tokens - 1
        tokens = Sliced(request.all_token_ids)
        step.scheduled_new_reqs.append(NewRequestData.from_request(request, ([1],), tokens))
    return step


def seen(step: SchedulerOutput) -> list[tuple[Any, ...]]:
    """Return what a runner sees of the requests that begin."""
    return [
        (r.req_id, r.prompt_token_ids, r.prefill_token_ids, r.num_computed_tokens, r.block_ids)
        for r in step.scheduled_new_reqs
    ]


def whole(request: Request) -> tuple[Any, ...]:
    tokens = array("i", request.all_token_ids)
    return (request.request_id, array("i", PROMPT), tokens, request.num_tokens - 1, ([1],))


def test_tokens_arrive_as_arrays() -> None:
    request = made(outputs=3)
    told, pipe = beginnings(request)
    assert seen(pipe.step(*told.tell(step_of(request)))) == [whole(request)]


def test_v1_model_runners_get_lists() -> None:
    request = made()
    told, pipe = beginnings(request, v2=False)
    told.expect(request)
    assert pipe.sent == []
    ((_, prompt, *_),) = seen(pipe.step(*told.tell(step_of(request))))
    assert prompt == PROMPT


@pytest.mark.parametrize("outputs", [0, 2])
def test_of_an_expected_request_a_step_brings_only_what_is_new(outputs: int) -> None:
    request, other = made(), made(outputs=1, name="other")
    told, pipe = beginnings(request, other)
    told.expect(request)
    request.append_output_token_ids([7] * outputs)
    step = step_of(request, other)
    listed: Any = step.scheduled_new_reqs[0].prefill_token_ids
    sent, begun = told.tell(step)
    assert listed.parts == [slice(len(PROMPT), None)]
    assert [new.req_id for new in sent.scheduled_new_reqs] == ["other"]
    assert [new.req_id for new in step.scheduled_new_reqs] == ["r", "other"], "the scheduler's own"
    came = pipe.step(sent, begun)
    assert seen(came) == [whole(other), whole(request)]
    assert came.scheduled_new_reqs[1].sampling_params == request.sampling_params


def test_a_request_that_begins_again_is_sent_whole() -> None:
    request = made()
    told, pipe = beginnings(request)
    told.expect(request)
    for _ in range(2):
        request.append_output_token_ids([5])
        assert seen(pipe.step(*told.tell(step_of(request)))) == [whole(request)]


def test_a_request_that_is_expected_again_is_introduced_again() -> None:
    request = made()
    told, pipe = beginnings(request)
    told.expect(request)
    told.forget(["r", "unknown"])
    told.expect(request)
    assert seen(pipe.step(*told.tell(step_of(request)))) == [whole(request)]


def test_a_request_with_an_image_is_not_introduced() -> None:
    request = made()
    request.mm_features = cast("Any", [object()])
    told, pipe = beginnings(request)
    told.expect(request)
    assert pipe.sent == []


# --- what is kept ---


@pytest.fixture
def engines(configs: LayoutConfigs) -> ToyEngines:
    return ToyEngines(configs, v2=True)


def kept(engines: ToyEngines) -> tuple[int, int]:
    """Return how many requests schedulers keep, and how many runners."""
    schedulers = sum(len(core._beginnings._introduced) for core in engines.cores.values())
    return schedulers, sum(len(each.introductions._known) for each in engines.runners.values())


def test_nothing_is_kept_of_a_request_that_does_not_come(engines: ToyEngines) -> None:
    (prompt,) = random_prompts((20,), seed=2)
    engines.group.expect("r", engines.frames_of("r", prompt))
    assert kept(engines) == (1, 1)
    engines.group.abort(["r"])
    assert kept(engines) == (0, 1), "until the next step"
    engines.bind(40)
    engines.submit(engines.group, "other", prompt)
    engines.step(engines.group)
    assert kept(engines) == (0, 0)


def test_nothing_is_kept_of_a_request_that_ends_before_its_first_step(engines: ToyEngines) -> None:
    (prompt,) = random_prompts((20,), seed=2)
    engines.submit(engines.own[0], "r", prompt)
    engines.step(engines.own[0], 3)
    engines.bind(40)
    engines.carry(engines.own[0], engines.group, ["r"])
    assert kept(engines) == (1, 1)
    engines.group.abort(["r"])
    engines.step(engines.group)
    assert kept(engines) == (0, 0)


def test_nothing_is_kept_of_a_request_that_has_begun(make: Make) -> None:
    engines = make()
    (prompt,) = random_prompts((20,), seed=2)
    engines.submit(engines.own[0], "r", prompt)
    engines.step(engines.own[0], 3)
    engines.bind(40)
    engines.carry(engines.own[0], engines.group, ["r"])
    engines.step(engines.group)
    assert engines.group.num_requests == 1
    assert kept(engines) == (0, 0)


# --- seats ---


def foretold(make: Make, requests: int = 2, **options: Any) -> tuple[ToyEngines, list[str]]:
    """Return engines that are about to carry requests into a group, and these."""
    engines, names = make(), [f"r{number}" for number in range(requests)]
    for name, prompt in zip(names, random_prompts((20,) * requests, seed=2), strict=True):
        engines.submit(engines.own[0], name, prompt, **options)
    engines.step(engines.own[0], 3)
    engines.bind(40)
    return engines, names


def seats(engines: ToyEngines) -> int:
    return engines.runners[engines.group.unit].seated


def test_requests_that_were_foretold_have_seats(make: Make) -> None:
    engines, names = foretold(make)
    engines.carry(engines.own[0], engines.group, names, foretold=True)
    engines.step(engines.group, 3)
    v2 = engines.runners[engines.group.unit].v2
    assert seats(engines) == (len(names) if v2 else 0)
    assert kept(engines) == (0, 0)


@pytest.mark.parametrize("comes", [False, True])
def test_runners_forget_a_request_that_loses_its_seat_unless_it_comes(
    make: Make, comes: bool
) -> None:
    """It was there before, and its seat is not sent. A later step must not end it once it runs."""
    engines, (name,) = foretold(make, requests=1)
    group = engines.group
    group._scheduler.finished_req_ids.add(name)
    group.expect(name, engines.frames[name])
    (announced,) = engines.own[0].announce([name])
    assert group.allot(announced)
    group._carried.blocks.forget(group._carried.expected(name))
    group.tell_allotted()
    assert seats(engines) == 0
    v2 = engines.runners[group.unit].v2
    assert (name in group._scheduler.finished_req_ids) is not v2
    if comes:
        (exported,) = engines.own[0].export([name])
        assert group.adopt(engines.own[0].unit, exported.whole({name: announced}), with_kv=True)
        group.copy()
        engines.step(group, 3)
        assert name in group._scheduler.requests
    group.abort([name])
    assert name in group._scheduler.finished_req_ids


def test_runners_get_few_seats_at_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between them they run steps: one for all of many requests would hold a step up."""
    monkeypatch.setattr(beginnings_module, "SEATS", 2)
    engines, names = foretold(make, requests=3)
    told = list[int]()
    channel = engines.group._beginnings._channel
    send = channel.send

    def noting(instruction: Any) -> None:
        if isinstance(instruction, instructions.Seat):
            told.append(len(instruction.requests))
        send(instruction)

    channel.send = noting  # type: ignore[method-assign]
    for name in names:
        engines.group.expect(name, engines.frames[name])
    engines.foretell(engines.own[0], engines.group, names)
    assert told == ([2, 1] if engines.runners[engines.group.unit].v2 else [])


def test_where_requests_run_nobody_is_seated(make: Make) -> None:
    engines, names = foretold(make)
    (prompt,) = random_prompts((9,), seed=3)
    engines.submit(engines.group, "runs", prompt)
    engines.step(engines.group, 2)
    engines.carry(engines.own[0], engines.group, names, foretold=True)
    engines.step(engines.group, 2)
    assert seats(engines) == 0


def test_requests_whose_penalties_count_outputs_are_not_seated(make: Make) -> None:
    engines, names = foretold(make, frequency_penalty=0.5)
    engines.carry(engines.own[0], engines.group, names, foretold=True)
    engines.step(engines.group)
    assert seats(engines) == 0


def test_a_request_that_ends_with_its_last_step_gives_its_seat_back(make: Make) -> None:
    engines, names = foretold(make)
    for name in names:
        engines.group.expect(name, engines.frames[name])
    announced = engines.foretell(engines.own[0], engines.group, names)
    exported = [r.whole(announced) for r in engines.own[0].export(names)]
    assert engines.group.adopt(engines.own[0].unit, exported[0], with_kv=True) is not None
    engines.group.abort(names[1:])
    engines.group.copy()
    engines.step(engines.group)
    assert kept(engines) == (0, 0)
    assert set(engines.runners[engines.group.unit]._known) == set(names[:1])


def test_a_seat_is_no_place_for_two(make: Make) -> None:
    """There are no more seats than a runner has rows."""
    engines, names = foretold(make)
    engines.group._scheduler.max_num_running_reqs = 1
    for name in names:
        engines.group.expect(name, engines.frames[name])
    engines.foretell(engines.own[0], engines.group, names)
    known = engines.group._beginnings._introduced.values()
    v2 = engines.runners[engines.group.unit].v2
    assert sum(each.blocks is not None for each in known) == int(v2)


def test_a_request_that_was_preempted_where_it_is_seated_keeps_its_seat(make: Make) -> None:
    """Runners have not been told that it was preempted: no step has come since."""
    engines, names = foretold(make, requests=1)
    own, group = engines.own[0], engines.group
    preempt(own._scheduler, names)
    engines.carry(own, group, names)
    engines.step(group, 3)
    engines.carry(group, own, names, foretold=True)
    engines.finish(own)
    (prompt,) = random_prompts((20,), seed=2)
    assert engines.tokens[names[0]] == undisturbed(make, prompt)
    v2 = engines.runners[own.unit].v2
    assert engines.runners[own.unit].seated == int(v2)


def running(engines: ToyEngines) -> list[str]:
    return [request.request_id for request in engines.group._scheduler.running]


def test_a_request_that_comes_to_its_seat_runs_at_once(make: Make) -> None:
    engines, names = foretold(make, requests=3)
    # The order in which they come says nothing: vLLM preempts the one that arrived last.
    engines.carry(engines.own[0], engines.group, names[::-1], foretold=True)
    v2 = engines.runners[engines.group.unit].v2
    assert running(engines) == (names if v2 else [])
    engines.step(engines.group)
    assert running(engines) == names


@pytest.mark.parametrize("ends", ["aborted", "preempted", "left out"])
def test_others_go_on_if_one_that_has_come_does_not_begin(make: Make, ends: str) -> None:
    expected = {}
    for number, prompt in enumerate(random_prompts((20, 20), seed=2)):
        expected[f"r{number}"] = undisturbed(make, prompt)
    engines, names = foretold(make)
    scheduler = engines.group._scheduler
    if ends == "left out":
        scheduler.max_num_active_reqs = 1
    engines.carry(engines.own[0], engines.group, names, foretold=True)
    if ends == "aborted":
        engines.group.abort(["r1"])
    if ends == "preempted" and running(engines):
        preempt(scheduler, ["r1"])
        assert running(engines) == ["r0"]
    engines.step(engines.group)
    assert engines.audit() == []
    scheduler.max_num_active_reqs = scheduler.max_num_running_reqs
    engines.finish(engines.group)
    assert engines.tokens["r0"] == expected["r0"]
    if ends != "aborted":
        assert engines.tokens["r1"] == expected["r1"]
    assert kept(engines) == (0, 0)
    assert engines.group._beginnings._begun == {}


def test_a_request_that_has_not_begun_may_wait_in_its_seat(make: Make) -> None:
    """Steps may have no tokens left for it."""
    engines, names = foretold(make)
    scheduler = engines.group._scheduler
    engines.carry(engines.own[0], engines.group, names, foretold=True)
    most, scheduler.max_num_scheduled_tokens = scheduler.max_num_scheduled_tokens, 1
    engines.step(engines.group)
    assert engines.tokens[names[0]] != []
    scheduler.max_num_scheduled_tokens = most
    engines.finish(engines.group)
    prompts = random_prompts((20, 20), seed=2)
    assert [engines.tokens[name] for name in names] == [undisturbed(make, p) for p in prompts]


def test_a_request_that_begins_in_its_seat_is_no_steady_one(make: Make) -> None:
    """What it found in the prefix cache may be what a step in flight is about to write."""
    engines, names = foretold(make)
    engines.carry(engines.own[0], engines.group, names, foretold=True)
    engines.group.dispatch()
    assert sorted(beginning(engines.group._in_flight[0])) == names


def test_a_step_uses_no_more_adapters_than_it_can(make: Make) -> None:
    engines, names = foretold(make, requests=3)
    scheduler = engines.group._scheduler
    scheduler.lora_config = SimpleNamespace(max_loras=1)
    for number, name in enumerate(names):
        engines.group.expect(name, engines.frames[name])
        request = engines.group._carried.expected(name)
        assert request is not None
        request.lora_request = LoRARequest(f"a{number}", max(1, number), "nowhere")
    engines.carry(engines.own[0], engines.group, names, expected=True, foretold=True)
    v2 = engines.runners[engines.group.unit].v2
    assert running(engines) == (names[:2] if v2 else [])
    assert engines.group.load.running + engines.group.load.waiting == 3
