"""The blocks of a core that are copied ahead, while the requests that filled them still run.

A virtual machine is moved like this: most of its memory is copied while it runs, and the rest when
it stands still (pre-copy, Clark et al., "Live Migration of Virtual Machines", NSDI 2005). KV never
changes once it is written, so no block is copied twice.

Where requests come from, the blocks that they have filled are *pinned*. Where they go to, free
blocks are *reserved* for what the pinned ones hold. Once it is copied, the reserved blocks are in
the prefix cache, where ``CarriedRequests.adopt`` finds them.

A request has a table of blocks for each KV group. vLLM finds a prefix only if it has all of it in
all groups, of a window's group the blocks that the window spans. So all of these go ahead, or none.
"""

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from shoal.policies.values.layouts import Unit
from shoal.runtime.engine.agent.interface import RunnerDied
from shoal.runtime.engine.agent.results import Copied
from shoal.runtime.engine.kv.carry_plan import NULL_BLOCK
from shoal.runtime.engine.link import instructions
from shoal.runtime.engine.link.executor import UnitChannel, copied_by_all
from shoal.runtime.engine.scheduler.carried_requests import CarriedRequests
from shoal.runtime.engine.scheduler.pinned_blocks import PinnedBlocks, Table, no_nulls
from shoal.runtime.protocol.messages import AHEAD_TOKENS, AheadRequest, CarriedRequest

AT_ONCE = 16
"""Requests whose blocks are settled at once: each takes the host up to some 0.3 milliseconds."""


@dataclass(slots=True)
class _Reserved:
    """The blocks of one expected request's first tokens. All but null blocks are held once."""

    request: Request
    tables: list[Table]
    """For each KV group."""
    begins: list[int]
    """The first block of each that is reserved: those before it are in the prefix cache, or another
    request of the carry has reserved them, or nothing needs them."""
    rest: int
    """How many more blocks the request needs to be adopted; they are not held."""
    awaited: bool = True
    """Whether the request may still be adopted."""
    settled: bool = False
    """Whether nobody writes to the blocks any more."""


