"""Why HTTP requests are refused before a unit had them."""

import enum
from collections.abc import Callable
from dataclasses import dataclass

from shoal.runtime.protocol.messages import Outcome


class Rejection(enum.StrEnum):
    """Why an HTTP request was refused before a unit had it."""

    UNAUTHORIZED = "unauthorized"
    """It has no valid API key."""
    INVALID = "invalid"
    """It asks for what cannot be."""
    TOO_LONG = Outcome.TOO_LONG.value
    EXPIRED = Outcome.EXPIRED.value
    POOL_FULL = Outcome.POOL_FULL.value
    CALLER_FULL = Outcome.CALLER_FULL.value
    CALLER_LIMIT = "caller_limit"
    """Its caller has as many requests in progress, has as many grammars that wait to be compiled,
    or has used as much a minute, as it may."""
    HANDED_BACK = Outcome.HANDED_BACK.value
    UNAVAILABLE = Outcome.UNAVAILABLE.value


CountRejection = Callable[[Rejection], None]
"""Called for every refused request."""


@dataclass(frozen=True)
class Refused:
    """What a request is refused with before an engine has seen it."""

    status: int
    message: str
    retry_after: int | None = None
    """Seconds after which to try again; None where that would not help."""
