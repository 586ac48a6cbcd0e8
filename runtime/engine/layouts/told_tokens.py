"""What the last stage of a pipeline has sampled, as the V2 model runners of other stages learn it.

vLLM's own way is a broadcast from the last stage after each step (``PPHandler``). Other stages take
it up as many steps later as there are stages, which is when vLLM's asynchronous scheduler next
schedules those requests. Schedulers of pipelines here are not asynchronous: a lone request is in
every step. There the broadcast would come too late, and on CPUs the first stage would stand still
until the last one has sampled.

But a scheduler that is not asynchronous knows each token before it schedules the next step, and
says it in that step: vLLM has this for V1 model runners (``CachedRequestData.new_token_ids``). Here
it is for V2, too. So no stage waits for tokens, and nothing is under way when a step has ended: a
bind, a carry, an abort or a preemption finds no token that is still to come.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import vllm.utils.torch_utils as torch_utils
import vllm.v1.worker.gpu.model_runner as v2_runner
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import CachedRequestData


class ToldTokens:
    """Stands in for ``PPHandler`` of a V2 model runner, which asks it for tokens in each step.

    It has what ``GPUModelRunner`` calls of that, with the same arguments. Nothing is sent. It knows
    no drafts: nodes with pipelines do not speculate.
    """

    def __init__(self, max_num_reqs: int, num_speculative_steps: int, device: torch.device) -> None:
        self._device = device
        self._told: list[tuple[int, int]] = []
        """Rows, and the token that was sampled last for each: what the next step adds to them."""

    def tell(self, cached: CachedRequestData, model_runner: Any) -> None:
        """Take the tokens of the step that is run next.

        Args:
            cached: what the step says of requests that run.
            model_runner: the one that this belongs to. A last stage's has sampled the tokens.
        """
        if model_runner.is_last_pp_rank:
            return
        states = model_runner.req_states
        lengths = states.prefill_len.np
        told = zip(cached.req_ids, cached.num_computed_tokens, cached.new_token_ids, strict=True)
        for request_id, computed, tokens in told:
            row = states.req_id_to_index[request_id]
            if computed >= lengths[row]:  # before that, the row has what is computed next
                (token,) = tokens
                self._told.append((row, token))

    def get_prev_sampled_outputs(self, _drafts: Any = None) -> dict[str, torch.Tensor] | None:
        """Return what ``GPUModelRunner.postprocess_sampled`` is to add to rows; None: nothing."""
        told, self._told = self._told, []
        return self._outputs(told) if told else None

    def warm_up(self, model_runner: Any) -> None:
        """Compile what writes tokens to rows: vLLM's warm-up steps say none.

        Args:
            model_runner: the one that this belongs to. None of its rows is changed.
        """
        if not model_runner.is_last_pp_rank:
            with torch.inference_mode():
                model_runner.postprocess_sampled(**self._outputs([(-1, 0)]))

    def _outputs(self, told: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
        # Each is a tensor of its own, because kernels are compiled for how tensors are aligned. The
        # function is looked up here: on CPUs vLLM replaces it.
        rows, tokens = (
            torch_utils.async_tensor_h2d(list(column), device=self._device, dtype=torch.int64)
            for column in zip(*told, strict=True)
        )
        return {
            "idx_mapping": rows,
            "sampled_tokens": tokens.unsqueeze(1),
            "num_sampled": torch.ones(len(told), dtype=torch.int32, device=self._device),
            "num_rejected": torch.zeros(len(told), dtype=torch.int32, device=self._device),
        }

    def receive(self, _batch: Any) -> bool:
        """Return whether all requests of a step wait for a broadcast: none does."""
        return False

    def broadcast(self, *_: Any) -> None:
        """Send nothing of what was sampled."""

    def relay_aux_hidden_states(self, _received: Any, sent: Any) -> Any:
        """Return what goes to the next stage: nothing is added for drafts."""
        return sent

    def on_req_idx_freed(self, _row: int) -> None:
        """Forget nothing: no token is under way for any row."""


@contextmanager
def in_stages(config: VllmConfig) -> Iterator[None]:
    """While a layout's worker is made, let the V2 model runner of a stage have ``ToldTokens``.

    Without that it would make a process group for its broadcasts.

    Args:
        config: the layout's.
    """
    if config.parallel_config.pipeline_parallel_size == 1 or not config.use_v2_model_runner:
        yield
        return
    former = v2_runner.PPHandler
    v2_runner.PPHandler = ToldTokens
    try:
        yield
    finally:
        v2_runner.PPHandler = former
