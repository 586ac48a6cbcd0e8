"""The worker on a store, without a server: all states, and every line answered exactly once."""

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.runtime.clock import ManualClock
from shoal.server.batch import batch_run, batch_worker
from shoal.server.batch.answer_log import AnswerLog, Result
from shoal.server.batch.batch_objects import Batch, Status, Usage
from shoal.server.batch.batch_store import BatchStore
from shoal.server.batch.batch_worker import BatchWorker, WorkerLimits
from shoal.server.batch.input_lines import Checked, InputLine, Rules, check_lines
from shoal.server.batch.line_sender import Answer, NoAnswerError
from tests.server.batch.batches import (
    NOW,
    answer,
    batch_of,
    busy,
    ended,
    jsonl,
    line,
    named,
    results,
    store_in,
    until,
    working,
)


@pytest.fixture
def store(tmp_path: Path) -> BatchStore:
    return store_in(tmp_path)


class Server:
    """Answers lines when it is told to."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.asked: list[str] = []
        self.running = 0
        self.aborted = 0

    async def __call__(self, owner: str, sent: InputLine) -> Answer:
        self.asked.append(sent.custom_id)
        self.running += 1
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1
        return await answer(owner, sent)

    async def until(self, holds: Callable[["Server"], bool]) -> None:
        while not holds(self):
            await asyncio.sleep(0.001)


def cancel(batch: Batch) -> Batch:
    return msgspec.structs.replace(batch, status=Status.CANCELLING, cancelling_at=NOW)


async def test_a_batch_is_completed(store: BatchStore) -> None:
    batch = batch_of(store, jsonl(named(100)))
    async with working(store):
        done = await ended(store, batch)
    assert (done.status, done.total, done.completed, done.failed) == ("completed", 100, 100, 0)
    assert done.usage == Usage(300, 0, 200, 0)
    assert done.error_file_id is None
    assert results(store, done) == dict.fromkeys((one["custom_id"] for one in named(100)), 1)
    assert done.in_progress_at == done.finalizing_at == done.completed_at == NOW
    file = store.file("", done.output_file_id or "", NOW)
    assert file is not None
    assert file.bytes == store.path(file.id).stat().st_size
    assert {path.name for path in store.path("x").parent.iterdir()} == {
        done.input_file_id,
        done.output_file_id,
    }


async def test_lines_without_an_answer_are_in_the_error_file(store: BatchStore) -> None:
    async def send(owner: str, sent: InputLine) -> Answer:
        if sent.custom_id == "line 2":
            return Answer(400, b'{"error": {"message": "no"}}')
        return await answer(owner, sent)

    batch = batch_of(store, jsonl(named(3)))
    async with working(store, send):
        done = await ended(store, batch)
    assert (done.status, done.completed, done.failed) == ("completed", 2, 1)
    (error,) = store.path(done.error_file_id or "").read_text().splitlines()
    found = json.loads(error)
    assert (found["custom_id"], found["error"]) == ("line 2", None)
    assert found["response"]["status_code"] == 400
    assert found["response"]["body"] == {"error": {"message": "no"}}


async def test_a_wrong_file_fails_and_nothing_is_sent(store: BatchStore) -> None:
    server = Server()
    batch = batch_of(store, jsonl([line("a"), line("a"), line("b", url="/v1/x")]))
    async with working(store, server):
        done = await ended(store, batch)
    assert done.status is Status.FAILED
    assert [error.line for error in done.errors] == [2, 3]
    assert server.asked == []


async def test_a_cancelled_batch_aborts_its_lines_and_keeps_its_answers(store: BatchStore) -> None:
    server = Server()

    async def send(owner: str, sent: InputLine) -> Answer:
        known = sent.custom_id in ("line 1", "line 2")
        return await (answer if known else server)(owner, sent)

    batch = batch_of(store, jsonl(named(5000)))
    async with working(store, send):
        await server.until(lambda server: server.running > 10)
        await until(store, batch, lambda batch: batch.completed == 2)
        store.change(batch.id, cancel)
        done = await ended(store, batch)
        assert server.running == 0
        assert server.aborted == len(server.asked)
    assert (done.status, done.completed, done.failed) == ("cancelled", 2, 4998)
    assert set(results(store, done).values()) == {1}
    assert len(results(store, done)) == 5000
    first = store.path(done.error_file_id or "").read_text().splitlines()[0]
    assert json.loads(first)["response"] is None
    assert json.loads(first)["error"]["code"] == "batch_cancelled"


async def test_a_late_batch_expires(store: BatchStore) -> None:
    server, clock = Server(), ManualClock(NOW)
    batch = batch_of(store, jsonl(named(50)))
    async with working(store, server, clock):
        await server.until(lambda server: server.running > 0)
        clock.advance(86401)
        done = await ended(store, batch)
    assert (done.status, done.expired_at) == ("expired", NOW + 86401)
    lines = store.path(done.error_file_id or "").read_text().splitlines()
    assert [json.loads(text)["error"]["code"] for text in lines] == ["batch_expired"] * 50


async def test_a_batch_that_waits_is_cancelled_at_once(store: BatchStore) -> None:
    server = Server()
    batches = [batch_of(store, jsonl(named(5000))) for _ in range(4)]
    async with working(store, server):
        await until(store, batches[1], lambda batch: batch.status is Status.IN_PROGRESS)
        assert store.unfinished()[3].status is Status.VALIDATING
        store.change(batches[3].id, cancel)
        done = await ended(store, batches[3])
    assert (done.status, done.total) == ("cancelled", 0)


async def turn_of_the_loop(times: int) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


@pytest.mark.parametrize("turns", range(6))
async def test_a_worker_that_is_stopped_just_when_it_has_work_stops(
    store: BatchStore, turns: int
) -> None:
    """Its cancellation is not lost, whatever turn of the event loop it comes in."""
    worker = BatchWorker(store, answer, busy, WorkerLimits(), ManualClock(NOW))
    task = asyncio.create_task(worker.work())
    await turn_of_the_loop(3)  # it waits for something to do
    worker._room.set()
    await turn_of_the_loop(turns)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=60)
    assert done
    assert task.cancelled()


async def test_a_batch_is_cancelled_while_another_one_is_checked(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = threading.Event()

    def check(path: Path, rules: Rules, is_stopped: Callable[[], bool]) -> Checked:
        known.wait()
        return check_lines(path, rules, is_stopped)

    monkeypatch.setattr(batch_worker, "check_lines", check)
    first, second = (batch_of(store, jsonl(named(3)), owner) for owner in ("a", "b"))
    try:
        async with working(store):
            store.change(second.id, cancel)
            done = await ended(store, second)
            assert (done.status, done.total) == ("cancelled", 0)
            assert [batch.id for batch in store.unfinished()] == [first.id]
            known.set()
            assert (await ended(store, first)).status is Status.COMPLETED
    finally:
        known.set()


async def test_a_cancellation_that_was_noticed_aborts_all_lines_before_the_next_look(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker looks every ``POLL_SECONDS``, and the documentation promises a second."""
    server = Server()
    looks: list[int] = []
    version = BatchStore.version.fget
    assert version is not None

    def look(store: BatchStore) -> int:
        looks.append(server.running)
        return version(store)

    monkeypatch.setattr(BatchStore, "version", property(look))
    batch = batch_of(store, jsonl(named(500)))
    async with working(store, server):
        await server.until(lambda server: server.running == 500)
        store.change(batch.id, cancel)
        looks.clear()
        await server.until(lambda server: not server.running)
        await server.until(lambda _: len(looks) > 1)
    assert looks[:2] == [500, 0]
    assert batch_worker.POLL_SECONDS <= 0.5


