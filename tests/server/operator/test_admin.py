"""The admin API over HTTP, with a controller that keeps what it is asked for."""

import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest

from shoal.policies.registry import POLICIES
from shoal.policies.shift import ShiftRule, ShiftThreshold
from shoal.runtime.protocol.controller_client import CallError
from shoal.runtime.protocol.messages import POLICY_DECIDES, LayoutView, Treatment
from shoal.runtime.protocol.messages.views import (
    CandidateView,
    CorrectionView,
    EngineView,
    MemoryView,
    ShiftView,
    SwitchView,
    UnavailableView,
    UnitView,
)
from shoal.server.frontend.app import ADMIN_BODY_BYTES, Backstage, build_admin_app
from shoal.server.gate.access import Access
from shoal.server.operator.admin import DEFAULT_TIMEOUT_SECONDS

SWITCH = SwitchView(
    epoch=1,
    at=1767225600.0,
    before=[(0,), (1,)],
    after=[(0, 1)],
    treatment="hard",
    outcome="done",
    error=None,
    duration_seconds=0.012,
    paused=3,
    resumed=0,
    drained=2,
    reason="manual",
    carried=4,
    recomputed={"no_room": 1},
    carried_bytes=4096,
    carry_seconds=0.004,
    precopied_bytes=8192,
    precopy_seconds=0.002,
    before_layouts=["dp", "dp"],
    after_layouts=["pp2"],
)
MEMORY = MemoryView(
    epoch=2,
    at=1767225600.0,
    engines=[0, 1],
    before=2,
    after=1,
    num_blocks=812,
    preempted=3,
    duration_seconds=1.5,
    reason="manual",
    outcome="done",
    stages={"closing": 0.5, "filling": 1.0},
    before_stages=2,
)
MEMORY_ANSWER = {
    "epoch": 2,
    "at": 1767225600.0,
    "engines": [0, 1],
    "before": 2,
    "before_stages": 2,
    "after": 1,
    "after_stages": 1,
    "num_blocks": 812,
    "preempted": 3,
    "duration_seconds": 1.5,
    "stages": {"closing": 0.5, "filling": 1.0},
    "reason": "manual",
    "outcome": "done",
    "error": None,
}
NODE = LayoutView(
    call=1,
    engines=[
        EngineView(
            *(0, "serving", 1024, {"0,1": 64}, {"weights": 1.0}),
            weight_bytes=4096,
            share_weights=2,
            share_stages=2,
            drained=True,
            requests=3,
        )
    ],
    units=[UnitView((0, 1), "tp2", "serving", 1, 0, 64, paused_requests=5)],
    switches=[SWITCH],
    waiting=7,
    policy="manual",
    ready=True,
    reason=None,
    switches_total={"done": 1},
    policy_errors=8,
    moves_total=9,
    step_errors={"dp decode": 0.5},
    costs="cached",
    corrections={"dp decode": CorrectionView(1.25, 0.001, 30)},
    candidates=[CandidateView(["tp2"], 1.5, 2.0, 0.25, None, has_room=True)],
    shift=ShiftView(ShiftRule.AUTO, 2, {"tp2": 512}),
    unavailable=[UnavailableView((2, 3), "engine 2 died", "tp2")],
    share_weights=2,
    share_stages=2,
    hidden_above={"dp": 774},
    memory_changes=[MEMORY],
)
SWITCH_ANSWER = {
    "epoch": 1,
    "at": 1767225600.0,
    "before": [[0], [1]],
    "after": [[0, 1]],
    "before_layouts": ["dp", "dp"],
    "after_layouts": ["pp2"],
    "preempt": "hard",
    "reason": "manual",
    "outcome": "done",
    "late": False,
    "error": None,
    "duration_seconds": 0.012,
    "carried_bytes": 4096,
    "carry_seconds": 0.004,
    "precopied_bytes": 8192,
    "precopy_seconds": 0.002,
    "requests": {
        "paused": 3,
        "resumed": 0,
        "drained": 2,
        "moved": 0,
        "carried": 4,
        "recomputed": {"no_room": 1},
    },
}
SHIFT_ANSWER = {"threshold": "auto", "max_sp": 2, "sp_above": {"tp2": 512}}


