"""Draining: engines that an operator takes out are emptied, and serve no more until resumed.

Nothing starts on a drained engine (``EngineBook.takes``). As soon as no other operation is running,
its groups are released, and its requests are carried to other units. A group with a request that
only it can hold stays until that request has ended; no policy regroups the node until then.
"""

import logging
import math
from collections.abc import Iterable, Sequence

from shoal.policies.values.layouts import Unit, alone
from shoal.policies.values.partition import Partition
from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.capacity import Capacity
from shoal.runtime.controller.books.core_book import CoreBook
from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.controller.books.statistics import DRAIN
from shoal.runtime.controller.switches import Switches
from shoal.runtime.controller.switching.carries import Carries

log = logging.getLogger("shoal.controller")

RETRY_SECONDS = 1.0
"""Pause before requests are looked at again that could not leave a drained engine."""


class Drains:
    """Empties drained engines.

    Args:
        env: the time.
        books: engines, units and requests.
        capacity: what each unit holds.
        carries: lets requests go on in other units.
        switches: releases groups.
    """

    def __init__(
        self,
        env: Environment,
        books: Books,
        capacity: Capacity,
        carries: Carries,
        switches: Switches,
    ) -> None:
        self._clock = env.clock
        self._engines = books.engines
        self._units = books.units
        self._requests = books.requests
        self._capacity = capacity
        self._carries = carries
        self._switches = switches
        self._next_at = -math.inf
        """When the drained engines are looked at again."""

    def set(self, engines: Sequence[int], *, drained: bool) -> tuple[int, str]:
        """Take engines out, or let them serve again.

        Returns:
            The HTTP status and the reason if that cannot be; otherwise 200 and no reason.
        """
        unknown = sorted({engine for engine in engines if engine >= len(self._engines)})
        if unknown:
            return 400, f"there are no engines {unknown}: this node has 0..{len(self._engines) - 1}"
        if drained and not self._engines.open.difference(engines):
            return 409, f"no engine would serve without engines {sorted(set(engines))}"
        self._engines.drain(engines, drained=drained)
        self._next_at = -math.inf
        log.info("engines %s are %s", sorted(set(engines)), "drained" if drained else "resumed")
        return 200, ""

    @property
    def groups(self) -> list[Unit]:
        """The bound groups that contain drained engines."""
        return [unit for unit in self._units.bound if self._concerns(unit)]

    @property
    def deadline(self) -> float | None:
        """When something is due even if no message comes, while no operation is running."""
        return self._next_at if self._engines.drained and (self.groups or self._cores) else None

    def tick(self) -> None:
        """Begin what empties drained engines. No operation may be running."""
        now = self._clock()
        if not self._engines.drained or now < self._next_at:
            return
        released = [group for group in self.groups if self._can_leave(group)]
        if released and not self._switches.is_held:
            self._switches.start_for_drain(self._without(released))
            return
        self._next_at = now + RETRY_SECONDS
        self._carries.begin(self._cores, self._units.partition, DRAIN)

    def _concerns(self, unit: Unit) -> bool:
        return not self._engines.drained.isdisjoint(unit.engines)

    @property
    def _cores(self) -> list[CoreBook]:
        """The cores on drained engines that have requests, whether their units are bound or not."""
        cores = self._requests.cores.values()
        return [core for core in cores if core.requests and self._concerns(core.unit)]

    def _can_leave(self, group: Unit) -> bool:
        """Return whether all requests of a group can go on when the group is no more."""
        units = [unit for unit in self._without(self.groups) if self._engines.takes(unit)]
        requests = self._requests.core(group).requests.values()
        return all(any(self._capacity.can_hold(u, r.seen) for u in units) for r in requests)

    def _without(self, groups: Iterable[Unit]) -> Partition:
        """Return the partition in which the engines of these groups are alone."""
        partition, gone = self._units.partition, set(groups)
        rest = [unit for unit in partition if unit not in gone]
        return tuple(sorted([*rest, *(alone(engine) for g in gone for engine in g.engines)]))
