"""The end of the node: requests go on while there is time, and are handed back when there is none.

The first half of the time the pool is served as ever. What still waits then is handed back: what
starts so late would hardly be done in time, and its caller can have it elsewhere. So is, at the
end, what still runs. Handed back means a 503 that says when to try again, or an error as the last
event of a stream that has begun.
"""

import logging
import math

from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.controller.books.request import Request
from shoal.runtime.controller.books.request_book import RequestBook
from shoal.runtime.controller.requests.admission import Admission
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages import RETRY_SECONDS, SHUTTING_DOWN, Outcome

log = logging.getLogger("shoal.controller")

WAITING_SHARE = 0.5
"""Part of the time that is left in which requests may leave the pool for a unit."""


class Closing:
    """Hands requests back once the node is to end.

    Args:
        env: the way to engines, and the time.
        requests: where every request is.
        admission: ends requests.
    """

    def __init__(self, env: Environment, requests: RequestBook, admission: Admission) -> None:
        self._transport = env.transport
        self._clock = env.clock
        self._requests = requests
        self._admission = admission
        self._last_start = math.inf
        """From when on nothing leaves the pool for a unit."""
        self._end = math.inf
        """From when on nothing runs."""
        self._looked_at = -math.inf

    def begin(self, seconds: float) -> None:
        """Let requests go on for so long, or for less if less was left."""
        now = self._clock()
        self._last_start = min(self._last_start, now + WAITING_SHARE * seconds)
        self._end = min(self._end, now + seconds)
        self._requests.close()

    @property
    def deadline(self) -> float | None:
        """When requests are to be handed back next."""
        times = (self._last_start, self._end)
        return min((at for at in times if self._looked_at < at < math.inf), default=None)

    def hand_back(self) -> None:
        """Hand back what there is no time left for, newcomers included."""
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
                abort = m.AbortRequests(list(core.requests))
                self._transport.to_engine(core.unit.leader, abort)
                taken += self._requests.remove_all(core.unit)
        return taken
