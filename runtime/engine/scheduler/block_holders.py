"""Requests of vLLM's scheduler that hold certain blocks, and how they lose them."""

from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.request import Request, RequestStatus


def holders(scheduler: Any, is_given_up: Callable[[int], bool]) -> list[str]:
    """Return the queued requests that hold a block that is given up, in no order."""
    blocks_of = scheduler.kv_cache_manager.get_block_ids
    return [
        request.request_id
        for request in (*scheduler.running, *scheduler.kv_holding_waiting)
        if any(is_given_up(block) for group in blocks_of(request.request_id) for block in group)
    ]


def preempt(scheduler: Any, request_ids: Sequence[str]) -> None:
    """Take all blocks from requests, which are computed again later, those that ran first.

    The body of ``Scheduler.reset_prefix_cache(reset_running_requests=True)`` for some requests.
    Only while no step is in flight.
    """
    wanted = set(request_ids)
    waiting = [request for request in scheduler.kv_holding_waiting if request.request_id in wanted]
    if waiting:
        scheduler.kv_holding_waiting.remove_requests(waiting)
    for request in waiting:
        request.status = RequestStatus.RUNNING  # vLLM preempts no others
    running = [request for request in scheduler.running if request.request_id in wanted]
    scheduler.running = [request for request in scheduler.running if request not in running]
    for request in reversed([*running, *waiting]):
        _preempt(scheduler, request)


def _preempt(scheduler: Any, request: Request) -> None:
    scheduler._preempt_request(request, 0.0, drop_stale_output=True)
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
