"""The requests of a core that come from other units, and those that leave it with their KV.

Nothing of vLLM's state is sent. A request is made again of its frames and its outputs, and gets the
state in which vLLM's scheduler keeps a request that was preempted: a preempted one without KV, or
one whose KV came from elsewhere.
"""

import bisect
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeGuard

from msgspec import structs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreEventType
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request, RequestStatus

from shoal.policies.values.layouts import Unit
from shoal.runtime.engine.agent.interface import RunnerDied
from shoal.runtime.engine.agent.results import Adoption, Copied
from shoal.runtime.engine.link import instructions
from shoal.runtime.engine.link.executor import UnitChannel, copied_by_all
from shoal.runtime.engine.scheduler.arrival_messages import arrival_of_v1, arrival_of_v2
from shoal.runtime.engine.scheduler.carried_blocks import (
    CarriedBlocks,
    Filling,
    PhysicalBlocks,
    estimate_once,
)
from shoal.runtime.engine.scheduler.foretold_copies import ForetoldCopies
from shoal.runtime.engine.scheduler.grammar_replay import GrammarReplay
from shoal.runtime.engine.scheduler.sent_ahead import SentAhead
from shoal.runtime.protocol.messages import CarriedRequest, Fallback


@dataclass(frozen=True, slots=True)
class _Copy:
    """A ``Carry`` that is not answered: the blocks that it fills, by request."""

    number: int
    filled: dict[str, list[int]]
    future: "Future[Any]"


