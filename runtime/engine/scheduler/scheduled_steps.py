"""What vLLM's ``SchedulerOutput`` says of a step, and the steps that are in flight."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from shoal.runtime.engine.agent.step_work import work_of_step
from shoal.runtime.engine.link.instructions import Drafted
from shoal.runtime.protocol.messages import Mode, Work

AHEAD_REQUESTS = 16
"""With so many running requests, a step is scheduled before an ended one is collected."""


@dataclass(slots=True)
class InFlight:
    """A step that was queued for the runners and not collected."""

    seq: int
    scheduled: SchedulerOutput
    future: "Future[Any]"
    mode: Mode
    work: Work
    copy: int
    """The last copy that was begun before it (``CarriedRequests.latest_copy``)."""
    seated: Sequence[str] = ()
    """Requests that run for vLLM's scheduler, although this is their first step here."""
    gone: set[str] = field(default_factory=set)
    """Requests that were aborted since. They may have been begun again, under the same names."""

    def forget_gone(self) -> None:
        """Let vLLM's scheduler take no token of this step for one of the requests that have gone.

        It knows requests by their names, and would give such a token to the one that began again.
        """
        for request_id in self.gone.intersection(self.scheduled.num_scheduled_tokens):
            del self.scheduled.num_scheduled_tokens[request_id]

    @property
    def done(self) -> Work:
        """What it has computed, once vLLM's scheduler has been told of its result.

        The scheduler has cut what comes after the end of a request by then, so the accepted drafts
        are those that requests got.
        """
        if not self.work.drafts:
            return self.work
        result = self.future.result()
        made: ModelRunnerOutput = result.output if isinstance(result, Drafted) else result
        tokens = (
            made.sampled_token_ids[made.req_id_to_index[name]]
            for name in self.scheduled.scheduled_spec_decode_tokens
        )
        accepted = sum(max(0, len(sampled) - 1) for sampled in tokens)
        return structs.replace(self.work, accepted=accepted)


def tells_runners(scheduled: SchedulerOutput) -> bool:
    """Return whether a step without tokens still carries news for the runners."""
    ended = scheduled.finished_req_ids or scheduled.preempted_req_ids
    return bool(ended or scheduled.free_encoder_mm_hashes)


def work_of(scheduled: SchedulerOutput) -> Work:
    """Return what a step computes."""
    cached, tokens = scheduled.scheduled_cached_reqs, scheduled.num_scheduled_tokens
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed |= {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
    if drafts := scheduled.scheduled_spec_decode_tokens:
        # A decode that also checks drafts is one decode.
        tokens = {name: count - len(drafts.get(name, ())) for name, count in tokens.items()}
    work = work_of_step(zip(map(computed.__getitem__, tokens), tokens.values(), strict=True))
    return structs.replace(work, drafts=sum(map(len, drafts.values()))) if drafts else work


def beginning(step: InFlight) -> Iterator[str]:
    """Yield the requests that begin, or begin again, with a step."""
    yield from (new.req_id for new in step.scheduled.scheduled_new_reqs)
    yield from step.scheduled.scheduled_cached_reqs.resumed_req_ids
    yield from step.seated


def awaits_tokens(scheduled: SchedulerOutput) -> bool:
    """Return whether the grammar of a request needs a token that is still in flight."""
    return bool(scheduled.pending_structured_output_tokens)


def can_go_ahead(steps: Sequence[InFlight], scheduler: Any) -> bool:
    """Return whether another step may be scheduled before the first of some, which has ended."""
    running = len(scheduler.running)
    if scheduler.num_spec_tokens:
        return False  # vLLM never counts the drafts of three steps at once
    if running < AHEAD_REQUESTS or steps[0].future.exception() is not None:
        return False
    # No request may be preempted in vain.
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return bool(free >= running and are_steady(steps))


def are_steady(steps: Sequence[InFlight]) -> bool:
    """Return whether another step may be scheduled before the first of some is collected.

    A first token must not wait, nor one that comes after a carry. If the last step left a request
    out, for lack of blocks say, runners would be sent its tokens again as far as they are known
    here: without the token of the first step.
    """
    first, last = (steps[nth].scheduled for nth in (0, -1))
    begins = any(True for _ in beginning(steps[0]))
    if begins or any(step.work.prefill_tokens for step in steps):
        return False
    return bool(first.num_scheduled_tokens.keys() <= last.num_scheduled_tokens.keys())
