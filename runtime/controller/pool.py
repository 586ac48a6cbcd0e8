"""The task pool: the node's one queue. A request leaves it only when a unit can start it."""

from bisect import bisect_left, insort
from itertools import count, islice

from policies.snapshot import PoolRequest
from runtime.controller.book import Request

_Key = tuple[int, int]
"""Priority, then arrival: unique, and in the order of service."""


class TaskPool:
    """Waiting requests, by priority, then arrival."""

    def __init__(self) -> None:
        self._arrivals = count()
        self._order: list[_Key] = []
        self._by_key: dict[_Key, Request] = {}
        self._keys: dict[str, _Key] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._keys

    def add(self, request: Request) -> None:
        """Queue a request."""
        key = (request.seen.priority, next(self._arrivals))
        insort(self._order, key)
        self._by_key[key] = request
        self._keys[request.id] = key

    def remove(self, request_id: str) -> Request | None:
        """Take a request out; None if it is not here."""
        key = self._keys.pop(request_id, None)
        if key is None:
            return None
        del self._order[bisect_left(self._order, key)]
        return self._by_key.pop(key)

    def head(self, limit: int) -> tuple[PoolRequest, ...]:
        """Return the first ``limit`` requests."""
        return tuple(self._by_key[key].seen for key in islice(self._order, limit))

    def all(self) -> list[Request]:
        """Return every request, in order."""
        return [self._by_key[key] for key in self._order]
