"""The core of an engine's *tier*: memory of the host that holds the KV of requests that wait there.

Seesaw (4.2) keeps the KV of computed prompts in the host's memory until there is room to decode
them. Here the tier is one more unit of its engine, so that requests go there and back as between
any other two units (``carrying``). It computes nothing: what it has of a request is what its last
unit has said of it, and the blocks that hold its KV.

Requests come only from the engine's own unit. So a block of the tier holds what one of the engine's
own blocks held, and requests leave it as they would leave an engine alone. The engine's runner
copies them beside its steps.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from msgspec import structs

from shoal.policies.values.layouts import Unit, tier_of
from shoal.runtime.engine.agent.copies_ahead import NO_PREFIXES, Prefixes
from shoal.runtime.engine.agent.results import Adoption, Collected, Copied, CoreLoad
from shoal.runtime.engine.agent.step_mode import Shift
from shoal.runtime.protocol.messages import AheadRequest, CarriedRequest, Fallback, Mode, Work

NULL_BLOCK = 0
"""A request's blocks have this id where nothing needs their KV any more."""


class Arriving(NamedTuple):
    """A request whose KV is to be copied to the tier."""

    carried: CarriedRequest
    """As its unit has described it."""
    target: dict[int, list[list[int]]]
    """The tier's blocks that are to have what ``carried.blocks`` have."""


class TierCopy(Protocol):
    """A copy of KV to the tier."""

    def ended(self) -> Copied | None:
        """Return what was copied; None: the copy has not ended."""


class _Copy(NamedTuple):
    copy: TierCopy
    ids: list[str]
    left: list[int]
    """Blocks of requests that are gone, which are free when nothing is written to them any more."""


