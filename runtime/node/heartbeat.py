"""Whether the controller's loop turns, for the processes that depend on it.

The loop counts its turns in shared memory. That costs it nothing, and unlike messages the count
does not pile up where a reader is stopped. Readers look whether the count has changed.
"""

import mmap
from pathlib import Path

from shoal.runtime.clock import Clock, monotonic
from shoal.runtime.node.runtime_dir import shared_segment

LOOKS = 4
"""The loop counts as silent when so many looks in a row have found no further turn."""

_COUNT_BYTES = 8


def heartbeat_path(runtime_dir: str | Path) -> Path:
    """Return where a node's controller counts its turns: an unsigned integer of 8 bytes."""
    return shared_segment(runtime_dir, "turns")


class Heartbeat:
    """The controller's side: counts its turns.

    Args:
        path: see ``heartbeat_path``.

    Raises:
        FileExistsError: another controller counts there.
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

    Silence is counted by looks and not by time alone: while the reader itself does not run, as when
    the whole machine is suspended, it does not look, and the controller need not turn. The start
    does not count either: until the first turn the controller is not silent.

    Args:
        path: see ``heartbeat_path``.
        timeout: seconds of silence that are too long. They may become a quarter more, and what the
            reader takes from one look to the next; None: no silence is too long.
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
        """Whether the controller was silent for too long when it was last looked at."""
        return self._in_vain >= LOOKS

    def look(self) -> None:
        """Look whether the controller has turned; to be called several times within the limit."""
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
            return b""  # it has not begun