@pytest.mark.parametrize("trouble", [503, 429, None])
async def test_a_line_that_the_node_cannot_take_is_sent_again(
    store: BatchStore, trouble: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.server.batch.line_sender.BACKOFF_SECONDS", 0.01)
    asked: list[str] = []

    async def send(owner: str, sent: InputLine) -> Answer:
        asked.append(sent.custom_id)
        if asked.count(sent.custom_id) < 3:
            if trouble is None:
                raise NoAnswerError("gone")
            return Answer(trouble, b"{}")
        return await answer(owner, sent)

    batch = batch_of(store, jsonl(named(5)))
    async with working(store, send):
        done = await ended(store, batch)
    assert (done.status, done.completed, len(asked)) == ("completed", 5, 15)


async def test_owners_take_turns(store: BatchStore) -> None:
    server = Server()
    owners: list[str] = []

    async def send(owner: str, sent: InputLine) -> Answer:
        owners.append(owner)
        return await server(owner, sent)

    batches = [batch_of(store, jsonl(named(400)), "a") for _ in range(2)]
    async with working(store, send):
        # All lines of ``a``'s first batch have been read by then, so it never lacks one.
        await server.until(lambda _: "a" in owners)
        batches.append(batch_of(store, jsonl(named(400)), "b"))
        await server.until(lambda _: owners.count("b") >= 5)
        server.open.set()
        for batch in batches:
            await ended(store, batch)
    first = owners.index("b")
    assert sorted(owners[first : first + 10]) == ["a"] * 5 + ["b"] * 5


async def test_a_full_disk_is_waited_for(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(batch_run, "DISK_SECONDS", 0.01)
    append, failures = AnswerLog.append, [OSError(28, "No space left on device")] * 3

    def fail_at_first(log: AnswerLog, found: list[Result]) -> None:
        if failures:
            raise failures.pop()
        append(log, found)

    monkeypatch.setattr(AnswerLog, "append", fail_at_first)
    batch = batch_of(store, jsonl(named(4)))
    async with working(store):
        done = await ended(store, batch)
    assert (done.status, done.completed) == ("completed", 4)
    assert "No space left" in caplog.text
    assert not failures


async def test_a_full_disk_of_the_store_is_waited_for(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(batch_worker, "DISK_SECONDS", 0.01)
    monkeypatch.setattr(batch_worker, "LOOK_SECONDS", 0.01)
    rest = asyncio.Event()
    fails = {
        # After the check of the input come counts, as the batch cannot end before ``rest``.
        "change": iter([True, True, False, True, True, True]),
        "finish": iter([True]),
        "sweep": iter([True]),
    }

    def fail_at_first(name: str) -> None:
        act = getattr(BatchStore, name)

        def failing(*args: Any) -> Any:
            if next(fails[name], False):
                raise OSError(28, "database or disk is full")
            return act(*args)

        monkeypatch.setattr(BatchStore, name, failing)

    async def send(owner: str, sent: InputLine) -> Answer:
        if sent.custom_id != "line 1":
            await rest.wait()
        return await answer(owner, sent)

    for name in fails:
        fail_at_first(name)
    batch = batch_of(store, jsonl(named(4)))
    async with working(store, send):
        await until(store, batch, lambda batch: batch.completed == 1)
        rest.set()
        done = await ended(store, batch)
    assert (done.status, done.completed) == ("completed", 4)
    assert set(results(store, done).values()) == {1}
    assert not [name for name, left in fails.items() if next(left, False)]
    assert "disk is full" in caplog.text


async def test_a_batch_ends_once_though_its_empty_file_stays(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    finish, finished = BatchStore.finish, []

    def finish_and_lock(*args: Any) -> Any:
        finished.append(args)
        monkeypatch.setattr(Path, "unlink", refuse)
        return finish(*args)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(BatchStore, "finish", finish_and_lock)
    monkeypatch.setattr(batch_worker, "LOOK_SECONDS", 0.01)
    async with working(store):
        first = await ended(store, batch_of(store, jsonl(named(2))))
        monkeypatch.undo()
        second = await ended(store, batch_of(store, jsonl(named(2))))
    assert [first.status, second.status] == ["completed", "completed"]
    assert len(finished) == 1
    assert "cannot be written" not in caplog.text


async def test_another_worker_goes_on_where_one_has_stopped(store: BatchStore) -> None:
    asked: list[str] = []

    async def send(owner: str, sent: InputLine) -> Answer:
        asked.append(sent.custom_id)
        return await answer(owner, sent)

    batch = batch_of(store, jsonl(named(2000)))
    for _ in range(5):
        before = len(asked)
        async with working(store, send):
            while len(asked) < before + 100:
                await asyncio.sleep(0)
    async with working(store, send):
        done = await ended(store, batch)
    assert (done.status, done.completed) == ("completed", 2000)
    assert set(results(store, done).values()) == {1}
    assert len(asked) < 2500


async def test_what_has_expired_is_swept(store: BatchStore) -> None:
    batch = batch_of(store, jsonl(named(1)))
    async with working(store, keep_seconds=100.0):
        done = await ended(store, batch)
    clock = ManualClock(NOW + 99)
    async with working(store, clock=clock, keep_seconds=100.0):
        fresh = batch_of(store, jsonl(named(1)), "other", expires_at=NOW + 86400)
        await ended(store, fresh)
    assert store.file("", done.output_file_id or "", NOW + 99) is not None
    assert store.sweep(NOW + 102, 100.0) == 2
    assert store.batch("", batch.id) is None
    assert not store.path(done.output_file_id or "").exists()
