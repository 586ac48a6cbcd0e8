"""The admin API: see and change the layout, and check the node's books."""

from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from policies.partition import layout_name
from policies.registry import POLICIES
from policies.shift import ShiftThreshold, ShiftThresholdError, parse_threshold
from runtime.client import CallError, ControlClient
from runtime.messages import LayoutView, Treatment
from runtime.views import EngineView, ShiftView, SwitchView, UnitView
from server.errors import error_response

DEFAULT_TIMEOUT_SECONDS = 60.0
MAX_TIMEOUT_SECONDS = 3600.0


class LayoutRequest(msgspec.Struct, frozen=True):
    """Body of ``POST /admin/layout``."""

    units: list[list[int]]
    preempt: Treatment = Treatment.SEQUENTIAL
    timeout: float = DEFAULT_TIMEOUT_SECONDS


class PolicyRequest(msgspec.Struct, frozen=True):
    """Body of ``POST /admin/policy``."""

    policy: str


class ShiftRequest(msgspec.Struct, frozen=True):
    """Body of ``POST /admin/shift``."""

    threshold: int | str


class BadRequestError(ValueError):
    """A body that is not what the route takes; the message names what is wrong."""


R = TypeVar("R", LayoutRequest, PolicyRequest, ShiftRequest)


def parse_layout_request(body: bytes) -> LayoutRequest:
    """Decode and check the body of ``POST /admin/layout``.

    Raises:
        BadRequestError: it is not JSON, lacks ``units``, has a value of the wrong type or range, or
            a field that does not exist.
    """
    request = _parse(body, LayoutRequest)
    if not 0 < request.timeout <= MAX_TIMEOUT_SECONDS:
        raise BadRequestError(
            f"timeout is {request.timeout:g}: it must be more than 0 and at most "
            f"{MAX_TIMEOUT_SECONDS:g} seconds"
        )
    return request


def parse_policy_request(body: bytes) -> PolicyRequest:
    """Decode and check the body of ``POST /admin/policy``.

    Raises:
        BadRequestError: it is not JSON, lacks ``policy``, has another type, or another field.
    """
    return _parse(body, PolicyRequest)


def parse_shift_request(body: bytes) -> ShiftThreshold:
    """Decode and check the body of ``POST /admin/shift``.

    Raises:
        BadRequestError: it is not JSON, lacks ``threshold``, has another field, or none of its
            values.
    """
    try:
        return parse_threshold(_parse(body, ShiftRequest).threshold)
    except ShiftThresholdError as error:
        raise BadRequestError(str(error)) from None


def _parse(body: bytes, kind: type[R]) -> R:
    try:
        fields = msgspec.json.decode(body)
        if not isinstance(fields, dict):
            raise BadRequestError("the body must be a JSON object")
        unknown = sorted(set(fields) - set(kind.__struct_fields__))
        if unknown:
            known = ", ".join(kind.__struct_fields__)
            raise BadRequestError(f"unknown field {', '.join(unknown)}: the fields are {known}")
        return msgspec.convert(fields, kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequestError(f"the body is not valid: {error}") from None


def admin_router(control: ControlClient) -> APIRouter:
    """Return the admin routes on a link to the controller."""
    router = APIRouter(prefix="/admin")

    @router.get("/layout")
    async def get_layout() -> JSONResponse:
        try:
            return JSONResponse(layout_json(await control.get_layout()))
        except CallError as error:
            return error_response(error.status, str(error))

    @router.post("/layout")
    async def set_layout(request: Request) -> JSONResponse:
        try:
            wanted = parse_layout_request(await request.body())
            switch = await control.set_layout(wanted.units, wanted.preempt, wanted.timeout)
        except BadRequestError as error:
            return error_response(400, str(error))
        except CallError as error:
            return error_response(error.status, str(error))
        return JSONResponse(_switch_json(switch))

    @router.get("/policy")
    async def get_policy() -> JSONResponse:
        try:
            return JSONResponse(policy_json(await control.get_layout()))
        except CallError as error:
            return error_response(error.status, str(error))

    @router.post("/policy")
    async def set_policy(request: Request) -> JSONResponse:
        try:
            wanted = parse_policy_request(await request.body())
            view = await control.set_policy(wanted.policy)
        except BadRequestError as error:
            return error_response(400, str(error))
        except CallError as error:
            return error_response(error.status, str(error))
        return JSONResponse(policy_json(view))

    @router.post("/shift")
    async def set_shift(request: Request) -> JSONResponse:
        try:
            view = await control.set_shift(parse_shift_request(await request.body()))
        except BadRequestError as error:
            return error_response(400, str(error))
        except CallError as error:
            return error_response(error.status, str(error))
        return JSONResponse(_shift_json(view.shift))

    @router.post("/audit")
    async def audit() -> JSONResponse:
        try:
            problems = await control.audit()
        except CallError as error:
            return error_response(error.status, str(error))
        return JSONResponse({"clean": not problems, "problems": problems})

    return router


def policy_json(view: LayoutView) -> dict[str, Any]:
    """Return the body of ``GET /admin/policy``."""
    return {
        "policy": view.policy,
        "policies": sorted(POLICIES),
        "errors": view.policy_errors,
        "switches": view.switches_total,
        "moved": view.moves_total,
        "step_errors": view.step_errors,
    }


def layout_json(view: LayoutView) -> dict[str, Any]:
    """Return the body of ``GET /admin/layout``."""
    return {
        "ready": view.ready,
        "reason": view.reason,
        "policy": view.policy,
        "waiting": view.waiting,
        "units": [_unit_json(unit) for unit in view.units],
        "engines": [_engine_json(engine) for engine in view.engines],
        "unavailable": _unavailable_json(view),
        "shift": _shift_json(view.shift),
        "switches": [_switch_json(switch) for switch in view.switches],
    }


def readiness_json(view: LayoutView) -> dict[str, Any]:
    """Return the body of ``GET /ready`` of a node that takes requests, and what it lacks."""
    missing = {str(e.engine): e.state for e in view.engines if e.state != "serving"}
    body: dict[str, Any] = {"ready": True}
    if missing:
        body["engines"] = missing
    if view.unavailable:
        body["unavailable"] = _unavailable_json(view)
    return body


def _unavailable_json(view: LayoutView) -> list[dict[str, Any]]:
    return [{"engines": list(g.engines), "reason": g.reason} for g in view.unavailable]


def _shift_json(shift: ShiftView) -> dict[str, Any]:
    return {
        "threshold": shift.threshold,
        "max_sp": shift.max_sp,
        "sp_above": {
            layout_name(tuple(range(degree))): tokens for degree, tokens in shift.sp_above.items()
        },
    }


def _unit_json(unit: UnitView) -> dict[str, Any]:
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


def _engine_json(engine: EngineView) -> dict[str, Any]:
    return {
        "engine": engine.engine,
        "state": engine.state,
        "reason": engine.reason,
        "restarts": engine.restarts,
        "num_blocks": engine.num_blocks,
        "lent_blocks": engine.lent_blocks,
    }


def _switch_json(switch: SwitchView) -> dict[str, Any]:
    return {
        "epoch": switch.epoch,
        "at": switch.at,
        "before": [list(unit) for unit in switch.before],
        "after": [list(unit) for unit in switch.after],
        "preempt": switch.treatment,
        "reason": switch.reason,
        "outcome": switch.outcome,
        "error": switch.error,
        "duration_seconds": switch.duration_seconds,
        "requests": {
            "paused": switch.paused,
            "resumed": switch.resumed,
            "drained": switch.drained,
            "moved": switch.moved,
        },
    }
