"""Requests from the task pool to units, as a policy plans it, and back from units that are gone."""

import msgspec

from policies.partition import Group, layout_name, leader_of
from policies.plan import Plan
from runtime import messages as m
from runtime.clock import Clock
from runtime.controller.book import Book, CoreBook
from runtime.controller.losses import Losses
from runtime.controller.pool import TaskPool
from runtime.controller.statistics import Statistics
from runtime.transport import ControllerTransport, front_identity

PAUSE_SECONDS = 5.0
"""How long a request waits for its unit under a policy that decides the layout, before it is moved
to another; and one that is interleaved under any policy, when the group has left it no KV blocks to
go on with."""


class Dispatcher:
    """Sends requests to units, and fetches them back.

    Args:
        book: units and their requests.
        pool: the task pool.
        losses: knows the suspects.
        statistics: counts what is sent.
        transport: the way to engines and front ends.
        clock: monotonic seconds.
        tracing: whether front ends are to be told how long requests waited.
    """

    def __init__(
        self,
        book: Book,
        pool: TaskPool,
        losses: Losses,
        statistics: Statistics,
        transport: ControllerTransport,
        clock: Clock,
        *,
        tracing: bool,
    ) -> None:
        self._book = book
        self._pool = pool
        self._losses = losses
        self._statistics = statistics
        self._transport = transport
        self._clock = clock
        self._tracing = tracing
        self._paused_since: dict[Group, float] = {}

    def send(self, plan: Plan) -> int:
        """Do a plan's dispatches, but for those of suspects that have to wait for others.

        Returns:
            The number of requests that have left the pool.

        Raises:
            LookupError: a request is not in the pool.
        """
        sent = 0
        for dispatch in plan.dispatches:
            request = self._pool.get(dispatch.request_id)
            if request is None:
                raise LookupError(f"request {dispatch.request_id} is not in the pool")
            group = dispatch.group
            if not self._losses.may_start(request, group):
                continue
            sent += 1
            self._pool.remove(request.id)
            self._book.place(request, group)
            now = self._clock()
            self._statistics.placed(request, group, now)
            add = m.AddRequest(group, request.id)
            self._transport.to_engine(leader_of(group), add, request.payload)
            placed = m.Placed(request.id, group, layout_name(group))
            if self._tracing:
                placed = msgspec.structs.replace(placed, waited=(request.pooled_at, now))
            self._transport.to_control(front_identity(request.client), placed)
        return sent

    def fetch_paused(self, *, all_units: bool, switching: bool) -> None:
        """Move requests whose unit has been gone for long: no policy need remember them.

        Args:
            all_units: whether those are moved that wait; else only those that are interleaved.
            switching: whether a switch is running: then none is moved now.
        """
        now = self._clock()
        for core in self._book.cores.values():
            if self._goes_on(core):
                self._paused_since.pop(core.group, None)
                continue
            since = self._paused_since.setdefault(core.group, now)
            moves = all_units or self._book.interleaves(core.group)
            if not moves or now - since < PAUSE_SECONDS:
                continue
            # Asked again only after as long a time: the answer is on its way.
            self._paused_since[core.group] = now
            movable = core.movable()
            if movable and not switching and self._book.serves(core.group[:1]):
                message = m.MoveOut(core.group, movable)
                self._transport.to_engine(leader_of(core.group), message)

    def _goes_on(self, core: CoreBook) -> bool:
        if not core.requests or core.group in self._book.partition:
            return True
        running = core.load is not None and core.load.running > 0
        return running and self._book.interleaves(core.group)
