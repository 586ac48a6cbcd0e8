"""How restarted engines come back, and how their groups are formed again.

An engine comes back alone. It serves as soon as no group holds blocks that it lent in its former
life. Its death also broke the communicators of its groups. All members of a group form it again
when they are alone and no switch runs. Narrow groups come first, one at a time:

    FORMING ──Formed from all──> STARTING ──Formed from all──> done

In FORMING, members wait for each other for a bounded time, and one that cannot make its part says
so; no engine is lost by that, and the group is tried again later, a few times. In STARTING, members
start the group's core and are inside its collectives, so they live or die together.
"""

import enum
import logging
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec

from shoal.policies.values.layouts import Unit, alone
from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.engine_book import EngineState
from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.controller.switching.moves import LoseEngines
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.transport import Arrival, parse_engine_identity

log = logging.getLogger("shoal.controller")

FORM_SECONDS = 120.0
"""How long members have to make their parts of a group."""
START_SECONDS = 600.0
"""How long members have to start a group's core, which may compile a large model."""
ATTEMPTS = 3
"""How often the same members try to form a group."""
RETRY_SECONDS = 5.0
"""Pause after the first failed attempt; each further pause is twice as long."""


class Stage(enum.Enum):
    """How far the forming of a group has come."""

    FORMING = enum.auto()
    STARTING = enum.auto()


class Formation(msgspec.Struct):
    """A group that is being formed again."""

    unit: Unit
    epoch: int
    members: tuple[int, ...]
    """Incarnations of the unit's engines."""
    began: float
    stage: Stage
    awaiting: set[int]
    deadline: float
    errors: list[str] = []
    lost: set[int] = set()
    """Members that have died since it began; they may be back."""


class Failures(msgspec.Struct):
    """Failed attempts of the same members to form a group."""

    members: tuple[int, ...]
    count: int = 0
    retry_at: float = 0.0


