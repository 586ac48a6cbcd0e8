"""The real engine: vLLM cores in this scheduler process, runners in theirs."""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import msgspec
import zmq
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.v1.engine import (
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    UtilityOutput,
)
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

from shoal.policies.values.layouts import DP, Unit, alone
from shoal.policies.values.level import Level
from shoal.runtime.config import Addresses, NodeConfig
from shoal.runtime.engine.agent.agent import serve
from shoal.runtime.engine.agent.interface import Core
from shoal.runtime.engine.agent.mixed_steps import mixed_limit
from shoal.runtime.engine.layouts.adapters import adapter_requests
from shoal.runtime.engine.layouts.engine_config import engine_config
from shoal.runtime.engine.link import instructions
from shoal.runtime.engine.link.executor import (
    Answers,
    Elsewhere,
    Inbox,
    UnitChannel,
    UnitExecutor,
    channel_sockets,
    in_thread,
)
from shoal.runtime.engine.link.seams import VLLM_VERSION, check_seams
from shoal.runtime.engine.scheduler.vllm_core import VllmCore
from shoal.runtime.engine.scheduler.vllm_group_core import VllmGroupCore
from shoal.runtime.engine.scheduler.vllm_own_core import VllmOwnCore
from shoal.runtime.engine.scheduler.vllm_tier_core import VllmTierCore
from shoal.runtime.protocol.messages import LayoutLimits, Startup

LOAD_TIMEOUT_SECONDS = 1800.0
"""Longest time a runner may take to load before its first answer."""

C = TypeVar("C", bound=VllmCore)
T = TypeVar("T")

GRAMMAR_POLL_SECONDS = 0.005
"""Time between two looks whether a grammar that a request waits for is compiled."""


