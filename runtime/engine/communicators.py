"""All communicators of a node, created once at start and made current by one context manager.

Flying Serving, 4.3 (communicator pool). A process takes part in one group of every degree; vLLM
keeps "the" groups of a process in module globals of ``vllm.distributed.parallel_state``, so being
in a layout means having its groups in those globals.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import vllm.distributed.parallel_state as parallel_state
import vllm.v1.worker.workspace as workspace
from vllm.config import VllmConfig, set_current_vllm_config

from policies.partition import Group

# Every group that vllm.distributed.parallel_state.initialize_model_parallel creates.
GROUP_GLOBALS = ("_TP", "_ETP", "_ENGRAM_DP", "_DCP", "_PCP", "_PP", "_DP", "_EP", "_EPLB")


class Communicators:
    """The groups of one layout on this process, and the workspace that goes with them."""

    def __init__(self, config: VllmConfig, backend: str) -> None:
        """Create the groups with vLLM's own initialiser. Collective over the whole node."""
        saved = {name: getattr(parallel_state, name) for name in GROUP_GLOBALS}
        for name in GROUP_GLOBALS:
            setattr(parallel_state, name, None)
        try:
            with set_current_vllm_config(config):
                parallel_state.initialize_model_parallel(
                    config.parallel_config.tensor_parallel_size, backend=backend
                )
            self._groups = {name: getattr(parallel_state, name) for name in GROUP_GLOBALS}
        finally:
            for name, group in saved.items():
                setattr(parallel_state, name, group)
        # Steps reach the members over the engine's own queues; vLLM's shared-memory broadcaster
        # would only be a segment to leak.
        self.tensor_parallel.mq_broadcaster = None
        # vLLM keeps one workspace per process, replaced by each worker's start and locked by its
        # graph capture: each layout needs its own.
        self._workspace: Any = None

    @property
    def tensor_parallel(self) -> Any:
        """The layout's tensor parallel ``GroupCoordinator``."""
        return self._groups["_TP"]

    @property
    def group(self) -> Group:
        """The engines of this process's tensor parallel group."""
        return tuple(self.tensor_parallel.ranks)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this layout's groups and workspace vLLM's current ones."""
        state = parallel_state.__dict__
        saved = {name: state[name] for name in GROUP_GLOBALS}
        saved_workspace = workspace._manager
        state.update(self._groups)
        workspace._manager = self._workspace
        try:
            yield
        finally:
            self._workspace = workspace._manager
            workspace._manager = saved_workspace
            state.update(saved)


def join_world(engine: int, engines: int, init_method: str, backend: str) -> None:
    """Enter the node's process group as rank ``engine``. Collective over the whole node."""
    parallel_state.init_distributed_environment(engines, engine, init_method, engine, backend)


def world_minimum(value: int) -> int:
    """Return the smallest ``value`` of all engines. Collective over the whole node."""
    tensor = torch.tensor([value], dtype=torch.int64)
    group = parallel_state.get_world_group().cpu_group
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MIN, group=group)
    return int(tensor.item())