class Rejoin:
    """Lets restarted engines serve again, and makes them form their groups again.

    Args:
        env: the node, the transport to its engines, and the time.
        books: engines, units, and the cores and leases of an engine's former life.
        lose: takes engines down.
        greet: tells an engine what engines must know about the node.
        give_up: ends the requests that the node can no longer hold.
    """

    def __init__(
        self,
        env: Environment,
        books: Books,
        *,
        lose: LoseEngines,
        greet: Callable[[int], None],
        give_up: Callable[[], None],
    ) -> None:
        self._groups = [unit for unit in env.config.units if unit.is_group]
        self._transport = env.transport
        self._clock = env.clock
        self._engines = books.engines
        self._units = books.units
        self._requests = books.requests
        self._leases = books.leases
        self._statistics = books.statistics
        self._lose = lose
        self._greet = greet
        self._give_up = give_up
        self._early: list[Arrival] = []
        self._back: dict[int, m.EngineReady] = {}
        """Engines that are ready to serve again, with the message in which they said so."""
        self._formation: Formation | None = None
        self._generations: Counter[Unit] = Counter()
        self._failures: dict[Unit, Failures] = {}
        self._looked_at = env.clock()

    # --- engines ------------------------------------------------------------------------------

    def is_current(self, arrival: Arrival) -> bool:
        """Return whether a message comes from the incarnation that the controller knows.

        Messages of an earlier incarnation are stale. Those of a later one are kept until the
        supervisor has announced that incarnation.
        """
        engine, sent = parse_engine_identity(arrival.peer)
        known = self._engines[engine].incarnation
        if sent < known:
            self._statistics.stale.add()
        elif sent > known:
            self._early.append(arrival)
        return sent == known

    def died(self, message: m.EngineDied) -> bool:
        """Take the supervisor's report of a death; return False if the engine restarted since."""
        engine = self._engines[message.engine]
        if message.incarnation < engine.incarnation:
            return False
        self._engines.expect(message.engine, returns=message.restarts)
        if engine.state is EngineState.DEAD and not message.restarts:
            self._give_up()
        return True

    def restarted(self, message: m.EngineStarting) -> list[Arrival]:
        """Note that an engine's processes were restarted; return what they have already sent."""
        self._engines.restart(message.engine, message.incarnation)
        self._requests.forget_cores(message.engine)
        # It may have died again before it was taken in: it is not ready any more.
        self._back.pop(message.engine, None)
        self._transport.meet(message.engine, message.incarnation)
        early, self._early = self._early, []
        return early

    def ready(self, message: m.EngineReady) -> None:
        """Note that an engine is up again; ``tick`` lets it serve when it has no traces left."""
        former = self._engines.at_start(message.engine)
        # It knows only its own layout. The others stay as they were, because KV bytes are agreed.
        self._back[message.engine] = msgspec.structs.replace(message, layouts=former.layouts)

    def tick(self, *, may_begin: bool) -> None:
        """Do what is due.

        Args:
            may_begin: whether engines may serve again, and groups begin to form.
        """
        self._looked_at = self._clock()
        self._watch()
        if not may_begin:
            return
        for number in list(self._back):
            self._take_in(number)
        if self._formation is None:
            self._form_next()

    def _take_in(self, number: int) -> None:
        if self._engines[number].state is not EngineState.STARTING:
            del self._back[number]  # it has died since
        elif not self._has_traces(number):
            self._engines.serve(self._back.pop(number))
            log.warning("engine %d is back", number)
            self._greet(number)

    def _has_traces(self, engine: int) -> bool:
        """Return whether the lease of any group still has blocks of the engine's former life."""
        return any(
            blocks and engine in group.engines for group, blocks in self._leases.opened.items()
        )

    # --- groups -------------------------------------------------------------------------------

    @property
    def engines(self) -> frozenset[int]:
        """Engines that are forming a group now."""
        return frozenset() if self._formation is None else frozenset(self._formation.unit.engines)

    @property
    def deadline(self) -> float | None:
        """When something is due even if no message comes."""
        if self._formation is not None:
            return self._formation.deadline
        due = [self._failures[g].retry_at for g in self._broken() if g in self._failures]
        return min((at for at in due if at > self._looked_at), default=None)

    def unavailable(self) -> dict[Unit, str]:
        """Return the groups that cannot be bound now, and why."""
        return {group: self._reason(group) for group in self._broken()}

    def _broken(self) -> Iterator[Unit]:
        gone, unformed = self._engines.gone, self._engines.unformed(self._groups)
        if not gone and not unformed:
            return iter(())
        return (g for g in self._groups if gone.intersection(g.engines) or g in unformed)

    def _reason(self, group: Unit) -> str:
        gone = sorted(self._engines.gone.intersection(group.engines))
        if gone:
            back = all(self._engines[engine].returns for engine in gone)
            return f"engines {gone} are {'restarting' if back else 'lost'}"
        if group in self._engines.refused:
            return f"it could not be formed again: {self._engines.refused[group]}"
        members = set(group.engines)
        groups = (unit.engines for unit in self._units.partition if unit.is_group)
        bound = [list(engines) for engines in groups if members.intersection(engines)]
        if bound:
            return f"it is formed again when units {bound} are released"
        return "it is being formed again"

    def _form_next(self) -> None:
        now = self._clock()
        for group in self._broken():
            if self._may_form(group, now):
                self._begin(group, now)
                return

    def _may_form(self, group: Unit, now: float) -> bool:
        engines, partition = self._engines, self._units.partition
        apart = all(alone(engine) in partition for engine in group.engines)
        if not apart or not engines.serves(group) or self._leases.holds(group):
            return False
        members = set(group.engines)
        narrow = (g for g in self._groups if set(g.engines) < members)
        if not all(engines.is_formed(g) or g in engines.refused for g in narrow):
            return False
        failures = self._failures.get(group)
        if failures is not None and failures.members != engines.incarnations(group):
            # These are other incarnations than those that failed.
            del self._failures[group]
            engines.retry(group)
            failures = None
        return failures is None or (failures.count < ATTEMPTS and failures.retry_at <= now)

    def _begin(self, group: Unit, now: float) -> None:
        self._generations[group] += 1
        self._formation = Formation(
            group,
            self._units.next_epoch(),
            self._engines.incarnations(group),
            now,
            Stage.FORMING,
            set(group.engines),
            now + FORM_SECONDS,
        )
        form = m.FormGroup(self._formation.epoch, group, self._generations[group])
        for engine in group.engines:
            self._transport.to_engine(engine, form)

    def formed(self, message: m.Formed) -> None:
        """Take a member's answer."""
        formation = self._formation
        if formation is None or formation.epoch != message.epoch:
            self._statistics.stale.add()
            return
        formation.awaiting.discard(message.engine)
        if message.error:
            formation.errors.append(f"engine {message.engine}: {message.error}")
        self._go_on(formation)

    def _go_on(self, formation: Formation) -> None:
        self._note_lost(formation)
        if formation.awaiting:
            return
        if formation.errors:
            self._fail(formation)
        elif formation.stage is Stage.FORMING:
            formation.stage = Stage.STARTING
            formation.awaiting = set(formation.unit.engines)
            formation.deadline = self._clock() + START_SECONDS
            self._units.start(formation.unit)
            for engine in formation.unit.engines:
                start = m.StartGroup(formation.epoch, formation.unit)
                self._transport.to_engine(engine, start)
        else:
            self._end()
            self._engines.form(formation.unit, formation.members)
            took = self._clock() - formation.began
            log.warning("unit %s is formed again after %.1f s", list(formation.unit.engines), took)
            self._greet(formation.unit.leader)

    def _end(self) -> None:
        self._formation = None
        self._units.start(None)

    def _fail(self, formation: Formation) -> None:
        self._end()
        group, reason = formation.unit, "; ".join(formation.errors)
        failures = self._failures.setdefault(group, Failures(formation.members))
        failures.retry_at = self._clock() + RETRY_SECONDS * 2**failures.count
        failures.count += 1
        log.error("unit %s cannot be formed again: %s", list(group.engines), reason)
        if failures.count == ATTEMPTS:
            self._engines.refuse(group, reason)
            self._give_up()

    def _watch(self) -> None:
        """Act on members that have died, or have not answered in time."""
        formation = self._formation
        if formation is None:
            return
        if formation.deadline <= self._clock():
            late = sorted(formation.awaiting)
            lost = late if formation.stage is Stage.FORMING else list(formation.unit.engines)
            unit = list(formation.unit.engines)
            self._lose(lost, f"engines {late} did not answer as unit {unit} was formed again")
        self._go_on(formation)

    def _note_lost(self, formation: Formation) -> None:
        """Expect nothing of members that have died. One that had answered is missing as well."""
        lost = {
            engine
            for engine, began_as in zip(formation.unit.engines, formation.members, strict=True)
            if self._engines[engine].is_gone or self._engines[engine].incarnation != began_as
        }
        if new := sorted(lost - formation.lost):
            formation.lost |= lost
            formation.awaiting -= lost
            formation.errors.append(f"engines {new} are lost")
