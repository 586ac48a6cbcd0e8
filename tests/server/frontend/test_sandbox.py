import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.server.frontend.sandbox import KilledError, RefusedError, Sandbox

_prepared = False


def prepare() -> None:
    global _prepared
    _prepared = True


def work(job: bytes) -> None:
    """Do what a job says."""
    if job == b"wrong":
        raise ValueError("it is\nwrong")
    if job == b"endless":
        while True:
            pass
    if job == b"huge":
        bytearray(8 << 30)
    if job == b"crash":
        os.abort()
    if job == b"unprepared" and _prepared:
        raise ValueError("prepared")
    if job.startswith(b"long"):
        raise ValueError(str(len(job)))
    if job.startswith(b"wait"):
        while not Path(job[4:].decode()).exists():
            pass
    if job.startswith(b"write"):
        Path(job[5:].decode()).write_bytes(b"x")


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(work, prepare, memory_bytes=1 << 30) as sandbox:
        yield sandbox


async def refusal(sandbox: Sandbox, job: bytes) -> str:
    with pytest.raises(RefusedError) as caught:
        await sandbox.run(job, 1)
    return str(caught.value)


async def test_jobs_are_done_and_wrong_ones_refused_in_one_line(sandbox: Sandbox) -> None:
    await sandbox.run(b"fine", 1)
    assert await refusal(sandbox, b"wrong") == "it is wrong"
    assert await refusal(sandbox, b"long" + b"x" * 1_000_000) == "1000004"
    await sandbox.run(b"fine", 1)


@pytest.mark.parametrize("job", [b"endless", b"crash"])
async def test_a_job_that_does_not_end_well_is_refused_and_hurts_no_other(
    sandbox: Sandbox, job: bytes
) -> None:
    text, _ = await asyncio.gather(refusal(sandbox, job), sandbox.run(b"fine", 1))
    assert "more than 1 s, or too much memory" in text
    await sandbox.run(b"fine", 1)


async def test_a_job_without_a_process_is_not_refused_and_the_next_one_is_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fork, full = os.fork, tmp_path / "full"

    def fork_if_there_is_room() -> int:
        if full.exists():
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", fork_if_there_is_room)
    with Sandbox(work, prepare, memory_bytes=1 << 30) as sandbox:
        full.touch()
        for job in (b"fine", b"long" + b"x" * 10_000_000):
            with pytest.raises(OSError, match="no process"):
                await sandbox.run(job, 1)
        full.unlink()
        await sandbox.run(b"fine", 1)


async def test_every_job_has_a_limit_of_its_own(sandbox: Sandbox) -> None:
    for seconds in (2, 1):
        with pytest.raises(KilledError, match=f"more than {seconds} s"):
            await sandbox.run(b"endless", seconds)


async def test_memory_is_bounded(sandbox: Sandbox) -> None:
    assert await refusal(sandbox, b"huge") == "MemoryError"
    await sandbox.run(b"fine", 1)


async def test_a_job_writes_no_file(sandbox: Sandbox, tmp_path: Path) -> None:
    assert await refusal(sandbox, b"write" + str(tmp_path / "f").encode())
    assert (tmp_path / "f").stat().st_size == 0


async def test_it_is_prepared_once_and_apart(sandbox: Sandbox) -> None:
    assert await refusal(sandbox, b"unprepared") == "prepared"
    assert not _prepared


async def test_jobs_run_beside_each_other(sandbox: Sandbox, tmp_path: Path) -> None:
    """Each of the first ends only when a later one has made its file."""
    files = [str(tmp_path / str(number)).encode() for number in range(5)]
    waiting = [asyncio.create_task(sandbox.run(b"wait" + file, 20)) for file in files]
    for file in files:
        assert await refusal(sandbox, b"write" + file)  # the file is made, and stays empty
    await asyncio.gather(*waiting)


async def test_nothing_is_left_of_it() -> None:
    with Sandbox(work, prepare, memory_bytes=1 << 30) as sandbox:
        await sandbox.run(b"fine", 1)
        pid = sandbox._pid
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(OSError, match="descriptor"):
        await sandbox.run(b"fine", 1)
