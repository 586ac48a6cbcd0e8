"""The front end's door for the batch worker: it learns for whom the worker asks."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvicorn

from shoal.server.batch.input_lines import InputLine
from shoal.server.batch.line_sender import LineSender, deliver
from shoal.server.batch.worker_door import OWNER_HEADER, WorkerDoor, door_listener, door_path
from shoal.server.gate.middleware import BATCH_OWNER
from shoal.server.operator.admin_server import serving

LINE = InputLine("a", "/v1/completions", msgspec.Raw(b"{}"))


@pytest.mark.parametrize("owner", ["", "one", "Müller & Söhne", " team ", "two\nlines", "100%25"])
async def test_a_front_end_learns_the_owner_whatever_its_name(tmp_path: Path, owner: str) -> None:
    owners: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        owners.append(scope[BATCH_OWNER])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def idle() -> int:
        return 0

    config = uvicorn.Config(WorkerDoor(app, idle), lifespan="off", log_config=None)
    sockets = [str(door_path(tmp_path, 0))]
    async with (
        serving(config, door_listener(tmp_path, 0)),
        LineSender("http://x", sockets, owner_header=OWNER_HEADER) as sender,
    ):
        # It is tried again until the server listens.
        answer = await deliver(sender.send, owner, LINE, lambda: None, lambda _: asyncio.sleep(0))
    assert answer.status == 200
    assert owners == [owner]
