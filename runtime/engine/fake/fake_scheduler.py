"""Which requests the fake engine's next step computes, and which KV blocks they hold.

A small version of vLLM's ``Scheduler`` and ``KVCacheManager``: continuous batching, chunked
prefill, preemption by recomputing, prefixes that are found in the cache. In a pipeline, a step
leaves out what is in flight already: requests that decode, and chunks of prompts.
"""

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from shoal.runtime.clock import Clock
from shoal.runtime.config import FakeSettings
from shoal.runtime.engine.agent.results import CoreLoad
from shoal.runtime.engine.fake.fake_blocks import FakeBlocks
from shoal.runtime.engine.fake.fake_request import FakeRequest
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.messages import LayoutLimits

STEPS_AHEAD = 2
"""For so many full steps a lease has blocks that cache nothing, as in the real cores."""
Batch = list[tuple[FakeRequest, int]]
"""Requests, and how many of their tokens one step computes."""


def _rank(waiting: FakeRequest) -> tuple[bool, int, float]:
    return not waiting.blocks, waiting.priority, waiting.arrival + waiting.patience


class FakeScheduler:
    """The requests of one core.

    Args:
        limits: batch size, block size and length of the core's layout.
        settings: the settings of the node's fake engines.
        pool: the core's blocks.
        clock: gives the times of the events that outputs report.
    """

    def __init__(
        self, limits: LayoutLimits, settings: FakeSettings, pool: FakeBlocks, clock: Clock
    ) -> None:
        self.pool = pool
        self.running: list[FakeRequest] = []
        self.waiting: deque[FakeRequest] = deque()
        """Requests to start, in order. Those that were carried here with their KV hold blocks."""
        self.parked: dict[str, FakeRequest] = {}
        """Exported requests."""
        self._limits = limits
        self._caches = settings.prefix_caching
        self._budget = settings.max_num_batched_tokens
        self._longest_run = settings.steps_at_once
        self._clock = clock

    @property
    def load(self) -> CoreLoad:
        """What the core holds."""
        done = ((len(request.prompt), request.scheduled) for request in self.running)
        return CoreLoad.of(len(self.running), len(self.waiting), len(self.pool), done)

    # --- requests -----------------------------------------------------------------------------

    @property
    def requests(self) -> list[FakeRequest]:
        """Every request, those that run first."""
        return [*self.running, *self.waiting, *self.parked.values()]

    def add(self, request: FakeRequest, patience: float = 0.0) -> None:
        """Queue a request as if it had come ``patience`` seconds later.

        Raises:
            ValueError: there is already a request with its id.
        """
        self.check_is_new(request)
        self._note(request, wire.EventType.QUEUED)
        request.came = self._clock()
        request.patience = patience
        self._queue(request)

    def check_is_new(self, request: FakeRequest) -> None:
        """Check that no request has the id of this one.

        Raises:
            ValueError: there is already a request with its id.
        """
        if any(other.id == request.id for other in self.requests):
            raise ValueError(f"request {request.id} exists already")

    def adopt(self, request: FakeRequest, tokens: Sequence[int], computed: int) -> bool:
        """Queue a request that comes from another core.

        As in the real cores, those with blocks go first, and each kind goes in the order of
        priority and arrival.

        Args:
            request: the request.
            tokens: its output tokens.
            computed: how many of its tokens will have their KV in the blocks that it gets.

        Returns:
            Whether there were blocks enough; if not, the request is not queued.
        """
        request.extend(tokens[len(request.generated) :])  # it may have been tried before
        if tokens:
            request.hits = 0
        if computed and not self._reserve(request):
            return False
        request.computed = max(request.computed, computed)
        request.is_unsure = computed > 0
        self._cache(request, request.computed)
        self._note(request, wire.EventType.QUEUED)
        self._queue(request)
        return True

    def _queue(self, request: FakeRequest, *, again: bool = False) -> None:
        bisect = bisect_left if again else bisect_right
        self.waiting.insert(bisect(self.waiting, _rank(request), key=_rank), request)

    def allot(
        self,
        request: FakeRequest,
        tokens: Sequence[int],
        length: int,
        beside: Iterable[FakeRequest],
    ) -> bool:
        """Give a request that is about to come the blocks that it needs.

        Args:
            request: the request; it is in no queue.
            tokens: its output tokens by now.
            length: how many tokens it will have.
            beside: other requests that were allotted blocks, which are in no cache yet.

        Returns:
            Whether it has blocks: there were enough, and it will not find those of others.
        """
        request.extend(tokens[len(request.generated) :])
        size, found = self._limits.block_tokens, len(self._find(request))
        missing = request.prefixes(size)[found : found + 1]
        alike = (other.prefixes(size)[found : found + 1] == missing for other in beside)
        if missing and self.looks_up(request) and any(alike):
            return False
        return self._reserve(request, length - request.tokens)

    def park(self, ids: Sequence[str]) -> list[FakeRequest]:
        """Take requests out of the queues, with their blocks; return those that there are."""
        wanted = set(ids)
        self.parked |= {r.id: r for r in self.requests if r.id in wanted}
        self.running = [r for r in self.running if r.id not in wanted]
        self.waiting = deque(r for r in self.waiting if r.id not in wanted)
        return [self.parked[id_] for id_ in ids if id_ in self.parked]

    def unpark(self, ids: Sequence[str]) -> None:
        """Put parked requests back into the queues; unknown ids are ignored."""
        for request in [self.parked.pop(id_) for id_ in ids if id_ in self.parked]:
            if request.blocks:
                self.running.append(request)
            else:
                self._queue(request, again=True)

    def remove(self, ids: Collection[str]) -> None:
        """Forget requests and free their blocks; unknown ids are ignored."""
        for request in self.requests:
            if request.id in ids:
                self.free(request)
        self.running = [r for r in self.running if r.id not in ids]
        self.waiting = deque(r for r in self.waiting if r.id not in ids)
        self.parked = {id_: r for id_, r in self.parked.items() if id_ not in ids}

    def drop_ended(self) -> None:
        """Forget running requests that have all their tokens, and free their blocks."""
        for request in [request for request in self.running if request.tokens_left <= 0]:
            self._cache(request, request.computed)
            self.free(request)
            self.running.remove(request)

    def _note(self, request: FakeRequest, event: wire.EventType) -> None:
        request.events.append(wire.Event(event, self._clock()))

    # --- steps --------------------------------------------------------------------------------

    def schedule(self, known_until: float = math.inf) -> tuple[Batch, bool]:
        """Give running requests their share of the next step, then start waiting ones that fit.

        Args:
            known_until: while others run, requests that came later wait for the step after it.

        Returns:
            What the step computes, and whether the step after it is another one in any case: a
            request was preempted for others, or came too late.
        """
        batch: Batch = []
        budget = self._tokens()
        preempted = late = False
        number = 0
        while number < len(self.running) and budget > 0:
            request = self.running[number]
            number += 1
            if request.scheduled == request.tokens:
                continue
            while not self._make_room(request):
                preempted = True
                victim = self._victim(number - 1)
                if victim is not None:
                    self.preempt(victim)
                if victim is None or victim is request:
                    break
            else:
                budget -= self._compute(request, budget, batch)
        while not preempted and self.waiting and budget > 0:
            first = self._next(known_until)
            late = late or first is not self.waiting[0]
            if first is None:
                break
            reserve = self._reserve if self.running else self._make_room
            if len(self.running) >= self._limits.max_num_seqs or not reserve(first):
                break
            self.waiting.remove(first)
            self.running.append(first)
            first.patience = 0.0  # one that has begun lets nobody pass
            self._note(first, wire.EventType.SCHEDULED)
            if first.hits is None:
                first.hits = first.computed
            budget -= self._compute(first, budget, batch)
        return batch, preempted or late

    def _next(self, known_until: float) -> FakeRequest | None:
        """Return the first waiting request that has not come too late; None: there is none."""
        waiting = iter(self.waiting)
        if not self.running:
            return next(waiting)
        return next((one for one in waiting if one.came <= known_until), None)

    def _tokens(self) -> int:
        """Return the most tokens of the next step, as ``StepSizes`` does for vLLM's scheduler."""
        limit = self._limits.mixed_tokens
        decodes = sum(one.scheduled >= one.tokens - 1 for one in self.running) if limit else 0
        return min(self._budget, limit + decodes) if decodes else self._budget

    def _compute(self, request: FakeRequest, budget: int, batch: Batch) -> int:
        """Add a request to the next step; return how many of its tokens that computes."""
        share = min(request.tokens - request.scheduled, budget)
        batch.append((request, share))
        self._cache(request, request.scheduled + share)
        return share

    def run_length(self, batch: Batch) -> int:
        """Return how many steps like this one follow each other if nothing intervenes.

        Reserves their blocks.
        """
        if self._longest_run == 1 or not all(request.decodes for request, _ in batch):
            return 1
        count = min(self._longest_run, *(request.tokens_left for request, _ in batch))
        while count > 1:
            lacking = [self._needs(request, count - 1) for request, _ in batch]
            if sum(lacking) <= len(self.pool):
                for (request, _), blocks in zip(batch, lacking, strict=True):
                    request.blocks += self.pool.take(blocks)
                break
            count //= 2
        return count

    # --- blocks -------------------------------------------------------------------------------

    def _reserve(self, request: FakeRequest, ahead: int = 0) -> bool:
        """Give a request blocks for all its tokens, computed or not, if enough are free.

        With ``ahead``, there are blocks for so many further tokens.

        One without blocks gets those that cache its beginning, and need not compute that part. As
        in vLLM, these are full blocks, and at least one token is left to compute.
        """
        found = [] if request.blocks else self._find(request)
        lacking = self._needs(request, ahead) - len(found)
        if lacking + self.pool.unheld(found) > len(self.pool):
            return False
        if found:
            self.pool.hold(found)
            request.blocks = found
            request.written = request.cached = request.shared = len(found)
            request.computed = len(found) * self._limits.block_tokens
            request.is_unsure = True
        request.blocks += self.pool.take(lacking)
        return True

    def looks_up(self, request: FakeRequest) -> bool:
        """Return whether a request takes what is cached."""
        return self._caches and request.reads_cache

    def _find(self, request: FakeRequest) -> list[int]:
        if not self.looks_up(request):
            return []
        size = self._limits.block_tokens
        return self.pool.find(request.prefixes(size)[: (request.tokens - 1) // size])

    def _cache(self, request: FakeRequest, tokens: int) -> None:
        """Cache the blocks that are full once a request has ``tokens`` computed tokens.

        As in vLLM, they are cached when the step that fills them is scheduled: whoever finds them
        computes in this step, too, or later.
        """
        full = min(tokens, request.tokens) // self._limits.block_tokens
        if self._caches and full > request.cached:
            self.cache(request, request.blocks[:full], request.cached)
            request.cached = full

    def cache(self, request: FakeRequest, blocks: Sequence[int], begin: int) -> None:
        """Cache the first blocks of a request, those before ``begin`` being cached already."""
        prefixes = request.prefixes(self._limits.block_tokens)
        for block, prefix in zip(blocks[begin:], prefixes[begin:], strict=False):
            self.pool.cache(block, prefix)

    def _make_room(self, request: FakeRequest) -> bool:
        """Like ``_reserve``, but waiting requests lose their blocks for it, the last one first."""
        while not self._reserve(request):
            holders = self._holders
            if not holders or holders == [request]:
                return False
            self.free(holders[-1])
        return True

    @property
    def _holders(self) -> list[FakeRequest]:
        """Waiting requests that hold blocks."""
        return [request for request in self.waiting if request.blocks]

    def _needs(self, request: FakeRequest, ahead: int = 0) -> int:
        """Return the blocks that a request lacks to have ``ahead`` tokens more than it has."""
        blocks = -(-(request.tokens + ahead) // self._limits.block_tokens)
        return max(0, blocks - len(request.blocks))

    def _victim(self, begin: int) -> FakeRequest | None:
        """Return the latest running request that no step computes; None: there is none.

        Args:
            begin: those before this one may be in the step that is scheduled.
        """
        return next((one for one in reversed(self.running[begin:]) if not one.in_flight), None)

    def preempt(self, request: FakeRequest) -> None:
        """Take a running request's blocks; it waits, before those that came later."""
        self.free(request)
        self._note(request, wire.EventType.PREEMPTED)
        self.running.remove(request)
        self._queue(request, again=True)

    def preempt_until(self, free: int) -> None:
        """Take blocks from waiting requests, then from running ones, until ``free`` are free.

        The latest requests lose their blocks first; exported ones keep them.
        """
        while len(self.pool) < free:
            if holders := self._holders:
                self.free(holders[-1])
            elif self.running:
                self.preempt(self.running[-1])
            else:
                return

    def free(self, request: FakeRequest) -> None:
        """Take a request's blocks from it: it has no KV any more."""
        # The last block first: without the blocks before it, a block is of no use to anybody.
        self.pool.give(reversed(request.blocks))
        request.blocks = []
        request.computed = request.written = request.cached = request.shared = 0
        request.is_unsure = False

    @property
    def held(self) -> list[int]:
        """The block ids that requests hold."""
        return [block for request in self.requests for block in request.blocks]

    @property
    def blocks_lacking(self) -> int:
        """See ``GroupCore.blocks_lacking``."""
        slots = self._limits.max_num_seqs - len(self.running)
        waiting = sum(self._needs(request) for request in list(self.waiting)[:slots])
        return max(0, self._growth + waiting - len(self.pool))

    @property
    def _growth(self) -> int:
        """The blocks that running requests need before the next chance to grow.

        Steps must find their blocks when they start, so they are asked for during earlier steps.
        Like a real core, this one asks at least for the next block of each request.
        """
        ahead = max(2 * self._longest_run - 1, self._limits.block_tokens)
        return sum(self._needs(request, ahead) for request in self.running)

    @property
    def blocks_wanted(self) -> int:
        """See ``GroupCore.blocks_wanted``."""
        if not self._caches:
            return 0
        of_step = min(self._budget, self._limits.max_model_len) // self._limits.block_tokens + 1
        enough = self._growth + STEPS_AHEAD * of_step
        uncached = self.pool.uncached(enough)
        return enough + of_step - uncached if uncached < enough else 0
