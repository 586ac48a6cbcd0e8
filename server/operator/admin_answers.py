"""The answers of the admin API and of ``/ready``.

Routes return the controller's views, and FastAPI makes the answers from the attributes of the same
names. Only the attributes that are named here are sent.
"""

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    computed_field,
    model_validator,
)

from shoal.policies.registry import POLICIES
from shoal.policies.shift import ShiftThreshold
from shoal.runtime.protocol.messages.views import EngineView, SwitchView


def _states_of_missing(engines: Iterable[EngineView]) -> dict[str, str]:
    return {str(each.engine): each.state for each in engines if each.state != "serving"}


class _Answer(BaseModel):
    model_config = ConfigDict(from_attributes=True)


class UnitAnswer(_Answer):
    """One unit: the engines that work together now, and their requests."""

    engines: list[int]
    layout: str
    state: str
    running: int
    waiting: int
    paused: int = Field(validation_alias="paused_requests")
    lease_blocks: int


class EngineAnswer(_Answer):
    """One engine, the requests that need it, and the KV blocks that it has lent, by group."""

    engine: int
    state: str
    reason: str | None
    restarts: int
    drained: bool
    requests: int
    num_blocks: int
    lent_blocks: dict[str, int]
    weight_bytes: int
    share_weights: int
    share_stages: int


class UnavailableAnswer(_Answer):
    """A group that cannot be formed now, and why."""

    engines: list[int]
    layout: str
    reason: str


class ShiftAnswer(_Answer):
    """Which steps of groups are run in SP: by layout, the tokens above which they are."""

    threshold: ShiftThreshold
    max_sp: int
    sp_above: dict[str, int]


class SwitchedRequestsAnswer(_Answer):
    """What a switch did to running requests: how many of them."""

    paused: int
    resumed: int
    drained: int
    moved: int
    carried: int
    recomputed: dict[str, int]


class SwitchAnswer(_Answer):
    """One switch; ``at`` is in seconds since 1970."""

    epoch: int
    at: float
    before: list[list[int]]
    after: list[list[int]]
    before_layouts: list[str]
    after_layouts: list[str]
    preempt: str = Field(validation_alias="treatment")
    reason: str
    outcome: str
    late: bool
    error: str | None
    duration_seconds: float
    carried_bytes: int
    carry_seconds: float
    precopied_bytes: int
    precopy_seconds: float
    requests: SwitchedRequestsAnswer

    @model_validator(mode="before")
    @classmethod
    def _with_requests(cls, switch: SwitchView) -> dict[str, Any]:
        return {**msgspec.structs.asdict(switch), "requests": switch}


class MemoryAnswer(_Answer):
    """One change of memory between weights and KV; ``at`` is in seconds since 1970."""

    epoch: int
    at: float
    engines: list[int]
    before: int
    before_stages: int
    after: int
    after_stages: int
    num_blocks: int
    preempted: int
    duration_seconds: float
    stages: dict[str, float]
    reason: str
    outcome: str
    error: str | None


class LayoutAnswer(_Answer):
    """The node: what decides its layout, its units and engines, and the last switches."""

    ready: bool
    reason: str | None
    policy: str
    waiting: int
    units: list[UnitAnswer]
    engines: list[EngineAnswer]
    unavailable: list[UnavailableAnswer]
    shift: ShiftAnswer
    share_weights: int
    share_stages: int
    share_decided_by: str
    hidden_above: dict[str, int]
    memory_changes: list[MemoryAnswer]
    switches: list[SwitchAnswer]


class CorrectionAnswer(_Answer):
    """How measured steps correct the predicted ones."""

    factor: float
    added_seconds: float
    measured: int


class CandidateAnswer(_Answer):
    """Why the node does not have another layout."""

    units: list[str]
    saved_seconds: float
    price_seconds: float
    fine_seconds: float
    foreseen_seconds: float | None
    has_room: bool


class PolicyAnswer(_Answer):
    """The policy, all there are, and what has come of it since the start."""

    policy: str
    errors: int = Field(validation_alias="policy_errors")
    switches: dict[str, int] = Field(validation_alias="switches_total")
    moved: int = Field(validation_alias="moves_total")
    step_errors: dict[str, float]
    costs: str
    corrections: dict[str, CorrectionAnswer]
    candidates: list[CandidateAnswer]

    @computed_field
    def policies(self) -> list[str]:
        """All there are."""
        return sorted(POLICIES)


class AuditAnswer(BaseModel):
    """One line per broken invariant of the books."""

    clean: bool
    problems: list[str]


class ReadyAnswer(_Answer):
    """A node that takes requests; with the state of engines that do not serve, if any."""

    ready: bool
    engines: Annotated[dict[str, str], BeforeValidator(_states_of_missing)] = {}
    unavailable: list[UnavailableAnswer] = []
