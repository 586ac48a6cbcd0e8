"""Errors as users see them: one line on the command line, OpenAI's JSON over HTTP."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse

USAGE_EXIT_CODE = 2
"""Exit code of a command that was refused before it started anything."""


_TYPES = frozenset({"bool", "bytes", "dict", "float", "int", "list", "nullable", "str", "tuple"})
"""What pydantic calls the members of a union in a location."""
_OUR_WORDS = {"extra_forbidden": "there is no such field", "missing": "it is missing"}
_NAME_CHARS = 40
_SHOWN_FIELDS = 5
_SHOWN_REASONS = 3


class UserError(Exception):
    """Something that the user of a command has to change; the message is one line that names it.

    For a file that was checked as a whole, the message has one line for each thing to change.
    """


def one_line(error: BaseException) -> str:
    """Return the cause of a foreign exception as one line.

    A pydantic ``ValidationError`` (vLLM's configuration classes) is reduced to its first complaint.
    """
    complaints = getattr(error, "errors", None)
    if callable(complaints):
        first = complaints()[0]
        # Unions list one location per member: the first names the field.
        where = str(first["loc"][0]).partition(".")[0] if first["loc"] else ""
        message = str(first["msg"]).removeprefix("Value error, ")
        text = f"{where}: {message}" if where else message
    else:
        text = str(error)
    return " ".join(text.split()) or type(error).__name__


def shown_name(name: object) -> str:
    """Return a name that a user has chosen as errors show it: on one line, and cut short."""
    return " ".join(str(name)[:_NAME_CHARS].split())


def field_errors(errors: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the path of each wrong field (``units[0][1]``; empty: the whole value), and the reason.

    A reason repeats a value only if the value is not one of the allowed choices and ``errors``
    holds it. Leave values out of ``errors`` where they may be secret.

    Args:
        errors: what ``errors()`` of pydantic's ``ValidationError`` says.
    """
    for error in errors:
        steps = [
            f"[{step}]" if isinstance(step, int) else f".{shown_name(step)}"
            for step in error["loc"]
        ]
        reason = _OUR_WORDS.get(error["type"]) or error["msg"].removeprefix("Value error, ")
        if error["type"] == "enum" and "input" in error:
            reason += f", not {shown_name(repr(error['input']))}"
        yield "".join(steps).removeprefix("."), reason


def invalid_body(errors: Sequence[Mapping[str, Any]], param: str | None = None) -> JSONResponse:
    """Return the answer to a body that FastAPI could not read as the type of a route, on one line.

    For a field that may have several types pydantic complains once for each of them. So of each
    field of the body only the first wrong place is told, with what would do there.

    Args:
        errors: what ``errors()`` of FastAPI's ``RequestValidationError`` says.
        param: the field that the answer names; None: the first wrong place.
    """
    found: dict[str, tuple[str, list[str]]] = {}
    for error in errors:
        # Every location begins with "body", and has the names of types beside those of fields.
        loc = [step for step in error["loc"][1:] if isinstance(step, int) or _is_field(step)]
        (where, reason) = next(field_errors([{**error, "loc": loc}]))
        top = str(loc[0]) if loc else ""
        place, reasons = found.setdefault(top, (where, []))
        if where == place and reason not in reasons:
            reasons.append(reason)
    lines = [
        f"{place or 'the body is not valid'}: {_alternatives(reasons)}"
        for place, reasons in list(found.values())[:_SHOWN_FIELDS]
    ]
    first = next(iter(found.values()))[0]
    return error_response(400, "; ".join(lines), param=param or first or None)


def _is_field(step: str) -> bool:
    """Return whether a step of a location is a field's name, and no type of a union."""
    return step.isidentifier() and step.islower() and step not in _TYPES


def _alternatives(reasons: Sequence[str]) -> str:
    first, *others = reasons[:_SHOWN_REASONS]
    return ", or ".join([first, *(other[:1].lower() + other[1:] for other in others)])


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """Return the JSON of an error as OpenAI's API and vLLM shape it; ``param`` names a field."""
    kind = HTTPStatus(status).phrase.replace(" ", "").removesuffix("Error") + "Error"
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


ERROR_EVENTS = (b'data: {"error"', b"event: error\n")
"""The beginnings of events that end a failed stream: vLLM's for completions and chats, and that of
Anthropic's Messages API and of the Responses API."""


def messages_error_body(error: dict[str, Any]) -> dict[str, Any]:
    """Return ``error_body`` in the shape of Anthropic's Messages API, with the same ``type``."""
    inner = error["error"]
    return {"type": "error", "error": {"type": inner["type"], "message": inner["message"]}}


def messages_error_event(error: dict[str, Any]) -> str:
    """Return the event that ends a stream of that API with this ``error_body``."""
    return f"event: error\ndata: {json.dumps(messages_error_body(error))}\n\n"


def retold_event(event: bytes, error: dict[str, Any]) -> bytes:
    """Return the event that ends a failed stream, with another reason and in the same shape.

    Args:
        event: the event, without the empty line at its end.
        error: the reason, as ``error_body`` has it.
    """
    _, named, text = event.partition(b"event: error\ndata: ")
    if not named:
        return f"data: {json.dumps(error)}\n\n".encode()
    said, inner = json.loads(text), error["error"]
    if "sequence_number" not in said:
        return messages_error_event(error).encode()
    said |= {"code": str(inner["code"]), "message": inner["message"]}  # the Responses API's
    return f"event: error\ndata: {json.dumps(said)}\n\n".encode()


def error_response(
    status: int,
    message: str,
    headers: dict[str, str] | None = None,
    *,
    param: str | None = None,
) -> JSONResponse:
    """Return an HTTP response with ``error_body``."""
    return JSONResponse(error_body(status, message, param), status_code=status, headers=headers)


def refusal_response(status: int, message: str, retry_after: int | None) -> JSONResponse:
    """Return the answer to a request that the task pool did not serve.

    Args:
        status: HTTP status.
        message: why.
        retry_after: seconds after which to try again; None where that would not help.
    """
    again = None if retry_after is None else {"Retry-After": str(retry_after)}
    return error_response(status, message, again)
