"""One batch, or one file of ``shoal run-batch``, while its lines are sent and answered."""

import asyncio
import logging
from collections.abc import Callable, Generator
from pathlib import Path

from shoal.server.batch.answer_log import AnswerLog, Result
from shoal.server.batch.input_lines import decoded, numbered_lines
from shoal.server.batch.lines_ahead import LinesAhead, Numbered

log = logging.getLogger("shoal.batch")

DISK_SECONDS = 5.0
"""How long to wait after a result could not be written, before it is written again."""


class BatchRun:
    """The lines of one input, which are handed out once each, and their results.

    Args:
        name: of the batch, for the log.
        owner: whose it is.
        source: the input, which was checked.
        line_bytes: bytes of its longest line.
        results: where the results go; lines that have one are not handed out.
        came: called when there may be a line to take after there was none.
    """

    def __init__(
        self,
        name: str,
        owner: str,
        source: Path,
        line_bytes: int,
        results: AnswerLog,
        came: Callable[[], None],
    ) -> None:
        self.name = name
        self.owner = owner
        self.results = results
        self._source = source
        self._line_bytes = line_bytes
        self._came = came
        self._unsent = LinesAhead(self._lines(), self._see_lines)
        self._pending: list[tuple[Result, asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None
        self.tasks: set[asyncio.Task[None]] = set()
        """The lines that are on their way."""
        self.stopped = asyncio.Event()
        """Set when no more lines are to be sent."""
        self.ended = asyncio.Event()
        """Set when no line is left to send and none is on its way, or when one has failed."""
        self.problem: BaseException | None = None
        """Why a line could neither be sent nor recorded, which must not happen."""

    def take(self) -> Numbered | None:
        """Return the next line to send; None: there is none, or it is still being looked for."""
        found = None if self.stopped.is_set() else self._unsent.take()
        if found is None:
            self._look()
        return found

    def _see_lines(self) -> None:
        self.problem = self.problem or self._unsent.problem
        self._look()
        self._came()

    def start(self, task: asyncio.Task[None]) -> None:
        """Take note of a line that is on its way."""
        self.tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled():
            self.problem = self.problem or task.exception()
        self._look()

    def _look(self) -> None:
        if (self._unsent.is_exhausted and not self.tasks) or self.problem is not None:
            self.ended.set()

    async def record(self, result: Result) -> None:
        """Write a result; it survives anything when this returns.

        Results that come while others are written are written together. A full disk is waited for.
        """
        while not self.results.is_done(result.number):
            try:
                await self._write(result)
            except OSError as error:
                log.error("%s: a result cannot be written: %s", self.name, error.strerror)
                await asyncio.sleep(DISK_SECONDS)

    async def _write(self, result: Result) -> None:
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.append((result, written))
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_all())
        await written

    async def _write_all(self) -> None:
        while self._pending:
            taken, self._pending = self._pending, []
            problem: OSError | None = None
            try:
                await asyncio.to_thread(self.results.append, [result for result, _ in taken])
            except OSError as error:
                problem = error
            for result, written in taken:
                if written.done():
                    continue  # nobody waits for it any more
                if problem is None or self.results.is_done(result.number):
                    written.set_result(None)
                else:
                    written.set_exception(problem)
        self._writer = None

    async def stop(self) -> None:
        """Abort all lines on their way, and hand out no more; results that came are written.

        Raises:
            BaseException: ``problem``.
        """
        await self._stop()
        if self.problem is not None:
            raise self.problem

    async def close(self) -> None:
        """Stop, and close the files."""
        await self._stop()
        await self._unsent.close()
        self.results.close()

    async def _stop(self) -> None:
        self.stopped.set()
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._writer is not None:
            await self._writer

    def fail_the_rest(self, result_of: Callable[[Numbered], Result]) -> None:
        """Give every line without a result this one. Blocks; only after ``stop``.

        Raises:
            OSError: a result cannot be written.
        """
        some: list[Result] = []
        for found in filter(None, self._lines()):
            some.append(result_of(found))
            if len(some) == _AT_ONCE:
                self.results.append(some)
                some = []
        self.results.append(some)

    def _lines(self) -> Generator[Numbered | None, None, None]:
        """Yield the lines that have no result when they are reached, and None for the others."""
        for number, line in numbered_lines(self._source, self._line_bytes):
            is_done = self.results.is_done(number)
            yield None if is_done else Numbered(number, decoded(line), len(line))


_AT_ONCE = 1000
"""How many results of lines that were not sent are written at once."""
