"""A layout: one vLLM configuration, and on a runner one stock worker that shares weights and KV.

The DP layout comes first: it owns the weights and allocates the KV buffer; every other layout views
both. A layout is known by its degree (the number of engines that form one instance in it).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.worker_base import WorkerWrapperBase

from shoal.policies.values.layouts import tensor_parallel
from shoal.runtime.config import LayoutConfigs, NodeConfig
from shoal.runtime.engine.groups.communicators import Communicators, SpGroups, size_of
from shoal.runtime.engine.groups.peer_memory import SymmetricMemory, needed_words
from shoal.runtime.engine.kv.kv_cache import BlockMap, SharedKVBuffer
from shoal.runtime.engine.layouts.seeded_sampling import thrown_away_unseeded
from shoal.runtime.engine.sequence.capture_sizes import capture_also
from shoal.runtime.engine.sequence.head_exchange import HeadExchange
from shoal.runtime.engine.sequence.peer_exchange import PeerExchange, exchange_memory
from shoal.runtime.engine.sequence.piecewise_graphs import CapturedSteps, largest_share
from shoal.runtime.engine.sequence.ulysses import (
    SequenceParallelModel,
    exchanged_bytes,
    exchanged_layers,
)
from shoal.runtime.engine.weights.shared_weights import (
    VIEW_LOAD_FORMAT,
    WEIGHT_SCHEME,
    SharedWeights,
    group_gate_up,
)
from shoal.runtime.layout_configs import take
from shoal.runtime.protocol.messages import Mode

LAYOUT_BYTES, CONNECTED_LAYOUT_BYTES = 1_400 << 20, 800 << 20
"""GPU memory kept free of KV for each layout beyond DP: its graphs and workspaces, and NCCL's
buffers unless its members are connected before vLLM measures. On H200s with the 8B Llama shape a
layout took 1.4 GiB, and a connected one 0.75 GiB (TP2 alone) and 0.5 GiB (TP2 and TP4)."""

LARGER_CAPTURES_BYTES = 256 << 20
"""GPU memory kept free of KV for the larger graphs (``capture_sizes.py``) of each layout beyond DP
that has such; DP's vLLM measures. Not measured: vLLM's own 86 graphs of a layout took 0.36 GiB."""

NO_SHARE = 1e-9
"""The least share of a device's memory that vLLM's configuration takes."""


def layout_config(node: NodeConfig, degree: int, executor_class: type) -> VllmConfig:
    """Return the configuration of the TP-``degree`` layout with what engines add to vLLM's.

    Args:
        node: its ``vllm`` has the node's configurations.
        degree: of the layout; 1 is DP.
        executor_class: what carries vLLM's calls to the runners.

    Raises:
        ConfigurationDiffersError: see ``layout_configs.take``.
    """
    configs: LayoutConfigs = node.vllm
    config = take(configs, degree)
    config.parallel_config.distributed_executor_backend = executor_class
    config.load_config.use_tqdm_on_load = False
    config.additional_config = {
        **config.additional_config,
        "shoal_weights": f"{WEIGHT_SCHEME},groups={node.max_group}",
    }
    config.quant_config = SharedWeights(views=degree > 1, inner=config.quant_config)
    # A layout that cannot hold the asked length serves what it can (see ``vllm_backend``).
    config.model_config.original_max_model_len = -1
    if current_platform.is_cpu():
        # The platform turns it off because its own executors gain nothing; ours supports it.
        config.scheduler_config.async_scheduling = configs.asynchronous_on_cpu
    if degree > 1:
        config.load_config.load_format = VIEW_LOAD_FORMAT
        # A worker wants its share of the device's memory to be free; DP has taken that for all.
        config.cache_config.gpu_memory_utilization = NO_SHARE
    return config


_AS_IT_IS = nullcontext()


class _Instead:
    """While entered, a model runner has another model."""

    __slots__ = ("_model", "_own", "_runner")

    def __init__(self, runner: Any, model: SequenceParallelModel) -> None:
        self._runner, self._model, self._own = runner, model, runner.model

    def __enter__(self) -> None:
        self._runner.model = self._model

    def __exit__(self, *_: object) -> None:
        self._runner.model = self._own


class LayoutWorker:
    """One layout on one runner: its communicators, its stock worker, its block map.

    Args:
        config: vLLM's configuration of the layout.
        communicators: the layout's groups.
        buffer: the engine's KV buffer.
        engine: this runner's engine, its rank among those of the node.
        reserved_bytes: memory that the layouts beyond DP will still take.
        agree: from the KV bytes that this engine can hold to those that every engine can.
        captures: what is to be known of the graphs of its model.
    """

    def __init__(
        self,
        config: VllmConfig,
        communicators: Communicators,
        buffer: SharedKVBuffer,
        engine: int,
        reserved_bytes: int,
        agree: Callable[[int], int],
        captures: CapturedSteps,
    ) -> None:
        self.config = config
        self.degree: int = config.parallel_config.tensor_parallel_size
        self.engine = engine
        self.block_map: BlockMap | None = None
        self._communicators = communicators
        self._buffer = buffer
        self._reserved_bytes = reserved_bytes
        self._agree = agree
        self._is_loaded = False
        self.unit = tensor_parallel(communicators.group)
        """The unit that this runner belongs to in this layout."""
        self._worker = WorkerWrapperBase(rpc_rank=0, global_rank=communicators.group.index(engine))
        self._by_sequence: SequenceParallelModel | None = None
        self.captures = captures
        """What graphs there are of its model."""

    @property
    def model(self) -> nn.Module:
        """The layout's model on this runner."""
        return self._worker.worker.model_runner.get_model()

    @property
    def model_runner(self) -> Any:
        """vLLM's model runner of this layout."""
        return self._worker.worker.model_runner

    def active(self) -> AbstractContextManager[None]:
        """Be in this layout: its groups and workspace are vLLM's current ones."""
        return self._communicators.active()

    def create_worker(self, init_method: str) -> None:
        """Create the stock worker and its runner's buffers.

        For every layout before any loads: vLLM's worker checks the device's free memory here.

        Args:
            init_method: a URL whose last part names what this node's workers share.
        """
        with self._communicators.active(starts=True):
            self._worker.init_worker(
                all_kwargs=[
                    {
                        "vllm_config": self.config,
                        "local_rank": self.engine,
                        "rank": self.engine,
                        "distributed_init_method": init_method,
                        "is_driver_worker": True,
                    }
                ]
            )
            self._worker.init_device()
        if self.captures.larger:
            capture_also(self.model_runner, self.captures.larger)

    def load(self, groups: int) -> None:
        """Load (DP) or view (other layouts) the weights.

        Args:
            groups: size of the node's largest group.
        """
        with self.active():
            self._worker.load_model()
        self._is_loaded = True
        if self.degree == 1:
            group_gate_up(self.model, groups)

    def close(self) -> None:
        """Let go of what torch would keep for ever: a compiled model, and its graphs with it."""
        for module in self.model.modules() if self._is_loaded else ():
            if isinstance(module, TorchCompileWithNoGuardsWrapper):
                module.cleanup()

    def enable_sp(
        self, base: "LayoutWorker", groups: SpGroups, *, by_peers: bool, tried: bool, required: bool
    ) -> bool:
        """Let steps of this layout run by sequence. Collective over its group.

        Args:
            base: the layout whose model runs then; both are loaded.
            groups: in which this member exchanges.
            by_peers: whether that is through the members' memory, if it can be shared.
            tried: whether it could not for a narrower layout.
            required: whether it has to be.

        Returns:
            Whether it is through the members' memory.

        Raises:
            NotSharedError: it cannot, and it has to be.
            UnexchangeableAttention: the layers' heads do not fit the groups.
        """
        memory = None
        if by_peers:
            memory = self._peer_memory(base, groups, tried=tried, required=required)
        exchange = HeadExchange(groups) if memory is None else PeerExchange(groups, memory)
        layers = exchanged_layers(self.config, base.config, exchange)
        # Connecting takes memory, which vLLM's profiling then finds in use.
        exchange.connect(next(self.model.parameters()).device)
        self._by_sequence = SequenceParallelModel(
            self.model, base.model, base.active, exchange, layers, base.captures
        )
        return memory is not None

    def _peer_memory(
        self, base: "LayoutWorker", groups: SpGroups, *, tried: bool, required: bool
    ) -> SymmetricMemory | None:
        members = tuple(torch.distributed.get_process_group_ranks(groups.sp))
        tokens = largest_share(base.config, len(members), base.captures.larger)
        bytes_of_token = exchanged_bytes(base.config, size_of(groups.within))
        return exchange_memory(
            self._communicators.finding_group(members),
            needed_words(tokens, bytes_of_token),
            next(self.model.parameters()).device,
            tried=tried,
            required=required,
        )

    def call(
        self, method: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a worker method in this layout (``vllm.v1.serial_utils.run_method``)."""
        if method == "determine_available_memory":
            return self._available_memory()
        records = self.captures.wanted and method == "compile_or_warm_up_model"
        recorded = self.captures.recorded(self.model) if records else nullcontext()
        with self.active(), self._buffer.in_use(), recorded:
            return run_method(self._worker, method, args, kwargs or {})

    def execute(self, scheduler_output: Any, mode: Mode = Mode.TP) -> Any:
        """Run one model step; block ids are virtual in a group (``Worker.execute_model``)."""
        if self.block_map is not None:
            scheduler_output = self.block_map.apply(scheduler_output)
        with self.active(), self._in_mode(mode):
            return self._worker.execute_model(scheduler_output)

    def _in_mode(self, mode: Mode) -> AbstractContextManager[None]:
        """Let vLLM's model runner find the model that runs a step in ``mode``."""
        if mode is Mode.TP:
            return _AS_IT_IS
        if self._by_sequence is None:
            raise RuntimeError(f"TP-{self.degree} was not started to run steps by sequence")
        return _Instead(self.model_runner, self._by_sequence)

    def sample(self, grammar_output: Any) -> Any:
        """Sample the step that ``execute`` ran (``Worker.sample_tokens``)."""
        with self.active(), thrown_away_unseeded(self.model_runner):
            return self._worker.sample_tokens(grammar_output)

    def _available_memory(self) -> int:
        """Return the KV bytes of this layout: the same on every engine and in every layout."""
        if self.degree > 1:
            # vLLM still runs its profiling step (and compiles in it) with the size fixed. But it
            # captures nothing to measure graphs, after which it would drop those of all layouts.
            self.config.cache_config.kv_cache_memory_bytes = self._buffer.num_bytes
        with self.active():
            available: int = run_method(self._worker, "determine_available_memory", (), {})
        if self.degree > 1:
            return self._buffer.num_bytes
        if current_platform.is_cuda() and not self.config.cache_config.kv_cache_memory_bytes:
            available -= self._reserved_bytes
        return self._agree(available)
