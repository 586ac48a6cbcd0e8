import json
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from pydantic import BaseModel
from starlette.requests import Request

from shoal.server.frontend.app import AppOptions, Backstage, build_app
from shoal.server.gate.bodies import DecodedBodyRoute, DecodedBodyRouter
from shoal.server.gate.body_checks import check_body
from shoal.server.gate.bounds import DEFAULTS
from shoal.server.gate.guard import BodyMiddleware


class Asked(BaseModel):
    prompt: list[int]


class Served:
    """A route behind the middleware that checks its body, and what ``check`` says of that."""

    def __init__(self, said: dict[str, Any] | None) -> None:
        others = APIRouter()
        others.add_api_route("/v1/x", self.answer, methods=["POST"], summary="theirs")
        self.router = DecodedBodyRouter()
        self.router.include_router(others)
        app = FastAPI()
        app.include_router(self.router)
        self.checked: list[bytes] = []
        self.app = BodyMiddleware(app, 1000, self.check)
        self.said = said

    def check(self, body: bytes) -> dict[str, Any] | None:
        self.checked.append(body)
        return self.said

    async def answer(self, asked: Asked, request: Request) -> dict[str, Any]:
        return {"prompt": asked.prompt, "body": (await request.body()).decode()}

    async def post(self, content: bytes, kind: str = "application/json") -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://shoal") as http:
            return await http.post("/v1/x", content=content, headers={"Content-Type": kind})


async def test_a_route_takes_what_the_check_has_decoded() -> None:
    served = Served({"prompt": [1, 2]})
    response = await served.post(b"these bytes are decoded by the check alone")
    assert response.json()["prompt"] == [1, 2]
    assert served.checked == [b"these bytes are decoded by the check alone"]


async def test_the_bytes_of_the_body_are_there_as_well() -> None:
    assert (await Served({"prompt": []}).post(b"bytes")).json()["body"] == "bytes"


async def test_without_that_it_decodes_the_body_itself() -> None:
    served = Served(None)
    assert (await served.post(b'{"prompt": [3]}')).json()["prompt"] == [3]
    assert (await served.post(b"no JSON")).status_code == 422
    assert (await served.post(b"")).status_code == 422


async def test_a_body_of_another_kind_is_not_taken_for_json() -> None:
    served = Served({"prompt": [1, 2]})
    assert (await served.post(b'{"prompt": [3]}', "text/plain")).status_code == 422


async def test_what_is_wrong_with_it_is_still_the_routes_to_say() -> None:
    response = await Served({"prompt": ["x"]}).post(b"{}")
    assert response.status_code == 422
    assert response.json()["detail"][0]["loc"] == ["body", "prompt", 0]


def test_the_routes_of_an_included_router_keep_their_settings() -> None:
    (route,) = Served(None).router.routes
    assert isinstance(route, DecodedBodyRoute)
    assert (route.path, route.methods, route.summary) == ("/v1/x", {"POST"}, "theirs")


def test_vllms_routes_are_served_so() -> None:
    theirs = APIRouter()
    theirs.add_api_route("/v1/completions", Served(None).answer, methods=["POST"])
    parts: dict[str, Any] = dict.fromkeys(
        ("control", "placements", "door", "is_alive", "registered", "rejected", "feed")
    )
    app = build_app(Backstage(**parts, vllm_routers=[theirs]), AppOptions())
    found = {type(route) for route in app.routes if route.path == "/v1/completions"}  # type: ignore[attr-defined]
    assert found == {DecodedBodyRoute}


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": [1, 2], "n": 1, "temperature": 1e-3, "top_p": 0.30000000000000004}',
        b'{"a": [[123456789012345678901234567890]], "c": -0, "d": -0.0, "e": 5e-324}',
        b'\n{"text": "\\ud83d\\ude00 \\u0000 \\/ \xc3\xa9", "t": true, "f": false, "z": null}\t',
    ],
)
def test_the_check_decodes_as_fastapi_would(body: bytes) -> None:
    decoded = check_body(body, DEFAULTS)
    assert repr(decoded) == repr(json.loads(body))
