"""What Schemathesis loads in its own process: which of its cases are sent, and two checks."""

import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import schemathesis
from schemathesis.generation.meta import TestPhase

SAMPLE = "COVERAGE_SAMPLE"
"""Environment variable: how many cases of the coverage an operation gets for certain. Of further
ones ever fewer are sent: the n-th with a probability of this number over n. Unset: all are sent."""

_FIELDS: dict[str, Any] = {"message": str, "type": str, "param": str | None, "code": int}

_MESSAGES = "/v1/messages"
_FAILURES = ("InternalServerError", "internal_error")

_seen: Counter[str] = Counter()
_dice: dict[str, random.Random] = {}


@schemathesis.hook
def filter_case(context: schemathesis.HookContext, case: schemathesis.Case) -> bool:
    """Send a sample of the coverage: some operations have thousands of cases."""
    sample = os.environ.get(SAMPLE)
    if sample is None or case.meta is None or case.meta.phase.name is not TestPhase.COVERAGE:
        return True
    name = case.operation.label
    _seen[name] += 1
    return _dice.setdefault(name, random.Random(name)).random() * _seen[name] < int(sample)


@schemathesis.check
def errors_have_the_shape_of_openai_s(
    ctx: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case
) -> None:
    """Fail if an answer of 400 or more, or an error in a stream, has another body than OpenAI's.

    Those of Anthropic's routes have that of Anthropic's.
    """
    check = _check_messages_error if case.path.startswith(_MESSAGES) else _check_error
    if response.status_code >= 400 and case.method != "HEAD":
        check(response.text, response.status_code)
    for event in _events(response):
        if "error" in event:
            check(json.dumps(event), None)


@schemathesis.check
def streams_hold_no_failure_of_the_server(
    ctx: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case
) -> None:
    """Fail if a stream that began well has an error of 500 or more in it."""
    for event in _events(response):
        error = event.get("error")
        if isinstance(error, dict):
            failed = error.get("code", 0) >= 500 or error["type"] in _FAILURES
            assert not failed, f"in a stream: {event}"


def _events(response: schemathesis.Response) -> Iterator[dict[str, Any]]:
    """Yield the data of a stream of server-sent events; nothing for another response."""
    if not response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
        return
    for line in response.text.splitlines():
        name, _, data = line.partition(":")
        if name == "data" and data.strip() != "[DONE]":
            yield json.loads(data)


def _check_messages_error(text: str, status: int | None) -> None:
    body = json.loads(text)
    assert set(body) == {"type", "error"}, f"the error has other fields: {text[:200]}"
    assert set(body["error"]) == {"type", "message"}, f"the error has other fields: {text[:200]}"
    assert body["type"] == "error", f"it is no error: {text[:200]}"
    assert body["error"]["message"], f"the error says nothing: {text[:200]}"


def _check_error(text: str, status: int | None) -> None:
    try:
        body = json.loads(text)
    except ValueError:
        raise AssertionError(f"the error is no JSON: {text[:200]!r}") from None
    error = body.get("error") if isinstance(body, dict) else None
    assert isinstance(error, dict), f"there is no object 'error': {text[:200]}"
    assert set(error) == set(_FIELDS), f"the error has other fields: {text[:200]}"
    wrong = [name for name, kind in _FIELDS.items() if not isinstance(error[name], kind)]
    assert not wrong, f"{wrong} of the error is of another type: {text[:200]}"
    assert error["message"], f"the error says nothing: {text[:200]}"
    assert status in (None, error["code"]), f"the error's code is not {status}: {text[:200]}"
