"""Carries: running requests go to another unit with their KV.

    AHEAD ──> EXPORTING ──Exported──> EXPORTED ──destination bound──> IMPORTING ──Imported──> over

A carry of long requests begins with a pre-copy, for which nothing stops (``precopy.py``).
``Expect`` tells the destination what will come, and ``Export`` asks the source to stop computing
the requests, which then keep their KV there. ``Import`` lets the destination read it. Each
``Imported`` says which requests go on there, so that the source may ``Drop`` them. Until ``Import``
a carry can be given up: the source goes on with the requests (``Keep``).
"""

import logging
import math
from collections.abc import Collection, Iterable, Sequence
from itertools import chain

from shoal.policies.values.layouts import Unit
from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.capacity import Capacity
from shoal.runtime.controller.books.carry_book import Carry, CarryStage
from shoal.runtime.controller.books.core_book import CoreBook
from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.controller.books.request import Request
from shoal.runtime.controller.books.statistics import SWITCH
from shoal.runtime.controller.switching.carry_tally import Tally
from shoal.runtime.controller.switching.destinations import Destinations, is_led_alike, reachable
from shoal.runtime.controller.switching.precopy import PreCopies
from shoal.runtime.controller.switching.taking_over import TakingOver
from shoal.runtime.protocol import messages as m

log = logging.getLogger("shoal.controller")


