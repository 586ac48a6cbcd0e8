"""The admin API: shows and changes the layout and the memory, and checks the node's books."""

from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse, Response

from shoal.policies.registry import POLICIES
from shoal.policies.shift import MOST_TOKENS, ShiftRule, ShiftThreshold, parse_threshold
from shoal.runtime.protocol.controller_client import CallError, ControlClient
from shoal.runtime.protocol.messages import POLICY_DECIDES, LayoutView, Treatment
from shoal.runtime.protocol.messages.views import MemoryView, ShiftView, SwitchView
from shoal.server.error_models import refusals
from shoal.server.errors import error_response, invalid_body
from shoal.server.gate.bodies import DecodedBodyRoute
from shoal.server.operator.admin_answers import (
    AuditAnswer,
    LayoutAnswer,
    MemoryAnswer,
    PolicyAnswer,
    ShiftAnswer,
    SwitchAnswer,
)

DEFAULT_TIMEOUT_SECONDS = 60.0
MAX_TIMEOUT_SECONDS = 3600.0

EngineNumber = Annotated[int, Field(ge=0, lt=1 << 31)]
"""Larger numbers fit into no message to the controller, which checks that the engine exists."""


def _threshold(value: Any) -> ShiftThreshold:
    if isinstance(value, str) and value.isdecimal():  # right on a command line
        raise ValueError("it is a string: a number of tokens stands without quotes")
    return parse_threshold(value)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class LayoutRequest(_Body):
    """Body of ``POST /admin/layout``: the engines of every unit, and how to get there."""

    units: list[list[EngineNumber]]
    layouts: list[Annotated[str, Field(max_length=32)]] | None = None
    """Name of each unit's layout; None: engines alone, and TP groups."""
    preempt: Annotated[Treatment, Field(strict=False)] = Treatment.CARRY
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_SECONDS)] = DEFAULT_TIMEOUT_SECONDS
    wait: Annotated[float, Field(ge=0, le=MAX_TIMEOUT_SECONDS)] | None = None

    @model_validator(mode="after")
    def _one_layout_for_each_unit(self) -> Self:
        if self.layouts is not None and len(self.layouts) != len(self.units):
            raise ValueError(f"{len(self.layouts)} layouts for {len(self.units)} units")
        return self


class EnginesRequest(_Body):
    """Body of ``POST /admin/drain`` and ``POST /admin/resume``: the engines concerned."""

    engines: Annotated[list[EngineNumber], Field(min_length=1)]


class PolicyRequest(_Body):
    """Body of ``POST /admin/policy``."""

    policy: Annotated[str, Field(json_schema_extra={"enum": sorted(POLICIES)})]
    """The controller refuses an unknown policy."""


class ShiftRequest(_Body):
    """Body of ``POST /admin/shift``: tokens, ``auto`` or ``off``."""

    threshold: Annotated[
        Annotated[int, Field(ge=0, le=MOST_TOKENS)] | ShiftRule, BeforeValidator(_threshold)
    ]


class MemoryRequest(_Body):
    """Body of ``POST /admin/memory``: a level of memory; ``auto``: ask the policy, without stages.

    The controller refuses levels that the node cannot have.
    """

    share_weights: Annotated[int, Field(ge=1, lt=1 << 31)] | Literal["auto"]
    stages: Annotated[int, Field(ge=1, lt=1 << 31)] = 1

    @field_validator("stages")
    @classmethod
    def _without_auto(cls, stages: int, info: ValidationInfo) -> int:
        if info.data.get("share_weights") == "auto":
            raise ValueError("goes with a number in share_weights, not with auto")
        return stages


class _JsonRoute(DecodedBodyRoute):
    """Reads a body as JSON, whatever its headers say: ``curl -d`` calls it a form."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, which looks at the type of the content."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            MutableHeaders(scope=request.scope)["content-type"] = "application/json"
            return await handle(request)

        return handle_json


def _control(request: Request) -> ControlClient:
    control: ControlClient = request.app.state.control
    return control


Control = Annotated[ControlClient, Depends(_control)]

router = APIRouter(
    prefix="/admin", tags=["admin"], route_class=_JsonRoute, responses=refusals(503, 504)
)


@router.get("/layout", response_model=LayoutAnswer)
async def get_layout(control: Control) -> LayoutView:
    """Show the layout, the engines and the last switches."""
    return await control.get_layout()


@router.post("/layout", response_model=SwitchAnswer, responses=refusals(400, 409))
async def set_layout(wanted: LayoutRequest, control: Control) -> SwitchView:
    """Switch to another layout, and answer when that is done."""
    return await control.set_layout(
        wanted.units, wanted.preempt, wanted.timeout, wanted.wait, wanted.layouts or ()
    )


@router.post("/drain", response_model=LayoutAnswer, responses=refusals(400, 409))
async def drain(wanted: EnginesRequest, control: Control) -> LayoutView:
    """Take engines out for maintenance; their requests go to other units."""
    return await control.drain(wanted.engines, drained=True)


@router.post("/resume", response_model=LayoutAnswer, responses=refusals(400))
async def resume(wanted: EnginesRequest, control: Control) -> LayoutView:
    """Let drained engines serve again."""
    return await control.drain(wanted.engines, drained=False)


@router.get("/policy", response_model=PolicyAnswer)
async def get_policy(control: Control) -> LayoutView:
    """Show the policy, and what it has done."""
    return await control.get_layout()


@router.post("/policy", response_model=PolicyAnswer, responses=refusals(400))
async def set_policy(wanted: PolicyRequest, control: Control) -> LayoutView:
    """Change the policy."""
    return await control.set_policy(wanted.policy)


@router.post("/shift", response_model=ShiftAnswer, responses=refusals(400))
async def set_shift(wanted: ShiftRequest, control: Control) -> ShiftView:
    """Change which steps of groups are run in SP."""
    return (await control.set_shift(wanted.threshold)).shift


@router.post("/memory", response_model=MemoryAnswer, responses=refusals(400, 409, 500))
async def change_memory(wanted: MemoryRequest, control: Control) -> MemoryView:
    """Move memory between weights and KV, and answer when that is done."""
    share, stages = wanted.share_weights, wanted.stages
    return await control.change_memory(POLICY_DECIDES if share == "auto" else share, stages)


@router.post("/audit")
async def audit(control: Control) -> AuditAnswer:
    """Check the books of the controller and the engines."""
    problems = await control.audit()
    return AuditAnswer(clean=not problems, problems=problems)


def add_admin_api(app: FastAPI, control: ControlClient) -> None:
    """Add the admin routes to an application, with errors in the usual shape.

    Args:
        app: the application, which decodes bodies (``BodyMiddleware``).
        control: the link to the controller.
    """
    app.state.control = control
    app.include_router(router)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(CallError, _refused)


async def _invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return invalid_body(error.errors())


async def _refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, CallError)
    return error_response(error.status, str(error))
