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
        self._sizes: list[int] = []
        self._steps: dict[int, CapturedStep] = {}

    @contextmanager
    def recorded(self, model: nn.Module) -> Iterator[None]:
        """While active, take note of all captures of ``model``."""
        hook = model.register_forward_pre_hook(self._look, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()
            self._sizes = sorted(self._steps)
            if self._sizes:
                most = self._sizes[-1]
                log.info("steps by sequence may replay graphs of up to %d tokens a member", most)

    def _look(self, _model: nn.Module, _args: Any, inputs: dict[str, Any]) -> None:
        context = get_forward_context()
        if context.cudagraph_runtime_mode is CUDAGraphMode.PIECEWISE:
            descriptor = context.batch_descriptor
            assert descriptor is not None
            self._steps[descriptor.num_tokens] = CapturedStep(
                descriptor, inputs["input_ids"], inputs["positions"]
            )

    def fitting(self, tokens: int) -> CapturedStep | None:
        """Return the smallest captured step that holds so many tokens; None: there is none."""
        place = bisect_left(self._sizes, tokens)
        return self._steps[self._sizes[place]] if place < len(self._sizes) else None


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
