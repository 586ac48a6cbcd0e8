"""Uneven load: running requests go from busy units to idle ones, with their KV.

They also go where that makes room for a request that waits in the pool.
``shoal.policies.rebalance`` says when that is worth it. A move begins only if no other operation
is running, and if the units were as uneven at the last look. A request that has come to its unit a
short time ago stays there. So nothing goes to and fro.
"""

import logging
import math

from shoal.policies.rebalance import Rebalance, rebalance
from shoal.policies.values.snapshot import Snapshot
from shoal.runtime.config import BACKGROUND_PRIORITY
from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.capacity import Capacity
from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.controller.books.request import Request
from shoal.runtime.controller.books.statistics import BALANCE
from shoal.runtime.controller.switching.carries import Carries

log = logging.getLogger("shoal.controller")

LOOK_SECONDS = 0.25
"""Time between two looks at the units."""
STAY_SECONDS = 10.0
"""How long a request stays in the unit that it has come to."""


class Balancing:
    """Moves requests between units whose load is uneven.

    Args:
        env: whether to do so, and the time.
        books: the requests of each unit.
        capacity: what each unit holds.
        carries: lets requests go on in other units.
    """

    def __init__(
        self, env: Environment, books: Books, capacity: Capacity, carries: Carries
    ) -> None:
        self._is_on = env.config.rebalance and env.config.cost_model is not None
        self._clock = env.clock
        self._requests = books.requests
        self._capacity, self._carries = capacity, carries
        self._looked_at = -math.inf
        self._seen: Rebalance | None = None
        """What the last look found."""

    @property
    def deadline(self) -> float | None:
        """When a move may begin even if no message comes, while no operation is running.

        As long as load is even, nothing is due: the units' reports are enough.
        """
        return None if self._seen is None else self._looked_at + LOOK_SECONDS

    def look(self, snapshot: Snapshot) -> None:
        """Begin a move if one is worth it. No operation may be running."""
        now = self._clock()
        if not self._is_on or now < self._looked_at + LOOK_SECONDS:
            return
        self._looked_at, before = now, self._seen
        # Nobody stops for a moment so that a background request finds room.
        only_background = snapshot.pool and snapshot.pool[0].priority >= BACKGROUND_PRIORITY
        found = self._seen = None if only_background else rebalance(snapshot)
        if found is None or before is None:
            return
        if (found.source, found.destination) == (before.source, before.destination):
            self._move(found, now)

    def _move(self, move: Rebalance, now: float) -> None:
        chosen = self._chosen(move, now)
        if chosen:
            self._seen = None  # at the next look, the units' reports may be older than the move
            units = list(move.source.engines), list(move.destination.engines)
            log.info(
                "%d requests go from unit %s to %s, which has room for them", len(chosen), *units
            )
            self._carries.move(move.source, move.destination, chosen, BALANCE)

    def _chosen(self, move: Rebalance, now: float) -> list[Request]:
        """Return the requests that go: the latest, which are the first to be preempted.

        Background requests go only if there are no others: where others are, they leave anyway.
        """
        latest = [*reversed(self._requests.core(move.source).requests.values())]
        people = any(request.seen.priority < BACKGROUND_PRIORITY for request in latest)
        able = [
            request
            for request in latest
            if not request.suspect
            and (request.seen.priority < BACKGROUND_PRIORITY or not people)
            and (request.moved_at is None or request.moved_at + STAY_SECONDS <= now)
            and self._capacity.can_hold(move.destination, request.seen)
        ]
        return able[: move.requests]
