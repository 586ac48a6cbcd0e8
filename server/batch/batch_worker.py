"""Works the batches of a store off: checks their input, sends their lines, records the answers.

Whatever the worker has to remember is in the store and in the files of results. So it may be killed
at any moment: the next one goes on with the lines that have no result.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec

from shoal.server.batch.answer_log import AnswerLog
from shoal.server.batch.batch_objects import (
    OUTPUT_PURPOSE,
    Batch,
    Status,
    StoredFile,
    new_id,
)
from shoal.server.batch.batch_run import DISK_SECONDS, BatchRun
from shoal.server.batch.batch_store import BatchStore, sync_directory
from shoal.server.batch.input_lines import Checked, Rules, check_lines
from shoal.server.batch.line_sender import NoAnswerError, Send, deliver
from shoal.server.batch.lines_ahead import Numbered
from shoal.server.batch.result_texts import openai_result, unsent_result
from shoal.server.batch.sending_window import SendingWindow

log = logging.getLogger("shoal.batch")

POLL_SECONDS = 0.2
"""How soon the worker notices a new batch, a cancellation or an expiry."""
LOOK_SECONDS = 1.0
"""How often it asks the node what it runs, and writes counts to the store."""
SWEEP_SECONDS = 60.0
OPEN_OF_OWNER = 2
"""Batches of one owner that are worked on: the second begins while the last lines of the first
are on their way."""
_UNSENT = {
    Status.CANCELLED: ("batch_cancelled", "the batch was cancelled before this request was done"),
    Status.EXPIRED: ("batch_expired", "the batch expired before this request was done"),
}

T = TypeVar("T")

WallClock = Callable[[], float]
"""Returns seconds since the epoch."""


@dataclass(frozen=True)
class WorkerLimits:
    """What the worker keeps to."""

    models: Collection[str] = ()
    """Names that the node serves."""
    most_lines: int = 1_000_000
    line_bytes: int = 16 << 20
    most_waiting: int = 2048
    """Lines that may wait in the node's task pool, so that people's requests find room there."""
    most_bytes_on_the_way: int = 256 << 20
    keep_seconds: float = 30 * 86400.0
    """How long output files, and batches that have ended, are kept."""


@dataclass(eq=False)
class _Job:
    """An unfinished batch."""

    batch: Batch
    end: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the batch is to end, done or not."""
    run: BatchRun | None = None
    task: asyncio.Task[None] | None = None


