"""Reads what a request asks of the task pool: its priority and its deadline."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers

from shoal.runtime.config import BACKGROUND_PRIORITY
from shoal.server.gate.body_checks import answers_of
from shoal.server.gate.keys import ApiKey

PRIORITY_HEADER = "x-vllm-priority"
DEADLINE_HEADER = "x-shoal-deadline-ms"
PRIORITY_LIMIT = BACKGROUND_PRIORITY
"""Priorities lie between minus this and plus this; lower values are served earlier."""

_PRIORITY = re.compile(r"[+-]?[0-9]{1,10}")
_DEADLINE = re.compile(r"[0-9]{1,12}")
_SHOWN = 40
"""How many characters of a wrong value an error message repeats."""


class BadTermsError(ValueError):
    """A priority or deadline is not valid; the message names the header or field."""


@dataclass(frozen=True)
class Asked:
    """What one HTTP request asks for."""

    priority: int
    """The effective priority: as asked for, but no more urgent than the API key allows."""
    deadline_seconds: float | None
    """How long its engine requests may wait from now on."""
    in_background: bool
    """Whether the response does not wait for the generated tokens."""
    several: bool
    """Whether the HTTP request becomes several engine requests."""


def read_terms(headers: Headers, fields: Mapping[str, Any], key: ApiKey | None) -> Asked:
    """Return what a request asks for.

    Args:
        headers: its headers.
        fields: the content of its body.
        key: its caller's API key.

    Raises:
        BadTermsError: its priority or its deadline is not valid.
    """
    values = headers.getlist(PRIORITY_HEADER)
    if values:
        priority = _priority("X-Vllm-Priority", values)
    else:
        priority = _priority("priority", [json.dumps(fields.get("priority", 0))])
    if key is not None and key.min_priority is not None:
        priority = max(priority, key.min_priority)
    return Asked(
        priority=priority,
        deadline_seconds=_deadline(headers.getlist(DEADLINE_HEADER)),
        in_background=fields.get("background") is True,
        several=answers_of(fields) > 1,
    )


def _priority(name: str, values: Sequence[str]) -> int:
    text = _only_one(_PRIORITY, values)
    if text is None or abs(int(text)) > PRIORITY_LIMIT:
        raise BadTermsError(
            f"{name} is {_show(values)}: it must be one integer from "
            f"{-PRIORITY_LIMIT} to {PRIORITY_LIMIT}"
        )
    return int(text)


def _deadline(values: Sequence[str]) -> float | None:
    if not values:
        return None
    text = _only_one(_DEADLINE, values)
    if text is None or int(text) == 0:
        raise BadTermsError(
            f"{DEADLINE_HEADER} is {_show(values)}: it must be one positive integer"
        )
    return int(text) / 1000


def _only_one(pattern: re.Pattern[str], values: Sequence[str]) -> str | None:
    return values[0] if len(values) == 1 and pattern.fullmatch(values[0]) else None


def _show(values: Sequence[str]) -> str:
    return repr(", ".join(values)[:_SHOWN])
