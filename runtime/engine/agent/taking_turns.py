"""Carries to one core whose requests take turns, because the core may lack blocks for all of them.

A group takes blocks of all its members at once. So where blocks are short, the next request comes
from the engines that hold most. Otherwise the first source would have free blocks, and the others,
which have none, would keep the group from using them.
"""

from collections.abc import Mapping

from shoal.runtime.engine.agent.arrived import Arrivals
from shoal.runtime.engine.agent.interface import Core, EngineBackend
from shoal.runtime.protocol import messages as m


class TakingTurns:
    """Says whose requests a core adopts next.

    Args:
        backend: the engine.
        arrivals: the requests that have come, by carry; it changes.
    """

    def __init__(self, backend: EngineBackend, arrivals: Mapping[int, Arrivals]) -> None:
        self._backend = backend
        self._arrivals = arrivals

    def sharers(self, arrivals: Arrivals) -> list[Arrivals]:
        """Return all arrivals that take turns with some, and these."""
        return [self._arrivals[number] for number in arrivals.sharers if number in self._arrivals]

    def blocks(self, core: Core, request: m.CarriedRequest) -> int:
        """Return how many blocks a request takes that finds nothing of it in the prefix cache."""
        layout = core.unit.layout
        (limits,) = (of for of in self._backend.layouts if of.layout == layout)
        return limits.blocks(request.length + 1)

    def share(self, core: Core, arrivals: Arrivals) -> int:
        """Return for how many requests of a carry there is room now, or may be.

        The next request is always one of the source that then has the most blocks on each of its
        engines.
        """
        sharers = self.sharers(arrivals)
        if len(sharers) == 1:
            return len(arrivals.waiting)
        turns = list[tuple[float, int, bool]]()
        for sharer in sharers:
            left = 0.0
            for request in reversed(sharer.waiting):
                has_none = request.computed and request.request_id not in sharer.served
                blocks = self.blocks(core, request) if has_none else 0
                left += blocks / sharer.message.source.size
                turns.append((left, blocks, sharer is arrivals))
        free, share = core.load.free_blocks, 0
        for turn, (_, blocks, is_own) in enumerate(sorted(turns, reverse=True)):
            free -= blocks
            # The first is tried in any case: it may find some of its blocks in the prefix cache.
            if free < 0 and turn:
                break
            share += is_own
        return share
