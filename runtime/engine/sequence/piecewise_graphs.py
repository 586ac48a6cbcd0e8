"""The piecewise CUDA graphs that vLLM captured of a layout's model, for steps by sequence.

Such a graph computes everything between two attention layers, for one number of tokens, on the
tensors that it was captured with (``vllm.compilation.cuda_graph.CUDAGraphWrapper``). A step by
sequence runs the base layout's model on a share of its tokens, and runs attention between those
graphs. So it may replay them if it pads its share to a number that was captured.
"""

import logging
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor, get_forward_context

log = logging.getLogger("shoal.engine")


@dataclass(frozen=True)
class CapturedStep:
    """A number of tokens that graphs were captured for.

    Attributes:
        descriptor: the key by which vLLM finds the graphs.
        input_ids: the tensor from which they read token ids, ``[tokens]``.
        positions: the tensor from which they read positions, ``[tokens]``.
    """

    descriptor: BatchDescriptor
    input_ids: torch.Tensor
    positions: torch.Tensor


class CapturedSteps:
    """The steps that a layout's model was captured for: none without CUDA graphs.

    Args:
        wanted: whether steps by sequence may replay them: the layout is the base of a group.
        larger: sizes, in tokens, that are captured for such steps alone (``capture_sizes.py``).
    """

    def __init__(self, *, wanted: bool = False, larger: Sequence[int] = ()) -> None:
        self.wanted = wanted
        self.larger = tuple(larger)
        self._steps: dict[int, dict[int, CapturedStep]] = {}
        """By kinds of tokens (``StepAdapters.kinds``), then by tokens."""
        self._sizes: dict[int, list[int]] = {}
        """By kinds of tokens, few ones first."""

    @contextmanager
    def recorded(self, model: nn.Module) -> Iterator[None]:
        """While active, take note of all captures of ``model``."""
        hook = model.register_forward_pre_hook(self._look, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()
            self._sizes = {kinds: sorted(self._steps[kinds]) for kinds in sorted(self._steps)}
            if self._sizes:
                most = max(sizes[-1] for sizes in self._sizes.values())
                log.info("steps by sequence may replay graphs of up to %d tokens a member", most)

    def _look(self, _model: nn.Module, _args: Any, inputs: dict[str, Any]) -> None:
        context = get_forward_context()
        if context.cudagraph_runtime_mode is CUDAGraphMode.PIECEWISE:
            descriptor = context.batch_descriptor
            assert descriptor is not None
            steps = self._steps.setdefault(descriptor.num_active_loras, {})
            steps[descriptor.num_tokens] = CapturedStep(
                descriptor, inputs["input_ids"], inputs["positions"]
            )

    def fitting(self, tokens: int, kinds: int = 0) -> CapturedStep | None:
        """Return the smallest captured step that holds so many tokens; None: there is none.

        Args:
            tokens: how many.
            kinds: how many kinds of them adapters make (``StepAdapters.kinds``). vLLM captures each
                size for some such numbers: for 0, where a graph has no adapters, and for at least
                one that no step exceeds (``get_captured_lora_counts``).
        """
        for captured, sizes in self._sizes.items():
            if captured >= kinds:
                place = bisect_left(sizes, tokens)
                return self._steps[captured][sizes[place]] if place < len(sizes) else None
        return None


def share_of(base: VllmConfig, members: int) -> int:
    """Return the most tokens that a member has in a step by sequence, without padding.

    Args:
        base: configuration of the layout whose model runs.
        members: how many members share the step's tokens.
    """
    return -(-int(base.scheduler_config.max_num_batched_tokens) // members)


def largest_share(base: VllmConfig, members: int, larger: Sequence[int] = ()) -> int:
    """Return the most tokens that a member has in a step by sequence, padding included.

    Args:
        base: configuration of the layout whose model runs.
        members: how many members share the step's tokens.
        larger: see ``CapturedSteps``.
    """
    tokens = share_of(base, members)
    sizes = (*(base.compilation_config.cudagraph_capture_sizes or ()), *larger)
    return min((size for size in sizes if size >= tokens), default=tokens)
