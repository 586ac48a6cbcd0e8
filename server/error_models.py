"""Errors over HTTP as the OpenAPI documents describe them; ``errors.py`` makes the same of dicts.

These are not in ``errors.py`` because the command line needs that one, but not pydantic's import.
"""

from typing import Any, Literal

from pydantic import BaseModel


class ErrorInfo(BaseModel):
    """What went wrong; ``param`` names the field, if it was one, and ``code`` is the status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorResponse(BaseModel):
    """An error as OpenAI's API shapes it."""

    error: ErrorInfo


class MessagesErrorInfo(BaseModel):
    """What went wrong."""

    type: str
    message: str


class MessagesErrorResponse(BaseModel):
    """An error as Anthropic's API shapes it."""

    type: Literal["error"]
    error: MessagesErrorInfo


_REASONS = {
    400: "the request is not valid, or asks for too much",
    401: "no valid API key",
    403: "a web page calls the admin API",
    404: "no such model or response",
    408: "the request was not there in time",
    409: "another switch is running, or the policy decides the layout",
    413: "the body is too large",
    414: "the URL is too long",
    429: "the caller is at one of its limits",
    431: "the headers are too large",
    500: "the request failed in its engine",
    501: "the model cannot do this",
    503: "it cannot be served now",
    504: "it was not done in time",
}
_RETRY_AFTER = {
    "Retry-After": {
        "description": "seconds after which to try again, where that would help",
        "schema": {"type": "integer", "minimum": 1},
    }
}
_MAY_BE_TRIED_AGAIN = (429, 503)


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return what these errors are, as ``responses`` of a FastAPI route."""
    return {
        status: {
            "description": _REASONS[status],
            "model": ErrorResponse,
            **({"headers": _RETRY_AFTER} if status in _MAY_BE_TRIED_AGAIN else {}),
        }
        for status in statuses
    }
