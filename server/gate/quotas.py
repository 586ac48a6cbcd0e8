"""How much of the server the holder of an API key uses, and when that is as much as it may."""

import enum
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shoal.runtime.clock import Clock, monotonic
from shoal.server.gate.keys import ApiKey

_MINUTE = 60.0
_RETRY_SECONDS = 1
"""When to try again where requests in progress are too many: nobody knows how long they take."""


class Limit(enum.StrEnum):
    """A limit of an API key, by the field that sets it."""

    CONCURRENT = "max_concurrent"
    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"


@dataclass(frozen=True)
class OverLimit:
    """Why a request of a key is refused."""

    limit: Limit
    message: str
    retry_after: int
    """Seconds."""


class Allowance:
    """So many units a minute: it fills evenly, up to a minute's worth, and may be overdrawn.

    The generic cell rate algorithm: all it knows is the time at which it would be full again.
    """

    def __init__(self) -> None:
        self._full_at = 0.0

    def wait(self, per_minute: float, now: float) -> float:
        """Return the seconds until one unit is left; 0 if there is one."""
        return max(0.0, self._full_at - now + _MINUTE / per_minute - _MINUTE)

    def spend(self, units: int, per_minute: float, now: float) -> None:
        """Take units, whether they are left or not."""
        self._full_at = max(self._full_at, now) + units * _MINUTE / per_minute


class Quota:
    """What one key's holder uses; its limits are those of the key that each request came with.

    Args:
        shares: front ends of the node. They count each for itself, so each allows its share.
        clock: monotonic seconds.
    """

    def __init__(self, shares: int = 1, clock: Clock = monotonic) -> None:
        self._shares = shares
        self._clock = clock
        self._running = 0
        self._requests = Allowance()
        self._tokens = Allowance()

    def over(self, key: ApiKey) -> OverLimit | None:
        """Return why a request must be refused; None, and count it, if it may come in."""
        running = key.max_concurrent
        if running is not None and self._running >= math.ceil(running / self._shares):
            message = f"{key.name} has {running} requests in progress, as many as it may"
            return OverLimit(Limit.CONCURRENT, message, _RETRY_SECONDS)
        now = self._clock()
        for limit, allowance, per_minute in (
            (Limit.REQUESTS, self._requests, key.requests_per_minute),
            (Limit.TOKENS, self._tokens, key.tokens_per_minute),
        ):
            if per_minute is None:
                continue
            wait = allowance.wait(per_minute / self._shares, now)
            if wait > 0:
                unit = limit.partition("_")[0]
                message = f"{key.name} may use {per_minute} {unit} a minute, and has"
                return OverLimit(limit, message, math.ceil(wait))
        if key.requests_per_minute is not None:
            self._requests.spend(1, key.requests_per_minute / self._shares, now)
        return None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count a request in progress."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def spend_tokens(self, key: ApiKey, tokens: int) -> None:
        """Count tokens of a prompt or an answer."""
        if key.tokens_per_minute is not None:
            self._tokens.spend(tokens, key.tokens_per_minute / self._shares, self._clock())


@dataclass(frozen=True)
class Caller:
    """Who sent a request: the key it came with, and what its holder uses."""

    key: ApiKey
    quota: Quota

    def spend_tokens(self, tokens: int) -> None:
        """See ``Quota.spend_tokens``."""
        self.quota.spend_tokens(self.key, tokens)


class Quotas:
    """The quotas of all holders of keys; for the arguments see ``Quota``."""

    def __init__(self, shares: int = 1, clock: Clock = monotonic) -> None:
        self._shares = shares
        self._clock = clock
        self._by_tenant: dict[str, Quota] = {}

    def caller(self, key: ApiKey) -> Caller:
        """Return the caller with this key."""
        quota = self._by_tenant.get(key.tenant)
        if quota is None:
            quota = self._by_tenant[key.tenant] = Quota(self._shares, self._clock)
        return Caller(key, quota)
