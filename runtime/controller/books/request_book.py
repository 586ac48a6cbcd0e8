"""The book of requests: where every request is that has come and not left.

A request waits in the task pool, is on a unit's core, or is interrupted because its engine died.
"""

from collections import Counter
from collections.abc import Mapping

import msgspec

from shoal.policies.values.layouts import Unit
from shoal.runtime.controller.books.core_book import CoreBook
from shoal.runtime.controller.books.ended_requests import EndedRequests
from shoal.runtime.controller.books.held_bytes import Finished
from shoal.runtime.controller.books.pool import TaskPool
from shoal.runtime.controller.books.prefix_book import PrefixBook
from shoal.runtime.controller.books.request import Request
from shoal.runtime.controller.books.unit_book import UnitBook
from shoal.runtime.protocol import messages as m


class RequestBook:
    """All requests of one node.

    Args:
        units: the book of units.
        pool: the task pool.
        prefixes: is told what units compute.

    Attributes:
        held: the bytes of all requests that have come and not left.
        finished: requests that have left, but may have to begin again.
        ended: requests that have left, whose prompts are still cached.
    """

    def __init__(self, units: UnitBook, pool: TaskPool, prefixes: PrefixBook) -> None:
        self.ended = EndedRequests(prefixes)
        self.pool = pool
        self.held = pool.held
        self.finished = Finished()
        self._units = units
        self._prefixes = prefixes
        self._cores: dict[Unit, CoreBook] = {}
        self._where: dict[str, Unit] = {}
        self._interrupted: dict[str, Request] = {}
        self._closed = False
        self.cores: Mapping[Unit, CoreBook] = self._cores
        """Cores by unit, bound now or not, since their first request, report or look-up."""
        self.interrupted: Mapping[str, Request] = self._interrupted
        """Requests whose engines died, until their front ends say how far they have come."""

    @property
    def closed(self) -> bool:
        """Whether the node has been told to end, so that it takes no requests."""
        return self._closed

    def close(self) -> None:
        """Note that the node has been told to end."""
        self._closed = True

    def __contains__(self, request_id: str) -> bool:
        elsewhere = request_id in self._interrupted or request_id in self.pool
        return elsewhere or request_id in self._where

    # --- on units -----------------------------------------------------------------------------

    def core(self, unit: Unit) -> CoreBook:
        """Return the book of a unit's core."""
        core = self._cores.get(unit)
        if core is None:
            core = self._cores[unit] = CoreBook(unit)
        return core

    def place(self, request: Request, unit: Unit, patience: float = 0.0) -> int:
        """Note that a request was sent to a unit; return how many tokens are cached there."""
        self.held.count(request, 1)
        self.core(unit).put(request, patience=patience)
        self._where[request.id] = unit
        return self._prefixes.place(request.prompt, request.seen.prompt_tokens, unit)

    def carry(self, request: Request, unit: Unit) -> None:
        """Note that a request, which was on another unit, is being carried to this one."""
        generated = self.generated(request.id)
        self.remove(request.id)
        self.held.count(request, 1)
        self.core(unit).put(request, carried=True, generated=generated)
        self._where[request.id] = unit
        if not unit.tier:
            self._prefixes.use(request.prompt, unit)

    def generated(self, request_id: str) -> int:
        """Return how many tokens a request has got on its unit; 0 if it is on none."""
        unit = self._where.get(request_id)
        return 0 if unit is None else self._cores[unit].generated(request_id)

    def where(self, request_id: str) -> Unit | None:
        """Return the unit that a request was sent to."""
        return self._where.get(request_id)

    def find(self, request_id: str) -> Request | None:
        """Return a request that was sent to a unit; None if it is on no unit."""
        unit = self._where.get(request_id)
        return None if unit is None else self._cores[unit].requests[request_id]

    def remove(self, request_id: str, *, led_by: int | None = None) -> Request | None:
        """Forget a request that was sent to a unit, and return it; None if it is on no unit.

        Args:
            request_id: the request.
            led_by: forget it only if this engine leads its unit. The request may have been started
                again elsewhere since the engine sent its message about it.
        """
        unit = self._where.get(request_id)
        if unit is None or led_by not in (None, unit.leader):
            return None
        del self._where[request_id]
        return self._take(self._cores[unit], request_id)

    def _take(self, core: CoreBook, request_id: str) -> Request:
        request = core.take(request_id)
        self.held.count(request, -1)
        return request

    def remove_all(self, unit: Unit) -> list[Request]:
        """Forget the requests of a core, and return them."""
        core = self.core(unit)
        for request_id in core.requests:
            del self._where[request_id]
        return [self._take(core, request_id) for request_id in list(core.requests)]

    def report(self, load: m.Load) -> list[Request]:
        """Note a core's report; return the requests that have ended there."""
        self.core(load.unit).report(load)
        removed = (self.remove(request_id, led_by=load.engine) for request_id in load.finished)
        ended = [request for request in removed if request is not None]
        for request in ended:
            self._prefixes.use(request.prompt, load.unit)
            self.ended.put(request, load.unit)
        return ended

    def forget_cores(self, leader: int) -> None:
        """Forget the cores of an engine that is restarted."""
        for unit in [unit for unit in self._cores if unit.leader == leader]:
            del self._cores[unit]

    @property
    def paused(self) -> Counter[Unit]:
        """Number of requests whose unit is not bound, by the unit in which its leader is now."""
        paused: Counter[Unit] = Counter()
        for core in self._cores.values():
            if core.requests and not self._units.has(core.unit):
                paused[self._units.unit_of(core.unit.leader)] += len(core.requests)
        return paused

    @property
    def parked(self) -> list[CoreBook]:
        """The tiers that have requests."""
        return [core for core in self._cores.values() if core.unit.tier and core.requests]

    # --- suspects, and those whose engine died ------------------------------------------------

    def may_start(self, request: Request, unit: Unit) -> bool:
        """Return whether a request may be sent to a unit now: suspects go one at a time."""
        others = self.core(unit).requests.values()
        return not request.suspect or not any(other.suspect for other in others)

    def absolve(self, request_id: str) -> None:
        """Note that a front end has an output of a request, so that it is no longer a suspect.

        Its unit may have given it back by then. If its unit has died, it stays a suspect like all
        that the unit computed, but it is not guilty: that is who dies before its first output.
        """
        unit, waiting = self._where.get(request_id), self.pool.get(request_id)
        interrupted = self._interrupted.get(request_id)
        if unit is not None:
            core = self._cores[unit]
            core.replace(msgspec.structs.replace(core.requests[request_id], suspect=False))
        elif waiting is not None:
            self.pool.replace(msgspec.structs.replace(waiting, suspect=False))
        elif interrupted is not None:
            self._interrupted[request_id] = msgspec.structs.replace(interrupted, guilty=False)

    def interrupt(self, request: Request) -> None:
        """Note that the engine of a request died, so that the request is on no unit."""
        self.held.count(request, 1)
        self._interrupted[request.id] = request

    def take_interrupted(self, request_id: str) -> Request | None:
        """Forget an interrupted request, and return it; None if none has this id."""
        request = self._interrupted.pop(request_id, None)
        if request is not None:
            self.held.count(request, -1)
        return request

    def take_all_interrupted(self) -> list[Request]:
        """Forget all interrupted requests, and return them."""
        names = list(self._interrupted)
        return [found for name in names if (found := self.take_interrupted(name)) is not None]

    def check_integrity(self) -> list[str]:
        """Return one line per broken invariant."""
        placed = {id_: core.unit for core in self._cores.values() for id_ in core.requests}
        if placed != self._where or placed.keys() & self._interrupted.keys():
            return ["controller: a request is in two units, or in none"]
        on_units = (request for core in self._cores.values() for request in core.requests.values())
        everywhere = (*self.pool.all(), *on_units, *self._interrupted.values())
        if self.held.total != sum(request.size for request in everywhere):
            return ["controller: the bytes of the requests are miscounted"]
        return []
