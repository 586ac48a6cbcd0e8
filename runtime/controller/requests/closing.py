"""The end of the node: requests go on while there is time, and are handed back when there is none.

For the first half of the time the pool is served as usual. Then all waiting requests are handed
back: they would hardly be done in time, and their callers can send them elsewhere. At the end of
the time the running requests are handed back, too. A caller whose request is handed back gets a 503
that says when to try again, or, if its stream has begun, an error as the last event.
"""

import logging
import math

from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.controller.books.request import Request
from shoal.runtime.controller.requests.aborts import send_aborts
from shoal.runtime.controller.requests.admission import Admission
from shoal.runtime.protocol.messages import RETRY_SECONDS, SHUTTING_DOWN, Outcome

log = logging.getLogger("shoal.controller")

WAITING_SHARE = 0.5
"""Share of the remaining time during which requests may still leave the pool for a unit."""


class Closing:
    """Hands requests back once the node has been told to end.

    Args:
        env: the transport to engines, and the time.
        books: where every request is.
        admission: ends requests.
    """

    def __init__(self, env: Environment, books: Books, admission: Admission) -> None:
        self._transport = env.transport
        self._clock = env.clock
        self._books = books
        self._requests = books.requests
        self._admission = admission
        self._last_start = math.inf
        """Clock time from which no request leaves the pool for a unit."""
        self._end = math.inf
        """Clock time from which no request runs."""
        self._looked_at = -math.inf

    def begin(self, seconds: float) -> None:
        """Let requests go on for ``seconds``, or for less if less time was left already."""
        now = self._clock()
        self._last_start = min(self._last_start, now + WAITING_SHARE * seconds)
        self._end = min(self._end, now + seconds)
        self._requests.close()

    @property
    def deadline(self) -> float | None:
        """When requests are handed back next."""
        times = (self._last_start, self._end)
        return min((at for at in times if self._looked_at < at < math.inf), default=None)

    def hand_back(self) -> None:
        """Hand back all requests that have no time left, newcomers included."""
        now = self._looked_at = self._clock()
        if self._last_start <= now:
            self._hand_back(self._requests.pool.take_all(), "waited")
        if self._end <= now:
            self._hand_back(self._take_running(), "ran")

    def _hand_back(self, requests: list[Request], what: str) -> None:
        if requests:
            log.warning("handed %d requests back that %s: the node ends", len(requests), what)
            self._admission.fail(
                requests, Outcome.HANDED_BACK, 503, SHUTTING_DOWN, retry_after=RETRY_SECONDS
            )

    def _take_running(self) -> list[Request]:
        taken = self._requests.take_all_interrupted()
        for core in self._requests.cores.values():
            if core.requests:
                send_aborts(self._transport, self._books, core.requests)
                taken += self._requests.remove_all(core.unit)
        return taken
