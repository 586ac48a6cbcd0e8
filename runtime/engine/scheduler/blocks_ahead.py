"""The blocks of a core that are copied ahead, while the requests that filled them still run.

A virtual machine is moved like this: most of its memory is copied while it runs, and the rest when
it stands still (pre-copy, Clark et al., "Live Migration of Virtual Machines", NSDI 2005). KV never
changes once it is written, so no block is copied twice.

Where requests come from, the blocks that they have filled are *pinned*. Where they go to, free
blocks are *reserved* for what the pinned ones hold. Once it is copied, the reserved blocks are in
the prefix cache, where ``CarriedRequests.adopt`` finds them.
"""

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock, resolve_block_hashes
from vllm.v1.request import Request

from shoal.policies.values.layouts import Unit
from shoal.runtime.engine.agent.interface import Copied, RunnerDied
from shoal.runtime.engine.kv.carry_plan import NULL_BLOCK
from shoal.runtime.engine.link import instructions
from shoal.runtime.engine.link.executor import UnitChannel
from shoal.runtime.engine.scheduler.carried_requests import (
    CarriedRequests,
    PhysicalBlocks,
    copied_by_all,
)
from shoal.runtime.protocol.messages import AheadRequest, CarriedRequest


@dataclass(slots=True)
class _Reserved:
    """The blocks of one expected request's first tokens. All but null blocks are held once."""

    request: Request
    table: list[KVCacheBlock]
    begin: int
    """The first that is reserved: those before it are in the prefix cache, or another request of
    the carry has reserved them."""
    rest: int
    """How many more blocks the request needs to be adopted; they are not held."""
    awaited: bool = True
    """Whether the request may still be adopted."""


@dataclass(slots=True)
class _Carry:
    """What is reserved for one carry."""

    requests: dict[str, _Reserved] = field(default_factory=dict)
    by_hash: dict[bytes, KVCacheBlock] = field(default_factory=dict)
    """Reserved blocks, until they are in the prefix cache."""
    settled: bool = False


@dataclass(frozen=True, slots=True)
class _Copy:
    """A ``CopyAhead`` that is not answered."""

    carry: int
    request_ids: list[str]
    future: "Future[Any]"