class BatchWorker:
    """Works off what is in the store.

    Args:
        store: the store; no other worker may use it.
        send: sends one line.
        running: returns the number of requests that the node runs.
        limits: what it keeps to.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        store: BatchStore,
        send: Send,
        running: Callable[[], Awaitable[int]],
        limits: WorkerLimits,
        clock: WallClock = time.time,
    ) -> None:
        self._store = store
        self._send = send
        self._running = running
        self._limits = limits
        self._clock = clock
        self._window = SendingWindow(limits.most_waiting)
        self._jobs: dict[str, _Job] = {}
        self._owners: dict[str, asyncio.Semaphore] = {}
        self._turns: deque[str] = deque()
        """Owners with batches, in the order in which their lines are sent next."""
        self._checking = asyncio.Semaphore()
        self._version: int | None = None
        self._sending = 0
        self._sending_bytes = 0
        self._room = asyncio.Event()

    async def work(self) -> None:
        """Work for ever."""
        self._store.remove_strays(self._clock())
        looking = asyncio.create_task(self._look_regularly())
        try:
            while True:
                self._notice()
                self._fill()
                self._room.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_SECONDS):
                        await self._room.wait()
                if looking.done():
                    looking.result()
        finally:
            tasks = [looking, *(job.task for job in self._jobs.values() if job.task is not None)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # --- what is to be done -------------------------------------------------------------------

    def _notice(self) -> None:
        """Start batches that are new, and end those that are cancelled or late."""
        version, now = self._store.version, self._clock()
        if version != self._version:
            self._version = version
            for batch in self._store.unfinished():
                self._see(batch)
        for job in list(self._jobs.values()):
            if job.batch.status is Status.CANCELLING or job.batch.expires_at <= now:
                job.end.set()
            if job.task is not None and job.task.done():
                del self._jobs[job.batch.id]
                job.task.result()

    def _see(self, batch: Batch) -> None:
        job = self._jobs.get(batch.id)
        if job is not None:
            job.batch = batch
            return
        job = self._jobs[batch.id] = _Job(batch)
        if batch.owner not in self._owners:
            self._owners[batch.owner] = asyncio.Semaphore(OPEN_OF_OWNER)
            self._turns.append(batch.owner)
        job.task = asyncio.create_task(self._work_off(job))

    async def _look_regularly(self) -> None:
        swept = 0.0
        while True:
            try:
                running: int | None = await self._running()
            except NoAnswerError:
                running = None
            self._window.see(running)
            try:
                for job in list(self._jobs.values()):
                    await self._note_progress(job)
                if self._clock() >= swept + SWEEP_SECONDS:
                    swept = self._clock()
                    await asyncio.to_thread(self._store.sweep, swept, self._limits.keep_seconds)
            except OSError as error:
                log.error("the store of batches cannot be written: %s", error.strerror)
            await asyncio.sleep(LOOK_SECONDS)

    async def _note_progress(self, job: _Job) -> None:
        if job.run is None or job.run.stopped.is_set():
            return
        results = job.run.results
        counts = results.completed, results.failed
        if counts != (job.batch.completed, job.batch.failed):
            change = partial(_with_counts, results=results)
            # The event loop alone sets a job's batch: a thread could undo a cancellation that
            # `_see` has set and that `_notice` is about to look at.
            job.batch = await asyncio.to_thread(self._store.change, job.batch.id, change)

    # --- one batch ----------------------------------------------------------------------------

    async def _work_off(self, job: _Job) -> None:
        """Take a batch from where it is to its end."""
        async with _place_of(job, self._owners[job.batch.owner]):
            if job.batch.status is Status.VALIDATING or not job.batch.answers_id:
                await self._check(job)
            if job.batch.status.is_final:
                return
            await self._answer(job)

    async def _check(self, job: _Job) -> None:
        batch, limits = job.batch, self._limits
        rules = Rules(batch.endpoint, limits.models, limits.most_lines, limits.line_bytes)
        path = self._store.path(batch.input_file_id)
        checked = Checked(0, None, ())
        async with _place_of(job, self._checking):
            if not job.end.is_set():
                checked = await asyncio.to_thread(check_lines, path, rules, job.end.is_set)
        ended = job.end.is_set()
        change = partial(_after_check, checked=checked, ended=ended, now=int(self._clock()))
        job.batch = await self._persist(job, partial(self._store.change, batch.id, change))
        log.info("%s: %s, %d requests", batch.id, job.batch.status, job.batch.total)

    async def _answer(self, job: _Job) -> None:
        """Send all lines that have no result yet, until they have one or the batch is to end."""
        batch = job.batch
        results = await self._persist(job, partial(self._results_of, batch))
        source = self._store.path(batch.input_file_id)
        most, came = self._limits.line_bytes, self._room.set
        job.run = run = BatchRun(batch.id, batch.owner, source, most, results, came)
        came()
        waits = [asyncio.create_task(event.wait()) for event in (job.end, run.ended)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            await run.stop()
            await self._persist(job, partial(self._finish, job))
        finally:
            for wait in waits:
                wait.cancel()
            await run.close()

    def _results_of(self, batch: Batch) -> AnswerLog:
        """Return the results that a batch has, open for more. Blocks."""
        paths = self._store.path(batch.answers_id), self._store.path(batch.failures_id)
        results = AnswerLog(*paths)
        results.recover()
        results.open()
        sync_directory(paths[0].parent)
        return results

    async def _persist(self, job: _Job, act: Callable[[], T]) -> T:
        """Do something in a thread, again and again while the disk is full."""
        while True:
            try:
                return await asyncio.to_thread(act)
            except OSError as error:
                log.error("%s: the disk cannot be written: %s", job.batch.id, error.strerror)
                await asyncio.sleep(DISK_SECONDS)

    def _finish(self, job: _Job) -> None:
        """Give the lines that have no result one, and make the output files exist."""
        batch, run = job.batch, job.run
        assert run is not None
        results = run.results
        now = int(self._clock())
        batch = self._store.change(batch.id, partial(_finalizing, now=now))
        whole = results.completed + results.failed == batch.total
        status = Status.COMPLETED if whole else Status.EXPIRED
        if batch.status is Status.CANCELLING:
            status = Status.CANCELLED
        if not whole:
            code, message = _UNSENT[status]
            run.fail_the_rest(partial(unsent_result, batch.id, code=code, message=message))
        files = self._output_files(batch, now)
        ids = {file.id for file in files}
        change = partial(_ended, status=status, now=now, files=ids, results=results)
        job.batch = self._store.finish(batch.id, change, files)
        for name in {batch.answers_id, batch.failures_id} - ids:
            with suppress(OSError):  # it is empty, and the batch has ended
                self._store.path(name).unlink()
        log.info("%s: %s", batch.id, job.batch.status)

    def _output_files(self, batch: Batch, now: int) -> list[StoredFile]:
        keep = batch.output_seconds or self._limits.keep_seconds
        files = []
        for name, kind in ((batch.answers_id, "output"), (batch.failures_id, "error")):
            size = self._store.path(name).stat().st_size
            shown = f"{batch.id}_{kind}.jsonl"
            if size:
                expires_at = int(now + keep)
                file = StoredFile(name, batch.owner, size, now, shown, OUTPUT_PURPOSE, expires_at)
                files.append(file)
        return files

    # --- lines --------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Send lines until the window is full: of each owner in turn, its oldest batch first."""
        most_bytes = self._limits.most_bytes_on_the_way
        while self._sending < self._window.lines and self._sending_bytes < most_bytes:
            found = self._next_line()
            if found is None:
                return
            run, numbered = found
            self._sending += 1
            self._sending_bytes += numbered.size
            run.start(asyncio.create_task(self._send_line(run, numbered)))

    def _next_line(self) -> tuple[BatchRun, Numbered] | None:
        open_runs = [job.run for job in self._jobs.values() if job.run is not None]
        for _ in range(len(self._turns)):
            owner = self._turns[0]
            self._turns.rotate(-1)
            for run in open_runs:
                if run.owner == owner and (numbered := run.take()) is not None:
                    return run, numbered
        return None

    async def _send_line(self, run: BatchRun, numbered: Numbered) -> None:
        try:
            answer = await deliver(
                self._send, run.owner, numbered.line, self._window.refused, asyncio.sleep
            )
            await run.record(openai_result(run.name, numbered, answer))
        finally:
            self._sending -= 1
            self._sending_bytes -= numbered.size
            self._room.set()


