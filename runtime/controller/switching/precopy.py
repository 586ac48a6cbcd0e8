"""Pre-copies: KV is copied to the next unit of requests while their unit still computes them.

    PINNING ──Pinned──> PINNED ──> LENDING ──Grow──> RESERVING ──Reserved──> COPYING ──> over
                           └──────────no group, or bound──────↑

A pre-copy is the first part of a carry (``carries.py``), and has its number. It copies whole blocks
that nothing is written to any more, so that the rest of the carry, for which the requests stop, has
little left to copy. Live migration of virtual machines calls this pre-copy.

It can be given up at any time, and the carry then copies all. Only the blocks that engines read
into cannot be used again before the last reader has answered (STOPPED).
"""

import enum
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import msgspec

from shoal.policies.values.layouts import Unit, alone
from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.capacity import Capacity
from shoal.runtime.controller.books.carry_book import Carry
from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.controller.books.request import Request
from shoal.runtime.controller.switching.carry_tally import Tally
from shoal.runtime.protocol import messages as m

log = logging.getLogger("shoal.controller")

AT_ONCE = 4
"""How many portions a unit is told at once to read: so many that its members always have some to
read, and so few that its steps do not wait long for what runners do before they begin to read."""


class AheadStage(enum.Enum):
    """How far a pre-copy has come."""

    PINNING = enum.auto()
    """The source has been asked to hold the blocks that the requests have filled."""
    PINNED = enum.auto()
    """Other sources of the same destination have not answered yet."""
    LENDING = enum.auto()
    """The destination is a group that is not bound yet: its members have been asked for blocks."""
    RESERVING = enum.auto()
    """The destination has been asked to take blocks."""
    COPYING = enum.auto()
    """The destination's members read, each told by the unit that it is in now."""
    STOPPED = enum.auto()
    """Nobody waits for the KV any more, but members still read."""


class Reader(msgspec.Struct):
    """How far a unit has come whose members read."""

    told: int = 0
    """Portions that it was told to read."""
    read: int = 0
    """Portions that it has read."""


class PreCopy(msgspec.Struct):
    """What is copied ahead of one carry."""

    carry: Carry
    since: float
    """Clock time at which it began."""
    deadline: float
    """Clock time at which the engine that is to answer is late."""
    stage: AheadStage = AheadStage.PINNING
    pinned: list[m.CarriedRequest] = []
    portions: list[list[m.AheadRequest]] = []
    """What is read, a portion after the other."""
    readers: dict[Unit, Reader] = {}
    """Units whose members read, and that have not read all yet."""
    bytes: int = 0
    host_bytes: int = 0
    is_good: bool = True
    """Whether all that was read so far can be used."""
    ended: list[Request] = []
    """The requests that have ended of which something is read."""


