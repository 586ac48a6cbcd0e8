"""Messages between the controller and the front ends or the supervisor."""

import math

import msgspec

from shoal.policies.shift import ShiftThreshold
from shoal.policies.values.layouts import Unit
from shoal.runtime.protocol.messages.metrics import EngineGauges, Family
from shoal.runtime.protocol.messages.values import DeathCause, Message, Outcome, Treatment
from shoal.runtime.protocol.messages.views import (
    CandidateView,
    CorrectionView,
    EngineView,
    MemoryView,
    ShiftView,
    SwitchTrace,
    SwitchView,
    UnavailableView,
    UnitView,
)

# --- front end or supervisor -> controller ----------------------------------------------------


class GetLayout(Message, frozen=True):
    """Ask for a ``LayoutView``."""

    call: int
    named: int = 0
    """The most requests of each unit that its view names."""


class GetMetrics(Message, frozen=True):
    """Ask for ``NodeMetrics``."""

    call: int


class SetLayout(Message, frozen=True):
    """Ask for a partition; the answer is ``SwitchDone`` or ``CallFailed``, after the switch."""

    call: int
    units: list[list[int]]
    treatment: Treatment
    timeout_seconds: float
    wait_seconds: float | None = None
    """If less than the time-out: seconds after which the switch stops waiting for requests."""
    layouts: list[str] = msgspec.field(default_factory=list)
    """Name of each unit's layout. An empty name, or no list, stands for one engine alone or for a
    TP group."""


class DrainEngines(Message, frozen=True):
    """Take engines out, or let them serve again; the answer is a ``LayoutView`` or ``CallFailed``.

    The answer does not wait: ``EngineView.requests`` says how many requests an engine still has.
    Nothing changes for an engine that is as it should be.
    """

    call: int
    engines: list[int]
    drained: bool
    """Whether they are taken out."""


class SetPolicy(Message, frozen=True):
    """Ask for another policy; the answer is a ``LayoutView`` or ``CallFailed``."""

    call: int
    policy: str


class SetShiftThreshold(Message, frozen=True):
    """Ask for another threshold for SP; the answer is a ``LayoutView`` or ``CallFailed``."""

    call: int
    threshold: ShiftThreshold


POLICY_DECIDES = 0
"""As a share level: the present one, until the policy wants another."""


class ChangeMemory(Message, frozen=True):
    """Ask for another level of memory (``policies.values.level``).

    The answer comes at its end, and is ``MemoryChanged`` or ``CallFailed``.
    """

    call: int
    share_weights: int
    """How many engines are to share weights, or ``POLICY_DECIDES``."""
    stages: int = 1
    """The other number of the level (``Level.stages``)."""
    timeout_seconds: float = math.inf
    """How long the caller waits for other operations to end: later, the change is not begun."""


class AuditNode(Message, frozen=True):
    """Ask every engine and the controller to check their books; the answer is ``AuditDone``."""

    call: int


class EngineDied(Message, frozen=True):
    """From the supervisor: a process of this engine ended, or cannot go on."""

    engine: int
    reason: str
    cause: DeathCause = DeathCause.ENDED
    incarnation: int = 0
    """How often the engine had been restarted before."""
    restarts: bool = False
    """Whether it will be restarted again."""


class EngineStarting(Message, frozen=True):
    """From the supervisor: the processes of a dead engine were restarted."""

    engine: int
    incarnation: int


class EndNode(Message, frozen=True):
    """From the supervisor: the node will end. A later message may shorten the time."""

    seconds: float
    """How long requests may go on. Requests that are not done by then are handed back."""


class CountRefused(Message, frozen=True):
    """From a front end: count a request that it refused because the pool would have."""

    outcome: Outcome


class Stopped(Message, frozen=True):
    """From a front end, which has ended these requests: forget them."""

    request_ids: list[str]
    outcome: Outcome = Outcome.FINISHED
    """``FINISHED``: they ended at a stop string, which the front end alone sees."""


class Progress(msgspec.Struct, frozen=True):
    """How far a request has come as its client sees it."""

    attempt: int
    """The attempt whose outputs the front end takes from now on; it drops those of earlier ones."""
    tokens: list[int]
    """Every output token that the front end has taken in."""


class Received(Message, frozen=True):
    """Answer to ``Interrupted``; also sent unasked for requests whose next tokens were lost."""

    client: int
    """Number of the front end."""
    progress: dict[str, Progress]
    """Progress by request. For a request that was not interrupted, it asks to start it again."""
    ended: list[str] = msgspec.field(default_factory=list)
    """Requests that are over: every token has come, or their client has gone."""


class GoesOn(Message, frozen=True):
    """From a front end: these requests have had a first output of their latest attempt."""

    request_ids: list[str]


