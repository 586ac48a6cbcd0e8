"""Requests that a V2 model runner is told of before the step that begins with them.

See ``beginnings.py``, which tells of them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from shoal.runtime.engine.layouts.seats import Seats
from shoal.runtime.engine.layouts.writing_ahead import WritingAhead
from shoal.runtime.engine.link import instructions

Blocks = tuple[list[int], ...]


class Introductions:
    """What one layout's runner knows of requests that are to come.

    Args:
        physical: turns block ids of a step, for each KV group, into the runner's own.
    """

    def __init__(self, physical: Callable[[Blocks], Blocks] = lambda blocks: blocks) -> None:
        self._physical = physical
        self._known: dict[str, NewRequestData] = {}
        self._done: list[NewRequestData | None] = []
        """Those that have begun with the last step. To free their prompts takes a tenth of a
        millisecond, so the next step does it: requests stand still before this one."""
        self._seats: Seats | None = None
        self.ahead = WritingAhead()
        """Writes what is known of seated requests while another layout runs."""

    def add(self, request: NewRequestData) -> None:
        """Take note of a request; its blocks are not known yet."""
        self._known[request.req_id] = request

    def seat(
        self, rests: Iterable[instructions.Rest], model_runner: Any, *, ahead: bool = False
    ) -> None:
        """Give requests rows of a V2 model runner, which is always the same one.

        Args:
            rests: says what is new of them.
            model_runner: the model runner.
            ahead: whether to write what is staged by now: another layout runs, and no more are
                about to be seated.
        """
        if self._seats is None:
            self._seats = Seats(model_runner, self.ahead)
        for rest in rests:
            known = self._known[rest.request_id] = self._whole(rest)
            self._seats.take(replace(known, block_ids=self._physical(rest.blocks)))
        if ahead:
            self.ahead.write(model_runner)

    def foresee(self, computed: Mapping[str, int]) -> None:
        """Take note of how far seated requests will be when they begin.

        Args:
            computed: how many of each request's tokens will have their KV, which are all but one.
        """
        if self._seats is not None:
            self._seats.foresee(computed)

    def complete(self, scheduled: SchedulerOutput, begun: instructions.Begun) -> SchedulerOutput:
        """Return a step as vLLM's scheduler has made it, but that seated requests run already.

        Args:
            scheduled: without the requests that begin and were introduced.
            begun: these requests, and those that do not come.
        """
        whole = [rest.request_id for rest in begun.requests]
        new = [*scheduled.scheduled_new_reqs, *map(self._whole, begun.requests)]
        if self._seats is not None:
            self._seats.leave((*begun.unseated, *begun.forgotten, *whole))
            if begun.seated is not None:
                self._seats.begin(begun.seated, writes=not new)
        done = begun.forgotten + (begun.seated.request_ids if begun.seated else [])
        self._done = [self._known.pop(request_id, None) for request_id in done]
        return replace(scheduled, scheduled_new_reqs=new) if begun.requests else scheduled

    def _whole(self, rest: instructions.Rest) -> NewRequestData:
        known = self._known.pop(rest.request_id)
        assert known.prefill_token_ids is not None
        return NewRequestData(
            known.req_id,
            known.prompt_token_ids,
            known.mm_features,
            known.sampling_params,
            known.pooling_params,
            rest.blocks,
            rest.computed,
            known.lora_request,
            prefill_token_ids=known.prefill_token_ids + rest.tokens,
        )