class TierCore:
    """Implements ``interface.Core``; what copies is the subclass's.

    Args:
        engine: the engine.
        num_blocks: blocks of its tier. Their ids begin with 1.
    """

    in_flight = 0
    oldest_step: tuple[Mode, Work] | None = None
    is_moving = False

    def __init__(self, engine: int, num_blocks: int) -> None:
        self.unit = tier_of(engine)
        self.shift = Shift(None)
        self.num_blocks = num_blocks
        self.shares_kv = True
        """Whether the node's engines can read the tier."""
        self._engine = engine
        self._free = list(range(num_blocks, 0, -1))
        self._expected: set[str] = set()
        self._held: dict[str, CarriedRequest] = {}
        """The requests, as they are described to their next unit."""
        self._adopted: list[tuple[Unit, Arriving]] = []
        self._copying: list[_Copy] = []

    def _begin(self, source: Unit, requests: Sequence[Arriving]) -> TierCopy:
        """Begin to copy KV from blocks of a unit to blocks of the tier."""
        raise NotImplementedError

    # --- requests that come -------------------------------------------------------------------

    def expect(self, request_id: str, frames: Sequence[Any]) -> None:
        """See ``Core.expect``: there is nothing to prepare."""
        del frames
        self._expected.add(request_id)

    def expect_prefix(self, name: str, frames: Sequence[Any]) -> None:
        """See ``Core.expect_prefix``: a tier caches nothing."""
        del name, frames

    def allot(self, request: CarriedRequest) -> bool:
        """See ``Core.allot``: ``adopt`` takes no time, so it is left to that."""
        del request
        return False

    def tell_allotted(self, complete: Iterable[tuple[Unit, Sequence[str]]] = ()) -> None:
        """See ``Core.tell_allotted``."""

    def adopt(self, source: Unit, request: CarriedRequest, *, with_kv: bool) -> Adoption | None:
        """See ``Core.adopt``. Without its KV, the request is computed again in its next unit."""
        if request.request_id not in self._expected:
            raise KeyError(request.request_id)
        fallback = None
        if request.computed and with_kv and self.shares_kv:
            blocks = self._take(source, request)
            if blocks is None:
                return None
            self._adopted.append((source, Arriving(request, blocks)))
            held = structs.replace(request, blocks=blocks)
        else:
            held = structs.replace(request, computed=0, blocks={}, cached=0)
            fallback = Fallback.NOT_SHARED if request.computed and with_kv else None
        self._expected.discard(request.request_id)
        self._held[request.request_id] = held
        return Adoption(fallback)

    def _take(self, source: Unit, request: CarriedRequest) -> dict[int, list[list[int]]] | None:
        """Return blocks for a request's KV; None: there are too few."""
        assert source.engines == self.unit.engines, "only the engine's own requests come here"
        groups = request.blocks[self._engine]
        if sum(map(len, map(_real, groups))) > len(self._free):
            return None
        taken = [
            [NULL_BLOCK if block == NULL_BLOCK else self._free.pop() for block in group]
            for group in groups
        ]
        return {self._engine: taken}

    def send_first(self, carries: Sequence[tuple[Unit, Sequence[CarriedRequest]]]) -> bool:
        """See ``Core.send_first``: ``adopt`` takes no time."""
        return False

    def copy(self) -> None:
        """See ``Core.copy``."""
        adopted, self._adopted = self._adopted, []
        for source in dict.fromkeys(source for source, _ in adopted):
            requests = [arriving for unit, arriving in adopted if unit == source]
            ids = [arriving.carried.request_id for arriving in requests]
            self._copying.append(_Copy(self._begin(source, requests), ids, []))

    def copied(self) -> list[Copied]:
        """See ``Core.copied``."""
        results = list[Copied]()
        while self._copying and (result := self._copying[0].copy.ended()) is not None:
            _, ids, left = self._copying.pop(0)
            self._free += left
            results.append(structs.replace(result, request_ids=ids))
            if result.problem:
                self.abort(ids)
        return results

    @property
    def copies(self) -> int:
        """See ``Core.copies``."""
        return len(self._copying)

    # --- requests that leave ------------------------------------------------------------------

    def announce(self, request_ids: Sequence[str]) -> list[CarriedRequest]:
        """See ``Core.announce``: no step is awaited."""
        del request_ids
        return []

    def export(self, request_ids: Sequence[str]) -> list[CarriedRequest]:
        """See ``Core.export``: nobody computes them anyway."""
        return [self._held[each] for each in request_ids if each in self._held]

    def keep(self, request_ids: Sequence[str]) -> None:
        """See ``Core.keep``: they are where they were."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """See ``Core.abort``. Blocks that are still written to come free after that."""
        self._adopted = self._without(request_ids)
        written = {request_id: copy for copy in self._copying for request_id in copy.ids}
        for request_id in request_ids:
            self._expected.discard(request_id)
            held, copy = self._held.pop(request_id, None), written.pop(request_id, None)
            if held is not None:
                freed = self._free if copy is None else copy.left
                freed += _all(held.blocks)
            if copy is not None:
                # If it fails, that concerns no request that comes again under this name.
                copy.ids.remove(request_id)

    def _without(self, request_ids: Iterable[str]) -> list[tuple[Unit, Arriving]]:
        gone = set(request_ids)
        return [each for each in self._adopted if each[1].carried.request_id not in gone]

    def withdraw(self, request_ids: Sequence[str]) -> dict[str, list[int]]:
        """See ``Core.withdraw``."""
        known = [each for each in request_ids if each in self._held]
        tokens = {each: list(self._held[each].tokens) for each in known}
        self.abort(known)
        return tokens

    # --- what a tier does not do --------------------------------------------------------------

    def add(self, frames: Sequence[Any], tokens: Sequence[int] = (), patience: float = 0.0) -> None:
        """See ``Core.add``.

        Raises:
            ValueError: always.
        """
        del frames, tokens, patience
        raise ValueError("nothing is computed in the host's memory")

    def pin(
        self, carry: int, request_ids: Sequence[str], prefixes: Prefixes = NO_PREFIXES
    ) -> list[CarriedRequest]:
        """See ``Core.pin``: nothing is copied ahead of what stands still."""
        del carry, request_ids, prefixes
        return []

    def unpin(self, carry: int) -> bool:
        """See ``Core.unpin``."""
        del carry
        return True

    def reserve(
        self, carry: int, source: Unit, requests: Sequence[CarriedRequest]
    ) -> list[AheadRequest]:
        """See ``Core.reserve``."""
        del carry, source, requests
        return []

    def promise(self, carry: int, request_id: str) -> None:
        """See ``Core.promise``."""

    def settle(self, carry: int, *, copied: bool) -> bool:
        """See ``Core.settle``."""
        del carry, copied
        return True

    def copy_ahead(
        self, carry: int, source: Unit, target: Unit, requests: Sequence[AheadRequest]
    ) -> None:
        """See ``Core.copy_ahead``."""

    def copied_ahead(self) -> list[tuple[int, Copied]]:
        """See ``Core.copied_ahead``."""
        return []

    def collect(self) -> Collected | None:
        """See ``Core.collect``."""
        return None

    def dispatch(self) -> bool:
        """See ``Core.dispatch``."""
        return False

    def dispatch_ahead(self) -> bool:
        """See ``Core.dispatch_ahead``."""
        return False

    def pause(self) -> None:
        """See ``Core.pause``."""

    def holders(self, beyond: int) -> list[str]:
        """See ``Core.holders``: the engine's own blocks are others."""
        del beyond
        return []

    def vacate(self, beyond: int, *, moves: bool) -> int:
        """See ``Core.vacate``."""
        del beyond, moves
        return 0

    # --- figures ------------------------------------------------------------------------------

    @property
    def num_requests(self) -> int:
        """See ``Core.num_requests``."""
        return len(self._held)

    @property
    def load(self) -> CoreLoad:
        """See ``Core.load``: those that are here count as running."""
        return CoreLoad(len(self._held), 0, len(self._free))

    def check_integrity(self) -> list[str]:
        """See ``Core.check_integrity``."""
        held = [block for each in self._held.values() for block in _all(each.blocks)]
        left = [block for copy in self._copying for block in copy.left]
        if sorted([*self._free, *held, *left]) == list(range(1, self.num_blocks + 1)):
            return []
        return [f"tier of engine {self._engine}: a block is lost, or in two places"]


def _real(blocks: Iterable[int]) -> list[int]:
    return [block for block in blocks if block != NULL_BLOCK]


def _all(blocks: dict[int, list[list[int]]]) -> list[int]:
    """Return the ids of all blocks of a request, of all its KV groups."""
    return [block for groups in blocks.values() for group in groups for block in _real(group)]
