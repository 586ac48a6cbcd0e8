"""Refuses requests in the front end that the controller's task pool would surely refuse."""

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
from shoal.server.observers import Observer
from shoal.server.rejections import CountRejection, Rejection


class PoolDoor(Observer):
    """Refuses requests by the limits that the controller last announced.

    The announcement may come late; then the controller refuses the request itself. This class only
    saves the work on requests that have no chance.

    Args:
        count: tells the controller of a request that was refused here.
        rejected: counts the refused request.
    """

    def __init__(
        self, count: Callable[[Outcome], Awaitable[None]], rejected: CountRejection
    ) -> None:
        self._count = count
        self._rejected = rejected
        self._limits = PoolLimits()
        self.is_closed = False
        """Whether every request is refused."""
        self.unavailable: str | None = None
        """Why every request is refused for now; None: requests are accepted."""

    def close(self) -> None:
        """Refuse every request from now on, because the node is ending."""
        self.is_closed = True

    def limits(self, note: PoolLimits) -> None:
        """Take the controller's announcement of its limits."""
        self._limits = note

    async def refusal(self, caller: str | None, priority: int) -> JSONResponse | None:
        """Return the answer to a request that must be refused; None if it is accepted.

        Args:
            caller: the name of the caller, if it has one.
            priority: the request's effective priority.
        """
        limits = self._limits
        if self.is_closed:
            return await self._refuse(Outcome.HANDED_BACK, 503, SHUTTING_DOWN, RETRY_SECONDS)
        if self.unavailable is not None:
            again = UNAVAILABLE_RETRY_SECONDS
            return await self._refuse(Outcome.UNAVAILABLE, 503, self.unavailable, again)
        if caller is not None and caller in limits.callers:
            reason = limits.callers[caller]
            return await self._refuse(Outcome.CALLER_FULL, 429, reason, limits.retry_after)
        if limits.full is not None and not limits.lets_in(priority):
            return await self._refuse(Outcome.POOL_FULL, 503, limits.full, limits.retry_after)
        return None

    async def no_room(self, reason: str) -> JSONResponse:
        """Return the answer to a request for whose body the front end has no room.

        What is still to come of the body is not read, so the connection ends.
        """
        response = await self._refuse(Outcome.POOL_FULL, 503, reason, RETRY_SECONDS)
        response.headers["Connection"] = "close"
        return response

    async def _refuse(
        self, outcome: Outcome, status: int, reason: str, retry_after: int | None
    ) -> JSONResponse:
        self._rejected(Rejection(outcome))
        await self._count(outcome)
        return refusal_response(status, reason, retry_after)
