"""The load generator's client of an OpenAI-compatible server."""

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from shoal.loadgen.connection_errors import cause
from shoal.loadgen.exchange import Exchange, Outcome, outcome_of_status
from shoal.loadgen.stream import EventStream, StreamError
from shoal.loadgen.workload import Arrival, Message

PRIORITY_HEADER = "X-Vllm-Priority"
DEADLINE_HEADER = "x-shoal-deadline-ms"
LAYOUT_HEADER = "x-shoal-layout"
KEEP_ALIVE_SECONDS = 3.0
"""How long an unused connection is kept: less than uvicorn's 5 s, so that no request is sent on a
connection that the server is closing."""
QUESTION_TIMEOUT_SECONDS = 10.0
"""Timeout of all requests except completions."""
_SHOWN = 200
"""How many characters of a server's error message are kept."""

Prompt = str | list[int] | tuple[Message, ...]
"""Text, token ids, or the messages of a chat."""


class ClientError(Exception):
    """The server cannot be used in the way that was asked for; the message is one line."""


class Endpoint(enum.StrEnum):
    """The route that the load goes to."""

    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        """Path of the route."""
        return "/v1/chat/completions" if self is Endpoint.CHAT else "/v1/completions"


@dataclass(frozen=True, slots=True)
class Settings:
    """How the server is spoken to."""

    base_url: str
    """With or without ``/v1`` at its end."""
    endpoint: Endpoint = Endpoint.COMPLETIONS
    api_key: str | None = None
    extensions: bool = True
    """Whether to send fields that OpenAI's API lacks: ``ignore_eos`` and the priority header."""
    deadline_ms: int | None = None
    timeout_seconds: float = 600.0
    """Timeout of a whole response."""
    admin_url: str | None = None
    """Base URL of Shoal's admin API; None: the same as ``base_url``."""
    admin_key: str | None = None


