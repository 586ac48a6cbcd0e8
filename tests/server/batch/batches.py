"""Batches for tests: their lines, and a worker on a store without a server."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from shoal.runtime.clock import ManualClock
from shoal.server.batch.batch_objects import Batch, StoredFile, new_id
from shoal.server.batch.batch_store import BatchStore
from shoal.server.batch.batch_worker import BatchWorker, WorkerLimits
from shoal.server.batch.input_lines import InputLine
from shoal.server.batch.line_sender import Answer

CHAT = "/v1/chat/completions"
NOW = 1_800_000_000
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def line(name: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    """Return one line of an input file."""
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "m", **body}}


def jsonl(lines: Iterable[dict[str, Any]]) -> bytes:
    """Return lines as a file has them."""
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


def named(count: int) -> list[dict[str, Any]]:
    """Return lines with names of their own."""
    return [line(f"line {number}") for number in range(1, count + 1)]


def batch_of(store: BatchStore, content: bytes, owner: str = "", **fields: Any) -> Batch:
    """Add a file and its batch to a store."""
    file = StoredFile(new_id("file-"), owner, len(content), NOW, "in.jsonl", "batch")
    store.incoming(file.id).write_bytes(content)
    store.take_in(file, 1 << 40)
    batch = Batch(
        id=new_id("batch_"),
        owner=owner,
        endpoint=CHAT,
        input_file_id=file.id,
        completion_window="24h",
        created_at=NOW,
        expires_at=NOW + 86400,
    )
    store.add_batch(batch, 100)
    return batch


def results(store: BatchStore, batch: Batch) -> Counter[str]:
    """Return how often each line has a result, in both output files together."""
    found: Counter[str] = Counter()
    for name in filter(None, (batch.output_file_id, batch.error_file_id)):
        lines = store.path(name).read_text().splitlines()
        found.update(json.loads(text)["custom_id"] for text in lines)
    return found


async def answer(owner: str, sent: InputLine) -> Answer:
    """Answer a line at once."""
    await asyncio.sleep(0)
    return Answer(200, json.dumps({"of": sent.custom_id, "usage": USAGE}).encode())


async def busy() -> int:
    """Be a node that runs much."""
    return 1000


@asynccontextmanager
async def working(
    store: BatchStore, send: Any = answer, clock: Callable[[], float] | None = None, **limits: Any
) -> AsyncIterator[None]:
    """Have a worker work for as long as the context lasts; what stops it is raised."""
    own = BatchStore(store.path("x").parents[1])  # as in a process of its own
    worker = BatchWorker(
        own, send, busy, WorkerLimits(**limits), ManualClock(NOW) if clock is None else clock
    )
    task = asyncio.create_task(worker.work())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(store: BatchStore, batch: Batch, holds: Callable[[Batch], bool]) -> Batch:
    """Wait until something holds for a batch."""
    while True:
        found = store.batch(batch.owner, batch.id)
        assert found is not None
        if holds(found):
            return found
        await asyncio.sleep(0.01)


async def ended(store: BatchStore, batch: Batch) -> Batch:
    """Wait for the end of a batch."""
    return await until(store, batch, lambda found: found.status.is_final)


def store_in(directory: Path) -> BatchStore:
    """Return a store."""
    return BatchStore(directory / "store")
