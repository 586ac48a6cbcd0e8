"""Anthropic's Messages API: with Anthropic's own client, and what stands before vLLM's routes."""

import json
import logging
import signal
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from shoal.server.errors import error_response
from shoal.server.frontend.anthropic_messages import (
    MessagesErrorMiddleware,
    check_messages,
    tell_errors,
)
from shoal.server.gate.bounds import DEFAULTS, BoundsError
from tests.server.node import ServedNode, key_file, served_node

MODEL = "shoal-demo"
HELLO: Any = [{"role": "user", "content": "Hello"}]
TOOL: Any = {
    "name": "depth",
    "description": "Depth of a sea",
    "input_schema": {"type": "object", "properties": {"sea": {"type": "string"}}},
}
KEYS: list[str | dict[str, Any]] = [
    "tenant",
    {"key": "slow", "name": "slow", "requests_per_minute": 1},
]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    folder = tmp_path_factory.mktemp("node")
    keys = key_file(folder / "keys.json", *KEYS)
    admin = key_file(folder / "admin.json", "operator")
    with served_node(
        folder,
        *("--api-key-file", str(keys), "--admin-key-file", str(admin), "--max-model-len", "512"),
        *("--max-choices", "4", "--metrics", "open"),
    ) as served:
        yield served


@pytest.fixture
def client(node: ServedNode) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=node.url, api_key="tenant", max_retries=0) as client:
        yield client


# --- Anthropic's client ---


def test_a_message(client: anthropic.Anthropic) -> None:
    raw = client.messages.with_raw_response.create(
        model=MODEL,
        max_tokens=8,
        messages=HELLO,
        system="Be brief.",
        extra_headers={"x-vllm-priority": "7"},
    )
    message = raw.parse()
    assert message.role == "assistant"
    assert [block.type for block in message.content] == ["text"]
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 8
    assert raw.headers["x-shoal-unit"] in ("0", "1")
    assert raw.headers["x-shoal-layout"] == "dp"
    assert raw.headers["x-shoal-priority"] == "7"


def test_a_streamed_message_says_the_same(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 12, "messages": HELLO}
    (whole,) = client.messages.create(**asked).content
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
        assert stream.response.headers["x-shoal-unit"] in ("0", "1")
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert final.content[0].to_dict() == whole.to_dict()
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 12


def test_tokens_are_counted_as_the_message_has_them(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO, tools=[TOOL])
    message = client.messages.create(model=MODEL, messages=HELLO, tools=[TOOL], max_tokens=1)
    assert counted.input_tokens == message.usage.input_tokens > 10
    alone = client.messages.count_tokens(model=MODEL, messages=HELLO)
    assert alone.input_tokens < counted.input_tokens


def test_a_conversation_with_tools_and_their_results(client: anthropic.Anthropic) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "depth", "input": {"sea": "Black"}}
    result = [{"type": "text", "text": "2212 m"}]
    talk: Any = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": result}],
        },
    ]
    for choice in ({"type": "auto"}, {"type": "none"}):
        message = client.messages.create(
            model=MODEL,
            messages=talk,
            tools=[TOOL],
            tool_choice=choice,  # type: ignore[arg-type]
            max_tokens=4,
        )
        assert message.usage.output_tokens == 4
    longer = client.messages.count_tokens(model=MODEL, messages=talk, tools=[TOOL])
    shorter = client.messages.count_tokens(model=MODEL, messages=talk[:1], tools=[TOOL])
    assert longer.input_tokens > shorter.input_tokens


