"""A switch from one partition to another, which executes the table of stages.

A switch dissolves the groups that the target does not have, then forms the new ones; disjoint
groups proceed side by side. ``stages.py`` has the stages of each group, ``treatments.py`` says what
happens to running requests.

The partition changes when a group is DONE, never before. If anything fails, the switch undoes what
it can: it turns round and restores the partition before, as far as its engines are alive. A failure
after ``Commit`` cannot be undone: members may be inside a collective, so the group is lost.
"""

import enum
import secrets
from collections.abc import Collection, Iterator
from functools import cached_property

from shoal.policies.values.layouts import Unit, alone
from shoal.policies.values.partition import Partition
from shoal.runtime.controller.books.core_book import CoreBook
from shoal.runtime.controller.books.engine_book import EngineBook
from shoal.runtime.controller.books.statistics import SWITCH
from shoal.runtime.controller.switching.moves import (
    Counts,
    Missing,
    Move,
    Node,
    Stage,
)
from shoal.runtime.controller.switching.stages import DONE, RELEASING, RESUMING, WAITING
from shoal.runtime.controller.switching.treatments import TREATMENTS
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages.views import Phase


class SwitchOutcome(enum.StrEnum):
    """How a switch ended."""

    DONE = "done"
    FAILED = "failed"
    """It turned round: the partition is the one before, except for groups that lost an engine."""


