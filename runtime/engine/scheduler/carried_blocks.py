"""The blocks of requests that come to a core with their KV, or leave it with it.

A request that comes gets its blocks when it is adopted, or before that while its last step in its
old unit runs: it is *allotted* them. Then they are in no prefix cache until it is adopted, because
nothing is read into them before that. Another request that begins alike waits until it is adopted,
too, so that it finds these blocks.

A request that is copied ahead is *promised* its blocks as soon as its first ones are reserved:
these, and some for the tokens that it makes until it comes. That is most of the work, and nobody
waits for it then. All that is left to do when they are allotted is to see that they suffice.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from vllm.v1.core.kv_cache_utils import KVCacheBlock, resolve_block_hashes
from vllm.v1.request import Request

from shoal.policies.values.layouts import Unit
from shoal.runtime.protocol.messages import AHEAD_TOKENS, CarriedRequest

Blocks = dict[int, list[list[int]]]
"""By member, the blocks of a request, for each KV group."""
PhysicalBlocks = Callable[[Sequence[int]], Mapping[int, list[int]]]
"""Turns block ids of the core into the ids of each member."""


class Place(NamedTuple):
    """The blocks that a request has got."""

    computed: int
    """For how many of its tokens the KV is to come."""
    begin: int
    """How many of these its unit had in its prefix cache."""
    groups: Sequence[list[int]]
    """The core's ids of the blocks of its computed tokens, for each KV group."""
    by_member: Blocks
    """The same as each member's own ids."""


class Filling(NamedTuple):
    """What is to be read into the blocks of a request."""

    place: Place
    described: Blocks
    """``CarriedRequest.blocks``, of which this was made."""
    computed: int
    """For how many of its tokens the KV is there once it is read."""
    begin: int
    """The first token that is read. What is in the prefix cache, or outside every window, is not.
    """
    blocks: list[int]
    """The core's ids of the blocks that are read into, of all KV groups."""
    cut: set[int]
    """Those of them inside which a window begins. The source may not have their first tokens any
    more, so nobody else may take them for complete."""
    source: Blocks
    """The blocks of which anything is read. Of long requests that were copied ahead these are few,
    and every member is sent them."""
    target: Blocks
    """Those that it goes to, as each member's own ids."""
    since: int
    """The token that the first of these blocks begins with."""

    def is_of(self, carried: CarriedRequest) -> bool:
        """Return whether a request has come with the blocks that it was announced with."""
        return self.described is carried.blocks


