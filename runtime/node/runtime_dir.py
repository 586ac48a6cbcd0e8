"""A node's private directory: made at its start and removed at its end, or by a later node.

The process that makes the directory holds a lock on it. The kernel releases the lock when that
process ends, in whatever way. So a directory whose lock is free belongs to a node that was killed.
"""

import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

log = logging.getLogger("shoal")

_PREFIX = "shoal-"
_LOCK = "lock"
_SHARED_MEMORY = Path("/dev/shm")

_held: dict[Path, IO[bytes]] = {}
"""The locks of this process. Its children do not inherit them."""


def make_runtime_dir() -> Path:
    """Make a directory, and remove those that killed nodes have left.

    Its path is short, because a Unix socket's path has at most 107 bytes.
    """
    path = Path(tempfile.mkdtemp(prefix=_PREFIX))
    # The file has another name until it is locked, so that no other process takes the lock first.
    lock = (path / "new-lock").open("wb")
    fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (path / "new-lock").rename(path / _LOCK)
    _held[path] = lock
    for other in path.parent.glob(f"{_PREFIX}*/{_LOCK}"):
        if other.parent not in _held and _is_stale(other):
            log.warning("removed %s, which a killed node had left", other.parent)
            remove_runtime_dir(other.parent)
    return path


def shared_segment(path: str | Path, name: str) -> Path:
    """Return the path of a node's shared memory segment; it is removed with the directory."""
    return _SHARED_MEMORY / f"{Path(path).name}-{name}"


def remove_runtime_dir(path: Path) -> None:
    """Remove a directory, and the shared memory that killed processes of its node have left."""
    # The names of such segments contain the directory's name.
    for segment in _SHARED_MEMORY.glob(f"*{path.name}*"):
        segment.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
    lock = _held.pop(path, None)
    if lock is not None:
        lock.close()


def remove_former(path: Path) -> None:
    """Remove files of a group's earlier generations, which processes that died did not remove.

    Args:
        path: file of the current generation, whose number is the suffix of the name.
    """
    for generation in range(int(path.suffix[1:])):
        path.with_suffix(f".{generation}").unlink(missing_ok=True)


def _is_stale(lock: Path) -> bool:
    """Return whether a lock is this user's and no process holds it."""
    try:
        if lock.stat().st_uid != os.geteuid():
            return False
        with lock.open("r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        # The lock is held, or gone by now, or in another user's directory.
        return False
    return True
