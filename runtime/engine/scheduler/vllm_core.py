"""A unit: a stock vLLM ``EngineCore`` driven by Shoal's own loop.

vLLM's ``EngineCore.step_with_batch_queue`` schedules one step and then blocks for an older one.
Here the two halves are apart, so the engine can answer its controller at any moment between them:
those moments are its safe points.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from shoal.policies.values.layouts import Unit
from shoal.runtime.engine.agent.copies_ahead import NO_PREFIXES, Prefixes
from shoal.runtime.engine.agent.results import (
    Adoption,
    Collected,
    Copied,
    CoreLoad,
    CoreOutputs,
    EndedSteps,
)
from shoal.runtime.engine.agent.step_mode import Shift, sp_floor
from shoal.runtime.engine.link import instructions
from shoal.runtime.engine.link.executor import UnitChannel, UnitExecutor
from shoal.runtime.engine.scheduler.beginnings import Beginnings
from shoal.runtime.engine.scheduler.block_holders import holders
from shoal.runtime.engine.scheduler.blocks_ahead import BlocksAhead
from shoal.runtime.engine.scheduler.carried_requests import CarriedRequests
from shoal.runtime.engine.scheduler.grammar_backends import (
    GrammarBackends,
    is_any_ready,
    pending_grammars,
)
from shoal.runtime.engine.scheduler.kv_groups import check_kv_groups, group_limits
from shoal.runtime.engine.scheduler.patience import Patience
from shoal.runtime.engine.scheduler.scheduled_steps import (
    InFlight,
    awaits_tokens,
    can_go_ahead,
    tells_runners,
)
from shoal.runtime.engine.scheduler.sending import Carries, Sending
from shoal.runtime.engine.scheduler.step_sizes import StepSizes, captured_tokens
from shoal.runtime.engine.scheduler.vacated_blocks import VacatedBlocks
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.messages import AheadRequest, CarriedRequest, Mode, Work


class VllmCore:
    """Implements ``interface.Core`` over one ``EngineCore``.

    Args:
        unit: the unit.
        config: the layout's vLLM configuration; the members' runners must be reading this unit's
            queue, because creating the ``EngineCore`` starts their workers.
        log_stats: whether vLLM's scheduler makes statistics.
        max_sp: see ``NodeConfig.max_sp``.

    Raises:
        UnservedKVGroups: see ``check_kv_groups``.
    """

    def __init__(self, unit: Unit, config: VllmConfig, *, log_stats: bool, max_sp: int = 1) -> None:
        self.unit = unit
        self.engine_core = EngineCore(config, UnitExecutor, log_stats)
        self._scheduler: Any = self.engine_core.scheduler
        self._grammar_backends = GrammarBackends(self.engine_core.structured_output_manager)
        check_kv_groups(self._scheduler.kv_cache_config, stages=unit.layout.pp)
        managers = self._scheduler.kv_cache_manager.coordinator.single_type_managers
        self.group_limits = group_limits(managers)
        """See ``messages.LayoutLimits``."""
        self.supported_tasks = self.engine_core.get_supported_tasks()
        # What the first step of a layout does once, such as connecting its members, is done here.
        self.engine_core.execute_dummy_batch()
        self._executor: UnitExecutor = self.engine_core.model_executor
        self._depth = self.engine_core.batch_queue_size
        floor = sp_floor(unit.layout, max_sp, captured_tokens(self.engine_core.vllm_config))
        full = min(self._executor.collective_rpc(instructions.LARGEST_FULL_GRAPH))
        self.shift = Shift(floor, full_graph_tokens=full)
        self.sizes = StepSizes(self._scheduler)
        self._in_flight: deque[InFlight] = deque()
        self._deferred: InFlight | None = None  # its sampling waits for the step before (grammars)
        # The scheduler had nothing to run: asking again is useless until something changes.
        self._stalled = False
        self._patience = Patience()
        self._decoder = MsgpackDecoder(EngineCoreRequest)
        self._encoder = MsgpackEncoder()
        channel = self._executor.channel
        self._beginnings = Beginnings(self._scheduler, channel)
        self._carried = CarriedRequests(unit, self.engine_core, channel, self._physical)
        self._carried.is_seated = self._beginnings.begins_in_its_row
        self._ahead = BlocksAhead(unit, self._scheduler, channel, self._carried)
        self._sending = Sending(
            self._scheduler, self._executor, self.shift, self.sizes, self._carried, self._beginnings
        )
        self._vacated = VacatedBlocks(self._scheduler, channel, self._carried, self._physical)

    def _physical(self, blocks: Sequence[int]) -> dict[int, list[int]]:
        """Return each member's own ids of blocks of this core."""
        return {self.unit.leader: list(blocks)}

    @property
    def block_pool(self) -> Any:
        """The core's ``vllm.v1.core.block_pool.BlockPool``: virtual blocks in a group."""
        return self._scheduler.kv_cache_manager.block_pool

    # --- requests ---

    def add(self, frames: Sequence[Any], tokens: Sequence[int] = (), patience: float = 0.0) -> None:
        """See ``interface.Core.add``."""
        request = self._decoded(frames)
        self._patience.give(request, patience)
        try:
            if tokens:
                self._carried.add(request, tokens)
            else:
                self.engine_core.add_request(request)
            self._ahead.pinned.remember(request)
        except (TypeError, ValueError) as error:
            self._patience.forget([request.request_id])
            raise ValueError(str(error)) from error
        self._stalled = False

    def _decoded(self, frames: Sequence[Any]) -> Request:
        """Return vLLM's request of raw frames; its grammar is being compiled.

        Raises:
            ValueError: it is not valid.
        """
        try:
            request, _ = self.engine_core.preprocess_add_request(self._decoder.decode(frames))
        except (TypeError, ValueError) as error:
            raise ValueError(str(error)) from error
        return request

    def abort(self, request_ids: Sequence[str]) -> None:
        """See ``interface.Core.abort``."""
        for step in self._in_flight:
            step.gone.update(request_ids)
        for book in (self._patience, self._carried, self._ahead, self._beginnings):
            book.forget(request_ids)
        self.engine_core.abort_requests(list(request_ids))
        self._stalled = False

    def withdraw(self, request_ids: Sequence[str]) -> dict[str, list[int]]:
        """See ``interface.Core.withdraw``."""
        known = [self._scheduler.requests.get(request_id) for request_id in request_ids]
        tokens = {r.request_id: list(r.output_token_ids) for r in known if r is not None}
        self.abort(list(tokens))
        return tokens

    # --- requests that are carried ---

    def share_kv(self, shared: bool) -> None:
        """Say whether the members can read other engines' KV. They can unless it is said."""
        self._carried.shares_kv = shared

    def announce(self, request_ids: Sequence[str]) -> list[CarriedRequest]:
        """See ``interface.Core.announce``."""
        return self._carried.announce(request_ids)

    def export(self, request_ids: Sequence[str]) -> list[CarriedRequest]:
        """See ``interface.Core.export``."""
        return self._carried.export(request_ids)

    def keep(self, request_ids: Sequence[str]) -> None:
        """See ``interface.Core.keep``."""
        self._carried.keep(request_ids)
        self._stalled = False

    def expect(self, request_id: str, frames: Sequence[Any]) -> None:
        """See ``interface.Core.expect``."""
        self._carried.expect(request := self._decoded(frames))
        self._beginnings.expect(request)

    def expect_prefix(self, name: str, frames: Sequence[Any]) -> None:
        """See ``interface.Core.expect_prefix``."""
        self._ahead.expect(name, self._decoder.decode(frames), self.engine_core)

    def allot(self, request: CarriedRequest) -> bool:
        """See ``interface.Core.allot``."""
        if not self._carried.allot(request):
            return False
        self._beginnings.seat(request.request_id)
        return True

    def tell_allotted(self, complete: Iterable[tuple[Unit, Sequence[str]]] = ()) -> None:
        """See ``interface.Core.tell_allotted``."""
        self._beginnings.send_seats()
        for carry in complete:
            self._carried.foretold.tell(*carry)

    def adopt(self, source: Unit, request: CarriedRequest, *, with_kv: bool) -> Adoption | None:
        """See ``interface.Core.adopt``."""
        self._stalled = False
        adoption = self._carried.adopt(source, request, with_kv=with_kv)
        if adoption:
            self._ahead.let_go_later(request.request_id)
        return adoption

    def send_first(self, carries: Carries) -> bool:
        """See ``interface.Core.send_first``."""
        return not self._in_flight and self._sending.send_first(carries)

    def copy(self) -> None:
        """See ``interface.Core.copy``."""
        self._carried.copy()

    def copied(self) -> list[Copied]:
        """See ``interface.Core.copied``."""
        copied = self._carried.copied()
        for copy in copied:
            if copy.problem:
                self.abort(copy.request_ids)
        return copied

    @property
    def copies(self) -> int:
        """See ``interface.Core.copies``."""
        return self._carried.copies

    # --- blocks that are copied ahead ---

    def pin(
        self, carry: int, request_ids: Sequence[str], prefixes: Prefixes = NO_PREFIXES
    ) -> list[CarriedRequest]:
        """See ``interface.Core.pin``."""
        return self._ahead.pinned.pin(carry, request_ids, prefixes, self._in_flight)

    def unpin(self, carry: int) -> bool:
        """See ``interface.Core.unpin``."""
        self._stalled = False
        return self._ahead.pinned.unpin(carry)

    def reserve(
        self, carry: int, source: Unit, requests: Sequence[CarriedRequest]
    ) -> list[AheadRequest]:
        """See ``interface.Core.reserve``."""
        return self._ahead.reserve(carry, requests)

    def promise(self, carry: int, request_id: str) -> None:
        """See ``interface.Core.promise``."""
        if self._ahead.promise(carry, request_id):
            self._beginnings.seat(request_id)

    def settle(self, carry: int, *, copied: bool) -> bool:
        """See ``interface.Core.settle``."""
        self._stalled, ended = False, self._ahead.settle(carry, copied=copied)
        self.tell_allotted()
        return ended

    def copy_ahead(
        self, carry: int, source: Unit, target: Unit, requests: Sequence[AheadRequest]
    ) -> None:
        """See ``interface.Core.copy_ahead``."""
        self._ahead.copy(carry, source, target, requests)

    def copied_ahead(self) -> list[tuple[int, Copied]]:
        """See ``interface.Core.copied_ahead``."""
        return self._ahead.copied()

    # --- steps ---

    def collect(self) -> Collected | None:
        """See ``interface.Core.collect``."""
        if not self._oldest_has_ended():
            return None
        collected = Collected([], [], [])
        while self._oldest_has_ended():
            self._collect_one(self._in_flight.popleft(), collected)
            if self.unit.layout.pp > 1:
                # The requests of several steps would be scheduled as one, and stay together: there
                # would be nothing left for the other stages.
                break
        return collected

    def _oldest_has_ended(self) -> bool:
        if not (self._in_flight and self._in_flight[0].future.done()):
            return False
        # If a copy before it has failed on any member, the step may have made wrong tokens.
        return self._carried.has_ended(self._in_flight[0].copy)

    def _collect_one(self, step: InFlight, collected: Collected) -> None:
        step.forget_gone()
        outputs = self._update(step.scheduled, step.future.result())
        self._stalled = False
        if step.scheduled.total_num_scheduled_tokens:
            collected.steps.append(EndedSteps(step.mode, step.done))
        for client_index, client_outputs in outputs.items():
            client_outputs.engine_index = wire.unit_index(self.unit)
            collected.finished.extend(
                output.request_id for output in client_outputs.outputs if output.finished
            )
            encoded = self._encoder.encode(client_outputs)
            collected.outputs.append(CoreOutputs(client_index, encoded))
        # If it was scheduled ahead, an older step, whose tokens it needs, is still in flight.
        if self._deferred is not None and self._in_flight[0] is self._deferred:
            deferred, self._deferred = self._deferred, None
            grammar = self._scheduler.get_grammar_bitmask(deferred.scheduled)
            self._executor.sample_step(deferred.seq, grammar)

    def _update(self, scheduled: SchedulerOutput, result: Any) -> dict[int, Any]:
        """Tell the scheduler what a step has made, and what it proposes for the next."""
        drafted = isinstance(result, instructions.Drafted)
        made = result.output if drafted else result
        outputs: dict[int, Any] = self._scheduler.update_from_output(scheduled, made)
        if drafted and not self._scheduler.scheduler_config.async_scheduling:
            self._scheduler.update_draft_token_ids(result.drafts)
        elif drafted and self._deferred is not None:
            # Its grammars are to judge these drafts; the runners have them already.
            next_step = self._deferred.scheduled
            self._scheduler.update_draft_token_ids_in_output(result.drafts, next_step)
        return outputs

    def dispatch(self) -> bool:
        """See ``interface.Core.dispatch``."""
        return self._dispatch()

    def dispatch_ahead(self) -> bool:
        """See ``interface.Core.dispatch_ahead``.

        For vLLM's scheduler it is a third step in flight, for runners still the second. With many
        requests, scheduling a step takes the host about as long as handling the result of one
        (``Scheduler.update_from_output``, answers). Both together, with what runners prepare, take
        longer than the step takes the device of a wide group.
        """
        return self._can_go_ahead() and self._dispatch(ended=1)

    def _can_go_ahead(self) -> bool:
        if not 1 < len(self._in_flight) == self._depth:
            return False
        return self._oldest_has_ended() and can_go_ahead(self._in_flight, self._scheduler)

    def holders(self, beyond: int) -> list[str]:
        """See ``interface.Core.holders``."""
        return holders(self._scheduler, lambda block: self._is_beyond(block, beyond))

    def _is_beyond(self, block: int, beyond: int) -> bool:
        """Return whether what backs a block of this core has an id above ``beyond``."""
        return block > beyond

    def vacate(self, beyond: int, *, moves: bool) -> int:
        """See ``interface.Core.vacate``."""
        self._stalled = False
        return self._vacated.vacate(lambda block: self._is_beyond(block, beyond), moves=moves)

    @property
    def is_moving(self) -> bool:
        """See ``interface.Core.is_moving``."""
        return self._vacated.is_moving

    @property
    def channel(self) -> UnitChannel:
        """The queues to the runners of the unit's members."""
        return self._executor.channel

    def pause(self) -> None:
        """See ``interface.Core.pause``: nothing to do, steps are queued one by one."""

    def _dispatch(self, ended: int = 0) -> bool:
        if self._deferred or len(self._in_flight) - ended >= self._depth:
            return False
        self._stalled = not self._carried.settle() and self._stalled
        stalled = self._stalled and not is_any_ready(self._scheduler)
        if stalled or not self._scheduler.has_requests():
            return False
        self._carried.copy()
        scheduled = self.sizes.schedule()
        self._patience.end(scheduled, self._scheduler)
        tokens = scheduled.total_num_scheduled_tokens
        if not tokens:
            # Nothing can run before a step in flight ends, blocks come free or a request arrives.
            self._stalled = True
            # A request whose grammar is wrong ends with the output of a step, even an empty one.
            if not tells_runners(scheduled) and not self._scheduler.grammar_compile_error_reqs:
                return False
        sample = not (tokens and awaits_tokens(scheduled))
        grammar = self._scheduler.get_grammar_bitmask(scheduled) if sample and tokens else None
        self._carried.renew(scheduled)
        step = self._sending.send(scheduled, grammar, sample=sample)
        self._in_flight.append(step)
        self._ahead.forget(())  # those that were adopted before this step
        if not sample:
            self._deferred = step
        return True

    @property
    def awaits_grammar(self) -> bool:
        """Whether a request waits for its grammar, which a thread of vLLM compiles.

        The end of compiling sends no message, so somebody has to look.
        """
        return self._carried.num_aside > 0 or any(pending_grammars(self._scheduler))

    @property
    def in_flight(self) -> int:
        """See ``interface.Core.in_flight``."""
        return len(self._in_flight)

    @property
    def oldest_step(self) -> tuple[Mode, Work] | None:
        """See ``interface.Core.oldest_step``."""
        return (self._in_flight[0].mode, self._in_flight[0].work) if self._in_flight else None

    @property
    def num_requests(self) -> int:
        """See ``interface.Core.num_requests``."""
        return len(self._scheduler.requests)

    @property
    def load(self) -> CoreLoad:
        """See ``interface.Core.load``."""
        running, waiting = self._scheduler.get_request_counts()
        waiting += self._carried.num_aside
        done = ((r.num_prompt_tokens, r.num_computed_tokens) for r in self._scheduler.running)
        return CoreLoad.of(running, waiting, int(self.block_pool.get_num_free_blocks()), done)

    def evict_prefix_cache(self) -> None:
        """Forget every cached prefix.

        Works while blocks are lent or held, too; ``BlockPool.reset_prefix_cache`` refuses then.
        """
        self.block_pool.evict_blocks(set(range(self.block_pool.num_gpu_blocks)))

    def close(self) -> None:
        """Free what the core holds beyond memory. Nobody may use it any more.

        It does what ``EngineCore.shutdown`` does, without the effects on the whole process.
        """
        self._grammar_backends.close()
        self._scheduler.shutdown()

    def check_integrity(self) -> list[str]:
        """See ``interface.Core.check_integrity``."""
        queued, parked = self.load.running + self.load.waiting, self._carried.num_parked
        if queued + parked == self.num_requests:
            return []
        return [f"{self._name}: {queued} queued, {parked} exported, {self.num_requests} known"]

    @property
    def _name(self) -> str:
        return f"core {list(self.unit.engines)}"
