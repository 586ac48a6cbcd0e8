"""The frozen plan that a policy returns, and the check that it can be carried out."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

from shoal.policies.values.batch import NO_PROMPTS, PromptWork
from shoal.policies.values.layouts import Unit, alone
from shoal.policies.values.level import Level
from shoal.policies.values.partition import Partition, PartitionError, parse_partition
from shoal.policies.values.snapshot import Move, PoolRequest, Snapshot, UnitState

INTERFACE_VERSION = 1
"""Version of what policies see and return: ``Snapshot``, ``Plan``, and the values in them.

It counts up when a name goes, or when its meaning changes. A new name changes no version."""

TreatmentName = Literal["sequential", "carry", "soft", "hard"]
"""What happens to the requests that run on the units of a switch. ``sequential``: wait until they
end. ``carry``: they go on in the new layout with their KV. ``soft``: recompute them on another
unit. ``hard``: pause them, with their KV in place, until their unit is back."""


SwitchReason = Literal["", "load", "quiet", "urgent", "long", "slo", "start"]
"""Why a policy wants another partition, for the log and the metrics: high or low load, an urgent or
a long request, a promise at risk, or the layout with which an idle node begins."""


ShareReason = Literal["", "kv", "steps"]
"""Why a policy wants another number of engines to share weights: requests need more KV, or steps
are faster with whole weights."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Hand a request of the pool to a unit, which starts it now."""

    request_id: str
    unit: Unit
    patience: float = 0.0
    """The unit computes its prompt after those of requests of its priority that come up to so many
    seconds later, if they have less patience."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why the node does not have another layout, for people who ask. Seconds are of requests."""

    partition: Partition
    saved: float
    """What it would have saved so far beside the present layout."""
    price: float
    """What it must save."""
    fine: float
    """What it must save beside that, because another layout was better so far."""
    foreseen: float | None
    """What the latest look ahead said that a switch would bring; None: there was no look."""
    has_room: bool
    """Whether the requests could take their KV along."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a policy wants to be done now; the empty plan changes nothing."""

    dispatches: tuple[Dispatch, ...] = ()
    target: Partition | None = None
    """Partition to switch to; None keeps the current one."""
    treatment: TreatmentName = "carry"
    reason: SwitchReason = ""
    """Why the policy wants the target."""
    memory: object = None
    """A frozen value of the policy's own, which the next snapshot gives back to it."""
    share_weights: int | None = None
    """How many engines are to share weights (``Snapshot.share_levels``); None: the level is to stay
    as it is. It is done if the plan has no target."""
    share_stages: int = 1
    """The other number of the level that ``share_weights`` asks for (``Level.stages``)."""
    share_reason: ShareReason = ""
    moves: tuple[Move, ...] = ()
    """Carry so many of a unit's requests whose prompts are computed to another unit: the latest. It
    is done if the plan has no target, and if nothing else needs the engines. There is one move at a
    time between two units."""
    verdicts: tuple[Verdict, ...] = ()
    """What the policy thinks of other layouts, if it has judged them; empty: what it last said."""
    study: Callable[[], object] | None = None
    """Work that takes long. The controller does it in another thread, while it sends requests to
    units, if ``Snapshot.can_study``. What it returns are the next snapshots' ``findings``. It must
    not change anything, and takes the place of an earlier study."""

    @property
    def level(self) -> Level | None:
        """The level of memory that it asks for; None: it asks for none."""
        share = self.share_weights
        return None if share is None else Level(share, self.share_stages)


@dataclass(frozen=True, slots=True)
class Policy:
    """A named pure function from a snapshot to a plan."""

    name: str
    plan: "PlanFunction"
    decides_layout: bool
    """Whether the policy sets targets. If it does, operators may not."""
    shifts: bool = True
    """Whether groups run steps in SP under this policy, if the node can."""
    forms_groups: bool = True
    """Whether the policy ever forms groups. If not, every request must fit one engine."""
    serves_batches: bool = False
    """Whether the policy decides about background requests as about all others. Otherwise it does
    not see them, and they run where people can spare it."""
    parks: bool = False
    """Whether the policy decides about requests whose KV waits in the host's memory. Otherwise they
    go on after a while in any unit that holds them."""
    interface: int | None = None
    """The ``INTERFACE_VERSION`` that it was written for; None: it does not say."""


class PlanFunction(Protocol):
    """A pure function: the same snapshot gives the same plan."""

    def __call__(self, snapshot: Snapshot, /) -> Plan:
        """Return what to do now."""


class PlanError(ValueError):
    """A plan that cannot be carried out in its snapshot; the message says why."""


