"""What the routes of files and batches have in common: who asks, and how lists are shown."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from shoal.server.batch.batch_objects import Batch, StoredFile
from shoal.server.batch.batch_options import DEFAULTS, BatchLimits
from shoal.server.batch.batch_store import BatchStore
from shoal.server.gate.middleware import tenant_of

_DIGITS = re.compile(r"[0-9]{1,9}")
"""Integers of a form or a query that are worth a look: Python refuses those of many digits."""


@dataclass(frozen=True)
class Batches:
    """What the routes of files and batches work on."""

    store: BatchStore
    limits: BatchLimits = DEFAULTS
    clock: Callable[[], float] = time.time
    """Seconds since the epoch."""


class RefusedError(Exception):
    """A request cannot be served; the message is for its caller.

    Attributes:
        status: the HTTP status.
        param: the field.
    """

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


def owner_of(request: Request) -> str:
    """Return whose files and batches a request may see."""
    return tenant_of(request.scope)


def limit_of(request: Request, default: int, most: int) -> int:
    """Return how many objects of a list a request asks for.

    Raises:
        RefusedError: it asks for none, or for too many.
    """
    text = request.query_params.get("limit", str(default))
    if not _DIGITS.fullmatch(text) or not 1 <= int(text) <= most:
        raise RefusedError(400, f"limit: it must be from 1 to {most}", "limit")
    return int(text)


def listed(found: Sequence[StoredFile | Batch], limit: int) -> dict[str, Any]:
    """Return OpenAI's ``list`` of the first ``limit`` objects; if there is one more, it says so."""
    data = [one.shown() for one in found[:limit]]
    return {
        "object": "list",
        "data": data,
        "has_more": len(found) > limit,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }


def lifetime_of(seconds: object, anchor: object, param: str) -> int:
    """Return after how many seconds a file is to expire, as a caller asks.

    Raises:
        RefusedError: it is not 1 hour to 30 days after ``created_at``.
    """
    if anchor != "created_at":
        raise RefusedError(400, f"{param}.anchor: it must be created_at", f"{param}.anchor")
    count = int(seconds) if isinstance(seconds, str) and _DIGITS.fullmatch(seconds) else seconds
    if not isinstance(count, int) or not 3600 <= count <= 2_592_000:
        raise RefusedError(
            400, f"{param}.seconds: it must be from 3600 to 2592000", f"{param}.seconds"
        )
    return count
