"""Uploads at the same time: together they get no more room than there is, and give it back."""

import asyncio
import errno
import fcntl
import shutil
from collections import namedtuple
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal.server.batch.batch_options import BatchLimits
from shoal.server.batch.batch_store import BatchStore, NoRoomError
from shoal.server.batch.list_answers import Batches
from shoal.server.batch.upload_room import FORM_BYTES, UploadRoom
from shoal.server.frontend.app import AppOptions, Backstage, build_app
from shoal.server.gate.placement import Placements
from tests.server.batch.batches import store_in

MOST = 1 << 20
"""Bytes of all files of the one owner."""
HEAD = (
    b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
)
TAIL = b"\r\n--x--\r\n"
Usage = namedtuple("Usage", "total used free")


def client(store: BatchStore) -> httpx.AsyncClient:
    """Return a client of an application that has these routes, and no engine."""
    parts: dict[str, Any] = dict.fromkeys(("control", "door", "is_alive", "registered"))
    parts |= {"rejected": [].append, "feed": None, "placements": Placements()}
    batches = Batches(store, BatchLimits(stored_bytes=MOST))
    app = build_app(Backstage(**parts, batches=batches), AppOptions())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://x", timeout=60)


class Upload:
    """A file that is sent in two halves, of which the second is sent when it is told so."""

    def __init__(self, http: httpx.AsyncClient, size: int, *, declared: bool = True) -> None:
        self.half_way = asyncio.Event()
        self.goes_on = asyncio.Event()
        self.breaks = False
        self._size = size
        headers = {"Content-Type": "multipart/form-data; boundary=x"}
        if declared:
            headers["Content-Length"] = str(len(HEAD) + size + len(TAIL))
        sending = http.post("/v1/files", content=self._pieces(), headers=headers)
        self.answer = asyncio.create_task(sending)

    async def _pieces(self) -> AsyncIterator[bytes]:
        half = self._size // 2
        yield HEAD + b"x" * half
        self.half_way.set()
        await self.goes_on.wait()
        yield b"x" * (self._size - half)
        yield b"" if self.breaks else TAIL

    async def ended(self) -> int:
        self.goes_on.set()
        return (await self.answer).status_code


def stored(store: BatchStore) -> int:
    """Return the bytes of all files, none of them twice though they move to the first folder."""
    size = 0
    for folder in (store.path("x").parent, store.incoming("x").parent):
        for path in folder.iterdir():
            with suppress(FileNotFoundError):  # it was of an upload that has just been refused
                size += path.stat().st_size
    return size


@pytest.fixture
def store(tmp_path: Path) -> BatchStore:
    return store_in(tmp_path)


async def test_the_room_that_one_upload_was_promised_is_not_another_one_s(
    store: BatchStore,
) -> None:
    async with client(store) as http:
        first = Upload(http, MOST * 6 // 10)
        await first.half_way.wait()
        second = Upload(http, MOST * 6 // 10)
        refused = await second.answer  # at once: none of its second half is read
        assert refused.status_code == 413
        assert refused.json()["error"]["param"] == "file"
        assert f"{MOST} bytes together" in refused.json()["error"]["message"]
        assert not second.half_way.is_set()
        assert await first.ended() == 200
    assert stored(store) == MOST * 6 // 10


@pytest.mark.parametrize("declared", [True, False])
async def test_many_uploads_at_once_never_have_more_than_there_may_be(
    store: BatchStore, declared: bool
) -> None:
    async with client(store) as http:
        uploads = [Upload(http, MOST * 3 // 10, declared=declared) for _ in range(20)]
        for upload in uploads:
            waits = (upload.answer, asyncio.create_task(upload.half_way.wait()))
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            assert stored(store) <= MOST
        statuses = [await upload.ended() for upload in uploads]
    assert set(statuses) == {200, 413}
    assert statuses.count(200) <= 3
    assert stored(store) == statuses.count(200) * (MOST * 3 // 10)


async def test_an_upload_that_fails_gives_its_room_back(store: BatchStore) -> None:
    async with client(store) as http:
        first = Upload(http, MOST * 6 // 10)
        first.breaks = True
        await first.half_way.wait()
        assert await first.ended() == 400
        assert await Upload(http, MOST * 6 // 10).ended() == 200


async def test_an_upload_that_is_cancelled_gives_its_room_back(store: BatchStore) -> None:
    async with client(store) as http:
        first = Upload(http, MOST * 6 // 10)
        await first.half_way.wait()
        first.answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first.answer
        assert stored(store) == 0
        assert await Upload(http, MOST * 6 // 10).ended() == 200


@pytest.mark.parametrize("declared", [True, False])
async def test_a_file_may_fill_the_room_to_the_last_byte(store: BatchStore, declared: bool) -> None:
    async with client(store) as http:
        assert await Upload(http, MOST, declared=declared).ended() == 200
        assert await Upload(http, 1, declared=declared).ended() == 413


async def test_the_room_of_a_front_end_that_was_killed_is_free_again(store: BatchStore) -> None:
    dead, alive = store.incoming("file-dead"), store.incoming("file-alive")
    dead.write_bytes(b"x" * 1000)
    with alive.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        store.reserve("file-dead", "me", 600, 1000)
        store.reserve("file-alive", "me", 600, 1000)  # it finds that the other one is dead
        assert not dead.exists()
        with pytest.raises(NoRoomError):
            store.reserve("file-new", "me", 600, 1000)
        assert alive.exists()
    store.reserve("file-new", "me", 600, 1000)
    assert not alive.exists()


async def test_what_was_kept_before_stays_if_there_is_no_room_for_more(store: BatchStore) -> None:
    with store.incoming("file-a").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        store.reserve("file-a", "me", 600, 1000)
        with pytest.raises(NoRoomError):
            store.reserve("file-a", "me", 1001, 1000)
        with pytest.raises(NoRoomError):
            store.reserve("file-b", "me", 401, 1000)
        store.reserve("file-c", "another", 401, 1000)


async def test_uploads_together_do_not_fill_the_disk(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_bytes = MOST // 2
    free = first_bytes + FORM_BYTES
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, free - stored(store)))
    async with client(store) as http:
        first = Upload(http, first_bytes)
        await first.half_way.wait()
        refused = await Upload(http, first_bytes).answer
        assert refused.status_code == 507
        assert refused.json()["error"]["message"] == "the disk of the files is full"
        assert await first.ended() == 200


async def test_an_upload_takes_no_room_of_a_disk_that_cannot_be_written(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(BatchStore, "reserve", fail)
    room = UploadRoom(store, "file-a", "me", MOST, FORM_BYTES + 1)
    with pytest.raises(OSError, match="Input/output"):
        async with room:
            pytest.fail("it has no room")
    assert room.file.closed
    assert stored(store) == 0
