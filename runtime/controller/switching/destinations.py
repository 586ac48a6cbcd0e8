"""Which unit each request is carried to."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from shoal.policies.unit_costs import UnitCosts
from shoal.policies.values.layouts import Unit, alone
from shoal.policies.values.plan import Room
from shoal.policies.values.snapshot import NORMAL_PRIORITY
from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.capacity import Capacity
from shoal.runtime.controller.books.core_book import CoreBook
from shoal.runtime.controller.books.engine_book import EngineBook
from shoal.runtime.controller.books.request import Request


class Destinations:
    """Units to which requests may be carried, and what they have been chosen for so far.

    Args:
        books: engines and requests.
        capacity: what each unit holds.
        units: the units to choose from.
        apart: the one that urgent requests have to themselves (``policies/lane.py``).
    """

    def __init__(
        self, books: Books, capacity: Capacity, units: Iterable[Unit], apart: Unit | None = None
    ) -> None:
        self._engines = books.engines
        self._apart = apart
        self._capacity = capacity
        self._cores = books.requests.core
        self._rooms = {
            unit: Room(capacity.unit_state(unit, serving=True, paused=0)) for unit in units
        }
        self._cached = Counter[Unit]()
        """Tokens that each unit gets of requests that have ended."""
        latest = capacity.latest
        self._cost = None if latest is None else UnitCosts(latest)

    def divide(self, source: Unit, requests: Iterable[Request]) -> dict[Unit | None, list[Request]]:
        """Return the requests of a unit by the unit that each goes to; None: no unit can take it.

        Urgent requests go to the unit that they have to themselves, and others elsewhere, wherever
        that is possible. Units that share an engine with the source come first, because much of the
        KV then stays on its device. Of these a request that has begun goes to the one with the
        fewest tokens for each engine. One whose prompt still waits has nothing to take along, so it
        goes where it costs least and its first token does not come too late, as a new one does:
        short prompts then need not wait for all the long ones.
        """
        waiting = {request.id for request in self._cores(source).uncounted.requests}
        divided: defaultdict[Unit | None, list[Request]] = defaultdict(list)
        begun, new = list[Request](), list[Request]()
        for request in requests:
            (new if request.id in waiting and self._cost else begun).append(request)
        for request in sorted(begun, key=lambda each: -each.seen.prompt_tokens):
            unit = self._choose(source, request, self._tokens)
            divided[unit].append(request)
            if unit is not None:
                self._rooms[unit].join(request.seen)
        for request in sorted(new, key=lambda each: each.seen.arrival):
            unit = self._choose(source, request, partial(self._prices, request))
            divided[unit].append(request)
            if unit is not None:
                self._rooms[unit].take(request.seen)
        return divided

    def spread(self, source: Unit, ended: Iterable[Request]) -> dict[Unit, list[Request]]:
        """Return requests that have ended on a unit, by the unit that gets what is cached of them.

        It is one that shares an engine with the source, and has got the fewest tokens so far.
        """
        spread: defaultdict[Unit, list[Request]] = defaultdict(list)
        near = [u for u in self._rooms if u != source and set(u.engines) & set(source.engines)]
        near = [unit for unit in near if self._engines.takes(unit)]
        for request in ended if near else ():
            unit = min(near, key=lambda one: (self._cached[one] / one.size, one))
            self._cached[unit] += request.seen.prompt_tokens
            spread[unit].append(request)
        return spread

    def _tokens(self, units: Iterable[Unit]) -> dict[Unit, float]:
        rooms = {unit: self._rooms[unit] for unit in units}
        return {
            unit: (room.unit.context_tokens + room.context) / unit.size
            for unit, room in rooms.items()
        }

    def _prices(self, request: Request, units: Iterable[Unit]) -> dict[Unit, tuple[bool, float]]:
        assert self._cost is not None
        return self._cost.ranks(request.seen, [self._rooms[unit] for unit in units])

    def _choose(
        self, source: Unit, request: Request, rank: Callable[[Iterable[Unit]], Mapping[Unit, Any]]
    ) -> Unit | None:
        able = [
            unit
            for unit in self._rooms
            if unit != source
            and self._engines.takes(unit)
            and self._capacity.can_hold(unit, request.seen)
        ]
        is_urgent = request.seen.priority < NORMAL_PRIORITY
        able = [unit for unit in able if (unit == self._apart) == is_urgent] or able
        near = [unit for unit in able if not set(unit.engines).isdisjoint(source.engines)]
        ranks = rank(near or able)
        return min(ranks, key=lambda unit: (ranks[unit], unit), default=None)


def reachable(cores: Iterable[CoreBook], engines: EngineBook) -> Iterator[CoreBook]:
    """Yield the cores that have requests and whose engines can answer."""
    for core in cores:
        is_whole = engines.gone.isdisjoint(core.unit.engines)
        if core.requests and is_whole and engines.serves(alone(core.unit.leader)):
            yield core


def is_led_alike(source: Unit, destination: Unit) -> bool:
    """Return whether one engine leads both units of a carry.

    It is busy with all of its exports before it can take in anything, while other engines wait. So
    what goes to these is exported first.
    """
    return source.leader == destination.leader
