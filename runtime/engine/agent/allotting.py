"""Requests that get their blocks in this engine while their last steps run in another unit.

Most of what a destination does for a request needs only its blocks and all but its last tokens. So
it is done while the request does not stand still yet.
"""

from collections.abc import Collection, Iterable

import msgspec

from shoal.policies.values.layouts import Unit
from shoal.runtime.clock import Clock
from shoal.runtime.engine.agent.binding import Binding
from shoal.runtime.engine.agent.interface import EngineBackend
from shoal.runtime.protocol import messages as m

ALLOT_SECONDS = 0.002
"""For how long requests get blocks in one turn, so that what ends meanwhile is not collected late.
A turn takes a slow host another millisecond."""


class Allotment(msgspec.Struct):
    """Requests of one carry whose last steps are still in flight."""

    unit: Unit
    source: Unit
    announced: dict[str, m.CarriedRequest]
    waiting: list[m.CarriedRequest]
    """Those not tried yet; those that have least to read last."""
    served: set[str] = set()
    """Those that have their blocks."""


class Allotting:
    """Gives requests blocks before they come, a few of them in each turn.

    Args:
        backend: the engine.
        binding: knows which cores serve.
        clock: seconds.
    """

    def __init__(self, backend: EngineBackend, binding: Binding, clock: Clock) -> None:
        self._backend, self._binding, self._clock = backend, binding, clock
        self._allotments: dict[int, Allotment] = {}
        """By carry, until ``Import`` comes."""

    @property
    def is_under_way(self) -> bool:
        """Whether requests are about to come whose last steps are in flight."""
        return bool(self._allotments)

    def begin(self, message: m.Allot) -> None:
        """Take note of requests that are to get blocks."""
        announced = {request.request_id: request for request in message.requests}
        waiting = sorted(message.requests, key=lambda request: request.computed, reverse=True)
        self._allotments[message.carry] = Allotment(
            message.unit, message.source, announced, waiting
        )

    def end(self, message: m.Import) -> Allotment:
        """Return what became of the requests of a carry, which have come."""
        return self._allotments.pop(message.carry, Allotment(message.unit, message.source, {}, []))

    def go_on(self, crowded: Collection[Unit]) -> None:
        """Give more requests their blocks.

        Args:
            crowded: units in which requests that have come wait for room. They go first, because
                they stand still.
        """
        until = self._clock() + ALLOT_SECONDS
        for allotment in self._due(crowded):
            core = self._backend.cores[allotment.unit]
            while allotment.waiting and self._clock() < until:
                request = allotment.waiting.pop()
                if core.allot(request):
                    allotment.served.add(request.request_id)
            has_all = not allotment.waiting and allotment.served == allotment.announced.keys()
            core.tell_allotted([(allotment.source, [*allotment.announced])] if has_all else [])

    def serve_now(
        self, message: m.Import, requests: Iterable[m.CarriedRequest], crowded: Collection[Unit]
    ) -> set[str]:
        """Give requests that have come already their blocks; return those that have got them.

        It takes no longer than when they are adopted, and then their first step can be sent ahead.
        Those that share the room with others, or wait for it, are left alone.
        """
        if message.more or message.unit not in self._units(crowded):
            return set()
        core = self._backend.cores[message.unit]
        served = {request.request_id for request in requests if core.allot(request)}
        core.tell_allotted()
        return served

    def is_due(self, crowded: Collection[Unit]) -> bool:
        """Return whether there is more to do in the next turn."""
        return bool(self._due(crowded))

    def _due(self, crowded: Collection[Unit]) -> list[Allotment]:
        units = self._units(crowded)
        return [each for each in self._allotments.values() if each.waiting and each.unit in units]

    def _units(self, crowded: Collection[Unit]) -> set[Unit]:
        return {core.unit for core in self._binding.serving}.difference(crowded)