class CarriedBlocks:
    """Gives blocks to requests that come, and tells which ones others have.

    Args:
        unit: the core's unit.
        scheduler: vLLM's, of the core.
        physical: what backs the core's blocks.
    """

    def __init__(self, unit: Unit, scheduler: Any, physical: PhysicalBlocks) -> None:
        self._unit, self._scheduler, self._physical = unit, scheduler, physical
        self._allotted: dict[str, Place] = {}
        self._promised: dict[str, Place] = {}
        self._foreseen: dict[str, Filling] = {}
        """Of the allotted ones, what is to be read."""
        self._doubtful: set[str] = set()
        """Those of the promised requests whose first blocks are still read into."""
        self._unread: dict[str, bytes] = {}
        """Of those whose next block others may begin with, the hash of that block."""
        self.prefix_of: Callable[[str], Sequence[KVCacheBlock]] = lambda _: ()
        """The blocks of a request's first tokens, if somebody holds them for it."""

    def computed(self, request: Request, tokens: int | None = None) -> Sequence[list[int]]:
        """Return the blocks of a request's computed tokens, for each KV group.

        Args:
            request: the request.
            tokens: how many tokens to take for computed; None: as many as vLLM does.
        """
        groups: Sequence[list[int]] = self._manager.get_block_ids_for_computed_tokens(
            request.request_id, request.num_computed_tokens if tokens is None else tokens
        )
        return groups

    def by_member(self, groups: Sequence[list[int]]) -> Blocks:
        """Return each member's own ids of blocks of the core, for each KV group."""
        mapped = [self._physical(group) for group in groups]
        return {engine: [group[engine] for group in mapped] for engine in self._unit.engines}

    def tables_by_member(self, tables: Iterable[Sequence[KVCacheBlock]]) -> Blocks:
        """Return the same of the blocks of each KV group, as vLLM has them."""
        return self.by_member([[block.block_id for block in table] for table in tables])

    # --- requests that come ---

    def promise(self, request: Request, first: Sequence[Sequence[KVCacheBlock]]) -> bool:
        """Give a request blocks while its first ones are read into; return whether it has them.

        Args:
            request: the request, with the tokens that are known by now.
            first: the blocks of its first tokens, for each KV group.
        """
        hits = self._manager.create_kv_cache_blocks(tuple(map(list, first)))
        held, length = len(first[0]) * self.block_tokens, request.num_tokens + AHEAD_TOKENS
        place = self._allocate(request, hits, held, held, length, cache=False)
        if place is None:
            return False
        self._promised[request.request_id] = place
        self._doubtful.add(request.request_id)
        return True

    def keep_promise(self, request: Request, *, copied: bool) -> None:
        """Say that nobody reads into a request's first blocks any more.

        Args:
            request: the request.
            copied: whether they hold its KV.
        """
        if copied:
            self._doubtful.discard(request.request_id)
        elif request.request_id in self._promised:
            self.forget(request)

    def allot(self, request: Request, computed: int, length: int) -> bool:
        """Give a request blocks before it comes; return whether it has them.

        Args:
            request: the request, with the tokens that are known by now.
            computed: how many of its tokens will come with their KV.
            length: how many tokens it will have.
        """
        if request.request_id in self._allotted:
            return True
        place = self._as_promised(request, computed, length)
        hits, cached = (None, place.begin) if place else self._lookup(request)
        missing = self._missing(request, cached, computed)
        if missing in self._unread.values():
            self.forget(request)
            return False
        if place is None:
            place = self._allocate(request, hits, cached, computed, length, cache=False)
        if place is None:
            return False
        self._promised.pop(request.request_id, None)
        self._allotted[request.request_id] = place
        if missing is not None:
            self._unread[request.request_id] = missing
        return True

    def take(self, request: Request, computed: int) -> Place | None:
        """Return the blocks of a request that has come with all its tokens; None: no room.

        Those of the blocks that are full are in the prefix cache from now on.
        """
        place, length = self._allotted.get(request.request_id), request.num_tokens
        place = place or self._as_promised(request, computed, length)
        if place is None or place.computed != computed:
            self.forget(request)
            return self._allocate(request, *self._lookup(request), computed, length, cache=True)
        for known in (self._allotted, self._promised, self._unread):
            known.pop(request.request_id, None)
        self._manager.cache_blocks(request, max(place.begin, computed))
        return place

    def _as_promised(self, request: Request, computed: int, length: int) -> Place | None:
        """Return what a request was promised, for all tokens that come; None: that is not enough.

        If so, the blocks are free again.
        """
        place = self._promised.get(request.request_id)
        if place is None:
            return None
        size, groups = self.block_tokens, self._manager.get_blocks(request.request_id).blocks
        has_all = min(map(len, groups)) * size >= self.most_tokens(request, length)
        if request.request_id in self._doubtful or computed < place.computed or not has_all:
            self.forget(request)
            return None
        more = [
            [block.block_id for block in group[len(known) : -(-computed // size)]]
            for known, group in zip(place.groups, groups, strict=True)
        ]
        of_members = {
            engine: [known + new for known, new in zip(place.by_member[engine], added, strict=True)]
            for engine, added in self.by_member(more).items()
        }
        grown = [known + new for known, new in zip(place.groups, more, strict=True)]
        return Place(computed, place.begin, grown, of_members)

    def forget(self, request: Request) -> None:
        """Free what a request was promised or allotted, if it was."""
        request_id = request.request_id
        places = self._promised.pop(request_id, None), self._allotted.pop(request_id, None)
        self._doubtful.discard(request_id)
        self._foreseen.pop(request_id, None)
        if places == (None, None):
            return
        self._unread.pop(request_id, None)
        freed = set().union(*self._manager.get_block_ids(request_id))
        self._manager.free(request)
        # The next step must not zero what others may have by then, and may have read.
        for manager in self.managers:
            manager.new_block_ids = [b for b in manager.new_block_ids if b not in freed]

    def are_allotted(self, blocks: Collection[int]) -> bool:
        """Return whether a request that has not come yet has found any of these blocks."""
        found = (
            group[: place.begin // self.block_tokens]
            for place in (*self._promised.values(), *self._allotted.values())
            for group in place.groups
        )
        return not set(blocks).isdisjoint(set().union(*found))

    def _lookup(self, request: Request) -> tuple[Any, int]:
        """Return vLLM's ``KVCacheBlocks`` of what is cached of a request, and their tokens."""
        cached = len(prefix := self.prefix_of(request.request_id)) * self.block_tokens
        if 0 < cached < request.num_tokens:
            return self._manager.create_kv_cache_blocks((prefix,)), cached
        hits, cached, _ = self._manager.get_computed_blocks(request)
        return hits, int(cached)

    def _missing(self, request: Request, cached: int, computed: int) -> bytes | None:
        """Return the hash of the first block that is not cached; None: nobody can share it."""
        nth = cached // self.block_tokens
        if not self.looks_up(request) or nth >= computed // self.block_tokens:
            return None
        hashes = self.hashes(request)
        return hashes[nth] if nth < len(hashes) else None

    def _allocate(
        self, request: Request, hits: Any, cached: int, computed: int, length: int, *, cache: bool
    ) -> Place | None:
        """Give a request blocks; None: there is no room.

        There are blocks for all its tokens, also those that are not computed yet, and for the
        drafts that its first step may check: a request that waits and holds blocks must be able to
        run, or it would wait for others, and they for it.
        """
        manager = self._manager
        allocated = manager.allocate_slots(
            request,
            0,
            num_new_computed_tokens=cached,
            new_computed_blocks=hits,
            num_lookahead_tokens=self.most_tokens(request, length) - max(cached, computed),
            num_external_computed_tokens=max(0, computed - cached),
            delay_cache_blocks=not cache,
            has_scheduled_reqs=bool(self._scheduler.running),
            # If vLLM zeroes new blocks, it does so with the next step, which comes after the copy.
            skip_zeroing_group_ids=tuple(range(manager.num_kv_cache_groups)),
        )
        if allocated is None:
            return None
        groups = self.computed(request, max(cached, computed))
        return Place(computed, cached, groups, self.by_member(groups))

    def most_tokens(self, request: Request, length: int = 0) -> int:
        """Return the tokens of a request after a step that goes on with it, drafts included.

        vLLM gives such a step as many drafts as any has, though nothing is proposed yet. A draft
        model has KV of the tokens that it proposes then, too.

        Args:
            request: the request.
            length: how many tokens it has, if that is more than are known here.
        """
        scheduler, known = self._scheduler, max(length, request.num_tokens)
        return int(known + scheduler.num_spec_tokens + scheduler.num_lookahead_tokens)

    def foresee(self, request: Request, carried: CarriedRequest) -> None:
        """Find out what ``filling`` will say of a request that has just been allotted blocks."""
        place = self._allotted[request.request_id]
        self._foreseen[request.request_id] = self._fill(place, carried)

    def filling_of(self, request_id: str) -> Filling | None:
        """Return what was foreseen of a request; None: nothing was."""
        return self._foreseen.get(request_id)

    def foreseen(self, carried: CarriedRequest) -> Filling | None:
        """Return what ``filling`` will say of a request that comes as it was announced.

        None: that is not known, because it was not allotted blocks, or comes otherwise.
        """
        filling = self._foreseen.get(carried.request_id)
        if filling is None or not filling.is_of(carried):
            return None
        is_current = self._allotted.get(carried.request_id) is filling.place
        return filling if is_current and filling.place.computed == carried.computed else None

    def filling(self, place: Place, carried: CarriedRequest) -> Filling:
        """Return what is to be read into the blocks that ``take`` has returned."""
        filling = self._foreseen.pop(carried.request_id, None)
        if filling is None or filling.place is not place or not filling.is_of(carried):
            filling = self._fill(place, carried)
        if filling.cut:
            self._manager.block_pool.evict_blocks(filling.cut)
        return filling

    def _fill(self, place: Place, carried: CarriedRequest) -> Filling:
        computed = max(place.begin, carried.computed)
        unneeded = [manager.get_num_skipped_tokens(computed) for manager in self.managers]
        begin = max(place.begin, min(unneeded))
        filled, cut = list[int](), set[int]()
        for group, first_needed in zip(place.groups, unneeded, strict=True):
            first, within = divmod(max(begin, first_needed), self.block_tokens)
            blocks = group[first:]
            if within:
                cut.update(blocks[:1])
            filled += blocks
        named = self._to_read(begin, carried, place)
        return Filling(place, carried.blocks, computed, begin, filled, cut, *named)

    def _to_read(
        self, begin: int, carried: CarriedRequest, place: Place
    ) -> tuple[Blocks, Blocks, int]:
        """Return the last three parts of a ``Filling``."""
        size, other = self.block_tokens, carried.block_tokens
        if not other or begin < (together := math.lcm(size, other)):
            return carried.blocks, place.by_member, 0
        since = begin - begin % together
        named, filled = since // other, since // size
        source = {e: [group[named:] for group in of] for e, of in carried.blocks.items()}
        target = {e: [group[filled:] for group in of] for e, of in place.by_member.items()}
        return source, target, since

    # --- vLLM's ---

    def looks_up(self, request: Request) -> bool:
        """Return whether a request takes what is in the prefix cache."""
        return bool(self._manager.prefix_cache_lookup_enabled(request))

    def hashes(self, request: Request) -> Sequence[bytes]:
        """Return the hashes of a request's full blocks."""
        pool, size = self._manager.block_pool, self.block_tokens
        hashes: Sequence[bytes] = resolve_block_hashes(
            request.block_hashes, pool.hash_block_size, size
        )
        return hashes

    @cached_property
    def managers(self) -> Sequence[Any]:
        """VLLM's managers of the groups of KV blocks."""
        managers: Sequence[Any] = self._manager.coordinator.single_type_managers
        return managers

    @cached_property
    def block_tokens(self) -> int:
        """Tokens of a block, in every group of KV blocks (``check_kv_groups``)."""
        return int(self.managers[0].block_size)

    @property
    def _manager(self) -> Any:
        return self._scheduler.kv_cache_manager


def estimate_once(manager: Any) -> None:
    """Let vLLM's manager look through a request's blocks with its first output only.

    A request that goes on here has statistics of a prompt again (``CarriedRequests._take``). What
    it has cached is in no answer any more, and to add it up takes 20 microseconds for each 1,000
    tokens, while all requests that have come stand still.
    """
    estimate = manager.estimate_cached_tokens

    def estimated(request: Request) -> int:
        return 0 if request.num_output_tokens > 1 else int(estimate(request))

    manager.estimate_cached_tokens = estimated
