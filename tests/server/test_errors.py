"""How bodies that are not of a route's type are refused: one line, which names fields."""

from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.testclient import TestClient
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from shoal.server.errors import invalid_body


class Text(BaseModel):
    kind: str
    text: str


class Image(BaseModel):
    kind: str
    url: list[int] | str | None = None


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")
    prompt: list[int] | str
    tokens: int = 1
    parts: list[Text | Image] = []


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return invalid_body(error.errors())


def _post(body: Body) -> None:
    del body


def refused(body: Any) -> tuple[str, str | None]:
    app = FastAPI()
    app.post("/")(_post)
    app.add_exception_handler(RequestValidationError, _invalid)
    response = TestClient(app).post("/", json=body)
    error = response.json()["error"]
    assert response.status_code == error["code"] == 400
    assert "\n" not in error["message"]
    return error["message"], error["param"]


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (
            {"prompt": {"a": 1}},
            "prompt: Input should be a valid list, or input should be a valid string",
            "prompt",
        ),
        (
            {"prompt": "x", "tokens": "ten"},
            "tokens: Input should be a valid integer, unable to parse string as an integer",
            "tokens",
        ),
        (
            {"prompt": "x", "tokens": [], "sampling": 1},
            "tokens: Input should be a valid integer; sampling: there is no such field",
            "tokens",
        ),
        ({"tokens": 1}, "prompt: it is missing", "prompt"),
        (None, "the body is not valid: it is missing", None),
    ],
)
def test_each_wrong_field_is_named_once(body: Any, message: str, param: str | None) -> None:
    assert refused(body) == (message, param)


def test_names_of_types_are_no_fields() -> None:
    message, param = refused({"prompt": "x", "parts": [{"text": 5, "kind": "k", "url": 5}]})
    assert "Text" not in message
    assert "Image" not in message
    assert message.startswith("parts[0].text: Input should be a valid string")
    assert param == "parts[0].text"


def test_a_long_list_of_errors_makes_a_short_answer() -> None:
    message, _ = refused({"prompt": [[]] * 10_000, "tokens": "x"})
    assert len(message) < 400
    assert "tokens" in message
