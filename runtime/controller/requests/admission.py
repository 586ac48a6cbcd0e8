"""Which requests may wait in the task pool: here they come in, and are refused or withdrawn.

The limits of requests and tokens hold only for waiting requests: one that a unit can start at once
is never refused by them. So the newcomers of a turn are checked against the ``limits`` after the
policy has dispatched all it can. The limits of bytes hold for all requests, which they meet as they
come.
When a limit is reached, the front ends are told so, and which priorities are still let in. They
then refuse all other requests before they do any work on them.
"""

import logging
from collections import defaultdict

from shoal.policies.values.snapshot import PoolRequest
from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.capacity import Capacity
from shoal.runtime.controller.books.demand import Drain
from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.controller.books.family import Families, Refusal
from shoal.runtime.controller.books.prompt_hashes import NO_HASHES, prompt_hashes
from shoal.runtime.controller.books.request import Request, pool_request
from shoal.runtime.controller.requests.aborts import send_aborts
from shoal.runtime.controller.requests.limits import Limits
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.messages import Outcome
from shoal.runtime.protocol.transport import front_identity

log = logging.getLogger("shoal.controller")

_QUIET = frozenset({Outcome.EXPIRED, Outcome.POOL_FULL, Outcome.CALLER_FULL})
"""Outcomes that are frequent on a busy node and known to their callers, so they are not logged.
vLLM's front end logs every finish reason ``error``, so the finish reason of these is ``abort``."""
_UNLOGGED = _QUIET | {Outcome.HANDED_BACK, Outcome.UNAVAILABLE}
"""Outcomes that are not logged one by one. A stream that is handed back must not look complete, so
the finish reason of the two that are added here stays ``error``."""

_NO_ROOM = "no group of the engines that are left holds the request"
_NO_GROUP = "no unit of the policy, which forms no groups, holds the request"


