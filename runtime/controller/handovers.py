"""Handovers: running requests go to the units that the policy names (``Plan.moves``).

A move is a carry. Moves may follow each other all the time, while every other operation waits until
no carry is under way. So no move begins while a caller waits or an engine is drained, and now and
then none begins until all have ended.
"""

import math
from collections.abc import Sequence

from shoal.policies.values.layouts import Unit
from shoal.policies.values.snapshot import Move
from shoal.runtime.config import BACKGROUND_PRIORITY
from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.capacity import Capacity
from shoal.runtime.controller.books.core_book import CoreBook
from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.controller.books.request import Request
from shoal.runtime.controller.books.statistics import HANDOVER
from shoal.runtime.controller.switching.carries import Carries

PARK_SECONDS = 0.1
"""For so long an engine that has parked requests computes before it stops for others."""
STEPS_AHEAD = 4
"""How many tokens a request may get until it has stopped, beyond those that are known."""
WINDOW_SECONDS = 60.0
"""For so long moves may overlap; then all must end before the next one begins."""


class Handovers:
    """Begins the moves of plans.

    Args:
        env: the time.
        books: the requests of each unit, and the moves that are under way.
        capacity: what each unit holds.
        carries: lets requests go on in other units.
    """

    def __init__(
        self, env: Environment, books: Books, capacity: Capacity, carries: Carries
    ) -> None:
        self._clock = env.clock
        self._engines = books.engines
        self._requests = books.requests
        self._book = books.carries
        self._capacity, self._carries = capacity, carries
        self._since = -math.inf
        """When the first of the moves that now overlap began."""

    def begin(self, moves: Sequence[Move]) -> None:
        """Begin those moves whose units serve. No other operation may be running or waiting."""
        now = self._clock()
        if not self._carries.unsettled:
            self._since = now
        if now - self._since > WINDOW_SECONDS or self._engines.drained:
            return
        under_way = {(carry.source, carry.destination) for carry in self._book}
        for move in moves:
            if (move.source, move.destination) in under_way or self._is_early(move, now):
                continue
            chosen = self._chosen(move) if self._engines.takes(move.destination) else []
            if chosen:
                self._carries.move(move.source, move.destination, chosen, HANDOVER)

    def _is_early(self, move: Move, now: float) -> bool:
        """Return whether an engine stopped for its tier a moment ago.

        It stops each time, and may keep what it has been asked for (``Export.only_decoding``).
        """
        parked_at = self._book.parked_at.get(move.source, -math.inf)
        return move.destination.tier and now < parked_at + PARK_SECONDS

    def _chosen(self, move: Move) -> list[Request]:
        """Return the requests that go: the latest whose prompts are computed.

        To a tier, and from there, they go in the order in which they came.
        """
        core, leaving = self._requests.core(move.source), self._book.ids
        requests, by_tier = core.requests.values(), core.unit.tier or move.destination.tier
        able = [
            request
            for request in (requests if by_tier else reversed(requests))
            if not request.suspect
            and request.id not in leaving
            and (core.unit.tier or self._decodes(core, request))
            and self._capacity.can_hold(move.destination, request.seen)
        ]
        if move.destination.tier:
            able = self._that_fit(core, able, move.destination)
        return able[: move.requests]

    def _that_fit(self, core: CoreBook, able: Sequence[Request], tier: Unit) -> list[Request]:
        """Return those of some requests that may wait in a tier, and for which it has room.

        They are of the least urgent class on their unit, in the tier and in the pool.
        """
        parked = self._requests.core(tier).figures.priorities
        least = max((*core.figures.priorities, *parked), default=0)
        if self._requests.pool.background:
            least = max(least, BACKGROUND_PRIORITY)
        state, found = self._capacity.tier(tier.leader), list[Request]()
        room, limits = 0 if state is None else state.free_blocks, self._engines.limits(core.unit)
        for request in able:
            tokens = request.seen.prompt_tokens + core.generated(request.id) + STEPS_AHEAD
            room -= limits.blocks(tokens)
            if room >= 0 and request.seen.priority >= least:
                found.append(request)
        return found

    def _decodes(self, core: CoreBook, request: Request) -> bool:
        """Return whether a request has had more steps in its unit than its prompt needs."""
        most = self._capacity.step_tokens or request.seen.prompt_tokens
        return core.generated(request.id) > -(-request.seen.prompt_tokens // max(1, most))
