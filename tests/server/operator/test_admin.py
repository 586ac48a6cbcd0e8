import json
from typing import Any

import httpx
import pytest

from shoal.runtime.protocol.messages import Treatment
from shoal.server.frontend.app import Backstage, build_admin_app
from shoal.server.gate.access import Access
from shoal.server.operator.admin import (
    DEFAULT_TIMEOUT_SECONDS,
    BadRequestError,
    parse_layout_request,
    parse_policy_request,
)


def test_units_alone_are_enough() -> None:
    request = parse_layout_request(b'{"units": [[0, 1], [2]]}')
    assert request.units == [[0, 1], [2]]
    assert request.preempt is Treatment.SEQUENTIAL
    assert request.timeout == DEFAULT_TIMEOUT_SECONDS


def test_every_field_is_taken() -> None:
    request = parse_layout_request(b'{"units": [[0]], "preempt": "hard", "timeout": 1.5}')
    assert (request.preempt, request.timeout, request.wait) == (Treatment.HARD, 1.5, None)
    assert parse_layout_request(b'{"units": [[0]], "wait": 0}').wait == 0


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"", "not valid"),
        (b"{", "not valid"),
        (b"\xff", "not valid"),
        (b"[[0]]", "object"),
        (b"{}", "units"),
        (b'{"units": null}', "units"),
        (b'{"units": [0]}', "units"),
        (b'{"units": [[0.5]]}', "units"),
        (b'{"units": [["0"]]}', "units"),
        (b'{"units": [[true]]}', "units"),
        (b'{"units": [[-1]]}', "units"),
        (b'{"units": [[2147483648]]}', "units"),
        (b'{"units": [[18446744073709551616]]}', "units"),
        (b'{"units": [[' + b"9" * 5000 + b"]]}", "not valid"),
        (b'{"units": [[0]], "preempt": "gently"}', "gently"),
        (b'{"units": [[0]], "preempt": 1}', "preempt"),
        (b'{"units": [[0]], "timeout": "1"}', "timeout"),
        (b'{"units": [[0]], "timeout": 0}', "timeout"),
        (b'{"units": [[0]], "timeout": -1}', "timeout"),
        (b'{"units": [[0]], "wait": "1"}', "wait"),
        (b'{"units": [[0]], "wait": -1}', "wait"),
        (b'{"units": [[0]], "wait": 3601}', "wait"),
        (b'{"units": [[0]], "timeout": 3601}', "timeout"),
        (b'{"units": [[0]], "timeout": 1e400}', "not valid"),
    ],
)
def test_what_is_wrong_is_named(body: bytes, named: str) -> None:
    with pytest.raises(BadRequestError, match=named):
        parse_layout_request(body)


def test_a_field_that_is_given_twice_is_named() -> None:
    with pytest.raises(BadRequestError, match=r"^units: an object of the body has this key twice$"):
        parse_layout_request(b'{"units": [[0], [1]], "units": [[0, 1]]}')


def test_every_unknown_field_is_named() -> None:
    body = json.dumps({"units": [[0]], "treatment": "hard", "force": True}).encode()
    with pytest.raises(BadRequestError, match="unknown field force, treatment"):
        parse_layout_request(body)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"", "not valid"),
        (b'"flying"', "object"),
        (b"{}", "policy"),
        (b'{"policy": 1}', "policy"),
        (b'{"policy": "flying", "now": true}', "unknown field now"),
    ],
)
def test_what_is_wrong_with_a_policy_is_named(body: bytes, named: str) -> None:
    with pytest.raises(BadRequestError, match=named):
        parse_policy_request(body)


def test_a_policy_is_its_name() -> None:
    assert parse_policy_request(b'{"policy": "flying"}').policy == "flying"


async def test_a_failure_of_the_server_has_the_shape_of_the_other_errors() -> None:
    class Broken:
        async def get_layout(self) -> None:
            raise RuntimeError("at address 0x7f")

    parts: dict[str, Any] = dict.fromkeys(("placements", "door", "is_alive", "registered"))
    backstage = Backstage(control=Broken(), rejected=None, **parts)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(
        build_admin_app(backstage, Access()), raise_app_exceptions=False
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        response = await client.get("/admin/layout")
    assert response.status_code == 500
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("InternalServerError", 500)
    assert "0x7f" not in error["message"]
