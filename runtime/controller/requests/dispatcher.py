"""Requests from the task pool to units, as a policy plans it."""

import msgspec

from shoal.policies.values.layouts import Unit
from shoal.policies.values.partition import Partition
from shoal.policies.values.plan import Plan
from shoal.runtime.clock import Clock
from shoal.runtime.config import NodeConfig
from shoal.runtime.controller.books.book import Book, Request
from shoal.runtime.controller.books.pool import TaskPool
from shoal.runtime.controller.books.statistics import Statistics
from shoal.runtime.controller.requests.pauses import Pauses
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.transport import ControllerTransport, front_identity


class Dispatcher:
    """Sends requests to units.

    Args:
        config: the node.
        book: units and their requests.
        pool: the task pool.
        pauses: knows the units that were brought back for a while.
        statistics: counts what is sent.
        transport: the way to engines and front ends.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: NodeConfig,
        book: Book,
        pool: TaskPool,
        pauses: Pauses,
        statistics: Statistics,
        transport: ControllerTransport,
        clock: Clock,
    ) -> None:
        self._config = config
        self._book = book
        self._pool = pool
        self._pauses = pauses
        self._statistics = statistics
        self._transport = transport
        self._clock = clock

    def send(self, plan: Plan, target: Partition | None) -> int:
        """Do a plan's dispatches, but for those of requests that have to wait.

        Args:
            plan: that.
            target: what the node is about to switch to: requests that cannot be moved start on no
                unit that it lacks, for the switch would be late.

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
            group = dispatch.unit
            stays = target is None or group in target
            if not (stays or request.movable) or not self._may_start(request, group):
                continue
            sent += 1
            self._pool.remove(request.id)
            if request.family is not None:
                request.family.started = True
            self._book.place(request, group)
            now = self._clock()
            self._statistics.placed(request, group, now)
            add = m.AddRequest(group, request.id)
            self._transport.to_engine(group.leader, add, request.payload)
            placed = m.Placed(request.id, group)
            if self._config.tracing:
                placed = msgspec.structs.replace(placed, waited=(request.pooled_at, now))
            self._transport.to_control(front_identity(request.client), placed)
        return sent

    def _may_start(self, request: Request, group: Unit) -> bool:
        return self._book.may_start(request, group) and self._pauses.may_start(request, group)
