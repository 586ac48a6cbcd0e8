"""What is known of a node that is simulated, and the configuration of its processes."""

from dataclasses import dataclass, replace

import msgspec

from shoal.policies.cost.correction import Correction
from shoal.policies.shift import DEFAULT_THRESHOLD, ShiftThreshold
from shoal.policies.values.layouts import DP, Layout, layouts_up_to
from shoal.policies.values.level import WHOLE, Level
from shoal.policies.values.snapshot import Target
from shoal.runtime.config import (
    FULL_GRAPH_TOKENS,
    MIXED_STEP_TOKENS,
    PRECOPY_TOKENS,
    QUEUED_AHEAD,
    TIER_BYTES_PER_SECOND,
    FakeSettings,
    NodeConfig,
)
from shoal.runtime.engine.fake.step_times import StepTimes
from shoal.runtime.simulation.shape_files import (
    BLOCK_TOKENS,
    FileError,
    HardwareFile,
    ShapeFile,
    cost_model,
    step_times,
)

USE_SECONDS = 0.05
"""Assumed time for which an engine computes nothing when it goes on with other memory: no GPU has
done so yet, and this is the most that it should take."""
STOCK_CAPTURED_TOKENS = 512
"""Tokens of the largest CUDA graph that vLLM captures by default."""
STEPS_AT_ONCE = 64
"""Up to so many steps that decode the same requests are simulated as one."""


