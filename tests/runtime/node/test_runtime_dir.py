"""A node's directory: private, short, and swept after a node that was killed."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from shoal.policies.values.layouts import tensor_parallel
from shoal.runtime.config import Addresses
from shoal.runtime.node.runtime_dir import make_runtime_dir, remove_former, remove_runtime_dir


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


FORK = multiprocessing.get_context("fork")


def _be_a_node(pipe: Connection) -> None:
    path = make_runtime_dir()
    Path(f"/dev/shm/test-{path.name}-0").touch()
    # Like an engine of the node: it has all open files.
    engine = FORK.Process(target=signal.pause)
    engine.start()
    pipe.send((str(path), engine.pid))
    signal.pause()


class OtherNode:
    """A node in another process."""

    def __init__(self) -> None:
        ours, theirs = FORK.Pipe()
        self._process = FORK.Process(target=_be_a_node, args=(theirs,))
        self._process.start()
        path, self._engine = ours.recv()
        self.path = Path(path)
        self.segment = Path(f"/dev/shm/test-{self.path.name}-0")

    def kill(self) -> None:
        """Kill the process that made the directory, and not the engine."""
        self._process.kill()
        self._process.join()

    def kill_engine(self) -> None:
        os.kill(self._engine, signal.SIGKILL)


@pytest.fixture
def other() -> Iterator[OtherNode]:
    node = OtherNode()
    yield node
    node.kill()
    node.kill_engine()
    node.segment.unlink(missing_ok=True)


def sweep() -> None:
    """Be a node that starts and ends."""
    remove_runtime_dir(make_runtime_dir())


def test_it_is_private_and_short() -> None:
    path = make_runtime_dir()
    assert path.stat().st_mode & 0o777 == 0o700
    longest = Addresses(f"/tmp/{path.name}").queue(tensor_parallel(range(8)), 7, generation=99)
    assert len(longest.removeprefix("ipc://")) < 107
    remove_runtime_dir(path)
    assert not path.exists()


def test_what_a_killed_node_left_is_removed_by_the_next(other: OtherNode) -> None:
    other.kill()
    assert other.path.exists()
    assert other.segment.exists()
    sweep()
    assert not other.path.exists()
    assert not other.segment.exists()


def test_what_is_in_use_stays(other: OtherNode) -> None:
    own = make_runtime_dir()
    sweep()
    assert other.path.exists()
    assert own.exists()
    remove_runtime_dir(own)


def test_other_directories_of_such_names_stay(temporary: Path) -> None:
    (temporary / "shoal-notes").mkdir()
    (temporary / "shoal-file").touch()
    (temporary / "shoal-link").symlink_to(temporary / "nowhere")
    sweep()
    assert len(list(temporary.iterdir())) == 3


def test_only_earlier_generations_are_removed(temporary: Path) -> None:
    names = ["members-0-1.0", "members-0-1.1", "members-0-1.2", "members-0-1.3", "members-2-3.0"]
    for name in names:
        (temporary / name).touch()
    remove_former(temporary / "members-0-1.2")
    assert sorted(path.name for path in temporary.iterdir()) == names[2:]
