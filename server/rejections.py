"""The reasons for which HTTP requests are refused before a unit has had them."""

import enum
from collections.abc import Callable
from dataclasses import dataclass

from shoal.runtime.protocol.messages import Outcome


class Rejection(enum.StrEnum):
    """The reason why an HTTP request was refused before a unit had it."""

    UNAUTHORIZED = "unauthorized"
    """It has no valid API key."""
    INVALID = "invalid"
    """The request is not valid."""
    TOO_LONG = Outcome.TOO_LONG.value
    EXPIRED = Outcome.EXPIRED.value
    POOL_FULL = Outcome.POOL_FULL.value
    CALLER_FULL = Outcome.CALLER_FULL.value
    CALLER_LIMIT = "caller_limit"
    """Its caller has reached a limit: of requests in progress, of grammars that wait to be
    compiled, or of its use per minute."""
    HANDED_BACK = Outcome.HANDED_BACK.value
    UNAVAILABLE = Outcome.UNAVAILABLE.value


CountRejection = Callable[[Rejection], None]
"""Called for every refused request."""


@dataclass(frozen=True)
class Refused:
    """The error for a request that is refused before an engine has seen it."""

    status: int
    message: str
    retry_after: int | None = None
    """Seconds after which to try again; None where that would not help."""
