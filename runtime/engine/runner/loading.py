"""Makes an engine's layouts: every one at its start, and one again when its group lost a member."""

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from shoal.policies.values.layouts import Engines
from shoal.runtime.config import NodeConfig
from shoal.runtime.engine.groups.communicators import Communicators, join_node, sp_groups
from shoal.runtime.engine.groups.head_order import base_of, head_shard
from shoal.runtime.engine.groups.rendezvous import (
    LOAD_SECONDS,
    REJOIN_SECONDS,
    Rendezvous,
    agreed_minimum,
)
from shoal.runtime.engine.kv.kv_cache import SharedKVBuffer
from shoal.runtime.engine.layouts.vllm_layout import (
    CONNECTED_LAYOUT_BYTES,
    LARGER_CAPTURES_BYTES,
    LAYOUT_BYTES,
    LayoutWorker,
    layout_config,
)
from shoal.runtime.engine.link.executor import UnitExecutor
from shoal.runtime.engine.link.step_queues import OWN
from shoal.runtime.engine.runner.device_memory import MemoryPhases
from shoal.runtime.engine.sequence.capture_sizes import wanted_sizes
from shoal.runtime.engine.sequence.peer_exchange import exchanges_by_peers
from shoal.runtime.engine.sequence.piecewise_graphs import CapturedSteps, share_of
from shoal.runtime.engine.sequence.sp_settings import exchange_setting
from shoal.runtime.engine.sequence.ulysses import check_exchangeable
from shoal.runtime.engine.weights.shared_weights import register_view_loader


