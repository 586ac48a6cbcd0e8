"""Messages between the controller (on a ROUTER) and an engine (on a DEALER).

``AddRequest`` and ``Utility`` are followed by the raw frames of vLLM's own message, which the
controller forwards without re-encoding.

Every switch message carries the epoch of its bind or release. The controller hands out epochs in
ascending order. A receiver drops and counts a message whose epoch is older than the one it expects.
"""

import msgspec

from shoal.policies.values.layouts import Layout, Unit
from shoal.runtime.protocol.messages.carry_messages import (
    Allot,
    CopiedAhead,
    CopyAhead,
    Drop,
    Expect,
    Export,
    Exported,
    Import,
    Imported,
    Keep,
    Leaving,
    Pin,
    Pinned,
    Reserve,
    Reserved,
    Settle,
    Unpin,
)
from shoal.runtime.protocol.messages.layout_limits import LayoutLimits
from shoal.runtime.protocol.messages.load_message import Load
from shoal.runtime.protocol.messages.memory_messages import MemoryAnswer, Shares, ToMemory
from shoal.runtime.protocol.messages.trial_messages import Tried, Try
from shoal.runtime.protocol.messages.utility_messages import Utility, UtilityDone
from shoal.runtime.protocol.messages.values import (
    DeathCause,
    Message,
    SpExchange,
    Treatment,
)

# --- controller -> engine ---------------------------------------------------------------------


class AddRequest(Message, frozen=True):
    """Start a request on ``unit``, which this engine leads. Raw request frames follow.

    ``tokens`` are the output tokens that other units have generated for it. The unit computes the
    KV of the prompt and of these tokens, and generates the next one. ``patience`` is that of
    ``Dispatch``, seconds.
    """

    unit: Unit
    request_id: str
    tokens: list[int] = msgspec.field(default_factory=list)
    patience: float = 0.0


class AbortRequests(Message, frozen=True):
    """Forget these requests of ``unit``, also those that it expects."""

    unit: Unit
    request_ids: list[str]


class MoveOut(Message, frozen=True):
    """Take these requests out of the core of ``unit`` at its next safe point; answer ``Moved``."""

    unit: Unit
    request_ids: list[str]


class Prepare(Message, frozen=True):
    """Phase one of a bind: reach a safe point, lend ``blocks`` KV blocks, answer ``Prepared``.

    A second ``Prepare`` of the same epoch that is ``HARD`` ends the wait of a ``SEQUENTIAL`` one. A
    member that has answered does not answer again.
    """

    epoch: int
    unit: Unit
    treatment: Treatment
    blocks: int


class Commit(Message, frozen=True):
    """Phase two of a bind: every member is prepared, and the group exists from now on.

    ``lease`` maps each member to the physical block ids that it lent. All lists have the same
    length: the k-th ids of all members together back the k-th virtual block that the leader opens.
    """

    epoch: int
    unit: Unit
    seed: int
    lease: dict[int, list[int]]


class AbortBind(Message, frozen=True):
    """Undo ``Prepare``: take the lent blocks back and go on as before."""

    epoch: int
    unit: Unit


class Release(Message, frozen=True):
    """To the leader: dissolve the group that was bound in ``epoch``; answer ``Released``.

    A second ``Release`` that is ``HARD`` ends the wait of a ``SEQUENTIAL`` one.
    """

    epoch: int
    unit: Unit
    treatment: Treatment


class KeepBound(Message, frozen=True):
    """To the leader: forget a sequential ``Release`` that still waits; answer ``Committed``.

    A leader that has already released the group does not answer: its ``Released`` is on the way.
    """

    epoch: int
    unit: Unit


class Resume(Message, frozen=True):
    """To each member after ``Released``: serve alone again; answer ``Resumed``.

    ``blocks`` are this member's returned physical ids.
    """

    epoch: int
    unit: Unit
    blocks: list[int]


class Lend(Message, frozen=True):
    """To a member of a group: lend up to ``blocks`` more blocks; answer ``Lent``.

    The group is bound in this epoch; with the epoch ``AHEAD`` it need not be bound yet.
    ``urgent``: preempt this member's own paused requests, which are recomputed later, rather than
    lend too little.
    """

    epoch: int
    unit: Unit
    blocks: int
    urgent: bool


class Grow(Message, frozen=True):
    """To the leader: ``lease`` (see ``Commit``) was added to the group's lease."""

    epoch: int
    unit: Unit
    lease: dict[int, list[int]]


class Shrink(Message, frozen=True):
    """To the leader of a bound group: return up to ``blocks`` blocks, which other units need.

    It answers ``Returning`` if it has any that no request holds.
    """

    epoch: int
    unit: Unit
    blocks: int


class TakeBack(Message, frozen=True):
    """To a member: these physical blocks are no longer used by the group."""

    blocks: list[int]


class SetShift(Message, frozen=True):
    """From the next step on, run steps in SP if they batch more tokens than the threshold.

    ``thresholds`` has a number of tokens for each layout; a layout without one runs in TP only.
    """

    thresholds: list[tuple[Layout, int]]


class CheckIntegrity(Message, frozen=True):
    """Check the engine's books; answer ``Integrity``."""

    call: int


class FormGroup(Message, frozen=True):
    """To every member, while each is alone: make your part of a broken group; answer ``Formed``.

    ``generation`` says how often the group was made before.
    """

    epoch: int
    unit: Unit
    generation: int