class BlocksAhead:
    """Pins and reserves blocks of one core, and tells its runners what to copy ahead.

    Args:
        unit: the core's unit.
        scheduler: vLLM's, of the core.
        channel: the queues to the members' runners.
        physical: what backs the core's blocks.
        carried: the requests that come to the core.
    """

    def __init__(
        self,
        unit: Unit,
        scheduler: Any,
        channel: UnitChannel,
        physical: PhysicalBlocks,
        carried: CarriedRequests,
    ) -> None:
        self._unit, self._scheduler, self._channel = unit, scheduler, channel
        self._physical, self._carried = physical, carried
        self._pinned: dict[int, list[KVCacheBlock]] = {}
        self._reserved: dict[int, _Carry] = {}
        self._copying: list[_Copy] = []

    @property
    def num_held(self) -> int:
        """Blocks that are held here, whether or not requests hold them too."""
        reserved = [r.table for carry in self._reserved.values() for r in carry.requests.values()]
        groups = [*self._pinned.values(), *reserved]
        return len({block.block_id for group in groups for block in _no_nulls(group)})

    # --- where requests come from ---

    def pin(
        self, carry: int, request_ids: Iterable[str], beginning: Collection[str]
    ) -> list[CarriedRequest]:
        """See ``interface.Core.pin``.

        Args:
            carry: the carry.
            request_ids: the requests.
            beginning: requests whose first step here is in flight. What they have found in the
                prefix cache may be what this step, or one before it, is about to write.
        """
        unsure = {*beginning, *self._carried.unread}
        known = self._scheduler.requests
        chosen = [known[name] for name in request_ids if name in known and name not in unsure]
        pinned = [self._pin(carry, request) for request in chosen if self._looks_up(request)]
        return [request for request in pinned if request is not None]

    def _pin(self, carry: int, request: Request) -> CarriedRequest | None:
        size = self._carried.attention.block_size
        # With steps in flight, vLLM counts tokens as computed that the devices have not come to.
        whole = max(0, request.num_computed_tokens - request.num_in_flight_tokens) // size
        (blocks,) = self._manager.get_blocks(request.request_id).blocks
        blocks = blocks[:whole]
        held = _no_nulls(blocks)
        if not held:
            return None
        self._pool.touch(held)
        self._pinned.setdefault(carry, []).extend(reversed(held))
        tokens = list(request.output_token_ids)
        members = self._by_member(blocks)
        return CarriedRequest(request.request_id, tokens, whole * size, members, request.num_tokens)

    def unpin(self, carry: int) -> None:
        """See ``interface.Core.unpin``."""
        self._pool.free_blocks(self._pinned.pop(carry, ()))

    # --- where they go to ---

    def reserve(self, carry: int, requests: Sequence[CarriedRequest]) -> list[AheadRequest]:
        """See ``interface.Core.reserve``."""
        if not self._carried.shares_kv:
            return []
        of_carry = self._reserved.setdefault(carry, _Carry())
        found = list[AheadRequest]()
        for carried in sorted(requests, key=lambda request: request.computed, reverse=True):
            request = self._carried.expected(carried.request_id)
            if request is not None and carried.request_id not in of_carry.requests:
                found += self._reserve(of_carry, request, carried)
        if not of_carry.requests:
            del self._reserved[carry]
        return found

    def _reserve(
        self, of_carry: _Carry, request: Request, carried: CarriedRequest
    ) -> list[AheadRequest]:
        """Hold all blocks for what a request has filled, or none; return what is to be copied.

        The request learns the tokens that it has by now. So it computes the hashes of its blocks
        as it will when it is adopted.
        """
        if of_carry.settled or not self._looks_up(request):
            return []
        request.append_output_token_ids(carried.tokens[request.num_output_tokens :])
        size = self._carried.attention.block_size
        hashes, end = self._hashes(request), carried.computed // size
        table = self._found(request, end)
        while len(table) < end and hashes[len(table)] in of_carry.by_hash:
            table.append(of_carry.by_hash[hashes[len(table)]])
        begin, rest = len(table), self._rest(request, max(end, len(table)))
        if not _has_all(carried, begin * size, end * size) or not self._has_room(table, end, rest):
            return []
        self._pool.touch(_no_nulls(table))
        table += self._pool.get_new_blocks(max(0, end - begin))
        of_carry.by_hash |= zip(hashes[begin:end], table[begin:], strict=True)
        of_carry.requests[request.request_id] = _Reserved(request, table, begin, rest)
        if begin >= end:
            return []
        target = self._by_member(table)
        return [AheadRequest(request.request_id, begin * size, end * size, carried.blocks, target)]

    def _found(self, request: Request, end: int) -> list[KVCacheBlock]:
        """Return what the prefix cache has of a request, and null blocks for what nothing needs.

        A sliding window needs only the last of the blocks before ``end``, but all of these: with
        fewer of them vLLM does not take the blocks for a prefix that it has.
        """
        attention = self._carried.attention
        hits, _, _ = self._manager.get_computed_blocks(request)
        (table,) = hits.blocks
        unneeded = attention.get_num_skipped_tokens(end * attention.block_size)
        first = unneeded // attention.block_size
        return list(table) if len(table) >= first else [self._pool.null_block] * first

    def _rest(self, request: Request, blocks: int) -> int:
        """Return how many blocks a request needs beside its first ones, to be adopted.

        A group need not keep them free: it is lent more when it is bound, or when it lacks some.
        """
        if self._unit.is_group:
            return 0
        whole: int = request.num_tokens // self._carried.attention.block_size
        return whole + 1 - blocks

    def _has_room(self, table: Sequence[KVCacheBlock], end: int, rest: int) -> bool:
        """Return whether there are blocks for a request, beside what others are about to need.

        Each running request may cross into a new block before anybody can make room for it.
        """
        reserved = [r for carry in self._reserved.values() for r in carry.requests.values()]
        kept = len(self._scheduler.running) + sum(r.rest for r in reserved if r.awaited)
        unheld = sum(block.ref_cnt == 0 for block in _no_nulls(table))
        free: int = self._pool.get_num_free_blocks()
        return bool(kept + unheld + max(0, end - len(table)) + rest <= free)

    def settle(self, carry: int, *, copied: bool) -> None:
        """See ``interface.Core.settle``."""
        of_carry = self._reserved.get(carry)
        if of_carry is None or of_carry.settled:
            return
        of_carry.settled = True
        of_carry.by_hash.clear()
        if copied:
            for reserved in of_carry.requests.values():
                self._cache(reserved)
        over = [n for n, reserved in of_carry.requests.items() if not (copied and reserved.awaited)]
        self._forget(carry, over)

    def _cache(self, reserved: _Reserved) -> None:
        attention = self._carried.attention
        self._pool.cache_full_blocks(
            request=reserved.request,
            blocks=reserved.table,
            num_cached_blocks=reserved.begin,
            num_full_blocks=len(reserved.table),
            block_size=attention.block_size,
            kv_cache_group_id=attention.kv_cache_group_id,
        )

    def forget(self, request_ids: Collection[str]) -> None:
        """Let go of what is reserved for requests that were adopted, or do not come.

        While it is copied, somebody still writes to it: it comes free when that is settled.
        """
        for carry in list(self._reserved):
            self._forget(carry, request_ids)

    def _forget(self, carry: int, request_ids: Collection[str]) -> None:
        of_carry = self._reserved[carry]
        for request_id in of_carry.requests.keys() & request_ids:
            of_carry.requests[request_id].awaited = False
            if of_carry.settled:
                table = of_carry.requests.pop(request_id).table
                self._pool.free_blocks(reversed(_no_nulls(table)))
        if not of_carry.requests:
            del self._reserved[carry]

    # --- what runners are told ---

    def copy(
        self, carry: int, source: Unit, target: Unit, requests: Sequence[AheadRequest]
    ) -> None:
        """See ``interface.Core.copy_ahead``."""
        arrivals = [
            instructions.Arrival(r.request_id, [], [], r.end, None, r.begin, r.source, r.target)
            for r in requests
        ]
        seq, future = self._channel.expect(answers=len(self._unit.engines))
        self._channel.send(instructions.CopyAhead(seq, source, target, arrivals))
        self._copying.append(_Copy(carry, [r.request_id for r in requests], future))

    def copied(self) -> list[tuple[int, Copied]]:
        """See ``interface.Core.copied_ahead``."""
        ended = [copy for copy in self._copying if copy.future.done()]
        self._copying = [copy for copy in self._copying if copy not in ended]
        return [(copy.carry, _copied(copy)) for copy in ended]

    # --- vLLM's ---

    def _looks_up(self, request: Request) -> bool:
        """Return whether a request takes what is in the prefix cache."""
        return bool(self._manager.prefix_cache_lookup_enabled(request))

    def _hashes(self, request: Request) -> Sequence[bytes]:
        size = self._carried.attention.block_size
        hashes: Sequence[bytes] = resolve_block_hashes(
            request.block_hashes, self._pool.hash_block_size, size
        )
        return hashes

    def _by_member(self, blocks: Sequence[KVCacheBlock]) -> dict[int, list[list[int]]]:
        physical = self._physical([block.block_id for block in blocks])
        return {engine: [ids] for engine, ids in physical.items()}

    @property
    def _manager(self) -> Any:
        return self._scheduler.kv_cache_manager

    @property
    def _pool(self) -> Any:
        return self._manager.block_pool


def _no_nulls(blocks: Iterable[KVCacheBlock]) -> list[KVCacheBlock]:
    return [block for block in blocks if not block.is_null]


def _has_all(carried: CarriedRequest, begin: int, end: int) -> bool:
    """Return whether the source still has the KV of all these tokens."""
    if begin >= end:
        return True
    ((blocks,), *_) = carried.blocks.values()
    size = carried.computed // len(blocks)
    return NULL_BLOCK not in blocks[begin // size : -(-end // size)]


def _copied(copy: _Copy) -> Copied:
    try:
        return copied_by_all(copy.request_ids, copy.future)
    except RunnerDied as error:
        return Copied(copy.request_ids, 0, 0.0, str(error))
