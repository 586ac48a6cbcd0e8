"""Which unit each request is carried to."""

from collections import defaultdict
from collections.abc import Iterable

from shoal.policies.values.layouts import Unit
from shoal.policies.values.snapshot import NORMAL_PRIORITY
from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.capacity import Capacity
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
        self._tokens = {unit: books.requests.core(unit).figures.prompt_tokens for unit in units}

    def divide(self, source: Unit, requests: Iterable[Request]) -> dict[Unit | None, list[Request]]:
        """Return the requests of a unit by the unit that each goes to; None: no unit can take it.

        Urgent requests go to the unit that they have to themselves, and others elsewhere, wherever
        that is possible. Units that share an engine with the source come first, because much of the
        KV then stays on its device. Of these the one with the fewest tokens for each engine is
        taken.
        """
        divided: defaultdict[Unit | None, list[Request]] = defaultdict(list)
        for request in sorted(requests, key=lambda each: -each.seen.prompt_tokens):
            unit = self._choose(source, request)
            divided[unit].append(request)
            if unit is not None:
                self._tokens[unit] += request.seen.prompt_tokens
        return divided

    def _choose(self, source: Unit, request: Request) -> Unit | None:
        able = [
            unit
            for unit in self._tokens
            if unit != source
            and self._engines.takes(unit)
            and self._capacity.can_hold(unit, request.seen)
        ]
        is_urgent = request.seen.priority < NORMAL_PRIORITY
        able = [unit for unit in able if (unit == self._apart) == is_urgent] or able
        near = [unit for unit in able if not set(unit.engines).isdisjoint(source.engines)]
        return min(
            near or able, key=lambda unit: (self._tokens[unit] / unit.size, unit), default=None
        )


def is_led_alike(source: Unit, destination: Unit) -> bool:
    """Return whether one engine leads both units of a carry.

    It is busy with all of its exports before it can take in anything, while other engines wait. So
    what goes to these is exported first.
    """
    return source.leader == destination.leader
