"""What a switch does with running requests: one row for each treatment.

While a switch waits for requests, their engines start no others, so the wait is bounded. At the end
of the wait an operator's switch gives up. A policy's switch goes on as a carry: it is *late*.
"""

from collections.abc import Mapping

import msgspec

from shoal.runtime.protocol.messages import Treatment


class Rules(msgspec.Struct, frozen=True):
    """One row: a treatment."""

    told: Treatment
    """What engines are told: SEQUENTIAL to wait for their requests, HARD to pause them."""
    moves: bool = False
    """Whether the switch begins by taking all requests on its engines back into the pool, including
    those that are paused for another unit."""
    carries: bool = False
    """Whether requests go on in the target's units, with their KV."""

    @property
    def waits(self) -> bool:
        """Whether engines answer only when they have no running requests."""
        return self.told is Treatment.SEQUENTIAL

    @property
    def lasts(self) -> bool:
        """Whether a switch takes as long as requests run."""
        return self.waits and not self.moves


TREATMENTS: Mapping[Treatment, Rules] = {
    Treatment.SEQUENTIAL: Rules(Treatment.SEQUENTIAL),
    Treatment.CARRY: Rules(Treatment.HARD, carries=True),
    # The engines wait for steps in flight, after which they have no requests.
    Treatment.SOFT: Rules(Treatment.SEQUENTIAL, moves=True),
    Treatment.HARD: Rules(Treatment.HARD),
}
