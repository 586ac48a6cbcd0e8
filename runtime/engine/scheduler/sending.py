"""Steps are sent to the runners: those of the scheduler, and first ones before it has made them.

To adopt requests and to schedule the step that begins with them takes a scheduler milliseconds, and
all these requests stand still meanwhile. But mostly it is known what will come of it: if nothing
else is in the core, if all requests have their blocks and their rows, and if each makes one token,
then the step is theirs. So it is written by hand and sent, and then the books are done as always.
They say again what was sent (``sent_ahead.py``), and do not send it a second time.

Whatever may make the step another one is looked for first. Then nothing is sent, and nothing has
changed.
"""

import bisect
from collections.abc import Sequence
from concurrent.futures import Future
from operator import attrgetter
from typing import Any

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

from shoal.policies.values.layouts import Unit
from shoal.runtime.engine.agent.step_mode import Shift
from shoal.runtime.engine.link import instructions
from shoal.runtime.engine.link.executor import UnitExecutor
from shoal.runtime.engine.scheduler.beginnings import Beginnings, Coming
from shoal.runtime.engine.scheduler.carried_blocks import Filling
from shoal.runtime.engine.scheduler.carried_requests import CarriedRequests
from shoal.runtime.engine.scheduler.scheduled_steps import InFlight, work_of
from shoal.runtime.engine.scheduler.step_sizes import StepSizes
from shoal.runtime.protocol.messages import CarriedRequest, Mode

_ARRIVAL = attrgetter("request.arrival_time")
Carries = Sequence[tuple[Unit, Sequence[CarriedRequest]]]
"""The source and the requests of each."""


class Sending:
    """Sends the steps of one core.

    Args:
        scheduler: vLLM's, of the core.
        executor: sends steps.
        shift: chooses their mode.
        sizes: knows how many tokens a step may have.
        carried: knows the requests that come.
        beginnings: knows what runners know of these.
    """

    def __init__(
        self,
        scheduler: Any,
        executor: UnitExecutor,
        shift: Shift,
        sizes: StepSizes,
        carried: CarriedRequests,
        beginnings: Beginnings,
    ) -> None:
        self._scheduler, self._executor = scheduler, executor
        self._shift, self._sizes = shift, sizes
        self._carried, self._beginnings = carried, beginnings

    def send(self, scheduled: SchedulerOutput, grammar: Any, *, sample: bool) -> InFlight:
        """Send a step, unless it was sent ahead.

        Args:
            scheduled: the step.
            grammar: vLLM's ``GrammarOutput``; None: it has none, or none yet.
            sample: whether the runners can finish it.

        Raises:
            SentWronglyError: another one was sent ahead.
        """
        told, begun = self._beginnings.tell(scheduled)
        sent = self._carried.sent_ahead.take((told, grammar, sample, begun))
        seq, future, mode = sent or self._run(scheduled, told, grammar, begun, sample=sample)
        copy, seated = self._carried.latest_copy, begun.seated.request_ids if begun.seated else ()
        return InFlight(seq, scheduled, future, mode, work_of(scheduled), copy, seated)

    def send_first(self, carries: Carries) -> bool:
        """See ``interface.Core.send_first``; no step is in flight."""
        if not (self._carried.shares_kv and self._makes_plain_steps() and self._has_only_begun()):
            return False
        fillings, coming = list[dict[str, Filling]](), list[Coming]()
        for _, requests in carries:
            fillings.append({})
            for carried in requests:
                filling = self._carried.blocks.foreseen(carried)
                new = self._foresee(carried, filling)
                if filling is None or new is None:
                    return False
                fillings[-1][carried.request_id] = filling
                coming.append(new)
        running = [Coming(each, (), each.num_computed_tokens) for each in self._scheduler.running]
        for new in coming:
            # As ``CarriedRequests`` does it.
            bisect.insort(running, new, key=_ARRIVAL)
        begun = self._beginnings.foretell(running) if self._fits(len(running)) else None
        if begun is None:
            return False
        for (source, _), filled in zip(carries, fillings, strict=True):
            self._carried.send_ahead(source, filled)
        scheduled = self._step_of(running)
        run = self._run(scheduled, scheduled, None, begun, sample=True)
        self._carried.sent_ahead.note((scheduled, None, True, begun), run)
        return True

    def _run(
        self,
        scheduled: SchedulerOutput,
        told: SchedulerOutput,
        grammar: Any,
        begun: instructions.Begun,
        *,
        sample: bool,
    ) -> "tuple[int, Future[Any], Mode]":
        mode = self._shift.mode(scheduled.total_num_scheduled_tokens, scheduled)
        run = self._executor.run_step(told, grammar, sample=sample, mode=mode, begun=begun)
        return *run, mode

    def _foresee(self, carried: CarriedRequest, filling: Filling | None) -> Coming | None:
        """Return how a request will begin; None: it may not run at once, or not for one token."""
        request = self._carried.expected(carried.request_id)
        if request is None or filling is None or request.lora_request is not None:
            return None
        new, computed = carried.tokens[request.num_output_tokens :], filling.computed
        decodes = carried.tokens and request.num_tokens + len(new) == computed + 1
        if not decodes or computed + 1 >= self._scheduler.max_model_len:
            return None
        return Coming(request, new, computed)

    def _makes_plain_steps(self) -> bool:
        """Return whether a step of requests that decode says nothing but what all steps say."""
        scheduler, encoder = self._scheduler, self._scheduler.encoder_cache_manager
        is_plain = scheduler.use_v2_model_runner and not scheduler.num_spec_tokens
        more = (
            scheduler.use_pp,
            scheduler.connector,
            scheduler.ec_connector,
            scheduler.aux_output_connector,
            scheduler.observability_config.enable_logging_iteration_details,
            scheduler.needs_kv_cache_zeroing,
            scheduler.need_mamba_block_aligned_split,
        )
        if not is_plain or any(more):
            return False
        return type(encoder) is EncoderCacheManager and not encoder.freed

    def _has_only_begun(self) -> bool:
        """Return whether requests that have just come to their rows are all that would run."""
        scheduler = self._scheduler
        waiting = scheduler.waiting, scheduler.kv_holding_waiting, scheduler.deferred_waiting
        if any(map(len, waiting)) or scheduler.pause_state is not PauseState.UNPAUSED:
            return False
        if self._carried.num_aside or scheduler.num_waiting_for_streaming_input:
            return False
        return self._beginnings.have_begun(scheduler.running)

    def _fits(self, requests: int) -> bool:
        """Return whether so many requests can run, with a token each."""
        scheduler = self._scheduler
        most = min(scheduler.max_num_running_reqs, scheduler.max_num_active_reqs, self._sizes.most)
        return bool(0 < requests <= min(most, scheduler.scheduler_config.max_num_batched_tokens))

    def _step_of(self, running: Sequence[Coming]) -> SchedulerOutput:
        """Return what ``Scheduler.schedule`` makes of requests that have blocks for one token."""
        names = [each.request.request_id for each in running]
        step = SchedulerOutput.make_empty()
        step.scheduled_cached_reqs = CachedRequestData(
            req_ids=names,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None] * len(names),
            num_computed_tokens=[each.computed for each in running],
            num_output_tokens=[each.request.num_output_tokens + len(each.new) for each in running],
        )
        step.num_scheduled_tokens = dict.fromkeys(names, 1)
        step.total_num_scheduled_tokens = len(names)
        step.finished_req_ids = set(self._scheduler.finished_req_ids)
        step.preempted_req_ids = set(self._scheduler.reset_preempted_req_ids)
        return step
