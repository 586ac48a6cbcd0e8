"""A node's private directory: made at its start, gone at its end, and swept if nobody was left to.

The process that makes one holds a lock on it, which the kernel lets go of when that process ends,
however it ends. So a directory whose lock can be had belongs to a node that was killed.
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

    Short: a Unix socket's path has at most 107 bytes.
    """
    path = Path(tempfile.mkdtemp(prefix=_PREFIX))
    # Under another name until it is locked: nobody can have it in between.
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
    """Return the path of a node's segment of shared memory, which goes with its directory."""
    return _SHARED_MEMORY / f"{Path(path).name}-{name}"


def remove_runtime_dir(path: Path) -> None:
    """Remove a directory, and the shared memory that killed processes of its node have left."""
    # Such segments carry the directory's name.
    for segment in _SHARED_MEMORY.glob(f"*{path.name}*"):
        segment.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
    lock = _held.pop(path, None)
    if lock is not None:
        lock.close()


def remove_former(path: Path) -> None:
    """Remove what earlier generations of a group have left: processes that died did not.

    Args:
        path: of the generation that is there now, which its name ends with after a dot.
    """
    for generation in range(int(path.suffix[1:])):
        path.with_suffix(f".{generation}").unlink(missing_ok=True)


def _is_stale(lock: Path) -> bool:
    """Return whether a lock is this user's and nobody holds it."""
    try:
        if lock.stat().st_uid != os.geteuid():
            return False
        with lock.open("r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        # Held, or gone meanwhile, or in a directory that is none of ours.
        return False
    return True
