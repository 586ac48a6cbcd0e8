"""Every message that crosses a process boundary outside an engine: one tagged union per direction.

Encoded with msgpack. The controller and the engines talk over one DEALER (engine) to ROUTER
(controller) pair; a front end and the controller over another. ``AddRequest`` and ``Utility`` are
followed by the raw frames of vLLM's own message, which the controller forwards without re-encoding.

Every switch message carries the epoch of its bind or release. The controller hands epochs out in
ascending order; a receiver drops and counts a message of an older epoch than it expects.
"""

import enum

import msgspec

from policies.cost_model import Batch
from policies.partition import Group
from runtime.metrics import EngineGauges, Family
from runtime.views import EngineView, SwitchTrace, SwitchView, UnitView


class Treatment(enum.StrEnum):
    """What happens to the requests that run on a unit when its engines are regrouped."""

    SEQUENTIAL = "sequential"
    """Wait until they are done (Flying Serving, 5: sequential)."""
    SOFT = "soft"
    """Take them out at the next safe point and recompute them on another unit, their tokens so far
    included (Flying Serving, 5: soft preempt); wait for those that cannot go on elsewhere."""
    HARD = "hard"
    """Pause them at the next safe point; their KV stays; they resume when their unit is back
    (Flying Serving, 5: hard preempt)."""
    INTERLEAVE = "interleave"
    """Let them go on where they are, each member's own steps in turn with those of the new group.
    Those of a group that is dissolved are waited for."""


class Outcome(enum.StrEnum):
    """How a request left the node."""

    FINISHED = "finished"
    """By its engine: done, or refused there with an error."""
    ABORTED = "aborted"
    """By its client."""
    TOO_LONG = "too_long"
    """No group that this node can form holds it."""
    LOST = "lost"
    """Its engine died."""
    EXPIRED = "expired"
    """It still waited in the task pool at its deadline."""
    POOL_FULL = "pool_full"
    """As many requests, or prompt tokens, waited as may."""
    CALLER_FULL = "caller_full"
    """Its caller had as many requests waiting as it may."""


class Message(msgspec.Struct, tag=True, frozen=True):
    """Base of every message; the class name is the tag."""


# --- controller -> engine ---------------------------------------------------------------------


class AddRequest(Message, frozen=True):
    """Start a request on the unit ``group`` (this engine leads it). Raw request frames follow."""

    group: Group
    request_id: str


class AbortRequests(Message, frozen=True):
    """Forget these requests, whichever of this engine's units they are in."""

    request_ids: list[str]


class MoveOut(Message, frozen=True):
    """Take these requests of the core of ``group`` out at its next safe point; answer ``Moved``."""

    group: Group
    request_ids: list[str]


class Prepare(Message, frozen=True):
    """Phase one of a bind: reach a safe point, lend ``blocks`` KV blocks, answer ``Prepared``.

    Under ``INTERLEAVE`` the engine's own requests go on, before and after ``Commit``.
    """

    epoch: int
    group: Group
    treatment: Treatment
    blocks: int


class Commit(Message, frozen=True):
    """Phase two of a bind: every member is prepared, the group exists from now on.

    ``lease`` maps each member to the physical block ids it lent, all of the same length: the
    k-th id of every member together back the k-th virtual block that the leader opens.
    """

    epoch: int
    group: Group
    seed: int
    lease: dict[int, list[int]]


class AbortBind(Message, frozen=True):
    """Undo ``Prepare``: take the lent blocks back and go on as before."""

    epoch: int
    group: Group


class Release(Message, frozen=True):
    """To the leader: dissolve the group that was bound in ``epoch``; answer ``Released``."""

    epoch: int
    group: Group
    treatment: Treatment


class KeepBound(Message, frozen=True):
    """To the leader: forget a sequential ``Release`` that still waits; answer ``Committed``.

    A leader that has released the group meanwhile does not answer: its ``Released`` is on the way.
    """

    epoch: int
    group: Group


class Resume(Message, frozen=True):
    """To each member after ``Released``: serve alone again; answer ``Resumed``.

    ``blocks`` are this member's returned physical ids.
    """

    epoch: int
    group: Group
    blocks: list[int]


class Lend(Message, frozen=True):
    """To a member of a bound group: lend up to ``blocks`` more; answer ``Lent``.

    ``urgent``: preempt this member's own paused requests (they are recomputed later) rather than
    lend too little. One that interleaves lends what its requests will not need: they will end.
    """

    epoch: int
    group: Group
    blocks: int
    urgent: bool


class Grow(Message, frozen=True):
    """To the leader: ``lease`` (see ``Commit``) was added to the group's lease."""

    epoch: int
    group: Group
    lease: dict[int, list[int]]


class TakeBack(Message, frozen=True):
    """To a member: these physical blocks are no longer used by the group."""

    epoch: int
    group: Group
    blocks: list[int]


class Utility(Message, frozen=True):
    """Run a vLLM utility call (``EngineCoreRequestType.UTILITY``); raw frames follow.

    Only the engine with ``answer`` set sends the result to the front end.
    """

    answer: bool


