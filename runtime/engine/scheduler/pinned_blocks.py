"""The blocks of a core that are held while other units read them, and its requests go on.

These are the blocks that running requests have filled, and what is cached of requests that have
ended. KV never changes once it is written.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from shoal.runtime.engine.agent.copies_ahead import Prefixes
from shoal.runtime.engine.scheduler.carried_requests import CarriedRequests
from shoal.runtime.engine.scheduler.scheduled_steps import InFlight, beginning
from shoal.runtime.latest import Latest
from shoal.runtime.protocol.messages import CarriedRequest

Table = list[KVCacheBlock]
"""The blocks of a request's first tokens in one KV group; null blocks for what nothing needs."""

BEHIND = 8
"""How many blocks before its window a source looks for in its prefix cache. The destination's
blocks may be as many times larger, so that its window begins earlier."""

AT_ONCE = 4096
"""Blocks that are freed at once, which takes the host about two milliseconds."""


class PinnedBlocks:
    """Pins blocks of one core.

    Args:
        scheduler: vLLM's, of the core.
        carried: the requests that come to the core.
    """

    def __init__(self, scheduler: Any, carried: CarriedRequests) -> None:
        self._scheduler, self._carried, self._blocks = scheduler, carried, carried.blocks
        self._pinned: dict[int, Table] = {}
        self._taken: defaultdict[int, int] = defaultdict(int)
        """How many free blocks each carry holds of requests that have ended."""
        self._latest = Latest[Request]()
        """The core's latest requests without images, which take much memory."""

    @property
    def tables(self) -> Collection[Table]:
        """All pinned blocks."""
        return self._pinned.values()

    def pin(
        self,
        carry: int,
        request_ids: Iterable[str],
        prefixes: Prefixes,
        steps: Iterable[InFlight],
    ) -> list[CarriedRequest]:
        """See ``interface.Core.pin``.

        Args:
            carry: the carry.
            request_ids: the requests.
            prefixes: requests that have ended.
            steps: those in flight. What a request whose first step here is among them has found in
                the prefix cache may be what this step, or one before it, is about to write.
        """
        begun, unread = {name for step in steps for name in beginning(step)}, self._carried.unread
        known, unsure = self._scheduler.requests, begun | unread
        chosen = [known[name] for name in request_ids if name in known and name not in unsure]
        pinned = [self._pin(carry, request) for request in chosen if self._blocks.looks_up(request)]
        if prefixes.ids and not unread and not any(map(self._writes_for_nobody, steps)):
            unwritten = self._unwritten()
            for name, request_id in prefixes.ids.items():
                room = prefixes.room - self._taken[carry]
                pinned.append(self._pin_cached(carry, name, request_id, room, unwritten))
        return [request for request in pinned if request is not None]

    def _pin(self, carry: int, request: Request) -> CarriedRequest | None:
        whole = self._whole(request)
        groups = self._manager.get_blocks(request.request_id).blocks
        return self._hold(carry, request, [blocks[:whole] for blocks in groups])

    def _pin_cached(
        self, carry: int, name: str, request_id: str, room: int, unwritten: Collection[int]
    ) -> CarriedRequest | None:
        """Hold what is cached of a request that has ended, and describe it by a new name."""
        request = self._latest.get(request_id)
        if request is None or not self._blocks.looks_up(request):
            return None
        hits, _, _ = self._manager.get_computed_blocks(request)
        tables = [list(blocks) for blocks in hits.blocks]
        if any(block.block_id in unwritten for table in tables for block in table):
            return None
        free = sum(block.ref_cnt == 0 for block in no_nulls(*tables))
        if free > room:
            return None
        self._taken[carry] += free
        held = self._hold(carry, request, tables)
        return None if held is None else held.as_prefix(name)

    def _writes_for_nobody(self, step: InFlight) -> bool:
        """Return whether a step computes a prompt of a request that has lost its blocks since.

        They may be in the prefix cache, and nobody can say which ones they are.
        """
        known, running = self._scheduler.requests, RequestStatus.RUNNING
        begun = {*beginning(step)}
        return bool(step.gone) or any(
            name not in known or known[name].status is not running
            for name, tokens in step.scheduled.num_scheduled_tokens.items()
            if tokens > 1 + self._scheduler.num_spec_tokens or name in begun
        )

    def _unwritten(self) -> set[int]:
        """Return the blocks of requests that a step in flight may still write to.

        vLLM caches a full block as soon as the step is scheduled that fills it.
        """
        found = set[int]()
        for name, request in self._scheduler.requests.items():
            first = self._whole(request)
            for blocks in self._manager.get_blocks(name).blocks:
                found.update(block.block_id for block in blocks[first:])
        return found

    def _whole(self, request: Request) -> int:
        """Return how many blocks a request has filled.

        With steps in flight, vLLM counts tokens as computed that the devices have not come to.
        """
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        return int(max(0, computed) // self._blocks.block_tokens)

    def _hold(
        self, carry: int, request: Request, groups: Sequence[Sequence[KVCacheBlock]]
    ) -> CarriedRequest | None:
        """Hold whole blocks of a request, and describe it; None: it has none."""
        whole, size = len(groups[0]), self._blocks.block_tokens
        tables = [self._with_cached(group, request, blocks) for group, blocks in enumerate(groups)]
        held = no_nulls(*tables)
        if not held:
            return None
        self._pool.touch(held)
        self._pinned.setdefault(carry, []).extend(reversed(held))
        tokens = list(request.output_token_ids)
        members = self._blocks.tables_by_member(tables)
        return CarriedRequest(request.request_id, tokens, whole * size, members, request.num_tokens)

    def _with_cached(self, group: int, request: Request, blocks: Sequence[KVCacheBlock]) -> Table:
        """Return a group's blocks of a request, and those behind its window that are still cached.

        The request has let go of these. But the window of its last whole block needs some of them.
        """
        table = list(blocks)
        first = next((n for n, block in enumerate(table) if not block.is_null), len(table))
        hashes = self._blocks.hashes(request)
        for nth in range(first - 1, max(-1, first - 1 - BEHIND), -1):
            found = self._pool.get_cached_block(hashes[nth], [group])
            if found is None:
                break
            (table[nth],) = found
        return table

    def unpin(self, carry: int) -> bool:
        """See ``interface.Core.unpin``."""
        held = self._pinned.get(carry, [])
        self._pool.free_blocks(held[:AT_ONCE])
        del held[:AT_ONCE]
        if not held:
            self._pinned.pop(carry, None)
            self._taken.pop(carry, None)
        return not held

    def latest(self, request_id: str) -> Request | None:
        """Return a request that is remembered; None: it is not."""
        return self._latest.get(request_id)

    def remember(self, request: Request) -> None:
        """Remember a request that has come, so that what is cached of it is found when it ends."""
        if not request.mm_features and request.prompt_embeds is None:
            self._latest.put(request.request_id, request, request.num_prompt_tokens)

    @property
    def _manager(self) -> Any:
        return self._scheduler.kv_cache_manager

    @property
    def _pool(self) -> Any:
        return self._manager.block_pool


def no_nulls(*tables: Iterable[KVCacheBlock]) -> Table:
    """Return the blocks of tables that hold anything."""
    return [block for table in tables for block in table if not block.is_null]
