"""The operations that a node runs one at a time.

They are a switch, a carry, an audit, forming a group, or a change of memory.

Each needs the engines to itself: a group is neither bound nor audited while its members form it. So
an operation begins only when no other is running, and callers wait for their turn. An engine's
death may concern any of the operations, so each is told of it.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence

from shoal.policies.values.level import Level
from shoal.runtime.controller.books.audit import Audit
from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.capacity import Capacity
from shoal.runtime.controller.books.engine_book import EngineState
from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.controller.drains import Drains
from shoal.runtime.controller.failures.losses import Losses
from shoal.runtime.controller.failures.rejoin import Rejoin
from shoal.runtime.controller.memory_changes import MemoryChanges
from shoal.runtime.controller.switches import Switches
from shoal.runtime.controller.switching.carries import Carries
from shoal.runtime.protocol import messages as m


class Operations:
    """Starts every operation in its turn, and runs the audits.

    Attributes:
        drains: empties the engines that an operator has taken out.

    Args:
        env: the node, the way to its engines, and the time.
        books: engines, units and leases.
        capacity: how much new groups are lent.
        carries: lets requests go on in other units; a switch has carries of its own.
        losses: removes dead engines, and what depends on them, from the books.
        greet: tells an engine what engines must know about the node.
        give_up: ends the requests that the node can no longer hold.
        share_followers: called with every new level of memory of the node.
    """

    def __init__(
        self,
        env: Environment,
        books: Books,
        capacity: Capacity,
        carries: Carries,
        losses: Losses,
        *,
        greet: Callable[[int], None],
        give_up: Callable[[], None],
        share_followers: Sequence[Callable[[Level], None]],
    ) -> None:
        self.switches = Switches(env, books, capacity, carries, lose=self.lose)
        self.memory = MemoryChanges(
            env, books, capacity, lose=self.lose, give_up=give_up, followers=share_followers
        )
        self.rejoin = Rejoin(env, books, lose=self.lose, greet=self._greet, give_up=give_up)
        self._greet_by = greet
        self.drains = Drains(env, books, capacity, carries, self.switches)
        self._env = env
        self._books = books
        self._carries = carries
        self._losses = losses
        self._audit: Audit | None = None
        self._waiting: deque[Callable[[], None]] = deque()
        """Operations that callers asked for. Each begins when no other operation is running."""

    # --- one at a time ------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no operation is running, so that one can begin."""
        return not (self._is_regrouping or self._is_auditing or self.rejoin.engines)

    @property
    def _is_auditing(self) -> bool:
        """Whether an operation is running that leaves all units as they are."""
        return self._audit is not None or self.memory.running

    def _greet(self, engine: int) -> None:
        self.memory.greet(engine)
        self._greet_by(engine)

    @property
    def _is_regrouping(self) -> bool:
        return self.switches.running is not None or self._carries.unsettled

    @property
    def can_switch(self) -> bool:
        """Whether a switch that no operator asked for can begin, apart from its budget."""
        return self.is_idle and not self.switches.is_held and not self.drains.groups

    @property
    def can_move(self) -> bool:
        """Whether requests may go to other units, as others may be doing, and nobody waits."""
        regroups = self.switches.running is not None or self._carries.copies_ahead
        others = self._is_auditing or self.rejoin.engines or self._waiting or self.drains.groups
        return not (regroups or others)

    @property
    def busy(self) -> frozenset[int]:
        """Engines that a switch regroups, and get no new requests yet, or that form a group."""
        return self.rejoin.engines | self.switches.busy

    @property
    def deadline(self) -> float | None:
        """When something is due even if no message comes."""
        audit = None if self._audit is None else self._audit.deadline
        due = [self.switches.deadline, self._carries.deadline, self.rejoin.deadline, audit]
        if self.is_idle:
            due.append(self.drains.deadline)
        if self.is_idle or self.memory.running:
            due.append(self.memory.deadline)
        return min((at for at in due if at is not None), default=None)

    def when_idle(self, begin: Callable[[], None]) -> None:
        """Begin an operation that a caller asked for: now if possible, otherwise in its turn."""
        if self.is_idle:
            begin()
        else:
            self._waiting.append(begin)

    def tick(self) -> None:
        """Do what is due, end finished operations, and begin those that waited for them."""
        for unit, reason in self._carries.tick():
            self.lose(unit.engines, reason)
        self.switches.tick()
        self._end_audit()
        self.memory.tick()
        self.rejoin.tick(may_begin=not (self._is_regrouping or self._is_auditing))
        while self._waiting and self.is_idle:
            self._waiting.popleft()()
        if self.is_idle:
            self.drains.tick()
        if self.is_idle:
            self.memory.tick_idle()

    def lose(
        self, engines: Collection[int], reason: str, cause: m.DeathCause = m.DeathCause.GROUP
    ) -> None:
        """Go on without engines that died, and without those that died with them.

        Args:
            engines: the engines that died; those known to be dead are skipped.
            reason: why they died, for people.
            cause: why they died, for metrics.
        """
        gone = self._losses.lose(engines, reason, cause, self.switches.running)
        self.memory.lost(gone)
        if self._audit is not None:
            self._audit.lose(gone)

    # --- audits -------------------------------------------------------------------------------

    def start_audit(self, peer: str, call: int) -> None:
        """Ask every serving engine for its books. No other operation may be running.

        Args:
            peer: the caller, who gets the answer.
            call: number of the caller's call.
        """
        deadline = self._env.clock() + self._env.config.prepare_timeout_seconds
        self._audit = Audit(call, peer, deadline)
        leases = self._books.leases
        leases.follow(self._audit)
        for engine in sorted(self._books.engines.in_state(EngineState.SERVING)):
            led = {g: n for g, n in leases.opened.items() if g.leader == engine}
            self._audit.ask(engine, leases.blocks_of(engine), led)
            self._env.transport.to_engine(engine, m.CheckIntegrity(call))

    def audited(self, answer: m.Integrity) -> None:
        """Take an engine's answer to the audit, if one is running."""
        if self._audit is not None:
            self._audit.answer(answer)

    def _end_audit(self) -> None:
        audit = self._audit
        if audit is None:
            return
        if audit.deadline <= self._env.clock():
            audit.time_out()
        if audit.done:
            self._audit = None
            self._books.leases.follow(None)
            answer = m.AuditDone(audit.call, self._books.check_integrity() + audit.problems)
            self._env.transport.to_control(audit.peer, answer)
