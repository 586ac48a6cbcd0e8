"""Grammars compiled by vLLM in the sandbox, with the demo model's vocabulary."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from server import frontend
from server.grammars import MEMORY_BYTES, GrammarCheck, GrammarCompiler
from server.options import DEMO_CHECKPOINT
from server.sandbox import Sandbox

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    fields = {"model": str(DEMO_CHECKPOINT), "enforce_eager": True, "dtype": "float32"}
    compiler = GrammarCompiler(frontend.make_vllm_config(fields))
    with Sandbox(compiler, compiler.prepare, cpu_seconds=2, memory_bytes=MEMORY_BYTES) as sandbox:
        yield sandbox


def check(sandbox: Sandbox, **constraint: Any) -> None:
    asyncio.run(GrammarCheck(sandbox).check(StructuredOutputsParams(**constraint)))


@pytest.mark.parametrize(
    "constraint",
    [
        {"json": OBJECT},
        {"json": '{"type": "string", "pattern": "^a+$"}'},
        {"json": {"type": "number", "multipleOf": 3}},
        {"json_object": True},
        {"regex": "[a-z]{1,9}"},
        {"choice": ["yes", "no"]},
        {"grammar": 'root ::= "a" | "b"'},
    ],
)
def test_a_grammar_that_an_engine_can_compile_passes(
    sandbox: Sandbox, constraint: dict[str, Any]
) -> None:
    check(sandbox, **constraint)


@pytest.mark.parametrize(
    "constraint",
    [
        {"json": {"type": "nonsense"}},
        {"regex": "a("},
        {"regex": "a\x00"},
        {"grammar": "no grammar"},
        {"grammar": "root ::= " + "(" * 100_000 + '"a"' + ")" * 100_000},
        {"grammar": "root ::= " + "(" * 200_000},
        {"json": {"enum": [f"value {k}" for k in range(200_000)]}},
    ],
    ids=["type", "regex", "nul", "grammar", "nested", "open", "huge enum"],
)
def test_one_that_is_wrong_or_costs_too_much_is_refused(
    sandbox: Sandbox, constraint: dict[str, Any]
) -> None:
    with pytest.raises(VLLMValidationError) as caught:
        check(sandbox, **constraint)
    assert caught.value.parameter == "structured_outputs"
    check(sandbox, json=OBJECT)


async def test_a_grammar_is_compiled_once() -> None:
    class Counting:
        jobs = 0

        async def run(self, job: bytes) -> None:
            self.jobs += 1

    counting = Counting()
    grammars = GrammarCheck(counting)  # type: ignore[arg-type]
    for _ in range(3):
        await grammars.check(StructuredOutputsParams(json=OBJECT))
    assert counting.jobs == 1
    await grammars.check(StructuredOutputsParams(regex="a"))
    assert counting.jobs == 2
