"""Requests that a hard switch has paused, and whose unit does not come back: none waits for ever.

A request resumes with its KV in place when its unit is back. Until then nobody computes it, and
whether the unit comes back is up to an operator or a policy, who may have forgotten. So after a
while it is moved to another unit, as a soft switch does. What cannot be moved without a change of
its tokens (``wire.RequestView.movable``) goes on waiting, for a bounded time, and then ends.
"""

from collections.abc import Iterator

import msgspec

from policies.partition import Group, leader_of
from runtime import messages as m
from runtime.clock import Clock
from runtime.config import NodeConfig
from runtime.controller.admission import Admission
from runtime.controller.book import Book, CoreBook, Request
from runtime.messages import Outcome
from runtime.transport import ControllerTransport

PAUSE_SECONDS = 5.0
"""How long a request waits for its unit under a policy that decides the layout, before it is moved
to another; and one that is interleaved under any policy, when the group has left it no KV blocks to
go on with."""
MANUAL_PAUSE_SECONDS = 30.0
"""The same where an operator decides it, who needs longer to bring a unit back."""


class _Pause(msgspec.Struct):
    """One core whose requests nobody computes."""

    since: float
    asked: float | None = None
    """When it was last told to give its requests back."""


class Pauses:
    """Moves what has been paused for long, and ends what cannot be moved.

    Args:
        config: the node; when a request ends that cannot be moved is in it.
        book: units and their requests.
        admission: ends requests.
        transport: the way to engines.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: NodeConfig,
        book: Book,
        admission: Admission,
        transport: ControllerTransport,
        clock: Clock,
    ) -> None:
        self._limit = config.pause_limit_seconds
        self._book = book
        self._admission = admission
        self._transport = transport
        self._clock = clock
        self._pauses: dict[Group, _Pause] = {}
        self._manual = True
        self._looked_at = clock()

    @property
    def deadline(self) -> float | None:
        """When something is due without a message."""
        times = (at for item in self._pauses.items() for at in self._due(*item))
        return min((at for at in times if at > self._looked_at), default=None)

    def _due(self, group: Group, pause: _Pause) -> Iterator[float]:
        """Yield when requests of a core are to be moved, and when they are to end."""
        short = not self._manual or self._book.interleaves(group)
        # Asked again only after as long a time: the answer is on its way.
        last = pause.since if pause.asked is None else pause.asked
        yield last + (PAUSE_SECONDS if short else MANUAL_PAUSE_SECONDS)
        yield pause.since + self._limit

    def end_long_ones(self, *, manual: bool, switching: bool) -> None:
        """Do what is due: no policy need remember whom it has paused.

        Args:
            manual: whether an operator decides the layout, and not the policy.
            switching: whether a switch is running, which may bring units back: then nothing is.
        """
        now = self._looked_at = self._clock()
        self._manual = manual
        for core in self._book.cores.values():
            if self._goes_on(core):
                self._pauses.pop(core.group, None)
                continue
            pause = self._pauses.setdefault(core.group, _Pause(now))
            if switching or not self._book.serves((leader_of(core.group),)):
                continue
            move_at, end_at = self._due(core.group, pause)
            if move_at <= now:
                pause.asked = now
                self._move(core)
            if end_at <= now:
                self._end(core)

    def _goes_on(self, core: CoreBook) -> bool:
        if not core.requests or core.group in self._book.partition:
            return True
        running = core.load is not None and core.load.running > 0
        return running and self._book.interleaves(core.group)

    def _move(self, core: CoreBook) -> None:
        movable = core.movable()
        if movable:
            message = m.MoveOut(core.group, movable)
            self._transport.to_engine(leader_of(core.group), message)

    def _end(self, core: CoreBook) -> None:
        """End the requests of a core that can only go on there."""
        movable = set(core.movable())
        ids = [request_id for request_id in core.requests if request_id not in movable]
        if not ids:
            return
        self._transport.to_engine(leader_of(core.group), m.AbortRequests(ids))
        ended: list[Request] = []
        for request_id in ids:
            request = self._book.remove(request_id)
            if request is not None:
                ended.append(request)
        reason = (
            f"a switch paused the request, its unit {list(core.group)} was not back within "
            f"{self._limit:g} s, and it cannot go on elsewhere: it has a seed, penalties, "
            "structured output or the like"
        )
        self._admission.fail(ended, Outcome.LOST, 500, reason)
