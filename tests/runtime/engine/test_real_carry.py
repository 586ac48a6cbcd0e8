"""Requests that go along with their KV when real engines are regrouped, token by token."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.config import StructuredOutputsConfig
from vllm.sampling_params import StructuredOutputsParams

from shoal.policies.values.layouts import Unit, alone
from shoal.runtime.config import CarryPath
from shoal.runtime.protocol import messages as m
from tests.runtime.engine import probes
from tests.runtime.engine.prompts import random_prompts
from tests.runtime.engine.real_node import RealNode
from tests.units import tp

# vLLM's decoder makes tensors of what a message holds: of log probabilities of prompts.
pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")

GROUP = tp(0, 1)
CARRY = m.Treatment.CARRY
TOKENS = 128
LETTERS = StructuredOutputsParams(regex="([a-z]{3,9} ){400}")
LETTERS._backend, LETTERS._backend_was_auto = "xgrammar", True  # what vLLM's front end chooses
FEW = {"allowed_token_ids": list(range(300, 400))}

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 5},
    "seeded-top-p": {"temperature": 0.8, "seed": 6, "top_p": 0.9, "top_k": 40},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 1.5}
    | FEW,
    "grammar": {"structured_outputs": LETTERS},
    "seeded-grammar": {"structured_outputs": LETTERS, "temperature": 1.0, "seed": 7},
    "logprobs": {"logprobs": 3},
    "prompt-logprobs": {"logprobs": 3, "prompt_logprobs": 2},
    "bias": {"logit_bias": {310: 2.0, 320: 3.0}, "temperature": 1.0, "seed": 8},
    # No token twice in a row, which needs the token before the carry.
    "bad-words": {"_bad_words_token_ids": [[token, token] for token in range(300, 400)]} | FEW,
    "bound": {"min_tokens": 100, "stop_token_ids": list(range(3, 1000))},
}
LENGTHS = (40, 33, 64, 90, 31, 17, 150, 70, 25, 5, 300)
_seeds = itertools.count(500)


@pytest.fixture(scope="module", params=["asynchronous-host", "in-turn-auto"])
def node(llama: Path, request: pytest.FixtureRequest) -> Iterator[RealNode]:
    *scheduling, path = request.param.split("-")
    options = {
        "async_scheduling": scheduling == ["asynchronous"],
        "carry_path": CarryPath(path),
        "structured_outputs_config": StructuredOutputsConfig(backend="xgrammar"),
    }
    with RealNode(llama, 2, **options) as node:
        yield node


def submit_all(node: RealNode, unit: Unit, prompts: list[list[int]]) -> list[str]:
    return [
        node.submit(unit, [prompt], TOKENS, **sampling)[0]
        for prompt, sampling in zip(prompts, SAMPLING.values(), strict=True)
    ]


def finish(node: RealNode, requests: list[str]) -> list[list[int]]:
    node.until(lambda: node.finished.keys() >= set(requests), "requests")
    return [node.tokens[request] for request in requests]


def further(node: RealNode, requests: list[str], count: int) -> None:
    """Wait until every request that has not ended has so many more tokens."""
    goal = {request: len(node.tokens[request]) + count for request in requests}
    node.until(
        lambda: all(r in node.finished or len(node.tokens[r]) >= goal[r] for r in requests),
        "more tokens",
    )


def assert_same(node: RealNode, expected: list[str], requests: list[str]) -> None:
    for name, plain, carried in zip(SAMPLING, expected, requests, strict=True):
        assert node.tokens[carried] == node.tokens[plain], name
        assert node.finished[carried] == node.finished[plain], name
        for kept in (node.logprobs, node.prompt_logprobs):
            assert_close(kept.get(carried, []), kept.get(plain, []), name)


def assert_close(found: list[dict[int, float]], told: list[dict[int, float]], name: str) -> None:
    assert len(found) == len(told), f"{name}: not each once"
    for one, other in zip(found, told, strict=True):
        assert one == pytest.approx(other, abs=1e-3), name


def test_sampling_goes_on_as_it_was(node: RealNode) -> None:
    prompts = random_prompts(LENGTHS, next(_seeds))
    plain = submit_all(node, alone(1), prompts)
    finish(node, plain)
    requests = submit_all(node, alone(0), prompts)
    node.wait_for_tokens(requests, 8)
    view = node.switch(GROUP, treatment=CARRY)
    assert view.carried > len(SAMPLING) // 2
    assert view.recomputed == {}
    further(node, requests, 20)
    node.switch(treatment=CARRY)
    further(node, requests, 20)
    node.switch(GROUP, treatment=CARRY)
    finish(node, requests)
    node.switch()
    assert_same(node, plain, requests)
    assert node.audit() == []
    through_host = node.controller.books.statistics.carries.bytes.total("host")
    assert bool(through_host) == (node.config.carry_path is CarryPath.HOST)


def test_no_token_is_computed_twice(node: RealNode) -> None:
    prompts = random_prompts((40, 130, 300), next(_seeds))
    requests = node.submit(alone(0), prompts, TOKENS)
    node.wait_for_tokens(requests, 8)
    node.switch(GROUP, treatment=CARRY)
    node.wait_for_tokens(requests, 30)
    finish(node, requests)
    computed = node.probe(0, probes.scheduled)
    for request, prompt in zip(requests, prompts, strict=True):
        assert computed[request] == len(prompt) + TOKENS - 1
    node.switch()


def test_a_wrong_block_changes_the_tokens(node: RealNode) -> None:
    """The tests above can fail: what is in the blocks decides."""
    (prompt,) = random_prompts((300,), next(_seeds))
    (expected,) = node.generate(alone(1), [prompt], TOKENS)
    (request,) = node.submit(alone(0), [prompt], TOKENS)
    node.wait_for_tokens([request], 8)
    damaged: list[m.Message] = []

    def damage(_engine: int, message: m.Message) -> None:
        # Blocks are in the first message of the two that tells of the request.
        if isinstance(message, m.Allot | m.Import) and not message.requests[0].is_rest:
            blocks = message.requests[0].blocks[0][0]
            blocks[2] = blocks[3]
            damaged.append(message)

    node.transport.before_send = damage
    node.switch(GROUP, treatment=CARRY)
    node.transport.before_send = lambda _engine, _message: None
    assert len(damaged) == 1
    assert node.wait([request]) != [expected]
    node.switch()


def test_a_slot_that_is_read_before_it_was_written_changes_the_tokens(node: RealNode) -> None:
    (prompt,) = random_prompts((300,), next(_seeds))
    (expected,) = node.generate(alone(1), [prompt], TOKENS)
    (request,) = node.submit(alone(0), [prompt], TOKENS)
    node.wait_for_tokens([request], 8)
    node.probe(0, probes.stage_nothing, True)
    node.switch(GROUP, treatment=CARRY)
    node.probe(0, probes.stage_nothing, False)
    through_host = node.config.carry_path is CarryPath.HOST
    assert (node.wait([request]) != [expected]) == through_host
    node.switch()


def test_prompts_in_the_middle_of_their_computing_go_along(node: RealNode) -> None:
    # So many tokens that the last prompt is not computed before the switch, on a busy machine too.
    prompts = random_prompts((700, 650, 600, 550), next(_seeds))
    expected = node.generate(alone(1), prompts)
    requests = node.submit(alone(0), prompts)
    node.until(
        lambda: node.probe(0, probes.scheduled).get(requests[0], 0) > 64, "a part of a prompt"
    )
    assert not node.tokens[requests[-1]]
    node.switch(GROUP, treatment=CARRY)
    assert node.wait(requests) == expected
    node.switch()
    assert node.audit() == []