@asynccontextmanager
async def _place_of(job: _Job, places: asyncio.Semaphore) -> AsyncIterator[None]:
    """Wait until there is a place for a batch; one that is to end goes on without a place."""
    place, end = asyncio.create_task(places.acquire()), asyncio.create_task(job.end.wait())
    try:
        await asyncio.wait((place, end), return_when=asyncio.FIRST_COMPLETED)
        yield
    finally:
        end.cancel()
        if place.done() and not place.cancelled():
            places.release()
        else:
            place.cancel()


# --- changes of a batch, each in one transaction ---


def _after_check(batch: Batch, *, checked: Checked, ended: bool, now: int) -> Batch:
    replace = partial(msgspec.structs.replace, batch)
    if batch.status is Status.CANCELLING:
        return replace(status=Status.CANCELLED, cancelled_at=now)
    if ended:
        return replace(status=Status.EXPIRED, expired_at=now)
    if checked.errors:
        return replace(status=Status.FAILED, failed_at=now, errors=checked.errors)
    return replace(
        status=Status.IN_PROGRESS,
        in_progress_at=now,
        total=checked.lines,
        model=checked.model,
        answers_id=new_id("file-"),
        failures_id=new_id("file-"),
    )


def _with_counts(batch: Batch, *, results: AnswerLog) -> Batch:
    return msgspec.structs.replace(
        batch, completed=results.completed, failed=results.failed, usage=results.usage
    )


def _finalizing(batch: Batch, *, now: int) -> Batch:
    if batch.status is not Status.IN_PROGRESS:
        return batch
    return msgspec.structs.replace(batch, status=Status.FINALIZING, finalizing_at=now)


def _ended(
    batch: Batch, *, status: Status, now: int, files: Collection[str], results: AnswerLog
) -> Batch:
    return msgspec.structs.replace(
        _with_counts(batch, results=results),
        **{"status": status, f"{status}_at": now},
        output_file_id=batch.answers_id if batch.answers_id in files else None,
        error_file_id=batch.failures_id if batch.failures_id in files else None,
    )
