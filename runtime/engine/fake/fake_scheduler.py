"""Which requests the fake engine's next step computes, and which KV blocks they hold.

A small version of vLLM's ``Scheduler`` and ``KVCacheManager``: continuous batching, chunked
prefill, preemption by recomputing.
"""

from collections import deque
from collections.abc import Collection, Sequence

from shoal.runtime.clock import Clock
from shoal.runtime.config import FakeSettings
from shoal.runtime.engine.fake.fake_tokens import digest_of, next_token
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.messages import LayoutLimits


class BlockIds:
    """Free block ids, physical or virtual; gives out the lowest, so that runs are reproducible."""

    def __init__(self, blocks: Sequence[int] = ()) -> None:
        self._free = sorted(blocks, reverse=True)

    def __len__(self) -> int:
        return len(self._free)

    @property
    def ids(self) -> list[int]:
        """Return the free ids; the next one given out is the last."""
        return self._free

    def take(self, count: int) -> list[int]:
        """Take out and return up to ``count`` ids."""
        return [self._free.pop() for _ in range(min(count, len(self._free)))]

    def give(self, blocks: Sequence[int]) -> None:
        """Put ids back; the caller has checked that they are not there."""
        self._free.extend(reversed(blocks))


class FakeRequest:
    """A request inside a core. ``blocks`` is empty while it has no KV."""

    def __init__(self, view: wire.RequestView, prompt: list[int], max_tokens: int) -> None:
        self.id = view.request_id
        self.sampling = view.sampling_params or wire.Sampling()
        self.client = view.client_index
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.generated: list[int] = []
        self.tokens = len(prompt)
        """All its tokens, computed or not."""
        self.digest = digest_of(prompt)
        self.blocks: list[int] = []
        self.computed = 0
        """Tokens whose KV is in the cache."""
        self.headers = view.headers
        self.events: list[wire.Event] = []
        """Events that no output has reported yet."""

    def generate(self) -> int:
        """Return the next token."""
        token = next_token(self.digest)
        self.generated.append(token)
        self.tokens += 1
        self.digest = digest_of([token], self.digest)
        return token

    @property
    def tokens_left(self) -> int:
        """Tokens that the request may still generate."""
        return self.max_tokens - len(self.generated)

    @property
    def decodes(self) -> bool:
        """Whether its next step computes its last token and nothing else."""
        return self.computed > 0 and self.tokens - self.computed == 1


Batch = list[tuple[FakeRequest, int]]
"""Requests, and how many of their tokens one step computes."""


class FakeScheduler:
    """The requests of one core.

    Args:
        limits: batch size, block size and length of the core's layout.
        settings: the settings of the node's fake engines.
        pool: blocks that no request holds.
        clock: gives the times of the events that outputs report.
    """

    def __init__(
        self, limits: LayoutLimits, settings: FakeSettings, pool: BlockIds, clock: Clock
    ) -> None:
        self.pool = pool
        self.running: list[FakeRequest] = []
        self.waiting: deque[FakeRequest] = deque()
        self._limits = limits
        self._budget = settings.max_num_batched_tokens
        self._longest_run = settings.steps_at_once
        self._clock = clock

    # --- requests -----------------------------------------------------------------------------

    @property
    def requests(self) -> list[FakeRequest]:
        """Every request, those that run first."""
        return [*self.running, *self.waiting]

    def add(self, request: FakeRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: there is already a request with its id.
        """
        if any(other.id == request.id for other in self.requests):
            raise ValueError(f"request {request.id} exists already")
        self._note(request, wire.EventType.QUEUED)
        self.waiting.append(request)

    def remove(self, ids: Collection[str]) -> None:
        """Forget requests and free their blocks; unknown ids are ignored."""
        for request in self.requests:
            if request.id in ids:
                self.free(request)
        self.running = [r for r in self.running if r.id not in ids]
        self.waiting = deque(r for r in self.waiting if r.id not in ids)

    def drop_ended(self) -> None:
        """Forget running requests that have all their tokens, and free their blocks."""
        for request in [request for request in self.running if request.tokens_left <= 0]:
            self.free(request)
            self.running.remove(request)

    def _note(self, request: FakeRequest, event: wire.EventType) -> None:
        request.events.append(wire.Event(event, self._clock()))

    # --- steps --------------------------------------------------------------------------------

    def schedule(self) -> tuple[Batch, bool]:
        """Give running requests their share of the next step, then start waiting ones that fit.

        Returns what the step computes, and whether a request was preempted for other ones.
        """
        batch: Batch = []
        budget = self._budget
        preempted = False
        while len(batch) < len(self.running) and budget > 0:
            request = self.running[len(batch)]
            while not self._reserve(request):
                preempted = True
                victim = self.running[-1]
                self._preempt(victim)
                if victim is request:
                    break
            else:
                share = min(request.tokens - request.computed, budget)
                batch.append((request, share))
                budget -= share
        while not preempted and self.waiting and budget > 0:
            request = self.waiting[0]
            if len(self.running) >= self._limits.max_num_seqs or not self._reserve(request):
                break
            share = min(request.tokens, budget)
            self.running.append(self.waiting.popleft())
            self._note(request, wire.EventType.SCHEDULED)
            batch.append((request, share))
            budget -= share
        return batch, preempted

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

    def _reserve(self, request: FakeRequest) -> bool:
        """Give a request blocks for all its tokens, computed or not, if enough are free."""
        lacking = self._needs(request)
        if lacking > len(self.pool):
            return False
        request.blocks += self.pool.take(lacking)
        return True

    def _needs(self, request: FakeRequest, ahead: int = 0) -> int:
        """Return the blocks that a request lacks to have ``ahead`` tokens more than it has."""
        blocks = -(-(request.tokens + ahead) // self._limits.block_tokens)
        return max(0, blocks - len(request.blocks))

    def _preempt(self, request: FakeRequest) -> None:
        self.free(request)
        self._note(request, wire.EventType.PREEMPTED)
        self.running.remove(request)
        self.waiting.appendleft(request)

    def preempt_until(self, free: int) -> None:
        """Preempt running requests, latest first, until ``free`` blocks are free or none runs."""
        while self.running and len(self.pool) < free:
            self._preempt(self.running[-1])

    def free(self, request: FakeRequest) -> None:
        """Take a request's blocks from it: it has no KV any more."""
        self.pool.give(request.blocks)
        request.blocks = []
        request.computed = 0

    @property
    def held(self) -> list[int]:
        """The block ids that requests hold."""
        return [block for request in self.requests for block in request.blocks]

    @property
    def blocks_wanted(self) -> int:
        """See ``GroupCore.blocks_wanted``."""
        slots = self._limits.max_num_seqs - len(self.running)
        waiting = sum(self._needs(request) for request in list(self.waiting)[:slots])
        # Steps must find their blocks when they start, so ask for them during earlier steps.
        ahead = 2 * self._longest_run - 1
        running = sum(self._needs(request, ahead) for request in self.running)
        return max(0, running + waiting - len(self.pool))

    @property
    def spare_blocks(self) -> int:
        """See ``BlockLender.spare_blocks``."""
        longest = self._limits.max_model_len
        bounded = [r for r in self.requests if r.tokens + r.tokens_left < longest]
        return max(0, len(self.pool) - sum(self._needs(r, r.tokens_left) for r in bounded))
