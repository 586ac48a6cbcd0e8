"""What is answered of steps that propose tokens, with vLLM's own keeper of drafts."""

from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from shoal.runtime.engine.link.instructions import Drafted
from shoal.runtime.engine.runner.drafts import with_drafts


class Later(AsyncModelRunnerOutput):  # type: ignore[misc]
    """An output that is not there yet."""

    def get_output(self) -> Any:
        return "output"


class Handler(DraftTokensHandler):  # type: ignore[misc]
    """Keeps drafts without a device."""

    def __init__(self) -> None:
        self.waited: list[str] = []
        self.copy_event = SimpleNamespace(synchronize=lambda: self.waited.append("for the copy"))

    def step(self, request: str, drafts: list[int], *, grammar: bool) -> None:
        self.req_ids, self.num_draft_tokens = [request], len(drafts)
        self.draft_tokens_np = numpy.array([drafts]) if grammar else None


def worker(handler: Handler, *, asynchronous: bool) -> Any:
    scheduling = SimpleNamespace(async_scheduling=asynchronous)
    return SimpleNamespace(
        config=SimpleNamespace(scheduler_config=scheduling),
        model_runner=SimpleNamespace(draft_tokens_handler=handler),
        take_drafts=lambda: "drafts",
    )


def resolved(answer: Any) -> tuple[Any, list[str], list[list[int]]]:
    drafted = answer()
    assert isinstance(drafted, Drafted)
    return drafted.output, drafted.drafts.req_ids, drafted.drafts.draft_token_ids


def test_v1_model_runners_have_output_and_drafts_at_once() -> None:
    assert with_drafts("output", worker(Handler(), asynchronous=False)) == Drafted(
        "output", "drafts"
    )


@pytest.mark.parametrize("grammar", [False, True])
def test_the_next_steps_scheduler_is_told_how_many_drafts_there_are(grammar: bool) -> None:
    handler = Handler()
    handler.step("r", [5, 6], grammar=grammar)
    answer = with_drafts(Later(), worker(handler, asynchronous=False))
    handler.step("other", [7], grammar=True)
    # Their numbers matter to a grammar alone.
    assert resolved(answer) == ("output", ["r"], [[5, 6] if grammar else [-1, -1]])


def test_ahead_of_steps_only_grammars_are_told_and_the_runner_does_not_wait() -> None:
    handler = Handler()
    handler.step("r", [5, 6], grammar=False)
    output = Later()
    assert with_drafts(output, worker(handler, asynchronous=True)) is output
    handler.step("r", [5, 6], grammar=True)
    answer = with_drafts(output, worker(handler, asynchronous=True))
    handler.step("r", [8, 9], grammar=False)
    assert handler.waited == []
    assert resolved(answer) == ("output", ["r"], [[5, 6]])
    assert handler.waited == ["for the copy"]
