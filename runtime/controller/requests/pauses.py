"""Requests that a switch has paused, and whose unit does not come back: none waits for ever.

A paused request resumes with its KV in place when its unit is back. Until then no engine computes
it, and the operator or policy that could bring the unit back may never do so. So after a while the
request is moved to another unit, as in a soft switch. A request is *pinned* if a move could change
its tokens (``wire.RequestView.movable``). Under a policy that decides the layout, pinned requests
get turns until they end: they go on beside the group that their engine is in, or their unit is
brought back for a while. Where an operator decides the layout, they wait until a limit, then end.
"""

import math
from collections.abc import Iterator

import msgspec

from shoal.policies.values.layouts import Unit, alone
from shoal.policies.values.partition import Partition
from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.capacity import Capacity
from shoal.runtime.controller.books.core_book import CoreBook
from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.controller.books.request import Request
from shoal.runtime.controller.requests.admission import Admission
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages import Outcome

PAUSE_SECONDS = 5.0
"""How long a request waits for its unit, under a policy that decides the layout, before it is moved
to another. An interleaved request that has no KV blocks to go on with waits as long under any
policy."""
MANUAL_PAUSE_SECONDS = 30.0
"""The same wait where an operator decides the layout, who needs longer to bring a unit back."""

TURN_SECONDS = 3.0
"""How long a unit stays that was brought back for its paused requests. After that the policy
decides for at least ``PAUSE_SECONDS`` before another unit is brought back."""


class Turn(msgspec.Struct, frozen=True):
    """A partition in which long-paused requests go on."""

    target: Partition
    rebound: tuple[Unit, ...]
    """Groups that stay, and that from then on let requests of their single engines go on, too."""


class _Pause(msgspec.Struct):
    """A core whose requests no engine computes."""

    since: float
    asked: float | None = None
    """When the core was last told to give back its requests."""


