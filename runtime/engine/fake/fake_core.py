"""The fake engine's core: scheduling and block accounting without a model, and made-up tokens.

A token is a pure function of all tokens before it, as a greedy model's is, so that a lost, repeated
or reordered token shows (``expected_tokens``).
"""

import enum
import math
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from shoal.policies.values.layouts import Unit
from shoal.runtime.clock import Clock
from shoal.runtime.config import FakeSettings
from shoal.runtime.engine.agent.interface import (
    CoreLoad,
    CoreOutputs,
    EndedSteps,
    Lease,
    RunnerDied,
)
from shoal.runtime.engine.agent.step_mode import Shift
from shoal.runtime.engine.fake import fake_logprobs
from shoal.runtime.engine.fake.step_times import Devices, DeviceStep, StepTimes
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.messages import LayoutLimits, Mode, Work

_FIRST_TOKEN = 3
_NUM_TOKENS = 253
"""Tokens lie in [3, 256): every tokenizer has them, and the first few are usually special."""


def _digest(tokens: Sequence[int], digest: int = 0) -> int:
    """Return the digest of a sequence, or of one whose first part has this digest."""
    return zlib.crc32(array("I", tokens).tobytes(), digest)


def _token(digest: int) -> int:
    """Return the token that follows a sequence of this digest."""
    return _FIRST_TOKEN + digest % _NUM_TOKENS


def expected_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """Return the first ``count`` output tokens of a prompt."""
    tokens: list[int] = []
    digest = _digest(prompt)
    for _ in range(count):
        tokens.append(_token(digest))
        digest = _digest(tokens[-1:], digest)
    return tokens


OnStart = Callable[[str, float], None]


class Seam(enum.Enum):
    """Where a fault can strike: the backend's entry for each message of a switch."""

    LEND = "lend"
    ATTACH = "attach"
    BIND = "bind"
    RELEASE = "release"
    TAKE_BACK = "take_back"


class Faults(msgspec.Struct, frozen=True):
    """Damage on purpose: what the checks of this project must notice."""

    die_at: Seam | None = None
    """Raise ``RunnerDied`` there."""
    double_lend: bool = False
    """Lend blocks that are lent already."""
    drop_block: bool = False
    """Lose one of the blocks that are taken back."""
    fail_form: bool = False
    """Do not make this engine's part of a group that is formed anew."""
    repeat_token: bool = False
    """Emit the second token of every request twice."""


NO_FAULTS = Faults()


class BlockIds:
    """Free block ids, physical or virtual; gives out the lowest, so that runs are reproducible."""

    def __init__(self, blocks: Sequence[int] = ()) -> None:
        self._free = sorted(blocks, reverse=True)

    def __len__(self) -> int:
        return len(self._free)

    @property
    def ids(self) -> list[int]:
        """Return the ids there are, the next to be given out last."""
        return self._free

    def take(self, count: int) -> list[int]:
        """Return up to ``count`` ids, taken out."""
        return [self._free.pop() for _ in range(min(count, len(self._free)))]

    def give(self, blocks: Sequence[int]) -> None:
        """Put ids back; the caller has checked that they are not there."""
        self._free.extend(reversed(blocks))


class _Request:
    """A request inside a core. ``blocks`` is empty while it has no KV."""

    def __init__(self, view: wire.RequestView, prompt: list[int], max_tokens: int) -> None:
        self.id = view.request_id
        self.sampling = view.sampling_params or wire.Sampling()
        self.client = view.client_index
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.generated: list[int] = []
        self.tokens = len(prompt)
        """Tokens there are, computed or not."""
        self.digest = _digest(prompt)
        self.blocks: list[int] = []
        self.computed = 0
        """Tokens whose KV is in the cache."""
        self.headers = view.headers
        self.events: list[wire.Event] = []
        """Those that no output has told of."""

    def generate(self) -> int:
        """Return the next token."""
        token = _token(self.digest)
        self.generated.append(token)
        self.tokens += 1
        self.digest = _digest([token], self.digest)
        return token

    @property
    def decodes(self) -> bool:
        """Whether its next step computes its last token and nothing else."""
        return self.computed > 0 and self.tokens - self.computed == 1


class _Step(DeviceStep, kw_only=True):
    """A step in flight, or a run of equal ones."""

    batch: list[tuple[_Request, int]]
    """Requests, and how many of their tokens one step computes."""
    work: Work
    """Of the first one."""
    mode: Mode


