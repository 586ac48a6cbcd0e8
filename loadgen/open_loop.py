"""Open-loop replay: every request is sent when it is due, whatever becomes of the others."""

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.loadgen.client import Client
from shoal.loadgen.exchange import Exchange, Outcome
from shoal.loadgen.layout_timeline import SAMPLE_SECONDS, LayoutLog
from shoal.loadgen.prompts import Prompts
from shoal.loadgen.workload import Workload

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
    """Requests of the workload."""
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
    """

    def __init__(
        self,
        client: Client,
        prompts: Prompts,
        workload: Workload,
        clock: Clock,
        *,
        grace_seconds: float = 5.0,
    ) -> None:
        self.run_so_far = Run(planned=len(workload.arrivals))
        self._client = client
        self._prompts = prompts
        self._workload = workload
        self._clock = clock
        self._grace_seconds = grace_seconds
        self._start: float | None = None
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
        return len(self._running)

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
            await _until(self._stop, self._send_all(start))
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
            body = self._client.body(self._prompts.make(index, arrival), arrival.output_tokens)
            # Sleep even if the request is late, so that responses are read, too.
            await self._clock.sleep(max(0.0, arrival.at - self.elapsed))
            exchange = Exchange(index, arrival)
            self.run_so_far.exchanges.append(exchange)
            task = asyncio.create_task(self._client.send(exchange, body, start))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

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