@dataclass(frozen=True, slots=True)
class Node:
    """The node that is simulated.

    Attributes:
        engines: number of engines.
        max_group: size of the largest group.
        max_pp: most stages of a pipeline.
        layout: what an operator asks for at the start, for all engines; None: nothing. The policy
            must be one that leaves the layout to operators.
        max_num_seqs: most requests in one unit's batch.
        max_num_batched_tokens: most tokens of one step.
        targets: the targets of the priority classes.
        urgent_engines: see ``NodeConfig``.
        front_ends: number of front ends; 0: two for each engine, as real nodes on GPUs with
            cores enough have.
        seed: the node's seed.
        queued_ahead: requests that a unit gets beyond its full batch.
        precopy_tokens: see ``NodeConfig``.
        mixed_step_tokens: see ``NodeConfig``.
        max_sp: largest degree of SP.
        share_weights: how many engines share weights at the start.
        move_memory: see ``NodeConfig``.
        shift_threshold: decides which steps run in SP.
        captured_tokens: tokens of the largest CUDA graph; a step in SP batches more.
        full_graphs: whether steps with prompts have full graphs, with which the host does not hold
            up groups in TP. Those of engines that share weights have none, and without them no
            graph is larger than vLLM's own.
        prefix_caching: whether units keep the KV of prompts that others may begin with.
        place_by_prefix: see ``NodeConfig``, as ``short_first`` and ``rebalance``.
        tier_gib: GiB of the host's memory that each engine has for KV.
        tier_bytes_per_second: rate at which each engine reads and writes it.
        corrections: what a fit has found of a node's steps; none: those of ``hardware``.
    """

    shape: ShapeFile
    hardware: HardwareFile
    engines: int = 8
    max_group: int = 8
    max_pp: int = 1
    layout: Layout | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    targets: tuple[Target, ...] = ()
    urgent_engines: int = 0
    front_ends: int = 0
    seed: int = 0
    queued_ahead: int = QUEUED_AHEAD
    precopy_tokens: int = PRECOPY_TOKENS
    mixed_step_tokens: int = MIXED_STEP_TOKENS
    max_sp: int = 1
    share_weights: int = 1
    move_memory: bool = False
    shift_threshold: ShiftThreshold = DEFAULT_THRESHOLD
    captured_tokens: int = FULL_GRAPH_TOKENS
    full_graphs: bool = True
    prefix_caching: bool = True
    place_by_prefix: bool = True
    short_first: bool = True
    rebalance: bool = True
    corrections: tuple[Correction, ...] = ()
    tier_gib: float = 0.0
    tier_bytes_per_second: float = TIER_BYTES_PER_SECOND

    def config(self, policy: str) -> NodeConfig:
        """Return the configuration of the node's processes.

        Raises:
            FileError: the model does not fit the hardware.
        """
        model = replace(
            cost_model(self.shape, self._launched, self.max_sp, self.share_weights, self.max_group),
            corrections=self.corrections,
        )
        return NodeConfig(
            engines=self.engines,
            max_group=self.max_group,
            max_pp=self.max_pp,
            policy=policy,
            runtime_dir="",
            fake=FakeSettings(
                num_blocks=self.hardware.num_blocks(
                    self.shape, self.share_weights, self.max_group, self.max_sp
                ),
                whole_blocks=self._blocks(WHOLE),
                stage_blocks={
                    level.stages: blocks
                    for level in self.levels
                    if level.stages > 1 and (blocks := self._blocks(level))
                },
                # As long as a step streams them, or as they are fetched if none does.
                fill_seconds=model.fetch_seconds(DP),
                use_seconds=USE_SECONDS,
                block_tokens=BLOCK_TOKENS,
                max_num_seqs=self.max_num_seqs,
                max_model_len=self.shape.max_model_len,
                layers=self.shape.layers,
                kv_heads=self.shape.kv_heads,
                max_num_batched_tokens=self.max_num_batched_tokens,
                captured_tokens=self._captured_tokens,
                steps_at_once=STEPS_AT_ONCE,
                asynchronous=True,
                token_bytes=int(self.shape.model_shape().kv_bytes_per_token),
                peer_bytes_per_second=self.hardware.peer_bytes_per_second,
                copy_seconds=self.hardware.copy_seconds,
                prefix_caching=self.prefix_caching,
                tier_blocks=self._tier_blocks,
                tier_bytes_per_second=self.tier_bytes_per_second,
            ),
            place_by_prefix=self.place_by_prefix,
            short_first=self.short_first,
            rebalance=self.rebalance,
            seed=self.seed,
            queued_ahead=self.queued_ahead,
            precopy_tokens=self.precopy_tokens,
            mixed_step_tokens=self.mixed_step_tokens,
            max_sp=self.max_sp,
            share_weights=self.share_weights,
            move_memory=self.move_memory,
            shift_threshold=self.shift_threshold,
            cost_model=model,
            targets=self.targets,
            urgent_engines=self.urgent_engines,
        )

    @property
    def _has_full_graphs(self) -> bool:
        narrowest = 2  # groups of fewer members than share weights stream, and have no graphs
        return self.full_graphs and self.share_weights <= narrowest

    @property
    def _captured_tokens(self) -> int:
        least = min(self.captured_tokens, STOCK_CAPTURED_TOKENS)
        return self.captured_tokens if self._has_full_graphs else least

    @property
    def _launched(self) -> HardwareFile:
        """The hardware; with full graphs its host takes no time for the layers of a step in TP."""
        if not self._has_full_graphs:
            return self.hardware
        return msgspec.structs.replace(self.hardware, tp_layer_host_seconds=0.0)

    @property
    def _tier_blocks(self) -> int:
        block = BLOCK_TOKENS * self.shape.model_shape().kv_bytes_per_token
        return int(self.tier_gib * 2**30 / block)

    @property
    def levels(self) -> list[Level]:
        """The levels of memory that it may have, apart from the room that they leave for KV."""
        start = Level(self.share_weights)
        if start == WHOLE:
            return [WHOLE]
        stages = {layout.pp for layout in layouts_up_to(self.max_group, self.max_pp)} - {1}
        return [WHOLE, start, *(start._replace(stages=pp) for pp in sorted(stages))]

    def _blocks(self, level: Level) -> int:
        """Return the KV blocks of an engine at a level of memory; 0 if it cannot have it."""
        known = self.max_group, self.max_sp, level.stages
        try:
            return self.hardware.num_blocks(self.shape, level.share, *known)
        except FileError:
            return 0

    def step_times(self, level: Level = WHOLE) -> StepTimes:
        """Return how long steps take at a level of memory."""
        return step_times(
            *(self.shape, self._launched, self.max_sp, level.share, self.corrections),
            *(self._captured_tokens, self.max_group, level.stages),
        )
