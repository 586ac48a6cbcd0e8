"""Counts how much the holder of an API key uses, and tells when a limit is reached."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shoal.runtime.clock import Clock, monotonic
from shoal.server.gate.keys import ApiKey

_MINUTE = 60.0
_RETRY_SECONDS = 1
"""Retry-After for too many requests in progress: nobody knows how long they take."""


@dataclass(frozen=True)
class OverLimit:
    """Why a request of a key is refused."""

    message: str
    retry_after: int
    """Seconds."""


class Allowance:
    """Units per minute, which refill evenly up to a minute's worth, or to one unit if that is more.

    They may be overdrawn. This is the generic cell rate algorithm: its only state is the time at
    which it is full again.
    """

    def __init__(self) -> None:
        self._full_at = 0.0

    def wait(self, per_minute: float, now: float) -> float:
        """Return the seconds until one unit is available; 0 if one is available now."""
        saved = max(0.0, _MINUTE - _MINUTE / per_minute)
        return max(0.0, self._full_at - now - saved)

    def spend(self, units: int, per_minute: float, now: float) -> None:
        """Take units, whether they are available or not."""
        self._full_at = max(self._full_at, now) + units * _MINUTE / per_minute


class Quota:
    """What the holder of a key uses. The limits are those of the key that a request came with.

    Args:
        shares: number of the node's front ends. Each counts for itself, and allows its share.
        clock: monotonic seconds.
    """

    def __init__(self, shares: int = 1, clock: Clock = monotonic) -> None:
        self._shares = shares
        self._clock = clock
        self._running = 0
        self._requests = Allowance()
        self._tokens = Allowance()

    def over(self, key: ApiKey) -> OverLimit | None:
        """Return why a request must be refused, or count the request and return None."""
        running = key.max_concurrent
        if running is not None and self._running >= math.ceil(running / self._shares):
            message = f"{key.name} has {running} requests in progress, as many as it may"
            return OverLimit(message, _RETRY_SECONDS)
        now = self._clock()
        for unit, allowance, per_minute in (
            ("requests", self._requests, key.requests_per_minute),
            ("tokens", self._tokens, key.tokens_per_minute),
        ):
            if per_minute is None:
                continue
            wait = allowance.wait(per_minute / self._shares, now)
            if wait > 0:
                message = f"{key.name} may use {per_minute} {unit} a minute, and has"
                return OverLimit(message, math.ceil(wait))
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
    """Who sent a request: the key that it came with, and what the key's holder uses."""

    key: ApiKey
    quota: Quota

    def spend_tokens(self, tokens: int) -> None:
        """See ``Quota.spend_tokens``."""
        self.quota.spend_tokens(self.key, tokens)


class Quotas:
    """The quotas of all holders of keys. ``Quota`` describes the arguments."""

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
