"""The protocol of a switch as a table: one row for each stage of a bind or release.

    release:  RELEASING ──Released──> RESUMING ──Resumed from all──> DONE
                  └─undone─> KEEPING ──Committed──> DONE
                                └──Released──> RESUMING

    bind:     WAITING ──members alone──> PREPARING ──Prepared from all──> COMMITTING ──> DONE
                                             └─undone─> ABORTING ──Resumed──> DONE

The last stage is the first row, because a row names the stages that follow it. The functions that
the cells name stand above the rows. ``switch.py`` executes the table.
"""

from collections.abc import Callable, Collection

from shoal.policies.values.layouts import alone
from shoal.runtime.controller.books.engine_book import EngineState
from shoal.runtime.controller.books.statistics import SwitchStatistics
from shoal.runtime.controller.switching.moves import Missing, Move, Next, Node, Stage, always
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages.views import Phase

# --- engines ---


def leader(_: Node, move: Move) -> Collection[int]:
    """Return the engine that runs the unit's scheduler."""
    return (move.unit.leader,)


def members(_: Node, move: Move) -> Collection[int]:
    """Return all engines of the unit."""
    return move.unit.engines


def alive(node: Node, move: Move) -> Collection[int]:
    """Return the members that have not died."""
    gone = node.books.engines.gone
    return [engine for engine in move.unit.engines if engine not in gone]


def serving(node: Node, move: Move) -> Collection[int]:
    """Return the members that serve, and so can be expected to answer."""
    engines = node.books.engines
    return [e for e in move.unit.engines if engines[e].state is EngineState.SERVING]


def are_alone(node: Node, move: Move) -> bool:
    """Return whether every member is a unit of its own."""
    return all(alone(engine) in node.books.units.partition for engine in move.unit.engines)


# --- messages to engines ---


def prepare(_: Node, move: Move, __: int) -> m.Message:
    """To a member: reach a safe point, and lend blocks."""
    return m.Prepare(move.epoch, move.unit, move.told, move.asked_blocks)


def commit(node: Node, move: Move, _: int) -> m.Message:
    """To a member: the unit exists from now on, with this lease."""
    seed = (node.env.config.seed + move.epoch) % 2**31
    return m.Commit(move.epoch, move.unit, seed, move.lent)


def abort(_: Node, move: Move, __: int) -> m.Message:
    """To a member: forget ``Prepare``."""
    return m.AbortBind(move.epoch, move.unit)


def release(_: Node, move: Move, __: int) -> m.Message:
    """To the leader: take no further step of the unit, and return its blocks."""
    return m.Release(move.epoch, move.unit, move.told)


def keep(_: Node, move: Move, __: int) -> m.Message:
    """To the leader: forget ``Release``, if it still waits for requests."""
    return m.KeepBound(move.epoch, move.unit)


def resume(_: Node, move: Move, engine: int) -> m.Message:
    """To a member: serve alone again, and take back these blocks."""
    return m.Resume(move.epoch, move.unit, (move.returned or {}).get(engine, []))


# --- what happens before they are sent ---


def size_lease(node: Node, move: Move) -> None:
    """Decide how many blocks each member is asked to lend."""
    move.asked_blocks = node.capacity.lease_for(move.unit)


def open_lease(node: Node, move: Move) -> None:
    """Make a lease of the blocks that the members have lent."""
    move.lent = node.books.leases.even_out(move.unit, move.lent)
    node.books.leases.open(move.unit, len(move.lent[move.unit.leader]))


def forget_lent(node: Node, move: Move) -> None:
    """Forget the blocks lent after ``Prepare``; each engine takes its own back by itself."""
    for engine, blocks in move.lent.items():
        node.books.leases.remove(engine, move.unit, blocks)


# --- what one answer does ---


def take_loan(node: Node, move: Move, answer: m.Prepared) -> None:
    """Note the blocks that a member has lent."""
    node.books.leases.add(answer.engine, move.unit, answer.blocks)
    move.lent[answer.engine] = answer.blocks
    move.lend_seconds = max(move.lend_seconds, answer.lend_seconds)
    move.counts.paused += answer.paused
    move.awaiting.discard(answer.engine)


def take_word(_: Node, move: Move, answer: m.Committed) -> None:
    """Note that a member is in the unit."""
    move.awaiting.discard(answer.engine)