class CheckIntegrity(Message, frozen=True):
    """Check the engine's books; answer ``Integrity``."""

    call: int


class Stop(Message, frozen=True):
    """End the engine in order."""


ToEngine = (
    AddRequest
    | AbortRequests
    | MoveOut
    | Prepare
    | Commit
    | AbortBind
    | Release
    | KeepBound
    | Resume
    | Lend
    | Grow
    | TakeBack
    | Utility
    | CheckIntegrity
    | Stop
)


# --- engine -> controller ---------------------------------------------------------------------


class LayoutLimits(msgspec.Struct, frozen=True):
    """What one layout of an engine can hold."""

    degree: int
    block_tokens: int
    """Tokens of one KV block under this layout."""
    max_num_seqs: int
    max_model_len: int


class EngineReady(Message, frozen=True):
    """The engine can serve. ``ready_response`` is vLLM's encoded ``EngineCoreReadyResponse``."""

    engine: int
    num_blocks: int
    """KV blocks of this engine's pool that can be lent or used (without the null block)."""
    layouts: list[LayoutLimits]
    ready_response: bytes
    startup_seconds: dict[str, float]


class Prepared(Message, frozen=True):
    """Answer to ``Prepare``: at a safe point, ``blocks`` lent, ``paused`` requests kept."""

    epoch: int
    engine: int
    blocks: list[int]
    paused: int
    lend_seconds: float = 0.0
    """What lending took."""


class Committed(Message, frozen=True):
    """Answer to ``Commit``: the runner has been told to join the group. Also to ``KeepBound``."""

    epoch: int
    engine: int


class Released(Message, frozen=True):
    """Answer to ``Release``: no further step of the group will be sent.

    ``returned`` maps each member to the physical ids that come back (see ``Commit``); blocks of
    requests paused in the group (``paused``) stay lent.
    """

    epoch: int
    group: Group
    returned: dict[int, list[int]]
    paused: int


class Resumed(Message, frozen=True):
    """Answer to ``Resume`` and to ``AbortBind``: the engine serves alone again."""

    epoch: int
    engine: int
    resumed: int


class NeedBlocks(Message, frozen=True):
    """A leader's wish for ``blocks`` more virtual blocks (each takes one block of every member)."""

    epoch: int
    group: Group
    blocks: int
    urgent: bool


class Lent(Message, frozen=True):
    """Answer to ``Lend``; ``blocks`` may be fewer than asked for."""

    epoch: int
    engine: int
    group: Group
    blocks: list[int]


class Returning(Message, frozen=True):
    """A leader shrinks its idle group's lease: give these back to the members."""

    epoch: int
    group: Group
    returned: dict[int, list[int]]


class Work(msgspec.Struct, frozen=True):
    """What the ended steps of a unit computed and how long they took, summed over them."""

    steps: int = 0
    seconds: float = 0.0
    decodes: int = 0
    """Requests that got one more token."""
    context_tokens: int = 0
    """Tokens whose KV these read."""
    prefill_tokens: int = 0
    """Prompt tokens computed, those computed again included."""
    prefill_pairs: int = 0
    """Tokens that these attend to, summed over them."""

    @property
    def mean(self) -> Batch:
        """The work of the mean step; there must be one."""
        return Batch(
            decodes=round(self.decodes / self.steps),
            context_tokens=self.context_tokens // self.steps,
            prefill_tokens=self.prefill_tokens // self.steps,
            prefill_context=self.prefill_pairs // max(1, self.prefill_tokens),
        )

    def __add__(self, other: "Work") -> "Work":
        return self._each(other, 1)

    def __sub__(self, other: "Work") -> "Work":
        return self._each(other, -1)

    def _each(self, other: "Work", sign: int) -> "Work":
        ours, theirs = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return Work(*(a + sign * b for a, b in zip(ours, theirs, strict=True)))


class Load(Message, frozen=True):
    """State of one unit of an engine, sent when it changed and no step is skipped for it."""

    engine: int
    group: Group
    running: int
    waiting: int
    free_blocks: int
    added: int
    """``AddRequest`` messages for this unit that the engine has taken in since it started: what
    was sent to it later is not in the counts above."""
    finished: list[str]
    """Requests that ended since the last report, for any reason but ``AbortRequests``."""
    decoding: Work = Work()
    """Steps that computed no prompt token, since the unit started."""
    prefilling: Work = Work()
    """All other steps since then."""
    total: Work = Work()
    """Every step since then, those of unknown time in neither of the above included."""


class Integrity(Message, frozen=True):
    """Answer to ``CheckIntegrity``: one line per broken invariant, none when all hold.

    ``lent`` (physical ids) and ``leases`` (virtual blocks of each group led, by group) are what the
    controller holds against its own books.
    """

    call: int
    engine: int
    problems: list[str]
    lent: list[int]
    leases: list[tuple[Group, int]]


class Moved(Message, frozen=True):
    """Answer to ``MoveOut``: tokens that each request has generated here; it is forgotten.

    Requests that had ended are not in it.
    """

    engine: int
    tokens: dict[str, list[int]]


