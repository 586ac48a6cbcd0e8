"""The fake engine's cores: the whole of what vLLM's do, with made-up steps and tokens."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.policies.values.layouts import Unit, alone
from shoal.runtime.clock import Clock
from shoal.runtime.config import FakeSettings
from shoal.runtime.engine.agent.interface import (
    Collected,
    CoreLoad,
    CoreOutputs,
    EndedSteps,
    Lease,
    RunnerDied,
    work_of_step,
)
from shoal.runtime.engine.agent.step_mode import Shift
from shoal.runtime.engine.fake import fake_logprobs
from shoal.runtime.engine.fake.fake_scheduler import Batch, BlockIds, FakeRequest, FakeScheduler
from shoal.runtime.engine.fake.faults import Faults, Seam
from shoal.runtime.engine.fake.step_times import Devices, DeviceStep, StepTimes
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.messages import LayoutLimits, Mode, Work

OnStart = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the cores of a fake engine have in common."""

    settings: FakeSettings
    step_times: StepTimes
    """How long steps take."""
    devices: Devices
    """The node's devices, as far as this process knows them."""
    clock: Clock
    """Seconds; steps take their time on it."""
    faults: Faults
    on_start: OnStart | None
    """Called with each request in its first step, and with the clock time at which that step
    starts."""


class _Step(DeviceStep, kw_only=True):
    """A step in flight, or a run of equal ones."""

    batch: Batch
    """Requests, and how many of their tokens one step computes."""
    work: Work
    """The work of the first of them."""
    mode: Mode


