"""What callers hear while the disk of the files is full."""

import errno
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal.server.batch.batch_store import BatchStore
from shoal.server.batch.list_answers import Batches
from shoal.server.frontend.app import AppOptions, Backstage, build_app
from shoal.server.gate.placement import Placements
from tests.server.batch.batches import CHAT, batch_of, jsonl, named, store_in

BATCH = {"endpoint": CHAT, "completion_window": "24h"}


def client(store: BatchStore) -> httpx.AsyncClient:
    """Return a client of an application that has these routes, and no engine."""
    parts: dict[str, Any] = dict.fromkeys(("control", "door", "is_alive", "registered"))
    parts |= {"rejected": [].append, "feed": None, "placements": Placements()}
    app = build_app(Backstage(**parts, batches=Batches(store)), AppOptions())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://x")


@pytest.mark.parametrize(
    ("error", "status"), [(errno.ENOSPC, 507), (errno.EDQUOT, 507), (errno.EIO, 500)]
)
async def test_what_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, status: int
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(error, "no room")

    store = store_in(tmp_path)
    batch = batch_of(store, jsonl(named(1)))
    for name in ("take_in", "add_batch", "change"):
        monkeypatch.setattr(BatchStore, name, fail)
    async with client(store) as http:
        answers = [
            await http.post(
                "/v1/files", files={"file": jsonl(named(1))}, data={"purpose": "batch"}
            ),
            await http.post("/v1/batches", json={**BATCH, "input_file_id": batch.input_file_id}),
            await http.post(f"/v1/batches/{batch.id}/cancel"),
        ]
    assert [answer.status_code for answer in answers] == [status] * 3
    if status == 507:
        assert {answer.json()["error"]["message"] for answer in answers} == {
            "the disk of the files is full"
        }
    assert not list(store.incoming("x").parent.iterdir())
