"""The lines of a batch that are to be sent, read in a thread some time before they are taken.

A batch that goes on after a restart may have a million lines with a result before, or between,
those that have none. The worker's event loop must not wait until all of them are skipped: it
cancels batches, and sends the lines of others.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import NamedTuple

from shoal.server.batch.input_lines import InputLine

MOST_LINES = 512
"""So many lines are read at once."""
MOST_BYTES = 8 << 20
"""No further line is read at once after so many bytes."""


class Numbered(NamedTuple):
    """A line with its number."""

    number: int
    line: InputLine
    size: int
    """Bytes."""


class LinesAhead:
    """Reads lines, and keeps at most twice what is read at once.

    Args:
        lines: the lines; None for each one that is to be skipped. Only one thread at a time asks
            for the next one.
        came: called on the event loop after lines were read, or could not be.

    Attributes:
        problem: why the lines cannot be read; None: they can.
    """

    def __init__(
        self, lines: Generator[Numbered | None, None, None], came: Callable[[], None]
    ) -> None:
        self._lines = lines
        self._came = came
        self._lock = threading.Lock()
        """Held while a thread reads ``lines``."""
        self._ready: deque[Numbered] = deque()
        self._ready_bytes = 0
        self._reading: asyncio.Task[None] | None = None
        self._all_read = False
        self._stopped = False
        self.problem: Exception | None = None

    @property
    def is_exhausted(self) -> bool:
        """Whether every line was taken."""
        return self._all_read and not self._ready

    def take(self) -> Numbered | None:
        """Return the next line; None: there is none, or it is still being read."""
        found = self._ready.popleft() if self._ready else None
        if found is not None:
            self._ready_bytes -= found.size
        if self._is_short and self._reading is None:
            self._reading = asyncio.create_task(self._read())
        return found

    @property
    def _is_short(self) -> bool:
        goes_on = not (self._all_read or self._stopped or self.problem)
        return goes_on and len(self._ready) < MOST_LINES and self._ready_bytes < MOST_BYTES

    async def _read(self) -> None:
        try:
            found, self._all_read = await asyncio.to_thread(self._next_lines)
            self._ready += found
            self._ready_bytes += sum(line.size for line in found)
        except Exception as error:  # noqa: BLE001 - whoever takes lines raises it
            self.problem = error
        finally:
            self._reading = None
        self._came()

    def _next_lines(self) -> tuple[list[Numbered], bool]:
        """Return some lines, and whether they are the last ones. Blocks."""
        found: list[Numbered] = []
        size = 0
        with self._lock:
            for line in self._lines:
                if self._stopped:
                    return [], False
                if line is not None:
                    found.append(line)
                    size += line.size
                if len(found) == MOST_LINES or size >= MOST_BYTES:
                    return found, False
        return found, True

    async def close(self) -> None:
        """Read no more lines, and close the input."""
        self._stopped = True
        if self._reading is not None:
            await self._reading
        with self._lock:
            self._lines.close()
