"""Sends lines to a server as ordinary requests, again and again until it has answered them."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import cycle
from types import TracebackType
from typing import NamedTuple, Self
from urllib.parse import quote

import aiohttp

from shoal.loadgen.connection_errors import cause
from shoal.server.batch.input_lines import InputLine

TRANSIENT = frozenset({408, 429, 502, 503, 504})
"""Statuses of a server that may answer the same request later."""
BACKOFF_SECONDS = 0.5
LONGEST_BACKOFF_SECONDS = 15.0
_CONNECT_SECONDS = 10.0
_SILENCE = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
"""An answer may take as long as it takes: what is too late for its batch is aborted."""


class Answer(NamedTuple):
    """What a server said to a request."""

    status: int
    body: bytes
    request_id: str | None = None
    retry_after: float | None = None
    """Seconds."""


class NoAnswerError(Exception):
    """The server could not be reached, or its connection ended before its answer."""


Send = Callable[[str, InputLine], Awaitable[Answer]]
"""Sends an owner's line once; raises ``NoAnswerError``."""
Sleep = Callable[[float], Awaitable[None]]


async def deliver(
    send: Send, owner: str, line: InputLine, refused: Callable[[], None], sleep: Sleep
) -> Answer:
    """Send a line until the server has answered it, for good or ill.

    Args:
        send: sends it once.
        owner: whose line it is.
        line: the line.
        refused: called each time the server has too much to do, or cannot be reached.
        sleep: waits for so many seconds.
    """
    pause = BACKOFF_SECONDS
    while True:
        try:
            answer = await send(owner, line)
        except NoAnswerError:
            asked = None
        else:
            if answer.status not in TRANSIENT:
                return answer
            asked = answer.retry_after
        refused()
        await sleep(min(max(pause, asked or 0.0), LONGEST_BACKOFF_SECONDS))
        pause *= 2


class LineSender:
    """Connections to a server, or to the front ends of a node in turn. An asynchronous context.

    Args:
        base_url: what comes before the path of a line.
        sockets: Unix sockets of the front ends; none: the server is reached over TCP.
        headers: sent with every request.
        owner_header: the header that says whose line it is, percent-encoded; None: nothing says it.
    """

    def __init__(
        self,
        base_url: str,
        sockets: Sequence[str] = (),
        headers: Mapping[str, str] | None = None,
        owner_header: str | None = None,
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._sockets = sockets
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._owner_header = owner_header
        self._sessions: list[aiohttp.ClientSession] = []

    async def __aenter__(self) -> Self:
        connectors: list[aiohttp.BaseConnector] = [
            aiohttp.UnixConnector(path, limit=0) for path in self._sockets
        ] or [aiohttp.TCPConnector(limit=0)]
        self._sessions = [
            aiohttp.ClientSession(connector=connector, timeout=_SILENCE) for connector in connectors
        ]
        self._turns = cycle(self._sessions)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.gather(*(session.close() for session in self._sessions))

    async def send(self, owner: str, line: InputLine) -> Answer:
        """Send a line once.

        Raises:
            NoAnswerError: there was no answer.
        """
        headers = self._headers
        if self._owner_header is not None:
            headers = {**headers, self._owner_header: quote(owner)}
        return await self._ask("POST", line.url, headers, bytes(line.body))

    async def get(self, path: str) -> Answer:
        """Ask for a path.

        Raises:
            NoAnswerError: there was no answer.
        """
        return await self._ask("GET", path, self._headers, None)

    async def _ask(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> Answer:
        session, url = next(self._turns), self._base_url + path
        try:
            async with session.request(method, url, headers=headers, data=body) as response:
                again = response.headers.get("Retry-After", "")
                return Answer(
                    response.status,
                    await response.read(),
                    response.headers.get("X-Request-Id"),
                    float(again) if again.isdecimal() else None,
                )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise NoAnswerError(cause(error)) from error