class Admission:
    """The way into the task pool, and every way out of it except to a unit.

    Args:
        env: the limits, the transport to engines and front ends, and the time.
        books: where every request is; requests that leave are counted.
        capacity: what the node's groups can hold.
    """

    def __init__(self, env: Environment, books: Books, capacity: Capacity) -> None:
        self._config = env.config
        self._api_servers = env.config.api_servers
        self._hashes_prompts = env.config.caches_prefixes
        self._transport = env.transport
        self._clock = env.clock
        self._books = books
        self._requests = books.requests
        self._pool = books.requests.pool
        self._statistics = books.statistics
        self._capacity = capacity
        self._families = Families()
        self._limits = Limits(env, books, self._families)
        self._newcomers: list[Request] = []
        self._drain = Drain(env.clock())
        self._told = m.PoolLimits()

    # --- in and out ---------------------------------------------------------------------------

    def add(self, frames: list[bytes]) -> PoolRequest | None:
        """Take in a front end's request, or end it if no group can hold it.

        Returns:
            What policies see of it; None if it was not taken in.

        Raises:
            msgspec.DecodeError: the frames are no ``EngineCoreRequest``.
        """
        view = wire.decode_request(frames)
        if view.request_id in self._requests:
            log.error("dropped request %s: there is one of this id", view.request_id)
            return None
        seen = pool_request(view, longest=self._capacity.longest, now=self._clock())
        terms = view.terms
        family = self._families.join(view.client_index, terms.family, view.request_id)
        prompt = prompt_hashes(view) if self._hashes_prompts else NO_HASHES
        request = Request(view.request_id, view.client_index, frames, seen, prompt, terms, family)
        if not self._capacity.holds(seen):
            self.fail([request], Outcome.TOO_LONG, 400, self._too_long(request))
            return None
        too_large = self._limits.too_large(request)
        if too_large is not None:
            self.fail([request], Outcome.TOO_LONG, 413, too_large)
            return None
        self._pool.add(request, deadline=request.terms.deadline)
        if not self._has_bytes(request):
            return None
        self._newcomers.append(request)
        return seen

    def _has_bytes(self, request: Request) -> bool:
        """Keep the limits of bytes, now that a request has come; return whether it may stay.

        A request whose family was refused would find the room that this has left.
        """
        if self._config.max_held_bytes is not None:
            left = self._config.max_held_bytes - self._requests.held.total
            self._requests.finished.forget_until(left)
        is_refused = request.family is not None and request.family.refused is not None
        if self._limits.has_bytes(request) and not is_refused:
            return True
        self._refuse(self._limits.hold([request]))
        return request.id in self._pool

    def _refuse(self, refused: list[tuple[Request, Refusal]]) -> None:
        retry_after = self._drain.retry_after(len(self._pool))
        for request, why in refused:
            self.fail([request], why.outcome, why.status, why.message, retry_after)

    def _too_long(self, request: Request) -> str:
        seen, limit = request.seen, self._capacity.longest_now
        return (
            f"the prompt has {seen.prompt_tokens} tokens and the request may grow to "
            f"{seen.total_tokens}: the largest group of engines here holds {limit}"
        )

    def readmit(self, request: Request) -> bool:
        """Put a request that a unit has had back in its old place in the pool.

        Returns:
            Whether it waits. If all groups that could hold it have been lost, it has ended instead.
        """
        reason = self._reason_unheld(request)
        if reason is None:
            self._pool.add(request)
        else:
            self.fail([request], Outcome.LOST, 500, reason)
        return reason is None

    def give_up_unholdable(self) -> None:
        """End the waiting requests that no group can hold now or later."""
        lost: defaultdict[str, list[Request]] = defaultdict(list)
        for request in self._pool.all():
            if reason := self._reason_unheld(request):
                self._pool.remove(request.id)
                lost[reason].append(request)
        for reason, requests in lost.items():
            self.fail(requests, Outcome.LOST, 500, reason)

    def _reason_unheld(self, request: Request) -> str | None:
        """Return why no group will hold a request; None if one will.

        The policy is the reason if a group could hold the request but the policy does not form it.
        """
        if self._capacity.holds(request.seen):
            return None
        return _NO_GROUP if self._capacity.holds(request.seen, formed=True) else _NO_ROOM

    def abort(self, request_ids: list[str], outcome: Outcome = Outcome.ABORTED) -> None:
        """Forget requests wherever they are: their clients have gone, or have all they asked for.

        Args:
            request_ids: the requests; unknown ones have ended in the meantime.
            outcome: the outcome that is counted.
        """
        send_aborts(self._transport, self._books, request_ids)
        for request_id in request_ids:
            waiting = self._pool.remove(request_id)
            waiting = waiting or self._requests.take_interrupted(request_id)
            if waiting is not None:
                # The front end holds the response back until it gets ``Placed`` or ``Ended``.
                note = m.Ended(request_id, outcome)
                self._transport.to_control(front_identity(waiting.client), note)
            request = waiting or self._requests.remove(request_id)
            if request is not None:
                self._statistics.left(request, outcome)

    def fail(
        self,
        requests: list[Request],
        outcome: Outcome,
        status: int | None,
        message: str,
        retry_after: int | None = None,
    ) -> None:
        """End requests that are in no book, or have been taken out of it.

        Args:
            requests: the requests.
            outcome: the outcome that is counted.
            status: HTTP status for the caller.
            message: the reason, for the caller.
            retry_after: seconds after which the caller may try again, if that would help.
        """
        by_client: dict[int, list[str]] = {}
        for request in requests:
            self._statistics.left(request, outcome)
            by_client.setdefault(request.client, []).append(request.id)
        reason = wire.FinishReason.ABORT if outcome in _QUIET else wire.FinishReason.ERROR
        for client, ids in by_client.items():
            if outcome not in _UNLOGGED:
                log.warning("requests end with an error (%s): %s", outcome, ", ".join(ids))
            for request_id in ids:
                note = m.Ended(request_id, outcome, status, message, retry_after)
                self._transport.to_control(front_identity(client), note)
            self._transport.to_front(client, [wire.encode_finish(ids, reason)])

    # --- deadlines ----------------------------------------------------------------------------

    @property
    def deadline(self) -> float | None:
        """When the next waiting request reaches its deadline."""
        return self._pool.next_deadline

    def expire(self) -> None:
        """Drop the requests whose deadline has come while they waited."""
        expired = self._pool.take_expired(self._clock())
        if expired:
            message = "the request still waited in the task pool at its deadline"
            self.fail(expired, Outcome.EXPIRED, 504, message)

    # --- limits -------------------------------------------------------------------------------

    def hold_limits(self, started: int) -> None:
        """End the requests that exceed the limits, and tell the front ends which limits are full.

        Args:
            started: requests that have left the pool for a unit since the last call.
        """
        newcomers, self._newcomers = self._newcomers, []
        waiting = [new for new in newcomers if self._pool.get(new.id) is new]
        refused = self._limits.hold(waiting)
        waits = len(self._pool)
        self._drain.see(self._clock(), started=started, waits=waits > 0)
        retry_after = self._drain.retry_after(waits)
        self._refuse(refused)
        limits = self._limits.told(retry_after)
        if limits != self._told:
            self._told = limits
            for index in range(self._api_servers):
                self._transport.to_control(front_identity(index), limits)