class VllmBackend:
    """Implements ``interface.EngineBackend`` with vLLM.

    Args:
        node: the node.
        engine: this engine's number.
        incarnation: how often the engine was restarted; if it was, it has no groups at first.
    """

    def __init__(self, node: NodeConfig, engine: int, incarnation: int = 0) -> None:
        check_seams()
        self.engine = engine
        self._node = node
        self._startup_seconds: dict[str, float] = {}
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.linger = 0  # a step for a runner that has ended must not hold this process
        self._addresses = Addresses(node.runtime_dir)
        self._inbox = Inbox(self._context, self._addresses.responses(engine), engine)
        self._log_stats = node.vllm.log_stats
        self._decoder = MsgpackDecoder()
        self._encoder = MsgpackEncoder()
        self._starting: dict[Unit, tuple[Future[VllmGroupCore], Future[None]]] = {}
        self._generations: dict[Unit, int] = {}
        self.own = self._start_own()
        self.num_blocks = self.own.num_blocks
        self._shares_kv = True
        self._tiers: list[VllmTierCore] = []
        self._lead(self._start_groups() if incarnation == 0 else {})
        # The answer comes when the groups that this engine is in, but does not lead, have begun.
        taken, exchanges, weights, self.shares, self.tier_blocks, problem = (
            self._inbox.wait(self._ask_runner(method), LOAD_TIMEOUT_SECONDS)
            for method in (
                instructions.STARTUP_BYTES,
                instructions.SP_EXCHANGES,
                instructions.WEIGHT_BYTES,
                instructions.SHARES,
                instructions.TIER_BLOCKS,
                instructions.SHARES_KV,
            )
        )
        self.startup = Startup(self._startup_seconds, taken, exchanges, weights)
        self._shares_kv = not problem
        if self.tier_blocks:
            self._tiers = [VllmTierCore(engine, self.tier_blocks, self._own_channel)]
        self._lead(self.groups)
        *_, widest = self._stock.values()
        self.ready_response = _ready_response(widest.engine_core.vllm_config)

    def _lead(self, groups: Mapping[Unit, VllmGroupCore]) -> None:
        self.groups = groups
        self._stock: Mapping[Unit, VllmCore] = {self.own.unit: self.own, **groups}
        tiers = {tier.unit: tier for tier in self._tiers}
        self.cores: Mapping[Unit, Core] = {**self._stock, **tiers}
        for core in self._stock.values():
            core.share_kv(self._shares_kv)
        for tier in self._tiers:
            tier.shares_kv = self._shares_kv

    def _start_own(self) -> VllmOwnCore:
        began = time.monotonic()
        self._own_channel = self._open_channel(alone(self.engine))
        # The first answer comes when the runner has loaded its layouts.
        self._startup_seconds |= self._inbox.wait(self._ask_runner(), LOAD_TIMEOUT_SECONDS)
        core = self._start_core(VllmOwnCore, self._own_channel, self._inbox)
        self._startup_seconds[instructions.core_phase(DP)] = time.monotonic() - began
        return core

    def _start_groups(self) -> dict[Unit, VllmGroupCore]:
        """Start the core of every group this engine leads, narrow first, as the runners do."""
        cores: dict[Unit, VllmGroupCore] = {}
        for unit in self._node.units:
            if not unit.is_group or unit.leader != self.engine:
                continue
            began = time.monotonic()
            cores[unit] = self._start_core(VllmGroupCore, self._open_channel(unit), self._inbox)
            self._startup_seconds[instructions.core_phase(unit.layout)] = time.monotonic() - began
        return cores

    def _open_channel(self, unit: Unit) -> UnitChannel:
        generation = self._generations.get(unit, 0)
        sockets = channel_sockets(self._context, self._addresses, unit, generation)
        channel = UnitChannel(unit, sockets)
        self._inbox.add(channel)
        return channel

    def _ask_runner(self, method: str = instructions.STARTUP_PHASES) -> "Future[Any]":
        """Queue a question that this engine's runner answers itself, after all queued before."""
        seq, future = self._own_channel.expect(answers=1)
        self._own_channel.send(instructions.Call(seq, method))
        return future

    def _start_core(self, kind: type[C], channel: UnitChannel, answers: Answers) -> C:
        """Start a unit's core while its members' runners read its queue; then send them back."""
        unit, node = channel.unit, self._node
        config = engine_config(node, unit.layout, UnitExecutor)
        asked = config.model_config.max_model_len
        UnitExecutor.connect(channel, answers)
        try:
            core = kind(unit, config, log_stats=self._log_stats, max_sp=node.max_sp)
            core.sizes.bound(mixed_limit(unit.layout, node.mixed_step_tokens))
        finally:
            channel.send(instructions.Detach(instructions.STARTUP_EPOCH))
        if unit.layout == node.layouts[-1] and not node.vllm.takes_what_fits:
            check_length(unit.name, config.model_config.max_model_len, asked)
        return core

    # --- groups that are formed anew ---

    def form(self, unit: Unit, generation: int) -> "Future[str]":
        """See ``interface.EngineBackend.form``."""
        if unit in self.groups:
            self.groups[unit].close()
        self._lead({u: core for u, core in self.groups.items() if u != unit})
        self._inbox.drop(unit)
        self._generations[unit] = generation
        seq, future = self._own_channel.expect(answers=1)
        self._own_channel.send(instructions.Form(seq, unit.layout, generation))
        return future

    def start(self, unit: Unit) -> "Future[Any]":
        """See ``interface.EngineBackend.start``.

        Starting an ``EngineCore`` means seconds of waiting for runners, so a thread does it.
        """
        seq, ended = self._own_channel.expect(answers=1)
        self._own_channel.send(instructions.Start(seq, unit.layout))
        if unit.leader != self.engine:
            return ended
        started: Future[None] = Future()
        channel = self._open_channel(unit)
        core = in_thread(partial(self._start_core, VllmGroupCore, channel, Elsewhere()))
        self._starting[unit] = (core, started)
        return started

    def _take_started(self) -> None:
        for unit, (core, started) in list(self._starting.items()):
            if not core.done():
                continue
            del self._starting[unit]
            error = core.exception()
            if error is None:
                self._lead({**self.groups, unit: core.result()})
                started.set_result(None)
            else:
                started.set_exception(error)

    @property
    def layouts(self) -> Sequence[LayoutLimits]:
        """Limits of every layout this engine leads a group of."""
        return [
            LayoutLimits(
                layout=unit.layout,
                block_tokens=core.engine_core.vllm_config.cache_config.block_size,
                max_num_seqs=core.engine_core.vllm_config.scheduler_config.max_num_seqs,
                max_model_len=core.engine_core.vllm_config.model_config.max_model_len,
                sp_floor=core.shift.floor,
                group_limits=core.group_limits,
                mixed_tokens=core.sizes.limit,
                full_graph_tokens=core.shift.full_graph_tokens,
            )
            for unit, core in self._stock.items()
        ]

    # --- memory between weights and KV ---

    def fill_weights(self, unit: Unit, blocks: int, level: Level) -> "Future[str]":
        """See ``interface.EngineBackend.fill_weights``."""
        channel = self._stock[unit].channel
        seq, answers = channel.expect(unit.size)
        channel.send(instructions.FillWeights(seq, blocks, level))
        return _of_all(unit, answers, lambda problems: next(filter(None, problems.values()), ""))

    def use_weights(self, unit: Unit, level: Level) -> "Future[dict[int, int]]":
        """See ``interface.EngineBackend.use_weights``."""
        channel = self._stock[unit].channel
        seq, answers = channel.expect(unit.size)
        channel.send(instructions.UseWeights(seq, level))
        return _of_all(unit, answers, lambda weight_bytes: weight_bytes)

    # --- runner ---

    def attach(self, unit: Unit) -> None:
        """See ``interface.EngineBackend.attach``."""
        self._own_channel.send(instructions.Attach(unit.layout))

    def pollables(self) -> Sequence[Any]:
        """See ``interface.EngineBackend.pollables``."""
        return [self._inbox.socket]

    def on_readable(self) -> None:
        """See ``interface.EngineBackend.on_readable``."""
        self._inbox.drain()
        self._take_started()

    def next_wakeup(self) -> float | None:
        """See ``interface.EngineBackend.next_wakeup``: all but grammars sends a message."""
        awaited = any(core.awaits_grammar for core in self._stock.values())
        return GRAMMAR_POLL_SECONDS if awaited else None

    # --- vLLM's utility calls ---

    def utility(self, frames: Sequence[Any]) -> Sequence[Any]:
        """See ``interface.EngineBackend.utility``.

        Only what a stock front end needs; the rest is refused by name.
        """
        _client, call_id, method, args = self._decoder.decode(frames)
        output = UtilityOutput(call_id)
        if method == "get_supported_tasks":
            output.result = UtilityResult(self.own.supported_tasks)
        elif method == "reset_prefix_cache":
            for core in self._stock.values():
                core.evict_prefix_cache()
            output.result = UtilityResult(True)
        elif method == "add_lora" and self._has_adapter(args):
            output.result = UtilityResult(True)  # the runners have loaded it
        elif method in ("is_sleeping", "is_scheduler_paused"):
            output.result = UtilityResult(False)
        elif method == "reset_mm_cache":
            output.result = UtilityResult(None)  # only front ends have one (``prepare``)
        else:
            output.failure_message = f"Shoal does not support the utility call {method!r}"
        encoded: Sequence[Any] = self._encoder.encode(EngineCoreOutputs(utility_output=output))
        return encoded

    def _has_adapter(self, args: Sequence[Any]) -> bool:
        """Return whether an adapter that a front end adds as it starts is one of the node's."""
        added = msgspec.convert(args[0], LoRARequest)
        known = adapter_requests(self._node)
        return (added.lora_int_id, added) in [(each.lora_int_id, each) for each in known]

    def close(self) -> None:
        """See ``interface.EngineBackend.close``."""
        self._context.destroy(linger=0)


