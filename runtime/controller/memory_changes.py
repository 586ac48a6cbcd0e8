"""Changes of memory between weights and KV: engines share weights, or each has some whole.

    to whole weights:   CLOSING ──> FILLING ──> USING ──> done
    to shared weights:  USING ──> OPENING ──> done

Whole are all weights, or each engine's layers of one pipeline (``Level``). From one of these levels
to another the way leads over shared weights, the level of the start.

Every stage sends one message to each engine of the change, and ends when all have answered. Engines
do not depend on each other in it: what an engine keeps for its peers stays where it is, and each
computes the same at every level. So a change goes on without engines that die. An engine that
comes back shares weights, as at the start, and follows the others when no other operation runs.
Before USING a change to whole weights is undone if anything else fails.
"""

import enum
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from shoal.policies.values.level import WHOLE, Level, slowest
from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.capacity import Capacity
from shoal.runtime.controller.books.engine_book import EngineState
from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.controller.books.statistics import MANUAL, REJOIN
from shoal.runtime.controller.level_checks import LevelChecks
from shoal.runtime.controller.switching.moves import LoseEngines
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages.views import MemoryView
from shoal.runtime.protocol.transport import ControllerTransport

log = logging.getLogger("shoal.controller")

FILL_SECONDS = 600.0
"""How long engines may take to copy what their peers keep."""
USE_SECONDS = 60.0
"""How long engines may take to go on with other memory. One that takes longer is lost."""
RETRY_SECONDS = 5.0
"""Pause before engines that are back try again to follow the others."""
CHANGES_KEPT = 32
"""Past changes that ``GET /admin/layout`` shows."""


class Stage(enum.Enum):
    """How far a change has come; each value says what an engine that is late has not done."""

    CLOSING = "given up their KV blocks"
    FILLING = "copied their weights"
    USING = "gone on with other memory"
    OPENING = "opened their KV blocks"


class Change(msgspec.Struct):
    """A change that is under way."""

    epoch: int
    level: Level
    """The level that it leads to now: that of the start, if it is undone or leads over it."""
    goal: Level
    """The level that it leads to in the end: if it is undone, that of the start."""
    before: Level
    otherwise: Level
    """The level that the node has if the change fails."""
    engines: list[int]
    left: set[int]
    """Those of the engines that have not died."""
    reason: str
    began: float
    caller: tuple[str, int] | None = None
    """Who waits for its end, and the number of the call."""
    stage: Stage = Stage.CLOSING
    entered: float | None = None
    """When it came to this stage; None: it has come to none."""
    took: dict[str, float] = {}
    """Seconds of each stage that is over, by its name."""
    awaiting: set[int] = set()
    deadline: float = 0.0
    preempted: int = 0
    error: str | None = None
    status: int = 200


