"""One file of requests, answered by any OpenAI-compatible server: what ``shoal run-batch`` does."""

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path

from shoal.server.batch.answer_log import AnswerLog, result_id
from shoal.server.batch.batch_objects import LineError
from shoal.server.batch.batch_run import BatchRun
from shoal.server.batch.batch_store import sync_directory
from shoal.server.batch.input_lines import Rules, check_lines, numbered_lines
from shoal.server.batch.line_sender import LineSender, NoAnswerError, Send, deliver
from shoal.server.batch.lines_ahead import Numbered
from shoal.server.batch.result_texts import vllm_result
from shoal.server.batch.sending_window import SendingWindow
from shoal.server.errors import UserError

LOOK_SECONDS = 1.0
FIXED_WINDOW = 256
"""Requests on their way to a server that does not say how many it runs."""
MOST_WAITING = 2048
_RUNNING = b"vllm:num_requests_running"
_PARKED = re.compile(rb'shoal_engine_requests\{.*state="parked".*\}')
"""Of a node of Shoal: requests that wait in the host's memory make room for others."""
_READ_BYTES = 1 << 20
_MOST_LINES = 1 << 31
_LINE_BYTES = 64 << 20


class FileJob:
    """The requests of a file, and their results, which a later job of the same file finds.

    Args:
        source: the file.
        output: where the results go, in the format of ``vllm run-batch``. Until the end they are in
            a file beside it.
        errors: where lines without an answer go; None: into ``output``, as with vLLM.
        progress: called with the numbers of answers, failures and lines every second.
    """

    def __init__(
        self,
        source: Path,
        output: Path,
        errors: Path | None,
        progress: Callable[[int, int, int], None],
    ) -> None:
        self._source = source
        self._targets = {_partial(path): path for path in filter(None, (output, errors))}
        self._partial = _partial(output), _partial(errors or output)
        self._progress = progress
        self.lines = 0
        self.results = AnswerLog(*self._partial)
        self._name = ""

    def prepare(self) -> None:
        """Check the file, and find the results that are there already. Nothing is sent.

        Raises:
            UserError: the file is wrong (one line for each error), cannot be read, or is not the
                one whose results are there.
        """
        try:
            rules = Rules(None, (), _MOST_LINES, _LINE_BYTES)
            checked = check_lines(self._source, rules, lambda: False)
            self._name = f"batch_{_digest(self._source)}"
            self._check_former()
            self.results.recover()
        except OSError as error:
            raise UserError(f"{error.filename}: {error.strerror}") from None
        if checked.errors:
            raise UserError("\n".join(self._in_words(error) for error in checked.errors))
        self.lines = checked.lines

    def _in_words(self, error: LineError) -> str:
        where = "" if error.line is None else f"line {error.line}: "
        return f"{self._source}: {where}{error.message}"

    def _check_former(self) -> None:
        ours = result_id(self._name, 0).encode().rpartition(b"-")[0]
        for path in self._targets:
            if path.exists():
                _, first = next(numbered_lines(path, _LINE_BYTES), (0, b""))
                if first.endswith(b"\n") and ours not in first[:100]:
                    raise UserError(f"{path} has the results of another file: remove it")

    async def work(self, sender: LineSender, is_alive: Callable[[], bool]) -> None:
        """Have all lines answered.

        Args:
            sender: sends them.
            is_alive: whether the server may still answer.

        Raises:
            UserError: it may not any more.
        """
        self.results.open()
        window, room = SendingWindow(MOST_WAITING), asyncio.Event()
        run = BatchRun(self._name, "", self._source, _LINE_BYTES, self.results, room.set)
        looking = asyncio.create_task(self._look(window, lambda: _running(sender), room))
        try:
            while not run.ended.is_set():
                while len(run.tasks) < window.lines and (found := run.take()) is not None:
                    line = _answer(run, found, sender.send, window.refused)
                    task = asyncio.create_task(line)
                    run.start(task)
                    task.add_done_callback(lambda _: room.set())
                if not is_alive():
                    raise UserError("the server has ended: the same command goes on with the rest")
                room.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
                        await room.wait()
            await run.stop()
        finally:
            looking.cancel()
            await run.close()
            self._show()

    async def _look(
        self, window: SendingWindow, running: Callable[[], Awaitable[int]], room: asyncio.Event
    ) -> None:
        while True:
            try:
                window.see(await running())
            except NoAnswerError:
                window.see(None)
            room.set()
            self._show()
            await asyncio.sleep(LOOK_SECONDS)

    def _show(self) -> None:
        self._progress(self.results.completed, self.results.failed, self.lines)

    def finish(self) -> None:
        """Give the results their names.

        Raises:
            UserError: that cannot be done.
        """
        for partial, target in self._targets.items():
            try:
                partial.rename(target)
                sync_directory(target.parent)
            except OSError as error:
                raise UserError(f"{target}: {error.strerror}") from None


async def _answer(run: BatchRun, found: Numbered, send: Send, refused: Callable[[], None]) -> None:
    answer = await deliver(send, "", found.line, refused, asyncio.sleep)
    await run.record(vllm_result(run.name, found, answer))


async def _running(sender: LineSender) -> int:
    """Return how many requests a server runs, as its metrics say."""
    answer = await sender.get("/metrics")
    lines = answer.body.splitlines() if answer.status == HTTPStatus.OK else []
    found = [line.rpartition(b" ")[2] for line in lines if line.startswith(_RUNNING)]
    parked = [line.rpartition(b" ")[2] for line in lines if _PARKED.match(line)]
    return int(sum(map(float, found + parked))) if found else FIXED_WINDOW // 2


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()
