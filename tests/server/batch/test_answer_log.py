"""The log of results: what was appended is found again, what was torn is cut off."""

import json
import os
from pathlib import Path

import pytest

from shoal.server.batch.answer_log import AnswerLog, Result, result_id, usage_of
from shoal.server.batch.batch_objects import Usage
from tests.server.batch.batches import USAGE


def result(number: int, *, failed: bool = False, body: object = None) -> Result:
    text = {
        "id": result_id("batch_x", number),
        "custom_id": f"line {number}",
        "response": {"status_code": 400 if failed else 200, "request_id": "r", "body": body},
        "error": None,
    }
    encoded = json.dumps(text).encode()
    return Result(number, failed, encoded, usage_of(json.dumps(body).encode()))


def opened(*paths: Path) -> AnswerLog:
    log = AnswerLog(*paths)
    log.recover()
    log.open()
    return log


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "answers", tmp_path / "failures"


def test_results_are_found_again(paths: tuple[Path, Path]) -> None:
    log = opened(*paths)
    body = {"choices": [], "usage": USAGE}
    log.append([result(7, body=body), result(9000, failed=True), result(1, body="no object")])
    log.close()
    again = opened(*paths)
    assert (again.completed, again.failed, again.usage) == (2, 1, Usage(3, 0, 2, 0))
    assert [n for n in range(10_000) if again.is_done(n)] == [1, 7, 9000]
    assert log.usage == again.usage
    again.close()


@pytest.mark.parametrize("torn", [b"{", b'{"id": "x', b"\0" * 4096, b'{"id": 1}\n'])
def test_a_torn_end_is_cut_off(paths: tuple[Path, Path], torn: bytes) -> None:
    log = opened(*paths)
    log.append([result(1), result(2)])
    log.close()
    whole = paths[0].read_bytes()
    for cut in (whole[:-1], whole[: len(whole) // 2 + 1], whole[:3]):
        paths[0].write_bytes(cut)
        again = opened(*paths)
        kept = cut.count(b"\n")
        assert (again.completed, paths[0].read_bytes().count(b"\n")) == (kept, kept)
        again.append([result(number) for number in (1, 2) if not again.is_done(number)])
        again.close()
        assert paths[0].read_bytes() == whole
    paths[0].write_bytes(whole + torn)
    again = opened(*paths)
    assert again.completed == 2
    assert paths[0].read_bytes() == whole
    again.close()


def test_one_file_may_hold_all_results(tmp_path: Path) -> None:
    path = tmp_path / "out"
    log = opened(path, path)
    log.append([result(1), result(2, failed=True)])
    log.close()
    again = opened(path, path)
    assert (again.completed, again.failed) == (1, 1)
    again.close()


def test_the_usage_of_responses_counts(paths: tuple[Path, Path]) -> None:
    usage = {
        "input_tokens": 10,
        "output_tokens": 4,
        "input_tokens_details": {"cached_tokens": 8},
        "output_tokens_details": {"reasoning_tokens": 3},
    }
    assert usage_of(json.dumps({"usage": usage}).encode()) == Usage(10, 8, 4, 3)
    assert usage_of(b'{"usage": 1}') == usage_of(b"[]") == usage_of(b"{") == Usage()


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """How many bytes of each file were synchronised last, by the file's inode."""
    found: dict[int, int] = {}
    fsync = os.fsync

    def synchronise(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        found[status.st_ino] = status.st_size

    monkeypatch.setattr(os, "fsync", synchronise)
    return found


def assert_on_disk(on_disk: dict[int, int], *paths: Path) -> None:
    for status in (path.stat() for path in paths):
        assert on_disk[status.st_ino] == status.st_size > 0


def test_results_count_when_they_are_on_the_disk(
    paths: tuple[Path, Path], on_disk: dict[int, int]
) -> None:
    log = opened(*paths)
    log.append([result(1), result(2, failed=True)])
    assert_on_disk(on_disk, *paths)
    log.append([result(3)])
    assert_on_disk(on_disk, *paths)
    log.close()


def test_what_a_killed_worker_wrote_counts_when_it_is_on_the_disk(
    paths: tuple[Path, Path], on_disk: dict[int, int]
) -> None:
    """Otherwise a batch could end with results that the machine may still lose."""
    log = opened(*paths)
    log.append([result(1), result(2, failed=True)])
    log.close()
    on_disk.clear()
    again = opened(*paths)
    assert (again.completed, again.failed) == (1, 1)
    assert_on_disk(on_disk, *paths)
    again.close()


def test_a_result_that_cannot_be_synchronised_does_not_count(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = opened(*paths)

    def fail(_descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output"):
            log.append([result(1)])
    assert (log.is_done(1), paths[0].read_bytes()) == (False, b"")
    log.append([result(1)])
    assert log.is_done(1)
    log.close()
