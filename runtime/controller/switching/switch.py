"""A switch from one partition to another, as a state machine over the engines' answers.

A switch dissolves the groups that the target does not have, then forms those that are new, disjoint
ones side by side. Each group goes through its own stages:

    release:  RELEASING ──Released──> RESUMING ──Resumed from all──> DONE
    bind:     WAITING ──members free──> PREPARING ──Prepared from all──> COMMITTING ──> DONE
                                            └─time-out, death─> ABORTING ──Resumed──> DONE

The partition changes when a group is DONE, never before. If anything fails, what can be undone is:
the switch turns round and restores the partition it started from, as far as its engines are alive.
A failure after ``Commit`` cannot be undone: members may be inside a collective, the group is lost.

While a switch waits for requests, its engines start no others. So it waits for a bounded time. Then
an operator's switch is given up, and a policy's goes on without waiting: it is *late*. Requests of
single engines go on beside their group then (interleave), where they leave it room. All others that
it has waited for pause (hard), but for those of groups that can be moved.
"""

import secrets
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property

from shoal.policies.values.layouts import Unit, alone
from shoal.policies.values.partition import Partition
from shoal.runtime.clock import Clock
from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.core_book import CoreBook
from shoal.runtime.controller.books.engine_book import EngineState
from shoal.runtime.controller.switching.stages import (
    COMMITTED_STAGES,
    Move,
    Stage,
    SwitchOutcome,
    bind_treatment,
    count_end,
    late_bind_treatment,
    release_treatment,
    whole,
)
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages.views import Phase
from shoal.runtime.protocol.transport import ControllerTransport

LoseEngines = Callable[[Collection[int], str], None]
"""Called with engines that a broken group takes down, and why."""


