"""How several front ends share one listening socket: each accepts its part of the connections.

All front ends wait for the socket, and the kernel first wakes the one that began to wait last. If
each front end accepted every connection that is there, that one would have most of the connections,
and the work of their requests on one core. So here each front end accepts one connection at a time,
and none while another front end has fewer in use.

A connection in use has a request, or has not had one yet. Clients keep connections and mostly take
the one that they used last. So the connections that are in use may all be those of one front end,
however evenly they were accepted. A front end that has far more of them than another one therefore
closes connections after their responses, and clients open new ones.
"""

import asyncio
import errno
import multiprocessing
import socket
from collections.abc import Callable
from functools import partial

DEFER_SECONDS = 0.001
"""How long a front end leaves a connection to those that have fewer; they may be busy."""
FAR = 4
"""So many more connections in use than another front end has are too many, if that is also more
than a quarter of them."""
RETRY_SECONDS = 1.0
"""Pause after the process or the machine has run out of files or memory for connections."""
_ABSENT = 1 << 40
"""Count of a front end that accepts nothing."""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Tally:
    """Counts of the front ends' connections in use, in memory that they share.

    It is made before they start.

    Each front end writes only its own count, so that none waits for another.

    Args:
        front_ends: how many there are.
    """

    def __init__(self, front_ends: int) -> None:
        self._counts = multiprocessing.RawArray("q", [_ABSENT] * front_ends)

    def note(self, front_end: int, connections: int) -> None:
        """Note how many connections in use a front end has, and that it accepts more."""
        self._counts[front_end] = connections

    def leave(self, front_end: int) -> None:
        """Note that a front end accepts no more."""
        self._counts[front_end] = _ABSENT

    def counts(self) -> list[int]:
        """Return the count of each front end, a high number for one that accepts none."""
        return list(self._counts)


class Acceptor:
    """Accepts connections of a shared listener in the running event loop.

    Args:
        listener: the socket; others may listen on it too.
        tally: the connections of all front ends.
        front_end: number of this one.
        connections: returns how many it has in use.
        serve: takes over an accepted socket.
    """

    def __init__(
        self,
        listener: socket.socket,
        tally: Tally,
        front_end: int,
        connections: Callable[[], int],
        serve: Callable[[socket.socket], None],
    ) -> None:
        self._listener = listener
        self._tally = tally
        self._front_end = front_end
        self._connections = connections
        self._serve = serve
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None

    def start(self, backlog: int) -> None:
        """Listen, and accept from now on."""
        self._listener.setblocking(False)
        self._listener.listen(backlog)
        self.note()
        self._wait()

    def stop(self) -> None:
        """Accept no more; the others go on."""
        self._tally.leave(self._front_end)
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener)

    def note(self) -> None:
        """Note how many connections are in use. Call it when that has changed."""
        self._tally.note(self._front_end, self._connections())

    def is_far_ahead(self) -> bool:
        """Return whether another front end should have some of this one's connections."""
        counts = self._tally.counts()
        own = counts[self._front_end]
        return own != _ABSENT and own - min(counts) > max(FAR, own // 4)

    def _wait(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._take_turn)

    def _take_turn(self) -> None:
        """Accept one connection, or leave it to others for a moment."""
        counts = self._tally.counts()
        if self._is_ahead(counts):
            self._pause_for(DEFER_SECONDS, partial(self._take_what_is_left, counts))
        else:
            self._accept()

    def _take_what_is_left(self, counts: list[int]) -> None:
        """Accept what no other front end has taken: if the counts have changed, another one did."""
        self._wait()
        now = self._tally.counts()
        if now == counts or not self._is_ahead(now):
            self._accept()

    def _is_ahead(self, counts: list[int]) -> bool:
        return counts[self._front_end] > min(counts)

    def _pause_for(self, seconds: float, then: Callable[[], None]) -> None:
        # Without this, the loop would be woken again and again.
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(seconds, then)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:
            # Any other error needs no action: another front end was faster, or the client has gone.
            if error.errno in _EXHAUSTED:
                self._pause_for(RETRY_SECONDS, self._wait)
            return
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Count the connection now: its protocol, which counts it later, is not made yet.
        self._tally.note(self._front_end, self._connections() + 1)
        self._serve(accepted)
