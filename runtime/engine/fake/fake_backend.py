"""An engine without a model: real protocol, scheduling and block accounting, made-up tokens.

With it, the server and the controller run in tests of everything but numerics, and in simulated
time. ``fake_core`` says what it computes, and when.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from shoal.policies.values.layouts import DP, Layout, Unit
from shoal.policies.values.level import WHOLE, Level
from shoal.runtime.clock import Clock, monotonic
from shoal.runtime.config import FakeSettings, NodeConfig
from shoal.runtime.engine.agent.agent import serve
from shoal.runtime.engine.agent.mixed_steps import mixed_limit
from shoal.runtime.engine.agent.step_mode import sp_floor
from shoal.runtime.engine.fake.fake_core import FakeCore
from shoal.runtime.engine.fake.fake_group_core import FakeGroupCore
from shoal.runtime.engine.fake.fake_own_core import FakeOwnCore
from shoal.runtime.engine.fake.fake_tier_core import FakeTierCore
from shoal.runtime.engine.fake.faults import NO_FAULTS, Faults, Seam
from shoal.runtime.engine.fake.step_times import (
    Devices,
    DeviceStep,
    HopTimes,
    StepTimes,
    constant,
    no_hops,
)
from shoal.runtime.engine.fake.surroundings import OnStart, Surroundings
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.messages import LayoutLimits, Shares, Startup

T = TypeVar("T")


class FakeBackend:
    """``EngineBackend`` without a model.

    Args:
        config: the node; ``config.fake`` sets sizes and step time (its defaults when absent).
        engine: this engine's number.
        incarnation: how often the engine was restarted; if it was, it has no groups at first.
        clock: seconds; steps take their time on it.
        faults: damage on purpose.
        step_times: how long steps take; None: the settings say it.
        level_times: the same by the unit's level of memory, where this matters.
        hop_times: which part of that is the way from stage to stage.
        devices: the node's, if engines share a process.
        on_start: see ``Surroundings``.
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
        level_times: Mapping[Level, StepTimes] | None = None,
        hop_times: HopTimes = no_hops,
        devices: Devices | None = None,
        on_start: OnStart | None = None,
    ) -> None:
        settings = config.fake or FakeSettings()
        self._devices = devices or Devices()
        self._devices.renew(engine)
        self._start = Level(config.share_weights)
        self._devices.have_level([engine], self._start)
        self._clock = clock
        self.faults = faults
        self._any_times = step_times or constant(settings.step_seconds)
        self._level_times = level_times or {}
        self._surroundings = Surroundings(
            settings=settings,
            step_times=self._step_times,
            hop_times=hop_times,
            devices=self._devices,
            clock=clock,
            faults=faults,
            on_start=on_start,
        )
        self.engine = engine
        self.num_blocks = settings.num_blocks
        self._limits = {layout: _limits(settings, layout, config) for layout in config.layouts}
        self.layouts: Sequence[LayoutLimits] = list(self._limits.values())
        self.ready_response = _ready_response(settings, engine)
        self.attached: Unit | None = None
        """The group that this engine's runner was last sent to."""
        self.formed: list[tuple[Unit, int]] = []
        """Groups that this engine was told to form anew, and how often they were made before."""
        self._settings = settings
        self.filled: Level | None = None
        """The level for which there are copies of what peers keep."""
        self.shares = _shares(settings, config)
        self.own = FakeOwnCore(engine, self._limits[DP], self._surroundings)
        self.tier_blocks = settings.tier_blocks
        self._tiers = [FakeTierCore(engine, self._surroundings)] if settings.tier_blocks else []
        self._lead({})
        for unit in config.units if incarnation == 0 else ():
            if unit.is_group and unit.leader == engine:
                self._open_group(unit)

    def _step_times(self, unit: Unit) -> StepTimes:
        return self._level_times.get(self._devices.level(unit), self._any_times)

    def _lead(self, groups: Mapping[Unit, FakeGroupCore]) -> None:
        self.groups = groups
        tiers = {tier.unit: tier for tier in self._tiers}
        self.cores: Mapping[Unit, FakeCore | FakeTierCore] = {
            self.own.unit: self.own,
            **groups,
            **tiers,
        }

    def _open_group(self, unit: Unit) -> None:
        core = FakeGroupCore(unit, self._limits[unit.layout], self._surroundings)
        self._lead({**self.groups, unit: core})

    # --- the runner ---------------------------------------------------------------------------

    def attach(self, unit: Unit) -> None:
        """See ``EngineBackend.attach``."""
        self.faults.strike(Seam.ATTACH)
        self.attached = unit

    def form(self, unit: Unit, generation: int) -> "Future[str]":
        """See ``EngineBackend.form``."""
        self._lead({u: core for u, core in self.groups.items() if u != unit})
        self.formed.append((unit, generation))
        return _done("failed to form a group on purpose" if self.faults.fail_form else "")

    def start(self, unit: Unit) -> "Future[Any]":
        """See ``EngineBackend.start``."""
        if unit.leader == self.engine:
            self._open_group(unit)
        return _done(None)

    def fill_weights(self, unit: Unit, blocks: int, level: Level) -> "Future[str]":
        """See ``EngineBackend.fill_weights``."""
        self.faults.strike(Seam.FILL)
        self.filled = level
        error = "a copy was damaged on purpose" if self.faults.wrong_copy else ""
        seconds = self._settings.fill_seconds / level.stages
        return _Later(error, self._clock() + seconds, self._clock)

    def use_weights(self, unit: Unit, level: Level) -> "Future[dict[int, int]]":
        """See ``EngineBackend.use_weights``."""
        self.faults.strike(Seam.USE)
        assert level in (self._start, self.filled), "there are no such copies"
        self.filled = None if level == self._start else level
        now, move = self._clock(), DeviceStep(seconds=self._settings.use_seconds)
        self._devices.cut(unit, now)
        self._devices.queue(unit, move, now)
        self._devices.have_level(unit.engines, level)
        used = dict.fromkeys(unit.engines, weight_bytes(level))
        return _Later(used, move.due, self._clock)

    # --- the rest -----------------------------------------------------------------------------

    def utility(self, frames: Sequence[Any]) -> Sequence[Any]:
        """See ``EngineBackend.utility``: answers the calls that front ends make; others fail."""
        call = wire.decode_utility(frames)
        if call.method == "reset_prefix_cache":
            for core in self.cores.values():
                core.forget_prefixes()
        if call.method in _UTILITY_RESULTS:
            return [wire.encode_utility_result(call.call_id, _UTILITY_RESULTS[call.method])]
        failure = f"Call to {call.method} method failed: the fake engine does not have it"
        return [wire.encode_utility_failure(call.call_id, failure)]

    def pollables(self) -> Sequence[Any]:
        """See ``EngineBackend.pollables``: none, steps end by the clock."""
        return ()

    def on_readable(self) -> None:
        """See ``EngineBackend.on_readable``: nothing to read."""

    def next_wakeup(self) -> float | None:
        """See ``EngineBackend.next_wakeup``."""
        due = [core.due for core in self.cores.values() if core.due is not None]
        return max(0.0, min(due) - self._clock()) if due else None

    def close(self) -> None:
        """See ``EngineBackend.close``: nothing to free."""


