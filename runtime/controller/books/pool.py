"""The task pool: the node's one queue. A request leaves it only when a unit can start it."""

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator
from itertools import count, islice

from shoal.policies.values.snapshot import PoolRequest
from shoal.runtime.config import AGING_SECONDS, BACKGROUND_PRIORITY
from shoal.runtime.controller.books.held_bytes import HeldBytes
from shoal.runtime.controller.books.request import Request

_Key = tuple[float, float]
"""A request's rank and serial number. Keys are unique and sort in the order of service."""

SPARE_DEADLINES = 64
"""Deadlines of requests that have left which may always be kept, so that few are looked through."""


class TaskPool:
    """Waiting requests, in the order of service.

    A request gains one class of priority for every ``aging_seconds`` that it waits. All requests
    age alike, so the order of any two never changes: the one with the lower ``priority *
    aging_seconds + arrival`` comes first. So a request can be overtaken only by requests that
    arrive within ``aging_seconds`` times the difference in priority after it.

    Args:
        aging_seconds: the wait that makes up for one class; more than 0.

    Attributes:
        held: the bytes of the requests here, and of those that ``RequestBook`` has elsewhere.
    """

    def __init__(self, aging_seconds: float = AGING_SECONDS) -> None:
        self.held = HeldBytes()
        self._aging_seconds = aging_seconds
        self._serial = count()
        self._order: list[_Key] = []
        self._replaceable: list[_Key] = []
        """Requests that may be pushed out, in the order of service."""
        self._by_key: dict[_Key, Request] = {}
        self._keys: dict[str, _Key] = {}
        self._deadlines: dict[str, float] = {}
        self._due: list[tuple[float, str]] = []
        """A heap of the deadlines. About half of them may be of requests that have left."""
        self._callers: Counter[str] = Counter()
        self._tokens = 0
        self.background = 0
        """Requests of ``BACKGROUND_PRIORITY`` that wait."""
        self.background_tokens = 0
        """Their prompt tokens."""

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._keys

    @property
    def tokens(self) -> int:
        """Prompt tokens of all requests."""
        return self._tokens

    def waiting_of(self, caller: str) -> int:
        """Return the number of a caller's requests."""
        return self._callers[caller]

    def rank(self, request: Request) -> float:
        """Return a request's rank; requests with a lower rank are served first."""
        return request.seen.priority * self._aging_seconds + request.seen.arrival

    def add(self, request: Request, *, deadline: float | None = None) -> None:
        """Queue a request. One that comes back gets its old place, since its arrival decides it.

        Args:
            request: the request.
            deadline: when to give it up if it still waits; None: it may wait for ever.
        """
        key = (self.rank(request), next(self._serial))
        insort(self._order, key)
        self._by_key[key] = request
        self._keys[request.id] = key
        self._count(request, 1)
        if deadline is not None:
            self._deadlines[request.id] = deadline
            heapq.heappush(self._due, (deadline, request.id))
            if len(self._due) > 2 * len(self._deadlines) + SPARE_DEADLINES:
                self._due = [(at, name) for name, at in self._deadlines.items()]
                heapq.heapify(self._due)

    def get(self, request_id: str) -> Request | None:
        """Return a request; None if it is not here."""
        key = self._keys.get(request_id)
        return None if key is None else self._by_key[key]

    def replace(self, request: Request) -> None:
        """Change what is known of a request that is here; its place and its size stay."""
        self._by_key[self._keys[request.id]] = request

    def remove(self, request_id: str) -> Request | None:
        """Take a request out; None if it is not here."""
        key = self._keys.pop(request_id, None)
        if key is None:
            return None
        del self._order[bisect_left(self._order, key)]
        self._keep(key)
        request = self._by_key.pop(key)
        self._deadlines.pop(request_id, None)
        self._count(request, -1)
        return request

    def _count(self, request: Request, change: int) -> None:
        self.held.count(request, change)
        self._tokens += change * request.seen.prompt_tokens
        if request.seen.priority >= BACKGROUND_PRIORITY:
            self.background += change
            self.background_tokens += change * request.seen.prompt_tokens
        if request.terms.caller is not None:
            self._callers[request.terms.caller] += change

    def head(self, limit: int) -> tuple[PoolRequest, ...]:
        """Return the first ``limit`` requests."""
        return tuple(self._by_key[key].seen for key in islice(self._order, limit))

    def all(self) -> list[Request]:
        """Return every request, in order."""
        return [self._by_key[key] for key in self._order]

    def take_all(self) -> list[Request]:
        """Take every request out, in order."""
        requests = self.all()
        for request in requests:
            self.remove(request.id)
        return requests

    # --- making room --------------------------------------------------------------------------

    def let_in(self, request_id: str) -> None:
        """Note that a waiting request may be pushed out for more urgent ones."""
        insort(self._replaceable, self._keys[request_id])

    def keep(self, request_id: str) -> None:
        """Note that a waiting request may no longer be pushed out."""
        self._keep(self._keys[request_id])

    def _keep(self, key: _Key) -> None:
        place = bisect_left(self._replaceable, key)
        if self._replaceable[place : place + 1] == [key]:
            del self._replaceable[place]

    def behind(self, rank: float) -> int:
        """Return the number of requests that are served after a request of this rank."""
        return len(self._order) - bisect_right(self._order, (rank, math.inf))

    def replaceable(self, rank: float) -> Iterator[Request]:
        """Yield the requests behind this rank that may be pushed out, the last one first.

        The caller may call ``keep`` for a request that it gets.
        """
        for key in reversed(self._replaceable):
            if key[0] <= rank:
                return
            yield self._by_key[key]

    def priority_before(self, now: float, kept: int) -> int | None:
        """Return the least urgent priority with which a request could push one out.

        Args:
            now: when the request would come.
            kept: how many requests must still be behind it.

        Returns:
            The priority; None if no request could push one out.
        """
        if not self._replaceable or len(self._order) <= kept:
            return None
        rank = min(self._replaceable[-1][0], self._order[-1 - kept][0])
        return math.ceil((rank - now) / self._aging_seconds) - 1

    # --- deadlines ----------------------------------------------------------------------------

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of a waiting request."""
        while self._due and self._deadlines.get(self._due[0][1]) != self._due[0][0]:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def take_expired(self, now: float) -> list[Request]:
        """Take out the requests whose deadline has come by ``now``, the earliest first."""
        expired = []
        while (deadline := self.next_deadline) is not None and deadline <= now:
            request = self.remove(self._due[0][1])
            if request is not None:
                expired.append(request)
        return expired
