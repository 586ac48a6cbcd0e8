"""Prompts that let others pass until they begin (``Dispatch.patience``).

vLLM starts requests of one priority in the order of ``arrival_time``, and preempts the one that
came last. So a request seems to have come later as long as it waits, and no longer.
"""

from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request


class Patience:
    """The requests of one core that let others pass."""

    def __init__(self) -> None:
        self._arrived: dict[str, float] = {}

    def give(self, request: Request, seconds: float) -> None:
        """Let a new request wait as if it had come so many seconds later."""
        if seconds:
            self._arrived[request.request_id] = request.arrival_time
            request.arrival_time += seconds

    def end(self, scheduled: SchedulerOutput, scheduler: Any) -> None:
        """Give the requests that begin in a step their own time of arrival back."""
        for new in scheduled.scheduled_new_reqs if self._arrived else ():
            arrived = self._arrived.pop(new.req_id, None)
            if arrived is not None:
                scheduler.requests[new.req_id].arrival_time = arrived

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget requests that are gone."""
        for request_id in request_ids:
            self._arrived.pop(request_id, None)
