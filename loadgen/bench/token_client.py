"""The benchmarks' HTTP client: prompts are token ids, and answers have exactly the asked length."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from types import TracebackType
from typing import Any, Protocol, Self

import aiohttp
import msgspec

from shoal.loadgen.connection_errors import cause

DP_RANK_HEADER = "X-data-parallel-rank"
"""vLLM's header that chooses the engine of a static DP server."""

KEEP_ALIVE_SECONDS = 3.0
"""Less than the 5 s after which the servers close an unused connection."""

COMPLETIONS = "/v1/completions"
ADMIN_PREFIX = "/admin/"

Prompt = Sequence[int]
"""Token ids."""


class RequestFailedError(RuntimeError):
    """A server did not do what it was asked to do; the message is one line."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One generated answer. Times are ``time.perf_counter`` seconds."""

    sent: float
    ended: float
    progress: list[tuple[float, int]] = field(default_factory=list)
    """For each chunk of a stream: when it came, and the number of output tokens until then."""
    unit: str | None = None
    """The engines of the unit where Shoal ran it."""
    layout: str | None = None

    @property
    def first(self) -> float:
        """When the first token came; the end of the answer if it was not streamed."""
        return self.progress[0][0] if self.progress else self.ended


class Stream(Protocol):
    """An answer while it comes. Times are ``time.perf_counter`` seconds."""

    @property
    def times(self) -> Sequence[float]:
        """When each chunk with tokens came."""

    @property
    def tokens(self) -> Sequence[int]:
        """The ids of the output tokens."""

    @property
    def count(self) -> int:
        """How many of them there are."""

    @property
    def unit(self) -> str | None:
        """The engines of the unit where Shoal began to run it."""

    def begin(self, unit: str | None) -> None:
        """Note that the answer has begun, and where."""

    def add(self, now: float, tokens: Sequence[int]) -> None:
        """Note the tokens of a chunk."""


