"""Large answers in pieces: the bytes of vLLM's own, made by threads and not by the event loop."""

import threading
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Request
from starlette.background import BackgroundTask
from starlette.responses import JSONResponse, Response
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import (
    CompletionResponse,
    CompletionResponseChoice,
)
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.openai.responses.utils import build_response_output_items
from vllm.entrypoints.serve.engine.protocol import ErrorResponse, UsageInfo
from vllm.logprobs import Logprob

from shoal.server.gate.bodies import DecodedBodyRouter
from shoal.server.gate.logprob_answers import (
    LARGE_VALUES,
    PIECE_VALUES,
    encode_off_loop,
    hand_over_response,
)
from tests.turns import counted_turns

WIDTH = 5
MANY = LARGE_VALUES // WIDTH
"""Tokens of a large answer."""
TEXTS = ("a", "é", '"\n', "", "wider")


def logprobs(tokens: int) -> list[Any]:
    """Return the engine's values: for each token itself and four others; one has none at all."""
    return [
        None
        if at == 7
        else {
            (at + i) % 50: Logprob(
                -float(i) / 3 if i else float("-inf"), i + 1, TEXTS[(at + i) % 5]
            )
            for i in range(WIDTH)
        }
        for at in range(tokens)
    ]


def ids(tokens: int) -> list[int]:
    return [at % 50 for at in range(tokens)]


def prompt(tokens: int) -> list[Any]:
    values = logprobs(tokens)
    for entry in values:
        for value in (entry or {}).values():
            value.logprob = max(value.logprob, -9999.0)
    return [None, *values[1:]]


class Recorder:
    """Where log probabilities were made: the thread, and for how many tokens at once."""

    dump: ClassVar[dict[str, Any]] = {}
    """How the route dumps an answer."""

    def __init__(self) -> None:
        self.made: list[tuple[int, int]] = []
        self.return_tokens_as_token_ids = False
        self.tokenizer = SimpleNamespace(decode=lambda token: f"<{token}>")

    def see(self, token_ids: Any) -> None:
        if len(token_ids):  # an empty one stands for what is made later
            self.made.append((threading.get_ident(), len(token_ids)))


class Chat(Recorder):
    """vLLM's way from the engine's values to log probabilities of a chat, and an answer of them."""

    _get_top_logprobs = OpenAIServingChat._get_top_logprobs
    _get_decoded_token = staticmethod(OpenAIServingChat._get_decoded_token)

    def _create_chat_logprobs(self, **given: Any) -> Any:
        self.see(given["token_ids"])
        return OpenAIServingChat._create_chat_logprobs(self, **given)

    async def create(self, request: Any, raw_request: Any = None) -> Any:
        choices = [
            ChatCompletionResponseChoice(
                index=index,
                message=ChatMessage(role="assistant", content="é"),
                logprobs=self._create_chat_logprobs(
                    token_ids=ids(request.tokens),
                    top_logprobs=logprobs(request.tokens),
                    num_output_top_logprobs=WIDTH - 1,
                    tokenizer=self.tokenizer,
                )
                if request.logprobs
                else None,
            )
            for index in range(2)
        ]
        return ChatCompletionResponse(
            model="m",
            id="1",
            created=1,
            choices=choices,
            usage=UsageInfo(),
            prompt_logprobs=prompt(request.prompt) if request.prompt else None,
        )


class Completion(Recorder):
    """The same for text completions."""

    _get_decoded_token = staticmethod(OpenAIServingCompletion._get_decoded_token)

    def _create_completion_logprobs(self, **given: Any) -> Any:
        self.see(given["token_ids"])
        return OpenAIServingCompletion._create_completion_logprobs(self, **given)

    async def create(self, request: Any, raw_request: Any = None) -> Any:
        choices = [
            CompletionResponseChoice(
                index=index,
                text="é",
                logprobs=self._create_completion_logprobs(
                    token_ids=ids(request.tokens),
                    top_logprobs=logprobs(request.tokens),
                    num_output_top_logprobs=WIDTH - 1,
                    tokenizer=self.tokenizer,
                )
                if request.logprobs
                else None,
                prompt_logprobs=prompt(request.prompt) if request.prompt else None,
            )
            for index in range(2)
        ]
        return CompletionResponse(model="m", id="1", created=1, choices=choices, usage=UsageInfo())


class Responses(Recorder):
    """The same for the Responses API: an answer is one text, perhaps after a call of a tool."""

    dump: ClassVar = {"mode": "json", "by_alias": True}
    _topk_logprobs = OpenAIServingResponses._topk_logprobs
    _get_decoded_token = staticmethod(OpenAIServingResponses._get_decoded_token)

    def __init__(self) -> None:
        super().__init__()
        self.stored: list[Any] = []

    def _create_response_logprobs(self, **given: Any) -> Any:
        self.see(given["token_ids"])
        return OpenAIServingResponses._create_response_logprobs(self, **given)

    async def create(self, request: Any, raw_request: Any = None) -> Any:
        values = self._create_response_logprobs(
            token_ids=ids(request.tokens),
            logprobs=[entry or logprobs(58)[57] for entry in logprobs(request.tokens)],
            tokenizer=self.tokenizer,
            top_logprobs=WIDTH - 1,
        )
        text = None if request.reasoned else "é"
        made = ResponsesResponse(
            **{"id": "1", "created_at": 1, "model": "m", "temperature": 1.0, "top_p": 1.0},
            **{"parallel_tool_calls": True, "tool_choice": "auto", "tools": []},
            **{"background": False, "max_output_tokens": 9, "service_tier": "auto"},
            **{"status": "completed", "truncation": "disabled"},
            output=build_response_output_items("hm", text, None, values),
        )
        for item in made.output:
            item.id = "same"
        self.stored.append(made)
        return made