def shape_of(error: anthropic.APIStatusError) -> str:
    body = error.body
    assert isinstance(body, dict)
    assert set(body) == {"type", "error"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    return str(body["error"]["message"])


def test_errors_are_anthropics(node: ServedNode, client: anthropic.Anthropic) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 1, "messages": HELLO}
    image = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}
    for wrong, part in (
        ({"max_tokens": 0}, "max_tokens"),  # FastAPI's
        ({"messages": [{"role": "user", "content": [image]}]}, "image is not supported"),  # bounds'
        ({"messages": [{"role": "user", "content": "x " * 600}]}, "512"),  # vLLM's
        ({"extra_headers": {"x-vllm-priority": "high"}}, "X-Vllm-Priority"),  # the middleware's
    ):
        with pytest.raises(anthropic.BadRequestError) as refused:
            client.messages.create(**{**asked, **wrong})
        assert part in shape_of(refused.value)
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**{**asked, "model": "other"})
    assert "other" in shape_of(missing.value)
    stranger = anthropic.Anthropic(base_url=node.url, api_key="stranger", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as unknown:
        stranger.messages.count_tokens(model=MODEL, messages=HELLO)
    assert "API key" in shape_of(unknown.value)


def test_a_key_s_limits_hold(node: ServedNode) -> None:
    slow = anthropic.Anthropic(base_url=node.url, auth_token="slow", max_retries=0)
    slow.messages.create(model=MODEL, messages=HELLO, max_tokens=1)
    with pytest.raises(anthropic.RateLimitError) as refused:
        slow.messages.create(model=MODEL, messages=HELLO, max_tokens=1)
    assert "slow" in shape_of(refused.value)
    assert int(refused.value.response.headers["retry-after"]) > 0


def test_a_stream_that_fails_ends_with_the_reason_and_the_log_has_no_clients_mistake(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("node")
    options = ("--fake-step-ms", "20", "--max-model-len", "512", "--shutdown-timeout", "1")
    with served_node(folder, *options) as node:
        client = anthropic.Anthropic(base_url=node.url, api_key="none", max_retries=0)
        with pytest.raises(anthropic.BadRequestError, match="empty conversation"):
            client.messages.create(model=MODEL, messages=[], max_tokens=1)
        grammar = {"model": MODEL, "structured_outputs": {"regex": "a("}, "stream": True}
        for path, field in (
            ("chat/completions", "messages"),
            ("completions", "prompt"),
            ("responses", "input"),
        ):
            for mistake, status in (({"model": "none"}, 404), (grammar, 400)):
                body = {field: HELLO if field == "messages" else "x", **mistake}
                asked = httpx.post(f"{node.url}/v1/{path}", json=body, timeout=60)
                assert asked.status_code == status, path
        seen: list[str] = []

        def read() -> None:
            with client.messages.stream(model=MODEL, messages=HELLO, max_tokens=400) as stream:
                for event in stream:
                    if event.type == "text" and "text" not in seen:
                        node.process.send_signal(signal.SIGINT)
                    seen.append(event.type)

        with pytest.raises(anthropic.APIStatusError) as failed:
            read()
        assert "shutting down" in shape_of(failed.value)
        assert "message_stop" not in seen
        printed = "\n".join(node.wait())
        assert "Traceback" not in printed
        assert "Error with model" not in printed


# --- bodies ---


def checked(**fields: Any) -> dict[str, Any]:
    bounds = replace(DEFAULTS, messages=3, tools=2, stops=2, stop_chars=6, grammar_bytes=400)
    return check_messages(json.dumps(fields).encode(), bounds)


def said(*blocks: Any) -> list[Any]:
    return [{"role": "user", "content": list(blocks)}]


def result(*blocks: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "x", "content": list(blocks)}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": HELLO, "system": [{"type": "text", "text": "x"}], "stop_sequences": ["a"]},
        {"messages": said({"type": "thinking", "thinking": "x"}, {"type": "text", "text": "x"})},
        {"messages": said(result({"type": "text", "text": "x"})), "tools": [TOOL, TOOL]},
        {"messages": HELLO, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "depth"}},
        {"messages": HELLO, "tools": [{**TOOL, "type": "custom"}], "metadata": {"user_id": "x"}},
        {"messages": [], "system": 7, "tools": None, "stop_sequences": 7},
        {"messages": [7, {"content": [7]}], "system": [7]},
    ],
)
def test_what_is_served_passes(fields: dict[str, Any]) -> None:
    assert checked(**fields) == fields


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("messages", {"messages": HELLO * 4}),
        ("messages", {"messages": said({"type": "image", "source": {}})}),
        ("messages", {"messages": said({"type": "document", "source": {}})}),
        ("messages.content", {"messages": said(result({"type": "image", "source": {}}))}),
        ("messages.content", {"messages": said(result({"type": "search_result"}))}),
        (
            "messages",
            {
                "messages": said(
                    *[{"type": "tool_addition", "tool": {"definition": {**TOOL, "x": "y" * 150}}}]
                    * 2
                )
            },
        ),
        ("system", {"system": [{"type": "image", "source": {}}]}),
        ("tools", {"tools": [TOOL] * 3}),
        ("tools", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ("stop_sequences", {"stop_sequences": ["a", "b", "c"]}),
        ("stop_sequences", {"stop_sequences": ["x" * 7]}),
        ("output_config", {"output_config": {"format": {"schema": {"x": "y" * 400}}}}),
        ("vllm_xargs", {"vllm_xargs": {"x": 1}}),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(BoundsError) as refused:
        checked(**fields)
    assert refused.value.param == param


def test_what_would_be_an_image_in_a_chat_is_text_here() -> None:
    bounds = replace(DEFAULTS, prompt_tokens=1, images=True)
    body = json.dumps({"messages": [said({"type": "image_url"}), "x" * 40]}).encode()
    with pytest.raises(BoundsError, match="characters"):
        check_messages(body, bounds)


# --- errors ---


async def answered(answer: Response, path: str = "/v1/messages") -> httpx.Response:
    async def endpoint(request: Request) -> Response:
        return answer

    routes = [Route("/{path:path}", endpoint, methods=["POST"])]
    app = MessagesErrorMiddleware(Starlette(routes=routes), ["/v1/messages"])
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://shoal") as http:
        return await http.post(path)


async def test_an_error_changes_its_shape_and_keeps_its_headers() -> None:
    response = await answered(error_response(503, "later", {"Retry-After": "9"}, param="n"))
    assert response.status_code == 503
    assert response.headers["retry-after"] == "9"
    assert response.json() == {
        "type": "error",
        "error": {"type": "ServiceUnavailableError", "message": "later"},
    }


@pytest.mark.parametrize(
    "answer",
    [
        JSONResponse({"type": "error", "error": {"type": "x", "message": "vLLM's own"}}, 400),
        PlainTextResponse("no JSON", 500),
        JSONResponse({"error": "another shape"}, 400),
        JSONResponse([1], 400),
        JSONResponse({"error": {"message": "m", "type": "t"}}, 200),
    ],
)
async def test_what_is_no_error_of_ours_stays_as_it_is(answer: Response) -> None:
    assert (await answered(answer)).content == answer.body


async def test_errors_of_other_routes_stay_openais() -> None:
    answer = error_response(400, "no")
    assert (await answered(answer, "/v1/completions")).content == answer.body


async def test_a_stream_is_passed_on_as_it_comes() -> None:
    answer = StreamingResponse(iter(["event: a\n\n", "event: b\n\n"]), media_type="text/x")
    assert (await answered(answer)).text == "event: a\n\nevent: b\n\n"


async def test_an_error_in_a_stream_is_told_instead_of_converted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def chat() -> AsyncGenerator[str, None]:
        yield "data: one\n\n"
        yield 'data: {"error": {"message": "it died", "type": "T", "param": null, "code": 500}}\n\n'
        yield "data: [DONE]\n\n"

    async def convert(chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        async for chunk in chunks:
            yield f"event: {chunk}"

    with caplog.at_level(logging.DEBUG):
        events = [event async for event in tell_errors(convert)(chat())]
    assert events[0] == "event: data: one\n\n"
    told = {"type": "error", "error": {"type": "T", "message": "it died"}}
    assert events[1:] == [f"event: error\ndata: {json.dumps(told)}\n\n"]
    assert caplog.text == ""