class EngineFailed(Message, frozen=True):
    """The engine met an error it cannot go on from; it ends after this message."""

    engine: int
    error: str


ToController = (
    EngineReady
    | Prepared
    | Committed
    | Released
    | Resumed
    | NeedBlocks
    | Lent
    | Returning
    | Load
    | Integrity
    | Moved
    | EngineFailed
)


# --- front end or supervisor -> controller ----------------------------------------------------


class GetLayout(Message, frozen=True):
    """Ask for a ``LayoutView``."""

    call: int


class GetMetrics(Message, frozen=True):
    """Ask for ``NodeMetrics``."""

    call: int


class SetLayout(Message, frozen=True):
    """Ask for a partition; answered with ``SwitchDone`` or ``CallFailed`` when it is over."""

    call: int
    units: list[list[int]]
    treatment: Treatment
    timeout_seconds: float


class SetPolicy(Message, frozen=True):
    """Ask for another policy; answered with a ``LayoutView`` or ``CallFailed``."""

    call: int
    policy: str


class AuditNode(Message, frozen=True):
    """Ask every engine and the controller to check their books; answered with ``AuditDone``."""

    call: int


class EngineDied(Message, frozen=True):
    """From the supervisor: a process of this engine ended."""

    engine: int
    reason: str


class CountRefused(Message, frozen=True):
    """From a front end: it refused a request by what ``PoolLimits`` said; to be counted."""

    outcome: Outcome


class Stopped(Message, frozen=True):
    """From a front end: these ended at a stop string, which only it sees; engines forget them."""

    request_ids: list[str]


ToControllerControl = (
    GetLayout | GetMetrics | SetLayout | SetPolicy | AuditNode | EngineDied | CountRefused | Stopped
)


# --- controller -> front end or supervisor ----------------------------------------------------


class LayoutView(Message, frozen=True):
    """Answer to ``GetLayout``."""

    call: int
    engines: list[EngineView]
    units: list[UnitView]
    switches: list[SwitchView]
    waiting: int
    """Requests in the task pool."""
    policy: str
    ready: bool
    reason: str | None
    """Why the node is not ready, if it is not."""
    switches_total: dict[str, int] = {}
    """Switches since the start, by outcome."""
    policy_errors: int = 0
    """Times that the policy raised or returned a plan that could not be done."""
    moves_total: int = 0
    """Requests taken out of a unit and recomputed on another."""
    step_errors: dict[str, float] = {}
    """Smoothed relative error of the predicted step times, by layout and kind of step, such as
    ``dp decode`` and ``tp2 prefill``."""


class NodeMetrics(Message, frozen=True):
    """Answer to ``GetMetrics``."""

    call: int
    families: list[Family]
    engines: list[EngineGauges]


class SwitchDone(Message, frozen=True):
    """Answer to ``SetLayout``."""

    call: int
    switch: SwitchView


class AuditDone(Message, frozen=True):
    """Answer to ``AuditNode``: every broken invariant of the controller and of the engines."""

    call: int
    problems: list[str]


class CallFailed(Message, frozen=True):
    """A call that could not be carried out; ``status`` is the HTTP status that says why."""

    call: int
    status: int
    error: str


class Placed(Message, frozen=True, omit_defaults=True):
    """A request of this front end was handed to a unit."""

    request_id: str
    unit: Group
    layout: str
    waited: tuple[float, float] | None = None
    """When it came into the task pool (again) and when it left it, monotonic seconds: told where
    requests are traced."""


class Ended(Message, frozen=True):
    """The controller ended a request of this front end; its finish reason follows in vLLM's format.

    Every request has a note before its first output or its end: ``Placed`` or this one.
    """

    request_id: str
    outcome: Outcome
    status: int | None = None
    """HTTP status for the caller; None: as the finish reason says."""
    message: str = ""
    retry_after: int | None = None
    """Seconds after which the caller may try again; None: that would not help."""


class PoolLimits(Message, frozen=True):
    """What new requests are to be refused for, from now until the next such note."""

    full: str | None = None
    """Which limit of the task pool is reached, for the caller to read."""
    callers: dict[str, str] = {}
    """The same for callers who have reached their own limit, by caller."""
    retry_after: int = 1
    """Seconds after which those who are refused may try again."""


class Switching(Message, frozen=True, omit_defaults=True):
    """A switch begins, or has ended, to regroup these engines."""

    engines: list[int]
    over: bool
    trace: SwitchTrace | None = None
    """Told where requests are traced."""


class KillEngines(Message, frozen=True):
    """To the supervisor: these engines are lost to a broken group; end their processes."""

    engines: list[int]
    reason: str


Note = Placed | Ended | PoolLimits | Switching
"""What the controller tells a front end unasked."""

FromController = LayoutView | NodeMetrics | SwitchDone | AuditDone | CallFailed | Note | KillEngines


_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Encode any message of this module."""
    return _encoder.encode(message)


decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_controller = msgspec.msgpack.Decoder(ToController).decode
decode_control = msgspec.msgpack.Decoder(ToControllerControl).decode
decode_from_controller = msgspec.msgpack.Decoder(FromController).decode
