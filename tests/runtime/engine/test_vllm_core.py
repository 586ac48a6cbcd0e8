"""What a unit reads off vLLM's own schedule."""

from types import SimpleNamespace

import pytest
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

from runtime.engine.vllm_core import work_of
from runtime.messages import Work


def schedule(tokens: dict[str, int], *, new: dict[str, int], running: dict[str, int]):
    """Return a step: tokens by request, and how many each has computed before."""
    scheduled = SchedulerOutput.make_empty()
    scheduled.num_scheduled_tokens = tokens
    scheduled.scheduled_new_reqs = [
        SimpleNamespace(req_id=name, num_computed_tokens=done) for name, done in new.items()
    ]
    cached = CachedRequestData.make_empty()
    cached.req_ids, cached.num_computed_tokens = list(running), list(running.values())
    scheduled.scheduled_cached_reqs = cached
    return scheduled


@pytest.mark.parametrize(
    ("step", "work"),
    [
        pytest.param(
            schedule({"a": 1, "b": 1}, new={}, running={"a": 10, "b": 20}),
            Work(steps=1, decodes=2, context_tokens=32),
            id="decodes",
        ),
        pytest.param(
            schedule({"a": 4}, new={"a": 0}, running={}),
            Work(steps=1, prefill_tokens=4, prefill_pairs=1 + 2 + 3 + 4),
            id="prompt",
        ),
        pytest.param(
            schedule({"a": 1}, new={"a": 0}, running={}),
            Work(steps=1, prefill_tokens=1, prefill_pairs=1),
            id="prompt-of-one-token",
        ),
        pytest.param(
            schedule({"a": 1, "b": 2, "c": 3}, new={"b": 32}, running={"a": 7, "c": 6}),
            Work(1, 0.0, 1, 8, 5, (33 + 34) + (7 + 8 + 9)),
            id="decode-cached-prefix-and-chunk",
        ),
    ],
)
def test_work_of_a_step(step: SchedulerOutput, work: Work) -> None:
    assert work_of(step) == work
