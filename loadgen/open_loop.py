"""Replay: every request is sent when it is due, whatever becomes of the others (open loop).

A later turn of a chat is due some time after the answer to the turn before. In a closed loop a
request, or a chat, is due when one of a fixed number of users is free.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from shoal.loadgen.client import Client
from shoal.loadgen.exchange import Exchange, Outcome
from shoal.loadgen.layout_timeline import SAMPLE_SECONDS, LayoutLog
from shoal.loadgen.prompts import Prompts
from shoal.loadgen.workload import Arrival, Phase, Workload

TICK_SECONDS = 0.05
"""How often the event loop's own lag is measured."""


class Clock(Protocol):
    """The clock that a replay needs."""

    def now(self) -> float:
        """Return the time in seconds."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after so many seconds, or later."""
        ...


class EventLoopClock:
    """The clock of real runs."""

    def now(self) -> float:
        """Return the time in seconds."""
        return time.perf_counter()

    async def sleep(self, seconds: float) -> None:
        """Return after so many seconds, or later."""
        await asyncio.sleep(seconds)


@dataclass
class Run:
    """The state of a replay, and in the end its result."""

    exchanges: list[Exchange] = field(default_factory=list)
    """The exchanges of the requests that were sent, in order."""
    planned: int = 0
    """Requests of the workload, with all turns of chats."""
    duration: float = 0.0
    """Seconds from the start to the end of the last response."""
    loop_lags: list[float] = field(default_factory=list)
    """How late the event loop woke up, in seconds: times measured then may be as late."""
    log: LayoutLog = field(default_factory=LayoutLog)
    interrupted: bool = False

    @property
    def unsent(self) -> int:
        """Requests that were never sent."""
        return self.planned - len(self.exchanges)

    def outcomes(self) -> dict[str, int]:
        """Return how many requests ended in each way, without ways in which none ended."""
        counts = Counter(exchange.outcome for exchange in self.exchanges)
        return {outcome.value: counts[outcome] for outcome in Outcome if counts[outcome]}


class Replay:
    """One run of a workload against a server.

    Args:
        client: the client of the server, with its model set.
        prompts: make the requests' prompts.
        workload: what to send.
        clock: the client's clock, by which requests are sent.
        grace_seconds: how long responses may go on after ``stop``.
        concurrency: users of a closed loop, each of whom sends one request after another; None:
            open loop.
    """

    def __init__(
        self,
        client: Client,
        prompts: Prompts,
        workload: Workload,
        clock: Clock,
        *,
        grace_seconds: float = 5.0,
        concurrency: int | None = None,
    ) -> None:
        self.run_so_far = Run(planned=workload.requests)
        self._client = client
        self._prompts = prompts
        self._workload = workload
        self._clock = clock
        self._grace_seconds = grace_seconds
        self._concurrency = concurrency
        self._start: float | None = None
        self._under_way = 0
        self._running: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._stop_at_once = asyncio.Event()

    @property
    def elapsed(self) -> float:
        """Seconds since the start; 0 before it."""
        return 0.0 if self._start is None else self._clock.now() - self._start

    @property
    def running(self) -> int:
        """Requests that are under way."""
        return self._under_way

    def stop(self) -> None:
        """Stop sending and give responses some time to end; at the second call, no more time."""
        if self._stop.is_set():
            self._stop_at_once.set()
        self._stop.set()

    async def run(self) -> Run:
        """Send everything, and return when the last response has ended."""
        run = self.run_so_far
        has_layouts = await run.log.sample(self._client, 0.0)
        self._start = start = self._clock.now()
        watchers = [asyncio.create_task(self._tick())]
        if has_layouts:
            watchers.append(asyncio.create_task(self._watch_layouts()))
        try:
            work = self._send_all(start) if self._concurrency is None else self._employ(start)
            await _until(self._stop, work)
            await _until(self._stop, self._drain())
            if self._stop.is_set():
                run.interrupted = True
                await _until(self._stop_at_once, self._drain(self._grace_seconds))
                await _cancel(self._running)
        finally:
            run.duration = self.elapsed
            await _cancel(watchers)
        if has_layouts:
            await run.log.sample(self._client, run.duration)
        return run

    async def _send_all(self, start: float) -> None:
        for index, arrival in enumerate(self._workload.arrivals):
            body = self._body(index, arrival)
            # Sleep even if the request is late, so that responses are read, too.
            await self._clock.sleep(max(0.0, arrival.at - self.elapsed))
            self._begin(self._converse(index, arrival, body, start))

    async def _employ(self, start: float) -> None:
        """Let users take requests, or chats, one after another, until none is left."""
        left = iter(enumerate(self._workload.arrivals))

        async def user() -> None:
            for index, arrival in left:
                if self._stop.is_set():
                    return
                # Phases are those of an open loop's rate.
                due = replace(arrival, at=self.elapsed, phase=Phase.BETWEEN)
                await self._converse(index, due, self._body(index, due), start)

        for _ in range(min(self._concurrency or 0, len(self._workload.arrivals))):
            self._begin(user())
        await self._drain()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _body(self, index: int, arrival: Arrival) -> bytes:
        return self._client.body(self._prompts.make(index, arrival), arrival.output_tokens)

    async def _converse(self, index: int, turn: Arrival, body: bytes, start: float) -> None:
        """Send a request, and the later turns of its chat, as long as they are answered."""
        while True:
            exchange = Exchange(index, replace(turn, content=None, next=None))
            self.run_so_far.exchanges.append(exchange)
            self._under_way += 1
            try:
                await self._client.send(exchange, body, start)
            finally:
                self._under_way -= 1
            if turn.next is None or exchange.outcome is not Outcome.OK:
                return
            due = self.elapsed + turn.next.at
            turn = replace(turn.next, at=due, phase=turn.phase)
            body = self._body(index, turn)
            await self._clock.sleep(max(0.0, due - self.elapsed))
            if self._stop.is_set():
                return

    async def _drain(self, seconds: float | None = None) -> None:
        if self._running:
            await asyncio.wait(self._running, timeout=seconds)

    async def _tick(self) -> None:
        while True:
            before = self._clock.now()
            await self._clock.sleep(TICK_SECONDS)
            self.run_so_far.loop_lags.append(self._clock.now() - before - TICK_SECONDS)

    async def _watch_layouts(self) -> None:
        while True:
            await self._clock.sleep(SAMPLE_SECONDS)
            await self.run_so_far.log.sample(self._client, self.elapsed)


async def _until(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Do the work, but cancel it when the event is set."""
    task, waiting = asyncio.create_task(work), asyncio.create_task(event.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    await _cancel({task, waiting})
    if not task.cancelled():
        task.result()


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and return when all of them have ended."""
    tasks = set(tasks)
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
