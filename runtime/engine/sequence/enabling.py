"""Lets the workers of an engine's layouts run steps by sequence, as the node's plan says."""

from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import VllmConfig

from shoal.policies.values.layouts import DP, Layout, Unit
from shoal.runtime.engine.groups.communicators import SpGroups, size_of, sp_groups
from shoal.runtime.engine.groups.peer_memory import SymmetricMemory, needed_words
from shoal.runtime.engine.layouts.layout_worker import LayoutWorker
from shoal.runtime.engine.sequence.capture_sizes import capture_also
from shoal.runtime.engine.sequence.head_exchange import HeadExchange
from shoal.runtime.engine.sequence.peer_exchange import PeerExchange, exchange_memory
from shoal.runtime.engine.sequence.piecewise_graphs import CapturedSteps, largest_share
from shoal.runtime.engine.sequence.sequence_plan import SequencePlan
from shoal.runtime.engine.sequence.step_adapters import StepAdapters
from shoal.runtime.engine.sequence.ulysses import (
    SequenceParallelModel,
    check_exchangeable,
    exchanged_bytes,
    exchanged_layers,
)
from shoal.runtime.protocol.messages import Mode, SpExchange


class BySequence:
    """The ``Execution`` of ``Mode.SP``: while it is entered, a model runner has another model.

    Where there are adapters, it has another LoRA manager, too.
    """

    __slots__ = ("_manager", "_own", "_runner", "model")

    def __init__(self, runner: Any, model: SequenceParallelModel) -> None:
        self._runner, self.model = runner, model

    def __enter__(self) -> None:
        self._own = self._runner.model
        self._runner.model = self.model
        if self.model.adapters is not None:
            self._manager = self._runner.lora_manager
            self._runner.lora_manager = self.model.adapters

    def __exit__(self, *_: object) -> None:
        self._runner.model = self._own
        if self.model.adapters is not None:
            self._runner.lora_manager = self._manager


class SequenceParallelism:
    """What one engine's layouts need for steps by sequence, prepared while they are made.

    Args:
        plan: the node's.
    """

    def __init__(self, plan: SequencePlan) -> None:
        self.captures: dict[Layout, CapturedSteps] = {}
        """By layout, the graphs of its model that steps by sequence may replay."""
        self.exchanges: dict[str, SpExchange] = {}
        """By the name of a layout that runs steps by sequence, how its members exchange."""
        self._plan = plan
        self._by_peers: dict[Layout, bool] = {}
        self._cannot_share = False
        """Whether some members that could reach each other's memory were refused it."""

    def expect(self, unit: Unit, config: VllmConfig) -> None:
        """Decide for a unit of this engine, before its members meet.

        Args:
            unit: the engine's unit in one of the node's layouts.
            config: vLLM's configuration of the layout.

        Raises:
            SettingError: the members cannot exchange as they have to.
        """
        self._by_peers[unit.layout] = self._plan.exchanges_by_peers(unit)
        self.captures[unit.layout] = self._plan.captures(unit.layout, config)

    def forget(self, layout: Layout) -> None:
        """Forget what was captured of a layout's model, which is gone."""
        self.captures.pop(layout, None)

    def prepare(self, worker: LayoutWorker) -> None:
        """Make a created worker capture what steps by sequence replay of its model."""
        captures = self.captures[worker.layout]
        if captures.larger:
            capture_also(worker.model_runner, captures.larger)
        if captures.wanted:
            worker.watch_captures = captures.recorded

    def enable(self, worker: LayoutWorker, workers: Mapping[Layout, LayoutWorker]) -> None:
        """Let a worker whose weights are there run steps by sequence. Collective over its unit.

        Args:
            worker: a layout's; if the plan does not include the layout, the worker stays as it is.
            workers: all that the engine has, narrow ones first; those of narrower layouts have
                their weights.

        Raises:
            NotSharedError: the members have to share memory, and cannot.
            UnexchangeableAttention: the model cannot run by sequence.
        """
        plan, layout = self._plan, worker.layout
        if layout == DP and plan.max_sp > 1:
            check_exchangeable(worker.config, worker.model, reorders=plan.reorders)
        if not plan.includes(layout):
            return
        base = workers[plan.base(layout)]
        # Layouts with stages are left out: their groups end with engines that this unit lacks.
        flat = [w for w in workers.values() if w.layout.pp == 1 and w.layout.tp <= layout.tp]
        kv_heads = worker.config.model_config.get_total_num_kv_heads()
        groups = sp_groups([w.communicators for w in flat], plan.max_sp, kv_heads)
        memory = self._peer_memory(worker, base, groups) if self._by_peers[layout] else None
        exchange = HeadExchange(groups) if memory is None else PeerExchange(groups, memory)
        self.exchanges[layout.name] = SpExchange.COLLECTIVE if memory is None else SpExchange.PEER
        layers = exchanged_layers(worker.config, base.config, exchange)
        # Connecting takes memory, which vLLM's profiling then finds in use.
        exchange.connect(next(worker.model.parameters()).device)
        model = SequenceParallelModel(
            worker.model,
            base.model,
            base.active,
            exchange,
            layers,
            self.captures[base.layout],
            _step_adapters(worker, base),
        )
        worker.executions[Mode.SP] = BySequence(worker.model_runner, model)

    def _peer_memory(
        self, worker: LayoutWorker, base: LayoutWorker, groups: SpGroups
    ) -> SymmetricMemory | None:
        """Return what a unit exchanges through; None if a member cannot share its memory."""
        members = tuple(torch.distributed.get_process_group_ranks(groups.sp))
        tokens = largest_share(base.config, len(members), self.captures[base.layout].larger)
        bytes_of_token = exchanged_bytes(base.config, size_of(groups.within))
        memory = exchange_memory(
            worker.communicators.finding_group(members),
            needed_words(tokens, bytes_of_token),
            next(worker.model.parameters()).device,
            tried=self._cannot_share,
            required=self._plan.requires_peers,
        )
        self._cannot_share |= memory is None
        return memory


def _step_adapters(worker: LayoutWorker, base: LayoutWorker) -> StepAdapters | None:
    """Return what a layout's steps by sequence have for a LoRA manager; None without adapters."""
    if worker.config.lora_config is None:
        return None
    return StepAdapters(worker.model_runner.lora_manager, base.model_runner.lora_manager)