@dataclass(slots=True)
class Room:
    """The capacity that is left in a unit while a plan's dispatches are added up."""

    unit: UnitState
    slots: int = field(init=False)
    blocks: int = field(init=False)
    taken: int = 0
    """Requests that the plan has sent here."""
    queued: PromptWork = NO_PROMPTS
    """What these have to compute first."""
    context: int = 0
    """Tokens of their prompts."""
    prefixes: set[int] = field(default_factory=set)
    """Beginnings that they have in common with others (``PoolRequest.prefix``)."""

    def __post_init__(self) -> None:
        self.slots = self.unit.free_slots if self.unit.serving else 0
        self.blocks = self.unit.free_blocks

    def takes(self, request: PoolRequest) -> bool:
        """Return whether the unit can still start the request."""
        unit = self.unit
        return (
            self.slots > 0
            and request.total_tokens <= unit.max_model_len
            and unit.blocks_for(request) <= min(self.blocks, unit.total_blocks)
        )

    def take(self, request: PoolRequest) -> None:
        """Take the request's share of the capacity."""
        self.slots -= 1
        self.blocks -= self.unit.blocks_for(request)
        self.taken += 1
        self.queued = self.queued.with_(self.work(request))
        self.context += request.prompt_tokens
        if request.prefix:
            self.prefixes.add(request.prefix)

    def join(self, request: PoolRequest) -> None:
        """Note a request that comes here with its KV, and has no prompt to compute."""
        self.taken += 1
        self.context += request.prompt_tokens

    def new_tokens(self, request: PoolRequest) -> int:
        """Return how many tokens of its prompt the request would have to compute here."""
        if not request.cached:
            return request.prompt_tokens
        if request.prefix in self.prefixes:
            cached = max(tokens for _, tokens in request.cached)
        else:
            cached = request.cached_in(self.unit.unit)
        return max(1, request.prompt_tokens - cached)

    def work(self, request: PoolRequest) -> PromptWork:
        """Return what the request would have to compute of its prompt here."""
        return PromptWork.of(request.prompt_tokens, self.new_tokens(request))


def check_plan(plan: Plan, snapshot: Snapshot) -> None:
    """Check that every dispatch can start at once and that the target can be formed.

    Raises:
        PlanError: a dispatch cannot start, the target cannot form, the treatment is unknown, or
            there is no thread for the study.
    """
    requests = {request.request_id: request for request in snapshot.pool}
    rooms = {unit.unit: Room(unit) for unit in snapshot.units}
    for dispatch in plan.dispatches:
        request = requests.pop(dispatch.request_id, None)
        room = rooms.get(dispatch.unit)
        if request is None:
            raise PlanError(
                f"request {dispatch.request_id} is not in the pool, or twice in the plan"
            )
        if room is None:
            raise PlanError(f"{list(dispatch.unit.engines)} is no unit")
        if not room.takes(request):
            raise PlanError(
                f"unit {list(dispatch.unit.engines)} cannot start {dispatch.request_id} now"
            )
        room.take(request)
    if plan.study is not None and not snapshot.can_study:
        raise PlanError("there is no thread for the study")
    if plan.treatment not in get_args(TreatmentName):
        raise PlanError(f"no treatment {plan.treatment!r}")
    if plan.target is not None:
        _check_target(plan.target, snapshot)
    for move in plan.moves:
        _check_move(move, snapshot)
        if move.source == move.destination or move.requests < 1:
            raise PlanError(f"a move from unit {list(move.source.engines)} moves nothing")
    levels = {snapshot.level, *(level.level for level in snapshot.share_levels)}
    if plan.level is not None and plan.level not in levels:
        raise PlanError(f"the level of memory cannot become {plan.level.name} now")


def _check_move(move: Move, snapshot: Snapshot) -> None:
    units = {*snapshot.partition, *(tier.unit for tier in snapshot.tiers)}
    for unit in (move.source, move.destination):
        if unit not in units:
            raise PlanError(f"{list(unit.engines)} is no unit")
    if move.destination.tier and move.source != alone(move.destination.leader):
        named = list(move.source.engines)
        raise PlanError(f"only engine {move.destination.leader} parks in its tier, not {named}")


def _check_target(target: Partition, snapshot: Snapshot) -> None:
    try:
        canonical = parse_partition(
            [unit.engines for unit in target],
            engines=snapshot.engines,
            max_group=snapshot.max_group,
            max_pp=max((state.layout.pp for state in snapshot.layouts), default=1),
            names={unit.engines: unit.name for unit in target},
        )
    except PartitionError as error:
        raise PlanError(str(error)) from error
    if canonical != target:
        raise PlanError("the target's units are not in order, or of no layout of this node")
    for unit in target:
        named = list(unit.engines)
        is_new = unit not in snapshot.partition
        if unit.is_group and is_new and snapshot.dead.intersection(named):
            raise PlanError(f"unit {named} names a dead engine")
        if unit in snapshot.broken:
            raise PlanError(f"unit {named} cannot be formed: an engine of it was restarted")
