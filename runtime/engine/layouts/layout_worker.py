"""The worker of a layout: on a runner, one stock vLLM worker that shares its weights and KV cache.

DP's worker comes first: it owns the weights and allocates the KV buffer. The workers of all other
layouts view both.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

from torch import nn
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.worker_base import WorkerWrapperBase

from shoal.policies.values.layouts import DP, Layout, Unit
from shoal.runtime.engine.groups.communicators import Communicators
from shoal.runtime.engine.kv.kv_cache import BlockMap, SharedKVBuffer
from shoal.runtime.engine.layouts.full_graphs import FullGraphs
from shoal.runtime.engine.layouts.introductions import Introductions
from shoal.runtime.engine.layouts.seeded_sampling import thrown_away_unseeded
from shoal.runtime.engine.layouts.token_table import take_arrays
from shoal.runtime.engine.layouts.told_tokens import ToldTokens, in_stages
from shoal.runtime.engine.link.instructions import LARGEST_FULL_GRAPH, Begun
from shoal.runtime.engine.weights.store import ResidentWeights
from shoal.runtime.engine.weights.view_loader import arrange_weights, owned_bytes
from shoal.runtime.protocol.messages import Mode

Execution = AbstractContextManager[None]
"""How the steps of one mode run: while it is entered, vLLM's worker runs a step in that mode.

