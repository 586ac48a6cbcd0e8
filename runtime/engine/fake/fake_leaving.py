"""The requests that leave a fake core with their KV: announced, then exported."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from msgspec import structs

from shoal.runtime.engine.fake.fake_request import FakeRequest
from shoal.runtime.engine.fake.fake_scheduler import FakeScheduler
from shoal.runtime.engine.fake.faults import Faults
from shoal.runtime.protocol.messages import CarriedRequest


class FakeLeaving:
    """Describes the requests that leave a core.

    Args:
        scheduler: the core's.
        block_tokens: tokens of each of its blocks.
        physical: turns block ids of the core into the ids of each member.
    """

    def __init__(
        self,
        scheduler: FakeScheduler,
        block_tokens: int,
        physical: Callable[[Sequence[int]], Mapping[int, list[int]]],
    ) -> None:
        self._scheduler, self._size, self._physical = scheduler, block_tokens, physical
        self._announced: dict[str, CarriedRequest] = {}

    def announce(
        self,
        request_ids: Collection[str],
        repeated: Iterable[tuple[FakeRequest, int]],
        faults: Faults,
    ) -> list[CarriedRequest]:
        """See ``Core.announce``.

        Args:
            request_ids: the requests.
            repeated: requests in flight, and how often the same step follows for each.
            faults: what is wrong with the engine.
        """
        if faults.lose_token:
            return []
        more = {request.id: count for request, count in repeated}
        for request in self._scheduler.running:
            if request.id in request_ids and request.blocks:
                computed = request.scheduled + more.get(request.id, 0)
                carried = self._describe(request, computed, faults)
                # Each step that comes to the last token adds one.
                length = max(request.tokens, computed + 1)
                self._announced[request.id] = structs.replace(carried, length=length)
        return [self._announced[name] for name in request_ids if name in self._announced]

    def export(self, request_ids: Sequence[str], faults: Faults) -> list[CarriedRequest]:
        """See ``Core.export``."""
        parked = self._scheduler.park(request_ids)
        exported = [self._rest(r) or self._describe(r, r.computed, faults) for r in parked]
        self.forget(request_ids)
        return exported

    def _rest(self, request: FakeRequest) -> CarriedRequest | None:
        """Describe what is new of an announced request; None: it is not as it was foretold."""
        announced = self._announced.get(request.id)
        if announced is None:
            return None
        return announced.rest(request.generated, request.computed, request.tokens)

    def _describe(self, request: FakeRequest, computed: int, faults: Faults) -> CarriedRequest:
        tokens = list(request.generated)
        used = request.blocks[: -(-computed // self._size)]
        if used and faults.wrong_block:
            used = [*used[:-1], used[0]]
        if tokens and faults.lose_token:
            tokens, computed = tokens[:-1], min(computed, request.tokens - 2)
        blocks = {engine: [ids] for engine, ids in self._physical(used).items()}
        hits = 0 if tokens else request.hits or 0
        return CarriedRequest(request.id, tokens, computed, blocks, request.tokens, hits)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget what was announced of requests."""
        for request_id in request_ids:
            self._announced.pop(request_id, None)