class MemoryChanges:
    """Changes the level of memory of the node's engines, one change at a time.

    Args:
        env: the node, the transport to its engines and callers, and the time.
        books: engines, units and requests.
        capacity: what units hold, which a change changes.
        lose: takes engines down.
        give_up: ends the requests that the node can no longer hold.
        followers: called with every new level of the node.
    """

    def __init__(
        self,
        env: Environment,
        books: Books,
        capacity: Capacity,
        *,
        lose: LoseEngines,
        give_up: Callable[[], None],
        followers: Sequence[Callable[[Level], None]],
    ) -> None:
        self._env = env
        self._transport: ControllerTransport = env.transport
        self._books = books
        self._engines = books.engines
        self._capacity = capacity
        self._lose = lose
        self._give_up = give_up
        self._followers = followers
        self._checks = LevelChecks(env.config, books, capacity)
        self._start = self._checks.start
        """The level at the start."""
        self.level = self._start
        """The level of the node: that of engines that serve, apart from those that follow."""
        self.is_held = not env.config.move_memory
        """Whether the policy may not change it: by the configuration, or because an operator did.
        """
        self._change: Change | None = None
        self._retry_at = 0.0
        self.past: deque[MemoryView] = deque(maxlen=CHANGES_KEPT)

    # --- what others see ----------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether a change is under way."""
        return self._change is not None

    @property
    def shown(self) -> Level:
        """The level of the node, or the one to which a change leads."""
        return self.level if self._change is None else self._change.goal

    @property
    def deadline(self) -> float | None:
        """When something is due even if no message comes."""
        if self._change is not None:
            return self._change.deadline
        return self._retry_at if self._behind() else None

    @property
    def is_free(self) -> bool:
        """Whether the policy may change the level now, if no other operation runs."""
        waits = self._change is not None or self._env.clock() < self._retry_at
        return not (self.is_held or self._start == WHOLE or waits or self._behind())

    def offers(self) -> dict[Level, int]:
        """Return the other levels to which the node can change, each with an engine's KV blocks."""
        return {
            level: self._checks.blocks(level)
            for level in self._checks.all
            if level != self.level and self.refusal(level) == (200, "")
        }

    def refusal(self, level: Level) -> tuple[int, str]:
        """Return the HTTP status and the reason why the level cannot be changed; 200: it can."""
        return self._checks.refusal(level, self.level)

    # --- start --------------------------------------------------------------------------------

    def start_for_operator(self, peer: str, message: m.ChangeMemory) -> None:
        """Start a change that the admin API asked for; no other operation may be running.

        The policy then leaves the level alone, until the API says that it may decide again.
        """
        decides = message.share_weights == m.POLICY_DECIDES
        self.is_held = not (decides and self._env.config.move_memory)
        before = self.level
        self.level = before if decides else Level(message.share_weights, message.stages)
        self._begin(MANUAL, before, (peer, message.call))

    def start_for_policy(self, level: Level, reason: str) -> None:
        """Start a change that the policy asked for, if it is possible; no operation may be running.

        Args:
            level: the level.
            reason: see ``Plan.share_reason``.
        """
        if level != self.level and self.is_free and self.refusal(level) == (200, ""):
            self.level, before = level, self.level
            self._begin(reason, before)

    def tick_idle(self) -> None:
        """Let engines follow that have come back at another level; no operation is running."""
        if self._behind() and self._env.clock() >= self._retry_at:
            self._begin(REJOIN, self.level)

    def _behind(self) -> list[int]:
        """Return the engines that serve at another level than the node's."""
        if self._start == WHOLE:
            return []
        serving = sorted(self._engines.in_state(EngineState.SERVING))
        found = (self._engines[number] for number in serving)
        return [e.number for e in found if e.level != self.level and self.level in e.shares.blocks]

    def greet(self, engine: int) -> None:
        """Note an engine's KV blocks: its own, or as few as it has at the node's level.

        An engine that comes back may have died at another level.
        """
        if self.level == self._start:
            self._capacity.resized()
        else:
            self._resize([engine], self.level)

    def _begin(
        self,
        reason: str,
        otherwise: Level,
        caller: tuple[str, int] | None = None,
    ) -> None:
        epoch, now, goal = self._books.units.next_epoch(), self._env.clock(), self.level
        behind, unit_of = self._behind(), self._books.units.unit_of
        # The leader of a group has all members do it; those at that level have nothing to do.
        engines = sorted({member for engine in behind for member in unit_of(engine).engines})
        left = {self._engines[number].level for number in engines} - {goal}
        whole = left - {self._start}
        before = slowest(whole or left or {goal})
        level = self._start if whole else goal
        if level != goal:
            otherwise = self._start  # it leads over this level, and stays there if it fails
        change = Change(
            epoch, level, goal, before, otherwise, engines, set(engines), reason, now, caller
        )
        self._change = change
        if goal != self._start:
            # Nothing may start from now on that would not fit later.
            self._resize(engines, goal, grow=False)
            self._give_up()
        self._enter(change, Stage.USING if level == self._start else Stage.CLOSING)

    def _resize(self, engines: Iterable[int], level: Level, *, grow: bool = True) -> None:
        for number in engines:
            blocks = self._engines[number].shares.blocks.get(level)
            if blocks is not None and (grow or blocks < self._engines.num_blocks(number)):
                self._engines.resize(number, blocks)
        self._capacity.resized()

    # --- stages -------------------------------------------------------------------------------

    def _enter(self, change: Change, stage: Stage) -> None:
        patience = {
            Stage.CLOSING: self._env.config.prepare_timeout_seconds,
            Stage.FILLING: FILL_SECONDS,
        }
        seconds, now = patience.get(stage, USE_SECONDS), self._env.clock()
        _leave_stage(change, now)
        change.stage, change.entered, change.awaiting = stage, now, set(change.left)
        change.deadline = now + seconds
        for engine in sorted(change.left):
            self._transport.to_engine(engine, self._message(change, engine))
        self._go_on(change)

    def _message(self, change: Change, engine: int) -> m.ToMemory:
        epoch, unit = change.epoch, self._books.units.unit_of(engine)
        blocks = self._engines[engine].shares.blocks[change.level]
        match change.stage:
            case Stage.CLOSING:
                return m.CloseBlocks(epoch, blocks)
            case Stage.FILLING:
                # Its leader has all members do it, and none may use a block that another lends.
                blocks = self._checks.blocks(change.level, unit.engines)
                return m.FillWeights(epoch, unit, blocks, change.level)
            case Stage.USING:
                return m.UseWeights(epoch, unit, change.level)
            case Stage.OPENING:
                return m.OpenBlocks(epoch)

    def handle(self, message: m.MemoryAnswer) -> bool:
        """Take an engine's answer; return False if no change expects it."""
        change = self._change
        if change is None or change.epoch != message.epoch or not _answers(change.stage, message):
            return False
        if message.engine not in change.awaiting:
            return False
        change.awaiting.discard(message.engine)
        match message:
            case m.BlocksClosed(preempted=preempted):
                change.preempted += preempted
            case m.WeightsFilled(engine=engine, error=error) if error:
                change.error = change.error or f"engine {engine}: {error}"
            case m.WeightsUsed(weight_bytes=weight_bytes):
                for engine, size in weight_bytes.items():
                    if engine in change.left:
                        self._engines.have_level(engine, change.level, size)
        self._go_on(change)
        return True

    def _go_on(self, change: Change) -> None:
        """Enter the next stage if all have answered."""
        if change.awaiting or self._change is not change:
            return
        if not change.left:
            self._end(change)
            return
        match change.stage:
            case Stage.CLOSING:
                self._enter(change, Stage.FILLING)
            case Stage.FILLING if change.error is not None:
                self._undo(change, change.error, 500)
            case Stage.FILLING:
                self._enter(change, Stage.USING)
            case Stage.USING if change.level == self._start:
                self._enter(change, Stage.OPENING)
            case Stage.OPENING if change.goal != self._start:
                change.level = change.goal
                self._resize(change.left, change.goal)
                self._enter(change, Stage.CLOSING)
            case _:
                self._end(change)

    def _undo(self, change: Change, error: str, status: int) -> None:
        change.error, change.status = error, status
        change.level = change.goal = self._start
        self._enter(change, Stage.USING)

    def _end(self, change: Change) -> None:
        self._change = None
        if not change.left and change.engines and change.error is None:
            change.error, change.status = f"engines {change.engines} are lost", 503
        if change.error is not None:
            self._retry_at = self._env.clock() + RETRY_SECONDS
            self.level = change.otherwise
        self._resize(change.left, self.level)
        for follow in self._followers:
            follow(self.level)
        self._report(change)

    # --- failures -----------------------------------------------------------------------------

    def tick(self) -> None:
        """Act on answers that did not come in time."""
        change = self._change
        if change is None or self._env.clock() < change.deadline:
            return
        late = sorted(change.awaiting)
        seconds = self._env.clock() - change.began
        error = f"engines {late} have not {change.stage.value} after {seconds:.0f} s"
        if change.stage in (Stage.CLOSING, Stage.FILLING):
            self._undo(change, error, 504)
        else:
            self._lose(late, error)

    def lost(self, engines: Collection[int]) -> None:
        """Go on without engines that have died."""
        change = self._change
        if change is None or change.left.isdisjoint(engines):
            return
        change.left.difference_update(engines)
        change.awaiting.difference_update(engines)
        self._go_on(change)

    # --- the end ------------------------------------------------------------------------------

    def _report(self, change: Change) -> None:
        now = self._env.clock()
        _leave_stage(change, now)
        view = MemoryView(
            epoch=change.epoch,
            at=self._env.wall() - (now - change.began),
            engines=change.engines,
            before=change.before.share,
            after=change.goal.share,
            before_stages=change.before.stages,
            after_stages=change.goal.stages,
            num_blocks=min(map(self._engines.num_blocks, change.engines), default=0),
            preempted=change.preempted,
            duration_seconds=now - change.began,
            stages=change.took,
            reason=change.reason,
            outcome="done" if change.error is None else "failed",
            error=change.error,
        )
        if change.engines:
            self.past.append(view)
            self._books.statistics.memory.changed(view)
            level = logging.INFO if change.error is None else logging.ERROR
            log.log(level, "%s", view.line(), extra={"fields": {"memory": view}})
        if change.caller is not None:
            peer, call = change.caller
            failed = m.CallFailed(call, change.status, change.error or "")
            done = m.MemoryChanged(call, view)
            self._transport.to_control(peer, done if change.error is None else failed)


def _leave_stage(change: Change, now: float) -> None:
    """Take note of how long a change has been in its stage, if it has come to one."""
    if change.entered is not None:
        name = change.stage.name.lower()
        change.took[name] = change.took.get(name, 0.0) + now - change.entered


_ANSWERS = {
    Stage.CLOSING: m.BlocksClosed,
    Stage.FILLING: m.WeightsFilled,
    Stage.USING: m.WeightsUsed,
    Stage.OPENING: m.BlocksOpened,
}


def _answers(stage: Stage, message: m.MemoryAnswer) -> bool:
    return isinstance(message, _ANSWERS[stage])
