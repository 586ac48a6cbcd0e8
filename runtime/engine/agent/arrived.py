"""Requests that have come to an engine, until it has adopted them and read their KV."""

import msgspec

from shoal.runtime.protocol import messages as m


class Portion(msgspec.Struct):
    """Requests that a core has adopted together, and whose KV is read by one copy."""

    carry: int
    carried: list[str] = []
    recomputed: dict[str, m.Fallback] = {}


class Arrivals(msgspec.Struct):
    """Requests of one carry that a core has not adopted yet."""

    message: m.Import
    waiting: list[m.CarriedRequest]
    """First those that have their blocks already, then those that have least to read."""
    deadline: float
    """When the rest is computed again if nothing changes."""
    sharers: list[int]
    """The carries whose requests take turns: this one, and others to the same unit."""
    served: set[str] = set()
    """Those of them that have their blocks already."""
    tried: int = -1
    """Free blocks with which there was no room for the first."""
    gives_up: int = 1
    """How many are computed again the next time that nothing changes for long.

    At first one: where the engines of a group are full and go on alone, it is all that the others
    need. Where that is of no use, a number that doubles keeps nobody waiting for long.
    """

    @property
    def begins_served(self) -> bool:
        """Whether the next one has its blocks."""
        return bool(self.waiting) and self.waiting[0].request_id in self.served

    @property
    def are_served(self) -> bool:
        """Whether all of them have their blocks."""
        return self.served.issuperset([request.request_id for request in self.waiting])
