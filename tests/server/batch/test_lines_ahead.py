"""Lines are read in a thread, a bounded number ahead; those with a result keep nobody waiting."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shoal.server.batch import batch_run, lines_ahead
from shoal.server.batch.answer_log import AnswerLog, Result
from shoal.server.batch.batch_objects import Batch, Status
from shoal.server.batch.batch_run import BatchRun
from shoal.server.batch.input_lines import numbered_lines
from shoal.server.batch.lines_ahead import MOST_BYTES, MOST_LINES
from tests.server.batch.batches import (
    NOW,
    batch_of,
    ended,
    jsonl,
    line,
    named,
    results,
    store_in,
    until,
    working,
)


class Reading:
    """Stands in front of ``numbered_lines``: counts lines, and may hold a thread at one of them."""

    def __init__(self) -> None:
        self.read = 0
        self.held_at: int | None = None
        self.reached = threading.Event()
        self.goes_on = threading.Event()
        self.problem: OSError | None = None

    def __call__(self, path: Path, line_bytes: int) -> Iterator[tuple[int, bytes]]:
        for number, content in numbered_lines(path, line_bytes):
            assert threading.current_thread() is not threading.main_thread()
            if number == self.held_at:
                self.reached.set()
                self.goes_on.wait()
            if self.problem is not None:
                raise self.problem
            self.read += 1
            yield number, content


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Reading:
    found = Reading()
    monkeypatch.setattr(batch_run, "numbered_lines", found)
    return found


def results_of(directory: Path, done: Iterator[int] | range) -> AnswerLog:
    """Return results for these lines."""
    log = AnswerLog(directory / "answers", directory / "failures")
    log.recover()
    log.open()
    text = b'{"id": "batch_req_x-%d", "custom_id": "", "response": {"status_code": 200}}'
    log.append([Result(number, False, text % number) for number in done])
    return log


def run_of(
    directory: Path, content: bytes, done: range = range(0)
) -> tuple[BatchRun, asyncio.Event]:
    source, came = directory / "in.jsonl", asyncio.Event()
    source.write_bytes(content)
    results = results_of(directory, done)
    return BatchRun("batch_x", "", source, 16 << 20, results, came.set), came


async def taken(run: BatchRun, came: asyncio.Event) -> list[int]:
    """Take all lines of a run, as fast as they come."""
    found: list[int] = []
    while not run.ended.is_set():
        came.clear()
        while (numbered := run.take()) is not None:
            found.append(numbered.number)
        if not run.ended.is_set():
            await came.wait()
    return found


async def test_the_lines_between_those_that_are_done_come_in_order(
    tmp_path: Path, reading: Reading
) -> None:
    run, came = run_of(tmp_path, jsonl(named(5000)), range(3, 4990))
    assert await taken(run, came) == [1, 2, *range(4990, 5001)]
    assert reading.read == 5000
    await run.close()


async def test_nobody_waits_while_done_lines_are_skipped(tmp_path: Path, reading: Reading) -> None:
    reading.held_at = 400
    run, came = run_of(tmp_path, jsonl(named(1000)), range(1, 1000))
    assert run.take() is None
    await asyncio.to_thread(reading.reached.wait)
    assert run.take() is None
    assert not run.ended.is_set()  # it is not known yet whether a line is left
    reading.goes_on.set()
    await came.wait()
    found = run.take()
    assert found is not None
    assert found.number == 1000
    await run.close()


async def test_a_run_whose_lines_are_all_done_ends(tmp_path: Path, reading: Reading) -> None:
    run, came = run_of(tmp_path, jsonl(named(1000)), range(1, 1001))
    assert await taken(run, came) == []
    await run.close()


async def reads_twice(run: BatchRun, came: asyncio.Event) -> None:
    """Have a run read as far ahead as it does, and close it: that would end a third read."""
    assert run.take() is None
    await came.wait()
    came.clear()
    assert run.take() is not None  # there is less than one read has, so the next one begins
    await came.wait()
    assert run.take() is not None
    await run.close()


async def test_only_so_many_lines_are_read_ahead(tmp_path: Path, reading: Reading) -> None:
    run, came = run_of(tmp_path, jsonl(named(10 * MOST_LINES)))
    await reads_twice(run, came)
    assert reading.read == 2 * MOST_LINES


async def test_only_so_many_bytes_are_read_ahead(tmp_path: Path, reading: Reading) -> None:
    long = [line(f"line {number}", text="x" * (1 << 20)) for number in range(40)]
    run, came = run_of(tmp_path, jsonl(long))
    await reads_twice(run, came)
    assert reading.read == 2 * (MOST_BYTES >> 20)


async def test_a_run_is_closed_while_it_looks_for_a_line(tmp_path: Path, reading: Reading) -> None:
    reading.held_at = 400
    run, _ = run_of(tmp_path, jsonl(named(1000)), range(1, 1000))
    assert run.take() is None
    await asyncio.to_thread(reading.reached.wait)
    closing = asyncio.create_task(run.close())
    await asyncio.sleep(0)
    reading.goes_on.set()
    await closing
    assert reading.read == 400  # no further line was read


async def test_an_input_that_cannot_be_read_is_a_problem_of_the_run(
    tmp_path: Path, reading: Reading
) -> None:
    reading.problem = OSError(5, "Input/output error")
    run, _ = run_of(tmp_path, jsonl(named(3)))
    assert run.take() is None
    await run.ended.wait()
    with pytest.raises(OSError, match="Input/output"):
        await run.stop()
    await run.close()


async def test_a_batch_is_cancelled_while_its_worker_skips_lines(
    tmp_path: Path, reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker starts again on a batch of which nearly all is done, and another one waits."""
    monkeypatch.setattr(lines_ahead, "MOST_LINES", 8)
    store = store_in(tmp_path)
    held, other = (batch_of(store, jsonl(named(100)), owner) for owner in "ab")
    answers = ("file-answers", "file-failures")
    results_of_batch = AnswerLog(*map(store.path, answers))
    results_of_batch.recover()
    results_of_batch.open()
    text = b'{"id": "batch_req_x-%d", "custom_id": "line %d", "response": {"status_code": 200}}'
    results_of_batch.append([Result(n, False, text % (n, n)) for n in range(1, 99)])
    results_of_batch.close()

    def begun(batch: Batch) -> Batch:
        return msgspec.structs.replace(
            batch,
            status=Status.IN_PROGRESS,
            total=100,
            answers_id=answers[0],
            failures_id=answers[1],
        )

    def cancelled(batch: Batch) -> Batch:
        return msgspec.structs.replace(batch, status=Status.CANCELLING, cancelling_at=NOW)

    store.change(held.id, begun)
    reading.held_at = 50
    async with working(store):
        await asyncio.to_thread(reading.reached.wait)
        # The first owner's worker thread is held now, and the loop is not.
        await until(store, other, lambda batch: batch.status is Status.IN_PROGRESS)
        store.change(held.id, cancelled)
        reading.held_at = None
        reading.goes_on.set()
        done = await ended(store, held)
        assert (await ended(store, other)).completed == 100
    # The last two lines may be answered before the worker sees that the batch is to end.
    assert (done.status, done.completed + done.failed) == ("cancelled", 100)
    assert set(results(store, done).values()) == {1}
    store.close()
