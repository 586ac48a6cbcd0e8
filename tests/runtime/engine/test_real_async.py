"""Async scheduling on two real engines: the scheduler is a step ahead of the runner."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from vllm.config import StructuredOutputsConfig
from vllm.sampling_params import StructuredOutputsParams

from shoal.policies.values.layouts import Unit, alone
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages import Mode
from tests.runtime.engine import probes
from tests.runtime.engine.prompts import MANY, PROMPTS, SHARED, Stock, random_prompts
from tests.runtime.engine.real_node import RealNode
from tests.runtime.engine.scripted_shift import Script, steps_ahead
from tests.units import tp

BLOCK_TOKENS = 32
GROUP = tp(0, 1)
UNITS = [alone(0), alone(1)]

SCHEMA = {
    "type": "object",
    "properties": {
        "engine": {"enum": ["first", "second"]},
        "bound": {"type": "boolean"},
        "members": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
    },
    "required": ["engine", "bound", "members"],
    "additionalProperties": False,
}
CALL, CALL_END = "<call>", "</call>"
TOOL_CALL = json.dumps(
    {
        "type": "structural_tag",
        "format": {
            "type": "tag",
            "begin": CALL,
            "content": {"type": "json_schema", "json_schema": SCHEMA},
            "end": CALL_END,
        },
    }
)
"""The grammar of a call of a tool."""


@pytest.fixture(scope="module")
def node(llama: Path) -> Iterator[RealNode]:
    # Blanks between the tokens of JSON would be the model's choice: it need not end.
    config = StructuredOutputsConfig(backend="xgrammar", disable_any_whitespace=True)
    options = {"async_scheduling": True, "structured_outputs_config": config}
    with RealNode(llama, 2, max_sp=2, **options) as node:
        yield node


def test_tokens_are_stocks_before_in_and_after_a_group(node: RealNode, stock: Stock) -> None:
    prompts = PROMPTS + SHARED
    expected = stock(prompts, 32)
    for _ in range(2):
        assert node.generate_spread(UNITS, prompts) == expected
        with node.bound(GROUP):
            assert node.generate(GROUP, prompts) == expected
    assert node.audit() == []


def test_tokens_are_stocks_where_steps_are_scheduled_ahead(node: RealNode, stock: Stock) -> None:
    expected = stock(PROMPTS, 32)
    for unit in (alone(0), GROUP):
        with node.bound(GROUP) if unit == GROUP else nullcontext():
            before = steps_ahead(node.config, 0)
            # They end one after the other: scheduled ahead of an end, a step computes in vain.
            requests = [
                node.submit(unit, [prompt], max_tokens=tokens)
                for prompt, tokens in zip(PROMPTS, range(11, 33, 3), strict=True)
            ]
            found = [node.wait(request)[0] for request in requests]
            assert steps_ahead(node.config, 0) > before
        assert found == [
            tokens[:count] for tokens, count in zip(expected, range(11, 33, 3), strict=True)
        ]
    assert node.audit() == []


def test_a_grammar_has_the_token_of_every_step(node: RealNode, llama: Path, stock: Stock) -> None:
    """Beside requests whose steps go ahead, and of a prompt that is cached but for one token."""
    prompt = PROMPTS[4]
    assert len(prompt) == BLOCK_TOKENS + 1
    lonely = structured(node, alone(0), prompt)
    beside = node.submit(alone(0), PROMPTS[:4], max_tokens=400)
    node.wait_for_tokens(beside, 2)
    for _ in range(3):
        assert structured(node, alone(0), prompt) == lonely
    assert not node.finished.keys() & set(beside)
    assert [tokens[:32] for tokens in node.wait(beside)] == stock(PROMPTS, 32)[:4]


def test_tokens_are_stocks_where_blocks_run_out(llama: Path, stock: Stock) -> None:
    """Requests are preempted between steps that go ahead, and come back."""
    counts = range(25, 25 + 5 * len(MANY), 5)
    expected = stock(MANY, counts[-1])
    with RealNode(
        llama, 2, max_sp=2, async_scheduling=True, kv_cache_memory_bytes=1_200_000
    ) as node:
        for _ in range(2):
            requests = [
                node.submit(alone(0), [prompt], max_tokens=count)
                for prompt, count in zip(MANY, counts, strict=True)
            ]
            found = [node.wait(request)[0] for request in requests]
            assert found == [e[:count] for e, count in zip(expected, counts, strict=True)]
        assert steps_ahead(node.config, 0) > 0
        assert node.audit() == []


def test_tokens_are_stocks_however_steps_run(node: RealNode, stock: Stock) -> None:
    expected = stock(PROMPTS, 32)
    node.probe_all(probes.take_modes)
    node.script(Script.RANDOM)
    with node.bound(GROUP):
        assert node.generate(GROUP, PROMPTS) == expected
    node.script(Script.TP)
    assert all(set(node.probe(engine, probes.take_modes)) == set(Mode) for engine in GROUP.engines)


def test_paused_requests_go_on_exactly(node: RealNode, stock: Stock) -> None:
    expected = stock(PROMPTS, 100)
    # For longer, so that none ends before the bind.
    paused = node.submit(alone(1), PROMPTS, max_tokens=300)
    node.wait_for_tokens(paused, 5)
    with node.bound(GROUP):
        assert not node.finished.keys() & set(paused)
        assert node.generate(GROUP, PROMPTS, max_tokens=100) == expected
    assert [tokens[:100] for tokens in node.wait(paused)] == expected


def as_text(llama: Path, tokens: list[int]) -> str:
    text: str = Tokenizer.from_file(str(llama / "tokenizer.json")).decode(tokens)
    return text


def begin_structured(
    node: RealNode, unit: Unit, prompt: list[int], backend: str = "xgrammar", **grammar: Any
) -> str:
    params = StructuredOutputsParams(**(grammar or {"json": SCHEMA}))
    params._backend = backend  # what vLLM's front end chooses
    (request,) = node.submit(
        unit, [prompt], max_tokens=200, ignore_eos=False, structured_outputs=params
    )
    return request


def end(node: RealNode, request: str) -> list[int]:
    node.until(lambda: request in node.finished, "structured output")
    return node.tokens[request]


def structured(node: RealNode, unit: Unit, prompt: list[int]) -> list[int]:
    request = begin_structured(node, unit, prompt)
    tokens = end(node, request)
    assert str(node.finished[request]) == "stop"
    return tokens


@pytest.mark.parametrize("grammar", [{"json": SCHEMA}, {"structural_tag": TOOL_CALL}], ids=list)
def test_a_grammar_goes_on_in_requests_that_are_carried(
    node: RealNode, llama: Path, grammar: dict[str, Any]
) -> None:
    prompts = PROMPTS[:3]
    plain = [begin_structured(node, alone(1), prompt, **grammar) for prompt in prompts]
    requests = [begin_structured(node, alone(0), prompt, **grammar) for prompt in prompts]
    node.wait_for_tokens(requests, 3)
    view = node.switch(GROUP, treatment=m.Treatment.CARRY)
    assert view.carried > 0
    node.switch(treatment=m.Treatment.CARRY)
    expected = [end(node, request) for request in plain]
    assert [end(node, request) for request in requests] == expected
    for tokens in expected:
        # Blanks in the call are the model's choice: the call need not end.
        text = as_text(llama, tokens)
        assert text.removeprefix(CALL).startswith("{")
        assert text.startswith(CALL) == ("structural_tag" in grammar)
    assert node.audit() == []


def test_requests_of_two_backends_share_cores_and_are_carried(node: RealNode, llama: Path) -> None:
    """xgrammar refuses the regular expression, which the front end then gives to guidance."""
    letters = {"backend": "guidance", "regex": r"\p{L}{40}"}
    kinds: list[dict[str, Any]] = [{}, letters]
    # Each of the two cores has its first structured request of another backend.
    plain = [begin_structured(node, alone(1), PROMPTS[0], **kind) for kind in reversed(kinds)]
    expected = [end(node, request) for request in plain][::-1]
    requests = [begin_structured(node, alone(0), PROMPTS[0], **kind) for kind in kinds]
    node.wait_for_tokens(requests, 3)
    assert node.switch(GROUP, treatment=m.Treatment.CARRY).carried > 0
    node.switch(treatment=m.Treatment.CARRY)
    assert [end(node, request) for request in requests] == expected
    assert as_text(llama, expected[0]).startswith("{")
    assert as_text(llama, expected[1]).isalpha()
    assert node.audit() == []


def test_a_json_schema_holds_in_a_group_though_sampling_is_deferred(
    node: RealNode, llama: Path
) -> None:
    expected = [structured(node, alone(0), prompt) for prompt in PROMPTS[:3]]
    with node.bound(GROUP):
        assert [structured(node, GROUP, prompt) for prompt in PROMPTS[:3]] == expected
        # The grammar of a step needs the token of the step before: every member is told it late.
        assert all(count > 0 for count in node.probe_all(probes.deferred_samples))
    for tokens in expected:
        answer: Any = json.loads(as_text(llama, tokens))
        assert set(answer) == set(SCHEMA["required"])
        assert answer["engine"] in ("first", "second")
    assert node.audit() == []


def test_a_seed_says_the_same_of_a_prompt_in_parts(node: RealNode) -> None:
    """On CPUs vLLM's runner would die of the parts; what is thrown away draws nothing."""
    prompt = random_prompts((300,), seed=12)
    sampling = {"max_tokens": 12, "temperature": 1.0, "seed": 5}
    in_parts = node.generate(alone(0), prompt, **sampling)
    # The second time all but a few tokens are cached.
    assert node.generate(alone(0), prompt, **sampling) == in_parts
    with node.bound(GROUP):
        assert node.generate(GROUP, prompt, **sampling) == in_parts
    assert node.generate(alone(0), prompt, **sampling | {"seed": 6}) != in_parts


def test_a_request_with_a_wrong_grammar_ends_with_an_error(node: RealNode) -> None:
    params = StructuredOutputsParams(grammar="root ::= ")
    params._backend = "xgrammar"
    (request,) = node.submit(alone(0), [PROMPTS[0]], structured_outputs=params)
    node.until(lambda: request in node.finished, "the end")
    assert str(node.finished[request]) == "error"
    assert node.tokens[request] == []
    assert node.audit() == []
