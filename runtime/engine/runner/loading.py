"""Makes the workers of an engine's layouts: all at the start, and one anew after a death."""

import gc
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader import get_model_loader
from vllm.platforms import current_platform

from shoal.policies.values.layouts import DP, Layout, unit_of
from shoal.runtime.config import NodeConfig
from shoal.runtime.engine.groups.communicators import Communicators, join_node
from shoal.runtime.engine.groups.head_order import head_shard
from shoal.runtime.engine.groups.rendezvous import (
    LOAD_SECONDS,
    REJOIN_SECONDS,
    Rendezvous,
    agreed_minimum,
)
from shoal.runtime.engine.kv.kv_cache import SharedKVBuffer
from shoal.runtime.engine.kv.kv_lender import KvLender
from shoal.runtime.engine.layouts.adapters import load_adapters
from shoal.runtime.engine.layouts.encoder_cache import encoder_cache_bytes
from shoal.runtime.engine.layouts.engine_config import (
    engine_config,
    shares_attention,
    shares_vocabulary,
)
from shoal.runtime.engine.layouts.full_graphs import add_full_graphs
from shoal.runtime.engine.layouts.layout_worker import LayoutWorker
from shoal.runtime.engine.layouts.streamed_graphs import can_have_graphs, capture_streamed
from shoal.runtime.engine.link.executor import UnitExecutor
from shoal.runtime.engine.runner.device_memory import MemoryPhases, leave_in_use
from shoal.runtime.engine.runner.interludes import Interludes
from shoal.runtime.engine.sequence.enabling import SequenceParallelism
from shoal.runtime.engine.sequence.sequence_plan import SequencePlan
from shoal.runtime.engine.weights.sharing.devices import check_reach, memory_and_copier, pages_on
from shoal.runtime.engine.weights.sharing.nested_order import Heads
from shoal.runtime.engine.weights.sharing.shared_layers import SharedLayers
from shoal.runtime.engine.weights.sharing.shared_store import SharedStore
from shoal.runtime.engine.weights.sharing.shared_weight import Degree
from shoal.runtime.engine.weights.sharing.slots import WeightSlots
from shoal.runtime.engine.weights.store import ResidentWeights
from shoal.runtime.engine.weights.view_loader import register_view_loader

log = logging.getLogger("shoal.engine")

LAYOUT_BYTES, CONNECTED_LAYOUT_BYTES = 1_400 << 20, 800 << 20
"""GPU memory kept free of KV for each layout beyond DP: its graphs and workspaces, and NCCL's
buffers unless its members are connected before vLLM measures. On H200s with the 8B Llama shape a
layout took 1.4 GiB, and a connected one 0.75 GiB (TP2 alone) and 0.5 GiB (TP2 and TP4)."""


