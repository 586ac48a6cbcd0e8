"""Kills a batch worker at random moments, and starts another one, until its batches have ended.

The moments are counted in events: lines that are sent, writes that are synchronised, transactions.
So they do not depend on the speed of the machine, and every life of a worker gets somewhere.
"""

import asyncio
import json
import os
import random
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.server.batch.batch_objects import Batch
from shoal.server.batch.batch_store import BatchStore
from shoal.server.batch.input_lines import InputLine
from shoal.server.batch.line_sender import Answer
from tests.server.batch.batches import answer, batch_of, ended, jsonl, named, working

MOST_EVENTS = 150
"""A worker lives for at most so many events."""


def run(directory: Path, kills: int, lines: int, seed: int) -> tuple[list[Batch], int]:
    """Work batches off with workers that are killed; return the batches, and the kills.

    Args:
        directory: of the store.
        kills: after so many, no worker is killed any more.
        lines: of each of two batches; more batches come while there are kills left.
        seed: of the moments.
    """
    rng, done = random.Random(seed), 0
    store = BatchStore(directory)
    batches = [batch_of(store, jsonl(named(lines)), owner) for owner in ("a", "b")]
    store.close()
    while True:
        events = rng.randint(1, MOST_EVENTS) if done < kills else None
        if _live(directory, events):
            store = BatchStore(directory)
            if done >= kills:
                found = [store.batch(one.owner, one.id) for one in batches]
                store.close()
                return [one for one in found if one is not None], done
            batches.append(batch_of(store, jsonl(named(lines)), rng.choice("ab")))
            store.close()
        else:
            done += 1


def _live(directory: Path, events: int | None) -> bool:
    """Run a worker until all batches have ended; return False if it was killed before that."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _die_after(events)
            asyncio.run(_work(directory))
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or status == 0, f"the worker ended with {status}"
    return not killed


async def _work(directory: Path) -> None:
    store = BatchStore(directory)
    async with working(store, _send):
        for batch in store.unfinished():
            await ended(store, batch)


async def _send(owner: str, sent: InputLine) -> Answer:
    _event()
    if sent.custom_id.endswith("3"):
        return Answer(400, json.dumps({"error": owner}).encode())
    return await answer(owner, sent)


_left: list[int] = []


def _event(*_: object) -> None:
    """Count an event, and die if it was the last one."""
    if _left:
        _left[0] -= 1
        if _left[0] <= 0:
            os.kill(os.getpid(), signal.SIGKILL)


def _die_after(events: int | None) -> None:
    if events is None:
        return
    _left.append(events)
    os.fsync = _around(os.fsync)  # type: ignore[assignment]
    os.rename = _around(os.rename)
    os.unlink = _around(os.unlink)
    BatchStore._changing = _around(BatchStore._changing)  # type: ignore[method-assign]
    connect = sqlite3.connect

    def traced(*args: Any, **options: Any) -> sqlite3.Connection:
        found = connect(*args, **options)
        found.set_trace_callback(_event)
        return found

    sqlite3.connect = traced


def _around(act: Callable[..., Any]) -> Callable[..., Any]:
    def acting(*args: Any, **options: Any) -> Any:
        _event()
        result = act(*args, **options)
        _event()
        return result

    return acting
