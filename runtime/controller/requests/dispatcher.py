"""Sends requests from the task pool to units, as the policy's plan says."""

import msgspec

from shoal.policies.values.layouts import Unit
from shoal.policies.values.partition import Partition
from shoal.policies.values.plan import Plan
from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.controller.books.request import Request
from shoal.runtime.controller.requests.pauses import Pauses
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.transport import front_identity


class Dispatcher:
    """Sends requests to units.

    Args:
        env: the node, the transport to engines and front ends, and the time.
        books: where every request is; requests that are sent are counted.
        pauses: knows the units that were brought back for a while.
    """

    def __init__(self, env: Environment, books: Books, pauses: Pauses) -> None:
        self._tracing = env.config.tracing
        self._transport = env.transport
        self._clock = env.clock
        self._requests = books.requests
        self._pool = books.requests.pool
        self._statistics = books.statistics
        self._pauses = pauses

    def send(self, plan: Plan, target: Partition | None) -> int:
        """Carry out a plan's dispatches, except those of requests that have to wait.

        Args:
            plan: the policy's plan.
            target: the partition that the node is about to switch to, if any. Requests that cannot
                be moved start on no unit that it lacks, because they would make the switch late.

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
            self._requests.place(request, group)
            now = self._clock()
            self._statistics.placed(request, group, now)
            add = m.AddRequest(group, request.id)
            self._transport.to_engine(group.leader, add, request.payload)
            placed = m.Placed(request.id, group)
            if self._tracing:
                placed = msgspec.structs.replace(placed, waited=(request.pooled_at, now))
            self._transport.to_control(front_identity(request.client), placed)
        return sent

    def _may_start(self, request: Request, group: Unit) -> bool:
        return self._requests.may_start(request, group) and self._pauses.may_start(request, group)