class LayoutLoader:
    """The workers of one engine's layouts, as far as they are made.

    Args:
        node: the node's configuration.
        engine: this engine.
    """

    def __init__(self, node: NodeConfig, engine: int) -> None:
        self.workers: dict[Layout, LayoutWorker] = {}
        """Workers by layout, in the node's order: narrow ones first."""
        self.phases: dict[str, float] = {}
        """Seconds that each phase of the start took."""
        self.memory = MemoryPhases()
        """Bytes of the device that each phase took."""
        self._plan = SequencePlan(
            node.layouts, node.max_sp, sizes_are_chosen=node.vllm.sizes_are_chosen
        )
        self.by_sequence = SequenceParallelism(self._plan)
        self._node = node
        self._engine = engine
        self._directory = Path(node.runtime_dir)
        self._dp: VllmConfig
        self.shared: SharedLayers | None = None
        """The layers of which this engine keeps a part only; None: it keeps all weights."""
        self.lender: KvLender | None = None
        """Lends memory of KV to these layers."""
        if node.share_weights > 1:
            device = torch.device(current_platform.device_type, engine)
            memory, copier = memory_and_copier(f"{self._directory.name}-weights", device)
            degree = Degree(node.share_weights, node.weight_groups)
            slots, pages = WeightSlots(copier), pages_on(device)
            self.shared = SharedLayers(engine, degree, self._directory, memory, slots, pages)
            self.lender = KvLender(engine, pages, self.shared.kept.descriptors, self.shared.whole)
        self.buffer = SharedKVBuffer(f"{self._directory.name}-kv", self.lender)
        register_view_loader(
            lambda: self.store,
            lambda rank, layout: head_shard(rank, layout.tp, node.max_sp),
            lambda: get_model_loader(self._dp.load_config),
            node.whole_experts,
        )

    @property
    def store(self) -> ResidentWeights:
        """The full weights; DP's model is there."""
        model = self.workers[DP].model
        return ResidentWeights(model) if self.shared is None else SharedStore(model, self.shared)

    def load(self, layouts: Sequence[Layout]) -> None:
        """Make the workers of these layouts, DP's first. Collective over the unit of each."""
        if current_platform.is_cuda():
            torch.cuda.set_device(self._engine)
            check_reach(self._engine, self._node.share_weights)
        self.memory.begin()
        with self._timed("communicators"):
            join_node(self._engine, self._node.engines)
            self._dp = engine_config(self._node, DP, UnitExecutor)
            if self.shared is not None:
                self.shared.heads = self._shared_heads
                self.shared.shares_vocabulary = shares_vocabulary(self._node, self._dp)
                self.shared.has_adapters = self._dp.lora_config is not None
                self._dp.quant_config.shared = self.shared.method
                if self.shared.kept.is_kept():
                    leave_in_use(self._dp.cache_config)
            if current_platform.is_cpu() and self._dp.model_config.enforce_eager:
                # vLLM compiles some small functions all the same, and a machine that serves eagerly
                # on CPUs may have no C++ compiler.
                torch.compiler.set_stance("force_eager")
            for layout in layouts:
                self._meet(layout, self._rendezvous(layout, 0, LOAD_SECONDS))
        with self._timed("workers"):
            for layout in layouts:
                self._create(layout)
        for layout in layouts:
            with self._timed("weights" if layout == DP else f"{layout.name} views"):
                self._load_weights(layout)
                self.by_sequence.enable(self.workers[layout], self.workers)
        self._say_what_is_owned()

    @property
    def _shared_heads(self) -> Heads | None:
        """What engines share of attention; None: each has all of it."""
        if not shares_attention(self._node, self._dp):
            return None
        kv_heads = self._dp.model_config.get_total_num_kv_heads()
        return Heads(kv_heads, partial(head_shard, max_sp=self._node.max_sp))

    def _say_what_is_owned(self) -> None:
        """Say what layouts beyond DP have loaded themselves.

        Neither this nor their slots for adapters need to be kept from KV: vLLM counts them when it
        measures DP, as they came to the device after DP's worker had been created
        (``memory_profiling``, ``total_consumed``).
        """
        beside = [worker for layout, worker in self.workers.items() if layout != DP]
        owned = {worker.layout.name: worker.owned_bytes for worker in beside}
        if any(owned.values()):
            log.info(
                "engine %d keeps weights of its own for layouts beyond DP, which are no views of "
                "DP's: %s; there is so much less memory for KV",
                self._engine,
                ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in owned.items()),
            )

    def remake(self, layout: Layout, generation: int, interludes: Interludes) -> None:
        """Make a layout's worker anew, whatever is left of the former. Collective over its unit.

        Its communicators, the stock worker and what vLLM compiles and captures for both are made
        again, as at the start; the weights and the KV cache, which are DP's, stay.

        Args:
            layout: the layout, which is not DP.
            generation: how often its unit was made before.
            interludes: held between the parts of this; they go on until the core has started.

        Raises:
            Exception: the worker could not be made; the layout has none then.
        """
        try:
            rendezvous = self._rendezvous(layout, generation, REJOIN_SECONDS)
            interludes.begin(rendezvous, f"engine {self._engine} forms {layout.name}")
            for portion in self._drop(layout):
                interludes.hold(portion)
            for portion in self._make(layout, rendezvous):
                interludes.hold(portion)
            # The start of the core drops them again, but an error here costs only the group.
            load_adapters(self._node, self.workers[layout])
        except Exception:
            # The error still refers to the worker: a collection after that frees it.
            deque(self._drop(layout, freeze=False), maxlen=0)
            raise

    def _make(self, layout: Layout, rendezvous: Rendezvous) -> Iterator[str]:
        """Make a layout's worker; yield after each portion, and say what it was."""
        self._meet(layout, rendezvous)
        yield "making of communicators"
        self._create(layout)
        yield "making of the worker"
        self._load_weights(layout)
        yield "views of the weights"
        self.by_sequence.enable(self.workers[layout], self.workers)
        yield "what exchanges by sequence"

    def _drop(self, layout: Layout, *, freeze: bool = True) -> Iterator[str]:
        """Free what only this layout uses; yield after each portion, and say what it was.

        Waits for none of the layout's peers: they may be dead.
        """
        worker = self.workers.pop(layout, None)
        communicators = None if worker is None else worker.communicators
        if worker is not None:
            worker.close()
        del worker
        self.by_sequence.forget(layout)
        yield "end of the former worker"
        # Models and their runners refer to each other; graphs hold GPU memory until they go.
        collect_frozen(freeze=freeze)
        yield "collection of garbage"
        if communicators is not None:
            communicators.destroy()
        yield "end of the former communicators"
        if current_platform.is_cuda():
            torch.cuda.empty_cache()
        yield "return of memory"

    def _rendezvous(self, layout: Layout, generation: int, seconds: float) -> Rendezvous:
        unit = unit_of(self._engine, layout)
        return Rendezvous(self._directory, unit, self._engine, generation, seconds)

    def _meet(self, layout: Layout, rendezvous: Rendezvous) -> None:
        """Meet the other members, and make the layout's worker without vLLM's and the weights."""
        unit = unit_of(self._engine, layout)
        config = self._dp if layout == DP else engine_config(self._node, layout, UnitExecutor)
        self.by_sequence.expect(unit, config)
        communicators = Communicators(layout, config, current_platform.dist_backend, rendezvous)
        agree = partial(
            agreed_minimum, self._directory, "kv-bytes", self._engine, self._node.engines
        )
        worker = LayoutWorker(
            unit, config, communicators, self.buffer, self._engine, self._reserved(), agree
        )
        workers = {**self.workers, layout: worker}
        self.workers = {of: workers[of] for of in self._node.layouts if of in workers}

    def _create(self, layout: Layout) -> None:
        worker = self.workers[layout]
        worker.create(f"file://{self._directory / self._directory.name}")
        self.by_sequence.prepare(worker)
        if current_platform.is_cuda():
            self._add_graphs(worker)

    def _add_graphs(self, worker: LayoutWorker) -> None:
        """Let a layout capture more CUDA graphs than vLLM's own, or others."""
        if self.shared is not None and worker.layout == DP:
            if can_have_graphs(worker.config):
                capture_streamed(worker.model_runner, self.shared.slots)
            return
        # A group whose members stream has no CUDA graphs (``engine_config``), and gets none here.
        most, chosen = self._node.full_graph_tokens, self._node.vllm.sizes_are_chosen
        worker.full_graphs = add_full_graphs(worker.model_runner, most, chosen=chosen)

    def _load_weights(self, layout: Layout) -> None:
        worker = self.workers[layout]
        worker.load(self._node.weight_groups)
        if self.shared is not None:
            with set_current_vllm_config(worker.config):  # of which vLLM's methods are made
                self._share(self.shared, worker)

    def _share(self, shared: SharedLayers, worker: LayoutWorker) -> None:
        """Let a layout's model compute with what engines share."""
        if worker.layout == DP:
            dummy = self._dp.load_config.load_format == "dummy"
            shared.complete(worker.model, dummy=dummy)
            pipelines = [of.pp for of in self._node.layouts if of.tp == 1 < of.pp]
            shared.whole.find_stages(self._engine, pipelines)
            worker.borrowed_bytes = shared.borrowed_bytes
        shared.stream_in(worker.model, worker.layout)

    def _reserved(self) -> int:
        """Return the bytes that the layouts beyond DP take besides weights and KV."""
        # Exchanges by sequence connect the members as the weights are loaded.
        each = CONNECTED_LAYOUT_BYTES if self._node.max_sp > 1 else LAYOUT_BYTES
        each += self._encoder_bytes
        return each * len(self._node.layouts[1:]) + self._plan.reserved_bytes

    @cached_property
    def _encoder_bytes(self) -> int:
        return encoder_cache_bytes(self._dp)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        with self.memory.phase(name):
            yield
        self.phases[name] = time.monotonic() - start


def collect_frozen(*, freeze: bool = True) -> None:
    """Free all that nothing refers to, also what a worker's warm-up hid from the collector.

    Args:
        freeze: hide all that is left again, as the warm-up did (``vllm.utils.gc_utils``).
    """
    gc.unfreeze()
    gc.collect()
    if freeze:
        gc.freeze()
