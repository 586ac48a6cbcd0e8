"""What an engine's death takes with it, and how the node goes on.

Engines send outputs straight to the front ends, so after a death only these know what clients
have. A request that was on a dead engine is *interrupted*: its front end is asked how far it has
come, and drops from then on what still arrives of that attempt. The answer decides: the request
waits in the pool again, in its old place, with the tokens its client has at the end of its prompt;
or it ends.

A request may be what the engine died of. Those that it computed are suspects. A unit is given no
second suspect until the front end has an output of the first. If the unit dies before that, the
suspect is guilty and nobody else in it is suspected; if it dies without one in it, all are that it
computed.
"""

import logging
from collections import defaultdict, deque
from collections.abc import Collection, Iterator

import msgspec

from shoal.runtime.clock import Clock
from shoal.runtime.config import NodeConfig
from shoal.runtime.controller.books.audit import Audit
from shoal.runtime.controller.books.book import Book, CoreBook, EngineState, Request, continued
from shoal.runtime.controller.books.capacity import Capacity
from shoal.runtime.controller.books.leases import Leases
from shoal.runtime.controller.books.pool import TaskPool
from shoal.runtime.controller.books.statistics import Statistics
from shoal.runtime.controller.requests.admission import Admission
from shoal.runtime.controller.switching.switch import Switch
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.messages import DeathCause, Outcome
from shoal.runtime.protocol.transport import SUPERVISOR, ControllerTransport, front_identity

log = logging.getLogger("shoal.controller")

REMEMBERED_SECONDS = 10.0
"""An engine that lives so long after a request's end has sent its last outputs."""


