"""The signals that ask a node to end."""

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class EndSignals:
    """Counts SIGINT and SIGTERM, and wakes up code that waits for sockets.

    Attributes:
        count: number of signals that have come inside ``caught``.
        wakeup: a socket to wait for inside ``caught``. A signal makes it readable, until ``rest``.
    """

    def __init__(self) -> None:
        self.count = 0
        self.wakeup: socket.socket

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Catch the signals while this context lasts."""
        self.wakeup, write_end = socket.socketpair()
        self.wakeup.setblocking(False)
        write_end.setblocking(False)
        before = {number: signal.signal(number, self._take) for number in _NUMBERS}
        previous_fd = signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(previous_fd)
            for number, handler in before.items():
                signal.signal(number, handler)
            self.wakeup.close()
            write_end.close()

    def rest(self) -> None:
        """Make ``wakeup`` unreadable until the next signal comes."""
        with suppress(BlockingIOError):
            self.wakeup.recv(64)

    def _take(self, number: int, frame: object) -> None:
        del number, frame
        self.count += 1
