"""How many bytes the controller keeps of requests: those on the node, and those that just ended.

The payload of a request stays until its end, because another unit may have to begin it again. The
features of its images make up most of it; without images these are its prompt, and what it asks of
sampling.
"""

from collections import Counter, deque
from collections.abc import Collection
from typing import NamedTuple

from shoal.runtime.controller.books.request import Request


class HeldBytes:
    """Bytes of the requests that have come and not ended.

    Attributes:
        total: of all of them.
    """

    def __init__(self) -> None:
        self.total = 0
        self._callers: Counter[str] = Counter()

    def count(self, request: Request, change: int) -> None:
        """Add a request (``change`` is 1) or take it out (-1)."""
        self.total += change * request.size
        caller = request.terms.caller
        if caller is not None:
            self._callers[caller] += change * request.size
            if not self._callers[caller]:
                del self._callers[caller]

    def of(self, caller: str) -> int:
        """Return the bytes of a caller's requests."""
        return self._callers[caller]


class _Ended(NamedTuple):
    at: float
    leader: int
    request: Request


class Finished:
    """Requests that ended lately, the oldest first.

    Their last outputs may be lost with the engine that sent them. Then they begin again.

    Attributes:
        bytes: of all of them.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._ended: deque[_Ended] = deque()

    def __len__(self) -> int:
        return len(self._ended)

    def add(self, request: Request, leader: int, now: float) -> None:
        """Remember a request that has ended on a unit with this leader."""
        self._ended.append(_Ended(now, leader, request))
        self.bytes += request.size

    def forget_before(self, time: float) -> None:
        """Forget the requests that ended before this time."""
        while self._ended and self._ended[0].at < time:
            self._forget_oldest()

    def forget_until(self, most_bytes: int) -> None:
        """Forget the oldest requests, so that the others have at most so many bytes."""
        while self._ended and self.bytes > most_bytes:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        self.bytes -= self._ended.popleft().request.size

    def find(self, request_id: str) -> Request | None:
        """Return a request; None if it is not here."""
        requests = (each.request for each in self._ended)
        return next((request for request in requests if request.id == request_id), None)

    def forget(self, request: Request) -> None:
        """Forget a request that is here."""
        self._ended = deque(each for each in self._ended if each.request is not request)
        self.bytes -= request.size

    def take_of(self, leaders: Collection[int]) -> list[Request]:
        """Forget the requests that ended on these leaders' units, and return them."""
        taken = [each.request for each in self._ended if each.leader in leaders]
        self._ended = deque(each for each in self._ended if each.leader not in leaders)
        self.bytes -= sum(request.size for request in taken)
        return taken