class Losses:
    """Takes dead engines out of the books, and their requests to other ones.

    Args:
        config: the node.
        book: engines, partition and requests.
        pool: the task pool.
        leases: block books.
        capacity: what the node's groups can hold.
        admission: ends requests.
        statistics: counts deaths and migrations.
        transport: the way to everybody.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: NodeConfig,
        book: Book,
        pool: TaskPool,
        leases: Leases,
        capacity: Capacity,
        admission: Admission,
        statistics: Statistics,
        transport: ControllerTransport,
        clock: Clock,
    ) -> None:
        self._most_deaths = config.max_retries
        self._book = book
        self._pool = pool
        self._leases = leases
        self._capacity = capacity
        self._admission = admission
        self._statistics = statistics
        self._transport = transport
        self._clock = clock
        self._finished: deque[tuple[float, int, Request]] = deque()
        """Requests that have ended lately: when, and who led their unit."""

    # --- engines ------------------------------------------------------------------------------

    def lose(
        self,
        engines: Collection[int],
        reason: str,
        cause: DeathCause,
        switch: Switch | None,
        audit: Audit | None,
    ) -> None:
        """Go on without engines that died, and without those that died with them.

        Args:
            engines: those; what is dead already is passed over.
            reason: why, for people.
            cause: the same for metrics.
            switch: the switch in progress.
            audit: the audit in progress.
        """
        gone = {tied for engine in engines for tied in self._tied(engine, switch)}
        gone -= self._book.in_state(EngineState.DEAD)
        if not gone:
            return
        log.error("engines %s are lost: %s", sorted(gone), reason)
        # Before the partition changes: what ran there.
        # A process that was stopped by a signal did not stop because of what it computed.
        computed = set() if cause is DeathCause.STOPPED else self._computed(gone)
        for number in gone:
            engine = self._book.engines[number]
            engine.state, engine.reason = EngineState.DEAD, reason
            self._statistics.died(cause if number in engines else DeathCause.GROUP)
        for group in [group for group in self._book.bound if gone.intersection(group.engines)]:
            if switch is None or not switch.is_released(group):
                self._book.set_free(group)
        if switch is not None:
            # First: what members lent to a bind that is aborted now they take back by themselves.
            switch.lost(gone, f"engines {sorted(gone)} are lost: {reason}")
        self._leases.lose(gone)
        self._interrupt(gone, computed)
        self.give_up_unholdable()
        if audit is not None:
            audit.lose(gone)
        known = {number: self._book.engines[number].incarnation for number in sorted(gone)}
        self._transport.to_control(SUPERVISOR, m.KillEngines(known, reason))

    def _tied(self, engine: int, switch: Switch | None) -> frozenset[int]:
        """Return the engines that cannot go on without this one."""
        if self._book.starting is not None and engine in self._book.starting.engines:
            return frozenset(self._book.starting.engines)
        unit = self._book.unit_of(engine)
        if unit in self._book.bound and (switch is None or not switch.is_released(unit)):
            return frozenset(unit.engines)
        return frozenset({engine}) if switch is None else switch.tied(engine)

    def _cores(self, gone: Collection[int]) -> Iterator[CoreBook]:
        """Yield the cores that have lost KV of their requests."""
        for core in list(self._book.cores.values()):
            if core.requests and set(gone).intersection(core.unit.engines):
                yield core

    def _computed(self, gone: Collection[int]) -> set[str]:
        """Return the requests that engines may have died of: suspects alone where there are any."""
        found: set[str] = set()
        for core in self._cores(gone):
            computed = core.computed if self._book.runs(core) else []
            suspects = [request for request in computed if request.suspect]
            found.update(request.id for request in suspects or computed)
        return found

    # --- requests -----------------------------------------------------------------------------

    def finished(self, request: Request, leader: int) -> None:
        """Remember a request that has ended on a unit: its last outputs may not have left yet."""
        now = self._clock()
        while self._finished and self._finished[0][0] < now - REMEMBERED_SECONDS:
            self._finished.popleft()
        self._finished.append((now, leader, request))

    def _take_finished(self, gone: Collection[int]) -> Iterator[Request]:
        """Yield the requests that have just ended on dead engines, and forget them."""
        kept = [entry for entry in self._finished if entry[1] not in gone]
        for _, leader, request in self._finished:
            if leader in gone:
                yield msgspec.structs.replace(request, counted=True)
        self._finished = deque(kept)

    def _interrupt(self, gone: Collection[int], computed: Collection[str]) -> None:
        """Take requests out of cores that have lost KV, and ask their front ends about them."""
        taken = list(self._take_finished(gone))
        for core in self._cores(gone):
            ids = list(core.requests)
            if core.unit.leader not in gone:
                self._transport.to_engine(core.unit.leader, m.AbortRequests(ids))
            removed = [self._book.remove(request_id) for request_id in ids]
            taken += [request for request in removed if request is not None]
        questions: defaultdict[int, dict[str, int]] = defaultdict(dict)
        for request in taken:
            charged = request.id in computed
            again = msgspec.structs.replace(
                request,
                attempt=request.attempt + 1,
                deaths=request.deaths + charged,
                suspect=request.suspect or charged,
                guilty=request.suspect and charged,
            )
            self._book.interrupted[request.id] = again
            questions[request.client][request.id] = again.attempt
        for client, attempts in questions.items():
            self._transport.to_control(front_identity(client), m.Interrupted(attempts))

    def give_up_unholdable(self) -> None:
        """End the waiting requests that no group will hold any more."""
        lost: defaultdict[str, list[Request]] = defaultdict(list)
        for request in list(self._pool.all()):
            if reason := self._reason_unheld(request):
                self._pool.remove(request.id)
                lost[reason].append(request)
        for reason, requests in lost.items():
            self._admission.fail(requests, Outcome.LOST, 500, reason)

    def moved(self, request: Request) -> None:
        """Let a request that its unit has given back wait in its old place, if it is any use.

        The groups that hold it may have been lost while its unit wrote.
        """
        reason = self._reason_unheld(request)
        if reason is None:
            self._pool.add(request)
        else:
            self._admission.fail([request], Outcome.LOST, 500, reason)

    def _reason_unheld(self, request: Request) -> str | None:
        """Return why no group will hold a request: the policy, if some could; None if one will."""
        if self._capacity.holds(request.seen):
            return None
        return _NO_GROUP if self._capacity.holds(request.seen, formed=True) else _NO_ROOM

    def received(self, message: m.Received) -> None:
        """Take a front end's word on how far its requests have come, asked for or not."""
        for request_id in message.ended:
            request = self._book.interrupted.pop(request_id, None)
            if request is not None:
                self._book.count(request, Outcome.FINISHED)
        for request_id, progress in message.progress.items():
            request = self._book.interrupted.pop(request_id, None)
            request = request or self._take_back(request_id, progress.attempt)
            if request is not None:
                self._go_on(request, progress)
            elif not self._is_known(request_id):
                self._end_unknown(message.client, request_id)

    def _go_on(self, request: Request, progress: m.Progress) -> None:
        """Let a request wait in its old place, to go on from there; or end it."""
        again = msgspec.structs.replace(
            continued(request, progress.tokens, self._clock()), attempt=progress.attempt
        )
        reason = self._reason_to_end(again)
        if reason is None:
            self._pool.add(again)
            self._statistics.migrated.add()
        else:
            outcome = Outcome.POISONED if again.guilty else Outcome.LOST
            self._admission.fail([again], outcome, 500, reason)

    def _reason_to_end(self, request: Request) -> str | None:
        if request.guilty:
            return f"{request.deaths} engines died of this request: it is not tried again"
        if request.deaths > self._most_deaths:
            return f"{request.deaths} engines died while they had this request"
        if not request.can_continue:
            return _CANNOT_CONTINUE
        return self._reason_unheld(request)

    # --- requests whose tokens were lost on the way -------------------------------------------

    def _take_back(self, request_id: str, attempt: int) -> Request | None:
        """Take a request back that a front end asks to begin again; None if that has been done."""
        for entry in self._finished:
            if entry[2].id == request_id:
                self._finished.remove(entry)
                return msgspec.structs.replace(entry[2], counted=True)
        group = self._book.where(request_id)
        request = self._pool.get(request_id) if group is None else self._book.find(request_id)
        if request is None or request.attempt >= attempt:
            return None
        if group is None:
            return self._pool.remove(request_id)
        self._transport.to_engine(group.leader, m.AbortRequests([request_id]))
        return self._book.remove(request_id)

    def _is_known(self, request_id: str) -> bool:
        return request_id in self._pool or self._book.where(request_id) is not None

    def _end_unknown(self, client: int, request_id: str) -> None:
        """End a request that has ended for everybody but its front end."""
        log.warning("request %s ends with an error: %s", request_id, _TOKENS_LOST)
        note = m.Ended(request_id, Outcome.LOST, 500, _TOKENS_LOST)
        self._transport.to_control(front_identity(client), note)
        finish = wire.encode_finish([request_id], wire.FinishReason.ERROR)
        self._transport.to_front(client, [finish])

    # --- suspects -----------------------------------------------------------------------------

    def clear(self, request_ids: Collection[str]) -> None:
        """Take a front end's word that requests which were begun again have an output."""
        for request_id in request_ids:
            self._book.clear(request_id)


_NO_ROOM = "no group of the engines that are left holds the request"
_NO_GROUP = "no unit of the policy, which forms no groups, holds the request"
_TOKENS_LOST = "an engine died with the request's last tokens"
_CANNOT_CONTINUE = (
    "the engine died, and the request cannot go on elsewhere: it has a seed, penalties, structured "
    "output or the like, and its client has tokens of it"
)