CALLS = {Chat: "_create_chat_logprobs", Completion: "_create_completion_logprobs"}


def asked(tokens: int = 0, prompt: int = 0, *, stream: bool = False) -> Any:
    return SimpleNamespace(tokens=tokens, prompt=prompt, logprobs=tokens > 0, stream=stream)


class Served:
    """A route like vLLM's over a serving object, in the application's router."""

    def __init__(self, serving: Any, request: Any) -> None:
        self.ended: list[str] = []
        router = APIRouter()

        async def answer(raw_request: Request) -> Response:
            made = await serving.create(request, raw_request)
            ended = BackgroundTask(self.ended.append, "ended")
            return JSONResponse(
                made.model_dump(**serving.dump), headers={"x-more": "1"}, background=ended
            )

        router.add_api_route("/x", answer, methods=["POST"])
        served = DecodedBodyRouter()
        served.include_router(router)
        self.app = FastAPI()
        self.app.include_router(served)

    def client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=self.app)
        return httpx.AsyncClient(transport=transport, base_url="http://shoal")


@pytest.fixture(params=[Chat, Completion])
def serving(request: pytest.FixtureRequest) -> Any:
    made = request.param()
    encode_off_loop(made, "create", CALLS[request.param])
    return made


@pytest.mark.parametrize(
    "request_of",
    [asked(MANY), asked(MANY, 3), asked(3, MANY), asked(0, MANY), asked(3 * MANY, 2 * MANY)],
)
async def test_a_large_answer_has_the_bytes_of_vllms_own(serving: Any, request_of: Any) -> None:
    stock = JSONResponse((await type(serving)().create(request_of)).model_dump())
    served = Served(serving, request_of)
    async with served.client() as http:
        response = await http.post("/x")
    assert response.content == stock.body
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    assert response.headers["x-more"] == "1"
    assert "content-length" not in response.headers
    assert served.ended == ["ended"]


async def test_a_small_answer_is_vllms_own_response(serving: Any) -> None:
    request = asked(20, 20)
    stock = JSONResponse((await type(serving)().create(request)).model_dump())
    async with Served(serving, request).client() as http:
        response = await http.post("/x")
    assert response.content == stock.body
    assert response.headers["content-length"] == str(len(stock.body))


async def test_a_large_answer_is_made_in_small_pieces_by_no_event_loop(serving: Any) -> None:
    async with Served(serving, asked(3 * MANY)).client() as http:
        await http.post("/x")
    assert threading.get_ident() not in {thread for thread, _ in serving.made}
    assert max(tokens for _, tokens in serving.made) <= PIECE_VALUES // WIDTH
    assert sum(tokens for _, tokens in serving.made) == 2 * 3 * MANY


async def test_the_loop_has_a_turn_between_two_pieces(serving: Any) -> None:
    async with counted_turns() as turns, Served(serving, asked(3 * MANY)).client() as http:
        await http.post("/x")
    assert turns.count >= 2 * 3 * LARGE_VALUES // PIECE_VALUES


async def test_a_stream_and_an_error_are_left_alone(serving: Any) -> None:
    raw = SimpleNamespace(scope={})
    await serving.create(asked(MANY, stream=True), raw)
    assert [tokens for _, tokens in serving.made] == [MANY, MANY]
    error = ErrorResponse.model_construct()

    async def fail(request: Any, raw_request: Any = None) -> Any:
        return error

    failing = SimpleNamespace(create=fail, make=lambda **_: None)
    encode_off_loop(failing, "create", "make")
    assert await failing.create(asked(MANY), raw) is error
    assert raw.scope == {}


# --- the Responses API ---


def asked_response(tokens: int, **more: bool) -> Any:
    wanted = {"stream": False, "background": False, "store": False, "reasoned": False} | more
    return SimpleNamespace(tokens=tokens, **wanted)


@pytest.fixture
def responses() -> Responses:
    made = Responses()
    call = "_create_response_logprobs"
    encode_off_loop(made, "create", call, "logprobs", hand_over_response)
    return made


@pytest.mark.parametrize("tokens", [20, MANY, 3 * MANY])
async def test_a_response_has_the_bytes_of_vllms_own(responses: Responses, tokens: int) -> None:
    request = asked_response(tokens)
    stock = JSONResponse((await Responses().create(request)).model_dump(**Responses.dump))
    async with Served(responses, request).client() as http:
        response = await http.post("/x")
    assert response.content == stock.body
    assert ("content-length" in response.headers) == (tokens == 20)


async def test_a_large_response_is_made_in_small_pieces_by_no_event_loop(
    responses: Responses,
) -> None:
    async with Served(responses, asked_response(3 * MANY)).client() as http:
        await http.post("/x")
    assert threading.get_ident() not in {thread for thread, _ in responses.made}
    assert max(tokens for _, tokens in responses.made) <= PIECE_VALUES // WIDTH
    assert sum(tokens for _, tokens in responses.made) == 3 * MANY


@pytest.mark.parametrize("more", ["store", "background", "stream"])
async def test_a_response_that_is_read_otherwise_is_whole(responses: Responses, more: str) -> None:
    raw = SimpleNamespace(scope={})
    made = await responses.create(asked_response(MANY, **{more: True}), raw)
    assert len(made.output[-1].content[0].logprobs) == MANY
    assert responses.stored == [made]
    assert raw.scope == {}


async def test_a_response_without_a_text_has_no_log_probabilities(responses: Responses) -> None:
    request = asked_response(MANY, reasoned=True)
    stock = JSONResponse((await Responses().create(request)).model_dump(**Responses.dump))
    async with Served(responses, request).client() as http:
        assert (await http.post("/x")).content == stock.body
