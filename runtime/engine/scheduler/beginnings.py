"""What V2 model runners are told of requests that begin with a step.

vLLM's step brings all that there is to know of such a request. Requests that are carried have no
time for that: for 64 of them, to write and to read their sampling parameters and prompts takes
scheduler and runner two milliseconds each. So runners are told of an expected request as soon as
its scheduler knows it (``Introduce``). The step brings the rest: blocks and outputs.

Where a request gets its blocks before it comes, runners give it a row by then (``Seat``), because
that takes them four milliseconds more. For them it is then a request that runs already, and so it
is for the scheduler once it has come. They do this as soon as they have nothing else to do, also
before their unit is bound.

Tokens go as arrays. Pickle sends an array as one string of bytes, and a runner writes it to its
table in one go (``token_table.py``). A list goes number by number, several times.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.gpu.sample.penalties import use_penalty

from shoal.runtime.engine.link import instructions
from shoal.runtime.engine.link.executor import UnitChannel

SEATS = 8
"""So many requests are seated together: runners look after each whether there is a step to run."""


@dataclass(slots=True)
class _Introduced:
    """What runners know of an expected request."""

    request: Request
    tokens: int
    """How many of its tokens."""
    blocks: tuple[list[KVCacheBlock], ...] | None = None
    """Its blocks, if it is seated."""
    seat: instructions.Rest | None = None
    """What runners are told then."""


class Coming(NamedTuple):
    """How a request begins."""

    request: Request
    new: Sequence[int]
    """Outputs that it does not have yet."""
    computed: int
    """How many of its tokens have their KV."""


class Beginnings:
    """Tells the runners of one core of its requests.

    Args:
        scheduler: vLLM's, of the core. If its model runners are V1, steps stay as they are.
        channel: the queues to the members' runners.
    """

    def __init__(self, scheduler: Any, channel: UnitChannel) -> None:
        self._scheduler, self._channel = scheduler, channel
        self._introduced: dict[str, _Introduced] = {}
        """Expected requests, until a step begins with them."""
        self._begun: dict[str, _Introduced] = {}
        """Those that have come to their seats: their next step says of them what it says of others
        that run."""
        self._seats: list[instructions.Rest] = []
        """Those that are to be seated."""
        self._former: set[str] = set()
        """Those of them that were here before, which runners still know until they are seated."""
        self._seated = 0
        """How many have been seated since the last step with tokens."""
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
        self._introduced[request.request_id] = _Introduced(request, len(tokens))
        if request.request_id in self._forgotten:
            self._forgotten.remove(request.request_id)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Let runners forget requests that are aborted; unknown ids are ignored."""
        for request_id in request_ids:
            if self._introduced.pop(request_id, None) is not None:
                self._forgotten.append(request_id)
            self._begun.pop(request_id, None)
            if request_id in self._former:
                self._former.remove(request_id)
                self._scheduler.finished_req_ids.add(request_id)

    # --- seats ---

    def seat(self, request_id: str) -> None:
        """Seat a request that has got its blocks, if the next step will probably begin with it.

        That is so where nothing runs yet: in a group that is about to be bound, or an engine that
        is about to go on alone.
        """
        known, scheduler = self._introduced.get(request_id), self._scheduler
        if known is None or known.blocks is not None or len(scheduler.running) > len(self._begun):
            return
        if not self._has_seats() or not _samples_plainly(known.request):
            return
        for told in (scheduler.finished_req_ids, scheduler.reset_preempted_req_ids):
            if request_id in told:
                # Runners forget that it was here when it is seated or begins, not with the next
                # step, which would take its row.
                told.remove(request_id)
                self._former.add(request_id)
        blocks = scheduler.kv_cache_manager.get_blocks(request_id)
        known.blocks = tuple(list(group) for group in blocks.blocks)
        tokens = array("i", known.request.all_token_ids[known.tokens :])
        known.tokens += len(tokens)
        self._seated += 1
        # What is computed when it begins is not known yet, and comes with the step.
        ids = blocks.get_block_ids()
        known.seat = instructions.Rest(request_id, tokens, known.tokens - 1, ids)
        self._seats.append(known.seat)

    def _has_seats(self) -> bool:
        """Return whether runners have a row more, if requests have ended that they still know."""
        scheduler = self._scheduler
        if scheduler.num_spec_tokens or scheduler.model_uses_mrope:
            return False  # rows of these have more than is known of a request by now
        gone = len(scheduler.finished_req_ids) + len(self._forgotten)
        return bool(self._seated + gone < scheduler.max_num_running_reqs)

    def send_seats(self) -> None:
        """Tell runners of the requests that were seated since the last time.

        What has lost its blocks meanwhile is left out: they may back nothing, or another request.
        """
        seats, self._seats = [rest for rest in self._seats if self._holds(rest)], []
        self._former.difference_update(rest.request_id for rest in seats)
        for begin in range(0, len(seats), SEATS):
            some, is_last = seats[begin : begin + SEATS], begin + SEATS >= len(seats)
            self._channel.send(instructions.Seat(some, is_last))

    def _holds(self, rest: instructions.Rest) -> bool:
        """Return whether a request has the blocks with which it is to be seated."""
        known = self._introduced.get(rest.request_id)
        if known is None or known.seat is not rest:
            return False
        if self._has_kept(known):
            return True
        known.blocks = known.seat = None
        known.tokens -= len(rest.tokens)
        return False

    def _has_kept(self, known: _Introduced) -> bool:
        """Return whether a request has the blocks with which it was seated, and no others."""
        # ``KVCacheManager.get_blocks`` takes three times as long, and requests stand still.
        managers = self._scheduler.kv_cache_manager.coordinator.single_type_managers
        request_id, blocks = known.request.request_id, known.blocks
        return blocks == tuple([each.req_to_blocks.get(request_id, []) for each in managers])

    def begins_in_its_row(self, request: Request) -> bool:
        """Return whether a request that has come with its KV begins in the row that it has.

        If so, it must run for vLLM's scheduler from now on, which makes a running request's part of
        a step in half the time that it takes for one that begins again. But then it does not look
        whether there is room for one more.
        """
        known = self._introduced.get(request.request_id)
        if known is None or known.blocks is None or not self._has_kept(known):
            return False
        if self._seats:
            self.send_seats()  # while it has just these blocks
        if request.num_tokens > request.num_computed_tokens + 1:
            return False  # the rest of its prompt may take several steps
        if not self._has_room(request):
            return False
        self._begun[request.request_id] = known
        return True

    def _has_room(self, request: Request) -> bool:
        """Return whether a request can run beside all that do, as ``Scheduler.schedule`` asks."""
        scheduler = self._scheduler
        active = len(scheduler.running) + scheduler.num_waiting_for_streaming_input
        if active >= scheduler.max_num_active_reqs:
            return False
        if request.lora_request is None:
            return True
        used = {request.lora_request.lora_int_id}
        used |= {each.lora_request.lora_int_id for each in scheduler.running if each.lora_request}
        return len(used) <= int(scheduler.lora_config.max_loras)

    def have_begun(self, requests: Iterable[Request]) -> bool:
        """Return whether all of these have come to their rows, and no step has told of them yet."""
        return all(request.request_id in self._begun for request in requests)

    # --- steps ---

    def foretell(self, running: Sequence[Coming]) -> instructions.Begun | None:
        """Return what ``tell`` will say of a step of these requests; None: that is not known.

        Args:
            running: requests that begin in their rows, in the order of the step.
        """
        seated, introduced, begun = instructions.Seated(), self._introduced, self._begun
        for request, new, computed in running:
            known = introduced.get(request_id := request.request_id)
            if known is None or known.blocks is None:
                return None
            if request_id not in begun and not self._has_kept(known):
                return None
            seated.add(request_id, [*request.all_token_ids[known.tokens :], *new], computed)
        others = introduced.keys() - seated.request_ids
        if self._seats or any(introduced[name].blocks is not None for name in others):
            return None
        return instructions.Begun(forgotten=list(self._forgotten), seated=seated)

    def tell(self, scheduled: SchedulerOutput) -> tuple[SchedulerOutput, instructions.Begun]:
        """Return a step as runners get it, and what it says of requests that they know.

        The step itself stays as it is, but for tokens, which become arrays.
        """
        if not self._scheduler.use_v2_model_runner:
            return scheduled, instructions.Begun()
        self.send_seats()
        begun, told = instructions.Begun(forgotten=self._forgotten), scheduled
        self._forgotten = []
        if scheduled.scheduled_new_reqs:
            told = self._without_known(scheduled, begun)
        if self._begun:
            self._begin(scheduled, begun)
        if scheduled.total_num_scheduled_tokens:
            self._leave_seats(begun)
        return told, begun

    def _without_known(
        self, scheduled: SchedulerOutput, begun: instructions.Begun
    ) -> SchedulerOutput:
        """Return a step whose requests that runners know are in ``begun``."""
        new = list[NewRequestData]()
        for request in scheduled.scheduled_new_reqs:
            known = self._introduced.pop(request.req_id, None)
            self._former.discard(request.req_id)
            self._begun.pop(request.req_id, None)  # it was preempted before its first step
            if known is None:
                new.append(_packed(request))
            else:
                assert request.prefill_token_ids is not None
                tokens = array("i", request.prefill_token_ids[known.tokens :])
                computed, blocks = request.num_computed_tokens, request.block_ids
                begun.requests.append(instructions.Rest(request.req_id, tokens, computed, blocks))
        return replace(scheduled, scheduled_new_reqs=new)

    def _begin(self, scheduled: SchedulerOutput, begun: instructions.Begun) -> None:
        """Say what is new of the requests that begin in their rows."""
        cached, seated = scheduled.scheduled_cached_reqs, instructions.Seated()
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            known = self._begun.pop(request_id, None)
            if known is None:
                continue
            del self._introduced[request_id]
            self._former.discard(request_id)
            seated.add(request_id, known.request.all_token_ids[known.tokens :], computed)
        begun.seated = seated if seated.request_ids else None

    def _leave_seats(self, begun: instructions.Begun) -> None:
        """Let the requests that did not begin have no seats: others need these from now on."""
        if not self._seated:
            return
        self._seated = 0
        for request_id, known in self._introduced.items():
            runs = request_id in self._begun and known.request.status is RequestStatus.RUNNING
            if known.blocks is not None and not runs:
                known.blocks = None
                begun.unseated.append(request_id)


def _samples_plainly(request: Request) -> bool:
    """Return whether what a runner keeps for sampling does not depend on the outputs."""
    sampling = request.sampling_params
    return (
        sampling is not None
        and not use_penalty(sampling)
        and sampling.prompt_logprobs is None
        and sampling.prompt_logprob_token_ids is None
        and sampling.thinking_token_budget is None
        and not request.replay_start
        and not request.use_structured_output  # it waits for its grammar while others begin
    )


def _packed(request: NewRequestData) -> NewRequestData:
    """Replace the lists of tokens of a request."""
    tokens: Any = array("i", request.prefill_token_ids)
    request.prefill_token_ids = tokens
    request.prompt_token_ids = tokens[: request.prompt_len]
    return request
