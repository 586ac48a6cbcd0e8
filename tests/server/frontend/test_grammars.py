"""Grammars compiled by vLLM in the sandbox, with the demo model's vocabulary."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from shoal.server.frontend.grammar_queue import GrammarQueue
from shoal.server.frontend.grammars import MEMORY_BYTES, GrammarCheck, GrammarCompiler
from shoal.server.frontend.sandbox import Sandbox
from shoal.server.options import vllm_options
from shoal.server.options.serve_options import DEMO_CHECKPOINT

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    fields = {"model": str(DEMO_CHECKPOINT), "enforce_eager": True, "dtype": "float32"}
    compiler = GrammarCompiler(vllm_options.make_vllm_config(AsyncEngineArgs(**fields)))
    with Sandbox(compiler, compiler.prepare, memory_bytes=MEMORY_BYTES) as sandbox:
        yield sandbox


def checks(sandbox: Sandbox) -> GrammarCheck:
    return GrammarCheck(GrammarQueue(sandbox.run, cpu_seconds=2, per_caller=20))


def check(sandbox: Sandbox, **constraint: Any) -> None:
    asyncio.run(checks(sandbox).check(None, StructuredOutputsParams(**constraint)))


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
        {"grammar": "root ::= root"},
        {"json": {"$ref": "#"}},
        {"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    ],
    ids=[
        "type",
        "regex",
        "nul",
        "grammar",
        "nested",
        "open",
        "huge enum",
        "endless",
        "ref",
        "refs",
    ],
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
        def __init__(self) -> None:
            self.jobs: list[str | None] = []

        async def run(self, caller: str | None, job: bytes) -> None:
            self.jobs.append(caller)

    counting = Counting()
    grammars = GrammarCheck(counting)  # type: ignore[arg-type]
    for caller in ("a", "b", None):
        await grammars.check(caller, StructuredOutputsParams(json=OBJECT))
    assert counting.jobs == ["a"]
    await grammars.check("b", StructuredOutputsParams(regex="a"))
    assert counting.jobs == ["a", "b"]


async def test_a_small_grammar_is_done_before_another_caller_s_heavy_ones(
    sandbox: Sandbox,
) -> None:
    grammars, ended = checks(sandbox), []

    async def ask(caller: str, name: str, schema: dict[str, Any]) -> None:
        try:
            await grammars.check(caller, StructuredOutputsParams(json=schema))
            ended.append(f"{name} is good")
        except VLLMValidationError as error:
            ended.append(f"{name}: {error}")

    heavy = [{"enum": [f"{which} {k}" for k in range(200_000)]} for which in range(3)]
    requests = [ask("greedy", "heavy", schema) for schema in heavy]
    await asyncio.gather(*requests, ask("modest", "small", OBJECT))
    first, *others = ended
    assert first == "small is good"
    assert len(others) == 3
    assert all("heavy: it took more than 2 s" in other for other in others)
