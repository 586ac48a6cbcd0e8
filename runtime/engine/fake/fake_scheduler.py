"""Which requests the fake engine's next step computes, and which KV blocks they hold.

A small version of vLLM's ``Scheduler`` and ``KVCacheManager``: continuous batching, chunked
prefill, preemption by recomputing.
"""

from collections import Counter, deque
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
        self._more: Counter[int] = Counter()
        """How many hold a block beside the first one."""

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
        """Put ids back that the caller has held; those that others hold, too, do not come free."""
        free = []
        for block in blocks:
            if self._more[block]:
                self._more[block] -= 1
            else:
                free.append(block)
        self._free.extend(reversed(free))

    def hold(self, blocks: Sequence[int]) -> None:
        """Note that somebody else holds blocks, too."""
        self._more.update(blocks)


class FakeRequest:
    """A request inside a core. ``blocks`` is empty while it has no KV.

    Args:
        view: what the front end sent.
        prompt: its prompt's token ids.
        max_tokens: most output tokens, those included that other cores have generated.
        tokens: output tokens that other cores have generated.
    """

    def __init__(
        self,
        view: wire.RequestView,
        prompt: list[int],
        max_tokens: int,
        tokens: Sequence[int] = (),
    ) -> None:
        self.id = view.request_id
        self.sampling = view.sampling_params or wire.Sampling()
        self.client = view.client_index
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.generated: list[int] = []
        """All its output tokens."""
        self.tokens = len(prompt)
        """All its tokens, computed or not."""
        self.digest = digest_of(prompt)
        self.is_new = True
        """Whether this core has sent no output of it yet."""
        self.blocks: list[int] = []
        self.written = 0
        """How many of its blocks are known to hold its tokens."""
        self.computed = 0
        """Tokens whose KV is in the cache."""
        self.headers = view.headers
        self.events: list[wire.Event] = []
        """Events that no output has reported yet."""
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add output tokens that other cores have generated."""
        self.generated += tokens
        self.tokens += len(tokens)
        self.digest = digest_of(tokens, self.digest)

    def spoil(self) -> None:
        """Let its next tokens be wrong, because its KV is not its own."""
        self.digest = digest_of([0], self.digest)

    def generate(self) -> int:
        """Return the next token."""
        token = next_token(self.digest)
        self.extend([token])
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
        """Requests to start, in order. Those that were carried here with their KV hold blocks."""
        self.parked: dict[str, FakeRequest] = {}
        """Exported requests."""
        self._limits = limits
        self._budget = settings.max_num_batched_tokens
        self._longest_run = settings.steps_at_once
        self._clock = clock

    # --- requests -----------------------------------------------------------------------------

    @property
    def requests(self) -> list[FakeRequest]:
        """Every request, those that run first."""
        return [*self.running, *self.waiting, *self.parked.values()]

    def add(self, request: FakeRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: there is already a request with its id.
        """
        self.check_is_new(request)
        self._note(request, wire.EventType.QUEUED)
        self.waiting.append(request)

    def check_is_new(self, request: FakeRequest) -> None:
        """Check that no request has the id of this one.

        Raises:
            ValueError: there is already a request with its id.
        """
        if any(other.id == request.id for other in self.requests):
            raise ValueError(f"request {request.id} exists already")

    def adopt(self, request: FakeRequest, tokens: Sequence[int], computed: int) -> bool:
        """Queue a request that another core has computed, before those that no core has.

        Args:
            request: the request.
            tokens: its output tokens.
            computed: how many of its tokens will have their KV in the blocks that it gets.

        Returns:
            Whether there were blocks enough; if not, nothing has changed.
        """
        if computed and self._needs(request, len(tokens)) > len(self.pool):
            return False
        request.extend(tokens)
        if computed:
            self._reserve(request)
        request.computed = computed
        self._note(request, wire.EventType.QUEUED)
        self.waiting.insert(len(self._holders), request)
        return True

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
                self.waiting.append(request)

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
            while not self._make_room(request):
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
            reserve = self._reserve if self.running else self._make_room
            if len(self.running) >= self._limits.max_num_seqs or not reserve(request):
                break
            share = min(request.tokens - request.computed, budget)
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

    def _preempt(self, request: FakeRequest) -> None:
        self.free(request)
        self._note(request, wire.EventType.PREEMPTED)
        self.running.remove(request)
        self.waiting.appendleft(request)

    def preempt_until(self, free: int) -> None:
        """Take blocks from waiting requests, then from running ones, until ``free`` are free.

        The latest requests lose their blocks first; exported ones keep them.
        """
        while len(self.pool) < free:
            if holders := self._holders:
                self.free(holders[-1])
            elif self.running:
                self._preempt(self.running[-1])
            else:
                return

    def free(self, request: FakeRequest) -> None:
        """Take a request's blocks from it: it has no KV any more."""
        self.pool.give(request.blocks)
        request.blocks = []
        request.computed = 0
        request.written = 0

    @property
    def held(self) -> list[int]:
        """The block ids that requests hold."""
        return [block for request in self.requests for block in request.blocks]

    @property
    def blocks_wanted(self) -> int:
        """See ``GroupCore.blocks_wanted``."""
        slots = self._limits.max_num_seqs - len(self.running)
        waiting = sum(self._needs(request) for request in list(self.waiting)[:slots])
        # Steps must find their blocks when they start, so ask for them during earlier steps. Like
        # a real core, this one asks at least for the next block of each request.
        ahead = max(2 * self._longest_run - 1, self._limits.block_tokens)
        running = sum(self._needs(request, ahead) for request in self.running)
        return max(0, running + waiting - len(self.pool))
