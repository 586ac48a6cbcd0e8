"""What the admin API and ``/ready`` answer, made from what the controller says.

The types are those of the OpenAPI document (``openapi.py``).
"""

from typing import NotRequired, TypedDict

from shoal.policies.registry import POLICIES
from shoal.policies.shift import ShiftThreshold
from shoal.runtime.protocol.messages import LayoutView
from shoal.runtime.protocol.messages.views import EngineView, ShiftView, SwitchView, UnitView


class UnitAnswer(TypedDict):
    """One unit: the engines that work together now, and their requests."""

    engines: list[int]
    layout: str
    state: str
    running: int
    waiting: int
    paused: int
    interleaved: int
    lease_blocks: int


class EngineAnswer(TypedDict):
    """One engine, and the KV blocks that it has lent, by group."""

    engine: int
    state: str
    reason: str | None
    restarts: int
    num_blocks: int
    lent_blocks: dict[str, int]


class UnavailableAnswer(TypedDict):
    """A group that cannot be formed now, and why."""

    engines: list[int]
    reason: str


class ShiftAnswer(TypedDict):
    """Which steps of groups are run in SP: by layout, the tokens above which they are."""

    threshold: ShiftThreshold
    max_sp: int
    sp_above: dict[str, int]


class SwitchedRequestsAnswer(TypedDict):
    """What a switch did to running requests: how many of them."""

    paused: int
    resumed: int
    drained: int
    moved: int


class SwitchAnswer(TypedDict):
    """One switch; ``at`` is in seconds since 1970."""

    epoch: int
    at: float
    before: list[list[int]]
    after: list[list[int]]
    preempt: str
    reason: str
    outcome: str
    late: bool
    error: str | None
    duration_seconds: float
    requests: SwitchedRequestsAnswer


class LayoutAnswer(TypedDict):
    """The node: what decides its layout, its units and engines, and the last switches."""

    ready: bool
    reason: str | None
    policy: str
    waiting: int
    units: list[UnitAnswer]
    engines: list[EngineAnswer]
    unavailable: list[UnavailableAnswer]
    shift: ShiftAnswer
    switches: list[SwitchAnswer]


class PolicyAnswer(TypedDict):
    """The policy, all there are, and what has come of it since the start."""

    policy: str
    policies: list[str]
    errors: int
    switches: dict[str, int]
    moved: int
    step_errors: dict[str, float]


class AuditAnswer(TypedDict):
    """One line per broken invariant of the books."""

    clean: bool
    problems: list[str]


class ReadyAnswer(TypedDict):
    """A node that takes requests; with the state of engines that do not serve, if any."""

    ready: bool
    engines: NotRequired[dict[str, str]]
    unavailable: NotRequired[list[UnavailableAnswer]]


def layout_json(view: LayoutView) -> LayoutAnswer:
    """Return the body of ``GET /admin/layout``."""
    return {
        "ready": view.ready,
        "reason": view.reason,
        "policy": view.policy,
        "waiting": view.waiting,
        "units": [_unit_json(unit) for unit in view.units],
        "engines": [_engine_json(engine) for engine in view.engines],
        "unavailable": _unavailable_json(view),
        "shift": shift_json(view.shift),
        "switches": [switch_json(switch) for switch in view.switches],
    }


def policy_json(view: LayoutView) -> PolicyAnswer:
    """Return the body of ``GET /admin/policy``."""
    return {
        "policy": view.policy,
        "policies": sorted(POLICIES),
        "errors": view.policy_errors,
        "switches": view.switches_total,
        "moved": view.moves_total,
        "step_errors": view.step_errors,
    }


def shift_json(shift: ShiftView) -> ShiftAnswer:
    """Return the body of an answer to ``POST /admin/shift``."""
    return {
        "threshold": shift.threshold,
        "max_sp": shift.max_sp,
        "sp_above": shift.sp_above,
    }


def switch_json(switch: SwitchView) -> SwitchAnswer:
    """Return the body of an answer to ``POST /admin/layout``."""
    return {
        "epoch": switch.epoch,
        "at": switch.at,
        "before": [list(unit) for unit in switch.before],
        "after": [list(unit) for unit in switch.after],
        "preempt": switch.treatment,
        "reason": switch.reason,
        "outcome": switch.outcome,
        "late": switch.late,
        "error": switch.error,
        "duration_seconds": switch.duration_seconds,
        "requests": {
            "paused": switch.paused,
            "resumed": switch.resumed,
            "drained": switch.drained,
            "moved": switch.moved,
        },
    }


def audit_json(problems: list[str]) -> AuditAnswer:
    """Return the body of an answer to ``POST /admin/audit``."""
    return {"clean": not problems, "problems": problems}


def readiness_json(view: LayoutView) -> ReadyAnswer:
    """Return the body of ``GET /ready`` of a node that takes requests, and what it lacks."""
    missing = {str(e.engine): e.state for e in view.engines if e.state != "serving"}
    body: ReadyAnswer = {"ready": True}
    if missing:
        body["engines"] = missing
    if view.unavailable:
        body["unavailable"] = _unavailable_json(view)
    return body


def _unavailable_json(view: LayoutView) -> list[UnavailableAnswer]:
    return [{"engines": list(g.engines), "reason": g.reason} for g in view.unavailable]


def _unit_json(unit: UnitView) -> UnitAnswer:
    return {
        "engines": list(unit.engines),
        "layout": unit.layout,
        "state": unit.state,
        "running": unit.running,
        "waiting": unit.waiting,
        "paused": unit.paused_requests,
        "interleaved": unit.interleaved_requests,
        "lease_blocks": unit.lease_blocks,
    }


def _engine_json(engine: EngineView) -> EngineAnswer:
    return {
        "engine": engine.engine,
        "state": engine.state,
        "reason": engine.reason,
        "restarts": engine.restarts,
        "num_blocks": engine.num_blocks,
        "lent_blocks": engine.lent_blocks,
    }
