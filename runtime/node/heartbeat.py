"""Lets processes that depend on the controller see whether its loop runs.

The loop counts its turns in shared memory. This costs next to nothing, and unlike messages the
count does not pile up when a reader is stopped. Readers check whether the count has changed.
"""

import mmap
from pathlib import Path

from shoal.runtime.clock import Clock, monotonic
from shoal.runtime.node.runtime_dir import shared_segment

LOOKS = 4
"""The loop counts as silent after so many looks in a row that found no further turn."""

_COUNT_BYTES = 8


def heartbeat_path(runtime_dir: str | Path) -> Path:
    """Return the file in which a controller counts its turns, as an unsigned 8-byte integer."""
    return shared_segment(runtime_dir, "turns")


class Heartbeat:
    """The controller's side: counts its turns.

    Args:
        path: see ``heartbeat_path``.

    Raises:
        FileExistsError: another controller uses this file.
    """

    def __init__(self, path: Path) -> None:
        path.touch(mode=0o600, exist_ok=False)
        with path.open("r+b") as file:
            file.truncate(_COUNT_BYTES)
            self._count = memoryview(mmap.mmap(file.fileno(), _COUNT_BYTES)).cast("Q")

    def beat(self) -> None:
        """Count one more turn."""
        self._count[0] += 1


class HeartbeatMonitor:
    """A reader's side: knows whether the controller has been silent for too long.

    Silence is measured in looks and not in time alone. So time in which the reader itself does not
    run, for example because the machine is suspended, does not count as silence. Neither does the
    start: the controller is not silent before its first turn.

    Args:
        path: see ``heartbeat_path``.
        timeout: seconds of silence that are too long. Silence may be noticed later, by a quarter of
            that and the reader's time from one look to the next. None: no silence is too long.
        clock: monotonic seconds.
    """

    def __init__(self, path: Path, timeout: float | None, clock: Clock = monotonic) -> None:
        self._path = path
        self._timeout = timeout
        self._clock = clock
        self._seen = b""
        self._counted_at = clock()
        self._in_vain = 0

    @property
    def is_silent(self) -> bool:
        """Whether the controller had been silent for too long at the last look."""
        return self._in_vain >= LOOKS

    def look(self) -> None:
        """Check whether the controller has turned; call this several times within the limit."""
        if self._timeout is None:
            return
        count, now = self._read(), self._clock()
        if count != self._seen or not any(count):
            self._seen, self._counted_at, self._in_vain = count, now, 0
        elif now >= self._counted_at + self._timeout / LOOKS:
            self._counted_at = now
            self._in_vain += 1

    def _read(self) -> bytes:
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return b""  # the controller has not begun
