"""The types of the table of stages: the node, one unit's bind or release, and a row."""

import enum
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import msgspec

from shoal.policies.values.layouts import Unit
from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.capacity import Capacity
from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.controller.books.statistics import SwitchStatistics
from shoal.runtime.controller.switching.carries import Carries
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages.views import Phase

LoseEngines = Callable[[Collection[int], str], None]
"""Called with the engines that a broken unit takes down, and the reason."""


class Node(msgspec.Struct, frozen=True):
    """What every switch of a node works on."""

    env: Environment
    books: Books
    """Engines, requests, and the units and leases that switches change."""
    capacity: Capacity
    """Says how much new units are lent."""
    carries: Carries
    """Lets requests go on in other units."""
    lose: LoseEngines

    @property
    def answer_timeout(self) -> float:
        """Seconds that an engine has to answer when it waits for no request."""
        return self.env.config.prepare_timeout_seconds


class Counts(msgspec.Struct):
    """What a switch has done to requests."""

    paused: int = 0
    resumed: int = 0
    drained: int = 0
    """Requests that the switch has waited for."""
    moved: int = 0


class Move(msgspec.Struct):
    """One unit's bind or release."""

    unit: Unit
    epoch: int
    stage: "Stage"
    told: m.Treatment
    """What ``Prepare`` and ``Release`` name: SEQUENTIAL if engines answer only when their running
    requests have ended, HARD if they pause them."""
    counts: Counts
    since: float = 0.0
    """Clock time at which the current stage was entered."""
    deadline: float | None = None
    awaiting: set[int] = set()
    asked_blocks: int = 0
    """Blocks that each member is asked to lend."""
    lent: dict[int, list[int]] = {}
    """Blocks that each member has lent."""
    lend_seconds: float = 0.0
    """Seconds that the slowest member took to lend."""
    returned: dict[int, list[int]] | None = None
    """Blocks that each member gets back, once the leader has released the unit."""

    @property
    def waits(self) -> bool:
        """Whether the move may now be waiting for running requests."""
        return self.told is m.Treatment.SEQUENTIAL and self.stage.waits


class Missing(enum.Enum):
    """What happens when a member dies, or does not answer in time."""

    BREAKS = enum.auto()
    """The unit is lost: its members may be inside its collectives, so they live or die together."""
    UNDOES = enum.auto()
    """The remaining members undo the stage."""
    SHRINKS = enum.auto()
    """The stage goes on, and ends, without that member."""


Next = Callable[[Move], "Stage"]
"""Returns another stage, or the current stage of the move."""

NO_ANSWER = "engines {late} did not answer within {seconds:g} s"


class Stage(msgspec.Struct, frozen=True):
    """One row: a stage of a bind or release. A cell that is left out does nothing."""

    name: str
    begin: Callable[[Node, Move], None] | None = None
    """What is done each time before engines are asked."""
    ask: Callable[[Node, Move, int], m.Message] | None = None
    """The message that is sent to an engine."""
    whom: Callable[[Node, Move], Collection[int]] = lambda *_: ()
    """Engines that are asked."""
    awaited: Callable[[Node, Move], Collection[int]] | None = None
    """Those of them whose answers the stage awaits; None: all of them."""
    answers: Mapping[type[m.Message], Callable[[Node, Move, Any], None]] = {}
    """The types of answers that the stage takes, and what each does. All others are stale."""
    until: Callable[[Node, Move], bool] | None = None
    """For a stage that asks no engine: whether what it waits for has happened."""
    phases: Callable[[Move, float], list[Phase]] | None = None
    """How the stage's time is counted, given the clock when all have answered."""
    end: Callable[[Node, Move], None] | None = None
    """What is done when all answers have come."""
    then: Next = lambda move: move.stage
    """The stage that follows this one."""
    missing: Missing | None = None
    """What happens after a death or a time-out."""
    undo: Next = lambda move: move.stage
    """The stage that follows if the switch fails, in this move or in another."""
    waits: bool = False
    """Whether the stage lasts until requests have ended if engines are told to wait for them."""
    unended: str = NO_ANSWER
    """The error if these requests take too long."""
    overdue: str = NO_ANSWER
    """The error if engines do not answer in time although they wait for no request."""
    count: Callable[[SwitchStatistics, str, str], None] | None = None
    """Counts the move if it ends with this stage."""
    outcome: str = "done"
    """The outcome that is counted, unless the unit is lost."""


T = TypeVar("T")


def always(value: T) -> Callable[..., T]:
    """Return a cell that is the same for every move."""

    def cell(*_: object) -> T:
        return value

    return cell
