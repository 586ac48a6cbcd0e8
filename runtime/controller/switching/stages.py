"""Where the groups of a switch stand, and what their engines are told."""

import enum

import msgspec

from shoal.policies.values.layouts import Unit, alone
from shoal.policies.values.partition import Partition
from shoal.runtime.controller.books.engine_book import EngineBook
from shoal.runtime.controller.books.statistics import SwitchStatistics
from shoal.runtime.protocol import messages as m


class SwitchOutcome(enum.StrEnum):
    """How a switch ended."""

    DONE = "done"
    FAILED = "failed"
    """It turned round: the partition is the one before, without engines that were lost."""


class Stage(enum.Enum):
    """Where one group stands."""

    WAITING = enum.auto()
    PREPARING = enum.auto()
    COMMITTING = enum.auto()
    ABORTING = enum.auto()
    RELEASING = enum.auto()
    KEEPING = enum.auto()
    """A sequential release took too long and is being taken back."""
    RESUMING = enum.auto()
    DONE = enum.auto()


COMMITTED_STAGES = (Stage.COMMITTING, Stage.RELEASING, Stage.KEEPING)
"""Stages in which the members may be inside the group's collectives: they live or die together."""


class Move(msgspec.Struct):
    """One group's bind or release."""

    unit: Unit
    epoch: int
    stage: Stage
    treatment: m.Treatment
    """What the engines are told."""
    since: float = 0.0
    """Clock time at which the stage began, once engines are waited for."""
    deadline: float | None = None
    awaiting: set[int] = set()
    lent: dict[int, list[int]] = {}
    lend_seconds: float = 0.0
    """What the slowest member took to lend."""


# --- what engines are told ---


def release_treatment(treatment: m.Treatment, *, waits: bool) -> m.Treatment:
    """Return what the leader of a group that is dissolved is told.

    Args:
        treatment: that of the switch.
        waits: whether the group's requests are waited for, as far as they are not moved.
    """
    hard = treatment is m.Treatment.HARD or not waits
    return m.Treatment.HARD if hard else m.Treatment.SEQUENTIAL


def bind_treatment(treatment: m.Treatment) -> m.Treatment:
    """Return what the members of a new group are told under a switch's treatment."""
    # What could not be moved is waited for.
    return m.Treatment.SEQUENTIAL if treatment is m.Treatment.SOFT else treatment


def late_bind_treatment(treatment: m.Treatment, *, leaves_room: bool) -> m.Treatment:
    """Return what they are told when nobody is waited for (any more).

    Args:
        treatment: that of the switch.
        leaves_room: whether the members' own requests leave the group blocks to work with.
    """
    beside = treatment is not m.Treatment.HARD and leaves_room
    return m.Treatment.INTERLEAVE if beside else m.Treatment.HARD


def whole(partition: Partition, engines: EngineBook) -> Partition:
    """Return a partition whose groups that have lost an engine are taken apart."""
    units: list[Unit] = []
    for group in partition:
        is_whole = not group.is_group or engines.serves(group)
        units += [group] if is_whole else [alone(engine) for engine in group.engines]
    return tuple(units)


# --- figures ---


def count_end(statistics: SwitchStatistics, move: Move, reason: str, *, lost: bool) -> None:
    """Count how a group's bind or release has ended."""
    match move.stage:
        case Stage.COMMITTING:
            statistics.bound("lost" if lost else "done", reason)
        case Stage.ABORTING:
            statistics.bound("aborted", reason)
        case Stage.RESUMING:
            statistics.released("done", reason)
        case Stage.RELEASING | Stage.KEEPING:
            statistics.released("lost" if lost else "kept", reason)