class _Later(Future[T]):
    """Is done when a time has come; ``done`` has to be asked."""

    def __init__(self, value: T, at: float, clock: Clock) -> None:
        super().__init__()
        self._value, self._at, self._clock = value, at, clock

    def done(self) -> bool:
        if not super().done() and self._clock() >= self._at:
            self.set_result(self._value)
        return super().done()


def _done(value: T) -> "Future[T]":
    future: Future[T] = Future()
    future.set_result(value)
    return future


_UTILITY_RESULTS: dict[str, Any] = {
    "get_supported_tasks": ("generate",),
    "reset_prefix_cache": True,
    "reset_mm_cache": None,
    "is_sleeping": False,
    "is_scheduler_paused": False,
    "list_loras": [],
    "add_lora": True,
}


WHOLE_BYTES = 1 << 20
"""What weights take that are not shared."""


def weight_bytes(level: Level) -> int:
    """Return the bytes of weights of an engine at a level of memory."""
    part = WHOLE_BYTES // level.share
    return part if level.stages == 1 else part + (WHOLE_BYTES - part) // level.stages


def _shares(settings: FakeSettings, config: NodeConfig) -> Shares:
    start, fixed = Level(config.share_weights), "this fake engine cannot have these weights whole"
    if start == WHOLE:
        return Shares()
    blocks = {start: settings.num_blocks}
    blocks |= {Level(start.share, pp): left for pp, left in settings.stage_blocks.items()}
    if settings.whole_blocks:
        blocks[WHOLE] = settings.whole_blocks
    return Shares(blocks, fixed)


def _limits(settings: FakeSettings, layout: Layout, config: NodeConfig) -> LayoutLimits:
    block_tokens = settings.kv_geometry.block(layout).tokens
    return LayoutLimits(
        layout=layout,
        block_tokens=block_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=min(settings.max_model_len, settings.num_blocks * block_tokens),
        sp_floor=sp_floor(layout, config.max_sp, settings.captured_tokens),
        mixed_tokens=mixed_limit(layout, config.mixed_step_tokens),
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
            max_num_batched_tokens=settings.max_num_batched_tokens,
            instance_id=f"shoal-fake-{engine}",
        )
    )


def run_fake_engine(config: NodeConfig, engine: int, incarnation: int = 0) -> None:
    """Entry of a fake engine's process: serve until told to stop."""
    backend = FakeBackend(config, engine, incarnation)
    serve(backend, config, incarnation, Startup({"fake": 0.0}))
