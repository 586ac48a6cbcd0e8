"""What is lost with a dead engine: other engines, their units, and blocks that were lent."""

import logging
from collections.abc import Collection

from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.engine_book import EngineState
from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.controller.failures.migration import Migration
from shoal.runtime.controller.switching.carries import Carries
from shoal.runtime.controller.switching.switch import Switch
from shoal.runtime.protocol.messages import DeathCause, KillEngines
from shoal.runtime.protocol.transport import SUPERVISOR

log = logging.getLogger("shoal.controller")


class Losses:
    """Removes dead engines from the books.

    Args:
        env: the transport to the supervisor.
        books: engines, units and leases; deaths are counted.
        migration: moves the requests of dead engines to other engines.
        carries: lets requests go on in other units.
    """

    def __init__(
        self, env: Environment, books: Books, migration: Migration, carries: Carries
    ) -> None:
        self._transport = env.transport
        self._engines = books.engines
        self._units = books.units
        self._leases = books.leases
        self._statistics = books.statistics
        self._migration = migration
        self._carries = carries

    def lose(
        self, engines: Collection[int], reason: str, cause: DeathCause, switch: Switch | None
    ) -> frozenset[int]:
        """Go on without engines that died, and without those that died with them.

        Args:
            engines: the engines that died; those known to be dead are skipped.
            reason: why they died, for people.
            cause: why they died, for metrics.
            switch: the switch in progress.

        Returns:
            All engines that this makes dead.
        """
        tied = {tied for engine in engines for tied in self._tied(engine, switch)}
        gone = frozenset(tied - self._engines.in_state(EngineState.DEAD))
        if not gone:
            return gone
        log.error("engines %s are lost: %s", sorted(gone), reason)
        # What ran there must be read before the partition changes.
        # If a signal stopped a process, no request that it computed is to blame.
        blamed = set() if cause is DeathCause.STOPPED else self._migration.computed(gone)
        self._engines.die(gone, reason)
        for number in gone:
            self._statistics.died(cause if number in engines else DeathCause.GROUP)
        for group in [group for group in self._units.bound if gone.intersection(group.engines)]:
            if switch is None or not switch.is_released(group):
                self._units.release(group)
        if switch is not None:
            # This is first because members of an aborted bind take back their blocks by themselves.
            switch.lost(gone, f"engines {sorted(gone)} are lost: {reason}")
        self._leases.lose(gone)
        self._migration.interrupt(gone, blamed, self._carries.lost(gone))
        known = {number: self._engines[number].incarnation for number in sorted(gone)}
        self._transport.to_control(SUPERVISOR, KillEngines(known, reason))
        return gone

    def _tied(self, engine: int, switch: Switch | None) -> frozenset[int]:
        """Return the engines that cannot go on without this one."""
        starting = self._units.starting
        if starting is not None and engine in starting.engines:
            return frozenset(starting.engines)
        unit = self._units.unit_of(engine)
        if unit in self._units.bound and (switch is None or not switch.is_released(unit)):
            return frozenset(unit.engines)
        return frozenset({engine}) if switch is None else switch.tied(engine)
