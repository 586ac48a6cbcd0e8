"""The core of a real engine's tier, which the engine's runner fills."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from shoal.policies.values.layouts import Unit
from shoal.runtime.engine.agent.results import Copied
from shoal.runtime.engine.agent.tier_core import Arriving, TierCore
from shoal.runtime.engine.link import instructions
from shoal.runtime.engine.link.executor import UnitChannel, copied_by_all


class VllmTierCore(TierCore):
    """``TierCore`` of a real engine.

    Args:
        engine: the engine.
        num_blocks: see ``TierCore``.
        channel: the queue to the engine's runner, which reads it while the engine is alone.
    """

    def __init__(self, engine: int, num_blocks: int, channel: UnitChannel) -> None:
        super().__init__(engine, num_blocks)
        self._channel = channel

    def _begin(self, source: Unit, requests: Sequence[Arriving]) -> "_Copy":
        arrivals = [
            instructions.Arrival(
                carried.request_id, [], [], carried.computed, None, 0, carried.blocks, target
            )
            for carried, target in requests
        ]
        seq, future = self._channel.expect(answers=1)
        self._channel.send(instructions.CopyAhead(seq, source, self.unit, arrivals))
        return _Copy(future)


class _Copy:
    def __init__(self, future: "Future[Any]") -> None:
        self._future = future

    def ended(self) -> Copied | None:
        """See ``TierCopy.ended``."""
        return copied_by_all([], self._future) if self._future.done() else None
