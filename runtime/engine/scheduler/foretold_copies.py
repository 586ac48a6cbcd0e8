"""What is read of requests that come is told to runners before the requests stop.

As soon as all requests of a carry have their blocks, it is known which blocks are read into which.
Runners are told so (``Foresee``), and find out by then which tokens each of them reads from which
engine. If just these requests come, and nothing about them has changed, ``Carry`` only says so.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.policies.values.layouts import Unit
from shoal.runtime.engine.link import instructions
from shoal.runtime.engine.link.executor import UnitChannel
from shoal.runtime.engine.scheduler.arrival_messages import arrival_of_v2
from shoal.runtime.engine.scheduler.carried_blocks import CarriedBlocks, Filling

_NO_ARRIVAL: "tuple[None, None]" = (None, None)


@dataclass(slots=True)
class _Told:
    """What runners were told last of requests that come from a unit."""

    number: int
    arrivals: dict[str, tuple[Filling, instructions.Arrival]]


class ForetoldCopies:
    """Tells the runners of one core what they are to read.

    Args:
        scheduler: vLLM's, of the core. V1 model runners learn more by ``Carry`` than what is read,
            so they are told nothing before.
        blocks: knows what is read.
        channel: the queues to the members' runners.
    """

    def __init__(self, scheduler: Any, blocks: CarriedBlocks, channel: UnitChannel) -> None:
        self._scheduler, self._blocks, self._channel = scheduler, blocks, channel
        self._told: dict[Unit, _Told] = {}
        self._last = 0

    def tell(self, source: Unit, request_ids: Iterable[str]) -> None:
        """Tell what will be read of all requests of a carry, which have got their blocks."""
        found = {name: self._blocks.filling_of(name) for name in request_ids}
        fillings = {name: filling for name, filling in found.items() if filling is not None}
        if not self._scheduler.use_v2_model_runner or len(fillings) < len(found) or not found:
            return
        self._last += 1
        arrivals = {name: (each, arrival_of_v2(name, each)) for name, each in fillings.items()}
        self._told[source] = _Told(self._last, arrivals)
        told = [arrival for _, arrival in arrivals.values()]
        self._channel.send(instructions.Foresee(self._last, source, told))

    def arrival(self, source: Unit, request_id: str, filling: Filling) -> instructions.Arrival:
        """Return what runners are to know of a request that comes, the same if it was told."""
        told = self._told.get(source)
        known, arrival = told.arrivals.get(request_id, _NO_ARRIVAL) if told else _NO_ARRIVAL
        if known is filling and arrival is not None:
            return arrival
        return arrival_of_v2(request_id, filling)

    def carry(
        self, seq: int, source: Unit, arrivals: Sequence[instructions.Arrival]
    ) -> instructions.Carry:
        """Return the instruction to read what comes from a unit: all that was told, or its own."""
        told = self._told.get(source)
        if told is None or len(told.arrivals) != len(arrivals):
            return instructions.Carry(seq, source, list(arrivals))
        for arrival in arrivals:
            if told.arrivals.get(arrival.request_id, _NO_ARRIVAL)[1] is not arrival:
                return instructions.Carry(seq, source, list(arrivals))
        return instructions.Carry(seq, source, [], told.number)
