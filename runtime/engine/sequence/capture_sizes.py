"""CUDA graphs of a layout's model for more tokens than its own steps have graphs for.

A step by sequence has long shares and many kernels to launch, and waits for the host where it has
no graph. A layout's own step of that length does not wait, and would pay for the padding. So vLLM
captures piecewise graphs for both, but its dispatcher finds only those of vLLM's own sizes.

vLLM's configuration stays unchanged, because more depends on it: the keys of its compile cache, the
ranges that it compiles for, what attention backends set up for the largest size, and the sizes of
whole graphs.
"""

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from shoal.runtime.engine.layouts.calls_within import call_within
from shoal.runtime.engine.layouts.graph_sizes import larger_sizes

LARGEST_SHARE = 2048
"""Tokens above which no graphs are captured. In a prefill with shares of this size, without graphs,
the device was idle for 6 % of the time (8B Llama shape, four H200s): the host is ahead of it."""


def wanted_sizes(config: VllmConfig, most: int) -> list[int]:
    """Return the sizes that a layout's graphs lack for shares of up to ``most`` tokens.

    None for a layout without piecewise graphs.
    """
    compilation = config.compilation_config
    sizes, mode = compilation.cudagraph_capture_sizes, compilation.cudagraph_mode
    if not sizes or mode is None or mode.mixed_mode() is not CUDAGraphMode.PIECEWISE:
        return []
    if is_breakable_cudagraph_enabled():  # such graphs belong to vLLM's runner, not to the model
        return []
    return larger_sizes(max(sizes), min(most, LARGEST_SHARE))


def capture_also(model_runner: Any, sizes: Sequence[int]) -> None:
    """Make a model runner capture piecewise graphs of these sizes, which it never runs itself.

    vLLM captures them with its own, and includes them when it measures what graphs take.

    Args:
        model_runner: vLLM's, V1 or V2, before its KV cache is initialised.
        sizes: in tokens, all above those of its configuration.
    """
    if hasattr(model_runner, "cudagraph_dispatcher"):
        dispatcher = LargerSharesDispatcher(model_runner.vllm_config, sizes)
        model_runner.cudagraph_dispatcher = dispatcher
        for method in ("profile_cudagraph_memory", "capture_model"):
            call_within(model_runner, method, lambda _: dispatcher.capturing())
    else:
        # It also measures what graphs take by this method.
        call_within(model_runner, "capture_model", lambda runner: _also_of(runner, sizes))


class LargerSharesDispatcher(CudagraphDispatcher):  # type: ignore[misc]
    """The dispatcher of a V1 model runner that captures larger sizes too.

    Args:
        config: vLLM's configuration of the layout.
        sizes: in tokens, all above those of ``config``.
    """

    def __init__(self, config: VllmConfig, sizes: Sequence[int]) -> None:
        super().__init__(config)
        self._larger = {
            (size, loras): BatchDescriptor(size, has_lora=loras > 0, num_active_loras=loras)
            for size in sizes
            for loras in self._get_lora_cases()
        }
        """By tokens and by the number of adapters that vLLM captures a graph for."""
        self._captures = False

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """While active, find graphs of the larger sizes, too: vLLM captures what it finds."""
        self._captures = True
        try:
            yield
        finally:
            self._captures = False

    def initialize_cudagraph_keys(
        self, cudagraph_mode: CUDAGraphMode, uniform_decode_query_len: int = 1
    ) -> None:
        """Add the larger sizes to those for which piecewise graphs are captured."""
        super().initialize_cudagraph_keys(cudagraph_mode, uniform_decode_query_len)
        if cudagraph_mode.mixed_mode() is CUDAGraphMode.PIECEWISE:
            for descriptor in self._larger.values():
                self.add_cudagraph_key(CUDAGraphMode.PIECEWISE, descriptor)

    def dispatch(self, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """Find what vLLM finds, in its own sizes; while it captures, find larger sizes as well."""
        larger = self._larger_one(num_tokens, **kwargs) if self._captures else None
        if larger is not None:
            return CUDAGraphMode.PIECEWISE, larger
        return super().dispatch(num_tokens, *args, **kwargs)

    def _larger_one(
        self,
        num_tokens: int,
        num_active_loras: int = 0,
        valid_modes: Set[CUDAGraphMode] | None = None,
        **_: Any,
    ) -> BatchDescriptor | None:
        # vLLM runs a size without graphs before it captures it.
        allowed = valid_modes or CUDAGraphMode.valid_runtime_modes()
        mode = CUDAGraphMode.PIECEWISE
        found = self._larger.get((num_tokens, num_active_loras))
        return found if mode in allowed and found in self.cudagraph_keys[mode] else None


@contextmanager
def _also_of(model_runner: Any, sizes: Sequence[int]) -> Iterator[None]:
    """While active, let a V2 model runner capture these sizes with its own.

    What it runs later comes from candidates that it made from its own sizes before.
    """
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    manager = model_runner.cudagraph_manager
    to_capture = manager._capture_descs
    own = to_capture.get(CUDAGraphMode.PIECEWISE)
    if not own:
        yield
        return
    larger = [
        BatchExecutionDescriptor(
            CUDAGraphMode.PIECEWISE, num_tokens=size, num_reqs=None, num_active_loras=loras
        )
        for size in sorted(sizes, reverse=True)  # large ones first: small ones reuse their memory
        for loras in manager.lora_capture_cases
    ]
    to_capture[CUDAGraphMode.PIECEWISE] = [*larger, *own]
    try:
        yield
    finally:
        to_capture[CUDAGraphMode.PIECEWISE] = own
