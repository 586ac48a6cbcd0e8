"""The store by itself; the worker's and the routes' tests cover the rest."""

import errno
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.server.batch.batch_objects import Batch
from tests.server.batch.batches import batch_of, jsonl, named, store_in


def test_a_full_disk_is_told_as_with_any_file_and_undoes_the_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite3.connect

    def connect_with_little_room(*args: Any, **options: Any) -> sqlite3.Connection:
        db = connect(*args, **options)
        db.execute("PRAGMA max_page_count=32")
        return db

    def grow(batch: Batch) -> Batch:
        return msgspec.structs.replace(batch, metadata={"text": "x" * 200_000})

    monkeypatch.setattr(sqlite3, "connect", connect_with_little_room)
    store = store_in(tmp_path)
    batch = batch_of(store, jsonl(named(1)))
    for _ in range(2):  # the first error leaves nothing that disturbs the second
        with pytest.raises(OSError, match="full") as problem:
            store.change(batch.id, grow)
        assert problem.value.errno == errno.ENOSPC
    assert store.batch("", batch.id) == batch
    monkeypatch.undo()
    assert store_in(tmp_path).change(batch.id, grow).metadata is not None
