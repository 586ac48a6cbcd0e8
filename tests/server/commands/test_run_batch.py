"""``shoal run-batch``: the bar that shows its progress, and the server that it starts for a job."""

import asyncio
import json
import os
import pty
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from shoal.server.commands import cli
from tests.loadgen.stand_in import stand_in
from tests.server.batch.batches import jsonl, line
from tests.server.node import children_of, key_file

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def paths(folder: Path, lines: list[dict[str, Any]]) -> list[str]:
    """Write an input file, and return the options that name it and the output file."""
    (folder / "in.jsonl").write_bytes(jsonl(lines))
    return ["-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl")]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(one) for one in path.read_text().splitlines()]


class Terminal:
    """What a command writes to its terminal."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self.shown = ""

    async def until(self, text: str) -> None:
        """Wait until the terminal shows a text after what was waited for before."""
        while text not in self.shown:
            piece = await self._reader.read(1 << 16)
            assert piece, self.shown
            self.shown = _CONTROL.sub("", self.shown + piece.decode())
        self.shown = self.shown.partition(text)[2]


@asynccontextmanager
async def terminal() -> AsyncIterator[tuple[Terminal, int]]:
    """Open a terminal: what is written to it, and the descriptor to write to."""
    ours, theirs = pty.openpty()
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours, "rb", buffering=0)
    )
    try:
        yield Terminal(reader), theirs
    finally:
        transport.close()
        os.close(theirs)


async def test_a_bar_shows_how_far_the_job_is(tmp_path: Path) -> None:
    rest = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        asked = await request.json()
        if asked["held"]:
            await rest.wait()
        return web.json_response({}, status=400 if asked["wrong"] else 200)

    lines = [line(str(n), held=n > 3, wrong=n == 1) for n in range(1, 6)]
    async with stand_in() as server, terminal() as (shown, descriptor):
        server.answer = answer
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "shoal.server.commands.cli", "run-batch", "--url", server.url),
            *paths(tmp_path, lines),
            stderr=descriptor,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        )
        await shown.until("3/5 1 failed")
        rest.set()
        await shown.until("5/5 1 failed")
        await shown.until("4 answers, 1 failures")
        assert await process.wait() == 0
    assert len(read(tmp_path / "out.jsonl")) == 5


def test_a_server_is_started_for_the_job_and_ended_after_it(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    private = tmp_path_factory.mktemp("p")  # addresses of sockets have at most 107 characters
    for name, value in (
        *(("TMPDIR", str(private)), ("XDG_CACHE_HOME", str(private))),
        ("OPENAI_API_KEY", "one"),
    ):
        monkeypatch.setenv(name, value)
    before = children_of(os.getpid())
    fields = {"model": "shoal-demo", "messages": [{"role": "user", "content": "Hello"}]}
    lines = [line(f"line {n}", **fields, max_tokens=n) for n in (0, 1, 2)]
    serve = ("--fake-engine", "--engines", "1")
    keys = ("--api-key-file", str(key_file(tmp_path / "keys.json", "one")))
    assert cli.main(["run-batch", *paths(tmp_path, lines), *serve, *keys]) == 0
    said = capfd.readouterr().err
    assert "Shoal serves shoal-demo on http://127.0.0.1:" in said
    assert "2 answers, 1 failures" in said
    found = {one["custom_id"]: one["response"] for one in read(tmp_path / "out.jsonl")}
    assert {name: one["status_code"] for name, one in found.items()} == {
        "line 0": 400,
        "line 1": 200,
        "line 2": 200,
    }
    assert found["line 2"]["body"]["usage"]["completion_tokens"] == 2
    assert children_of(os.getpid()) == before
    assert list(private.glob("shoal-*")) == [], "the node has cleaned up after itself"


@pytest.mark.parametrize(
    ("name", "option"),
    [("-o", "in.jsonl"), ("-o", "./sub/../in.jsonl"), ("-e", "in.jsonl"), ("-e", "out.jsonl")],
)
def test_no_results_take_the_place_of_the_input_or_of_other_results(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, option: str
) -> None:
    (tmp_path / "sub").mkdir()
    command = ["run-batch", *paths(tmp_path, [line("a")]), name, str(tmp_path) + "/" + option]
    assert cli.main([*command, "--url", "http://127.0.0.1:1"]) == 2
    assert "each must be a file of its own" in capfd.readouterr().err


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_a_url_may_end_as_that_of_a_client_does(tmp_path: Path, suffix: str) -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.json_response({})

    async with stand_in() as server:
        server.answer = answer
        command = ["run-batch", *paths(tmp_path, [line("a")]), "--url", server.url + suffix]
        assert await asyncio.to_thread(cli.main, command) == 0
    assert "/v1/chat/completions" in asked


def test_a_server_that_does_not_start_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["run-batch", *paths(tmp_path, [line("a")]), "--engines", "none"]
    assert cli.main(command) == 2
    said = capfd.readouterr().err
    assert "--engines" in said
    assert "the server has not started: exit code 2" in said
    assert not (tmp_path / "out.jsonl").exists()


async def test_a_server_that_ends_during_the_job_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = tmp_path / "asked"

    async def answer(request: web.Request) -> web.Response:
        asked.touch()
        return web.Response(status=503)

    script = tmp_path / "python"
    monkeypatch.setattr("sys.executable", str(script))
    async with stand_in() as server:
        server.answer = answer
        # As a node that dies with the first request; the stand-in is only what answers in its name.
        script.write_text(
            f"#!/bin/sh\necho 'Shoal serves m on {server.url}'\n"
            f"until [ -e {asked} ]; do sleep 0.01; done\n"
        )
        script.chmod(0o700)
        command = ["run-batch", *paths(tmp_path, [line("a")])]
        assert await asyncio.to_thread(cli.main, command) == 2
    assert "the server has ended: the same command goes on with the rest" in capfd.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()