def _of_all(
    unit: Unit, answers: "Future[Any]", combine: Callable[[dict[int, Any]], T]
) -> "Future[T]":
    """Return the future of what all members together answer.

    Args:
        unit: the members.
        answers: yields what a channel does (``UnitChannel.expect``).
        combine: from the members' answers to the result.
    """
    result: Future[T] = Future()

    def take(done: "Future[Any]") -> None:
        error = done.exception()
        if error is not None:
            result.set_exception(error)
            return
        values = done.result() if unit.is_group else [done.result()]
        result.set_result(combine(dict(zip(unit.engines, values, strict=True))))

    answers.add_done_callback(take)
    return result


class TooLongError(ValueError):
    """No layout's KV cache holds a request of the length that was asked for."""


def check_length(widest: str, held: int, asked: int) -> None:
    """Refuse to serve less than what was asked for, as vLLM does.

    Args:
        widest: name of the layout that holds most.
        held: tokens of the longest request that it holds.
        asked: tokens that requests may have.

    Raises:
        TooLongError: it holds less.
    """
    if held < asked:
        raise TooLongError(
            f"requests may have {asked} tokens, and the KV cache of {widest}, the widest layout, "
            f"holds {held}: give a smaller --max-model-len (-1: what fits) or more memory "
            "(--gpu-memory-utilization, --kv-cache-memory-bytes)"
        )


def _ready_response(config: VllmConfig) -> bytes:
    """Return what ``EngineCoreProc._make_ready_response`` would for the widest layout."""
    parallel, scheduler, cache = (
        config.parallel_config,
        config.scheduler_config,
        config.cache_config,
    )
    response = EngineCoreReadyResponse(
        max_model_len=config.model_config.max_model_len,
        num_gpu_blocks=cache.num_gpu_blocks or 0,
        block_size=cache.block_size,
        dp_stats_address=None,
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        vllm_version=VLLM_VERSION,
        world_size=parallel.world_size,
        data_parallel_size=1,
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        data_parallel_rank=0,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        instance_id=config.instance_id,
        supports_lora=config.lora_config is not None,
        max_loras=config.lora_config.max_loras if config.lora_config else 0,
        effective_attention_block_size=cache.effective_attention_block_size,
    )
    return msgspec.msgpack.encode(response)


def run_scheduler(node: NodeConfig, engine: int, incarnation: int = 0) -> None:
    """Process entry: start the cores with the runners, then serve the controller."""
    # vLLM makes tensors of the bytes of a message, which it only reads.
    warnings.filterwarnings("ignore", category=UserWarning, message="The given buffer is not writ")
    backend = VllmBackend(node, engine, incarnation)
    serve(backend, node, incarnation, backend.startup)
