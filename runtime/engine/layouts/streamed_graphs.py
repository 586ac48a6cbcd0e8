"""CUDA graphs of DP where engines share weights: its steps stream, or have whole weights.

A graph would replay the copies that fill slots, or leave them out, without knowing what the slots
hold by then. So while DP streams, its steps replay piecewise graphs: the model is divided where it
waits for weights (``slots.OPERATOR``), and no piece has copies in it. Once an engine has whole
weights, nothing is copied, and steps replay full graphs as well. Weights keep their addresses at
either level, so there is one set of graphs.

Only DP has them. Members of a TP group may have different levels for some steps, and would then
pad a step to different sizes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import get_forward_context
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager

from shoal.policies.values.layouts import DP
from shoal.runtime.engine.layouts.calls_within import call_within
from shoal.runtime.engine.weights.sharing.slots import WeightSlots


def can_have_graphs(config: VllmConfig) -> bool:
    """Return whether DP can have such graphs, where engines share weights.

    Args:
        config: of DP. Its model runner must be vLLM's V2, without drafts.
    """
    return bool(
        config.use_v2_model_runner
        and config.speculative_config is None
        and not is_breakable_cudagraph_enabled()  # vLLM's runner divides the model elsewhere then
    )


class WaitsBetweenPieces:
    """Holds that no layer waits for its weights only inside a piece: replayed, it would not wait.

    vLLM's operator of experts is in a piece, and may compute an MLP that all tokens go to. That MLP
    waits, too, for what the experts have waited for.
    """

    def __init__(self) -> None:
        self._between: int | None = None
        """The last layer that waited between two pieces."""

    def __call__(self, layer: int) -> None:
        """Take note that a layer would wait.

        Raises:
            RuntimeError: a piece is being captured, and the layer has not waited before it.
        """
        if not torch.cuda.is_current_stream_capturing():
            self._between = layer
            return
        mode = get_forward_context().cudagraph_runtime_mode
        if mode is CUDAGraphMode.PIECEWISE and layer != self._between:
            raise RuntimeError(
                f"the weights of layer {layer} would not be waited for: the model cannot share its "
                "weights with CUDA graphs of its pieces; --compilation-config "
                '\'{"cudagraph_mode": "FULL_DECODE_ONLY"}\' turns these off'
            )


class StreamedGraphManager(ModelCudaGraphManager):  # type: ignore[misc]
    """vLLM's graphs of DP, of which steps that stream replay the piecewise ones alone."""

    _candidates: dict[tuple[int, int], list[BatchExecutionDescriptor]]

    def divide(self, streams: Callable[[], bool]) -> None:
        """Dispatch steps by what they do from then on; all graphs have been captured.

        Args:
            streams: says whether the next step streams.
        """
        self._streams = streams
        self._all = self._candidates
        self._pieces = {
            key: [each for each in found if each.cg_mode is not CUDAGraphMode.FULL]
            for key, found in self._candidates.items()
        }

    def dispatch(self, *args: Any, **kwargs: Any) -> BatchExecutionDescriptor:
        """Find the graph of a step (``CudaGraphManager.dispatch``)."""
        self._candidates = self._pieces if self._streams() else self._all
        return super().dispatch(*args, **kwargs)


def capture_streamed(model_runner: Any, slots: WeightSlots) -> None:
    """Make DP's model runner capture graphs without copies, and replay those that are right.

    vLLM also measures by this method what graphs take.

    Args:
        model_runner: vLLM's V2, before its KV cache is initialised.
        slots: this engine's.
    """
    call_within(model_runner, "capture_model", partial(_captured, slots=slots))


@contextmanager
def _captured(model_runner: Any, slots: WeightSlots) -> Iterator[None]:
    with slots.left_alone(WaitsBetweenPieces()):
        yield
    manager = model_runner.cudagraph_manager
    if type(manager) is ModelCudaGraphManager:
        manager.__class__ = StreamedGraphManager
        manager.divide(partial(slots.streams, DP.tp))
