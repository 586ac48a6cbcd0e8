"""How many tokens the steps of a core have."""

from typing import Any

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput


def captured_tokens(config: VllmConfig) -> int:
    """Return the tokens of the largest CUDA graph; 0: there are none."""
    # vLLM gives GPT-OSS a largest size also where no graphs are captured.
    compilation = config.compilation_config
    has_graphs = compilation.cudagraph_mode != CUDAGraphMode.NONE
    return (compilation.max_cudagraph_capture_size if has_graphs else None) or 0


class StepSizes:
    """Lets vLLM's scheduler compute less of prompts in steps in which other requests decode.

    A request that decodes waits for the whole step. vLLM's ``Scheduler.schedule`` schedules no more
    than its ``max_num_scheduled_tokens``, which is set before each step. Prompts that cannot be
    divided between steps are left alone: without chunked prefill, and where a step must have all
    tokens of an image, a prompt with more tokens would wait until nothing decodes.

    Args:
        scheduler: the core's ``Scheduler``.
    """

    def __init__(self, scheduler: Any) -> None:
        self.limit = 0
        """The most prompt tokens of such a step; 0: any number."""
        self._scheduler = scheduler
        self._most = 0

    def bound(self, limit: int) -> None:
        """Set ``limit`` before the first step, unless prompts cannot be divided."""
        settings = self._scheduler.scheduler_config
        divides = settings.enable_chunked_prefill and not settings.disable_chunked_mm_input
        self.limit = limit if divides else 0
        self._most = int(self._scheduler.max_num_scheduled_tokens)

    @property
    def most(self) -> int:
        """The most tokens of a step in which requests only decode."""
        return self._most if self.limit else int(self._scheduler.max_num_scheduled_tokens)

    def schedule(self) -> SchedulerOutput:
        """Return what the next step computes."""
        if self.limit:
            self._scheduler.max_num_scheduled_tokens = self._tokens()
        scheduled: SchedulerOutput = self._scheduler.schedule()
        return scheduled

    def _tokens(self) -> int:
        """Return the most tokens of the next step."""
        running = self._scheduler.running
        decodes = sum(not request.is_prefill_chunk for request in running)
        if not decodes:
            return self._most
        each = 1 + int(self._scheduler.num_spec_tokens)
        return min(self._most, self.limit + decodes * each)
