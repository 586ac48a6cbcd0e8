"""What the table of stages is made of: the node, one unit's bind or release, and a row."""

import enum
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import msgspec

from shoal.policies.values.layouts import Unit
from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.capacity import Capacity
from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.controller.books.statistics import SwitchStatistics
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages.views import Phase

LoseEngines = Callable[[Collection[int], str], None]
"""Called with engines that a broken unit takes down, and why."""


class Node(msgspec.Struct, frozen=True):
    """What every switch of a node works on."""

    env: Environment
    books: Books
    """Engines, requests, and the units and leases that switches change."""
    capacity: Capacity
    """How much a new unit's members are asked for, and whether their own requests leave it room."""
    lose: LoseEngines

    @property
    def answer_timeout(self) -> float:
        """Seconds that an engine has for an answer that waits for no request."""
        return self.env.config.prepare_timeout_seconds


class Told(msgspec.Struct, frozen=True):
    """What the engines of a move are told to do with running requests."""

    treatment: m.Treatment
    """The word for it in ``Prepare`` and ``Release``."""
    waits: bool = False
    """Whether engines answer only when these requests have ended."""
    interleaves: bool = False
    """Whether the members' own requests go on beside those of the new unit."""
    detour: "Stage | None" = None
    """A stage that a bind goes through before COMMITTING, or a release before RESUMING."""


class Counts(msgspec.Struct):
    """What a switch has done to requests."""

    paused: int = 0
    resumed: int = 0
    drained: int = 0
    """Those that it has waited for."""
    moved: int = 0


class Move(msgspec.Struct):
    """One unit's bind or release."""

    unit: Unit
    epoch: int
    stage: "Stage"
    told: Told
    counts: Counts
    tell_late: "Tell"
    """What the engines are told when the switch waits no longer."""
    moves_late: bool = False
    """Whether requests of the unit are moved then, as far as they can go on elsewhere."""
    since: float = 0.0
    """Clock time at which the stage began, once engines are waited for."""
    deadline: float | None = None
    awaiting: set[int] = set()
    asked_blocks: int = 0
    """Blocks that each member is to lend."""
    lent: dict[int, list[int]] = {}
    """Blocks that each member has lent."""
    lend_seconds: float = 0.0
    """What the slowest member took to lend."""
    returned: dict[int, list[int]] | None = None
    """Blocks that each member gets back, once the leader has released the unit."""

    @property
    def waits(self) -> bool:
        """Whether running requests may hold it up now."""
        return self.told.waits and self.stage.waits


class Missing(enum.Enum):
    """What it means that a member dies, or does not answer in time."""

    BREAKS = enum.auto()
    """The unit is lost: its members may be inside its collectives, so they live or die together."""
    UNDOES = enum.auto()
    """The stage is undone, by those who are left."""
    SHRINKS = enum.auto()
    """The stage goes on, and ends, without that member."""


Tell = Callable[[Node, Unit], Told]
"""What the engines of a unit are told."""
Next = Callable[[Move], "Stage"]
"""Another stage, or the one that the move is in."""

NO_ANSWER = "engines {late} did not answer within {seconds:g} s"


class Stage(msgspec.Struct, frozen=True):
    """One row: a stage of a bind or release. A cell that a row leaves out means that there is none.

    The cells that are functions get the node and the move.
    """

    name: str
    begin: Callable[[Node, Move], None] | None = None
    """What is done before engines are asked, every time that they are."""
    ask: Callable[[Node, Move, int], m.Message] | None = None
    """What an engine is sent."""
    whom: Callable[[Node, Move], Collection[int]] = lambda *_: ()
    """Engines that are asked."""
    awaited: Callable[[Node, Move], Collection[int]] | None = None
    """Those of them whose answers are awaited, if not all are."""
    answers: Mapping[type[m.Message], Callable[[Node, Move, Any], None]] = {}
    """Answers that count, and what each does. An answer that is not here is stale."""
    until: Callable[[Node, Move], bool] | None = None
    """What a stage waits for that asks nobody."""
    phases: Callable[[Move, float], list[Phase]] | None = None
    """How its time is counted, given the clock when all have answered."""
    end: Callable[[Node, Move], None] | None = None
    """What is done when no answer is awaited any more."""
    then: Next = lambda move: move.stage
    """The stage that follows this one."""
    missing: Missing | None = None
    """What a death or a time-out means."""
    undo: Next = lambda move: move.stage
    """The stage that follows if the switch fails, here or in another move."""
    waits: bool = False
    """Whether it takes until requests have ended if engines are told to wait for them."""
    unended: str = NO_ANSWER
    """Error if these take too long."""
    overdue: str = NO_ANSWER
    """Error if engines do not answer in time where no request is waited for."""
    count: Callable[[SwitchStatistics, str, str], None] | None = None
    """Counts the move if it ends with this stage."""
    outcome: str = "done"
    """As what, unless the unit is lost."""


T = TypeVar("T")


def always(value: T) -> Callable[..., T]:
    """Return a cell that is the same for every move."""

    def cell(*_: object) -> T:
        return value

    return cell
