"""The tokens of requests that begin, as V2 model runners are sent them: in arrays.

Pickle sends an array as one string of bytes, and a runner writes it to its table in one go
(``token_table.py``). A list goes number by number, several times: for eight requests of 4,000
tokens that takes scheduler and runner more than a millisecond each. Requests that are carried have
no time for that, so their prompts are packed as soon as they are expected.
"""

from array import array
from typing import Any
from weakref import WeakKeyDictionary

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request


class PackedTokens:
    """Packs the tokens that steps of one core bring.

    Args:
        scheduler: vLLM's, of the core. If its model runners are V1, nothing is packed.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._packed = WeakKeyDictionary[Request, "array[int]"]()
        """The first tokens of expected requests, until a step brings them."""

    def expect(self, request: Request) -> None:
        """Pack the tokens that a request has."""
        if self._scheduler.use_v2_model_runner:
            self._packed[request] = array("i", request.all_token_ids)

    def pack(self, scheduled: SchedulerOutput) -> None:
        """Replace the lists of tokens of the requests that begin with a step."""
        if not self._scheduler.use_v2_model_runner:
            return
        for new in scheduled.scheduled_new_reqs:
            packed = self._packed.pop(self._scheduler.requests[new.req_id], array("i"))
            packed.extend(array("i", new.prefill_token_ids[len(packed) :]))
            new.prefill_token_ids, new.prompt_token_ids = packed, packed[: new.prompt_len]
