"""Sends requests from the task pool to units, as the policy's plan says."""

import msgspec

from shoal.policies.values.plan import Plan
from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.demand import Demand
from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.transport import front_identity


class Dispatcher:
    """Sends requests to units.

    Args:
        env: the node, the transport to engines and front ends, and the time.
        books: where every request is; requests that are sent are counted.
        demand: is told what is cached of requests that are sent.
    """

    def __init__(self, env: Environment, books: Books, demand: Demand) -> None:
        self._demand = demand
        self._tracing = env.config.tracing
        self._transport = env.transport
        self._clock = env.clock
        self._requests = books.requests
        self._pool = books.requests.pool
        self._statistics = books.statistics

    def send(self, plan: Plan) -> int:
        """Carry out a plan's dispatches, except those of requests that have to wait.

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
            if not self._requests.may_start(request, group):
                continue
            sent += 1
            self._pool.remove(request.id)
            if request.family is not None:
                request.family.started = True
            # One that has begun lets nobody pass.
            patience = 0.0 if request.tokens else dispatch.patience
            cached = self._requests.place(request, group, patience)
            self._demand.place(request.id, cached)
            now = self._clock()
            self._statistics.placed(request, group, now, cached)
            add = m.AddRequest(group, request.id, list(request.tokens), patience)
            self._transport.to_engine(group.leader, add, request.payload)
            placed = m.Placed(request.id, group)
            if self._tracing:
                placed = msgspec.structs.replace(placed, waited=(request.pooled_at, now))
            self._transport.to_control(front_identity(request.client), placed)
        return sent
