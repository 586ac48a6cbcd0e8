"""How long the fake engine's steps take, and when its devices are free for them."""

import math
from collections.abc import Callable
from typing import Protocol

import msgspec

from shoal.policies.values.batch import Batch, Mode
from shoal.policies.values.layouts import Layout, Unit, alone
from shoal.runtime.config import INTERLEAVE_RATIO
from shoal.runtime.engine.link.step_queues import Turns


class StepTimes(Protocol):
    """Maps a unit's layout, the work of a step and its mode to the step's seconds."""

    def __call__(self, layout: Layout, batch: Batch, mode: Mode = Mode.TP, /) -> float: ...  # noqa: D102


def constant(seconds: float) -> StepTimes:
    """Return step times that depend on nothing."""
    return lambda _layout, _batch, _mode=Mode.TP: seconds


class DeviceStep(msgspec.Struct, kw_only=True):
    """A step on the devices of a group, or a run of equal ones."""

    seconds: float
    """Duration of one step."""
    count: int = 1
    start: float = math.inf
    """Clock time; infinite while the step waits for its turn."""

    @property
    def due(self) -> float:
        """Clock time at which the last step is done."""
        return self.start + self.seconds * self.count

    def cut(self, now: float) -> None:
        """End a run of steps with the step that is computed now."""
        if self.count > 1:
            done = int((now - self.start) / self.seconds)
            self.count = max(1, min(self.count, done + 1))


class _Sharing(msgspec.Struct):
    """An engine that interleaves its own steps with those of a group."""

    unit: Unit
    turns: Turns
    own_works: bool = True
    waiting: DeviceStep | None = None
    """The own step that waits for its turn."""


class Devices:
    """When each engine's device has done all that is queued for it.

    A device computes its steps in the order they come, whichever core sends them: the first step of
    a group waits for the members' steps in flight. An engine that interleaves takes its own steps
    in turn with its group's, as a runner does (``step_queues.StepQueues``). Cores that share
    devices share one instance.

    Args:
        ratio: see ``Turns``.
        changed: called with the leader of a unit when its step in flight gets another end than it
            had when it was queued.
    """

    def __init__(
        self, ratio: int = INTERLEAVE_RATIO, changed: Callable[[int], None] = lambda _engine: None
    ) -> None:
        self._ratio = ratio
        self._changed = changed
        self._free_at: dict[int, float] = {}
        self._sharing: dict[int, _Sharing] = {}
        self._latest: dict[Unit, DeviceStep] = {}

    def queue(self, unit: Unit, step: DeviceStep, now: float) -> None:
        """Queue a step: it starts when the unit's devices are free, and when it is its turn."""
        self._latest[unit] = step
        sharing = self._sharing.get(unit.leader) if not unit.is_group else None
        if sharing is None:
            self._queue_in_turn(unit, step, now)
            return
        sharing.own_works = True
        sharing.waiting = step
        self.cut(sharing.unit, now)
        self._start_waiting(unit.leader, now)

    def _queue_in_turn(self, unit: Unit, step: DeviceStep, now: float) -> None:
        sharing = [engine for engine in unit.engines if engine in self._sharing]
        for engine in sharing:
            self.cut(alone(engine), now)
        self._start(unit, step, now)
        for engine in sharing:
            self._sharing[engine].turns.group_step()
            self._start_waiting(engine, now)

    def rest(self, unit: Unit, now: float) -> None:
        """Note that a core has nothing to queue for now."""
        if not unit.is_group and unit.leader in self._sharing:
            self._sharing[unit.leader].own_works = False
        for engine in unit.engines if unit.is_group else ():
            if engine in self._sharing:
                self._sharing[engine].turns.group_rests()
                self._start_waiting(engine, now)

    def interleave(self, engine: int, group: Unit, now: float) -> None:
        """Let an engine take its own steps in turn with those of a group from now on."""
        self._sharing[engine] = _Sharing(group, Turns(self._ratio))
        self.cut(alone(engine), now)

    def separate(self, engine: int, now: float) -> None:
        """End ``interleave``: what the engine queues now comes after the group's last step."""
        sharing = self._sharing.pop(engine, None)
        if sharing is not None and sharing.waiting is not None:
            self._start(alone(engine), sharing.waiting, now)
            self._changed(engine)

    def forget(self, engine: int) -> None:
        """Forget what was queued for an engine that died."""
        self._free_at.pop(engine, None)
        self._sharing.pop(engine, None)
        for unit in [unit for unit in self._latest if engine in unit.engines]:
            del self._latest[unit]

    def is_shared(self, unit: Unit) -> bool:
        """Return whether other steps may want a turn between two of this core's."""
        sharing = [self._sharing[engine] for engine in unit.engines if engine in self._sharing]
        if not unit.is_group:
            return any(shared.turns.group_works for shared in sharing)
        return any(shared.own_works for shared in sharing)

    def _start_waiting(self, engine: int, now: float) -> None:
        sharing = self._sharing[engine]
        if sharing.waiting is not None and sharing.turns.own_allowed:
            step, sharing.waiting = sharing.waiting, None
            sharing.turns.own_step()
            self._start(alone(engine), step, now)
            self._changed(engine)

    def _start(self, unit: Unit, step: DeviceStep, now: float) -> None:
        step.start = max(now, *(self._free_at.get(engine, 0.0) for engine in unit.engines))
        self._free_at.update(dict.fromkeys(unit.engines, step.due))

    def cut(self, unit: Unit, now: float) -> None:
        """End a core's run with the step that is computed now: other steps need the next turn.

        Nothing is ever queued behind a run, because a new step cuts the run first.
        """
        step = self._latest.get(unit)
        if step is not None and step.count > 1 and now < step.due:
            step.cut(now)
            self._free_at.update(dict.fromkeys(unit.engines, step.due))
            self._changed(unit.leader)
