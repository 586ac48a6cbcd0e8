"""Descriptors go from runner to runner, and back to one that was started again."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from shoal.runtime.engine.weights.sharing.descriptors import KV, Descriptors


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Descriptors]:
    with closing(Descriptors(tmp_path, 0)) as own:
        yield own


def file_with(data: bytes) -> int:
    file = os.memfd_create("test")
    os.write(file, data)
    return file


def test_a_descriptor_is_of_the_same_file(own: Descriptors, tmp_path: Path) -> None:
    own.hold(0, file_with(b"weights"))
    with closing(Descriptors(tmp_path, 1)) as peer:
        file = peer.ask(0, 0)
        assert file is not None
        assert os.pread(file, 100, 0) == b"weights"
        os.close(file)


@pytest.mark.parametrize("count", [2, 253, 254])
def test_any_number_of_descriptors_comes_in_order(
    own: Descriptors, tmp_path: Path, count: int
) -> None:
    files = [file_with(str(number).encode()) for number in range(count)]
    own.hold(KV, *files)
    with closing(Descriptors(tmp_path, 1)) as peer:
        found = peer.ask_all(0, KV)
        assert [int(os.pread(file, 100, 0)) for file in found] == list(range(count))
        assert peer.ask_all(0, 7) == []
    for file in found:
        os.close(file)


def test_who_holds_nothing_says_so(own: Descriptors) -> None:
    assert own.ask(0, 1) is None


def test_who_has_not_started_or_has_ended_is_not_waited_for(
    own: Descriptors, tmp_path: Path
) -> None:
    assert own.ask(1, 1) is None
    ended = Descriptors(tmp_path, 1)
    ended.close()
    assert own.ask(1, 1) is None


def test_of_a_runner_that_ends_amid_its_answer_there_are_none(
    own: Descriptors, tmp_path: Path
) -> None:
    def answer_in_part(listener: socket.socket, file: int) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1)
            socket.send_fds(connection, [b"+"], [file])

    with socket.socket(socket.AF_UNIX) as listener, open(file_with(b"KV"), "rb") as kv:
        listener.bind(str(tmp_path / "weights-1"))
        listener.listen()
        peer = threading.Thread(target=answer_in_part, args=(listener, kv.fileno()))
        peer.start()
        assert own.ask_all(1, KV) == []
        peer.join()


def test_a_runner_gets_its_memory_back_from_a_peer(own: Descriptors, tmp_path: Path) -> None:
    former = Descriptors(tmp_path, 1)
    former.hold(1, file_with(b"kept"))
    file = own.ask(1, 1)
    assert file is not None
    own.hold(1, file)
    former.close()
    with closing(Descriptors(tmp_path, 1)) as again:
        found = again.ask(0, 1)
        assert found is not None
        assert os.pread(found, 100, 0) == b"kept"
        os.close(found)


def test_processes_that_ask_and_say_nothing_hold_up_no_other(
    own: Descriptors, tmp_path: Path
) -> None:
    own.hold(0, file_with(b"weights"))
    with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as other:
        for stopped in (one, other):
            stopped.connect(str(tmp_path / "weights-0"))
        file = own.ask(0, 0)
        assert file is not None
        os.close(file)
