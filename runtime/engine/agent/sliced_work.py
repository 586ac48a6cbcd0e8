"""Work for carries that takes long, of which a little is done in each turn of an engine's loop.

To build requests that are about to come takes a scheduler milliseconds for each long one, mostly
for the hashes of its blocks. Done at once, it would keep the engine from collecting the step that
ends meanwhile, and from dispatching the next.
"""

from collections import deque
from collections.abc import Iterator

from shoal.runtime.clock import Clock

SLICE_SECONDS = 0.001
"""For how long such work goes on in one turn; what has begun by then is finished."""
OF_EVERY_CARRY = 0
"""Work for which all later work waits, whatever carry that is for; no carry has this number."""


class SlicedWork:
    """Does work in the order in which it came.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._queue: deque[tuple[int, Iterator[None]]] = deque()

    def add(self, carry: int, work: Iterator[None]) -> None:
        """Queue work for a carry; it may be interrupted wherever it yields."""
        self._queue.append((carry, work))

    def start(self, carry: int, work: Iterator[None]) -> None:
        """Do the beginning of some work at once, unless it has to wait for work that is queued."""
        is_next = all(number not in (carry, OF_EVERY_CARRY) for number, _ in self._queue)
        if not (is_next and next(work, self) is self):
            self.add(carry, work)

    def go_on(self) -> None:
        """Do some of what is queued."""
        until = self._clock() + SLICE_SECONDS
        while self._queue:
            self._advance()
            if self._clock() >= until:
                break

    def finish(self, carry: int) -> None:
        """Do all that is queued for a carry, and what is queued before it."""
        while any(number == carry for number, _ in self._queue):
            self._advance()

    @property
    def is_due(self) -> bool:
        """Whether there is more to do in the next turn."""
        return bool(self._queue)

    def _advance(self) -> None:
        _, work = self._queue[0]
        if next(work, self) is self:
            self._queue.popleft()
