"""Open-loop replay: every request is sent when it is due, whatever became of those before."""

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
"""The event loop's own lag is measured this often."""


class Clock(Protocol):
    """Time, as the replay needs it."""

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
    """What a replay has done so far, and in the end."""

    exchanges: list[Exchange] = field(default_factory=list)
    """Of the requests that were sent, in their order."""
    planned: int = 0
    """Requests of the workload."""
    duration: float = 0.0
    """Seconds from the start to the end of the last response."""
    loop_lags: list[float] = field(default_factory=list)
    """How late the event loop woke up, seconds: as late may every time be that was taken then."""
    log: LayoutLog = field(default_factory=LayoutLog)
    interrupted: bool = False

    @property
    def unsent(self) -> int:
        """Requests that were never sent."""
        return self.planned - len(self.exchanges)

    def outcomes(self) -> dict[str, int]:
        """Return how many requests ended in each way, of those there are."""
        counts = Counter(exchange.outcome for exchange in self.exchanges)
        return {outcome.value: counts[outcome] for outcome in Outcome if counts[outcome]}


class Replay:
    """One run of a workload against a server.

    Args:
        client: of the server, with its model known.
        prompts: make the requests' prompts.
        workload: what to send.
        clock: the client's own: when to send it.
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
        """Send nothing more and let responses end for a while; the second time, for no longer."""
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
            # Even if it is late already: responses must be read, too.
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
    """Do the work, but stop it when the event is set."""
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
