"""The admin API: see and change the layout, and check the node's books."""

from typing import Annotated, TypeVar

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from shoal.policies.registry import POLICIES
from shoal.policies.shift import (
    MOST_TOKENS,
    ShiftRule,
    ShiftThreshold,
    ShiftThresholdError,
    parse_threshold,
)
from shoal.runtime.protocol.controller_client import CallError, ControlClient
from shoal.runtime.protocol.messages import Treatment
from shoal.server.errors import error_response
from shoal.server.gate.json_keys import repeated_key
from shoal.server.operator.admin_answers import (
    audit_json,
    layout_json,
    policy_json,
    shift_json,
    switch_json,
)

DEFAULT_TIMEOUT_SECONDS = 60.0
MAX_TIMEOUT_SECONDS = 3600.0

EngineNumber = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
"""Larger ones fit into no message to the controller, which knows which engines there are."""


class LayoutRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /admin/layout``: the engines of every unit, and how to get there."""

    units: list[list[EngineNumber]]
    preempt: Treatment = Treatment.SEQUENTIAL
    timeout: Annotated[
        float,
        msgspec.Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_SECONDS}),
    ] = DEFAULT_TIMEOUT_SECONDS
    wait: (
        Annotated[
            float, msgspec.Meta(extra_json_schema={"minimum": 0, "maximum": MAX_TIMEOUT_SECONDS})
        ]
        | None
    ) = None


class PolicyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /admin/policy``."""

    policy: Annotated[str, msgspec.Meta(extra_json_schema={"enum": sorted(POLICIES)})]


class ShiftRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /admin/shift``: tokens, ``auto`` or ``off``."""

    threshold: Annotated[
        int | str,
        msgspec.Meta(
            extra_json_schema={
                "anyOf": [
                    {"type": "integer", "minimum": 0, "maximum": MOST_TOKENS},
                    {"type": "string", "enum": list(ShiftRule)},
                ]
            }
        ),
    ]


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
    if request.wait is not None and not 0 <= request.wait <= MAX_TIMEOUT_SECONDS:
        raise BadRequestError(
            f"wait is {request.wait:g}: it must be from 0 to {MAX_TIMEOUT_SECONDS:g} seconds"
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
    threshold = _parse(body, ShiftRequest).threshold
    if isinstance(threshold, str) and threshold.isdecimal():  # right on a command line
        raise BadRequestError("threshold is a string: a number of tokens stands without quotes")
    try:
        return parse_threshold(threshold)
    except ShiftThresholdError as error:
        raise BadRequestError(str(error)) from None


def _parse(body: bytes, kind: type[R]) -> R:
    try:
        fields = msgspec.json.decode(body)
        if not isinstance(fields, dict):
            raise BadRequestError("the body must be a JSON object")
        repeated = repeated_key(body, fields)
        if repeated is not None:
            raise BadRequestError(f"{repeated}: an object of the body has this key twice")
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
            switch = await control.set_layout(
                wanted.units, wanted.preempt, wanted.timeout, wanted.wait
            )
        except BadRequestError as error:
            return error_response(400, str(error))
        except CallError as error:
            return error_response(error.status, str(error))
        return JSONResponse(switch_json(switch))

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
        return JSONResponse(shift_json(view.shift))

    @router.post("/audit")
    async def audit() -> JSONResponse:
        try:
            problems = await control.audit()
        except CallError as error:
            return error_response(error.status, str(error))
        return JSONResponse(audit_json(problems))

    return router
