"""A node of which no engine serves: requests wait for one to come back, but not for ever.

Engines that died together come back after the time that a start takes, which may be minutes for a
large model. Until then a stream has nothing to show, and a request that has not begun may be served
elsewhere. So after a while all that waits is handed back, and so is what comes before an engine
serves.
"""

import logging

from shoal.runtime.clock import Clock
from shoal.runtime.controller.books.book import Book, EngineState
from shoal.runtime.controller.books.pool import TaskPool
from shoal.runtime.controller.requests.admission import Admission
from shoal.runtime.protocol.messages import UNAVAILABLE_RETRY_SECONDS, Outcome

log = logging.getLogger("shoal.controller")


class Outage:
    """Ends what waits when no engine has served for too long.

    Args:
        limit: seconds for which requests wait for an engine when none serves; None: for ever.
        book: which engines serve, and which requests they have interrupted.
        pool: the requests that wait.
        admission: ends requests.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        limit: float | None,
        book: Book,
        pool: TaskPool,
        admission: Admission,
        clock: Clock,
    ) -> None:
        self._limit = limit
        self._book = book
        self._pool = pool
        self._admission = admission
        self._clock = clock
        self._since: float | None = None
        self._is_over_limit = False

    @property
    def deadline(self) -> float | None:
        """When requests are to be ended; None: an engine serves, or they have been."""
        if self._since is None or self._limit is None or self._is_over_limit:
            return None
        return self._since + self._limit

    def end_waiting(self) -> None:
        """End what has waited for too long, newcomers included."""
        if self._limit is None or not self._book.started:
            return
        if self._book.in_state(EngineState.SERVING):
            self._since, self._is_over_limit = None, False
            return
        now = self._clock()
        if self._since is None:
            self._since = now
        if now < self._since + self._limit:
            return
        reason = f"no engine has served for {self._limit:g} s"
        if not self._is_over_limit:
            self._is_over_limit = True
            log.error("requests are refused: %s", reason)
        self._end(reason)

    def _end(self, reason: str) -> None:
        requests = [*self._pool.all(), *self._book.interrupted.values()]
        self._book.interrupted.clear()
        for request in self._pool.all():
            self._pool.remove(request.id)
        self._admission.fail(requests, Outcome.UNAVAILABLE, 503, reason, UNAVAILABLE_RETRY_SECONDS)
