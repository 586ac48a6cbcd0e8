"""How engines map each other's KV buffers, and let go of them when an engine ends."""

import fcntl
import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from shoal.runtime.engine.groups.peer_memory import NotSharedError
from shoal.runtime.engine.kv.kv_memory import HeldBuffer, HostMemory
from shoal.runtime.engine.kv.peer_buffers import PeerBuffers
from tests.preloaded import Process

SIZE = 1 << 20
NAME = "shoal-test-kv"


def be_engine_1(directory: str, value: int) -> int:
    memory = HostMemory(NAME)
    buffer = memory.allocate(SIZE)
    buffer[:] = value
    PeerBuffers(Path(directory), 1, memory).announce(buffer)
    print("announced", flush=True)
    signal.pause()
    return 0


class Peer:
    """Engine 1, whose buffer holds the same number everywhere."""

    def __init__(self, directory: Path, value: int) -> None:
        told = [str(directory), value]
        self._process = Process(f"{__name__}:{be_engine_1.__name__}", told, os.environ)
        assert self._process.stdout.readline() == "announced\n"

    def kill(self) -> None:
        with self._process:
            self._process.kill()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int], Peer]]:
    peers = list[Peer]()

    def start_peer(value: int) -> Peer:
        peers.append(Peer(tmp_path, value))
        return peers[-1]

    yield start_peer
    for peer in peers:
        peer.kill()


@pytest.fixture
def own(tmp_path: Path) -> PeerBuffers:
    return PeerBuffers(tmp_path, 0, HostMemory(NAME))


def read(own: PeerBuffers) -> set[int]:
    """Return the numbers in engine 1's buffer, as engine 0 sees it."""
    with own.reading():
        buffer = own.buffer(1)
        assert isinstance(buffer, HeldBuffer)
        assert buffer.bytes.numel() == SIZE
        return set(buffer.bytes.unique().tolist())


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count(NAME)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        os.sched_yield()


def test_a_peer_is_read_and_let_go_of_when_it_is_killed(
    own: PeerBuffers, start: Callable[[int], Peer]
) -> None:
    peer = start(7)
    assert own.open_all(2, 0.0) == {}
    assert read(own) == {7}
    assert mapped() == 1
    peer.kill()
    wait_until(lambda: mapped() == 0)
    with pytest.raises(NotSharedError, match="the runner of engine 1 has ended"):
        read(own)


def test_a_runner_with_many_files_lets_go_of_a_peer_as_well(
    own: PeerBuffers, start: Callable[[int], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_process = os.pidfd_open

    def open_beyond_select(pid: int) -> int:
        low = open_process(pid)
        high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1024)
        os.close(low)
        return high

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2048)), hard))
    monkeypatch.setattr(os, "pidfd_open", open_beyond_select)
    peer = start(7)
    assert own.open_all(2, 0.0) == {}
    assert mapped() == 1
    peer.kill()
    wait_until(lambda: mapped() == 0)
    assert own.open_all(2, 0.0) == {}  # it has ended


def test_the_buffer_of_a_restarted_engine_is_mapped_anew(
    own: PeerBuffers, start: Callable[[int], Peer]
) -> None:
    peer = start(7)
    assert read(own) == {7}
    peer.kill()
    start(8)
    assert read(own) == {8}
    assert mapped() == 1


def test_nothing_is_unmapped_while_it_is_read(
    own: PeerBuffers, start: Callable[[int], Peer]
) -> None:
    peer = start(7)
    with own.reading():
        buffer = own.buffer(1)
        assert isinstance(buffer, HeldBuffer)
        peer.kill()
        assert int(buffer.bytes[0]) == 7
    del buffer
    wait_until(lambda: mapped() == 0)


def test_reads_are_over_before_a_buffer_is_unmapped(
    tmp_path: Path, start: Callable[[int], Peer]
) -> None:
    settled = list[int]()
    own = PeerBuffers(tmp_path, 0, HostMemory(NAME), settle=lambda: settled.append(mapped()))
    peer = start(7)
    assert read(own) == {7}
    assert settled == []
    peer.kill()
    wait_until(lambda: mapped() == 0)
    assert settled == [1]


def test_an_engine_that_announces_nothing_is_named(own: PeerBuffers) -> None:
    assert own.open_all(2, 0.0) == {1: "engine 1 has not announced its KV cache"}


def test_an_engine_that_has_ended_is_no_problem_of_the_node(
    own: PeerBuffers, start: Callable[[int], Peer]
) -> None:
    start(7).kill()
    assert own.open_all(2, 0.0) == {}


def test_a_peer_that_cannot_be_mapped_is(own: PeerBuffers, tmp_path: Path) -> None:
    file = tmp_path / "kv-1"
    with (tmp_path / "other").open("wb") as other:
        told = {"pid": os.getpid(), "refused": "", "file": other.fileno(), "bytes": SIZE}
        file.write_text(json.dumps(told))
        assert own.open_all(2, 0.0)[1].endswith("is another file)")


class Refused(HostMemory):
    def handle(self, buffer: torch.Tensor) -> dict[str, int]:
        raise NotSharedError("the host refuses")


def test_an_engine_whose_memory_cannot_be_mapped_says_why(own: PeerBuffers, tmp_path: Path) -> None:
    memory = Refused(NAME)
    with pytest.raises(NotSharedError, match="the host refuses"):
        PeerBuffers(tmp_path, 1, memory).announce(memory.allocate(SIZE))
    assert own.open_all(2, 0.0) == {1: "the host refuses"}


def test_a_buffer_takes_memory_only_where_it_is_used_and_has_no_name() -> None:
    def shared() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("RssShmem:")[2].split()[0])

    before = shared()
    buffer = HostMemory(NAME).allocate(1 << 30)
    assert shared() - before < 1024
    buffer[: 1 << 20] = 1
    assert 1024 <= shared() - before < 4096
    assert not list(Path("/dev/shm").glob(f"*{NAME}*"))