class FakeCore:
    """``Core`` of one group: continuous batching, chunked prefill, preemption by recompute.

    Args:
        unit: whose core it is; the pool's blocks are the engine's own if it is alone, else virtual
             ids of the lease.
        limits: batch size, block size and length of this layout.
        settings: of the node's fake engines.
        step_times: how long steps take.
        devices: of this node, as far as this process knows them.
        on_start: called with every request that is in a step for the first time, and that step's
            start on the clock.
    """

    def __init__(
        self,
        unit: Unit,
        limits: LayoutLimits,
        pool: BlockIds,
        *,
        settings: FakeSettings,
        step_times: StepTimes,
        devices: Devices,
        clock: Clock,
        faults: Faults,
        on_start: OnStart | None,
    ) -> None:
        self.unit = unit
        self._limits = limits
        self._pool = pool
        self._budget = settings.max_num_batched_tokens
        self._longest_run = settings.steps_at_once
        self._poison = settings.poison_token
        self._step_times = step_times
        self._devices = devices
        self._on_start = on_start
        self._clock = clock
        self._faults = faults
        self._running: list[_Request] = []
        self._waiting: deque[_Request] = deque()
        self._step: _Step | None = None
        self.shift = Shift(limits.sp_floor)
        self._steps: list[EndedSteps] = []
        self._outputs: list[CoreOutputs] = []
        self._finished: list[str] = []
        self._table: dict[int, tuple[int, ...]] = {}
        self._next_virtual = 1
        self._bound = not unit.is_group

    # --- requests -----------------------------------------------------------------------------

    def add(self, request_id: str, frames: Sequence[Any]) -> None:
        """See ``Core.add``."""
        view = wire.decode_request(frames)
        prompt = view.prompt_token_ids()
        room = self._limits.max_model_len - len(prompt)
        if not prompt or room <= 0:
            raise ValueError(f"prompt of {len(prompt)} tokens, limit {self._limits.max_model_len}")
        if any(request.id == request_id for request in self._requests()):
            raise ValueError(f"request {request_id} exists already")
        sampling = view.sampling_params or wire.Sampling()
        max_tokens = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        request = _Request(view, prompt, max_tokens)
        self._note(request, wire.EventType.QUEUED)
        self._waiting.append(request)
        self._cut()

    def abort(self, request_ids: Sequence[str]) -> None:
        """See ``Core.abort``."""
        gone = set(request_ids)
        for request in self._requests():
            if request.id in gone:
                self._free(request)
        self._running = [r for r in self._running if r.id not in gone]
        self._waiting = deque(r for r in self._waiting if r.id not in gone)

    def withdraw(self, request_ids: Sequence[str]) -> dict[str, list[int]]:
        """See ``Core.withdraw``."""
        wanted = set(request_ids)
        tokens = {r.id: r.generated for r in self._requests() if r.id in wanted}
        self.abort(list(tokens))
        return tokens

    def _requests(self) -> list[_Request]:
        return [*self._running, *self._waiting]

    # --- steps --------------------------------------------------------------------------------

    def dispatch(self) -> bool:
        """See ``Core.dispatch``."""
        dispatched = self._dispatch()
        if self._step is None:
            self._devices.rest(self.unit, self._clock())
        return dispatched

    def dispatch_ahead(self) -> bool:
        """See ``Core.dispatch_ahead``: it takes no time to collect a step."""
        return False

    def pause(self) -> None:
        """See ``Core.pause``: a run of steps ends with the one that is computed now."""
        self._cut()

    def _cut(self) -> None:
        self._devices.cut(self.unit, self._clock())

    def collect(self) -> bool:
        """See ``Core.collect``."""
        step = self._step
        if step is None or self._clock() < step.due:
            return False
        self._step = None
        self._steps.append(EndedSteps(step.mode, _repeated(step.work, step.count)))
        if self._poison is not None and any(self._poison in r.prompt for r, _ in step.batch):
            raise RunnerDied("died of a request on purpose")
        alive = {id(request) for request in self._running}
        by_client: dict[int, list[wire.Output]] = {}
        for request, computed in step.batch:
            if self._on_start is not None and not request.computed and not request.generated:
                self._on_start(request.id, step.start)
            if id(request) not in alive:
                continue
            request.computed += computed
            if request.computed == request.tokens:
                output = self._emit(request, step.count)
                by_client.setdefault(request.client, []).append(output)
        self._running = [r for r in self._running if len(r.generated) < r.max_tokens]
        for client, outputs in by_client.items():
            frame = wire.encode_outputs(outputs, unit=self.unit, timestamp=step.due)
            self._outputs.append(CoreOutputs(client, [frame]))
        return True

    def _emit(self, request: _Request, count: int) -> wire.Output:
        first = not request.generated
        tokens = [request.generate() for _ in range(count)]
        request.computed += count - 1
        if self._faults.repeat_token and len(request.generated) == 2:
            tokens *= 2
        reason = None
        if len(request.generated) >= request.max_tokens:
            reason = wire.FinishReason.LENGTH
            self._free(request)
            self._finished.append(request.id)
        length = len(request.prompt)
        stats = wire.PrefillStats(length, length) if first else None
        events, request.events = request.events, []
        return wire.Output(
            request.id,
            tokens,
            fake_logprobs.of_outputs(tokens, request.sampling),
            fake_logprobs.of_prompt(request.prompt, request.sampling) if first else None,
            finish_reason=reason,
            events=events or None,
            trace_headers=request.headers,
            prefill_stats=stats,
        )

    def _note(self, request: _Request, event: wire.EventType) -> None:
        request.events.append(wire.Event(event, self._clock()))

    def _dispatch(self) -> bool:
        if self._step is not None or not self._bound:
            return False
        batch, crowded = self._schedule()
        if not batch:
            return False
        lonely = not crowded and not self._devices.is_shared(self.unit)
        count = self._run_length(batch) if lonely else 1
        work = _work(batch)
        mode = self.shift.mode(sum(tokens for _, tokens in batch))
        seconds = self._step_times(self.unit.layout, _repeated(work, count).mean, mode)
        self._step = _Step(batch=batch, work=work, mode=mode, seconds=seconds, count=count)
        self._devices.queue(self.unit, self._step, self._clock())
        return True

    def _schedule(self) -> tuple[list[tuple[_Request, int]], bool]:
        """Give running requests their share of the next step, then start waiting ones that fit.

        Returns requests and their tokens, and whether one of them was preempted for the others.
        """
        batch: list[tuple[_Request, int]] = []
        budget = self._budget
        preempted = False
        while len(batch) < len(self._running) and budget > 0:
            request = self._running[len(batch)]
            while not self._reserve(request):
                preempted = True
                victim = self._running[-1]
                self._preempt(victim)
                if victim is request:
                    break
            else:
                share = min(request.tokens - request.computed, budget)
                batch.append((request, share))
                budget -= share
        while not preempted and self._waiting and budget > 0:
            request = self._waiting[0]
            if len(self._running) >= self._limits.max_num_seqs or not self._reserve(request):
                break
            share = min(request.tokens, budget)
            self._running.append(self._waiting.popleft())
            self._note(request, wire.EventType.SCHEDULED)
            batch.append((request, share))
            budget -= share
        return batch, preempted

    def _run_length(self, batch: Sequence[tuple[_Request, int]]) -> int:
        """Return how many steps like this one follow each other if nothing comes in between.

        Reserves their blocks.
        """
        if self._longest_run == 1 or not all(request.decodes for request, _ in batch):
            return 1
        left = min(request.max_tokens - len(request.generated) for request, _ in batch)
        count = min(self._longest_run, left)
        while count > 1:
            lacking = [self._needs(request, count - 1) for request, _ in batch]
            if sum(lacking) <= len(self._pool):
                for (request, _), blocks in zip(batch, lacking, strict=True):
                    request.blocks += self._pool.take(blocks)
                break
            count //= 2
        return count

    def _reserve(self, request: _Request) -> bool:
        """Give a request the blocks of all its tokens, computed or not, if there are as many."""
        lacking = self._needs(request)
        if lacking > len(self._pool):
            return False
        request.blocks += self._pool.take(lacking)
        return True

    def _needs(self, request: _Request, ahead: int = 0) -> int:
        """Return the blocks that a request lacks to have ``ahead`` tokens more than it has."""
        blocks = -(-(request.tokens + ahead) // self._limits.block_tokens)
        return max(0, blocks - len(request.blocks))

    def _preempt(self, request: _Request) -> None:
        self._free(request)
        self._note(request, wire.EventType.PREEMPTED)
        self._running.remove(request)
        self._waiting.appendleft(request)

    def _free(self, request: _Request) -> None:
        self._pool.give(request.blocks)
        request.blocks = []
        request.computed = 0

    def preempt_until(self, free: int) -> None:
        """Preempt running requests, latest first, until ``free`` blocks are free or none runs."""
        while self._running and len(self._pool) < free:
            self._preempt(self._running[-1])

    # --- what came of it ----------------------------------------------------------------------

    def take_outputs(self) -> list[CoreOutputs]:
        """See ``Core.take_outputs``."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def take_steps(self) -> list[EndedSteps]:
        """See ``Core.take_steps``."""
        steps, self._steps = self._steps, []
        return steps

    def take_finished(self) -> list[str]:
        """See ``Core.take_finished``."""
        finished, self._finished = self._finished, []
        return finished

    @property
    def in_flight(self) -> int:
        """See ``Core.in_flight``."""
        return int(self._step is not None)

    @property
    def due(self) -> float | None:
        """Clock time at which the step in flight is done; None while it waits for its turn."""
        return None if self._step is None or self._step.due == math.inf else self._step.due

    @property
    def oldest_step(self) -> tuple[Mode, Work] | None:
        """See ``Core.oldest_step``."""
        return None if self._step is None else (self._step.mode, self._step.work)

    @property
    def num_requests(self) -> int:
        """See ``Core.num_requests``."""
        return len(self._running) + len(self._waiting)

    @property
    def load(self) -> CoreLoad:
        """See ``Core.load``."""
        return CoreLoad(len(self._running), len(self._waiting), len(self._pool))

    # --- leases -------------------------------------------------------------------------------

    def bind(self, epoch: int, lease: Lease, seed: int) -> None:
        """See ``Core.bind``."""
        self._strike(Seam.BIND)
        self._bound = True
        self.grow(lease)

    def grow(self, lease: Lease) -> None:
        """See ``Core.grow``."""
        opened = []
        for physical in zip(*(lease[engine] for engine in self.unit.engines), strict=True):
            self._table[self._next_virtual] = physical
            opened.append(self._next_virtual)
            self._next_virtual += 1
        self._pool.give(opened)

    def release(self, epoch: int) -> Lease:
        """See ``Core.release``."""
        self._strike(Seam.RELEASE)
        self._bound = False
        self._devices.rest(self.unit, self._clock())
        return self.shrink(0)

    def shrink(self, keep: int) -> Lease:
        """See ``Core.shrink``."""
        closed = self._pool.take(self.lease_blocks - keep)
        rows = [self._table.pop(block) for block in closed]
        return {engine: [row[k] for row in rows] for k, engine in enumerate(self.unit.engines)}

    @property
    def blocks_wanted(self) -> int:
        """See ``Core.blocks_wanted``."""
        slots = self._limits.max_num_seqs - len(self._running)
        waiting = sum(self._needs(request) for request in list(self._waiting)[:slots])
        # Steps must find their blocks when they start: ask during those before.
        ahead = 2 * self._longest_run - 1
        running = sum(self._needs(request, ahead) for request in self._running)
        return max(0, running + waiting - len(self._pool))

    @property
    def blocks_ahead(self) -> int:
        """See ``Core.blocks_ahead``."""
        left = [(r, r.max_tokens - len(r.generated)) for r in self._requests()]
        longest = self._limits.max_model_len
        return sum(self._needs(r, ahead) for r, ahead in left if r.tokens + ahead < longest)

    @property
    def lease_blocks(self) -> int:
        """See ``Core.lease_blocks``."""
        return len(self._table)

    def _strike(self, seam: Seam) -> None:
        if self._faults.die_at is seam:
            raise RunnerDied(f"died in {seam.value} on purpose")

    # --- checks -------------------------------------------------------------------------------

    def held(self) -> list[int]:
        """Return the block ids that requests hold."""
        return [block for request in self._requests() for block in request.blocks]

    def check_integrity(self) -> list[str]:
        """See ``Core.check_integrity``."""
        blocks = self.held() + self._pool.ids
        problems = []
        if len(set(blocks)) != len(blocks):
            problems.append(f"core {self.unit.engines}: a block is in two places")
        if self.unit.is_group and set(blocks) != set(self._table):
            problems.append(f"core {self.unit.engines}: leased blocks are neither free nor held")
        problems += [
            f"core {self.unit.engines}: waiting request {request.id} holds blocks"
            for request in self._waiting
            if request.blocks
        ]
        return problems


def _work(batch: Sequence[tuple[_Request, int]]) -> Work:
    """Return the work of one step."""
    decodes = context = prefill = pairs = 0
    for request, share in batch:
        if request.decodes:
            decodes += 1
            context += request.tokens
        else:
            prefill += share
            pairs += share * (2 * request.computed + share + 1) // 2
    return Work(1, 0.0, decodes, context, prefill, pairs)


def _repeated(step: Work, count: int) -> Work:
    """Return the work of ``count`` steps that follow each other, given the first of them."""
    if count == 1:
        return step
    grown = step.decodes * (count * (count - 1) // 2)
    context = count * step.context_tokens + grown
    return Work(count, 0.0, count * step.decodes, context, 0, 0)