class PreCopies:
    """Begins, follows and ends pre-copies.

    Args:
        env: how long engines may take to answer, and the time.
        books: engines, units and leases; pre-copies are counted.
        capacity: knows the layouts' blocks.
        send: sends a message to the leader of a unit, unless it is dead.
    """

    def __init__(
        self,
        env: Environment,
        books: Books,
        capacity: Capacity,
        send: Callable[[Unit, m.Message], None],
    ) -> None:
        self._timeout = env.config.prepare_timeout_seconds
        self._clock = env.clock
        self._engines = books.engines
        self._units = books.units
        self._leases = books.leases
        self._requests = books.requests
        self._prefixes = books.prefixes
        self._statistics = books.statistics.carries
        self._capacity = capacity
        self._send = send
        self._all: dict[int, PreCopy] = {}
        self.tally = Tally()
        """Of the present switch's carries."""

    @property
    def running(self) -> bool:
        """Whether a carry waits for its pre-copy."""
        return any(ahead.stage is not AheadStage.STOPPED for ahead in self._all.values())

    @property
    def unsettled(self) -> bool:
        """Whether any blocks are pinned or read into."""
        return bool(self._all)

    @property
    def deadline(self) -> float:
        """When an engine's answer is overdue next; infinite: none is awaited."""
        return min((ahead.deadline for ahead in self._all.values()), default=math.inf)

    # --- the stages ---------------------------------------------------------------------------

    def ended(self, target: Collection[Unit]) -> dict[Unit, list[Request]]:
        """Return the requests that have ended, of which units that a partition lacks have caches.

        There are only as many as there is room for, and none where hardly any prompt finds what it
        begins with: a switch would wait for a copy that nobody uses.
        """
        found = dict[Unit, list[Request]]()
        if not self._prefixes.hits.are_used:
            return found
        for unit in self._units.partition:
            is_whole = self._engines.gone.isdisjoint(unit.engines)
            if unit not in target and is_whole and self._engines.serves(alone(unit.leader)):
                found[unit] = self._requests.ended.choose(unit, self._portable_tokens(unit))
        return {unit: requests for unit, requests in found.items() if requests}

    def begin(self, carries: Sequence[Carry]) -> None:
        """Begin to copy ahead of carries; their destinations have been told what to expect.

        Groups that are about to be released make room first. What they give back is with their
        members before these are asked for blocks, because their leaders answer ``Pin`` afterwards.
        """
        now = self._clock()
        for group, blocks in self._capacity.room_wanted().items():
            self._leases.shrink(group, blocks)
        shares = Counter(carry.source for carry in carries)
        for carry in carries:
            self._all[carry.number] = PreCopy(carry, now, now + self._timeout)
            ended = {name: request.id for name, request in carry.ended.items()}
            room = self._room_for_ended(carry.source) // shares[carry.source] if ended else 0
            pin = m.Pin(carry.number, carry.source, sorted(carry.ids), ended, room)
            self._send(carry.source, pin)

    def _room_for_ended(self, source: Unit) -> int:
        """Return how many blocks of a unit may be held for requests that have ended.

        ``ended`` counts only the prompts: nobody here knows how long the answers are.
        """
        return self._engines.limits(source).blocks(self._portable_tokens(source))

    def _portable_tokens(self, unit: Unit) -> int:
        """Return how many tokens' caches of a unit a switch may take along."""
        return self._capacity.unit_state(unit, serving=True, paused=0).portable_tokens

    def take(self, message: m.AheadAnswer) -> bool:
        """Take an engine's answer; return False if nothing awaits it."""
        match message:
            case m.Pinned():
                return self.pinned(message)
            case m.Reserved():
                return self.reserved(message)
            case m.CopiedAhead():
                return self.copied(message)

    def pinned(self, message: m.Pinned) -> bool:
        """Take a source's answer; return False if no pre-copy awaits it."""
        ahead = self._at(message.carry, AheadStage.PINNING)
        if ahead is None:
            return False
        expected = ahead.carry.ids | ahead.carry.ended.keys()
        ahead.pinned = [each for each in message.requests if each.request_id in expected]
        # The other sources, for which it waits, have deadlines.
        ahead.stage, ahead.deadline = AheadStage.PINNED, math.inf
        if not ahead.pinned:
            self._end(ahead, "nothing")
        self._lend(ahead.carry.destination)
        return True

    def _lend(self, destination: Unit) -> None:
        """Go on with the carries to a unit once all of their sources have answered."""
        pinned = list(self._to(destination, AheadStage.PINNED))
        if not pinned or any(self._to(destination, AheadStage.PINNING)):
            return
        if not self._engines.gone.isdisjoint(destination.engines):
            return  # they are about to be stopped
        for ahead in pinned:
            self._enter(ahead, AheadStage.LENDING)
        if destination.is_group and destination not in self._units.bound:
            self._leases.grow_ahead(destination, self._wanted(destination, pinned))
        self._reserve(destination)

    def _filled(self, destination: Unit, aheads: Sequence[PreCopy]) -> int:
        """Return how many blocks of a unit the requests of its pre-copies have filled."""
        limits = self._engines.limits(destination)
        rows = [r.computed // limits.block_tokens for ahead in aheads for r in ahead.pinned]
        return sum(limits.blocks(count * limits.block_tokens) for count in rows)

    def _wanted(self, destination: Unit, aheads: Sequence[PreCopy]) -> int:
        """Return how many blocks of a unit these requests will probably take when they come."""
        limits = self._engines.limits(destination)
        pinned = (request for ahead in aheads for request in ahead.pinned)
        return sum(limits.blocks(request.length + m.AHEAD_TOKENS) for request in pinned)

    def _reserve(self, destination: Unit) -> None:
        """Go on with the carries to a unit that has been lent blocks, or needs none.

        Requests of several sources that find no room together take turns (``carries.py``). They are
        not copied ahead, because what one source has ahead would take the room of all.
        """
        if self._leases.grows(destination) and destination not in self._units.bound:
            return
        lending = list(self._to(destination, AheadStage.LENDING))
        is_new = destination.is_group and destination not in self._units.bound
        if is_new and len(lending) > 1:
            opened = self._leases.opened.get(destination, 0)
            if opened < self._filled(destination, lending):
                for ahead in lending:
                    self._end(ahead, "nothing")
                return
        for ahead in lending:
            carry = ahead.carry
            self._enter(ahead, AheadStage.RESERVING)
            reserve = m.Reserve(carry.number, destination, carry.source, ahead.pinned)
            self._send(destination, reserve)

    def reserved(self, message: m.Reserved) -> bool:
        """Take a destination's answer; return False if no pre-copy awaits it."""
        ahead = self._at(message.carry, AheadStage.RESERVING)
        if ahead is None:
            return False
        if not message.requests:
            self._end(ahead, "nothing")
            return True
        carry = ahead.carry
        named = {request.request_id for request in message.requests}
        ahead.ended = [request for name, request in carry.ended.items() if name in named]
        running = (one for one in message.requests if one.request_id in carry.ids)
        taken = (request.target[carry.destination.leader] for request in running)
        carry.reserved = sum(bool(block) for groups in taken for ids in groups for block in ids)
        self._enter(ahead, AheadStage.COPYING)
        self._leases.hold(carry.destination)
        members = set(carry.destination.engines)
        ahead.portions = portions_of(message.requests)
        readers = (u for u in self._units.partition if members.intersection(u.engines))
        ahead.readers = {unit: Reader() for unit in sorted(readers)}
        for unit in ahead.readers:
            self._tell(ahead, unit, AT_ONCE)
        return True

    def _tell(self, ahead: PreCopy, unit: Unit, portions: int) -> None:
        """Tell a unit to read the next portions."""
        carry, reader = ahead.carry, ahead.readers[unit]
        for portion in ahead.portions[reader.told : reader.told + portions]:
            reader.told += 1
            copy = m.CopyAhead(carry.number, unit, carry.source, carry.destination, portion)
            self._send(unit, copy)

    def copied(self, message: m.CopiedAhead) -> bool:
        """Take the answer of a unit whose members have read; return False if none was awaited."""
        ahead = self._all.get(message.carry)
        if ahead is None or message.unit not in ahead.readers:
            return False
        ahead.bytes += message.bytes
        self.tally.precopied_bytes += message.bytes
        ahead.host_bytes += message.host_bytes
        if message.problem:
            log.warning("KV was not copied ahead of a switch: %s", message.problem)
            ahead.is_good = False
        reader = ahead.readers[message.unit]
        reader.read += 1
        if ahead.stage is AheadStage.COPYING and ahead.is_good:
            self._tell(ahead, message.unit, 1)
        if reader.read == reader.told:
            self._answered(ahead, {message.unit})
        return True

    def _answered(self, ahead: PreCopy, units: Collection[Unit]) -> None:
        """Take note that the members in some units write to the destination's blocks no more."""
        for unit in units:
            del ahead.readers[unit]
        if ahead.readers:
            return
        self._leases.let_go(ahead.carry.destination)
        is_copied = ahead.stage is AheadStage.COPYING and ahead.is_good
        self._end(ahead, "copied" if is_copied else "stopped")

    # --- the end ------------------------------------------------------------------------------

    def _end(self, ahead: PreCopy, outcome: str) -> None:
        """End a pre-copy into whose blocks nobody reads."""
        carry, stage = ahead.carry, ahead.stage
        del self._all[carry.number]
        if stage in (AheadStage.RESERVING, AheadStage.COPYING, AheadStage.STOPPED):
            # Where there is nothing to copy, the destination may have all of it in its cache.
            copied = outcome != "stopped"
            self._send(carry.destination, m.Settle(carry.number, carry.destination, copied))
        for request in ahead.ended if outcome == "copied" else ():
            self._requests.ended.copied(request, carry.destination)
        if stage is not AheadStage.STOPPED:
            self._count(ahead, outcome)
            self._send(carry.source, m.Unpin(carry.number, carry.source))

    def _count(self, ahead: PreCopy, outcome: str) -> None:
        self._statistics.precopies.add(outcome)
        if outcome == "copied":
            self._statistics.precopied(ahead.bytes, ahead.host_bytes)
            self._statistics.seconds.observe(self._clock() - ahead.since, "precopy")
        else:
            ahead.carry.reserved = 0

    def stop(self, number: int) -> None:
        """Let a carry go on without its pre-copy, if it has one; unknown carries are ignored."""
        ahead = self._all.get(number)
        if ahead is None or ahead.stage is AheadStage.STOPPED:
            return
        destination, stage = ahead.carry.destination, ahead.stage
        if not ahead.readers:
            self._end(ahead, "stopped")
        else:
            self._count(ahead, "stopped")
            self._send(ahead.carry.source, m.Unpin(number, ahead.carry.source))
            self._enter(ahead, AheadStage.STOPPED)
        if stage is AheadStage.LENDING and not any(self._to(destination, stage)):
            self._leases.cancel(destination)
        self._lend(destination)

    def tick(self) -> list[tuple[Unit, str]]:
        """Go on with groups whose leases have grown, and act on overdue answers.

        Returns:
            Units that are broken, each with the reason: their members read for too long.
        """
        now, broken = self._clock(), list[tuple[Unit, str]]()
        for ahead in list(self._all.values()):
            carry = ahead.carry
            if ahead.stage is AheadStage.LENDING:
                self._reserve(carry.destination)
            if ahead.deadline > now or carry.number not in self._all:
                continue
            if ahead.stage is AheadStage.STOPPED:
                reason = "did not read the KV of requests in time"
                broken += [(u, f"unit {list(u.engines)} {reason}") for u in sorted(ahead.readers)]
                ahead.deadline = math.inf
                continue
            units = list(carry.source.engines), list(carry.destination.engines)
            log.warning("the KV of unit %s was not copied ahead to %s in time", *units)
            self.stop(carry.number)
        return broken

    def lost(self, gone: Collection[int]) -> None:
        """Go on without engines that have died; the book of engines already says so."""
        dead = set(gone)
        for ahead in list(self._all.values()):
            ends = (ahead.carry.source, ahead.carry.destination)
            readers = {unit for unit in ahead.readers if dead.intersection(unit.engines)}
            if readers or any(dead.intersection(unit.engines) for unit in ends):
                self.stop(ahead.carry.number)
            if readers:
                self._answered(ahead, readers)

    # --- which --------------------------------------------------------------------------------

    def _at(self, number: int, stage: AheadStage) -> PreCopy | None:
        """Return a pre-copy that is in a stage."""
        ahead = self._all.get(number)
        return ahead if ahead is not None and ahead.stage is stage else None

    def _to(self, destination: Unit, stage: AheadStage) -> Iterator[PreCopy]:
        """Yield the pre-copies to a unit that are in a stage."""
        for ahead in list(self._all.values()):
            if ahead.carry.destination == destination and ahead.stage is stage:
                yield ahead

    def _enter(self, ahead: PreCopy, stage: AheadStage) -> None:
        ahead.stage, ahead.deadline = stage, self._clock() + self._timeout


def portions_of(requests: Iterable[m.AheadRequest]) -> list[list[m.AheadRequest]]:
    """Divide what is copied ahead into portions of about ``PORTION`` blocks of each source."""
    portions, left = list[list[m.AheadRequest]](), 0
    for request in requests:
        blocks = max(sum(map(len, groups)) for groups in request.source.values())
        if not portions or blocks > left:
            portions.append([])
            left = m.PORTION
        portions[-1].append(request)
        left -= blocks
    return portions
