"""Tokens of requests that begin: sent as arrays, and packed ahead if the requests are expected."""

import gc
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.request import Request

from shoal.runtime.config import LayoutConfigs
from shoal.runtime.engine.link import instructions
from shoal.runtime.engine.scheduler.packed_tokens import PackedTokens
from tests.runtime.engine.prompts import random_prompts
from tests.runtime.engine.scheduler.toy_engines import Make, ToyEngines

PROMPT = [*range(100_000, 104_000), 0]


class Sliced(list[int]):
    """A list that notes which parts of it are read."""

    def __init__(self, *values: Any) -> None:
        super().__init__(*values)
        self.parts: list[Any] = []

    def __getitem__(self, part: Any) -> Any:
        self.parts.append(part)
        return super().__getitem__(part)


def scheduler_of(*requests: Request, v2: bool = True) -> Any:
    return SimpleNamespace(
        use_v2_model_runner=v2, requests={request.request_id: request for request in requests}
    )


def made(outputs: int = 0) -> Request:
    request = Request("r", list(PROMPT), SamplingParams(max_tokens=9), None)
    request.append_output_token_ids(list(range(outputs)))
    return request


def step_of(request: Request) -> SchedulerOutput:
    step = SchedulerOutput.make_empty()
    tokens = Sliced(request.all_token_ids)
    step.scheduled_new_reqs = [NewRequestData.from_request(request, ([1],), tokens)]
    return step


def sent(step: SchedulerOutput) -> tuple[Any, Any]:
    """Return the tokens of the prompt and all tokens, as a runner gets them."""
    message = instructions.dumps(instructions.Step(1, step, None, sample=True))
    (new,) = instructions.loads(message).scheduler_output.scheduled_new_reqs
    return new.prompt_token_ids, new.prefill_token_ids


def test_tokens_arrive_as_arrays() -> None:
    request = made(outputs=3)
    step = step_of(request)
    PackedTokens(scheduler_of(request)).pack(step)
    assert sent(step) == (array("i", PROMPT), array("i", [*PROMPT, 0, 1, 2]))


def test_v1_model_runners_get_lists() -> None:
    request = made()
    step = step_of(request)
    tokens = PackedTokens(scheduler_of(request, v2=False))
    tokens.expect(request)
    tokens.pack(step)
    assert sent(step) == (PROMPT, PROMPT)


@pytest.mark.parametrize("outputs", [0, 2])
def test_of_an_expected_request_only_later_tokens_are_packed(outputs: int) -> None:
    request = made()
    tokens = PackedTokens(scheduler_of(request))
    tokens.expect(request)
    request.append_output_token_ids([7] * outputs)
    step = step_of(request)
    (new,) = step.scheduled_new_reqs
    listed = new.prefill_token_ids
    tokens.pack(step)
    assert isinstance(listed, Sliced)
    assert listed.parts == [slice(len(PROMPT), None)]
    assert sent(step) == (array("i", PROMPT), array("i", PROMPT + [7] * outputs))


def test_a_request_that_begins_again_is_sent_with_all_its_tokens() -> None:
    request = made()
    tokens = PackedTokens(scheduler_of(request))
    tokens.expect(request)
    for _ in range(2):
        request.append_output_token_ids([5])
        step = step_of(request)
        tokens.pack(step)
    assert sent(step) == (array("i", PROMPT), array("i", [*PROMPT, 5, 5]))


# --- what is kept ---


@pytest.fixture
def engines(configs: LayoutConfigs) -> ToyEngines:
    return ToyEngines(configs, v2=True)


def kept(engines: ToyEngines) -> int:
    gc.collect()
    return sum(len(core._tokens._packed) for core in engines.cores.values())


def test_nothing_is_kept_of_a_request_that_does_not_come(engines: ToyEngines) -> None:
    (prompt,) = random_prompts((20,), seed=2)
    engines.group.expect("r", engines.frames_of("r", prompt))
    assert kept(engines) == 1
    engines.group.abort(["r"])
    assert kept(engines) == 0


def test_nothing_is_kept_of_a_request_that_ends_before_its_first_step(engines: ToyEngines) -> None:
    (prompt,) = random_prompts((20,), seed=2)
    engines.submit(engines.own[0], "r", prompt)
    engines.step(engines.own[0], 3)
    engines.bind(40)
    engines.carry(engines.own[0], engines.group, ["r"])
    assert kept(engines) == 1
    engines.group.abort(["r"])
    engines.step(engines.group)
    assert kept(engines) == 0


def test_nothing_is_kept_of_a_request_that_has_begun(make: Make) -> None:
    engines = make()
    (prompt,) = random_prompts((20,), seed=2)
    engines.submit(engines.own[0], "r", prompt)
    engines.step(engines.own[0], 3)
    engines.bind(40)
    engines.carry(engines.own[0], engines.group, ["r"])
    engines.step(engines.group)
    assert engines.group.num_requests == 1
    assert kept(engines) == 0