ToControllerControl = (
    GetLayout
    | GetMetrics
    | SetLayout
    | DrainEngines
    | SetPolicy
    | SetShiftThreshold
    | ChangeMemory
    | AuditNode
    | EngineDied
    | EngineStarting
    | EndNode
    | CountRefused
    | Stopped
    | Received
    | GoesOn
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
    switches_total: dict[str, int] = msgspec.field(default_factory=dict)
    """Switches since the start, by outcome."""
    policy_errors: int = 0
    """How often the policy raised an exception or returned an invalid plan."""
    moves_total: int = 0
    """Requests taken out of a unit and recomputed on another."""
    step_errors: dict[str, float] = msgspec.field(default_factory=dict)
    """Smoothed relative error of the predicted step times, by layout and kind of step, such as
    ``dp decode``, ``tp2 prefill`` and, for steps in SP, ``tp2 sp prefill``."""
    costs: str = ""
    """Where the cost model's corrections come from at first: ``fitted`` at this start, ``cached``
    from an earlier one, or ``assumed``: from nowhere. Empty without a cost model."""
    corrections: dict[str, CorrectionView] = msgspec.field(default_factory=dict)
    """What measured steps correct, by the names of ``step_errors``."""
    candidates: list[CandidateView] = msgspec.field(default_factory=list)
    """What the policy thinks of other layouts; empty if it does not say."""
    shift: ShiftView = ShiftView()
    unavailable: list[UnavailableView] = msgspec.field(default_factory=list)
    """Groups that cannot be formed now."""
    lengths: dict[str, int] = msgspec.field(default_factory=dict)
    """Tokens of the longest request that each layout holds; empty until the engines are ready."""
    share_weights: int = 1
    """How many engines share weights now, or will when a change has ended that is under way."""
    share_stages: int = 1
    """The other number of this level (``Level.stages``)."""
    share_decided_by: str = "operator"
    """Who may change the level: ``policy``, or only the ``operator``."""
    hidden_above: dict[str, int] = msgspec.field(default_factory=dict)
    """Layouts whose steps read weights from other engines, each with the tokens of a step from
    which on its computing hides that (``CostModel.hidden_above``)."""
    memory_changes: list[MemoryView] = msgspec.field(default_factory=list)
    """The last changes of memory between weights and KV."""


class NodeMetrics(Message, frozen=True):
    """Answer to ``GetMetrics``."""

    call: int
    families: list[Family]
    engines: list[EngineGauges]


class SwitchDone(Message, frozen=True):
    """Answer to ``SetLayout``."""

    call: int
    switch: SwitchView


class MemoryChanged(Message, frozen=True):
    """Answer to ``ChangeMemory``."""

    call: int
    change: MemoryView


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
    """A request of this front end was handed to a unit, out of the task pool or by a carry."""

    request_id: str
    unit: Unit
    waited: tuple[float, float] | None = None
    """When it last came into the task pool and when it left, in monotonic seconds; None if it was
    carried, and unless requests are traced."""


class CarriedOn(Message, frozen=True):
    """These requests of this front end go on in a unit that they were carried to.

    It stands for a ``Placed`` of each: a carry of many has no time for as many messages.
    """

    request_ids: list[str]
    unit: Unit


class Ended(Message, frozen=True):
    """The controller ended a request of this front end; its finish reason follows in vLLM's format.

    The front end gets ``Placed`` or ``Ended`` for every request before its first output or its end.
    """

    request_id: str
    outcome: Outcome
    status: int | None = None
    """HTTP status for the caller; None: the finish reason decides it."""
    message: str = ""
    retry_after: int | None = None
    """Seconds after which the caller may try again; None: that would not help."""


class Interrupted(Message, frozen=True):
    """The engines of these requests died; the front end answers with ``Received``.

    After that it gets ``Placed`` or ``Ended`` for each request that goes on.
    """

    attempts: dict[str, int]
    """The number of each request's next attempt, by request."""


class PoolLimits(Message, frozen=True):
    """Why the front ends must refuse new requests, until the next note of this type."""

    full: str | None = None
    """The error for callers if the task pool has reached a limit; None: it has not."""
    callers: dict[str, str] = msgspec.field(default_factory=dict)
    """The error for each caller that has reached its own limit, by caller."""
    retry_after: int = 1
    """Seconds after which refused callers may try again."""
    let_in: int | None = None
    """The least urgent priority that still comes in, because it pushes another request out of
    the full pool. None: no priority does."""

    def lets_in(self, priority: int) -> bool:
        """Return whether a request of this priority comes in although the pool is full."""
        return self.let_in is not None and priority <= self.let_in


class Switching(Message, frozen=True, omit_defaults=True):
    """A switch that regroups these engines begins, or is over."""

    engines: list[int]
    over: bool
    trace: SwitchTrace | None = None
    """What to trace; None unless requests are traced."""


class KillEngines(Message, frozen=True):
    """To the supervisor: these engines are lost; end their processes."""

    engines: dict[int, int]
    """Engines, each with the incarnation that the controller knows. A later one stays alive."""
    reason: str


Note = Placed | Ended | Interrupted | PoolLimits | Switching
"""Messages that the controller sends a front end unasked."""

FromController = (
    LayoutView
    | CarriedOn
    | NodeMetrics
    | SwitchDone
    | MemoryChanged
    | AuditDone
    | CallFailed
    | Note
    | KillEngines
)
