"""A node without a serving engine: requests wait for one to come back, but not for ever.

Engines that died together must start again, which may take minutes with a large model. Until then a
stream gets no tokens, and a request that has not begun could be served elsewhere. So after a while
all waiting requests are handed back, and so are newcomers until an engine serves again.
"""

import logging

from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.controller.requests.admission import Admission
from shoal.runtime.protocol.messages import UNAVAILABLE_RETRY_SECONDS, Outcome

log = logging.getLogger("shoal.controller")


class Outage:
    """Ends waiting requests when no engine has served for too long.

    Args:
        env: how long requests wait while no engine serves, and the time.
        books: which engines serve, and which requests wait.
        admission: ends requests.
    """

    def __init__(self, env: Environment, books: Books, admission: Admission) -> None:
        self._limit = env.config.outage_limit_seconds
        self._clock = env.clock
        self._engines = books.engines
        self._requests = books.requests
        self._admission = admission
        self._since: float | None = None
        self._is_over_limit = False

    @property
    def deadline(self) -> float | None:
        """When requests are ended; None: an engine serves, or they were ended already."""
        if self._since is None or self._limit is None or self._is_over_limit:
            return None
        return self._since + self._limit

    def end_waiting(self) -> None:
        """End all waiting requests, newcomers included, if no engine has served for too long."""
        if self._limit is None or not self._engines.started:
            return
        if self._engines.open:
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
        requests = [*self._requests.pool.take_all(), *self._requests.take_all_interrupted()]
        self._admission.fail(requests, Outcome.UNAVAILABLE, 503, reason, UNAVAILABLE_RETRY_SECONDS)
