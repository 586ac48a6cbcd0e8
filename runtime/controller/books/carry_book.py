"""The book of running carries: which requests go from which unit to which other unit.

A request in a carry is in the book of requests at the source until ``Import`` is sent, and at the
destination from then on. So exactly one of the two units has it, whatever happens.
"""

import enum
import math
from collections.abc import Iterable, Iterator

import msgspec

from shoal.policies.values.layouts import Unit
from shoal.runtime.controller.books.request import Request
from shoal.runtime.protocol.messages import CarriedRequest, LayoutLimits


class CarryStage(enum.Enum):
    """How far a carry has come."""

    AHEAD = enum.auto()
    """The destination has been told what will come. The source goes on with the requests, while
    whole blocks are copied ahead (``precopy.py``)."""
    EXPORTING = enum.auto()
    """The source has been asked to stop computing the requests."""
    EXPORTED = enum.auto()
    """The source has described them; their destination is not there yet."""
    IMPORTING = enum.auto()
    """The destination has been asked to go on with them."""


class Carry(msgspec.Struct):
    """Requests that go from one unit to another."""

    number: int
    source: Unit
    destination: Unit
    ids: set[str]
    """Requests that neither unit has said to be settled."""
    deadline: float
    """Clock time at which the engine that is to answer is late."""
    since: float
    """Clock time at which the current stage began."""
    reason: str
    """Why the requests leave: one of ``statistics.DEPARTURES``."""
    ended: dict[str, Request] = {}
    """Requests that have ended, by new names: what is cached of them is copied ahead."""
    stage: CarryStage = CarryStage.AHEAD
    announced: dict[str, CarriedRequest] = {}
    """What the source has said that requests will be when their last steps have ended."""
    is_allotted: bool = False
    """Whether the destination knows this, and gives these requests their blocks."""
    fitting: set[str] = set()
    """Announced requests that the destination can hold if they are as was foretold."""
    exported: list[CarriedRequest] = []
    """What the source has said about the requests."""
    unread: set[str] = set()
    """Requests that were lost while their KV was read. They are no longer among ``ids``, but the
    source's living engines keep their blocks until the destination reads no more."""
    has_failed: bool = False
    """Whether the destination has said that it could not read the KV."""
    reserved: int = 0
    """Blocks of the destination to which the KV of ``ids`` is copied ahead, or was."""


class CarryBook:
    """All running carries."""

    def __init__(self) -> None:
        self._carries: dict[int, Carry] = {}
        self._last = 0
        self.parked_at: dict[Unit, float] = {}
        """When the last carry of each engine to its tier had ended."""

    def __len__(self) -> int:
        return len(self._carries)

    def __iter__(self) -> Iterator[Carry]:
        return iter(list(self._carries.values()))

    def get(self, number: int) -> Carry | None:
        """Return a carry; None if it is over."""
        return self._carries.get(number)

    def begin(
        self,
        source: Unit,
        destination: Unit,
        ids: set[str],
        reason: str,
        *,
        now: float,
        ended: Iterable[Request] = (),
    ) -> Carry:
        """Note a carry that begins; no engine has been asked for an answer."""
        self._last += 1
        named = {f"{request.id}-cached": request for request in ended}
        carry = Carry(self._last, source, destination, ids, math.inf, now, reason, named)
        self._carries[carry.number] = carry
        return carry

    @property
    def ids(self) -> set[str]:
        """The requests of all carries."""
        return set().union(*(carry.ids for carry in self._carries.values()))

    def end(self, carry: Carry, *, now: float) -> None:
        """Note that a carry is over."""
        del self._carries[carry.number]
        if carry.destination.tier:
            self.parked_at[carry.source] = now

    def pins_cached(self, source: Unit) -> bool:
        """Return whether blocks of a unit may be in use for what is cached of ended requests."""
        return any(carry.ended for carry in self._carries.values() if carry.source == source)

    def ended_blocks(self, unit: Unit, limits: LayoutLimits) -> int:
        """Return how many blocks of a unit requests take that have ended, when they are copied."""
        return sum(
            limits.blocks(request.seen.prompt_tokens)
            for carry in self._carries.values()
            if carry.destination == unit
            for request in carry.ended.values()
        )

    def take(self, request_id: str) -> Unit | None:
        """Take a request out of its carry because it ends.

        Returns:
            The other unit that has to forget the request now, besides the one at which the book of
            requests has it; None: there is none. While the destination reads the KV, the source
            keeps it, because blocks with other content must not be read: the source gets ``Drop``
            later.
        """
        for carry in self._carries.values():
            if request_id in carry.ids and carry.stage is not CarryStage.IMPORTING:
                carry.ids.discard(request_id)
                return carry.destination
        return None
