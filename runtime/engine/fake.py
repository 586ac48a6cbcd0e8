"""An engine without a model: the whole protocol, scheduling and block accounting, made-up tokens.

It runs the server and the controller for tests of everything that is not numerics, and for
simulated time. Token k of a request is a pure function of its prompt and k, so that a lost,
repeated or reordered token shows (``expected_tokens``).
"""

import enum
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from policies.partition import Group, leader_of
from runtime import wire
from runtime.clock import Clock, monotonic
from runtime.config import Addresses, FakeSettings, NodeConfig
from runtime.engine.agent import Agent
from runtime.engine.interface import CoreLoad, CoreOutputs, Lease, RunnerDied
from runtime.messages import LayoutLimits
from runtime.transport import ZmqAgentTransport

_FIRST_TOKEN = 3
_NUM_TOKENS = 253
"""Tokens lie in [3, 256): every tokenizer has them, and the first few are usually special."""


def expected_token(prompt: Sequence[int], k: int) -> int:
    """Return output token ``k`` (from 0) of a prompt."""
    seed = zlib.crc32(b",".join(b"%d" % token for token in prompt))
    return _FIRST_TOKEN + (seed + k * k * 31 + k * 17) % _NUM_TOKENS


def expected_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """Return the first ``count`` output tokens of a prompt."""
    return [expected_token(prompt, k) for k in range(count)]


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
    repeat_token: bool = False
    """Emit the second token of every request twice."""


NO_FAULTS = Faults()


class _Pool:
    """Free block ids, physical or virtual; gives out the lowest, so that runs are reproducible."""

    def __init__(self, blocks: Sequence[int] = ()) -> None:
        self._free = sorted(blocks, reverse=True)

    def __len__(self) -> int:
        return len(self._free)

    @property
    def ids(self) -> list[int]:
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
        self.client = view.client_index
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.generated = 0
        self.blocks: list[int] = []

    @property
    def tokens(self) -> int:
        """Tokens whose KV the next step leaves in the cache."""
        return len(self.prompt) + self.generated


class _Step(msgspec.Struct):
    batch: list[_Request]
    due: float


