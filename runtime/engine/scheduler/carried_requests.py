"""The requests of a core that come from other units, and those that leave it with their KV.

Nothing of vLLM's state is sent. A request is made again of its frames and its outputs, and gets the
state in which vLLM's scheduler keeps a request that was preempted: a preempted one without KV, or
one whose KV came from elsewhere.
"""

import bisect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from msgspec import structs
from vllm.multimodal.utils import strip_covered_mm_data
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreEventType
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request, RequestStatus

from shoal.policies.values.layouts import Unit
from shoal.runtime.engine.agent.interface import Adoption, Copied, RunnerDied
from shoal.runtime.engine.link import instructions
from shoal.runtime.engine.link.executor import UnitChannel, copied_by_all
from shoal.runtime.engine.scheduler.grammar_replay import GrammarReplay
from shoal.runtime.protocol.messages import CarriedRequest, Fallback

PhysicalBlocks = Callable[[Sequence[int]], Mapping[int, list[int]]]
"""Turns block ids of the core into the ids of each member."""


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
        self._physical = physical
        self._parked: dict[str, Request] = {}
        self._expected: dict[str, Request] = {}
        self._replays: dict[str, GrammarReplay] = {}
        # What runners are to be told, by where the KV is; and the blocks that it goes to.
        self._arrivals: dict[Unit, list[instructions.Arrival]] = {}
        self._filled: dict[str, list[int]] = {}
        self._copying: list[_Copy] = []
        self._begun = 0
        self.prefix_of: Callable[[str], Sequence[KVCacheBlock]] = lambda _: ()
        """The blocks of a request's first tokens, if somebody holds them for it."""
        self.shares_kv = True
        """Whether the members can read other engines' KV."""

    # --- requests that leave ---

    def export(self, request_ids: Sequence[str]) -> list[CarriedRequest]:
        """See ``interface.Core.export``."""
        known = self._scheduler.requests
        requests = [known[request_id] for request_id in request_ids if request_id in known]
        self._park(set(requests))
        return [self._describe(request) for request in requests]

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
            self._by_member(self._computed_blocks(request)) if computed else {},
            request.num_tokens,
            stats.num_local_cached_tokens if stats is not None and not tokens else 0,
        )

    def _computed_blocks(self, request: Request) -> Sequence[list[int]]:
        """Return the blocks of its computed tokens, for each group of KV blocks."""
        manager = self._scheduler.kv_cache_manager
        groups: Sequence[list[int]] = manager.get_block_ids_for_computed_tokens(
            request.request_id, request.num_computed_tokens
        )
        return groups

    def _by_member(self, groups: Sequence[list[int]]) -> dict[int, list[list[int]]]:
        mapped = [self._physical(group) for group in groups]
        return {engine: [group[engine] for group in mapped] for engine in self._unit.engines}

    def keep(self, request_ids: Sequence[str]) -> None:
        """See ``interface.Core.keep``."""
        scheduler, asked = self._scheduler, set(request_ids)
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
        tokens = carried.tokens[request.num_output_tokens :]
        if carried.tokens:
            self.add(request, tokens)
        else:
            self._engine_core.add_request(request)

    def _take_with_kv(self, source: Unit, request: Request, carried: CarriedRequest) -> bool:
        # It has its outputs already if there was no room for it before.
        request.append_output_token_ids(carried.tokens[request.num_output_tokens :])
        begin = self._allocate(request, carried.computed)
        if begin is None:
            return False
        request.num_computed_tokens = max(begin, carried.computed)
        self._take(request)
        if not carried.tokens:
            request.prefill_stats.set(request.num_prompt_tokens, carried.cached, 0)
            if self._scheduler.log_stats:
                # Its unit sent no output, so the front end has not heard of this yet.
                request.record_event(EngineCoreEventType.QUEUED)
        # What is in the prefix cache, or outside every window, is not read.
        unneeded, groups = self._unneeded(request), self._computed_blocks(request)
        begin = max(begin, min(unneeded))
        self._filled[request.request_id] = self._filled_blocks(groups, unneeded, begin)
        self._tell(source, self._arrival(request, begin, carried.blocks, self._by_member(groups)))
        return True

    def _unneeded(self, request: Request) -> list[int]:
        """Return for each KV group how many first tokens no later token attends to."""
        computed = request.num_computed_tokens
        return [manager.get_num_skipped_tokens(computed) for manager in self.managers]

    def _allocate(self, request: Request, computed: int) -> int | None:
        """Give a request blocks; return how many tokens its unit had cached, None: no room.

        There are blocks for all its tokens, also those that are not computed yet, and for the
        drafts that its first step may check: a request that waits and holds blocks must be able to
        run, or it would wait for others, and they for it.
        """
        manager = self._scheduler.kv_cache_manager
        cached = len(prefix := self.prefix_of(request.request_id)) * self.block_tokens
        if 0 < cached < request.num_tokens:
            hits = manager.create_kv_cache_blocks((prefix,))
        else:
            hits, cached, _ = manager.get_computed_blocks(request)
        allocated = manager.allocate_slots(
            request,
            0,
            num_new_computed_tokens=cached,
            new_computed_blocks=hits,
            num_lookahead_tokens=self.most_tokens(request) - max(cached, computed),
            num_external_computed_tokens=max(0, computed - cached),
            has_scheduled_reqs=bool(self._scheduler.running),
            # If vLLM zeroes new blocks, it does so with the next step, which comes after the copy.
            skip_zeroing_group_ids=tuple(range(manager.num_kv_cache_groups)),
        )
        return None if allocated is None else int(cached)

    def most_tokens(self, request: Request) -> int:
        """Return the tokens of a request after a step that goes on with it, drafts included.

        vLLM gives such a step as many drafts as any has, though nothing is proposed yet. A draft
        model has KV of the tokens that it proposes then, too.
        """
        scheduler = self._scheduler
        return int(request.num_tokens + scheduler.num_spec_tokens + scheduler.num_lookahead_tokens)

    def _filled_blocks(
        self, groups: Sequence[list[int]], unneeded: Sequence[int], begin: int
    ) -> list[int]:
        """Return the blocks of all KV groups that are to be read into.

        Where a window begins inside a block, the source may not have the block's first tokens any
        more. So nobody else may take the block for complete.
        """
        filled = list[int]()
        for group, first_needed in zip(groups, unneeded, strict=True):
            first, within = divmod(max(begin, first_needed), self.block_tokens)
            blocks = group[first:]
            if within:
                self._block_pool.evict_blocks(set(blocks[:1]))
            filled += blocks
        return filled

    def _arrival(
        self,
        request: Request,
        begin: int = 0,
        source: dict[int, list[list[int]]] | None = None,
        target: dict[int, list[list[int]]] | None = None,
    ) -> instructions.Arrival:
        # A V2 model runner learns the rest from the step that resumes the request.
        learns, mrope = not self._scheduler.use_v2_model_runner, self._scheduler.model_uses_mrope
        uncovered = strip_covered_mm_data(request.mm_features, request.num_computed_tokens, mrope)
        return instructions.Arrival(
            request.request_id,
            list(request.prompt_token_ids or ()) if learns else [],
            list(request.output_token_ids) if learns else [],
            request.num_computed_tokens,
            request.sampling_params if learns else None,
            begin,
            source or {},
            target or {},
            request.lora_request if learns else None,
            uncovered if learns else [],
        )

    def _take(self, request: Request) -> None:
        """Make a request one of the core's, in the state of one that was preempted."""
        scheduler, request_id = self._scheduler, request.request_id
        request.status = RequestStatus.PREEMPTED
        # The front end orders the outputs of several units by this number.
        request.prefill_stats.set(request.num_tokens, 0, 0)
        scheduler.prev_step_scheduled_req_ids.discard(request_id)
        if not scheduler.use_v2_model_runner:
            # It was here before. ``Carry`` replaces what the runners know of it, and they must not
            # forget it afterwards, with the next step.
            scheduler.finished_req_ids.discard(request_id)
        scheduler.requests[request_id] = request
        if request.use_structured_output:
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
            arrival = self._arrival(request, begin=request.num_computed_tokens)  # nothing to read
            self._tell(self._unit, structs.replace(arrival, features=request.mm_features))
        self.copy()

    def copy(self) -> None:
        """See ``interface.Core.copy``. Must be called before the next step is scheduled, too."""
        for source, arrivals in self._arrivals.items():
            seq, future = self._channel.expect(answers=len(self._unit.engines))
            self._channel.send(instructions.Carry(seq, source, arrivals))
            read = [arrival.request_id for arrival in arrivals if arrival.source]
            if read:
                self._begun += 1
                filled = {name: self._filled[name] for name in read}
                self._copying.append(_Copy(self._begun, filled, future))
        self._arrivals.clear()
        self._filled.clear()

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
        self._block_pool.evict_blocks(spoilt)

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
        for copy in self._copying:
            for request_id in forgotten & copy.filled.keys():
                self._block_pool.evict_blocks(set(copy.filled[request_id]))
        for request_id in forgotten:
            self._parked.pop(request_id, None)
            self._expected.pop(request_id, None)
            self._replays.pop(request_id, None)

    @property
    def num_parked(self) -> int:
        """Requests that were exported."""
        return len(self._parked)

    @property
    def num_aside(self) -> int:
        """Requests that wait for their grammar, and are in none of vLLM's queues."""
        return len(self._aside())

    @property
    def _block_pool(self) -> Any:
        return self._scheduler.kv_cache_manager.block_pool

    @property
    def managers(self) -> Sequence[Any]:
        """VLLM's managers of the groups of KV blocks."""
        managers: Sequence[Any] = self._scheduler.kv_cache_manager.coordinator.single_type_managers
        return managers

    @property
    def block_tokens(self) -> int:
        """Tokens of a block, in every group of KV blocks (``check_kv_groups``)."""
        return int(self.managers[0].block_size)