class Carries:
    """Begins, follows and ends carries.

    Args:
        env: the transport to engines, how long these may take to answer, and the time.
        books: engines, units, requests and carries; carries are counted.
        capacity: what each unit holds.
    """

    def __init__(self, env: Environment, books: Books, capacity: Capacity) -> None:
        self._timeout = env.config.prepare_timeout_seconds
        self._precopy_tokens = env.config.precopy_tokens if env.config.copies_ahead else 0
        self._transport = env.transport
        self._clock = env.clock
        self._engines = books.engines
        self._units = books.units
        self._requests = books.requests
        self._book = books.carries
        self._statistics = books.statistics.carries
        self._books = books
        self._capacity = capacity
        self.apart: Unit | None = None
        """The unit that urgent requests have to themselves, or are about to get."""
        self._destinations = Destinations(books, capacity, ())
        self._ahead = PreCopies(env, books, capacity, self._send)
        self._tally = Tally()
        self._taking_over = TakingOver(env, books, capacity)

    @property
    def running(self) -> bool:
        """Whether any request is on its way."""
        return len(self._book) > 0

    @property
    def copies_ahead(self) -> bool:
        """Whether carries wait for their pre-copies."""
        return self._ahead.running

    @property
    def unsettled(self) -> bool:
        """Whether engines hold blocks for carries, which may be over."""
        return self.running or self._ahead.unsettled

    @property
    def deadline(self) -> float | None:
        """When an engine's answer is overdue next."""
        due = min((carry.deadline for carry in self._book), default=math.inf)
        due = min(due, self._ahead.deadline)
        return None if due == math.inf else due

    def tally(self) -> Tally:
        """Return a tally of all that carries do from now on, until the next call."""
        self._tally = self._ahead.tally = Tally()
        return self._tally

    # --- begin --------------------------------------------------------------------------------

    def copy_caches(self, units: Iterable[Unit]) -> bool:
        """Begin to copy the caches of ended requests that find room; return whether any go."""
        ended = self._ahead.ended(units := tuple(units))
        tokens = sum(request.seen.prompt_tokens for request in chain(*ended.values()))
        if not 0 < self._precopy_tokens <= tokens:
            return False
        destinations, begun = Destinations(self._books, self._capacity, units), list[Carry]()
        for source, requests in ended.items():
            spread = destinations.spread(source, requests)
            begun += [self._expect(source, u, (), SWITCH, spread[u]) for u in sorted(spread)]
        self._ahead.begin(begun)
        return self.copies_ahead

    def copy_ahead(self, cores: Iterable[CoreBook], units: Iterable[Unit]) -> bool:
        """Begin to copy ahead of the carries of some cores; return whether there is enough."""
        running = list(reachable(cores, self._engines))
        tokens = sum(core.figures.prompt_tokens for core in running)
        if not 0 < self._precopy_tokens <= tokens:
            return False
        self._destinations = Destinations(self._books, self._capacity, units, self.apart)
        begun: list[Carry] = []
        for core in running:
            innocent = [request for request in core.requests.values() if not request.suspect]
            divided = self._destinations.divide(core.unit, innocent)
            able = sorted(unit for unit in divided if unit is not None)
            begun += [self._expect(core.unit, unit, divided[unit], SWITCH) for unit in able]
        self._ahead.begin(begun)
        return self.copies_ahead

    def begin(self, cores: Iterable[CoreBook], units: Iterable[Unit], reason: str) -> list[Request]:
        """Begin to carry all requests of some cores, or go on where they were copied ahead.

        Suspects go through the pool, because a unit gets no second one (``migration.py``).

        Args:
            cores: the cores; those whose engines cannot answer are left as they are.
            units: where the requests may go; these units need not be bound yet.
            reason: why they leave, one of ``statistics.DEPARTURES``.

        Returns:
            The requests that none of the units can take.
        """
        ahead = (carry for carry in self._book if carry.stage is CarryStage.AHEAD)
        for carry in sorted(ahead, key=lambda each: is_led_alike(each.source, each.destination)):
            self._export_rest(carry)
        self._destinations = Destinations(self._books, self._capacity, units, self.apart)
        leaving, left = self._book.ids, list[Request]()
        for core in reachable(cores, self._engines):
            unit = core.unit
            requests = [r for r in core.requests.values() if r.id not in leaving]
            suspects = [request.id for request in requests if request.suspect]
            if suspects:
                self._send(unit, m.MoveOut(unit, suspects))
            innocent = [request for request in requests if not request.suspect]
            left += self._ask(unit, innocent, reason)
        return left

    def move(
        self, source: Unit, destination: Unit, requests: Sequence[Request], reason: str
    ) -> None:
        """Begin to carry some requests of a unit to another one; both are bound.

        If that one dies meanwhile, they stay.
        """
        self._destinations = Destinations(self._books, self._capacity, ())
        if list(reachable([self._requests.core(source)], self._engines)):
            carry = self._expect(source, destination, requests, reason)
            self._export(carry, [request.id for request in requests])

    def _ask(self, source: Unit, requests: Sequence[Request], reason: str) -> list[Request]:
        """Send requests on their way; return those that no unit can take."""
        divided = self._destinations.divide(source, requests)
        left = divided.pop(None, [])
        units = [unit for unit in divided if unit is not None]
        for unit in sorted(units, key=lambda each: is_led_alike(source, each)):
            chosen = divided[unit]
            carry = self._expect(source, unit, chosen, reason)
            self._export(carry, [request.id for request in chosen])
        return left

    def _expect(
        self,
        source: Unit,
        unit: Unit,
        requests: Sequence[Request],
        reason: str,
        ended: Sequence[Request] = (),
    ) -> Carry:
        """Begin a carry: tell the destination what will come."""
        now, ids = self._clock(), {request.id for request in requests}
        carry = self._book.begin(source, unit, ids, reason, now=now, ended=ended)
        frames = {request.id: request.payload for request in requests}
        prefixes = {name: request.payload for name, request in carry.ended.items()}
        self._send(unit, m.Expect(carry.number, unit, frames, prefixes))
        return carry

    def _export_rest(self, carry: Carry) -> None:
        """Go on with a carry whose requests were copied ahead, as far as they have not ended."""
        tally = self._tally
        tally.precopy_seconds = max(tally.precopy_seconds, self._clock() - carry.since)
        carry.ids = {each for each in carry.ids if self._requests.where(each) == carry.source}
        if carry.ids:
            self._export(carry, sorted(carry.ids))
        else:
            # A new group keeps what is cached for it as long as it expects anything.
            self._enter(carry, CarryStage.EXPORTED, math.inf)

    def _export(self, carry: Carry, ids: list[str]) -> None:
        now = self._clock()
        self._statistics.departures.add(carry.reason, amount=len(ids))
        self._enter(carry, CarryStage.EXPORTING, now + self._timeout)
        is_parked = carry.destination.tier
        self._send(carry.source, m.Export(carry.number, carry.source, ids, is_parked))
        if self._tally.began is None:
            self._tally.began = now

    def _send(self, unit: Unit, message: m.Message) -> None:
        """Send to the leader of a unit, unless it is dead."""
        if unit.leader not in self._engines.gone:
            self._transport.to_engine(unit.leader, message)

    # --- answers ------------------------------------------------------------------------------

    def copied_ahead(self, message: m.AheadAnswer) -> bool:
        """Take an answer to a message of a pre-copy; return False if nothing awaits it."""
        return self._ahead.take(message)

    def announced(self, message: m.Leaving) -> bool:
        """Take what a source foretells; return False if no carry awaits its answer."""
        carry = self._book.get(message.carry)
        if carry is None or carry.stage is not CarryStage.EXPORTING:
            return False
        carry.announced = {each.request_id: each for each in message.requests}
        self.settle()
        return True

    def exported(self, message: m.Exported) -> bool:
        """Take a source's answer; return False if no carry awaits it."""
        carry = self._book.get(message.carry)
        if carry is None or carry.stage is not CarryStage.EXPORTING:
            return False
        self._observe(carry, "export")
        carry.exported = [each for each in message.requests if each.request_id in carry.ids]
        leaving = {each.request_id for each in carry.exported}
        self._tally.ended_early |= carry.ids - leaving
        carry.ids = leaving
        self._enter(carry, CarryStage.EXPORTED, math.inf)
        self._settle()
        return True

    def before(self, message: m.ToController | None = None) -> None:
        """Do the books that must be done before a message is taken.

        Args:
            message: the message; None: it is not from an engine, or nothing more has come.
        """
        if message is None or not self._taking_over.can_wait(message):
            self._taking_over.note()

    def settle(self) -> None:
        """Go on with the carries whose destinations are bound. Call it when units have changed."""
        self._settle()
        self._taking_over.note()

    def _settle(self) -> None:
        """Go on with carries; the books of requests that go on may be left to ``before``.

        Where a new group has too few blocks, its carries begin together, so that their requests can
        take turns. None comes later for that: a group's first copy queues up behind the last steps
        of all its members anyway.
        """
        ready = dict[Unit, list[Carry]]()
        for carry in self._book:
            if self._units.has(carry.destination):
                ready.setdefault(carry.destination, []).append(carry)
        for unit, carries in ready.items():
            exported = [carry for carry in carries if carry.stage is CarryStage.EXPORTED]
            members = set(unit.engines)
            are_own = all(members.issuperset(carry.source.engines) for carry in carries)
            several = sum(bool(carry.ids) for carry in carries) > 1
            together = several and are_own and self._capacity.lacks_room(unit)
            foreseen = [] if together else [carry for carry in carries if self._allot(carry)]
            if together and any(carry.stage is CarryStage.EXPORTING for carry in carries):
                continue
            for carry in exported:
                self._import(carry, more=together and carry is not exported[-1])
            for carry in foreseen:
                self._taking_over.foresee(carry)

    def _allot(self, carry: Carry) -> bool:
        """Let a destination give blocks to requests before they come; return whether it is new."""
        if carry.stage is not CarryStage.EXPORTING or carry.is_allotted:
            return False
        requests = [each for name, each in carry.announced.items() if name in carry.ids]
        if requests:
            carry.is_allotted, to = True, carry.destination
            self._send(to, m.Allot(carry.number, to, carry.source, requests))
        return carry.is_allotted

    def _import(self, carry: Carry, *, more: bool) -> None:
        taken = self._taking_over.choose(carry)
        message = m.Import(carry.number, carry.destination, carry.source, taken, more)
        self._send(carry.destination, message)
        self._taking_over.owe(carry, taken)
        kept = carry.ids - {each.request_id for each in taken}
        self._keep(carry, kept)
        carry.ids -= kept
        carry.exported = []
        self._enter(carry, CarryStage.IMPORTING, self._clock() + self._timeout)
        self._books.leases.hold(carry.source)
        if not taken:
            self._end(carry)

    def imported(self, message: m.Imported) -> bool:
        """Take a destination's answer; return False if no carry awaits it."""
        carry = self._book.get(message.carry)
        if carry is None or carry.stage is not CarryStage.IMPORTING:
            # ``Import`` without requests has such an answer, but nothing awaits it.
            return not (message.carried or message.recomputed)
        if carry.unread or message.failed:
            carry.has_failed |= message.failed
            if carry.unread and message.left == 0:
                self._drop(carry)
            return True
        self._count(carry, message)
        self._capacity.costs.observe_copy(carry.source, message)
        settled = {*message.carried, *message.recomputed}
        if message.left == 0:
            self._observe(carry, "import")
            # What has been aborted meanwhile is in no answer.
            settled |= carry.ids
        carry.ids -= settled
        carry.deadline = self._clock() + self._timeout
        if settled:
            self._send(carry.source, m.Drop(carry.source, sorted(settled)))
        if message.left == 0:
            self._end(carry)
        return True

    def _drop(self, carry: Carry) -> None:
        """End a carry, whose source may use the blocks of its requests for others."""
        self._send(carry.source, m.Drop(carry.source, sorted(carry.ids | carry.unread)))
        self._end(carry)

    def _enter(self, carry: Carry, stage: CarryStage, deadline: float) -> None:
        carry.stage, carry.since, carry.deadline = stage, self._clock(), deadline

    def _end(self, carry: Carry) -> None:
        if carry.stage is CarryStage.IMPORTING:
            self._books.leases.let_go(carry.source)
        self._tally.ended = self._clock()
        self._book.end(carry, now=self._tally.ended)

    def _observe(self, carry: Carry, phase: str) -> None:
        self._statistics.seconds.observe(self._clock() - carry.since, phase)

    def _count(self, carry: Carry, message: m.Imported) -> None:
        tally = self._tally
        self._statistics.count(carry.source, carry.destination, message)
        for reason in message.recomputed.values():
            tally.recomputed[reason.value] += 1
        tally.carried += len(message.carried)
        tally.bytes += message.bytes

    # --- failures -----------------------------------------------------------------------------

    def give_up(self) -> None:
        """Let the sources go on with all requests that they still have."""
        for carry in self._book:
            if carry.stage is CarryStage.AHEAD:
                self._forget(carry)
            elif carry.stage is not CarryStage.IMPORTING:
                self._cancel(carry)

    def _cancel(self, carry: Carry) -> None:
        self._keep(carry, carry.ids)
        self._forget(carry)

    def _keep(self, carry: Carry, ids: Collection[str]) -> None:
        if ids:
            self._send(carry.source, m.Keep(carry.source, sorted(ids)))
            self._statistics.requests.add("kept", amount=len(ids))

    def _forget(self, carry: Carry) -> None:
        """End a carry whose destination has been told to expect requests, but gets none."""
        self._ahead.stop(carry.number)
        unit = carry.destination
        self._send(unit, m.Import(carry.number, unit, carry.source, []))
        self._end(carry)

    def tick(self) -> list[tuple[Unit, str]]:
        """Act on answers that are overdue; return broken units, each with the reason."""
        now, broken = self._clock(), self._ahead.tick()
        for carry in self._book:
            if carry.deadline > now:
                continue
            if carry.stage is CarryStage.EXPORTING:
                units = list(carry.source.engines), list(carry.destination.engines)
                log.error("unit %s did not let its requests go to %s in time", *units)
                self._cancel(carry)
            elif any(self._requests.where(each) == carry.destination for each in carry.ids):
                unit = list(carry.destination.engines)
                broken.append(
                    (carry.destination, f"unit {unit} did not take over requests in time")
                )
            else:
                self._drop(carry)
        self.settle()  # others may have waited for one that has ended
        return broken

    def lost(self, gone: Collection[int]) -> set[str]:
        """Go on without engines that have died; the book of engines already says so.

        Returns:
            The requests that a unit has taken over although their KV may be damaged, because their
            source died while it was read.
        """
        self._ahead.lost(gone)
        damaged: set[str] = set()
        redirected: list[Carry] = []
        for carry in self._book:
            from_dead = not set(gone).isdisjoint(carry.source.engines)
            to_dead = not set(gone).isdisjoint(carry.destination.engines)
            if not (from_dead or to_dead):
                continue
            if carry.stage is CarryStage.IMPORTING:
                damaged |= set() if to_dead else carry.ids
                self._lose(carry, is_read=not to_dead and not carry.has_failed)
                continue
            self._forget(carry)
            if not from_dead:
                redirected.append(carry)
                continue
            self._statistics.requests.add("lost", amount=len(carry.ids))
        for carry in redirected:
            self._redirect(carry)
        return damaged

    def _lose(self, carry: Carry, *, is_read: bool) -> None:
        """Give up requests whose KV the destination reads, if it lives and can.

        Blocks that it reads must not become other requests': whoever has found them in its prefix
        cache meanwhile goes on. So the source's living engines get theirs when it has answered.
        """
        self._statistics.requests.add("lost", amount=len(carry.ids))
        carry.unread, carry.ids = carry.unread | carry.ids, set()
        if not is_read or self._engines.gone.issuperset(carry.source.engines):
            self._drop(carry)

    def _redirect(self, carry: Carry) -> None:
        """Choose other destinations for requests whose destination has died.

        Requests that have not stopped get theirs when they do (``begin``).
        """
        if carry.stage is CarryStage.AHEAD:
            return
        found = (self._requests.find(request_id) for request_id in sorted(carry.ids))
        requests = [request for request in found if request is not None]
        left = self._ask(carry.source, requests, carry.reason)
        self._keep(carry, {request.id for request in left})