class FakeCore:
    """``Core`` of one group: continuous batching, whole-prompt prefill, preemption by recompute.

    Args:
        group: the engines of the unit; the pool's blocks are the engine's own for a group of one,
            else virtual ids of the lease.
        limits: batch size, block size and length of this layout.
    """

    def __init__(
        self,
        group: Group,
        limits: LayoutLimits,
        pool: _Pool,
        *,
        step_seconds: float,
        clock: Clock,
        faults: Faults,
    ) -> None:
        self.group = group
        self._limits = limits
        self._pool = pool
        self._step_seconds = step_seconds
        self._clock = clock
        self._faults = faults
        self._running: list[_Request] = []
        self._waiting: deque[_Request] = deque()
        self._step: _Step | None = None
        self._outputs: list[CoreOutputs] = []
        self._finished: list[str] = []
        self._table: dict[int, tuple[int, ...]] = {}
        self._next_virtual = 1
        self._bound = len(group) == 1

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
        self._waiting.append(_Request(view, prompt, max_tokens))

    def abort(self, request_ids: Sequence[str]) -> None:
        """See ``Core.abort``."""
        gone = set(request_ids)
        for request in self._requests():
            if request.id in gone:
                self._free(request)
        self._running = [r for r in self._running if r.id not in gone]
        self._waiting = deque(r for r in self._waiting if r.id not in gone)

    def _requests(self) -> list[_Request]:
        return [*self._running, *self._waiting]

    # --- steps --------------------------------------------------------------------------------

    def advance(self) -> bool:
        """See ``Core.advance``."""
        collected = self.collect()
        return self._dispatch() or collected

    def collect(self) -> bool:
        """See ``Core.collect``."""
        step = self._step
        if step is None or self._clock() < step.due:
            return False
        self._step = None
        alive = {id(request) for request in self._running}
        by_client: dict[int, list[wire.Output]] = {}
        for request in step.batch:
            if id(request) in alive:
                by_client.setdefault(request.client, []).append(self._emit(request))
        self._running = [r for r in self._running if r.generated < r.max_tokens]
        now = self._clock()
        for client, outputs in by_client.items():
            frame = wire.encode_outputs(outputs, engine=leader_of(self.group), timestamp=now)
            self._outputs.append(CoreOutputs(client, [frame]))
        return True

    def _emit(self, request: _Request) -> wire.Output:
        first = request.generated == 0
        tokens = [expected_token(request.prompt, request.generated)]
        if self._faults.repeat_token and request.generated == 1:
            tokens *= 2
        request.generated += 1
        reason = None
        if request.generated >= request.max_tokens:
            reason = wire.FinishReason.LENGTH
            self._free(request)
            self._finished.append(request.id)
        length = len(request.prompt)
        stats = wire.PrefillStats(length, length) if first else None
        return wire.Output(request.id, tokens, finish_reason=reason, prefill_stats=stats)

    def _dispatch(self) -> bool:
        if self._step is not None or not self._bound:
            return False
        batch = self._schedule()
        if not batch:
            return False
        self._step = _Step(batch, self._clock() + self._step_seconds)
        return True

    def _schedule(self) -> list[_Request]:
        """Give every running request its next blocks, then start waiting ones while they fit."""
        preempted = False
        for request in list(self._running):
            while request in self._running and not self._reserve(request):
                self._preempt(self._running[-1])
                preempted = True
        while not preempted and self._waiting and len(self._running) < self._limits.max_num_seqs:
            if not self._reserve(self._waiting[0]):
                break
            self._running.append(self._waiting.popleft())
        return list(self._running)

    def _reserve(self, request: _Request) -> bool:
        lacking = self._needs(request)
        if lacking > len(self._pool):
            return False
        request.blocks += self._pool.take(lacking)
        return True

    def _needs(self, request: _Request) -> int:
        return -(-request.tokens // self._limits.block_tokens) - len(request.blocks)

    def _preempt(self, request: _Request) -> None:
        self._free(request)
        self._running.remove(request)
        self._waiting.appendleft(request)

    def _free(self, request: _Request) -> None:
        self._pool.give(request.blocks)
        request.blocks = []

    def preempt_until(self, free: int) -> None:
        """Preempt running requests, latest first, until ``free`` blocks are free or none runs."""
        while self._running and len(self._pool) < free:
            self._preempt(self._running[-1])

    # --- what came of it ----------------------------------------------------------------------

    def take_outputs(self) -> list[CoreOutputs]:
        """See ``Core.take_outputs``."""
        outputs, self._outputs = self._outputs, []
        return outputs

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
        """Clock time at which the step in flight is done."""
        return None if self._step is None else self._step.due

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
        for physical in zip(*(lease[engine] for engine in self.group), strict=True):
            self._table[self._next_virtual] = physical
            opened.append(self._next_virtual)
            self._next_virtual += 1
        self._pool.give(opened)

    def release(self, epoch: int) -> Lease:
        """See ``Core.release``."""
        self._strike(Seam.RELEASE)
        self._bound = False
        return self.shrink(0)

    def shrink(self, keep: int) -> Lease:
        """See ``Core.shrink``."""
        closed = self._pool.take(self.lease_blocks - keep)
        rows = [self._table.pop(block) for block in closed]
        return {engine: [row[k] for row in rows] for k, engine in enumerate(self.group)}

    @property
    def blocks_wanted(self) -> int:
        """See ``Core.blocks_wanted``."""
        slots = self._limits.max_num_seqs - len(self._running)
        soon = [*self._running, *list(self._waiting)[:slots]]
        return max(0, sum(self._needs(request) for request in soon) - len(self._pool))

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
            problems.append(f"core {self.group}: a block is in two places")
        if len(self.group) > 1 and set(blocks) != set(self._table):
            problems.append(f"core {self.group}: leased blocks are neither free nor held")
        problems += [
            f"core {self.group}: waiting request {request.id} holds blocks"
            for request in self._waiting
            if request.blocks
        ]
        return problems


class FakeBackend:
    """``EngineBackend`` without a model.

    Args:
        config: the node; ``config.fake`` sets sizes and step time (its defaults when absent).
        engine: this engine's number.
        clock: seconds; steps take their time on it.
        faults: damage on purpose.
    """

    def __init__(
        self,
        config: NodeConfig,
        engine: int,
        *,
        clock: Clock = monotonic,
        faults: Faults = NO_FAULTS,
    ) -> None:
        settings = config.fake or FakeSettings()
        self.engine = engine
        self.num_blocks = settings.num_blocks
        self.layouts: Sequence[LayoutLimits] = [_limits(settings, d) for d in config.degrees]
        self.ready_response = _ready_response(settings, engine)
        self.attached: Group | None = None
        """The group that this engine's runner was last sent to."""
        self._settings = settings
        self._clock = clock
        self._faults = faults
        self._pool = _Pool(range(1, settings.num_blocks + 1))
        self._lent: set[int] = set()
        self._cores: dict[Group, FakeCore] = {}
        for limits in self.layouts:
            self._open_core(limits)

    def _open_core(self, limits: LayoutLimits) -> None:
        group = tuple(range(self.engine, self.engine + limits.degree))
        if self.engine % limits.degree == 0:
            self._cores[group] = FakeCore(
                group,
                limits,
                self._pool if limits.degree == 1 else _Pool(),
                step_seconds=self._settings.step_seconds,
                clock=self._clock,
                faults=self._faults,
            )

    def core(self, group: Group) -> FakeCore:
        """See ``EngineBackend.core``."""
        return self._cores[group]

    @property
    def cores(self) -> Mapping[Group, FakeCore]:
        """See ``EngineBackend.cores``."""
        return self._cores

    # --- lending ------------------------------------------------------------------------------

    def lend(self, blocks: int, *, urgent: bool = False) -> list[int]:
        """See ``EngineBackend.lend``."""
        self._strike(Seam.LEND)
        if urgent:
            self._cores[(self.engine,)].preempt_until(blocks)
        if self._faults.double_lend and self._lent:
            return sorted(self._lent)[:blocks]
        taken = self._pool.take(blocks)
        self._lent.update(taken)
        return taken

    def take_back(self, blocks: Sequence[int]) -> None:
        """See ``EngineBackend.take_back``."""
        self._strike(Seam.TAKE_BACK)
        for block in blocks:
            self._lent.remove(block)
        self._pool.give(blocks[1:] if self._faults.drop_block else blocks)

    @property
    def lent(self) -> frozenset[int]:
        """See ``EngineBackend.lent``."""
        return frozenset(self._lent)

    def attach(self, group: Group, epoch: int) -> None:
        """See ``EngineBackend.attach``."""
        self._strike(Seam.ATTACH)
        self.attached = group

    def _strike(self, seam: Seam) -> None:
        if self._faults.die_at is seam:
            raise RunnerDied(f"died in {seam.value} on purpose")

    # --- the rest -----------------------------------------------------------------------------

    def utility(self, frames: Sequence[Any], *, answer: bool) -> CoreOutputs | None:
        """See ``EngineBackend.utility``: the calls that a front end makes, any other one fails."""
        call = wire.decode_utility(frames)
        if not answer:
            return None
        if call.method in _UTILITY_RESULTS:
            frame = wire.encode_utility_result(call.call_id, _UTILITY_RESULTS[call.method])
        else:
            failure = f"Call to {call.method} method failed: the fake engine does not have it"
            frame = wire.encode_utility_failure(call.call_id, failure)
        return CoreOutputs(call.client_index, [frame])

    def pollables(self) -> Sequence[Any]:
        """See ``EngineBackend.pollables``: none, steps end by the clock."""
        return ()

    def on_readable(self) -> None:
        """See ``EngineBackend.on_readable``: nothing to read."""

    def next_wakeup(self) -> float | None:
        """See ``EngineBackend.next_wakeup``."""
        due = [core.due for core in self._cores.values() if core.due is not None]
        return max(0.0, min(due) - self._clock()) if due else None

    def check_integrity(self) -> list[str]:
        """See ``EngineBackend.check_integrity``."""
        own = self._cores[(self.engine,)]
        blocks = [*self._pool.ids, *own.held(), *self._lent]
        problems = [line for core in self._cores.values() for line in core.check_integrity()]
        if len(set(blocks)) != len(blocks):
            problems.append(f"engine {self.engine}: a block is free, held and lent at once")
        missing = self.num_blocks - len(set(blocks))
        if missing:
            problems.append(f"engine {self.engine}: {missing} blocks are lost")
        return problems

    def close(self) -> None:
        """See ``EngineBackend.close``: nothing to free."""


_UTILITY_RESULTS: dict[str, Any] = {
    "get_supported_tasks": ("generate",),
    "reset_prefix_cache": True,
    "reset_mm_cache": None,
    "reset_encoder_cache": None,
    "is_sleeping": False,
    "is_scheduler_paused": False,
    "list_loras": [],
}


def _limits(settings: FakeSettings, degree: int) -> LayoutLimits:
    block_tokens = settings.block_tokens * degree
    return LayoutLimits(
        degree=degree,
        block_tokens=block_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=min(settings.max_model_len, settings.num_blocks * block_tokens),
    )


def _ready_response(settings: FakeSettings, engine: int) -> bytes:
    return msgspec.msgpack.encode(
        wire.ReadyResponse(
            max_model_len=settings.max_model_len,
            num_gpu_blocks=settings.num_blocks,
            block_size=settings.block_tokens,
            dtype="float32",
            vllm_version="0.32.0",
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_model_len,
            instance_id=f"shoal-fake-{engine}",
        )
    )


def run_fake_engine(config: NodeConfig, engine: int) -> None:
    """Entry of a fake engine's process: serve until told to stop."""
    backend = FakeBackend(config, engine)
    transport = ZmqAgentTransport(engine, Addresses(config.runtime_dir), config.api_servers)
    Agent(backend, transport, startup_seconds={"fake": 0.0}).run()