@dataclass(slots=True)
class _Carry:
    """What is reserved for one carry."""

    requests: dict[str, _Reserved] = field(default_factory=dict)
    by_hash: dict[tuple[int, bytes], KVCacheBlock] = field(default_factory=dict)
    """Reserved blocks by KV group and hash, until they are in the prefix cache."""


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
        carried: the requests that come to the core.
    """

    def __init__(
        self,
        unit: Unit,
        scheduler: Any,
        channel: UnitChannel,
        carried: CarriedRequests,
    ) -> None:
        self._unit, self._scheduler, self._channel = unit, scheduler, channel
        self._carried, self._blocks = carried, carried.blocks
        self.pinned = PinnedBlocks(scheduler, carried)
        """The blocks of requests that leave."""
        self._reserved: dict[int, _Carry] = {}
        self._copying: list[_Copy] = []
        self._adopted: list[Request] = []
        self._blocks.prefix_of = self.prefix

    @property
    def num_held(self) -> int:
        """Blocks that are held here, whether or not requests hold them too."""
        reserved = [r for carry in self._reserved.values() for r in carry.requests.values()]
        tables = [*self.pinned.tables, *(table for r in reserved for table in r.tables)]
        return len({block.block_id for block in no_nulls(*tables)})

    # --- where they go to ---

    def expect(self, name: str, asked: EngineCoreRequest, engine_core: EngineCore) -> None:
        """See ``interface.Core.expect_prefix``. No grammar is compiled for it.

        The request is remembered as if it had ended here, so the next switch can take its cache
        along again. Nor must its tokens be freed when other requests come, which would stand still
        meanwhile. A request that has ended here is known already, with its answer.
        """
        request = self.pinned.latest(asked.request_id)
        if request is None:
            request = Request.from_engine_core_request(asked, engine_core.request_block_hasher)
            self.pinned.remember(request)
        request.request_id = name
        self._carried.expect(request)

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
        if not self._blocks.looks_up(request):
            return []
        request.append_output_token_ids(carried.tokens[request.num_output_tokens :])
        size = self._blocks.block_tokens
        hashes, end = self._blocks.hashes(request), carried.computed // size
        tables = self._found(of_carry, request, hashes, end)
        begins = [len(table) for table in tables]
        rest = 0 if carried.is_prefix else self._rest(request, tables, end)
        if not _has_all(carried, begins, end, size) or not self._has_room(tables, end, rest):
            return []
        self._pool.touch(no_nulls(*tables))
        for group, (table, begin) in enumerate(zip(tables, begins, strict=True)):
            table += self._pool.get_new_blocks(max(0, end - begin))
            named = ((group, of_block) for of_block in hashes[begin:end])
            of_carry.by_hash |= zip(named, table[begin:], strict=True)
        reserved = _Reserved(request, tables, begins, rest, awaited=not carried.is_prefix)
        of_carry.requests[request.request_id] = reserved
        if min(begins) >= end:
            return []
        target, span = self._blocks.tables_by_member(tables), (min(begins) * size, end * size)
        return [AheadRequest(request.request_id, *span, carried.blocks, target)]

    def _found(
        self, of_carry: _Carry, request: Request, hashes: Sequence[bytes], end: int
    ) -> list[Table]:
        """Return what there is of a request: cached, or reserved for another one of the carry.

        A sliding window needs only the last of the blocks before ``end``, but all of these: with
        fewer of them vLLM does not take the blocks for a prefix that it has.
        """
        hits, _, _ = self._manager.get_computed_blocks(request)
        tables = list[Table]()
        for manager, found in zip(self._blocks.managers, hits.blocks, strict=True):
            first = manager.get_num_skipped_tokens(end * manager.block_size) // manager.block_size
            tables.append(list(found) if len(found) >= first else [self._pool.null_block] * first)
        for nth in range(min(map(len, tables)), end):
            growing = [(group, hashes[nth]) for group, t in enumerate(tables) if len(t) == nth]
            if any(key not in of_carry.by_hash for key in growing):
                break
            for key in growing:
                tables[key[0]].append(of_carry.by_hash[key])
        return tables

    def _rest(self, request: Request, tables: Sequence[Table], end: int) -> int:
        """Return how many blocks a request needs beside its first ones, to be adopted.

        A group need not keep them free: it is lent more when it is bound, or when it lacks some.
        """
        if self._unit.is_group:
            return 0
        whole = self._blocks.most_tokens(request) // self._blocks.block_tokens
        return sum(whole + 1 - max(end, len(table)) for table in tables)

    def _has_room(self, tables: Sequence[Table], end: int, rest: int) -> bool:
        """Return whether there are blocks for a request, beside what others are about to need.

        Each running request may cross into new blocks before anybody can make room for it.
        """
        reserved = [r for carry in self._reserved.values() for r in carry.requests.values()]
        kept = len(self._scheduler.running) * len(tables)
        kept += sum(r.rest for r in reserved if r.awaited)
        unheld = sum(block.ref_cnt == 0 for block in no_nulls(*tables))
        new = sum(max(0, end - len(table)) for table in tables)
        free: int = self._pool.get_num_free_blocks()
        return bool(kept + unheld + new + rest <= free)

    def promise(self, carry: int, request_id: str) -> bool:
        """See ``interface.Core.promise``; return whether the request has got blocks."""
        of_carry = self._reserved.get(carry)
        reserved = None if of_carry is None else of_carry.requests.get(request_id)
        if reserved is None or reserved.settled:
            return False
        request, tables, size = reserved.request, reserved.tables, self._blocks.block_tokens
        tokens = self._blocks.most_tokens(request, request.num_tokens + AHEAD_TOKENS)
        before, reserved.rest = reserved.rest, 0
        rest = sum(max(0, -(-tokens // size) - len(table)) for table in tables)
        may_have = reserved.awaited and len(tables[0])  # vLLM gives no blocks for nothing
        has_room = may_have and self._has_room(tables, len(tables[0]), rest)
        if has_room and self._blocks.promise(request, tables):
            return True
        reserved.rest = before
        return False

    def settle(self, carry: int, *, copied: bool) -> bool:
        """See ``interface.Core.settle``."""
        of_carry = self._reserved.get(carry)
        if of_carry is None:
            return True
        of_carry.by_hash.clear()
        left = [name for name, one in of_carry.requests.items() if not one.settled]
        for name in left[:AT_ONCE]:
            reserved = of_carry.requests[name]
            reserved.settled = True
            if copied:
                self._cache(reserved)
            self._blocks.keep_promise(reserved.request, copied=copied)
            if not (copied and reserved.awaited):
                self._forget(carry, [name])
        return len(left) <= AT_ONCE

    def _cache(self, reserved: _Reserved) -> None:
        of_groups = zip(self._blocks.managers, reserved.tables, reserved.begins, strict=True)
        for manager, table, begin in of_groups:
            self._pool.cache_full_blocks(
                request=reserved.request,
                blocks=table,
                num_cached_blocks=begin,
                num_full_blocks=len(table),
                block_size=manager.block_size,
                kv_cache_group_id=manager.kv_cache_group_id,
            )

    def prefix(self, request_id: str) -> list[KVCacheBlock]:
        """Return the blocks of an expected request's first tokens that have their KV; []: none.

        ``adopt`` then need not look each of them up by its hash. With several KV groups it must,
        because vLLM says which part of a window's table a request needs.
        """
        for of_carry in self._reserved.values():
            reserved = of_carry.requests.get(request_id)
            if reserved is not None and reserved.settled:
                tables = reserved.tables
                return list(tables[0]) if len(tables) == 1 else []
        return []

    def let_go_later(self, request_id: str) -> None:
        """Let the next ``forget`` include a request that was adopted, and holds its blocks itself.

        It is remembered then, too. This takes a while, and the request's first step goes first.
        """
        self._adopted.append(self._scheduler.requests[request_id])

    def forget(self, request_ids: Collection[str]) -> None:
        """Let go of what is reserved for requests that were adopted, or do not come.

        While it is copied, somebody still writes to it: it comes free when that is settled.
        """
        gone, adopted, self._adopted = list(request_ids), self._adopted, []
        for request in adopted:
            gone.append(request.request_id)
            self.pinned.remember(request)
        for carry in list(self._reserved):
            self._forget(carry, gone)

    def _forget(self, carry: int, request_ids: Collection[str]) -> None:
        of_carry = self._reserved[carry]
        for request_id in of_carry.requests.keys() & request_ids:
            of_carry.requests[request_id].awaited = False
            if of_carry.requests[request_id].settled:
                tables = of_carry.requests.pop(request_id).tables
                self._pool.free_blocks(reversed(no_nulls(*tables)))
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

    @property
    def _manager(self) -> Any:
        return self._scheduler.kv_cache_manager

    @property
    def _pool(self) -> Any:
        return self._manager.block_pool


def _has_all(carried: CarriedRequest, begins: Sequence[int], end: int, size: int) -> bool:
    """Return whether the source still has the KV of all tokens that are to be copied.

    Args:
        carried: what it has.
        begins: for each KV group the first of the destination's blocks that is copied.
        end: the block after the last one.
        size: tokens of a block of the destination.
    """
    (groups, *_) = carried.blocks.values()
    for begin, blocks in zip(begins, groups, strict=True):
        each = carried.computed // len(blocks)
        if begin < end and NULL_BLOCK in blocks[begin * size // each : -(-end * size // each)]:
            return False
    return True


def _copied(copy: _Copy) -> Copied:
    try:
        return copied_by_all(copy.request_ids, copy.future)
    except RunnerDied as error:
        return Copied(copy.request_ids, 0, 0.0, str(error))
