"""Requests whose engines died: where they go on, and which of them may have killed an engine.

Engines send outputs straight to the front ends, so after a death only the front ends know what
clients have. A request that was on a dead engine is *interrupted*: its front end is asked how far
the request has come, and from then on drops late outputs of that attempt. The answer decides what
follows: either the request waits in the pool again, in its old place, and goes on after the tokens
that its client has; or it ends.

A request may have caused the engine's death. All requests that the engine computed are suspects. A
unit gets no second suspect until the front end has an output of the first. If the unit dies before
that, the suspect is guilty and no other request is suspected. If a unit dies that had no suspect,
all requests that it computed become suspects.
"""

import logging
from collections import defaultdict
from collections.abc import Collection, Iterator

import msgspec

from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.core_book import CoreBook
from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.controller.books.request import Request, continued
from shoal.runtime.controller.requests.aborts import send_aborts
from shoal.runtime.controller.requests.admission import Admission
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.messages import Outcome
from shoal.runtime.protocol.transport import front_identity

log = logging.getLogger("shoal.controller")

REMEMBERED_SECONDS = 10.0
"""An engine that still lives this long after a request's end has sent the last outputs. That it
does not live is noticed after its time limit."""


class Migration:
    """Moves requests of dead engines to other engines.

    Args:
        env: how many deaths a request may survive, the transport, and the time.
        books: units and their requests; requests that go on are counted.
        admission: lets requests wait again, or ends them.
    """

    def __init__(self, env: Environment, books: Books, admission: Admission) -> None:
        self._most_deaths = env.config.max_retries
        self._transport = env.transport
        self._clock = env.clock
        self._books = books
        self._units = books.units
        self._requests = books.requests
        self._pool = books.requests.pool
        self._statistics = books.statistics
        self._admission = admission
        self._finished = books.requests.finished
        self._remembered = REMEMBERED_SECONDS + (env.config.engine_timeout_seconds or 0.0)

    # --- deaths -------------------------------------------------------------------------------

    def _cores(self, gone: Collection[int]) -> Iterator[CoreBook]:
        """Yield the cores that have lost KV of their requests."""
        for core in list(self._requests.cores.values()):
            if core.requests and set(gone).intersection(core.unit.engines):
                yield core

    def computed(self, gone: Collection[int]) -> set[str]:
        """Return the requests that may have killed engines; of a core with suspects, only these."""
        found: set[str] = set()
        for core in self._cores(gone):
            computed = core.computed if core.unit in self._units.partition else []
            suspects = [request for request in computed if request.suspect]
            found.update(request.id for request in suspects or computed)
        return found

    def finished(self, request: Request, leader: int) -> None:
        """Remember a request that ended on a unit, because its last outputs may not be sent yet."""
        self._finished.add(request, leader, self._clock())

    def forget_finished(self) -> None:
        """Forget the requests whose last outputs were sent long ago."""
        self._finished.forget_before(self._clock() - self._remembered)

    def interrupt(
        self, gone: Collection[int], blamed: Collection[str], damaged: Collection[str]
    ) -> None:
        """Take requests out of cores that have lost KV, and ask their front ends about them.

        Args:
            gone: engines that died.
            blamed: the requests that may have killed them.
            damaged: requests of other engines that were carried away from these.
        """
        taken = [_had_ended(request) for request in self._finished.take_of(gone)]
        for core in self._cores(gone):
            if core.unit.leader not in gone:
                abort = m.AbortRequests(core.unit, list(core.requests))
                self._transport.to_engine(core.unit.leader, abort)
            taken += self._requests.remove_all(core.unit)
        send_aborts(self._transport, self._books, damaged)
        removed = map(self._requests.remove, damaged)
        taken += [request for request in removed if request is not None]
        questions: defaultdict[int, dict[str, int]] = defaultdict(dict)
        for request in taken:
            charged = request.id in blamed
            again = msgspec.structs.replace(
                request,
                attempt=request.attempt + 1,
                deaths=request.deaths + charged,
                suspect=request.suspect or charged,
                guilty=request.suspect and charged,
            )
            self._requests.interrupt(again)
            questions[request.client][request.id] = again.attempt
        for client, attempts in questions.items():
            self._transport.to_control(front_identity(client), m.Interrupted(attempts))
        self._admission.give_up_unholdable()

    # --- front ends' answers ------------------------------------------------------------------

    def received(self, message: m.Received) -> None:
        """Take a front end's report on how far its requests have come, asked for or not.

        A front end may report an attempt twice: as it asks for it, and as it answers the question
        that crossed this. Only the first report counts, and none of an attempt before the latest.
        """
        for request_id in message.ended:
            request = self._requests.take_interrupted(request_id)
            if request is not None:
                self._statistics.left(request, Outcome.FINISHED)
        for request_id, progress in message.progress.items():
            request = self._find(request_id)
            if request is None:
                self._end_unknown(message.client, request_id)
            elif self._is_due(request, progress.attempt):
                self._go_on(self._take_back(request), progress)

    def _go_on(self, request: Request, progress: m.Progress) -> None:
        """Put a request in its old place in the pool with its progress, or end it."""
        again = msgspec.structs.replace(
            continued(request, progress.tokens, self._clock()), attempt=progress.attempt
        )
        reason = self._reason_to_end(again)
        if reason is not None:
            outcome = Outcome.POISONED if again.guilty else Outcome.LOST
            self._admission.fail([again], outcome, 500, reason)
        elif self._admission.readmit(again):
            self._statistics.migrated.add()

    def _reason_to_end(self, request: Request) -> str | None:
        if request.guilty:
            return f"{request.deaths} engines died of this request: it is not tried again"
        if request.deaths > self._most_deaths:
            return f"{request.deaths} engines died while they had this request"
        return None

    # --- requests whose tokens were lost on the way -------------------------------------------

    def _find(self, request_id: str) -> Request | None:
        """Return a request wherever it is, even if it has ended lately; None if it is unknown."""
        found = self._requests.interrupted.get(request_id) or self._pool.get(request_id)
        return found or self._requests.find(request_id) or self._finished.find(request_id)

    def _is_due(self, request: Request, attempt: int) -> bool:
        """Return whether a request that is known begins again with this attempt."""
        if request.id in self._requests.interrupted:
            return request.attempt <= attempt
        return request.attempt < attempt

    def _take_back(self, request: Request) -> Request:
        """Take a request that begins again out of the book that it is in."""
        if self._requests.take_interrupted(request.id) or self._pool.remove(request.id):
            return request
        if self._requests.where(request.id) is None:
            self._finished.forget(request)
            return _had_ended(request)
        send_aborts(self._transport, self._books, [request.id])
        self._requests.remove(request.id)
        return request

    def _end_unknown(self, client: int, request_id: str) -> None:
        """End a request that only its front end still knows."""
        log.warning("request %s ends with an error: %s", request_id, _TOKENS_LOST)
        note = m.Ended(request_id, Outcome.LOST, 500, _TOKENS_LOST)
        self._transport.to_control(front_identity(client), note)
        finish = wire.encode_finish([request_id], wire.FinishReason.ERROR)
        self._transport.to_front(client, [finish])

    # --- suspects -----------------------------------------------------------------------------

    def clear(self, request_ids: Collection[str]) -> None:
        """Take a front end's report that restarted requests have an output."""
        for request_id in request_ids:
            self._requests.absolve(request_id)


def _had_ended(request: Request) -> Request:
    """Return a request whose outcome was counted when it ended."""
    return msgspec.structs.replace(request, counted=True)


_TOKENS_LOST = "an engine died with the request's last tokens"