class CarriedRequests:
    """What one core knows of requests that came to it, or leave it, with outputs.

    Args:
        unit: the core's unit.
        engine_core: vLLM's part of the core.
        channel: the queues to the members' runners.
        physical: what backs the core's blocks.
    """

    def __init__(
        self, unit: Unit, engine_core: EngineCore, channel: UnitChannel, physical: PhysicalBlocks
    ) -> None:
        self._unit = unit
        self._engine_core = engine_core
        self._scheduler: Any = engine_core.scheduler
        self._channel = channel
        self.blocks = CarriedBlocks(unit, self._scheduler, physical)
        self.foretold = ForetoldCopies(self._scheduler, self.blocks, channel)
        """What runners know by now of the requests that come."""
        self._announced: dict[str, CarriedRequest] = {}
        self._parked: dict[str, Request] = {}
        self._expected: dict[str, Request] = {}
        self._replays: dict[str, GrammarReplay] = {}
        # What runners are to be told, by where the KV is; and the blocks that it goes to.
        self._arrivals: dict[Unit, list[instructions.Arrival]] = {}
        self._filled: dict[str, list[int]] = {}
        self._copying: list[_Copy] = []
        self._begun = 0
        self.is_seated: Callable[[Request], bool] = lambda _: False
        """``Beginnings.begins_in_its_row``."""
        self.sent_ahead = SentAhead()
        """What runners were told before these books said it."""
        self.shares_kv = True
        """Whether the members can read other engines' KV."""
        estimate_once(self._scheduler.kv_cache_manager)

    # --- requests that leave ---

    def announce(self, request_ids: Sequence[str]) -> list[CarriedRequest]:
        """See ``interface.Core.announce``."""
        if self._scheduler.num_spec_tokens:
            return []  # nobody knows how many drafts of a step in flight are right
        found = (self._scheduler.requests.get(request_id) for request_id in request_ids)
        announced = [self._foretell(request) for request in found if _runs(request)]
        self._announced |= {carried.request_id: carried for carried in announced}
        return announced

    def _foretell(self, request: Request) -> CarriedRequest:
        """Describe a request as it will be when its steps in flight have ended."""
        carried = self._describe(request)
        # vLLM counts a step's tokens as computed when it schedules the step. Each step that comes
        # to the last token adds one.
        length = max(request.num_tokens, request.num_computed_tokens + 1)
        return structs.replace(carried, length=length)

    def export(self, request_ids: Sequence[str]) -> list[CarriedRequest]:
        """See ``interface.Core.export``."""
        known = self._scheduler.requests
        requests = [known[request_id] for request_id in request_ids if request_id in known]
        self._park(set(requests))
        exported = [self._rest(request) or self._describe(request) for request in requests]
        for request_id in request_ids:
            self._announced.pop(request_id, None)
        return exported

    def _rest(self, request: Request) -> CarriedRequest | None:
        """Describe what is new of an announced request; None: it is not as it was foretold."""
        announced = self._announced.get(request.request_id)
        if announced is None:
            return None
        tokens = request.output_token_ids
        return announced.rest(tokens, request.num_computed_tokens, request.num_tokens)

    def _park(self, leaving: set[Request]) -> None:
        scheduler = self._scheduler
        # In the order in which the core would have gone on with them.
        queued = [*scheduler.running, *scheduler.kv_holding_waiting, *scheduler.waiting]
        aside = [replay.request for replay in self._replays.values()]
        self._parked |= {r.request_id: r for r in (*queued, *aside) if r in leaving}
        scheduler.running = [request for request in scheduler.running if request not in leaving]
        scheduler.waiting.remove_requests(leaving)
        scheduler.kv_holding_waiting.remove_requests(leaving)
        scheduler.deferred_waiting.difference_update(leaving)
        for request in leaving:
            request.spec_token_ids = []  # proposals for a step that does not come

    def _describe(self, request: Request) -> CarriedRequest:
        tokens, computed = list(request.output_token_ids), request.num_computed_tokens
        stats = request.prefill_stats
        return CarriedRequest(
            request.request_id,
            tokens,
            computed,
            self.blocks.by_member(self.blocks.computed(request)) if computed else {},
            request.num_tokens,
            stats.num_local_cached_tokens if stats is not None and not tokens else 0,
            self.blocks.block_tokens,
        )

    def keep(self, request_ids: Sequence[str]) -> None:
        """See ``interface.Core.keep``."""
        scheduler, asked = self._scheduler, set(request_ids)
        self._announced = {k: v for k, v in self._announced.items() if k not in asked}
        kept = [request for request_id, request in self._parked.items() if request_id in asked]
        room = scheduler.max_num_running_reqs - len(scheduler.running)
        goes_on = [r for r in kept if r.status is RequestStatus.RUNNING][: max(0, room)]
        scheduler.running[:0] = goes_on
        for request in kept:
            request_id = request.request_id
            del self._parked[request_id]
            if request in goes_on or request_id in self._replays:
                continue
            if request.status is RequestStatus.RUNNING:
                request.status = RequestStatus.PREEMPTED
            self._queue(request)

    def begin_again(self, requests: Collection[Request]) -> None:
        """Let requests that run begin their next step as preempted ones do, but with their KV.

        So runners are sent all their blocks anew. Only while no step is in flight.
        """
        scheduler = self._scheduler
        running = [request for request in scheduler.running if request in requests]
        self._park(set(running))
        for request in running:
            del self._parked[request.request_id]
            request.status = RequestStatus.PREEMPTED
            scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
            self._queue(request)

    # --- requests that come ---

    def add(self, request: Request, tokens: Sequence[int]) -> None:
        """Queue a request with outputs, whose KV is computed again."""
        request.append_output_token_ids(list(tokens))
        # Only statistics read it: vLLM's scheduler leaves a preempted request's ``prefill_stats``
        # as they are, and does not count what is found of it in the prefix cache as a hit.
        request.num_preemptions = 1
        self._take(request)
        self._tell(self._unit, self._arrival(request))

    def expect(self, request: Request) -> None:
        """See ``interface.Core.expect``."""
        self._expected[request.request_id] = request

    def expected(self, request_id: str) -> Request | None:
        """Return an expected request; None: it is not expected."""
        return self._expected.get(request_id)

    def allot(self, carried: CarriedRequest) -> bool:
        """See ``interface.Core.allot``."""
        request = self._expected.get(carried.request_id)
        if request is None or self._fallback(request, carried, with_kv=True) is not None:
            return False
        request.append_output_token_ids(carried.tokens[request.num_output_tokens :])
        if not self.blocks.allot(request, carried.computed, carried.length):
            return False
        self.blocks.foresee(request, carried)
        return True

    def adopt(self, source: Unit, carried: CarriedRequest, *, with_kv: bool) -> Adoption | None:
        """See ``interface.Core.adopt``."""
        request = self._expected[carried.request_id]
        fallback = self._fallback(request, carried, with_kv=with_kv)
        if carried.computed and fallback is None:
            if not self._take_with_kv(source, request, carried):
                return None
        else:
            self._take_without_kv(request, carried)
        del self._expected[carried.request_id]
        return Adoption(fallback)

    def _fallback(
        self, request: Request, carried: CarriedRequest, *, with_kv: bool
    ) -> Fallback | None:
        if not carried.computed:
            return None
        if not self.shares_kv:
            return Fallback.NOT_SHARED
        sampling = request.sampling_params
        assert sampling is not None
        # vLLM sends all of a prompt's log probabilities together, with the first output, and those
        # of the part that was computed are in a runner of the unit that the request came from.
        wanted = sampling.prompt_logprobs, sampling.prompt_logprob_token_ids
        if not carried.tokens and any(values is not None for values in wanted):
            return Fallback.UNREADABLE
        return None if with_kv else Fallback.NO_ROOM

    def _take_without_kv(self, request: Request, carried: CarriedRequest) -> None:
        self.blocks.forget(request)
        tokens = carried.tokens[request.num_output_tokens :]
        if carried.tokens:
            self.add(request, tokens)
        else:
            self._engine_core.add_request(request)

    def _take_with_kv(self, source: Unit, request: Request, carried: CarriedRequest) -> bool:
        # It has its outputs already if there was no room for it before.
        request.append_output_token_ids(carried.tokens[request.num_output_tokens :])
        place = self.blocks.take(request, carried.computed)
        if place is None:
            return False
        request.num_computed_tokens = max(place.begin, carried.computed)
        self._take(request, runs=self.is_seated(request))
        if not carried.tokens:
            request.prefill_stats.set(request.num_prompt_tokens, carried.cached, 0)
            if self._scheduler.log_stats:
                # Its unit sent no output, so the front end has not heard of this yet.
                request.record_event(EngineCoreEventType.QUEUED)
        filling = self.blocks.filling(place, carried)
        self._filled[request.request_id] = filling.blocks
        if self._scheduler.use_v2_model_runner:
            self._tell(source, self.foretold.arrival(source, request.request_id, filling))
        else:
            self._tell(source, self._arrival(request, filling))
        return True

    def _arrival(self, request: Request, filling: Filling | None = None) -> instructions.Arrival:
        scheduler = self._scheduler
        if scheduler.use_v2_model_runner:
            return arrival_of_v2(request.request_id, filling)
        return arrival_of_v1(request, filling, mrope=scheduler.model_uses_mrope)

    def _take(self, request: Request, *, runs: bool = False) -> None:
        """Make a request one of the core's: one that runs, or one that was preempted."""
        scheduler, request_id = self._scheduler, request.request_id
        request.status = RequestStatus.RUNNING if runs else RequestStatus.PREEMPTED
        # The front end orders the outputs of several units by this number.
        request.prefill_stats.set(request.num_tokens, 0, 0)
        scheduler.prev_step_scheduled_req_ids.discard(request_id)
        if not scheduler.use_v2_model_runner:
            # It was here before. ``Carry`` replaces what the runners know of it, and they must not
            # forget it afterwards, with the next step.
            scheduler.finished_req_ids.discard(request_id)
        scheduler.requests[request_id] = request
        if runs:
            # vLLM preempts the last one first.
            bisect.insort(scheduler.running, request, key=attrgetter("arrival_time"))
        elif request.use_structured_output:
            manager = self._engine_core.structured_output_manager
            self._replays[request_id] = GrammarReplay(manager, request)
        else:
            self._queue(request)

    def _queue(self, request: Request) -> None:
        scheduler = self._scheduler
        if scheduler._is_blocked_waiting_status(request.status):
            scheduler.deferred_waiting.add(request)
        holds_kv = scheduler._holds_kv_blocks(request)
        queue = scheduler.kv_holding_waiting if holds_kv else scheduler.waiting
        if isinstance(queue, deque):
            bisect.insort(queue, request, key=attrgetter("arrival_time"))
        else:
            queue.add_request(request)

    def settle(self) -> bool:
        """Queue the requests whose grammars are ready; return whether there were any."""
        ready = [request_id for request_id in self._aside() if self._replays[request_id].advance()]
        for request_id in ready:
            self._queue(self._replays.pop(request_id).request)
        return bool(ready)

    def _aside(self) -> list[str]:
        return [request_id for request_id in self._replays if request_id not in self._parked]

    # --- what runners are told ---

    def _tell(self, source: Unit, arrival: instructions.Arrival) -> None:
        if arrival.source or not self._scheduler.use_v2_model_runner:
            # A V2 model runner learns all but the KV from the step that resumes the request.
            self._arrivals.setdefault(source, []).append(arrival)

    def renew(self, scheduled: SchedulerOutput) -> None:
        """Tell V1 model runners again of requests that begin again with images to encode.

        Runners lack the tensors of images whose KV was there (``strip_covered_mm_data``) and was
        lost since, say by preemption: vLLM sends V1 a request once.
        """
        if self._scheduler.use_v2_model_runner:
            return
        resumed = scheduled.scheduled_cached_reqs.resumed_req_ids
        for request_id in scheduled.scheduled_encoder_inputs.keys() & resumed:
            request = self._scheduler.requests[request_id]
            # Nothing is to be read.
            arrival = structs.replace(self._arrival(request), begin=request.num_computed_tokens)
            self._tell(self._unit, structs.replace(arrival, features=request.mm_features))
        self.copy()

    def copy(self) -> None:
        """See ``interface.Core.copy``. Must be called before the next step is scheduled, too."""
        for source, arrivals in self._arrivals.items():
            future = self.sent_ahead.take((source, arrivals)) or self._send(source, arrivals)
            read = [arrival.request_id for arrival in arrivals if arrival.source]
            if read:
                self._begun += 1
                filled = {name: self._filled[name] for name in read}
                self._copying.append(_Copy(self._begun, filled, future))
        self._arrivals.clear()
        self._filled.clear()

    def _send(self, source: Unit, arrivals: list[instructions.Arrival]) -> "Future[Any]":
        seq, future = self._channel.expect(answers=len(self._unit.engines))
        self._channel.send(self.foretold.carry(seq, source, arrivals))
        return future

    def send_ahead(self, source: Unit, fillings: Mapping[str, Filling]) -> None:
        """Tell V2 runners by now what ``copy`` will tell them of requests that have come.

        Args:
            source: the unit that they come from.
            fillings: what is read of each, in the order in which ``adopt`` takes them.
        """
        arrivals = [self.foretold.arrival(source, *each) for each in fillings.items()]
        self.sent_ahead.note((source, arrivals), self._send(source, arrivals))

    def copied(self) -> list[Copied]:
        """See ``interface.Core.copied``."""
        ended = [copy for copy in self._copying if copy.future.done()]
        self._copying = [copy for copy in self._copying if copy not in ended]
        copied = [copied_by_all(list(copy.filled), copy.future) for copy in ended]
        for copy, result in zip(ended, copied, strict=True):
            if result.problem:
                self._disown(copy, result.problem)
        return copied

    def _disown(self, copy: _Copy, problem: str) -> None:
        """Let nobody use the blocks of a copy that has failed.

        Raises:
            RunnerDied: somebody does, because the blocks are in the prefix cache.
        """
        spoilt = set().union(*copy.filled.values())
        for request_id in self._scheduler.requests.keys() - copy.filled.keys():
            groups = self._scheduler.kv_cache_manager.get_block_ids(request_id)
            if not spoilt.isdisjoint(*groups):
                raise RunnerDied(f"a copy of KV that other requests use has failed: {problem}")
        if self.blocks.are_allotted(spoilt):
            raise RunnerDied(f"a copy of KV that others are to use has failed: {problem}")
        self._scheduler.kv_cache_manager.block_pool.evict_blocks(spoilt)

    @property
    def latest_copy(self) -> int:
        """The number of the copy that was begun last, from 1 on; 0: there was none."""
        return self._begun

    def has_ended(self, copy: int) -> bool:
        """Return whether ``copied`` has returned a copy, and all that were begun before it."""
        return all(copying.number > copy for copying in self._copying)

    @property
    def copies(self) -> int:
        """See ``interface.Core.copies``."""
        return len(self._copying)

    @property
    def unread(self) -> set[str]:
        """Requests with blocks whose KV is not there yet, because members are still to read it."""
        return {*self._filled}.union(*(copy.filled for copy in self._copying))

    # --- all of them ---

    def forget(self, request_ids: Sequence[str]) -> None:
        """Forget requests that are about to be aborted; unknown ids are ignored.

        Whoever keeps the KV of one that is not read yet may use its blocks for something else now.
        """
        forgotten = set(request_ids)
        if forgotten & self._filled.keys():
            # Its blocks may become another request's, which must be read later.
            self.copy()
        evict = self._scheduler.kv_cache_manager.block_pool.evict_blocks
        for copy in self._copying:
            for request_id in forgotten & copy.filled.keys():
                # If the copy fails, that concerns no request that is begun again under this name.
                evict(set(copy.filled.pop(request_id)))
        for request_id in forgotten:
            self._parked.pop(request_id, None)
            self._announced.pop(request_id, None)
            self._replays.pop(request_id, None)
            if (expected := self._expected.pop(request_id, None)) is not None:
                self.blocks.forget(expected)

    @property
    def num_parked(self) -> int:
        """Requests that were exported."""
        return len(self._parked)

    @property
    def num_aside(self) -> int:
        """Requests that wait for their grammar, and are in none of vLLM's queues."""
        return len(self._aside())


def _runs(request: Request | None) -> TypeGuard[Request]:
    """Return whether a request is computed now."""
    if request is None or not request.num_computed_tokens:
        return False
    return request.status is RequestStatus.RUNNING