It is entered in every step of its mode, one step after the other.
"""


class LayoutWorker:
    """One layout on one runner: its communicators, its stock worker, its block map.

    Args:
        unit: the engines that this runner's engine works with in the layout.
        config: vLLM's configuration of the layout (``engine_config``).
        communicators: the unit's groups.
        buffer: the engine's KV buffer.
        engine: this runner's engine, its rank among those of the node.
        reserved_bytes: memory that the layouts beyond DP will still take.
        agree: from the KV bytes that this engine can hold to those that every engine can hold.
    """

    def __init__(
        self,
        unit: Unit,
        config: VllmConfig,
        communicators: Communicators,
        buffer: SharedKVBuffer,
        engine: int,
        reserved_bytes: int,
        agree: Callable[[int], int],
    ) -> None:
        member = unit.engines.index(engine)
        self.unit = unit
        self.config = config
        self.communicators = communicators
        self.engine = engine
        self.answers = member == unit.layout.answering_member
        """Whether this member returns the tokens of the unit's steps."""
        self.block_map: BlockMap | None = None
        self.executions: dict[Mode, Execution] = {Mode.TP: nullcontext()}
        """How steps run, by mode. vLLM's unchanged worker runs those of ``TP``; code that enables
        other modes adds them here."""
        self.full_graphs: FullGraphs | None = None
        """Full CUDA graphs of the layout's steps with prompts."""
        self.watch_captures: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext
        """Makes of the layout's model a context in which vLLM warms up and captures CUDA graphs."""
        self.introductions = Introductions(self._physical)
        """The requests that are to come to the layout."""
        self.borrowed_bytes = 0
        """Bytes of weights that this process has mapped and that other engines keep."""
        self._buffer = buffer
        self._reserved_bytes = reserved_bytes
        self._agree = agree
        self._is_loaded = False
        self._worker = WorkerWrapperBase(rpc_rank=0, global_rank=member)

    @property
    def layout(self) -> Layout:
        """The layout."""
        return self.unit.layout

    @property
    def model(self) -> nn.Module:
        """The layout's model on this runner."""
        return self._worker.worker.model_runner.get_model()

    @property
    def model_runner(self) -> Any:
        """vLLM's model runner of this layout."""
        return self._worker.worker.model_runner

    @property
    def draft_model(self) -> nn.Module | None:
        """What proposes tokens in the layout, if that is a model of its own."""
        draft: nn.Module | None = self.model_runner.get_draft_model()
        return draft

    @property
    def owned_bytes(self) -> int:
        """Bytes of weights that this layout beyond DP has for itself."""
        return owned_bytes(self.model, self.draft_model)

    def active(self) -> AbstractContextManager[None]:
        """Be in this layout: its groups and workspace are vLLM's current ones."""
        return self.communicators.active()

    def create(self, init_method: str) -> None:
        """Create the stock worker and its model runner's buffers.

        Do this for every layout before any loads: vLLM's worker checks free device memory here.

        Args:
            init_method: a URL whose last part names what this node's workers share.
        """
        with self.communicators.active(starts=True), in_stages(self.config):
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
        take_arrays(self.model_runner)

    def load(self, groups: int) -> None:
        """Load (DP) or view (other layouts) the weights.

        Args:
            groups: of rows that each shard of an MLP consists of.
        """
        with self.active():
            self._worker.load_model()
        self._is_loaded = True
        if self.layout == DP:
            arrange_weights(ResidentWeights(self.model), groups)

    def close(self) -> None:
        """Let go of what torch would keep for ever: a compiled model, and its graphs with it."""
        models = (self.model, self.draft_model) if self._is_loaded else ()
        for module in chain.from_iterable(m.modules() for m in models if m is not None):
            if isinstance(module, TorchCompileWithNoGuardsWrapper):
                module.cleanup()

    def call(
        self, method: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a method of vLLM's worker in this layout (``vllm.v1.serial_utils.run_method``)."""
        if method == "determine_available_memory":
            return self._available_memory()
        if method == LARGEST_FULL_GRAPH:
            return 0 if self.full_graphs is None else self.full_graphs.largest
        captures = method == "compile_or_warm_up_model"
        watched = self.watch_captures(self.model) if captures else nullcontext()
        with self.active(), self._buffer.in_use(), watched:
            result = run_method(self._worker, method, args, kwargs or {})
            if captures and (told := self._told_tokens) is not None:
                told.warm_up(self.model_runner)
        return result

    @property
    def _told_tokens(self) -> ToldTokens | None:
        """Where the V2 model runner of a pipeline's stage learns tokens; None: it is another."""
        told: ToldTokens | None = getattr(self.model_runner, "pp_handler", None)
        return told

    def map_blocks(self, virtual: Sequence[int], physical: Sequence[int]) -> None:
        """Say which blocks of this engine back a group's blocks; others stay as they are."""
        if self.block_map is None:
            self.block_map = BlockMap()
        self.block_map.extend(virtual, physical)

    def _physical(self, blocks: tuple[list[int], ...]) -> tuple[list[int], ...]:
        return blocks if self.block_map is None else self.block_map.of_groups(blocks)

    def execute(
        self, scheduler_output: Any, mode: Mode = Mode.TP, begun: Begun | None = None
    ) -> Any:
        """Run one model step; block ids are virtual in a group (``Worker.execute_model``).

        Args:
            scheduler_output: vLLM's, without the requests that begin and were introduced.
            mode: how the layout runs it.
            begun: those requests, and those that do not come.

        Raises:
            RuntimeError: the layout was not started to run steps of this mode.
        """
        self.introductions.ahead.go_on()
        if begun is not None:
            scheduler_output = self.introductions.complete(scheduler_output, begun)
        if self.block_map is not None:
            scheduler_output = self.block_map.apply(scheduler_output)
        if (told := self._told_tokens) is not None:
            told.tell(scheduler_output.scheduled_cached_reqs, self.model_runner)
        execution = self.executions.get(mode)
        if execution is None:
            raise RuntimeError(f"{self.layout.name} was not started to run steps of mode {mode}")
        if self.full_graphs is not None:
            self.full_graphs.expect(scheduler_output, mode)
        with self.active(), execution:
            return self._worker.execute_model(scheduler_output)

    def sample(self, grammar_output: Any) -> Any:
        """Sample the step that ``execute`` ran (``Worker.sample_tokens``)."""
        with self.active(), thrown_away_unseeded(self.model_runner):
            return self._worker.sample_tokens(grammar_output)

    @property
    def speculates(self) -> bool:
        """Whether each step proposes tokens that the next one checks."""
        return self.config.speculative_config is not None

    def take_drafts(self) -> Any:
        """Return what the sampled step proposes (``Worker.take_draft_token_ids``)."""
        return self._worker.take_draft_token_ids()

    def _available_memory(self) -> int:
        """Return the KV bytes of this layout: the same on every engine and in every layout."""
        if self.layout != DP:
            # With the size fixed, vLLM still runs its profiling step, and compiles in it. But it
            # captures nothing to measure graphs: after that it would drop those of all layouts.
            self.config.cache_config.kv_cache_memory_bytes = self._buffer.num_bytes
        with self.active():
            available: int = run_method(self._worker, "determine_available_memory", (), {})
        if self.layout != DP:
            return self._buffer.num_bytes
        if not self.config.cache_config.kv_cache_memory_bytes:
            if current_platform.is_cuda():
                available -= self._reserved_bytes
            else:
                # Mapped pages count to this process, but they are in other engines' memory.
                available += self.borrowed_bytes
        return self._agree(available)