class FakeCore:
    """``Core`` of one unit: what a single engine and a group have in common.

    Args:
        unit: the engines of the unit.
        limits: batch size, block size and length of this layout.
        surroundings: what the engine's cores share.
        pool: the engine's own blocks, or virtual ids of the lease.
    """

    def __init__(
        self, unit: Unit, limits: LayoutLimits, surroundings: Surroundings, pool: BlockIds
    ) -> None:
        self.unit = unit
        self.shift = Shift(limits.sp_floor)
        self._limits = limits
        self._around = surroundings
        self._clock = surroundings.clock
        self._devices = surroundings.devices
        self._scheduler = FakeScheduler(limits, surroundings.settings, pool, surroundings.clock)
        self._step: _Step | None = None

    # --- requests -----------------------------------------------------------------------------

    def add(self, request_id: str, frames: Sequence[Any]) -> None:
        """See ``Core.add``."""
        view = wire.decode_request(frames)
        prompt = view.prompt_token_ids()
        room = self._limits.max_model_len - len(prompt)
        if not prompt or room <= 0:
            raise ValueError(f"prompt of {len(prompt)} tokens, limit {self._limits.max_model_len}")
        sampling = view.sampling_params or wire.Sampling()
        max_tokens = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        self._scheduler.add(FakeRequest(view, prompt, max_tokens))
        self._cut()

    def abort(self, request_ids: Sequence[str]) -> None:
        """See ``Core.abort``."""
        self._scheduler.remove(set(request_ids))

    def withdraw(self, request_ids: Sequence[str]) -> dict[str, list[int]]:
        """See ``Core.withdraw``."""
        wanted = set(request_ids)
        tokens = {r.id: r.generated for r in self._scheduler.requests if r.id in wanted}
        self.abort(list(tokens))
        return tokens

    # --- steps --------------------------------------------------------------------------------

    def dispatch(self) -> bool:
        """See ``Core.dispatch``."""
        dispatched = self._dispatch()
        if self._step is None:
            self._devices.rest(self.unit, self._clock())
        return dispatched

    def dispatch_ahead(self) -> bool:
        """See ``Core.dispatch_ahead``: never, as collecting a step takes no time here."""
        return False

    def pause(self) -> None:
        """See ``Core.pause``: a run of steps ends with the step that is computed now."""
        self._cut()

    def _cut(self) -> None:
        self._devices.cut(self.unit, self._clock())

    def _dispatch(self) -> bool:
        if self._step is not None:
            return False
        batch, crowded = self._scheduler.schedule()
        if not batch:
            return False
        undisturbed = not crowded and not self._devices.is_shared(self.unit)
        count = self._scheduler.run_length(batch) if undisturbed else 1
        work = work_of_step((request.computed, share) for request, share in batch)
        mode = self.shift.mode(sum(tokens for _, tokens in batch))
        seconds = self._around.step_times(self.unit.layout, _repeated(work, count).mean, mode)
        self._step = _Step(batch=batch, work=work, mode=mode, seconds=seconds, count=count)
        self._devices.queue(self.unit, self._step, self._clock())
        return True

    def collect(self) -> Collected | None:
        """See ``Core.collect``."""
        step = self._step
        if step is None or self._clock() < step.due:
            return None
        self._step = None
        self._look_for_poison(step)
        finished: list[str] = []
        outputs = [
            CoreOutputs(client, [wire.encode_outputs(made, unit=self.unit, timestamp=step.due)])
            for client, made in self._compute(step, finished).items()
        ]
        if finished:
            self._scheduler.drop_ended()
        ended = EndedSteps(step.mode, _repeated(step.work, step.count))
        return Collected(outputs, [ended], finished)

    def _look_for_poison(self, step: _Step) -> None:
        poison = self._around.settings.poison_token
        if poison is not None and any(poison in request.prompt for request, _ in step.batch):
            raise RunnerDied("died of a request on purpose")

    def _compute(self, step: _Step, finished: list[str]) -> dict[int, list[wire.Output]]:
        """Return a step's outputs by front end; add to ``finished`` the requests that end."""
        alive = {id(request) for request in self._scheduler.running}
        on_start = self._around.on_start
        outputs: dict[int, list[wire.Output]] = {}
        for request, computed in step.batch:
            if on_start is not None and not request.computed and not request.generated:
                on_start(request.id, step.start)
            if id(request) not in alive:
                continue
            request.computed += computed
            if request.computed == request.tokens:
                output = self._emit(request, step.count)
                outputs.setdefault(request.client, []).append(output)
                if output.finish_reason is not None:
                    finished.append(request.id)
        return outputs

    def _emit(self, request: FakeRequest, count: int) -> wire.Output:
        first = not request.generated
        tokens = [request.generate() for _ in range(count)]
        request.computed += count - 1
        if self._around.faults.repeat_token and len(request.generated) == 2:
            tokens *= 2
        length = len(request.prompt)
        stats = wire.PrefillStats(length, length) if first else None
        events, request.events = request.events, []
        return wire.Output(
            request.id,
            tokens,
            fake_logprobs.of_outputs(tokens, request.sampling),
            fake_logprobs.of_prompt(request.prompt, request.sampling) if first else None,
            finish_reason=wire.FinishReason.LENGTH if request.tokens_left <= 0 else None,
            events=events or None,
            trace_headers=request.headers,
            prefill_stats=stats,
        )

    # --- figures ------------------------------------------------------------------------------

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
        return len(self._scheduler.running) + len(self._scheduler.waiting)

    @property
    def load(self) -> CoreLoad:
        """See ``Core.load``."""
        scheduler = self._scheduler
        return CoreLoad(len(scheduler.running), len(scheduler.waiting), len(scheduler.pool))

    @property
    def held(self) -> list[int]:
        """The block ids that requests hold."""
        return self._scheduler.held

    def check_integrity(self) -> list[str]:
        """See ``Core.check_integrity``."""
        return [
            f"core {self.unit.engines}: waiting request {request.id} holds blocks"
            for request in self._scheduler.waiting
            if request.blocks
        ]


