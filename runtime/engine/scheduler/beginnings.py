"""What V2 model runners are told of requests that begin with a step.

vLLM's step brings all that there is to know of such a request. Requests that are carried have no
time for that: for 64 of them, to write and to read their sampling parameters and prompts takes
scheduler and runner two milliseconds each. So runners are told of an expected request as soon as
its scheduler knows it (``Introduce``). The step brings the rest: blocks and outputs.

Tokens go as arrays. Pickle sends an array as one string of bytes, and a runner writes it to its
table in one go (``token_table.py``). A list goes number by number, several times.
"""

from array import array
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.request import Request

from shoal.runtime.engine.link import instructions
from shoal.runtime.engine.link.executor import UnitChannel


class Beginnings:
    """Tells the runners of one core of its requests.

    Args:
        scheduler: vLLM's, of the core. If its model runners are V1, steps stay as they are.
        channel: the queues to the members' runners.
    """

    def __init__(self, scheduler: Any, channel: UnitChannel) -> None:
        self._scheduler, self._channel = scheduler, channel
        self._introduced: dict[str, int] = {}
        """How many tokens runners know of each expected request, until a step begins with it."""
        self._forgotten: list[str] = []
        """Requests that were introduced and do not come, of which runners have not been told."""

    def expect(self, request: Request) -> None:
        """Introduce a request. Those with images are not: what a step says of these changes."""
        is_plain = not request.mm_features and request.prompt_embeds is None
        if not self._scheduler.use_v2_model_runner or not is_plain:
            return
        tokens: Any = array("i", request.all_token_ids)
        data = NewRequestData.from_request(request, (), tokens)
        data.prompt_token_ids = tokens[: request.num_prompt_tokens]
        self._channel.send(instructions.Introduce(data))
        self._introduced[request.request_id] = len(tokens)
        if request.request_id in self._forgotten:
            self._forgotten.remove(request.request_id)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Let runners forget requests that are aborted; unknown ids are ignored."""
        for request_id in request_ids:
            if self._introduced.pop(request_id, None) is not None:
                self._forgotten.append(request_id)

    def tell(self, scheduled: SchedulerOutput) -> tuple[SchedulerOutput, instructions.Begun]:
        """Return a step as runners get it, and what it says of requests that they know.

        The step itself stays as it is, but for tokens, which become arrays.
        """
        if not self._scheduler.use_v2_model_runner:
            return scheduled, instructions.Begun()
        begun, new = instructions.Begun(forgotten=self._forgotten), list[NewRequestData]()
        self._forgotten = []
        for request in scheduled.scheduled_new_reqs:
            known = self._introduced.pop(request.req_id, None)
            if known is None:
                new.append(_packed(request))
            else:
                tokens = array("i", request.prefill_token_ids[known:])
                blocks, computed = request.block_ids, request.num_computed_tokens
                rest = instructions.Rest(request.req_id, tokens, computed, blocks)
                begun.requests.append(rest)
        return replace(scheduled, scheduled_new_reqs=new), begun


def _packed(request: NewRequestData) -> NewRequestData:
    """Replace the lists of tokens of a request."""
    tokens: Any = array("i", request.prefill_token_ids)
    request.prefill_token_ids = tokens
    request.prompt_token_ids = tokens[: request.prompt_len]
    return request