class StartGroup(Message, frozen=True):
    """To all members, once they have made their parts: start the core; answer ``Formed``."""

    epoch: int
    unit: Unit


class Ping(Message, frozen=True):
    """Answer ``Pong``, which shows that the engine's loop runs."""


ToEngine = (
    AddRequest
    | Try
    | AbortRequests
    | MoveOut
    | Expect
    | Pin
    | Reserve
    | CopyAhead
    | Settle
    | Unpin
    | Export
    | Allot
    | Import
    | Drop
    | Keep
    | Prepare
    | Commit
    | AbortBind
    | Release
    | KeepBound
    | Resume
    | Lend
    | Grow
    | Shrink
    | TakeBack
    | SetShift
    | Utility
    | CheckIntegrity
    | FormGroup
    | StartGroup
    | ToMemory
    | Ping
)


# --- engine -> controller ---------------------------------------------------------------------


class Startup(msgspec.Struct, frozen=True):
    """What came of an engine's start: the time and memory that it took, by phase, and choices."""

    seconds: dict[str, float] = {}
    device_bytes: dict[str, int] = {}
    """Device memory, as the driver counts it; empty if the engine has no device to itself."""
    sp_exchanges: dict[str, SpExchange] = {}
    """How members exchange in SP, by the name of the layout; empty without SP."""
    weight_bytes: int = 0
    """Weights in the engine's own memory, as they count against KV; 0 if they are unknown."""


class EngineReady(Message, frozen=True):
    """The engine can serve. ``ready_response`` is vLLM's encoded ``EngineCoreReadyResponse``.

    A restarted engine knows only its own layout, DP.
    """

    engine: int
    num_blocks: int
    """KV blocks of this engine's pool that can be lent or used (without the null block)."""
    layouts: list[LayoutLimits]
    ready_response: bytes
    startup: Startup = Startup()
    shares: Shares = Shares()
    tier_blocks: int = 0
    """KV blocks of the engine's tier, each as large as one of its pool; 0: it has none."""


class Prepared(Message, frozen=True):
    """Answer to ``Prepare``: at a safe point, ``blocks`` lent, ``paused`` requests kept."""

    epoch: int
    engine: int
    blocks: list[int]
    paused: int
    lend_seconds: float = 0.0
    """How long lending took."""


class Committed(Message, frozen=True):
    """Answer to ``Commit``: the runner has been told to join the group. Also to ``KeepBound``."""

    epoch: int
    engine: int


class Released(Message, frozen=True):
    """Answer to ``Release``: no further step of the group will be sent.

    ``returned`` maps each member to physical ids that come back (see ``Commit``). If the lease is
    large, more come with ``Returning``. Blocks of the ``paused`` requests, which are paused in the
    group, stay lent.
    """

    epoch: int
    unit: Unit
    returned: dict[int, list[int]]
    paused: int


class Resumed(Message, frozen=True):
    """Answer to ``Resume`` and to ``AbortBind``: the engine serves alone again."""

    epoch: int
    engine: int
    resumed: int


class NeedBlocks(Message, frozen=True):
    """A leader wants ``blocks`` more virtual blocks; each takes one block of every member."""

    epoch: int
    unit: Unit
    blocks: int
    urgent: bool


class Lent(Message, frozen=True):
    """Answer to ``Lend``; ``blocks`` may be fewer than asked for."""

    epoch: int
    engine: int
    unit: Unit
    blocks: list[int]


class Returning(Message, frozen=True):
    """A leader shrinks its group's lease: give these blocks back to the members."""

    epoch: int
    unit: Unit
    returned: dict[int, list[int]]


class Integrity(Message, frozen=True):
    """Answer to ``CheckIntegrity``: one line per broken invariant, none when all hold.

    The controller compares ``lent`` (physical ids) and ``leases`` (virtual blocks of each group
    that this engine leads, by group) with its own books.
    """

    call: int
    engine: int
    problems: list[str]
    lent: list[int]
    leases: list[tuple[Unit, int]]


class Moved(Message, frozen=True):
    """Answer to ``MoveOut``: all output tokens of each request, by request.

    The engine forgets these requests. Requests that had ended before are not in the answer.
    """

    engine: int
    tokens: dict[str, list[int]]


class EngineFailed(Message, frozen=True):
    """The engine met an error after which it cannot go on; it ends after this message."""

    engine: int
    error: str
    cause: DeathCause = DeathCause.FAILED


class Formed(Message, frozen=True):
    """Answer to ``FormGroup`` and ``StartGroup``; ``error`` is one line, empty if it is done."""

    epoch: int
    engine: int
    error: str


class Pong(Message, frozen=True):
    """Answer to ``Ping``."""

    engine: int


SwitchAnswer = Prepared | Committed | Released | Resumed
"""The answers of engines in a switch."""

AheadAnswer = Pinned | Reserved | CopiedAhead
"""Answers to the controller's messages of a pre-copy."""

ToController = (
    EngineReady
    | Tried
    | SwitchAnswer
    | NeedBlocks
    | Lent
    | Returning
    | Load
    | Integrity
    | Moved
    | AheadAnswer
    | Leaving
    | Exported
    | Imported
    | EngineFailed
    | Formed
    | MemoryAnswer
    | UtilityDone
    | Pong
)