class Switch:
    """One switch.

    Args:
        books: engines, units and leases; the switch moves the latter two.
        transport: the way to the engines.
        clock: monotonic seconds.
        lose: takes engines down that a broken group has lost.
        target: canonical partition to reach.
        treatment: what happens to running requests.
        reason: why, for the log and the metrics.
        wait: seconds that requests have to end where they are waited for.
        gives_up: whether it turns round if a stage takes longer; else it goes on without waiting
            for them, so long after its start.
        answer_timeout: seconds that an engine has for any other answer.
        lease: returns the blocks that a new group's members are asked for.
        leaves_room: whether requests of a new group's single engines may go on beside it.
        seed: returns the shared seed of a bind, given its epoch.
        rebound: groups of both partitions that are released and bound again, so that requests that
            are paused on their single engines go on beside them.
    """

    def __init__(
        self,
        books: Books,
        transport: ControllerTransport,
        *,
        clock: Clock,
        lose: LoseEngines,
        target: Partition,
        treatment: m.Treatment,
        reason: str,
        wait: float,
        gives_up: bool,
        answer_timeout: float,
        lease: Callable[[Unit], int],
        leaves_room: Callable[[Unit], bool],
        seed: Callable[[int], int],
        rebound: Collection[Unit] = (),
    ) -> None:
        self.before = books.units.partition
        self.target = target
        self.treatment = treatment
        self.reason = reason
        self.epoch = books.units.next_epoch()
        self.error: str | None = None
        self.status = 200
        """HTTP status of the outcome."""
        self.started = clock()
        self.late = False
        """Whether requests that it waited for did not end in time."""
        self.paused = 0
        self.resumed = 0
        self.drained = 0
        self.moved = 0
        self.phases: list[Phase] = []
        self.answers = 0
        """That engines have given to it."""
        self._engines = books.engines
        self._units = books.units
        self._requests = books.requests
        self._leases = books.leases
        self._statistics = books.statistics.switches
        self._transport = transport
        self._clock = clock
        self._lose = lose
        self._wait = wait
        self._gives_up = gives_up
        self._answer_timeout = answer_timeout
        self._lease = lease
        self._leaves_room = leaves_room
        self._seed = seed
        self._rebound = frozenset(rebound)
        self._interleaving = frozenset(books.units.interleaving)
        self._restoring = False
        self._moves: list[Move] = []
        self._touched: set[int] = set()
        self._begin(target)

    # --- what others see ----------------------------------------------------------------------

    @cached_property
    def traceparent(self) -> str:
        """W3C context of its trace, which several front ends refer to."""
        return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"

    @property
    def done(self) -> bool:
        """Whether it is over, well or not."""
        return all(move.stage is Stage.DONE for move in self._moves)

    @property
    def outcome(self) -> SwitchOutcome:
        """How it ended, once it is done."""
        return SwitchOutcome.DONE if self.error is None else SwitchOutcome.FAILED

    @property
    def engines(self) -> frozenset[int]:
        """Engines that the switch regroups: they get no new requests until it is over."""
        return frozenset(self._touched)

    @property
    def deadline(self) -> float | None:
        """Clock time of the next time-out."""
        due = (move.deadline for move in self._moves if move.stage is not Stage.DONE)
        return min((d for d in due if d is not None), default=None)

    def tied(self, engine: int) -> frozenset[int]:
        """Return the engines that die with this one because of a bind or release in progress."""
        for move in self._moves:
            if engine in move.unit.engines and move.stage in COMMITTED_STAGES:
                return frozenset(move.unit.engines)
        return frozenset({engine})

    def is_released(self, group: Unit) -> bool:
        """Return whether a unit of the partition is dissolved but for its members' answers."""
        return any(m.unit == group and m.stage is Stage.RESUMING for m in self._moves)

    # --- start --------------------------------------------------------------------------------

    def _begin(self, target: Partition) -> None:
        stays = set(self._units.partition).intersection(target) - self._rebound
        old = [g for g in self._units.partition if g.is_group and g not in stays]
        new = [g for g in target if g.is_group and g not in stays]
        self._moves = [
            Move(g, self._units.bound[g], Stage.RELEASING, self._release_treatment()) for g in old
        ]
        self._moves += [
            Move(g, self._units.next_epoch(), Stage.WAITING, self._bind_treatment(g)) for g in new
        ]
        self._touched.update(engine for move in self._moves for engine in move.unit.engines)
        if self.treatment is m.Treatment.SOFT and not self._restoring:
            self._free_engines(target)
        if not self._restoring and self._waits:
            self.drained += sum(len(core.requests) for core in self._drained_cores(target))
        for move in self._moves[: len(old)]:
            self._await(move, Stage.RELEASING, [move.unit.leader], self._patience(move))
            if not (self._waits or self._restoring):
                self._move_late(move)
            self._tell_release(move)
        self._prepare_free()

    def _drained_cores(self, target: Partition) -> Iterator[CoreBook]:
        """Yield the cores whose requests must all end before the target is reached."""
        for core in self._requests.cores.values():
            running = core.unit in self._units.partition or self._units.interleaves(core.unit)
            if (
                not running
                or core.unit in target
                or not self._touched.intersection(core.unit.engines)
            ):
                continue
            grouped = self.treatment is m.Treatment.INTERLEAVE and core.unit.is_group
            if grouped or self.treatment is m.Treatment.SEQUENTIAL:
                yield core

    @property
    def _waits(self) -> bool:
        """Whether there is a time in which requests are waited for."""
        return self._gives_up or (not self.late and self._wait > 0)

    def _release_treatment(self) -> m.Treatment:
        # A restored unit held no request that could be waited for: nothing was sent to it.
        return release_treatment(self.treatment, waits=self._waits and not self._restoring)

    def _bind_treatment(self, group: Unit) -> m.Treatment:
        if self._restoring:
            interleaved = group in self._interleaving
            return m.Treatment.INTERLEAVE if interleaved else m.Treatment.HARD
        if self._waits:
            return bind_treatment(self.treatment)
        return late_bind_treatment(self.treatment, leaves_room=self._leaves_room(group))

    def _patience(self, move: Move) -> float:
        """Return how long the engines of a move may take for what they are told."""
        if move.treatment is not m.Treatment.SEQUENTIAL:
            return self._answer_timeout
        return self._wait if self._gives_up else self.started + self._wait - self._clock()

    def _free_engines(self, target: Partition) -> None:
        """Free the engines of their requests, those paused in other groups included."""
        for core in self._requests.cores.values():
            if core.unit not in target and self._touched.intersection(core.unit.engines):
                stay = len(core.requests) - self._move_out(core)
                self.drained += stay if self._waits else 0

    def _move_out(self, core: CoreBook) -> int:
        """Have those of a core's requests given back that can go on elsewhere; return how many."""
        movable = core.movable()
        self.moved += len(movable)
        if movable:
            message = m.MoveOut(core.unit, movable)
            self._transport.to_engine(core.unit.leader, message)
        return len(movable)

    def _move_late(self, move: Move) -> None:
        """Move what can be moved of a group whose requests are not waited for (any more)."""
        waited = self.treatment in (m.Treatment.SEQUENTIAL, m.Treatment.INTERLEAVE)
        if waited and move.unit not in self._rebound:
            self._move_out(self._requests.core(move.unit))

    def _prepare_free(self) -> None:
        """Start the binds whose members are alone now."""
        for move in self._moves:
            if move.stage is not Stage.WAITING:
                continue
            if all(alone(engine) in self._units.partition for engine in move.unit.engines):
                self._await(move, Stage.PREPARING, move.unit.engines, self._patience(move))
                self._tell_prepare(move)

    def _tell_prepare(self, move: Move) -> None:
        lease = self._lease(move.unit)
        for engine in move.unit.engines:
            prepare = m.Prepare(move.epoch, move.unit, move.treatment, lease)
            self._transport.to_engine(engine, prepare)

    def _tell_release(self, move: Move) -> None:
        release = m.Release(move.epoch, move.unit, move.treatment)
        self._transport.to_engine(move.unit.leader, release)

    def _await(self, move: Move, stage: Stage, engines: Iterable[int], seconds: float) -> None:
        move.stage = stage
        move.awaiting = set(engines)
        move.since = self._clock()
        move.deadline = move.since + seconds

    # --- answers ------------------------------------------------------------------------------

    def handle(self, message: m.Prepared | m.Committed | m.Released | m.Resumed) -> bool:
        """Take an engine's answer; False when it is about nothing that is going on."""
        move = next((move for move in self._moves if move.epoch == message.epoch), None)
        if move is None:
            return False
        match message:
            case m.Prepared() if move.stage is Stage.PREPARING:
                self._prepared(move, message)
            case m.Committed(engine=engine) if move.stage is Stage.COMMITTING:
                self._committed(move, engine)
            case m.Committed() if move.stage is Stage.KEEPING:
                self._finish(move)
            case m.Released() if move.stage in (Stage.RELEASING, Stage.KEEPING):
                self._released(move, message)
            case m.Resumed() if move.stage in (Stage.RESUMING, Stage.ABORTING):
                self._resumed(move, message)
            case _:
                return False
        self.answers += 1
        self._settle()
        return True

    def _prepared(self, move: Move, message: m.Prepared) -> None:
        self._leases.add(message.engine, move.unit, message.blocks)
        move.lent[message.engine] = message.blocks
        move.awaiting.discard(message.engine)
        move.lend_seconds = max(move.lend_seconds, message.lend_seconds)
        self.paused += message.paused
        if not move.awaiting:
            now = self._clock()
            began = max(move.since, now - move.lend_seconds)
            self._note_phase("drain", move, move.since, began)
            self._note_phase("lease", move, began, now)
            self._commit(move)

    def _commit(self, move: Move) -> None:
        lease = self._leases.even_out(move.unit, move.lent)
        self._leases.open(move.unit, len(lease[move.unit.leader]))
        self._await(move, Stage.COMMITTING, move.unit.engines, self._answer_timeout)
        for engine in move.unit.engines:
            commit = m.Commit(move.epoch, move.unit, self._seed(move.epoch), lease)
            self._transport.to_engine(engine, commit)

    def _committed(self, move: Move, engine: int) -> None:
        move.awaiting.discard(engine)
        if not move.awaiting:
            self._count_phase("commit", move)
            interleaves = move.treatment is m.Treatment.INTERLEAVE
            self._units.bind(move.unit, move.epoch, interleaves=interleaves)
            self.resumed += len(self._requests.core(move.unit).requests)
            self._finish(move)

    def _released(self, move: Move, message: m.Released) -> None:
        self._leases.cancel(move.unit)
        self._leases.close(move.unit, message.returned)
        self.paused += message.paused
        self._count_phase("release", move)
        self._await(move, Stage.RESUMING, self._alive(move.unit), self._answer_timeout)
        for engine in sorted(move.awaiting):
            blocks = message.returned.get(engine, [])
            self._transport.to_engine(engine, m.Resume(move.epoch, move.unit, blocks))

    def _resumed(self, move: Move, message: m.Resumed) -> None:
        move.awaiting.discard(message.engine)
        self.resumed += message.resumed
        if not move.awaiting:
            self._count_phase("resume", move)
            self._free(move)

    def _free(self, move: Move) -> None:
        if move.stage is Stage.RESUMING:
            self._units.release(move.unit)
        self._finish(move)

    def _finish(self, move: Move, *, lost: bool = False) -> None:
        count_end(self._statistics, move, self.reason, lost=lost)
        move.stage = Stage.DONE
        move.awaiting.clear()
        move.deadline = None

    def _count_phase(self, name: str, move: Move) -> None:
        """Count the stage that a move has gone through, but for an abort and what it undoes."""
        if move.stage not in (Stage.ABORTING, Stage.KEEPING):
            self._note_phase(name, move, move.since, self._clock())

    def _note_phase(self, name: str, move: Move, start: float, end: float) -> None:
        self._statistics.phase(name, move.unit, end - start)
        self.phases.append(Phase(name, move.unit, start, end))

    def _alive(self, group: Unit) -> list[int]:
        gone = self._engines.gone
        return [engine for engine in group.engines if engine not in gone]

    # --- failures -----------------------------------------------------------------------------

    def tick(self) -> None:
        """Act on answers that did not come in time."""
        now = self._clock()
        for move in self._open_moves():
            if move.deadline is not None and move.deadline <= now:
                self._time_out(move)
        self._settle()

    def _open_moves(self) -> Iterator[Move]:
        return (move for move in list(self._moves) if move.stage is not Stage.DONE)

    def _go_on(self) -> None:
        """Wait for no request any more: the switch is late."""
        self.late = True
        deadline = self._clock() + self._answer_timeout
        for move in self._open_moves():
            if move.treatment is not m.Treatment.SEQUENTIAL:
                continue
            match move.stage:
                case Stage.RELEASING:
                    move.treatment, move.deadline = self._release_treatment(), deadline
                    self._move_late(move)
                    self._tell_release(move)
                case Stage.PREPARING:
                    move.treatment, move.deadline = self._bind_treatment(move.unit), deadline
                    self._tell_prepare(move)
                case Stage.WAITING:
                    move.treatment = self._bind_treatment(move.unit)

    def _time_out(self, move: Move) -> None:
        late = sorted(move.awaiting)
        unit = list(move.unit.engines)
        waits, patience = move.treatment is m.Treatment.SEQUENTIAL, self._patience(move)
        match move.stage:
            case Stage.PREPARING | Stage.RELEASING if waits and not self._gives_up:
                self._go_on()
            case Stage.PREPARING:
                error = f"engines {late} did not reach a safe point within {patience:g} s"
                if not waits:
                    self._engines.silence(late, error)
                self._fail(504, error)
            case Stage.RELEASING if waits:
                self._fail(504, f"the requests of unit {unit} did not end in {patience:g} s")
            case Stage.COMMITTING | Stage.RELEASING | Stage.KEEPING:
                error = f"engines {late} did not answer within {self._answer_timeout:g} s"
                self._lose(move.unit.engines, f"unit {unit} is broken: {error}")
            case Stage.RESUMING | Stage.ABORTING:
                error = f"engines {late} did not answer within {self._answer_timeout:g} s"
                self._engines.silence(late, error)
                self._free(move)
                self._fail(504, error)

    def _fail(self, status: int, error: str) -> None:
        """Turn round: stop what has not happened, undo what is half done."""
        if self.error is None:
            self.error, self.status = error, status
        for move in self._open_moves():
            if move.stage is Stage.WAITING:
                self._finish(move)
            elif move.stage is Stage.PREPARING:
                self._abort(move)
            elif move.stage is Stage.RELEASING and move.treatment is m.Treatment.SEQUENTIAL:
                self._await(move, Stage.KEEPING, [move.unit.leader], self._answer_timeout)
                keep = m.KeepBound(move.epoch, move.unit)
                self._transport.to_engine(move.unit.leader, keep)

    def _abort(self, move: Move) -> None:
        for engine, blocks in move.lent.items():
            # The engine itself takes back what it lent in ``Prepare``.
            self._leases.remove(engine, move.unit, blocks)
        alive = self._alive(move.unit)
        answering = [e for e in alive if self._engines[e].state is EngineState.SERVING]
        self._await(move, Stage.ABORTING, answering, self._answer_timeout)
        for engine in alive:
            self._transport.to_engine(engine, m.AbortBind(move.epoch, move.unit))
        if not answering:
            self._finish(move)

    def lost(self, engines: Collection[int], reason: str) -> None:
        """Go on without engines that have died; the book says already that they are dead."""
        touched = False
        for move in self._open_moves():
            if not set(engines).intersection(move.unit.engines):
                continue
            touched = True
            if move.stage in COMMITTED_STAGES:
                self._finish(move, lost=True)
                continue
            move.awaiting.difference_update(engines)
            for engine in engines:
                move.lent.pop(engine, None)
            if move.stage in (Stage.RESUMING, Stage.ABORTING) and not move.awaiting:
                self._free(move)
        if touched:
            self._fail(503, reason)
            self._settle()

    def _settle(self) -> None:
        """After every change: go on to the next binds, or to the restoration of a failed switch."""
        if self.error is None or self._restoring:
            self._prepare_free()
        elif self.done:
            self._restoring, self._rebound = True, frozenset()
            self._begin(whole(self.before, self._engines))
