"""The embedded default as a newcomer meets it: ``shoal serve`` with two real engines on CPUs."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from shoal.loadgen.workload import Arrival
from shoal.runtime.simulation.node_settings import Node
from shoal.runtime.simulation.shape_files import read_hardware, read_shape
from shoal.runtime.simulation.simulated_node import simulate
from tests.server.node import ServedNode, served_node, told_of_work

MODEL = "shoal-demo"
MESSAGES = [{"role": "user", "content": "Tell me about the sea."}]
ALONE = [[0], [1]]
TOGETHER = [[0, 1]]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def node(cache: Path) -> Iterator[ServedNode]:
    # So small a model would fill a JSON text with white space.
    compact = json.dumps({"backend": "xgrammar", "disable_any_whitespace": True})
    # vLLM's tool parser logs an error when a call is cut off.
    with served_node(
        cache,
        *("--structured-outputs-config", compact),
        real=True,
        fresh=True,
        VLLM_LOGGING_LEVEL="CRITICAL",
    ) as served:
        yield served


@pytest.fixture
def http(node: ServedNode) -> Iterator[httpx.Client]:
    with node.client() as client:
        yield client


@pytest.fixture
def client(node: ServedNode) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{node.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(params=[ALONE, TOGETHER], ids=["dp", "tp2"])
def layout(request: pytest.FixtureRequest, http: httpx.Client) -> str:
    """Each layout in turn; returns its name."""
    switch(http, request.param)
    return "dp" if request.param == ALONE else "tp2"


def switch(http: httpx.Client, units: list[list[int]], preempt: str = "sequential") -> None:
    answer = http.post("/admin/layout", json={"units": units, "preempt": preempt})
    assert answer.status_code == 200, answer.text


def test_the_start_is_told_by_phase_and_without_a_warning(node: ServedNode) -> None:
    text = "\n".join(node.lines)
    for phase in ("imports", "engine 0 up", "weights", "tp2 views", "front end up", "ready after"):
        assert phase in text
    assert "warn" not in text.lower()
    assert "Triton" not in text, "vLLM warns of it as it is imported, before it has a log level"


def test_a_chat_completion_is_streamed(client: openai.OpenAI, layout: str) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=16, temperature=0, stream=True
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_the_demo_model_answers_in_readable_english(client: openai.OpenAI, layout: str) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
    ).choices[0]
    assert answer.message.content == "The capital of France is Paris."
    assert answer.finish_reason == "stop"


def test_layouts_answer_alike(http: httpx.Client, client: openai.OpenAI) -> None:
    texts = {}
    for name, units in {"dp": ALONE, "tp2": TOGETHER}.items():
        switch(http, units)
        answer = client.completions.with_raw_response.create(
            model=MODEL, prompt="The sea", max_tokens=48, temperature=0
        )
        assert answer.headers["x-shoal-layout"] == name
        texts[name] = answer.parse().choices[0].text
    assert texts["dp"] == texts["tp2"]


def test_logprobs_come_with_the_tokens(client: openai.OpenAI, layout: str) -> None:
    choice = client.completions.create(
        model=MODEL, prompt="The sea", max_tokens=4, temperature=0, logprobs=3, echo=True
    ).choices[0]
    assert choice.text.startswith("The sea")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert len(choice.logprobs.tokens) > 4
    assert choice.logprobs.token_logprobs is not None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:] if value is not None)


def test_a_seed_repeats_a_sample(client: openai.OpenAI, layout: str) -> None:
    def sample(seed: int) -> str:
        answer = client.completions.create(
            model=MODEL, prompt="The sea", max_tokens=24, temperature=1.0, seed=seed
        )
        return answer.choices[0].text

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_several_choices_differ(client: openai.OpenAI, layout: str) -> None:
    answer = client.completions.create(
        # The model is sure of itself: at a lower temperature the choices may well be one.
        model=MODEL,
        prompt="The sea",
        max_tokens=16,
        temperature=2.0,
        top_p=1.0,
        n=3,
    )
    assert len({choice.text for choice in answer.choices}) == 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 48


def schema_of(name: str) -> dict[str, object]:
    """Return the schema of an object with one number of up to two digits."""
    return {
        "type": "object",
        "properties": {name: {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": [name],
        "additionalProperties": False,
    }


def test_output_follows_a_json_schema(client: openai.OpenAI, layout: str) -> None:
    schema = schema_of("size")
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=64,
        temperature=0,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "size", "schema": schema, "strict": True},
        },
    )
    content = json.loads(answer.choices[0].message.content or "")
    assert set(content) == {"size"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{"allowed_token_ids": [5, 6]}, {"bad_words": ["a"]}])
def test_a_grammar_of_which_no_token_is_left_is_a_400(
    client: openai.OpenAI, layout: str, fields: dict[str, Any], stream: bool
) -> None:
    extra = {"structured_outputs": {"choice": ["a"]}, **fields}
    with pytest.raises(openai.APIError, match="allows no token"):
        list(
            client.completions.create(
                model=MODEL, prompt="x", max_tokens=4, stream=stream, extra_body=extra
            )
        )


def test_a_named_tool_is_called(client: openai.OpenAI, layout: str) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "depth",
            "description": "Depth of a sea",
            "strict": True,
            "parameters": schema_of("metres"),
        },
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=64,
        temperature=0,
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "depth"}},
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "depth"
    assert 0 <= json.loads(call.function.arguments)["metres"] <= 99


def test_the_responses_route_answers(client: openai.OpenAI, layout: str) -> None:
    answer = client.responses.create(
        model=MODEL, input="The sea", max_output_tokens=8, temperature=0
    )
    assert answer.usage is not None
    assert answer.usage.output_tokens == 8


def test_streams_are_the_same_while_the_layout_is_switched_25_times(
    node: ServedNode, http: httpx.Client
) -> None:
    switch(http, ALONE)
    assert asyncio.run(_streams_under_switches(node)) >= 25
    audit = http.post("/admin/audit").json()
    assert audit["problems"] == []


STREAMED = 100
"""Tokens of a stream: about three come between two switches."""


async def _streams_under_switches(node: ServedNode) -> int:
    """Stream four requests, then again under switches until done; return the switches."""
    async with (
        openai.AsyncOpenAI(base_url=f"{node.url}/v1", api_key="none", max_retries=0) as client,
        node.async_client() as admin,
    ):

        async def stream(number: int) -> list[str]:
            chunks = await client.completions.create(
                model=MODEL,
                prompt=f"Sea number {number}: " * 4,
                max_tokens=STREAMED,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            return [chunk.choices[0].text async for chunk in chunks]

        undisturbed = await asyncio.gather(*(stream(number) for number in range(4)))
        running = [asyncio.create_task(stream(number)) for number in range(4)]
        switches = 0
        while switches < 25 or not all(task.done() for task in running):
            units = TOGETHER if switches % 2 == 0 else ALONE
            answer = await admin.post("/admin/layout", json={"units": units, "preempt": "hard"})
            assert answer.status_code == 200, answer.text
            switches += 1
            # A token of a request of the layout at hand: every layout gets to work.
            await client.completions.create(model=MODEL, prompt="A wave", max_tokens=1)
        assert ["".join(await task) for task in running] == ["".join(text) for text in undisturbed]
        return switches


PROMPT, OUTPUT = 40, 48
"""Tokens of requests that come together and run for long beside the time they come in."""


def test_the_simulator_places_requests_where_the_server_does(
    node: ServedNode, http: httpx.Client, layout: str
) -> None:
    asyncio.run(_burst(node, 1))  # so that the first request of this length is not a slow one
    served = asyncio.run(_burst(node, 8))
    simulated = simulate(
        Node(read_shape("shoal-demo"), read_hardware("cpu-2core"), engines=2, max_group=2),
        {"dp": "static-dp", "tp2": "static-tp"}[layout],
        [Arrival(0.0, PROMPT, OUTPUT) for _ in range(8)],
    )
    units = Counter(",".join(map(str, life.units[0].engines)) for life in simulated.lives)
    assert Counter(answer.headers["x-shoal-unit"] for answer in served) == units
    assert [answer.json()["usage"]["completion_tokens"] for answer in served] == [OUTPUT] * 8
    assert [life.tokens for life in simulated.lives] == [OUTPUT] * 8


async def _burst(node: ServedNode, count: int) -> list[httpx.Response]:
    """Send requests all at once; return the answers."""
    body = {"model": MODEL, "prompt": [5] * PROMPT, "max_tokens": OUTPUT, "ignore_eos": True}
    async with node.async_client() as client:
        return await asyncio.gather(
            *(client.post("/v1/completions", json=body) for _ in range(count))
        )


def test_an_interrupt_ends_every_process(node: ServedNode) -> None:
    """Last: it ends the node."""
    # What the tests before this one made it do; and on a slow machine an engine may end late.
    said = ("controller: switch ", "shoal: killed what did not end within 5 s: engine")
    output = node.stop()
    left = [line for line in output if not line.startswith(said) and not told_of_work(line)]
    assert left == []
    assert node.process.returncode == 0
    assert node.leftovers() == []