class FakeOwnCore(FakeCore):
    """``OwnCore``: an engine alone, on blocks of its own, which it lends."""

    def __init__(self, engine: int, limits: LayoutLimits, surroundings: Surroundings) -> None:
        num_blocks = surroundings.settings.num_blocks
        self._pool = BlockIds(range(1, num_blocks + 1))
        self._num_blocks = num_blocks
        self._lent: set[int] = set()
        super().__init__(alone(engine), limits, surroundings, self._pool)

    def lend(self, blocks: int, *, urgent: bool = False) -> list[int]:
        """See ``BlockLender.lend``."""
        faults = self._around.faults
        faults.strike(Seam.LEND)
        if urgent:
            self._scheduler.preempt_until(blocks)
        if faults.double_lend and self._lent:
            return sorted(self._lent)[:blocks]
        taken = self._pool.take(blocks)
        self._lent.update(taken)
        return taken

    def take_back(self, blocks: Sequence[int]) -> None:
        """See ``BlockLender.take_back``."""
        faults = self._around.faults
        faults.strike(Seam.TAKE_BACK)
        for block in blocks:
            self._lent.remove(block)
        self._pool.give(blocks[1:] if faults.drop_block else blocks)

    @property
    def lent(self) -> frozenset[int]:
        """See ``BlockLender.lent``."""
        return frozenset(self._lent)

    @property
    def spare_blocks(self) -> int:
        """See ``BlockLender.spare_blocks``."""
        return self._scheduler.spare_blocks

    def check_integrity(self) -> list[str]:
        """See ``Core.check_integrity``."""
        engine = self.unit.leader
        problems = super().check_integrity()
        blocks = [*self._pool.ids, *self.held, *self._lent]
        if len(set(blocks)) != len(blocks):
            problems.append(f"engine {engine}: a block is free, held and lent at once")
        missing = self._num_blocks - len(set(blocks))
        if missing:
            problems.append(f"engine {engine}: {missing} blocks are lost")
        return problems


class FakeGroupCore(FakeCore):
    """``GroupCore``: virtual blocks of a lease, each backed by one block of every member."""

    def __init__(self, unit: Unit, limits: LayoutLimits, surroundings: Surroundings) -> None:
        self._pool = BlockIds()
        self._backing: dict[int, tuple[int, ...]] = {}
        self._next_virtual = 1
        self._bound = False
        super().__init__(unit, limits, surroundings, self._pool)

    def dispatch(self) -> bool:
        """See ``Core.dispatch``; nothing is dispatched while the group is not bound."""
        return self._bound and super().dispatch()

    def bind(self, epoch: int, lease: Lease, seed: int) -> None:
        """See ``GroupCore.bind``."""
        self._around.faults.strike(Seam.BIND)
        self._bound = True
        self.grow(lease)

    def grow(self, lease: Lease) -> None:
        """See ``GroupCore.grow``."""
        opened = []
        for physical in zip(*(lease[engine] for engine in self.unit.engines), strict=True):
            self._backing[self._next_virtual] = physical
            opened.append(self._next_virtual)
            self._next_virtual += 1
        self._pool.give(opened)

    def release(self, epoch: int) -> Lease:
        """See ``GroupCore.release``."""
        self._around.faults.strike(Seam.RELEASE)
        self._bound = False
        self._devices.rest(self.unit, self._clock())
        return self.shrink(0)

    def shrink(self, keep: int) -> Lease:
        """See ``GroupCore.shrink``."""
        closed = self._pool.take(self.lease_blocks - keep)
        rows = [self._backing.pop(block) for block in closed]
        return {engine: [row[k] for row in rows] for k, engine in enumerate(self.unit.engines)}

    @property
    def blocks_wanted(self) -> int:
        """See ``GroupCore.blocks_wanted``."""
        return self._scheduler.blocks_wanted

    @property
    def lease_blocks(self) -> int:
        """See ``GroupCore.lease_blocks``."""
        return len(self._backing)

    def check_integrity(self) -> list[str]:
        """See ``Core.check_integrity``."""
        problems = super().check_integrity()
        blocks = self.held + self._pool.ids
        if len(set(blocks)) != len(blocks):
            problems.append(f"core {self.unit.engines}: a block is in two places")
        if set(blocks) != set(self._backing):
            problems.append(f"core {self.unit.engines}: leased blocks are neither free nor held")
        return problems


def _repeated(step: Work, count: int) -> Work:
    """Return the work of ``count`` steps that follow each other, given the first of them."""
    if count == 1:
        return step
    grown = step.decodes * (count * (count - 1) // 2)
    context = count * step.context_tokens + grown
    return Work(count, 0.0, count * step.decodes, context, 0, 0)
