"""Streams that several processes read, as each user's own computer would read one.

A process takes some 0.04 ms of its core for each token that it gets. So if one process read 64
streams, it would note the last token of a step 3 ms after the first one, and most of a pause of
a few milliseconds would be its own.
"""

import asyncio
import gc
import multiprocessing
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Protocol

from shoal.loadgen.bench.token_client import Client, Prompt, RequestFailedError, Stream
from shoal.server.options.front_end_option import usable_cores

MOST_STREAMS = 8
"""Streams that one process reads, if there are cores for so many processes."""
CORES_OF_ONE = 4
"""Cores of the machine for each process; the server needs the others."""
START_SECONDS = 60.0
"""Time in which all processes must be up, before any of them sends a request."""
_LONGEST_UNIT = 64
_SPAWN = multiprocessing.get_context("spawn")


class Running(Protocol):
    """Streams under way."""

    @property
    def streams(self) -> Sequence[Stream]:
        """What has come of each, in the order of the prompts."""

    def one_has_ended(self) -> bool:
        """Return whether a stream has all of its tokens.

        Raises:
            RequestFailedError: a stream failed.
        """


Following = Callable[[Client, Sequence[Prompt], int], AbstractAsyncContextManager[Running]]
"""Streams so many tokens after each prompt. The end of the context aborts what still runs."""


class SharedStream:
    """A stream that one process reads, and another one sees as it comes.

    Args:
        tokens: how many come.
    """

    def __init__(self, tokens: int) -> None:
        self._times = _SPAWN.RawArray("d", tokens)
        self._tokens = _SPAWN.RawArray("l", tokens)
        # Chunks and tokens. They are counted last, so what is counted is there.
        self._counts = _SPAWN.RawArray("l", 2)
        self._unit: Any = _SPAWN.RawArray("c", _LONGEST_UNIT)

    def begin(self, unit: str | None) -> None:
        """Note it where the other process sees it."""
        self._unit.value = (unit or "").encode()

    def add(self, now: float, tokens: Sequence[int]) -> None:
        """Note them where the other process sees them."""
        chunks, count = self._counts
        self._times[chunks] = now
        self._tokens[count : count + len(tokens)] = tokens
        self._counts[:] = chunks + 1, count + len(tokens)

    @property
    def times(self) -> Sequence[float]:
        """When each chunk with tokens came."""
        return list(self._times[: self._counts[0]])

    @property
    def tokens(self) -> Sequence[int]:
        """The ids of the output tokens."""
        return list(self._tokens[: self._counts[1]])

    @property
    def count(self) -> int:
        """How many of them there are."""
        return int(self._counts[1])

    @property
    def unit(self) -> str | None:
        """The engines of the unit where Shoal began to run it."""
        return self._unit.value.decode() or None


@dataclass(frozen=True, slots=True)
class _Processes:
    """Processes that read the streams of some prompts."""

    streams: Sequence[SharedStream]
    wanted: int
    """Tokens of each stream."""
    readers: Sequence[tuple[SpawnProcess, Connection]]

    def one_has_ended(self) -> bool:
        for process, failure in self.readers:
            if process.exitcode:
                raise RequestFailedError(_last_words(process, failure))
        return any(stream.count >= self.wanted for stream in self.streams)


@asynccontextmanager
async def followed(
    client: Client, prompts: Sequence[Prompt], tokens: int
) -> AsyncIterator[Running]:
    """Stream so many tokens after each prompt, in other processes; see ``Following``."""
    streams = [SharedStream(tokens) for _ in prompts]
    pairs = list(zip(prompts, streams, strict=True))
    count = min(-(-len(pairs) // MOST_STREAMS), max(1, usable_cores() // CORES_OF_ONE))
    parts = [pairs[first::count] for first in range(count)]
    together = _SPAWN.Barrier(len(parts))
    readers = [_start(client, part, tokens, together) for part in parts]
    try:
        yield _Processes(streams, tokens, readers)
    finally:
        for process, _ in readers:
            process.terminate()
        for process, failure in readers:
            await asyncio.to_thread(process.join)
            failure.close()


def _start(
    client: Client, part: Sequence[tuple[Prompt, SharedStream]], tokens: int, together: Any
) -> tuple[SpawnProcess, Connection]:
    failure, told = _SPAWN.Pipe(duplex=False)
    process = _SPAWN.Process(
        target=_read,
        args=(client.address, client.model, part, tokens, together, told),
        daemon=True,
    )
    process.start()
    told.close()
    return process, failure


def _read(
    address: str,
    model: str,
    part: Sequence[tuple[Prompt, SharedStream]],
    tokens: int,
    together: Any,
    failure: Connection,
) -> None:
    """Be one of the processes."""
    gc.disable()  # a collection here would look like a pause of the server's
    together.wait(START_SECONDS)
    try:
        asyncio.run(_read_all(address, model, part, tokens))
    except* RequestFailedError as errors:
        failure.send(str(errors.exceptions[0]))
        sys.exit(1)


async def _read_all(
    address: str, model: str, part: Sequence[tuple[Prompt, SharedStream]], tokens: int
) -> None:
    async with Client(address, model) as client, asyncio.TaskGroup() as group:
        for prompt, stream in part:
            group.create_task(client.follow(prompt, tokens, stream))


def _last_words(process: SpawnProcess, failure: Connection) -> str:
    try:
        return str(failure.recv())
    except EOFError:
        return f"a process that read streams ended with code {process.exitcode}"