class Client:
    """Connections to one server. Use as an asynchronous context manager.

    Any number of requests may run at once; none waits for a connection.

    Args:
        settings: how to speak to the server.
        now: returns the time in seconds, for all times of exchanges.
    """

    def __init__(self, settings: Settings, now: Callable[[], float]) -> None:
        self.settings = settings
        self.model = ""
        """Name to ask for; ``find_model`` sets it."""
        self._now = now
        self._url = settings.base_url.rstrip("/").removesuffix("/v1").rstrip("/")
        self._admin_url = (settings.admin_url or self._url).rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        headers = {"Accept-Encoding": "identity"}
        if self.settings.api_key is not None:
            headers["Authorization"] = f"Bearer {self.settings.api_key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=QUESTION_TIMEOUT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._open.close()

    @property
    def _open(self) -> aiohttp.ClientSession:
        assert self._session is not None, "use the client as a context manager"
        return self._session

    # --- questions --------------------------------------------------------------------------------

    async def find_model(self, wanted: str | None = None) -> str:
        """Set ``model`` to the wanted one, or else to the first that the server names.

        Raises:
            ClientError: the server does not answer, or names no model.
        """
        if wanted is not None:
            self.model = wanted
            return wanted
        answer = await self.ask("GET", "/v1/models")
        models = answer.get("data") if isinstance(answer, dict) else None
        if not models:
            raise ClientError(f"{self._url}/v1/models names no model: say which with --model")
        self.model = str(models[0]["id"])
        return self.model

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Return the JSON that a route answers with.

        Raises:
            ClientError: there is no answer, or one with another status than 200.
        """
        return _decode(self._url + path, await self.ask_text(method, path, body))

    async def ask_admin(self, path: str) -> Any:
        """Return the JSON with which the admin API answers a GET.

        Raises:
            ClientError: see ``ask``.
        """
        url, key = self._admin_url + path, self.settings.admin_key
        headers = None if key is None else {"Authorization": f"Bearer {key}"}
        return _decode(url, await self._ask(url, "GET", headers=headers))

    async def ask_text(self, method: str, path: str, body: Any = None) -> str:
        """Return what a route answers with, as text.

        Raises:
            ClientError: see ``ask``.
        """
        return await self._ask(self._url + path, method, json=body)

    async def _ask(self, url: str, method: str, **request: Any) -> str:
        try:
            async with self._open.request(method, url, **request) as response:
                text = await response.text()
        except TimeoutError as error:
            raise ClientError(f"{url} did not answer in {QUESTION_TIMEOUT_SECONDS:g} s") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise ClientError(f"cannot reach {url}: {cause(error)}") from error
        if response.status != 200:
            raise ClientError(f"{url} answered {response.status}: {_shorten(text)}")
        return text

    # --- load -------------------------------------------------------------------------------------

    def body(self, prompt: Prompt, output_tokens: int) -> bytes:
        """Return the body of a request for so many tokens, greedily decoded and streamed."""
        fields: dict[str, Any] = {
            "model": self.model,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.settings.endpoint is Endpoint.CHAT:
            messages = prompt if isinstance(prompt, tuple) else (Message("user", str(prompt)),)
            fields["messages"] = [message._asdict() for message in messages]
            fields["max_completion_tokens"] = output_tokens
        else:
            fields["prompt"] = prompt
            fields["max_tokens"] = output_tokens
        if self.settings.extensions:
            fields["ignore_eos"] = True
        return msgspec.json.encode(fields)

    def headers(self, arrival: Arrival) -> dict[str, str]:
        """Return the headers of a request."""
        headers = {"Content-Type": "application/json"}
        if self.settings.extensions and arrival.priority:
            headers[PRIORITY_HEADER] = str(arrival.priority)
        if self.settings.deadline_ms is not None:
            headers[DEADLINE_HEADER] = str(self.settings.deadline_ms)
        return headers

    async def send(self, exchange: Exchange, body: bytes, start: float = 0.0) -> None:
        """Send a request, read its response, and note the result in the exchange.

        This never raises an exception; a cancelled call leaves the outcome ``CANCELLED``.

        Args:
            exchange: the request's exchange.
            body: see ``body``.
            start: the time from which the exchange's times count.
        """
        exchange.sent = self._now() - start
        try:
            async with self._open.post(
                self._url + self.settings.endpoint.path,
                data=body,
                headers=self.headers(exchange.arrival),
                timeout=aiohttp.ClientTimeout(total=self.settings.timeout_seconds),
            ) as response:
                exchange.status = response.status
                exchange.layout = response.headers.get(LAYOUT_HEADER)
                if response.status == 200:
                    exchange.outcome = await self._read(exchange, response, start)
                else:
                    exchange.outcome = outcome_of_status(response.status)
                    exchange.error = _shorten(await response.text())
        except asyncio.CancelledError:
            exchange.outcome = Outcome.CANCELLED
        except TimeoutError:
            exchange.outcome = Outcome.TIMEOUT
        except (aiohttp.ClientError, OSError, msgspec.DecodeError, ValueError) as error:
            answered = exchange.status is not None
            exchange.outcome = Outcome.TRUNCATED if answered else Outcome.CONNECTION_ERROR
            exchange.error = _shorten(f"{type(error).__name__}: {error}")
        finally:
            exchange.ended = self._now() - start

    async def _read(
        self, exchange: Exchange, response: aiohttp.ClientResponse, start: float
    ) -> Outcome:
        stream = EventStream()
        error: StreamError | None = None
        async for data in response.content.iter_any():
            now = self._now() - start
            for chunk in stream.feed(data):
                if chunk.choices:
                    exchange.chunk_times.append(now)
                    exchange.finish_reason = chunk.choices[0].finish_reason
                if chunk.usage is not None:
                    exchange.prompt_tokens = chunk.usage.prompt_tokens
                    exchange.output_tokens = chunk.usage.completion_tokens
                error = chunk.error or error
        if error is not None:
            exchange.error = _shorten(error.message or "")
            return outcome_of_status(error.code if isinstance(error.code, int) else 500)
        whole = stream.done and exchange.chunk_times and exchange.finish_reason != "abort"
        return Outcome.OK if whole else Outcome.TRUNCATED


def _decode(url: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ClientError(f"{url} answered with what is not JSON") from error


def _shorten(text: str) -> str:
    return " ".join(text.split())[:_SHOWN]