def take_lease(node: Node, move: Move, answer: m.Released) -> None:
    """Note the blocks that the leader has returned."""
    node.books.leases.cancel(move.unit)
    node.books.leases.close(move.unit, answer.returned)
    move.returned = answer.returned
    move.counts.paused += answer.paused
    move.awaiting.clear()


def take_resumed(_: Node, move: Move, answer: m.Resumed) -> None:
    """Note that a member serves alone."""
    move.counts.resumed += answer.resumed
    move.awaiting.discard(answer.engine)


# --- when all have answered ---


def bind(node: Node, move: Move) -> None:
    """Make the members one unit."""
    node.books.units.bind(move.unit, move.epoch)
    move.counts.resumed += len(node.books.requests.core(move.unit).requests)


def free(node: Node, move: Move) -> None:
    """Make each member a unit of its own."""
    node.books.units.release(move.unit)


def lasted(name: str) -> Callable[[Move, float], list[Phase]]:
    """Return a cell that counts the whole stage under one name."""
    return lambda move, now: [Phase(name, move.unit, move.since, now)]


def drained_and_lent(move: Move, now: float) -> list[Phase]:
    """Count the slowest member's time to lend, and the wait for requests before it."""
    began = max(move.since, now - move.lend_seconds)
    return [Phase("drain", move.unit, move.since, began), Phase("lease", move.unit, began, now)]


# --- the next stage ---


def resume_if_released(move: Move) -> Stage:
    """Return what follows KEEPING: the leader may have released the unit before it got ``keep``."""
    return DONE if move.returned is None else RESUMING


def while_waiting(stage: Stage) -> Next:
    """Return a cell that names ``stage`` only while the move waits for requests."""
    return lambda move: stage if move.waits else move.stage


# --- the table ---

DONE = Stage("done")

RESUMING = Stage(
    "resuming",
    ask=resume,
    whom=alive,
    answers={m.Resumed: take_resumed},
    phases=lasted("resume"),
    end=free,
    then=always(DONE),
    missing=Missing.SHRINKS,
    count=SwitchStatistics.released,
)

KEEPING = Stage(
    "keeping",
    ask=keep,
    whom=leader,
    answers={m.Committed: take_word, m.Released: take_lease},
    then=resume_if_released,
    missing=Missing.BREAKS,
    count=SwitchStatistics.released,
    outcome="kept",
)
"""A release that waited for requests is cancelled."""

RELEASING = Stage(
    "releasing",
    ask=release,
    whom=leader,
    answers={m.Released: take_lease},
    phases=lasted("release"),
    then=always(RESUMING),
    missing=Missing.BREAKS,
    undo=while_waiting(KEEPING),
    waits=True,
    unended="the requests of unit {unit} did not end in {seconds:g} s",
    count=SwitchStatistics.released,
)

ABORTING = Stage(
    "aborting",
    begin=forget_lent,
    ask=abort,
    whom=alive,
    awaited=serving,
    answers={m.Resumed: take_resumed},
    then=always(DONE),
    missing=Missing.SHRINKS,
    count=SwitchStatistics.bound,
    outcome="aborted",
)

COMMITTING = Stage(
    "committing",
    begin=open_lease,
    ask=commit,
    whom=members,
    answers={m.Committed: take_word},
    phases=lasted("commit"),
    end=bind,
    then=always(DONE),
    missing=Missing.BREAKS,
    count=SwitchStatistics.bound,
)

_NOT_SAFE = "engines {late} did not reach a safe point within {seconds:g} s"
PREPARING = Stage(
    "preparing",
    begin=size_lease,
    ask=prepare,
    whom=members,
    answers={m.Prepared: take_loan},
    phases=drained_and_lent,
    then=always(COMMITTING),
    missing=Missing.UNDOES,
    undo=always(ABORTING),
    waits=True,
    unended=_NOT_SAFE,
    overdue=_NOT_SAFE,
)

WAITING = Stage(
    "waiting",
    until=are_alone,
    then=always(PREPARING),
    missing=Missing.UNDOES,
    undo=always(DONE),
    waits=True,
)

STAGES = (WAITING, PREPARING, COMMITTING, ABORTING, RELEASING, KEEPING, RESUMING, DONE)