class LayoutLoader:
    """The layouts of one engine, as far as they are made.

    Args:
        node: the node's configuration.
        engine: this engine.
    """

    def __init__(self, node: NodeConfig, engine: int) -> None:
        self.layouts: dict[int, LayoutWorker] = {}
        """By degree, narrow first."""
        self.phases: dict[str, float] = {}
        """Seconds that each phase of the start took."""
        self.memory = MemoryPhases()
        """Bytes of the device that each took."""
        self._node = node
        self._engine = engine
        self._directory = Path(node.runtime_dir)
        self._buffer = SharedKVBuffer()
        self._communicators: dict[int, Communicators] = {}
        self._by_peers: dict[int, bool] = {}
        self._cannot_share = False
        """Whether members that could reach each other's memory were not let."""
        self._dp: VllmConfig
        by_sequence = node.max_sp > 1
        self._exchange = exchange_setting() if by_sequence else ""
        self._captures_larger = by_sequence and not node.vllm.sizes_are_chosen
        register_view_loader(
            lambda: self.layouts[OWN].model,
            lambda rank, degree: head_shard(rank, degree, node.max_sp),
        )

    def load(self, degrees: Sequence[int]) -> None:
        """Make the layouts of these degrees, DP first. Collective over the group of each."""
        if current_platform.is_cuda():
            torch.cuda.set_device(self._engine)
        self.memory.begin()
        with self._timed("communicators"):
            join_node(self._engine, self._node.engines)
            self._dp = layout_config(self._node, OWN, UnitExecutor)
            if current_platform.is_cpu() and self._dp.model_config.enforce_eager:
                # vLLM compiles some small functions all the same, and a machine that serves eagerly
                # on CPUs may have no C++ compiler.
                torch.compiler.set_stance("force_eager")
            for degree in degrees:
                self._meet(degree, 0, LOAD_SECONDS)
        with self._timed("workers"):
            for layout in self.layouts.values():
                layout.create_worker(self._init_method)
        for degree in degrees:
            with self._timed("weights" if degree == OWN else f"tp{degree} views"):
                self._load_weights(degree)

    def remake(self, degree: int, generation: int) -> LayoutWorker:
        """Make a layout anew, whatever is left of its former self. Collective over its group.

        Its communicators, its worker and what vLLM compiled and captured around both begin again,
        as they began at the start; the weights and the KV cache, which are DP's, stay.

        Args:
            degree: of the layout.
            generation: how often its group was made before.

        Raises:
            Exception: whatever kept it from being made; the layout is gone then.
        """
        self._drop(degree)
        try:
            self._meet(degree, generation, REJOIN_SECONDS)
            self.layouts[degree].create_worker(self._init_method)
            self._load_weights(degree)
        except Exception:
            # The error still refers to it: it goes with the next collection after that.
            self._drop(degree, freeze=False)
            raise
        return self.layouts[degree]

    def _drop(self, degree: int, *, freeze: bool = True) -> None:
        """Free what a layout has to itself. Its peers may be dead: none of them is waited for."""
        layout = self.layouts.pop(degree, None)
        if layout is not None:
            layout.close()
        del layout
        communicators = self._communicators.pop(degree, None)
        # Models and their runners refer to each other; graphs hold GPU memory until they go.
        collect_frozen(freeze=freeze)
        if communicators is not None:
            communicators.destroy()
        if current_platform.is_cuda():
            torch.cuda.empty_cache()

    def _group(self, degree: int) -> Engines:
        first = self._engine - self._engine % degree
        return tuple(range(first, first + degree))

    def _meet(self, degree: int, generation: int, seconds: float) -> None:
        """Find the other members, and make the layout but for its worker and its weights."""
        config = self._dp if degree == OWN else layout_config(self._node, degree, UnitExecutor)
        self._by_peers[degree] = self._exchanges_by_peers(degree)
        captures = self._captures(degree, config)
        rendezvous = Rendezvous(
            self._directory, self._group(degree), self._engine, generation, seconds
        )
        communicators = Communicators(config, current_platform.dist_backend, rendezvous)
        self._communicators[degree] = communicators
        agree = partial(
            agreed_minimum, self._directory, "kv-bytes", self._engine, self._node.engines
        )
        layout = LayoutWorker(
            config, communicators, self._buffer, self._engine, self._reserved(), agree, captures
        )
        self.layouts = dict(sorted({**self.layouts, degree: layout}.items()))

    def _reserved(self) -> int:
        """Return the bytes that the layouts beyond DP take, but for weights and KV."""
        # Exchanges by sequence connect the members as the weights are loaded.
        each = CONNECTED_LAYOUT_BYTES if self._node.max_sp > 1 else LAYOUT_BYTES
        beyond = [layout.tp for layout in self._node.layouts[1:]]
        bases = [degree for degree in beyond if self._captures_larger and self._shares(degree)]
        return each * len(beyond) + LARGER_CAPTURES_BYTES * len(bases)

    def _shares(self, degree: int) -> list[int]:
        """Return the SP degrees of the groups whose base is the layout of ``degree``."""
        if self._node.max_sp == 1:
            return []
        bases = [base_of(layout.tp, self._node.max_sp) for layout in self._node.layouts[1:]]
        return [base.sp for base in bases if base.tp == degree]

    def _captures(self, degree: int, config: VllmConfig) -> CapturedSteps:
        """Return what is to be known of a layout's graphs: nothing, unless a group replays them."""
        shares = self._shares(degree)
        if not shares:
            return CapturedSteps()
        most = share_of(config, min(shares))
        larger = wanted_sizes(config, most) if self._captures_larger else []
        return CapturedSteps(wanted=True, larger=larger)

    def _exchanges_by_peers(self, degree: int) -> bool:
        if degree == OWN or self._node.max_sp == 1:
            return False
        devices = self._group(degree) if current_platform.is_cuda() else ()
        return exchanges_by_peers(self._exchange, devices)

    def _load_weights(self, degree: int) -> None:
        self.layouts[degree].load(self._node.max_group)
        if self._node.max_sp > 1 and degree == OWN:
            self._check_exchangeable()
        elif self._node.max_sp > 1:
            self._enable_sp(degree)

    def _check_exchangeable(self) -> None:
        own, max_sp = self.layouts[OWN], self._node.max_sp
        reorders = any(base_of(layout.tp, max_sp).tp > 1 for layout in self._node.layouts[1:])
        check_exchangeable(own.config, own.model, reorders=reorders)

    def _enable_sp(self, degree: int) -> None:
        max_sp = self._node.max_sp
        narrow = [self._communicators[d] for d in sorted(self._communicators) if d <= degree]
        kv_heads = self._dp.model_config.get_total_num_kv_heads()
        base = self.layouts[base_of(degree, max_sp).tp]
        groups = sp_groups(narrow, max_sp, kv_heads)
        by_peers, required = self._by_peers[degree], self._exchange == "peer"
        shares = self.layouts[degree].enable_sp(
            base, groups, by_peers=by_peers, tried=self._cannot_share, required=required
        )
        self._cannot_share |= by_peers and not shares

    @property
    def _init_method(self) -> str:
        return f"file://{self._directory / self._directory.name}"

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        with self.memory.phase(name):
            yield
        self.phases[name] = time.monotonic() - start


def collect_frozen(*, freeze: bool = True) -> None:
    """Free all that nothing refers to, also of what a worker's warm-up took from the collector.

    Args:
        freeze: take from it all that is left, as that did (``vllm.utils.gc_utils``).
    """
    gc.unfreeze()
    gc.collect()
    if freeze:
        gc.freeze()
