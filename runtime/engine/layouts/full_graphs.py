"""Full CUDA graphs for steps with prompts, which vLLM runs piece by piece.

By default vLLM replays one full graph in a step that only decodes. In a step with a prompt it
replays a graph for each piece between two attention layers, and launches attention itself. The host
needs longer for that than a GPU needs for a short prompt: 11 ms for 32 layers, and 28 ms in steps
that are larger than vLLM's graphs, which are launched kernel by kernel.

vLLM can also capture full graphs for such steps (``CUDAGraphMode.FULL``), but then for decoding
too, and with buffers for split attention. Here both kinds are captured: a step that only decodes
replays the same graphs as before, and one with a prompt replays a graph whose attention is not
split. Without splits one block of threads reads all of a request's context, so steps with a long
context still run in pieces.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager

from shoal.runtime.engine.agent.full_graph_steps import MOST_REQUESTS, has_full_graph
from shoal.runtime.engine.layouts.calls_within import call_within
from shoal.runtime.engine.layouts.graph_sizes import full_sizes
from shoal.runtime.protocol.messages import Mode


class FullGraphs:
    """Which steps of a layout replay such graphs, and the sizes that there are.

    Args:
        sizes: see ``full_sizes``.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.largest = 0
        """Tokens of the largest one that was captured; 0: attention allowed none."""
        self.allowed = False
        """Whether the next step may replay one, if its requests and tokens fit."""

    def expect(self, scheduler_output: Any, mode: Mode) -> None:
        """Judge the step that is run next, which all members of a unit do alike.

        Args:
            scheduler_output: vLLM's.
            mode: a step by sequence runs another model.
        """
        self.allowed = mode is Mode.TP and has_full_graph(scheduler_output, self.largest)


class UnsplitBuilder(FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """Prepares attention that is not split, where a step with prompts has a full graph."""

    unsplit = False
    max_num_splits: int
    max_cudagraph_size: int | None

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Prepare the capture of a full graph: of a step with prompts, or of one that decodes."""
        self.unsplit = common_attn_metadata.max_query_len > 1
        return super().build_for_cudagraph_capture(common_attn_metadata)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """Prepare a step."""
        former = self.max_num_splits, self.max_cudagraph_size
        if self.unsplit:  # also above the largest of vLLM's own graphs
            tokens = common_attn_metadata.num_actual_tokens
            self.max_num_splits, self.max_cudagraph_size = 1, tokens
        try:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        finally:
            self.max_num_splits, self.max_cudagraph_size = former


class FullGraphManager(ModelCudaGraphManager):  # type: ignore[misc]
    """vLLM's graphs of a layout, and full graphs of steps with prompts."""

    full: FullGraphs
    builders: Sequence[UnsplitBuilder] = ()

    def include(self, full: FullGraphs, builders: Sequence[UnsplitBuilder]) -> None:
        """Have such graphs captured with all others, and replay them from then on."""
        self.full, self.builders = full, builders
        full.largest = max(full.sizes)
        self._mixed = [
            BatchExecutionDescriptor(
                CUDAGraphMode.FULL,
                num_tokens=size,
                num_reqs=min(size, self.max_num_reqs, MOST_REQUESTS),
            )
            for size in full.sizes
        ]
        own = self._capture_descs.get(CUDAGraphMode.FULL, [])
        # Large ones first: small ones reuse their memory.
        both = sorted([*self._mixed, *own], key=lambda each: each.num_tokens, reverse=True)
        self._capture_descs[CUDAGraphMode.FULL] = both

    def capture(self, *args: Any, **kwargs: Any) -> None:
        """Capture all graphs (``ModelCudaGraphManager.capture``)."""
        # vLLM would make this for the first graph that it captures, which is not the largest.
        captured = [each.num_tokens for descs in self._capture_descs.values() for each in descs]
        model = self.vllm_config.model_config
        self.hidden_states = torch.empty(
            (max(captured), model.get_hidden_size()), dtype=model.dtype, device=self.device
        )
        super().capture(*args, **kwargs)

    def dispatch(
        self, num_reqs: int, num_tokens: int, *args: Any, **kwargs: Any
    ) -> BatchExecutionDescriptor:
        """Find the graph of a step, and have its attention prepared for that."""
        found = super().dispatch(num_reqs, num_tokens, *args, **kwargs)
        fits = found.cg_mode is not CUDAGraphMode.FULL and self.full.allowed
        self.full.allowed = False  # vLLM's own dummy steps are not judged
        mixed = self._fitting(num_reqs, num_tokens) if fits and self._graphs_captured else None
        for builder in self.builders:
            builder.unsplit = mixed is not None
        return mixed or found

    def _fitting(self, num_reqs: int, num_tokens: int) -> BatchExecutionDescriptor | None:
        return next(
            (
                each
                for each in self._mixed
                if each.num_tokens >= num_tokens and each.num_reqs >= num_reqs
            ),
            None,
        )


def add_full_graphs(model_runner: Any, most: int, *, chosen: bool) -> FullGraphs | None:
    """Make a model runner capture full graphs of steps with prompts, too.

    vLLM captures them with its own, and includes them when it measures what graphs take.

    Args:
        model_runner: vLLM's, before its KV cache is initialised.
        most: see ``NodeConfig.full_graph_tokens``.
        chosen: see ``full_sizes``.

    Returns:
        What judges the layout's steps; None: it cannot have such graphs. They need vLLM's V2 model
        runner with full and piecewise graphs, and a model whose inputs are token ids alone,
        without adapters, drafts, or stages.
    """
    config = model_runner.vllm_config
    sizes = config.compilation_config.cudagraph_capture_sizes
    problems = (
        hasattr(model_runner, "cudagraph_dispatcher"),  # the V1 model runner
        config.compilation_config.cudagraph_mode is not CUDAGraphMode.FULL_AND_PIECEWISE,
        not sizes,
        config.lora_config,
        config.speculative_config,
        config.parallel_config.pipeline_parallel_size > 1,
        config.model_config.supports_multimodal_inputs,
        config.model_config.is_encoder_decoder,
        config.model_config.enable_prompt_embeds,
    )
    if any(problems):
        return None
    most = min(most, config.scheduler_config.max_num_batched_tokens)
    found = full_sizes(sizes, most, chosen=chosen)
    if not found:
        return None
    full = FullGraphs(found)
    call_within(model_runner, "capture_model", partial(_with_full_graphs, full=full))
    return full


@contextmanager
def _with_full_graphs(model_runner: Any, full: FullGraphs) -> Iterator[None]:
    """Let a V2 model runner's graph manager include such graphs, if its attention allows it."""
    manager = model_runner.cudagraph_manager
    groups = [group for groups in model_runner.attn_groups for group in groups]
    builders = [builder for group in groups for builder in group.metadata_builders]
    if type(manager) is ModelCudaGraphManager and _are_capturable(manager, builders):
        for builder in builders:
            builder.__class__ = UnsplitBuilder
        manager.__class__ = FullGraphManager
        manager.include(full, builders)
    yield


def _are_capturable(manager: ModelCudaGraphManager, builders: Sequence[Any]) -> bool:
    """Return whether FlashAttention 3 does a layout's attention, for one kind of layers.

    With several kinds (sliding windows) it plans no steps ahead, and nobody has tried that here.
    """
    return (
        manager.cudagraph_mode is CUDAGraphMode.FULL_AND_PIECEWISE
        and [type(builder) for builder in builders] == [FlashAttentionMetadataBuilder]
        and bool(builders[0].aot_schedule)
        and builders[0].dcp_world_size == 1
    )
