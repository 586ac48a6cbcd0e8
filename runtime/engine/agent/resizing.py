"""An engine's part in changes of memory between weights and KV.

To give up KV blocks, the engine first takes those that are free, while its steps go on. Only then
cores are paused whose requests hold some, until their steps in flight are collected. What these
blocks hold moves to others of the same core, and what finds no room is computed again. Paused units
do not move: their requests lose these blocks. Blocks come back from groups as in any other case.
What runners do next is a task of theirs, beside which, or behind which, steps go on.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from shoal.policies.values.layouts import Unit
from shoal.runtime.clock import Clock
from shoal.runtime.engine.agent.binding import Binding
from shoal.runtime.engine.agent.interface import Core, EngineBackend, plain_lease
from shoal.runtime.engine.agent.watchdog import StepWatch
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.transport import AgentTransport

log = logging.getLogger("shoal.engine")


class _Closing(msgspec.Struct):
    """Blocks that are given up."""

    epoch: int
    blocks: int
    """Those whose ids are above this number."""
    vacated: set[Unit]
    """The units of cores whose blocks were emptied, or that have nothing but what requests hold."""
    began: float
    preempted: int = 0
    closed: bool = False
    """Whether the engine has none of them left, and has said so."""
    cleared: float | None = None
    """When the engine had taken the free ones of its own."""
    drained: float = 0.0
    """Seconds until the last core that was paused had no step in flight."""
    emptied: float = 0.0
    """Seconds in which no step was scheduled because cores were emptied."""


class _Task(msgspec.Struct):
    """What the runners do."""

    message: m.FillWeights | m.UseWeights
    future: "Future[Any]"


class Resizing:
    """Does what the controller asks for a change of memory, and answers.

    Args:
        backend: the engine.
        transport: the way to the controller.
        binding: the bind that the engine is in.
        watch: told which units' next steps queue up behind a task of the runners.
        clock: seconds.
    """

    def __init__(
        self,
        backend: EngineBackend,
        transport: AgentTransport,
        binding: Binding,
        watch: StepWatch,
        clock: Clock,
    ) -> None:
        self._backend, self._transport = backend, transport
        self._binding, self._watch, self._clock = binding, watch, clock
        self._closing: _Closing | None = None
        self._holders: dict[Unit, list[str]] = {}
        """Requests that hold such blocks, by the unit of their core."""
        self._task: _Task | None = None

    @property
    def busy(self) -> bool:
        """Whether runners work on a task."""
        return self._task is not None

    def holds(self, core: Core) -> bool:
        """Return whether a core pauses because requests are about to get other blocks."""
        return core.unit in self._holders

    def take(self, message: m.ToMemory) -> None:
        """Begin what the controller wants. A newer change ends an older one."""
        backend = self._backend
        match message:
            case m.CloseBlocks(epoch, blocks):
                self._closing = _Closing(epoch, blocks, {backend.own.unit}, self._clock())
            case m.OpenBlocks(epoch):
                self._closing = None
                self._holders.clear()
                backend.own.restore()
                self._transport.to_controller(m.BlocksOpened(epoch, backend.engine))
            case m.FillWeights(epoch, unit, blocks, level):
                self._closing = None  # all engines have given up their blocks
                self._holders.clear()
                self._watch.expect_delay(unit)
                if unit.leader == backend.engine:
                    self._task = _Task(message, backend.fill_weights(unit, blocks, level))
                else:
                    self._transport.to_controller(m.WeightsFilled(epoch, backend.engine))
            case m.UseWeights(epoch, unit, level):
                self._watch.expect_delay(unit)
                if unit.leader == backend.engine:
                    self._task = _Task(message, backend.use_weights(unit, level))
                else:
                    self._transport.to_controller(m.WeightsUsed(epoch, backend.engine, {}))

    def take_back(self, blocks: Sequence[int]) -> None:
        """Take back blocks that were lent: those that are given up are lent to nobody again."""
        own = self._backend.own
        own.take_back(blocks)
        if self._closing is not None:
            own.withhold(self._closing.blocks)

    def tend(self) -> bool:
        """Do what is due; return whether a core that was paused goes on."""
        self._end_task()
        closing = self._closing
        if closing is None:
            return False
        goes_on, own = self._clear(closing), self._backend.own
        goes_on |= self._vacate(closing)
        self._surrender(closing)
        if closing.cleared is None or own.unit in self._holders:
            return goes_on  # free blocks cache something that moves, or may move with them
        # Also after the answer: a lease may have grown by what a member had lent before.
        left = own.withhold(closing.blocks)
        moving = any(core.is_moving for core in self._backend.cores.values())
        if not (left or self._holders or moving or closing.closed):
            closing.closed = True
            self._log(closing)
            self._transport.to_controller(
                m.BlocksClosed(closing.epoch, self._backend.engine, closing.preempted)
            )
        return goes_on

    def _clear(self, closing: _Closing) -> bool:
        """Take free blocks of the engine's own; return whether there are more to be taken now."""
        own = self._backend.own
        if closing.cleared is not None:
            return False
        goes_on = own.clear(closing.blocks, moves=own in self._binding.serving)
        if not (goes_on or own.is_clearing):
            closing.cleared = self._clock()
        return goes_on

    def _vacate(self, closing: _Closing) -> bool:
        goes_on = False
        for unit, core in self._backend.cores.items():
            if core is self._backend.own and closing.cleared is None:
                continue  # its steps go on meanwhile
            holders = core.holders(closing.blocks)
            if holders and core.in_flight:
                core.pause()
                self._holders[unit] = holders
                continue
            if unit in self._holders:
                closing.drained = self._clock() - closing.began
                del self._holders[unit]
            goes_on |= bool(holders)
            if holders or unit not in closing.vacated:
                self._empty(closing, core)
        return goes_on

    def _empty(self, closing: _Closing, core: Core) -> None:
        began = self._clock()
        closing.vacated.add(core.unit)
        # Nobody reads the queue of a unit that is paused.
        moves = core in self._binding.serving
        closing.preempted += core.vacate(closing.blocks, moves=moves)
        closing.emptied += self._clock() - began

    def _log(self, closing: _Closing) -> None:
        cleared = 0.0 if closing.cleared is None else closing.cleared - closing.began
        log.info(
            "engine %d gave up its KV blocks above %d in %.3f s: free ones in %.3f s beside steps, "
            "cores were drained after %.3f s and emptied in %.3f s, %d requests preempted",
            self._backend.engine,
            closing.blocks,
            self._clock() - closing.began,
            cleared,
            closing.drained,
            closing.emptied,
            closing.preempted,
        )

    def _surrender(self, closing: _Closing) -> None:
        """Return what groups have of other engines' closed blocks, and of this one's."""
        for unit, core in self._backend.groups.items():
            returned = plain_lease(core.surrender(closing.blocks)) if core.lease_blocks else {}
            if any(returned.values()):
                self._transport.to_controller(m.Returning(self._binding.epoch, unit, returned))

    def _end_task(self) -> None:
        task = self._task
        if task is None or not task.future.done():
            return
        self._task, engine = None, self._backend.engine
        match task.message:
            case m.FillWeights(epoch):
                # A member that has died is no problem of the others.
                error = task.future.exception()
                text = str(error) if error is not None else task.future.result()
                self._transport.to_controller(
                    m.WeightsFilled(epoch, engine, str(text).split("\n")[0])
                )
            case m.UseWeights(epoch):
                used = {} if task.future.exception() is not None else task.future.result()
                self._transport.to_controller(m.WeightsUsed(epoch, engine, used))
