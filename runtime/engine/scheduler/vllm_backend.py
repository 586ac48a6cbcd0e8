"""The real engine: vLLM cores in this scheduler process, runners in theirs."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from operator import attrgetter
from typing import Any

import msgspec
import zmq
from vllm.config import VllmConfig
from vllm.v1.engine import (
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    UtilityOutput,
)
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

from shoal.policies.values.layouts import DP, Layout, Unit, alone, unit_of
from shoal.runtime.config import Addresses, NodeConfig
from shoal.runtime.engine.agent.agent import Agent
from shoal.runtime.engine.agent.interface import CoreOutputs
from shoal.runtime.engine.agent.watchdog import StepWatch
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
from shoal.runtime.protocol.messages import LayoutLimits, Startup
from shoal.runtime.protocol.transport import ZmqAgentTransport

LOAD_TIMEOUT_SECONDS = 1800.0
"""Longest time a runner may take to load before its first answer."""

GRAMMAR_POLL_SECONDS = 0.005
"""How often to look whether a grammar is compiled that a request waits for."""


class VllmBackend:
    """Implements ``interface.EngineBackend`` with vLLM.

    Args:
        node: the node.
        engine: this engine's number.
        incarnation: how often the engine was restarted; then its groups are not there at first.
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
        self._own_channel: UnitChannel
        self._lent: dict[int, Any] = {}
        self._decoder = MsgpackDecoder()
        self._encoder = MsgpackEncoder()
        self._starting: dict[Unit, tuple[Future[VllmCore], Future[None]]] = {}
        self._generations: dict[Unit, int] = {}
        self._cores = self._start_cores(node.layouts if incarnation == 0 else (DP,))
        # Answered when the groups of which this engine is a member, and not the leader, have begun.
        taken = self._inbox.wait(self._ask_runner(instructions.STARTUP_BYTES), LOAD_TIMEOUT_SECONDS)
        self.startup = Startup(self._startup_seconds, taken)
        self._single = self._cores[alone(engine)]
        self.num_blocks = int(self._single.block_pool.num_gpu_blocks) - 1
        widest = max(self._cores, key=attrgetter("size"))
        self.ready_response = _ready_response(self._cores[widest].engine_core.vllm_config)

    def _start_cores(self, layouts: Sequence[Layout]) -> dict[Unit, VllmCore]:
        """Start the core of every unit this engine leads, narrow first, as the runners do."""
        cores: dict[Unit, VllmCore] = {}
        for layout in layouts:
            unit = unit_of(self.engine, layout)
            if unit.leader != self.engine:
                continue
            start = time.monotonic()
            channel = self._open_channel(unit)
            if layout == DP:
                self._own_channel = channel
                # The first answer comes when the runner has loaded its layouts.
                self._startup_seconds |= self._inbox.wait(self._ask_runner(), LOAD_TIMEOUT_SECONDS)
            cores[unit] = self._start_core(channel, self._inbox)
            self._startup_seconds[instructions.core_phase(layout)] = time.monotonic() - start
        return cores

    def _open_channel(self, unit: Unit) -> UnitChannel:
        generation = self._generations.get(unit, 0)
        sockets = channel_sockets(self._context, self._addresses, unit, generation)
        channel = UnitChannel(unit, sockets)
        self._inbox.add(channel)
        return channel

    def _ask_runner(self, method: str = instructions.STARTUP_PHASES) -> "Future[Any]":
        """Ask this engine's runner what it answers itself, after all that it was told before."""
        seq, future = self._own_channel.expect(answers=1)
        self._own_channel.send(instructions.Call(seq, method))
        return future

    def _start_core(self, channel: UnitChannel, answers: Answers) -> VllmCore:
        """Start a unit's core while its members' runners read its queue; send them back."""
        unit, node = channel.unit, self._node
        config = engine_config(node, unit.layout, UnitExecutor)
        asked = config.model_config.max_model_len
        UnitExecutor.connect(channel, answers)
        try:
            core = VllmCore(unit, config, log_stats=self._log_stats, max_sp=node.max_sp)
        finally:
            channel.send(instructions.Detach(instructions.STARTUP_EPOCH))
        if unit.layout == node.layouts[-1] and not node.vllm.takes_what_fits:
            check_length(unit.name, config.model_config.max_model_len, asked)
        return core

    # --- groups that are formed anew ---

    def form(self, unit: Unit, generation: int) -> "Future[str]":
        """See ``interface.EngineBackend.form``."""
        former = self._cores.pop(unit, None)
        if former is not None:
            former.close()
        self._inbox.drop(unit)
        self._generations[unit] = generation
        seq, future = self._own_channel.expect(answers=1)
        self._own_channel.send(instructions.Form(seq, unit.layout, generation))
        return future

    def start(self, unit: Unit) -> "Future[Any]":
        """See ``interface.EngineBackend.start``.

        An ``EngineCore`` is seconds of waiting for runners: it starts in a thread of its own.
        """
        self.attach(unit, instructions.STARTUP_EPOCH)
        if unit.leader != self.engine:
            return self._ask_runner()
        started: Future[None] = Future()
        core = in_thread(partial(self._start_core, self._open_channel(unit), Elsewhere()))
        self._starting[unit] = (core, started)
        return started

    def _take_started(self) -> None:
        for unit, (core, started) in list(self._starting.items()):
            if not core.done():
                continue
            del self._starting[unit]
            error = core.exception()
            if error is None:
                self._cores[unit] = core.result()
                started.set_result(None)
            else:
                started.set_exception(error)

    @property
    def layouts(self) -> Sequence[LayoutLimits]:
        """Limits of every layout this engine leads a group of."""
        return [
            LayoutLimits(
                layout=group.layout,
                block_tokens=core.engine_core.vllm_config.cache_config.block_size,
                max_num_seqs=core.engine_core.vllm_config.scheduler_config.max_num_seqs,
                max_model_len=core.engine_core.vllm_config.model_config.max_model_len,
                sp_floor=core.shift.floor,
            )
            for group, core in self._cores.items()
        ]

    def core(self, group: Unit) -> VllmCore:
        """See ``interface.EngineBackend.core``."""
        return self._cores[group]

    @property
    def cores(self) -> Mapping[Unit, VllmCore]:
        """See ``interface.EngineBackend.cores``."""
        return self._cores

    # --- lending ---

    def lend(self, blocks: int, *, urgent: bool = False) -> list[int]:
        """See ``interface.EngineBackend.lend``."""
        pool = self._single.block_pool
        while urgent and pool.get_num_free_blocks() < blocks and not self._single.in_flight:
            if not self._single.preempt_last():
                break
        taken = pool.get_new_blocks(min(blocks, pool.get_num_free_blocks()))
        self._lent.update((block.block_id, block) for block in taken)
        return [block.block_id for block in taken]

    def take_back(self, blocks: Sequence[int]) -> None:
        """See ``interface.EngineBackend.take_back``."""
        self._single.block_pool.free_blocks([self._lent.pop(block) for block in blocks])
        self._single.wake()

    @property
    def lent(self) -> frozenset[int]:
        """See ``interface.EngineBackend.lent``."""
        return frozenset(self._lent)

    # --- runner ---

    def attach(self, unit: Unit, epoch: int, *, interleaves: bool = False) -> None:
        """See ``interface.EngineBackend.attach``."""
        self._own_channel.send(instructions.Attach(unit.layout, epoch, interleaves))

    def await_detach(self, epoch: int) -> None:
        """See ``interface.EngineBackend.await_detach``."""
        self._own_channel.send(instructions.AwaitDetach(epoch))

    def pollables(self) -> Sequence[Any]:
        """See ``interface.EngineBackend.pollables``."""
        return [self._inbox.socket]

    def on_readable(self) -> None:
        """See ``interface.EngineBackend.on_readable``."""
        self._inbox.drain()
        self._take_started()

    def next_wakeup(self) -> float | None:
        """See ``interface.EngineBackend.next_wakeup``: all but grammars arrives as a message."""
        awaited = any(core.awaits_grammar for core in self._cores.values())
        return GRAMMAR_POLL_SECONDS if awaited else None

    # --- vLLM's utility calls ---

    def utility(self, frames: Sequence[Any], *, answer: bool) -> CoreOutputs | None:
        """See ``interface.EngineBackend.utility``.

        Only what a stock front end needs of a text-only engine; the rest is refused by name.
        """
        client_index, call_id, method, _ = self._decoder.decode(frames)
        output = UtilityOutput(call_id)
        if method == "get_supported_tasks":
            output.result = UtilityResult(self._single.supported_tasks)
        elif method == "reset_prefix_cache":
            for core in self._cores.values():
                core.evict_prefix_cache()
            output.result = UtilityResult(True)
        elif method in ("is_sleeping", "is_scheduler_paused"):
            output.result = UtilityResult(False)
        elif method in ("reset_mm_cache", "reset_encoder_cache"):
            output.result = UtilityResult(None)  # there are none: multimodal models are refused
        else:
            output.failure_message = f"Shoal does not support the utility call {method!r}"
        if not answer:
            return None
        encoded = self._encoder.encode(EngineCoreOutputs(utility_output=output))
        return CoreOutputs(client_index, encoded)

    # --- books ---

    def check_integrity(self) -> list[str]:
        """See ``interface.EngineBackend.check_integrity``."""
        problems = [line for core in self._cores.values() for line in core.check_integrity()]
        pool = self._single.block_pool
        if self._single.num_requests == 0:
            accounted = pool.get_num_free_blocks() + len(self._lent)
            if accounted != self.num_blocks:
                problems.append(
                    f"engine {self.engine}: {accounted} blocks free or lent, "
                    f"expected {self.num_blocks}"
                )
        unheld = [block_id for block_id, block in self._lent.items() if block.ref_cnt != 1]
        if unheld:
            problems.append(f"engine {self.engine}: lent blocks not held once: {unheld[:8]}")
        return problems

    def close(self) -> None:
        """See ``interface.EngineBackend.close``."""
        self._context.destroy(linger=0)


class TooLongError(ValueError):
    """No layout's KV cache holds a request of the length that was asked for."""


def check_length(widest: str, held: int, asked: int) -> None:
    """Refuse to serve less than what was asked for, as vLLM does.

    Args:
        widest: name of the layout that holds most.
        held: tokens of the longest request that it holds.
        asked: those that requests may have.

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
        supports_lora=False,
        max_loras=0,
        effective_attention_block_size=cache.effective_attention_block_size,
    )
    return msgspec.msgpack.encode(response)


def run_scheduler(node: NodeConfig, engine: int, incarnation: int = 0) -> None:
    """Process entry: start the cores with the runners, then serve the controller."""
    backend = VllmBackend(node, engine, incarnation)
    transport = ZmqAgentTransport(
        engine,
        Addresses(node.runtime_dir),
        node.api_servers,
        backend.pollables(),
        incarnation=incarnation,
    )
    timeout = node.step_timeout_seconds if node.recording_dir is None else None
    watch = None if timeout is None else StepWatch(timeout)
    Agent(backend, transport, startup=backend.startup, watch=watch).run()