class Switch:
    """One switch.

    Args:
        node: what the switch works on.
        target: canonical partition to reach.
        treatment: what happens to running requests.
        reason: why the switch happens, for the log and the metrics.
        wait: seconds for which the switch waits for requests to end.
        gives_up: whether the switch turns round if a stage waits longer than that. Otherwise it
            stops waiting this long after its start, and carries the requests that are left.
    """

    def __init__(
        self,
        node: Node,
        *,
        target: Partition,
        treatment: m.Treatment,
        reason: str,
        wait: float,
        gives_up: bool,
    ) -> None:
        units = node.books.units
        self.before = units.partition
        self.target = target
        self.treatment = treatment
        self.rules = TREATMENTS[treatment]
        self.reason = reason
        self.epoch = units.next_epoch()
        self.error: str | None = None
        self.status = 200
        """HTTP status of the outcome."""
        self.started = node.env.clock()
        self.late = False
        """Whether requests that the switch waited for did not end in time."""
        self.counts = Counts()
        self.phases: list[Phase] = []
        self.answers = 0
        """Number of engines' answers that the switch has taken."""
        self._node = node
        self._wait = wait
        self._gives_up = gives_up
        self.tally = node.carries.tally()
        """What the switch's carries have done."""
        self._restoring = False
        self._moves: list[Move] = []
        rules = self.rules
        waits = rules.waits and (gives_up or wait > 0)
        self._carries = rules.carries or (rules.lasts and not waits)
        self._plan(target, m.Treatment.SEQUENTIAL if waits else m.Treatment.HARD)
        copies = (self._copy_caches, self._copy_running) if rules.carries else ()
        self._copies = iter(copies)
        self._is_ahead = self._copies_ahead()
        if not self._is_ahead:
            self._free_engines(waits=waits)
            self._start()

    # --- what others see ----------------------------------------------------------------------

    @cached_property
    def traceparent(self) -> str:
        """W3C context of the switch's trace, to which several front ends refer."""
        return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"

    @property
    def done(self) -> bool:
        """Whether the switch is over, successfully or not."""
        has_turned = self.error is None or self._restoring
        return has_turned and self._is_regrouped and not self._node.carries.running

    @property
    def _is_regrouped(self) -> bool:
        return all(move.stage is DONE for move in self._moves)

    @property
    def outcome(self) -> SwitchOutcome:
        """How the switch ended, once it is done."""
        return SwitchOutcome.DONE if self.error is None else SwitchOutcome.FAILED

    @property
    def engines(self) -> frozenset[int]:
        """Engines that the switch regroups."""
        return frozenset(engine for move in self._moves for engine in move.unit.engines)

    @property
    def busy(self) -> frozenset[int]:
        """Engines that get no new requests: none while only KV is copied or requests carried."""
        return frozenset() if self._is_ahead or self._is_regrouped else self.engines

    @property
    def paused(self) -> int:
        """Number of requests that the switch has paused, and that were not carried."""
        if not self._carries:
            return self.counts.paused
        books, ended = self._node.books, self.tally.ended_early
        lost = (unit for unit in self.before if unit not in books.units.partition)
        return sum(len(books.requests.core(unit).requests.keys() - ended) for unit in lost)

    @property
    def deadline(self) -> float | None:
        """Clock time of the next time-out, if there is one."""
        due = (move.deadline for move in self._moves)
        return min((d for d in due if d is not None), default=None)

    def tied(self, engine: int) -> frozenset[int]:
        """Return the engines that die with this one because of a bind or release in progress."""
        for move in self._moves:
            if engine in move.unit.engines and move.stage.missing is Missing.BREAKS:
                return frozenset(move.unit.engines)
        return frozenset({engine})

    def is_released(self, unit: Unit) -> bool:
        """Return whether a unit is dissolved except that its members have not yet answered."""
        return any(move.unit == unit and move.stage is RESUMING for move in self._moves)

    # --- start --------------------------------------------------------------------------------

    def _plan(self, target: Partition, told: m.Treatment) -> None:
        """Add the moves that lead from the current partition to the target."""
        units = self._node.books.units
        before = units.partition
        for unit in before:
            if unit.is_group and unit not in target:
                self._moves.append(Move(unit, units.bound[unit], RELEASING, told, self.counts))
        for unit in target:
            if unit.is_group and unit not in before:
                self._moves.append(Move(unit, units.next_epoch(), WAITING, told, self.counts))

    def _copies_ahead(self) -> bool:
        """Begin the next pre-copies; return False if there are none left.

        Caches go first: what running requests fill meanwhile is then copied ahead with the rest.
        """
        return any(begin() for begin in self._copies)

    def _copy_caches(self) -> bool:
        return self._node.carries.copy_caches(self.target)

    def _copy_running(self) -> bool:
        return self._node.carries.copy_ahead(self._homeless(self.target), self.target)

    def _free_engines(self, *, waits: bool) -> None:
        """Carry or move the requests that the treatment does not leave where they are."""
        partition, engines = self._node.books.units.partition, self.engines
        if self._carries:
            self._carry(self.target)
        for core in self._homeless(self.target):
            if engines.isdisjoint(core.unit.engines):
                continue
            if self.rules.moves:
                self.counts.moved += len(core.requests)
                message = m.MoveOut(core.unit, list(core.requests))
                self._node.env.transport.to_engine(core.unit.leader, message)
            elif waits and core.unit in partition:
                self.counts.drained += len(core.requests)

    def _carry(self, target: Partition) -> None:
        """Begin to carry the requests of all cores whose unit a partition lacks."""
        self._node.carries.begin(self._homeless(target), target, SWITCH)

    def _homeless(self, target: Partition) -> list[CoreBook]:
        """Return the cores with requests whose unit a partition lacks."""
        cores = self._node.books.requests.cores.values()
        homeless = [core for core in cores if core.requests and core.unit not in target]
        return [core for core in homeless if not core.unit.tier]

    def _start(self) -> None:
        for move in self._open_moves():
            if move.stage is RELEASING:
                self._enter(move, RELEASING)
        self._end_waits()

    def _restore(self) -> None:
        """Go back to the partition before, as far as its engines are alive."""
        self._restoring = True
        target = whole(self.before, self._node.books.engines)
        self._plan(target, m.Treatment.HARD)
        if self._carries:
            self._carry(target)
        self._start()

    # --- stages -------------------------------------------------------------------------------

    def _open_moves(self) -> Iterator[Move]:
        return (move for move in list(self._moves) if move.stage is not DONE)

    def _enter(self, move: Move, stage: Stage) -> None:
        if stage is DONE:
            self._finish(move, move.stage.outcome)
            return
        node = self._node
        move.stage = stage
        move.since = node.env.clock()
        move.deadline = move.since + self._patience(move)
        move.awaiting = set((stage.awaited or stage.whom)(node, move))
        self._ask(move)
        if not move.awaiting:
            self._end(move)

    def _patience(self, move: Move) -> float:
        """Return how long the engines of a move may take to answer."""
        if not move.waits:
            return self._node.answer_timeout
        return self._wait if self._gives_up else self.started + self._wait - self._node.env.clock()

    def _ask(self, move: Move) -> None:
        node, stage = self._node, move.stage
        if stage.begin is not None:
            stage.begin(node, move)
        if stage.ask is not None:
            for engine in stage.whom(node, move):
                node.env.transport.to_engine(engine, stage.ask(node, move, engine))

    def _end(self, move: Move) -> None:
        """Go on to the next stage."""
        if move.stage.end is not None:
            move.stage.end(self._node, move)
        self._enter(move, move.stage.then(move))

    def _finish(self, move: Move, outcome: str) -> None:
        if move.stage.count is not None:
            move.stage.count(self._node.books.statistics.switches, outcome, self.reason)
        move.stage, move.deadline = DONE, None
        move.awaiting.clear()

    def _end_waits(self) -> None:
        """End the stages that waited for other moves, where these are done."""
        for move in self._moves:
            if move.stage.until is not None and move.stage.until(self._node, move):
                self._end(move)

    def _settle(self) -> None:
        """Start what has become possible: binds, imports, the restoration of a failed switch.

        Call it after any change.
        """
        if self._is_ahead:
            return
        if self.error is None or self._restoring:
            self._end_waits()
            self._node.carries.settle()
        elif self._is_regrouped and not self._node.carries.running:
            self._restore()

    # --- answers ------------------------------------------------------------------------------

    def handle(self, message: m.SwitchAnswer) -> bool:
        """Take an engine's answer; return False if no open move expects it."""
        move = next((move for move in self._open_moves() if move.epoch == message.epoch), None)
        take = None if move is None else move.stage.answers.get(type(message))
        if move is None or take is None:
            return False
        self.answers += 1
        take(self._node, move, message)
        if not move.awaiting:
            self._note_phases(move)
            self._end(move)
        self._settle()
        return True

    def _note_phases(self, move: Move) -> None:
        if move.stage.phases is not None:
            for phase in move.stage.phases(move, self._node.env.clock()):
                self._node.books.statistics.switches.phase(
                    phase.name, move.unit, phase.end - phase.start
                )
                self.phases.append(phase)

    # --- failures -----------------------------------------------------------------------------

    def tick(self) -> None:
        """Act on answers that did not come in time."""
        now = self._node.env.clock()
        if self._is_ahead and not self._node.carries.copies_ahead:
            self._is_ahead = self._copies_ahead()
            if not self._is_ahead:
                self._free_engines(waits=False)
                self._start()
        for move in self._open_moves():
            if move.deadline is not None and move.deadline <= now:
                self._time_out(move)
        self._settle()

    def lost(self, engines: Collection[int], reason: str) -> None:
        """Go on without engines that have died; the book already says that they are dead."""
        touched = [m for m in self._open_moves() if not set(engines).isdisjoint(m.unit.engines)]
        if touched and self._is_ahead:
            self._is_ahead = False
            for move in self._open_moves():
                move.stage = DONE  # none has begun
        for move in touched:
            if move.stage.missing is Missing.BREAKS:
                self._finish(move, "lost")
                continue
            for engine in engines:
                move.lent.pop(engine, None)
            self._go_without(move, engines)
        if touched:
            self._fail(503, reason)
            self._settle()

    def _time_out(self, move: Move) -> None:
        stage, waits, late = move.stage, move.waits, sorted(move.awaiting)
        if waits and not self._gives_up:
            self._wait_no_longer()
            return
        unit, seconds = list(move.unit.engines), self._patience(move)
        text = stage.unended if waits else stage.overdue
        error = text.format(late=late, unit=unit, seconds=seconds)
        if waits:
            self._fail(504, error)
        elif stage.missing is Missing.BREAKS:
            self._node.lose(move.unit.engines, f"unit {unit} is broken: {error}")
        else:
            self._node.books.engines.silence(late, error)
            self._go_without(move, late)
            self._fail(504, error)

    def _wait_no_longer(self) -> None:
        """Stop waiting for requests, and carry them: the switch is late."""
        self.late = self._carries = True
        self._carry(self.target)
        deadline = self._node.env.clock() + self._node.answer_timeout
        for move in self._open_moves():
            if move.waits:
                move.told = m.Treatment.HARD
                if move.deadline is not None:
                    move.deadline = deadline
                    self._ask(move)

    def _go_without(self, move: Move, engines: Collection[int]) -> None:
        """Stop waiting for answers of these engines."""
        move.awaiting.difference_update(engines)
        if move.stage.missing is Missing.SHRINKS and not move.awaiting:
            self._end(move)

    def _fail(self, status: int, error: str) -> None:
        """Turn round: undo every open move whose stage can be undone."""
        if self.error is None:
            self.error, self.status = error, status
        self._node.carries.give_up()
        for move in self._open_moves():
            stage = move.stage.undo(move)
            if stage is not move.stage:
                self._enter(move, stage)


def whole(partition: Partition, engines: EngineBook) -> Partition:
    """Return a partition in which every group that has lost an engine is split up."""
    units: list[Unit] = []
    for unit in partition:
        is_whole = not unit.is_group or engines.serves(unit)
        units += [unit] if is_whole else [alone(engine) for engine in unit.engines]
    return tuple(units)
