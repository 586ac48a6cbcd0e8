"""An engine without a model: the whole protocol, scheduling and block accounting, made-up tokens.

It runs the server and the controller for tests of everything that is not numerics, and for
simulated time. What it computes, and when, is in ``fake_core.py``.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from shoal.policies.values.layouts import DP, Layout, Unit, alone
from shoal.runtime.clock import Clock, monotonic
from shoal.runtime.config import Addresses, FakeSettings, NodeConfig
from shoal.runtime.engine.agent.agent import Agent
from shoal.runtime.engine.agent.interface import CoreOutputs, RunnerDied
from shoal.runtime.engine.agent.step_mode import sp_floor
from shoal.runtime.engine.agent.watchdog import StepWatch
from shoal.runtime.engine.fake.fake_core import NO_FAULTS, BlockIds, FakeCore, Faults, OnStart, Seam
from shoal.runtime.engine.fake.step_times import Devices, StepTimes, constant
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.messages import LayoutLimits, Startup
from shoal.runtime.protocol.transport import ZmqAgentTransport

T = TypeVar("T")


class FakeBackend:
    """``EngineBackend`` without a model.

    Args:
        config: the node; ``config.fake`` sets sizes and step time (its defaults when absent).
        engine: this engine's number.
        incarnation: how often the engine was restarted; then its groups are not there at first.
        clock: seconds; steps take their time on it.
        faults: damage on purpose.
        step_times: how long steps take; None: as long as the settings say.
        devices: those of the node, where engines share a process.
        on_start: see ``FakeCore``.
    """

    def __init__(
        self,
        config: NodeConfig,
        engine: int,
        incarnation: int = 0,
        *,
        clock: Clock = monotonic,
        faults: Faults = NO_FAULTS,
        step_times: StepTimes | None = None,
        devices: Devices | None = None,
        on_start: OnStart | None = None,
    ) -> None:
        settings = config.fake or FakeSettings()
        self._step_times = step_times or constant(settings.step_seconds)
        self._devices = devices or Devices(config.interleave_ratio)
        self._devices.forget(engine)
        self._on_start = on_start
        self.engine = engine
        self.num_blocks = settings.num_blocks
        self.layouts: Sequence[LayoutLimits] = [
            _limits(settings, layout, config.max_sp) for layout in config.layouts
        ]
        self.ready_response = _ready_response(settings, engine)
        self.attached: Unit | None = None
        """The group that this engine's runner was last sent to."""
        self.formed: list[tuple[Unit, int]] = []
        """Groups that this engine was told to form anew, and how often they were made before."""
        self._settings = settings
        self._clock = clock
        self._faults = faults
        self._pool = BlockIds(range(1, settings.num_blocks + 1))
        self._lent: set[int] = set()
        self._cores: dict[Unit, FakeCore] = {}
        for limits in self.layouts if incarnation == 0 else self.layouts[:1]:
            self._open_core(limits)

    def _open_core(self, limits: LayoutLimits) -> None:
        size = limits.layout.world_size
        if self.engine % size == 0:
            unit = Unit(tuple(range(self.engine, self.engine + size)), limits.layout)
            self._cores[unit] = FakeCore(
                unit,
                limits,
                self._pool if limits.layout == DP else BlockIds(),
                settings=self._settings,
                step_times=self._step_times,
                devices=self._devices,
                clock=self._clock,
                faults=self._faults,
                on_start=self._on_start,
            )

    def core(self, group: Unit) -> FakeCore:
        """See ``EngineBackend.core``."""
        return self._cores[group]

    @property
    def cores(self) -> Mapping[Unit, FakeCore]:
        """See ``EngineBackend.cores``."""
        return self._cores

    # --- lending ------------------------------------------------------------------------------

    def lend(self, blocks: int, *, urgent: bool = False) -> list[int]:
        """See ``EngineBackend.lend``."""
        self._strike(Seam.LEND)
        if urgent:
            self._cores[alone(self.engine)].preempt_until(blocks)
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

    def attach(self, group: Unit, epoch: int, *, interleaves: bool = False) -> None:
        """See ``EngineBackend.attach``."""
        self._strike(Seam.ATTACH)
        self.attached = group
        if interleaves:
            self._devices.interleave(self.engine, group, self._clock())

    def await_detach(self, epoch: int) -> None:
        """See ``EngineBackend.await_detach``."""
        self._devices.separate(self.engine, self._clock())

    def form(self, group: Unit, generation: int) -> "Future[str]":
        """See ``EngineBackend.form``."""
        self._cores.pop(group, None)
        self.formed.append((group, generation))
        return _done("failed to form a group on purpose" if self._faults.fail_form else "")

    @property
    def fails_to_form(self) -> bool:
        """Whether it cannot make its part of a group."""
        return self._faults.fail_form

    def start(self, group: Unit) -> "Future[Any]":
        """See ``EngineBackend.start``."""
        (limits,) = [limits for limits in self.layouts if limits.layout == group.layout]
        self._open_core(limits)
        return _done(None)

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
        own = self._cores[alone(self.engine)]
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


def _done(value: T) -> "Future[T]":
    future: Future[T] = Future()
    future.set_result(value)
    return future


_UTILITY_RESULTS: dict[str, Any] = {
    "get_supported_tasks": ("generate",),
    "reset_prefix_cache": True,
    "reset_mm_cache": None,
    "reset_encoder_cache": None,
    "is_sleeping": False,
    "is_scheduler_paused": False,
    "list_loras": [],
}


def _limits(settings: FakeSettings, layout: Layout, max_sp: int) -> LayoutLimits:
    block_tokens = settings.kv_geometry.block(layout).tokens
    return LayoutLimits(
        layout=layout,
        block_tokens=block_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=min(settings.max_model_len, settings.num_blocks * block_tokens),
        sp_floor=sp_floor(layout.tp, max_sp, settings.captured_tokens),
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


def run_fake_engine(config: NodeConfig, engine: int, incarnation: int = 0) -> None:
    """Entry of a fake engine's process: serve until told to stop.

    Raises:
        RunnerDied: on purpose (``FakeSettings.failing_starts``).
    """
    if config.fake is not None and 0 < incarnation <= config.fake.failing_starts:
        raise RunnerDied("failed to start on purpose")
    backend = FakeBackend(config, engine, incarnation)
    transport = ZmqAgentTransport(
        engine, Addresses(config.runtime_dir), config.api_servers, incarnation=incarnation
    )
    timeout = config.step_timeout_seconds
    watch = None if timeout is None else StepWatch(timeout)
    Agent(backend, transport, startup=Startup({"fake": 0.0}), watch=watch).run()
