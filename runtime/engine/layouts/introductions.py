"""Requests that a V2 model runner is told of before the step that begins with them.

See ``beginnings.py``, which tells of them.
"""

from dataclasses import replace

from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from shoal.runtime.engine.link import instructions


class Introductions:
    """What one layout's runner knows of requests that are to come."""

    def __init__(self) -> None:
        self._known: dict[str, NewRequestData] = {}

    def add(self, request: NewRequestData) -> None:
        """Take note of a request; its blocks are not known yet."""
        self._known[request.req_id] = request

    def complete(self, scheduled: SchedulerOutput, begun: instructions.Begun) -> SchedulerOutput:
        """Return a step as vLLM's scheduler has made it.

        Args:
            scheduled: without the requests that begin and were introduced.
            begun: these requests, and those that do not come.
        """
        for request_id in begun.forgotten:
            self._known.pop(request_id, None)
        if not begun.requests:
            return scheduled
        new = [*scheduled.scheduled_new_reqs, *map(self._whole, begun.requests)]
        return replace(scheduled, scheduled_new_reqs=new)

    def _whole(self, rest: instructions.Rest) -> NewRequestData:
        known = self._known.pop(rest.request_id)
        assert known.prefill_token_ids is not None
        known.prefill_token_ids += rest.tokens
        known.num_computed_tokens, known.block_ids = rest.computed, rest.blocks
        return known
