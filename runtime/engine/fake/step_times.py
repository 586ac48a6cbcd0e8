"""How long the fake engine's steps take, and when its devices are free for them."""

import math
from collections.abc import Iterable
from typing import Protocol

import msgspec

from shoal.policies.values.batch import Batch, Mode
from shoal.policies.values.layouts import Layout, Unit
from shoal.policies.values.level import WHOLE, Level, slowest
from shoal.policies.values.pace import stage_seconds
from shoal.runtime.engine.fake.fake_kv import KvMemory
from shoal.runtime.protocol.messages import Work


class StepTimes(Protocol):
    """Maps a unit's layout, the work of a step and its mode to the step's seconds."""

    def __call__(self, layout: Layout, batch: Batch, mode: Mode = Mode.TP, /) -> float: ...  # noqa: D102


def constant(seconds: float) -> StepTimes:
    """Return step times that depend on nothing."""
    return lambda _layout, _batch, _mode=Mode.TP: seconds


class HopTimes(Protocol):
    """Maps a pipeline's layout and the work of a step to the seconds of a hop between two stages.

    They are a part of the step's seconds, once for every two stages that follow each other.
    """

    def __call__(self, layout: Layout, batch: Batch, /) -> float: ...  # noqa: D102


def no_hops(_layout: Layout, _batch: Batch) -> float:
    """Let hops take no time."""
    return 0.0


class DeviceStep(msgspec.Struct, kw_only=True):
    """A step on the devices of a group, or a run of equal ones."""

    seconds: float
    """Duration of one step."""
    count: int = 1
    start: float = math.inf
    """Clock time; infinite until it is queued."""
    hop: float = 0.0
    """The part of ``seconds`` in which it is between two stages of a pipeline."""
    waited: float = 0.0
    """How long it has waited between stages, for the steps before it."""

    @property
    def due(self) -> float:
        """Clock time at which the last step is done."""
        return self.start + self.seconds * self.count + self.waited

    def cut(self, now: float) -> None:
        """End a run of steps with the step that is computed now."""
        if self.count > 1:
            done = int((now - self.start) / self.seconds)
            self.count = max(1, min(self.count, done + 1))


class Devices:
    """When each engine's device has done all that is queued for it.

    A device computes its steps in the order they come, whichever core sends them: the first step of
    a group waits for the members' steps in flight. Cores that share devices share one instance.
    """

    def __init__(self) -> None:
        self.memory = KvMemory()
        """What the devices' blocks hold."""
        self._free_at: dict[int, float] = {}
        self._latest: dict[Unit, DeviceStep] = {}
        self._link_free_at: dict[int, float] = {}
        """When what is sent to a stage has arrived, by its first engine."""
        self._levels: dict[int, Level] = {}
        """The level of memory of each engine."""

    def have_level(self, engines: Iterable[int], level: Level) -> None:
        """Take note that engines have another level of memory from now on."""
        self._levels.update(dict.fromkeys(engines, level))

    def level(self, unit: Unit) -> Level:
        """Return the level of memory of a unit's slowest member."""
        return slowest(self._levels.get(engine, WHOLE) for engine in unit.engines)

    def queue(self, unit: Unit, step: DeviceStep, now: float) -> None:
        """Queue a step: it starts when the unit's devices are free.

        In a pipeline it starts when those of the first stage are. In each stage it waits for the
        step before it, and so it does for the link to the next stage, on which it is sent while
        its stage computes another step.
        """
        if unit.layout.pp > 1:
            self._queue_in_stages(unit, step, now)
            return
        self._latest[unit] = step
        step.start = self.free_at(unit, now)
        self._free_at.update(dict.fromkeys(unit.engines, step.due))

    def _queue_in_stages(self, unit: Unit, step: DeviceStep, now: float) -> None:
        layout = unit.layout
        seconds = stage_seconds(layout, step.seconds, step.hop)
        begin, step.start = now, math.inf
        for first in range(0, layout.world_size, layout.tp):
            members = unit.engines[first : first + layout.tp]
            if first:
                sent = max(begin, self._link_free_at.get(members[0], 0.0))
                begin = self._link_free_at[members[0]] = sent + step.hop
            begin = max(begin, *(self._free_at.get(engine, 0.0) for engine in members))
            step.start = min(step.start, begin)
            begin += seconds
            self._free_at.update(dict.fromkeys(members, begin))
        step.waited = begin - step.start - step.seconds

    def free_at(self, unit: Unit, now: float) -> float:
        """Return when a unit's devices have done all that is queued for them."""
        return max(now, *(self._free_at.get(engine, 0.0) for engine in unit.engines))

    def renew(self, engine: int) -> None:
        """Take note of an engine that starts: nothing is queued, and its blocks are empty."""
        self.memory.clear(engine)
        self._free_at.pop(engine, None)
        self._link_free_at.pop(engine, None)
        for unit in [unit for unit in self._latest if engine in unit.engines]:
            del self._latest[unit]

    def cut(self, unit: Unit, now: float) -> None:
        """End a core's run with the step that is computed now: something else comes next.

        Nothing is ever queued behind a run, because cores cut it before they stop or queue more.
        """
        step = self._latest.get(unit)
        if step is not None and step.count > 1 and now < step.due:
            step.cut(now)
            self._free_at.update(dict.fromkeys(unit.engines, step.due))


def repeated(step: Work, count: int) -> Work:
    """Return the work of ``count`` steps that follow each other, given the first of them."""
    if count == 1:
        return step
    grown = step.decodes * (count * (count - 1) // 2)
    context = count * step.context_tokens + grown
    return Work(count, 0.0, count * step.decodes, context, 0, 0)