class Pauses:
    """Moves long-paused requests; gives turns to those that cannot be moved, or ends them.

    Args:
        env: how long pinned requests wait, the transport to engines, and the time.
        books: units and their requests.
        capacity: says whether requests may go on beside a group.
        admission: ends requests.
    """

    def __init__(
        self, env: Environment, books: Books, capacity: Capacity, admission: Admission
    ) -> None:
        self._limit = env.config.pause_limit_seconds
        self._transport = env.transport
        self._clock = env.clock
        self._engines = books.engines
        self._units = books.units
        self._requests = books.requests
        self._capacity = capacity
        self._admission = admission
        self._pauses: dict[Unit, _Pause] = {}
        self._manual = True
        self._looked_at = env.clock()
        self._turn: list[str] = []
        """Requests that the latest turn is for."""
        self._turn_ends = -math.inf

    @property
    def deadline(self) -> float | None:
        """When something is due even if no message comes."""
        times = (at for item in self._pauses.items() for at in self._due(*item))
        return min((at for at in times if at > self._looked_at), default=None)

    def _due(self, group: Unit, pause: _Pause) -> Iterator[float]:
        """Yield when a core's movable requests are moved, and when its pinned ones end."""
        short = not self._manual or self._units.interleaves(group)
        # The core is asked again only after the same time, because its answer is on its way.
        last = pause.since if pause.asked is None else pause.asked
        yield last + (PAUSE_SECONDS if short else MANUAL_PAUSE_SECONDS)
        yield pause.since + self._limit

    def end_long_ones(self, *, manual: bool, switching: bool) -> None:
        """Move or end what has been paused for too long, so that no policy has to.

        Args:
            manual: whether an operator decides the layout, and not the policy.
            switching: whether a switch is running. It may bring units back, so nothing is done.
        """
        now = self._looked_at = self._clock()
        self._manual = manual
        for core in self._requests.cores.values():
            if self._goes_on(core):
                self._pauses.pop(core.unit, None)
                continue
            pause = self._pauses.setdefault(core.unit, _Pause(now))
            if switching or not self._engines.serves(alone(core.unit.leader)):
                continue
            move_at, end_at = self._due(core.unit, pause)
            if move_at <= now:
                pause.asked = now
                self._move(core)
            if end_at <= now:
                self._end(core)

    def _goes_on(self, core: CoreBook) -> bool:
        if not core.requests or core.unit in self._units.partition:
            return True
        running = core.load is not None and core.load.running > 0
        return running and self._units.interleaves(core.unit)

    # --- turns --------------------------------------------------------------------------------

    @property
    def is_turn(self) -> bool:
        """Whether a unit that was brought back must stay for the requests of its turn."""
        return self._clock() < self._turn_ends and self.had_turn

    @property
    def had_turn(self) -> bool:
        """Whether a unit that was brought back still exists, with requests of its turn in it.

        An earlier switch has already been late for these requests, so the next one need not wait.
        """
        return any(
            self._requests.where(request_id) in self._units.partition for request_id in self._turn
        )

    def may_start(self, request: Request, group: Unit) -> bool:
        """Return whether a unit may get a request; a unit in its turn gets only movable ones."""
        is_there = any(self._requests.where(request_id) == group for request_id in self._turn)
        if not is_there or not self.is_turn:
            return True
        return request.movable

    def next_turn(self) -> Turn | None:
        """Return a turn for pinned requests that have been paused for long, if there are any.

        Call this only when a switch can start, and then start the switch to the turn's partition.
        """
        now = self._clock()
        if self._manual or now < self._turn_ends + PAUSE_SECONDS:
            return None
        target, rebound, taken = self._units.partition, list[Unit](), set[int]()
        turn: list[str] = []
        for group, pinned in self._starved(now):
            unit = self._units.unit_of(group.leader)
            beside = not group.is_group and unit not in self._units.interleaving
            beside = beside and self._capacity.leaves_room(unit)
            engines = (unit if beside else group).engines
            if taken.intersection(engines):
                continue
            taken.update(engines)
            if beside:
                rebound.append(unit)
            else:
                target = _with(target, group)
                turn += pinned
        if not taken:
            return None
        self._turn, self._turn_ends = turn, now + TURN_SECONDS
        return Turn(target, tuple(rebound))

    def _starved(self, now: float) -> Iterator[tuple[Unit, list[str]]]:
        """Yield the cores that have waited too long for their unit, and their pinned requests."""
        for group, pause in sorted(self._pauses.items(), key=lambda item: item[1].since):
            if now < pause.since + PAUSE_SECONDS:
                continue
            # A switch would regroup all of these units; an engine that does not answer breaks one.
            units = {self._units.unit_of(engine) for engine in group.engines}
            if self._engines.is_formed(group) and all(map(self._engines.serves, units)):
                pinned = self._requests.core(group).pinned()
                if pinned:
                    yield group, pinned

    def _move(self, core: CoreBook) -> None:
        movable = core.movable()
        if movable:
            message = m.MoveOut(core.unit, movable)
            self._transport.to_engine(core.unit.leader, message)

    def _end(self, core: CoreBook) -> None:
        """End the pinned requests of a core."""
        ids = core.pinned()
        if not ids:
            return
        self._transport.to_engine(core.unit.leader, m.AbortRequests(ids))
        removed = [self._requests.remove(request_id) for request_id in ids]
        ended = [request for request in removed if request is not None]
        reason = (
            f"a switch paused the request, its unit {list(core.unit.engines)} was not back within "
            f"{self._limit:g} s, and it cannot go on elsewhere: it has a seed, penalties, "
            "structured output or the like"
        )
        self._admission.fail(ended, Outcome.LOST, 500, reason)


def _with(partition: Partition, group: Unit) -> Partition:
    """Return a partition with this group; other engines of the units that it splits are alone."""
    members, kept, rest = set(group.engines), [group], list[Unit]()
    for unit in partition:
        if not members.intersection(unit.engines):
            kept.append(unit)
        else:
            rest += [alone(engine) for engine in unit.engines if engine not in members]
    return tuple(sorted(kept + rest))