class Controller:
    """Keeps what it is asked for, and answers; ``error`` is raised instead if there is one."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.error: Exception | None = None
        self.problems: list[str] = []

    def _take(self, asked: Any = None) -> None:
        if self.error is not None:
            raise self.error
        self.asked.append(asked)

    async def get_layout(self) -> LayoutView:
        self._take()
        return NODE

    async def set_layout(
        self,
        units: Sequence[Sequence[int]],
        treatment: Treatment,
        timeout: float,
        wait: float | None,
        layouts: Sequence[str],
    ) -> SwitchView:
        self._take((units, treatment, timeout, wait, *layouts))
        return SWITCH

    async def drain(self, engines: Sequence[int], *, drained: bool) -> LayoutView:
        self._take((engines, drained))
        return NODE

    async def change_memory(self, share_weights: int, stages: int) -> MemoryView:
        self._take((share_weights, stages))
        return MEMORY

    async def set_policy(self, policy: str) -> LayoutView:
        self._take(policy)
        return NODE

    async def set_shift(self, threshold: ShiftThreshold) -> LayoutView:
        self._take(threshold)
        return NODE

    async def audit(self) -> list[str]:
        self._take()
        return self.problems


@pytest.fixture
def controller() -> Controller:
    return Controller()


@pytest.fixture
async def admin(controller: Controller) -> AsyncIterator[httpx.AsyncClient]:
    parts: dict[str, Any] = dict.fromkeys(("placements", "door", "is_alive", "registered", "feed"))
    backstage = Backstage(control=controller, rejected=None, **parts)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(
        build_admin_app(backstage, Access()), raise_app_exceptions=False
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert "\n" not in error["message"]
    return error


# --- bodies ---


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        (
            b'{"units": [[0, 1], [2]]}',
            ([[0, 1], [2]], Treatment.CARRY, DEFAULT_TIMEOUT_SECONDS, None),
        ),
        (
            b'{"units": [[0]], "preempt": "hard", "timeout": 1.5}',
            ([[0]], Treatment.HARD, 1.5, None),
        ),
        (
            b'{"units": [[0]], "wait": 0, "timeout": 3600}',
            ([[0]], Treatment.CARRY, 3600, 0),
        ),
        (
            b'{"units": [[1], [0]], "layouts": ["dp", "pp2"]}',
            ([[1], [0]], Treatment.CARRY, DEFAULT_TIMEOUT_SECONDS, None, "dp", "pp2"),
        ),
        (
            b'{"units": [], "wait": null}',
            ([], Treatment.CARRY, DEFAULT_TIMEOUT_SECONDS, None),
        ),
    ],
)
@pytest.mark.parametrize("kind", ["application/json", "application/x-www-form-urlencoded", None])
async def test_a_layout_is_asked_for(
    controller: Controller, admin: httpx.AsyncClient, body: bytes, asked: Any, kind: str | None
) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    response = await admin.post("/admin/layout", content=body, headers=headers)
    assert (response.status_code, response.json()) == (200, SWITCH_ANSWER)
    assert controller.asked == [asked]
    assert isinstance(controller.asked[0][1], Treatment)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"", "not valid"),
        (b"{", "not valid"),
        (b"\xff", "not valid"),
        (b"[[0]]", "object"),
        (b"{}", "units"),
        (b'{"units": null}', "units"),
        (b'{"units": [0]}', r"units\[0\]"),
        (b'{"units": [[0.5]]}', r"units\[0\]\[0\]"),
        (b'{"units": [[0.0]]}', r"units\[0\]\[0\]"),
        (b'{"units": [["0"]]}', "units"),
        (b'{"units": [[0], [1, true]]}', r"units\[1\]\[1\]"),
        (b'{"units": [[-1]]}', "units"),
        (b'{"units": [[2147483648]]}', "units"),
        (b'{"units": [[18446744073709551616]]}', "units"),
        (b'{"units": [[' + b"9" * 5000 + b"]]}", "not valid"),
        (b'{"units": [[0]], "preempt": "gently"}', "preempt: .*'soft'.*, not 'gently'"),
        (b'{"units": [[0]], "preempt": 1}', "preempt: .*, not 1"),
        (b'{"units": [[0]], "layouts": []}', "0 layouts for 1 units"),
        (b'{"units": [[0]], "layouts": [1]}', r"layouts\[0\]"),
        (b'{"units": [[0]], "timeout": "1"}', "timeout"),
        (b'{"units": [[0]], "timeout": true}', "timeout"),
        (b'{"units": [[0]], "timeout": null}', "timeout"),
        (b'{"units": [[0]], "timeout": 0}', "timeout"),
        (b'{"units": [[0]], "timeout": -1}', "timeout"),
        (b'{"units": [[0]], "wait": "1"}', "wait"),
        (b'{"units": [[0]], "wait": -1}', "wait"),
        (b'{"units": [[0]], "wait": 3601}', "wait"),
        (b'{"units": [[0]], "timeout": 3601}', "timeout"),
        (b'{"units": [[0]], "timeout": 1e400}', "not valid"),
        (b'{"units": [[0]], "timeout": NaN}', "not valid"),
        (b"[" * ADMIN_BODY_BYTES, "nested"),
        (b'{"units": ' + b"[" * 100 + b"]" * 100 + b"}", "nested"),
    ],
)
async def test_what_is_wrong_is_named(
    controller: Controller, admin: httpx.AsyncClient, body: bytes, named: str
) -> None:
    error = error_of(await admin.post("/admin/layout", content=body), 400)
    assert re.search(named, error["message"])
    assert controller.asked == []


async def test_a_body_that_is_too_large_is_refused(admin: httpx.AsyncClient) -> None:
    body = b" " * ADMIN_BODY_BYTES + b'{"units": [[0]]}'
    error_of(await admin.post("/admin/layout", content=body), 413)


async def test_the_wrong_field_is_the_error_s_param(admin: httpx.AsyncClient) -> None:
    body = {"units": [[0, "x"]], "timeout": -1}
    error = error_of(await admin.post("/admin/layout", json=body), 400)
    assert error["param"] == "units[0][1]"
    assert re.match(r"units\[0\]\[1\]: .*; timeout: ", error["message"])
    assert error_of(await admin.post("/admin/layout"), 400)["param"] is None


async def test_an_error_of_a_thousand_fields_is_short(admin: httpx.AsyncClient) -> None:
    body = {"units": [[-1] * 1000], "n" * 1000: 1}
    error = error_of(await admin.post("/admin/layout", json=body), 400)
    assert len(error["message"]) < 500


async def test_a_field_that_is_given_twice_is_named(admin: httpx.AsyncClient) -> None:
    body = b'{"units": [[0], [1]], "units": [[0, 1]]}'
    error = error_of(await admin.post("/admin/layout", content=body), 400)
    assert error["message"] == "units: an object of the body has this key twice"
    assert error["param"] == "units"


async def test_every_unknown_field_is_named(admin: httpx.AsyncClient) -> None:
    body = {"units": [[0]], "treatment": "hard", "force": True}
    error = error_of(await admin.post("/admin/layout", json=body), 400)
    assert error["message"] == "treatment: there is no such field; force: there is no such field"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"", "not valid"),
        (b'"flying"', "object"),
        (b"{}", "policy"),
        (b'{"policy": 1}', "policy"),
        (b'{"policy": "flying", "now": true}', "now: there is no such field"),
    ],
)
async def test_what_is_wrong_with_a_policy_is_named(
    controller: Controller, admin: httpx.AsyncClient, body: bytes, named: str
) -> None:
    error = error_of(await admin.post("/admin/policy", content=body), 400)
    assert named in error["message"]
    assert controller.asked == []


@pytest.mark.parametrize("policy", ["flying", "nosuch"])  # which there are, the controller knows
async def test_a_policy_is_its_name(
    controller: Controller, admin: httpx.AsyncClient, policy: str
) -> None:
    assert (await admin.post("/admin/policy", json={"policy": policy})).status_code == 200
    assert controller.asked == [policy]


@pytest.mark.parametrize(("route", "drained"), [("drain", True), ("resume", False)])
async def test_engines_are_taken_out_and_serve_again(
    controller: Controller, admin: httpx.AsyncClient, route: str, drained: bool
) -> None:
    response = await admin.post(f"/admin/{route}", json={"engines": [0, 1]})
    assert response.status_code == 200
    assert response.json() == (await admin.get("/admin/layout")).json()
    assert controller.asked[0] == ([0, 1], drained)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"", "not valid"),
        (b"[1]", "object"),
        (b"{}", "engines"),
        (b'{"engines": []}', "engines"),
        (b'{"engines": 1}', "engines"),
        (b'{"engines": ["1"]}', r"engines\[0\]"),
        (b'{"engines": [0, -1]}', r"engines\[1\]"),
        (b'{"engines": [2147483648]}', r"engines\[0\]"),
        (b'{"engines": [1], "drained": true}', "drained: there is no such field"),
    ],
)
@pytest.mark.parametrize("route", ["drain", "resume"])
async def test_what_is_wrong_with_engines_is_named(
    controller: Controller, admin: httpx.AsyncClient, route: str, body: bytes, named: str
) -> None:
    error = error_of(await admin.post(f"/admin/{route}", content=body), 400)
    assert re.search(named, error["message"])
    assert controller.asked == []


@pytest.mark.parametrize(
    ("body", "threshold"),
    [
        (b'{"threshold": 512}', 512),
        (b'{"threshold": "auto"}', ShiftRule.AUTO),
        (b'{"threshold": "off"}', ShiftRule.OFF),
    ],
)
async def test_a_request_says_a_threshold(
    controller: Controller, admin: httpx.AsyncClient, body: bytes, threshold: ShiftThreshold
) -> None:
    response = await admin.post("/admin/shift", content=body)
    assert (response.status_code, response.json()) == (200, SHIFT_ANSWER)
    assert controller.asked == [threshold]
    assert type(controller.asked[0]) is type(threshold)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"", "not valid"),
        (b"512", "object"),
        (b"{}", "threshold"),
        (b'{"threshold": null}', "threshold"),
        (b'{"threshold": true}', "threshold"),
        (b'{"threshold": [512]}', "threshold"),
        (b'{"threshold": 1.5}', "threshold"),
        (b'{"threshold": -1}', "'-1' is no threshold"),
        (b'{"threshold": 99999999}', "'99999999' is no threshold"),
        (b'{"threshold": "on"}', "'on' is no threshold"),
        (b'{"threshold": "512"}', "without quotes"),
        (b'{"threshold": "' + b"9" * 5000 + b'"}', "without quotes"),
        (b'{"threshold": 512, "degree": 2}', "degree: there is no such field"),
    ],
)
async def test_what_is_wrong_with_a_threshold_is_named(
    controller: Controller, admin: httpx.AsyncClient, body: bytes, named: str
) -> None:
    error = error_of(await admin.post("/admin/shift", content=body), 400)
    assert named in error["message"]
    assert controller.asked == []


# --- answers ---


async def test_the_layout_is_told_by_the_names_of_the_api(admin: httpx.AsyncClient) -> None:
    assert (await admin.get("/admin/layout")).json() == {
        "ready": True,
        "reason": None,
        "policy": "manual",
        "waiting": 7,
        "units": [
            {
                "engines": [0, 1],
                "layout": "tp2",
                "state": "serving",
                "running": 1,
                "waiting": 0,
                "paused": 5,
                "lease_blocks": 64,
            }
        ],
        "engines": [
            {
                "engine": 0,
                "state": "serving",
                "reason": None,
                "restarts": 0,
                "drained": True,
                "requests": 3,
                "num_blocks": 1024,
                "lent_blocks": {"0,1": 64},
                "weight_bytes": 4096,
                "share_weights": 2,
                "share_stages": 2,
            }
        ],
        "unavailable": [{"engines": [2, 3], "layout": "tp2", "reason": "engine 2 died"}],
        "shift": SHIFT_ANSWER,
        "share_weights": 2,
        "share_stages": 2,
        "share_decided_by": "operator",
        "hidden_above": {"dp": 774},
        "memory_changes": [MEMORY_ANSWER],
        "switches": [SWITCH_ANSWER],
    }


async def test_a_change_of_memory_is_asked_for_and_told(
    controller: Controller, admin: httpx.AsyncClient
) -> None:
    for stages in ({}, {"stages": 2}):
        answer = await admin.post("/admin/memory", json={"share_weights": 2, **stages})
        assert (answer.status_code, answer.json()) == (200, MEMORY_ANSWER)
    assert controller.asked == [(2, 1), (2, 2)]


async def test_the_policy_is_told_to_decide_about_memory_again(
    controller: Controller, admin: httpx.AsyncClient
) -> None:
    assert (await admin.post("/admin/memory", json={"share_weights": "auto"})).status_code == 200
    assert controller.asked == [(POLICY_DECIDES, 1)]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({}, "share_weights"),
        ({"share_weights": 0}, "share_weights"),
        ({"share_weights": "1"}, "share_weights"),
        ({"share_weights": "policy"}, "share_weights"),
        ({"share_weights": 1 << 40}, "share_weights"),
        ({"share_weights": 1, "wait": 3}, "wait"),
        ({"share_weights": 2, "stages": 0}, "stages"),
        ({"share_weights": 2, "stages": "2"}, "stages"),
        ({"share_weights": "auto", "stages": 2}, "stages: goes with a number"),
    ],
)
async def test_a_body_that_names_no_level_is_refused(
    controller: Controller, admin: httpx.AsyncClient, body: dict[str, Any], why: str
) -> None:
    error = error_of(await admin.post("/admin/memory", json=body), 400)
    assert why in error["message"]
    assert controller.asked == []


async def test_the_policy_is_told_with_all_there_are(admin: httpx.AsyncClient) -> None:
    assert (await admin.get("/admin/policy")).json() == {
        "policy": "manual",
        "policies": sorted(POLICIES),
        "errors": 8,
        "switches": {"done": 1},
        "moved": 9,
        "step_errors": {"dp decode": 0.5},
        "costs": "cached",
        "corrections": {"dp decode": {"factor": 1.25, "added_seconds": 0.001, "measured": 30}},
        "candidates": [
            {
                "units": ["tp2"],
                "saved_seconds": 1.5,
                "price_seconds": 2.0,
                "fine_seconds": 0.25,
                "foreseen_seconds": None,
                "has_room": True,
            }
        ],
    }


async def test_an_audit_is_clean_without_problems(
    controller: Controller, admin: httpx.AsyncClient
) -> None:
    assert (await admin.post("/admin/audit")).json() == {"clean": True, "problems": []}
    controller.problems = ["a block is lent twice"]
    found = (await admin.post("/admin/audit", content=b"{}")).json()
    assert found == {"clean": False, "problems": ["a block is lent twice"]}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "layout", None),
        ("POST", "layout", {"units": [[0]]}),
        ("POST", "drain", {"engines": [0]}),
        ("POST", "resume", {"engines": [0]}),
        ("GET", "policy", None),
        ("POST", "policy", {"policy": "flying"}),
        ("POST", "shift", {"threshold": 512}),
        ("POST", "memory", {"share_weights": 1}),
        ("POST", "audit", None),
    ],
)
async def test_what_the_controller_refuses_is_told_with_its_status(
    controller: Controller, admin: httpx.AsyncClient, method: str, path: str, body: Any
) -> None:
    controller.error = CallError(409, "another switch is running")
    error = error_of(await admin.request(method, f"/admin/{path}", json=body), 409)
    assert error["message"] == "another switch is running"


async def test_a_failure_of_the_server_has_the_shape_of_the_other_errors(
    controller: Controller, admin: httpx.AsyncClient
) -> None:
    controller.error = RuntimeError("at address 0x7f")
    error = error_of(await admin.get("/admin/layout"), 500)
    assert error["type"] == "InternalServerError"
    assert "0x7f" not in error["message"]
