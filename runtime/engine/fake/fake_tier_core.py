"""The fake engine's tier: copies take their time, and blocks remember whose tokens they hold."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shoal.policies.values.layouts import Unit
from shoal.runtime.config import FakeSettings
from shoal.runtime.engine.agent.results import Adoption, Copied
from shoal.runtime.engine.agent.tier_core import Arriving, TierCore
from shoal.runtime.engine.fake.fake_kv import memory_of
from shoal.runtime.engine.fake.fake_request import FakeRequest
from shoal.runtime.engine.fake.faults import Seam
from shoal.runtime.engine.fake.surroundings import Surroundings
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.messages import CarriedRequest


class FakeTierCore(TierCore):
    """``TierCore`` of a fake engine.

    Args:
        engine: the engine.
        surroundings: what the engine's cores share.
    """

    def __init__(self, engine: int, surroundings: Surroundings) -> None:
        super().__init__(engine, surroundings.settings.tier_blocks)
        self._around = surroundings
        self._memory = surroundings.devices.memory
        self._block_tokens = surroundings.settings.kv_geometry.block(self.unit.layout).tokens
        self._requests: dict[str, FakeRequest] = {}
        """The requests, as far as blocks remember them."""
        self._link_free_at = 0.0

    def expect(self, request_id: str, frames: Sequence[Any]) -> None:
        """See ``Core.expect``."""
        super().expect(request_id, frames)
        view = wire.decode_request(frames)
        self._requests[request_id] = FakeRequest(view, view.prompt_token_ids(), 0)

    def adopt(self, source: Unit, request: CarriedRequest, *, with_kv: bool) -> Adoption | None:
        """See ``Core.adopt``."""
        self._around.faults.strike(Seam.ADOPT)
        adoption = super().adopt(source, request, with_kv=with_kv)
        if adoption is not None:
            known = self._requests[request.request_id]
            known.extend(request.tokens[len(known.generated) :])
        return adoption

    def abort(self, request_ids: Sequence[str]) -> None:
        """See ``Core.abort``."""
        super().abort(request_ids)
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def _begin(self, source: Unit, requests: Sequence[Arriving]) -> "_Copy":
        self._around.faults.strike(Seam.COPY)
        size = self._around.settings.token_bytes * sum(r.carried.computed for r in requests)
        begin = max(self._around.clock(), self._link_free_at)
        seconds = copy_seconds(self._around.settings, size, links=1)
        self._link_free_at = begin + seconds
        for carried, target in requests:
            request = self._requests[carried.request_id]
            request.blocks, request.computed = target[self._engine][0], carried.computed
            blocks = self._own(request.blocks)
            self._memory.write(self.unit, request, 0, blocks, self._block_tokens)
        return _Copy(self, source, requests, self._link_free_at, Copied([], size, seconds))

    def end(self, source: Unit, requests: Iterable[Arriving]) -> None:
        """Take note that requests have been copied: if they had gone, the tier has nothing."""
        for carried, target in requests:
            request = self._requests.get(carried.request_id)
            blocks = {memory_of(source, engine): ids for engine, (ids,) in carried.blocks.items()}
            if request is None or not self._memory.knows(blocks):
                continue
            if not self._memory.holds(request, carried.computed, blocks, source):
                self._memory.wipe(self._own(target[self._engine][0]))

    def _own(self, blocks: Sequence[int]) -> Mapping[int, Sequence[int]]:
        return {memory_of(self.unit, self._engine): blocks}

    def is_due(self, at: float) -> bool:
        """Return whether it is so late."""
        return self._around.clock() >= at

    @property
    def due(self) -> float | None:
        """Clock time at which the next copy ends; None: none is in flight."""
        copies = (each.copy for each in self._copying)
        return next((copy.due for copy in copies if isinstance(copy, _Copy)), None)

    def forget_prefixes(self) -> None:
        """See ``FakeCore.forget_prefixes``: a tier caches none."""


class _Copy:
    def __init__(
        self,
        tier: FakeTierCore,
        source: Unit,
        requests: Sequence[Arriving],
        due: float,
        result: Copied,
    ) -> None:
        self._tier, self._source, self._requests, self._result = tier, source, requests, result
        self.due = due

    def ended(self) -> Copied | None:
        """See ``TierCopy.ended``."""
        if not self._tier.is_due(self.due):
            return None
        self._tier.end(self._source, self._requests)
        return self._result


def copy_seconds(settings: FakeSettings, size: int, links: int) -> float:
    """Return the time of a copy from or to a tier.

    Args:
        settings: the node's.
        size: bytes that are copied.
        links: engines that copy a part of them.
    """
    return settings.copy_seconds + size / (settings.tier_bytes_per_second * links)
