"""The front end's side of the task pool's limits: refuses requests that could only be refused."""

from collections.abc import Awaitable, Callable

from starlette.responses import JSONResponse

from shoal.runtime.protocol.messages import (
    RETRY_SECONDS,
    SHUTTING_DOWN,
    UNAVAILABLE_RETRY_SECONDS,
    Outcome,
    PoolLimits,
)
from shoal.server.errors import refusal_response


class PoolDoor:
    """What the controller last said about its limits.

    The controller's word may come late, and then it refuses the request itself: this only saves
    the work on requests that have no chance.

    Args:
        count: tells the controller of a request that was refused here.
    """

    def __init__(self, count: Callable[[Outcome], Awaitable[None]]) -> None:
        self._count = count
        self._limits = PoolLimits()
        self.is_closed = False
        """Whether every request is refused."""
        self.unavailable: str | None = None
        """Why every request is refused for the time being; None: it is not."""

    def close(self) -> None:
        """Refuse every request from now on: the node is to end."""
        self.is_closed = True

    def update(self, limits: PoolLimits) -> None:
        """Take a note of the controller."""
        self._limits = limits

    async def refusal(self, caller: str | None, priority: int) -> JSONResponse | None:
        """Return the answer to a request that must be refused; None if it may come in.

        Args:
            caller: who sent it, if that has a name.
            priority: its effective one.
        """
        limits = self._limits
        if self.is_closed:
            await self._count(Outcome.HANDED_BACK)
            return refusal_response(503, SHUTTING_DOWN, RETRY_SECONDS)
        if self.unavailable is not None:
            await self._count(Outcome.UNAVAILABLE)
            return refusal_response(503, self.unavailable, UNAVAILABLE_RETRY_SECONDS)
        if caller is not None and caller in limits.callers:
            await self._count(Outcome.CALLER_FULL)
            return refusal_response(429, limits.callers[caller], limits.retry_after)
        if limits.full is not None and not limits.lets_in(priority):
            await self._count(Outcome.POOL_FULL)
            return refusal_response(503, limits.full, limits.retry_after)
        return None