@dataclass(frozen=True, slots=True)
class Scores:
    """A model's log probabilities of a prompt, and its greedy continuation."""

    logprobs: list[float]
    """Log probabilities of the prompt's tokens, except the first."""
    best: list[int]
    """The likeliest token at each of these positions."""
    generated: list[int]


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class Client:
    """Requests to one server that serves one model.

    Args:
        address: base URL.
        model: name to ask for.
        admin: base URL of the admin API, whose paths begin with ``ADMIN_PREFIX``.
    """

    def __init__(self, address: str, model: str, admin: str | None = None) -> None:
        self.address = address
        self.model = model
        self.admin = admin

    async def __aenter__(self) -> Self:
        # Any number of requests may run at once, for any time.
        self._http = aiohttp.ClientSession(
            self.address,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.close()

    async def generate(
        self, prompt: Prompt, tokens: int, *, stream: bool = False, rank: int | None = None
    ) -> Answer:
        """Have exactly ``tokens`` tokens generated greedily, on engine ``rank`` if one is given.

        Raises:
            RequestFailedError: the server cannot be reached, refused, or generated another number
                of tokens.
        """
        body: dict[str, Any] = self._body(prompt, tokens)
        if stream:
            usage = {"include_usage": True, "continuous_usage_stats": True}
            body |= {"stream": True, "stream_options": usage}
        headers = {} if rank is None else {DP_RANK_HEADER: str(rank)}
        progress: list[tuple[float, int]] = []
        sent = time.perf_counter()
        async with self._post(body, headers) as response:
            if stream:
                count = await _read_stream(response, progress)
            else:
                count = _count(await response.read())
            ended = time.perf_counter()
        if count != tokens:
            raise RequestFailedError(f"asked for {tokens} tokens, got {count}")
        unit, layout = (response.headers.get(f"x-shoal-{name}") for name in ("unit", "layout"))
        return Answer(sent, ended, progress, unit, layout)

    async def follow(self, prompt: Prompt, tokens: int, stream: Stream) -> None:
        """Have exactly ``tokens`` tokens generated greedily, and note in ``stream`` as they come.

        Raises:
            RequestFailedError: the server cannot be reached, refused, or generated another number
                of tokens.
        """
        body = self._body(prompt, tokens) | {"stream": True, "return_token_ids": True}
        async with self._post(body, {}) as response:
            stream.begin(response.headers.get("x-shoal-unit"))
            async for now, chunk in _chunks(response):
                if chunk.choices and chunk.choices[0].token_ids:
                    stream.add(now, chunk.choices[0].token_ids)
        if stream.count != tokens:
            raise RequestFailedError(f"asked for {tokens} tokens, got {stream.count}")

    async def token_ids(self, prompt: Prompt, tokens: int) -> list[int]:
        """Return the ids of ``tokens`` tokens that follow a prompt greedily.

        Raises:
            RequestFailedError: the server refused.
        """
        body = self._body(prompt, tokens) | {"return_token_ids": True}
        choice = (await self.call("POST", COMPLETIONS, body))["choices"][0]
        return list(choice["token_ids"])

    async def score(self, prompt: Prompt, tokens: int) -> Scores:
        """Return the log probabilities of a prompt, and ``tokens`` tokens that follow it greedily.

        Raises:
            RequestFailedError: the server refused, or its answer lacks the log probabilities.
        """
        body = self._body(prompt, tokens) | {"prompt_logprobs": 1, "return_token_ids": True}
        choice = (await self.call("POST", COMPLETIONS, body))["choices"][0]
        positions: list[dict[str, dict[str, Any]] | None] | None = choice.get("prompt_logprobs")
        if positions is None or len(positions) != len(prompt):
            raise RequestFailedError("the answer has not the log probabilities of the prompt")
        told = [
            (position, str(token))
            for position, token in zip(positions, prompt, strict=True)
            if position is not None
        ]
        return Scores(
            logprobs=[position[token]["logprob"] for position, token in told],
            best=[
                int(next(t for t, p in position.items() if p["rank"] == 1)) for position, _ in told
            ],
            generated=list(choice["token_ids"]),
        )

    async def call(self, method: str, path: str, body: object = None) -> Any:
        """Return the JSON that a route answers with.

        Raises:
            RequestFailedError: the server cannot be reached, or the status is not 200.
        """
        base = self.admin if path.startswith(ADMIN_PREFIX) and self.admin else ""
        async with self._answer(method, base + path, json=body) as response:
            return await response.json()

    async def text(self, path: str) -> str:
        """Return what a route answers with.

        Raises:
            RequestFailedError: the server cannot be reached, or the status is not 200.
        """
        async with self._answer("GET", path) as response:
            return await response.text()

    async def is_up(self, path: str) -> bool:
        """Return whether a route answers with 200."""
        try:
            async with self._http.get(path) as response:
                return response.status == HTTPStatus.OK
        except aiohttp.ClientError:
            return False

    def _post(
        self, body: dict[str, Any], headers: dict[str, str]
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Give a completion's response; see ``_answer``."""
        return self._answer(
            *("POST", COMPLETIONS),
            data=msgspec.json.encode(body),
            headers={"Content-Type": "application/json", **headers},
        )

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, **request: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Give a route's response, whose status is 200.

        Raises:
            RequestFailedError: there is none, or it breaks off.
        """
        try:
            async with self._http.request(method, path, **request) as response:
                if response.status != HTTPStatus.OK:
                    text = " ".join((await response.text()).split())[:300]
                    url = response.url.path
                    raise RequestFailedError(f"{url} answered {response.status}: {text}")
                yield response
        except aiohttp.ClientError as error:
            raise RequestFailedError(f"no whole answer of {path}: {cause(error)}") from error

    def _body(self, prompt: Prompt, tokens: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
        }


async def _read_stream(response: aiohttp.ClientResponse, progress: list[tuple[float, int]]) -> int:
    """Note when the answer grew; return its number of tokens."""
    count = 0
    async for now, chunk in _chunks(response):
        if chunk.usage is not None and chunk.usage.completion_tokens > count:
            count = chunk.usage.completion_tokens
            progress.append((now, count))
    return count


async def _chunks(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[float, _Chunk]]:
    """Yield the chunks of a stream, each with the time at which it came."""
    async for line in response.content:
        if not line.startswith(b"data: {"):
            continue
        now = time.perf_counter()
        chunk = _decode_chunk(line[len(b"data: ") :])
        if chunk.error is not None:
            raise RequestFailedError(f"the stream ended with {chunk.error.get('message')}")
        yield now, chunk


def _count(body: bytes) -> int:
    usage = _decode_chunk(body).usage
    return usage.completion_tokens if usage is not None else 0
