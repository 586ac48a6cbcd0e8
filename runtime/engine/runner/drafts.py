"""What a runner answers of a step that proposes tokens for the next step to check."""

from copy import copy
from typing import Any

from vllm.v1.outputs import AsyncModelRunnerOutput

from shoal.runtime.engine.layouts.layout_worker import LayoutWorker
from shoal.runtime.engine.link.instructions import Drafted


def with_drafts(output: Any, worker: LayoutWorker) -> Any:
    """Return the output of a sampled step with what it proposes, as far as schedulers need that.

    A V2 model runner keeps the drafts on its device, where the next step finds them. If steps are
    scheduled ahead, a scheduler is told of drafts only to hold them against a grammar
    (``EngineCore.step_with_batch_queue``). Else it is told how many there are.

    Args:
        output: what ``LayoutWorker.sample`` returned.
        worker: of the layout whose step it is.

    Returns:
        A ``Drafted``; the output alone; or a function that returns a ``Drafted``, and may wait for
        the device. Steps that come later do not change what it returns.
    """
    if not isinstance(output, AsyncModelRunnerOutput):
        return Drafted(output, worker.take_drafts())
    handler = copy(worker.model_runner.draft_tokens_handler)  # the next step replaces its values
    if worker.config.scheduler_config.async_scheduling and handler.draft_tokens_np is None:
        return output
    return lambda: Drafted(output.get_output(), handler.get_draft_tokens())
