"""What front ends and the supervisor ask of the controller, and what it tells them."""

import msgspec

from shoal.policies.shift import ShiftThreshold
from shoal.policies.values.layouts import Unit
from shoal.runtime.protocol.messages.metrics import EngineGauges, Family
from shoal.runtime.protocol.messages.values import DeathCause, Message, Outcome, Treatment
from shoal.runtime.protocol.messages.views import (
    EngineView,
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


class GetMetrics(Message, frozen=True):
    """Ask for ``NodeMetrics``."""

    call: int


class SetLayout(Message, frozen=True):
    """Ask for a partition; answered with ``SwitchDone`` or ``CallFailed`` when it is over."""

    call: int
    units: list[list[int]]
    treatment: Treatment
    timeout_seconds: float
    wait_seconds: float | None = None
    """After so long, if that is sooner, the switch goes on without waiting for requests."""


class SetPolicy(Message, frozen=True):
    """Ask for another policy; answered with a ``LayoutView`` or ``CallFailed``."""

    call: int
    policy: str


class SetShiftThreshold(Message, frozen=True):
    """Ask for another threshold of the shift; answered with a ``LayoutView`` or ``CallFailed``."""

    call: int
    threshold: ShiftThreshold


class AuditNode(Message, frozen=True):
    """Ask every engine and the controller to check their books; answered with ``AuditDone``."""

    call: int


class EngineDied(Message, frozen=True):
    """From the supervisor: a process of this engine ended, or will not go on."""

    engine: int
    reason: str
    cause: DeathCause = DeathCause.ENDED
    incarnation: int = 0
    """How often it had been restarted."""
    restarts: bool = False
    """Whether it will be restarted again."""


class EngineStarting(Message, frozen=True):
    """From the supervisor: the processes of an engine that died were started again."""

    engine: int
    incarnation: int


class EndNode(Message, frozen=True):
    """From the supervisor: the node is to end; a later word that leaves less time counts, too."""

    seconds: float
    """How long requests may go on; what is not done by then is handed back to its caller."""


class CountRefused(Message, frozen=True):
    """From a front end: it refused a request that the pool would have refused; to be counted."""

    outcome: Outcome


class Stopped(Message, frozen=True):
    """From a front end: these ended at a stop string, which only it sees; engines forget them."""

    request_ids: list[str]


class Progress(msgspec.Struct, frozen=True):
    """How far a request has come in front of its client."""

    attempt: int
    """What the front end takes outputs of from now on: those of earlier ones are dropped."""
    tokens: list[int]
    """Every output token that it has taken in."""


class Received(Message, frozen=True):
    """Answer to ``Interrupted``; also unasked, of requests whose next tokens will never come."""

    client: int
    """Number of the front end."""
    progress: dict[str, Progress]
    """By request; where it is no word of the controller's it asks to begin the request again."""
    ended: list[str] = msgspec.field(default_factory=list)
    """Those that are over: every token was there, or their client has gone."""


class GoesOn(Message, frozen=True):
    """From a front end: the first outputs of the latest attempts at these requests have come."""

    request_ids: list[str]


ToControllerControl = (
    GetLayout
    | GetMetrics
    | SetLayout
    | SetPolicy
    | SetShiftThreshold
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
    """Times that the policy raised or returned a plan that could not be done."""
    moves_total: int = 0
    """Requests taken out of a unit and recomputed on another."""
    step_errors: dict[str, float] = msgspec.field(default_factory=dict)
    """Smoothed relative error of the predicted step times, by layout and kind of step, such as
    ``dp decode``, ``tp2 prefill`` and, of steps in SP, ``tp2 sp prefill``."""
    shift: ShiftView = ShiftView()
    unavailable: list[UnavailableView] = msgspec.field(default_factory=list)
    """Groups that cannot be formed now."""
    lengths: dict[str, int] = msgspec.field(default_factory=dict)
    """Tokens of the longest request that each layout holds; empty until the engines are ready."""


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
    unit: Unit
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


class Interrupted(Message, frozen=True):
    """The engines of these requests died: say how far they have come (``Received``).

    Each has another note for it then, ``Placed`` or ``Ended``.
    """

    attempts: dict[str, int]
    """By request, how often it will have been begun again."""


class PoolLimits(Message, frozen=True):
    """What new requests are to be refused for, from now until the next such note."""

    full: str | None = None
    """Which limit of the task pool is reached, for the caller to read."""
    callers: dict[str, str] = msgspec.field(default_factory=dict)
    """The same for callers who have reached their own limit, by caller."""
    retry_after: int = 1
    """Seconds after which those who are refused may try again."""
    let_in: int | None = None
    """The least urgent priority that comes in all the same: it pushes another one out of
    the full pool. None: no priority does."""

    def lets_in(self, priority: int) -> bool:
        """Return whether a request of this priority comes in although the pool is full."""
        return self.let_in is not None and priority <= self.let_in


class Switching(Message, frozen=True, omit_defaults=True):
    """A switch begins, or has ended, to regroup these engines."""

    engines: list[int]
    over: bool
    trace: SwitchTrace | None = None
    """Told where requests are traced."""


class KillEngines(Message, frozen=True):
    """To the supervisor: these engines are lost; end their processes."""

    engines: dict[int, int]
    """And how often each was restarted, as far as the controller knows: later ones live."""
    reason: str


Note = Placed | Ended | Interrupted | PoolLimits | Switching
"""What the controller tells a front end unasked."""

FromController = LayoutView | NodeMetrics | SwitchDone | AuditDone | CallFailed | Note | KillEngines
