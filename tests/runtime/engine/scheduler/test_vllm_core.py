"""What a unit reads off vLLM's own schedule, and when it schedules ahead."""

from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)

from shoal.policies.values.layouts import alone
from shoal.runtime.engine.scheduler import vllm_core
from shoal.runtime.engine.scheduler.vllm_core import (
    AHEAD_REQUESTS,
    InFlight,
    SeveralKVGroups,
    VllmCore,
    work_of,
)
from shoal.runtime.protocol.messages import Mode, Work
from tests.runtime.engine.scheduler.stand_in import StandIn


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


DECODES = Work(steps=1, decodes=64, context_tokens=64)
PROMPT = Work(steps=1, prefill_tokens=64, prefill_pairs=64)
UNENDED_COPY = 7
"""Number of a copy of KV that has not ended."""


def in_flight(
    work: Work,
    *,
    ended: bool = False,
    error: Exception | None = None,
    requests: str = "ab",
    copy: int = 0,
) -> InFlight:
    future: Future[Any] = Future()
    if error is not None:
        future.set_exception(error)
    elif ended:
        future.set_result(None)
    scheduled = SchedulerOutput.make_empty()
    scheduled.num_scheduled_tokens = dict.fromkeys(requests, 1)
    return InFlight(0, scheduled, future, Mode.TP, work, copy)


def goes_ahead(
    *steps: InFlight, running: int = AHEAD_REQUESTS, depth: int = 2, free: int = AHEAD_REQUESTS
) -> bool:
    core = SimpleNamespace(
        _in_flight=deque(steps),
        _scheduler=SimpleNamespace(running=[object()] * running),
        _depth=depth,
        block_pool=SimpleNamespace(get_num_free_blocks=lambda: free),
        _carried=SimpleNamespace(has_ended=lambda copy: copy < UNENDED_COPY),
        _oldest_has_ended=lambda: VllmCore._oldest_has_ended(core),  # type: ignore[arg-type]
    )
    return VllmCore._can_go_ahead(core)  # type: ignore[arg-type]


def test_a_step_goes_ahead_of_the_outcome_of_one_that_has_ended() -> None:
    assert goes_ahead(in_flight(DECODES, ended=True), in_flight(DECODES))


def test_nothing_goes_ahead_of_a_step_that_computes() -> None:
    assert not goes_ahead(in_flight(DECODES), in_flight(DECODES))


def test_nothing_goes_ahead_of_a_step_whose_copy_may_have_failed() -> None:
    steps = in_flight(DECODES, ended=True, copy=UNENDED_COPY), in_flight(DECODES)
    assert not goes_ahead(*steps)


def test_few_requests_do_not_go_ahead() -> None:
    ended = in_flight(DECODES, ended=True), in_flight(DECODES)
    assert not goes_ahead(*ended, running=AHEAD_REQUESTS - 1)


def test_nothing_goes_ahead_where_there_is_room_anyway() -> None:
    assert not goes_ahead(in_flight(DECODES, ended=True))
    # Without async scheduling a step needs the outcome of the one before.
    assert not goes_ahead(in_flight(DECODES, ended=True), depth=1)


def test_nothing_goes_ahead_of_a_first_token() -> None:
    assert not goes_ahead(in_flight(PROMPT, ended=True), in_flight(DECODES))
    assert not goes_ahead(in_flight(DECODES, ended=True), in_flight(PROMPT))


def test_nothing_goes_ahead_of_an_error() -> None:
    assert not goes_ahead(in_flight(DECODES, error=RuntimeError("dead")), in_flight(DECODES))


def test_nobody_is_preempted_for_a_step_that_goes_ahead() -> None:
    steps = in_flight(DECODES, ended=True), in_flight(DECODES)
    assert not goes_ahead(*steps, free=AHEAD_REQUESTS - 1)


def test_nothing_goes_ahead_of_a_token_that_the_later_step_has_no_use_for() -> None:
    """A later one would tell runners the request's tokens anew, without this one."""
    assert not goes_ahead(in_flight(DECODES, ended=True), in_flight(DECODES, requests="a"))
    assert goes_ahead(in_flight(DECODES, ended=True), in_flight(DECODES, requests="abc"))


# --- groups of KV blocks ---

LAYER: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 2,
    "head_size": 8,
    "dtype": torch.bfloat16,
}
ALL, LAST = FullAttentionSpec(**LAYER), SlidingWindowSpec(**LAYER, sliding_window=64)


@pytest.mark.parametrize("specs", [(ALL,), (LAST,)], ids=["all-tokens", "sliding-window"])
def test_a_core_with_one_group_of_kv_blocks_starts(
    monkeypatch: pytest.MonkeyPatch, specs: tuple[KVCacheSpec, ...]
) -> None:
    monkeypatch.setattr(vllm_core, "EngineCore", StandIn(*specs))
    VllmCore(alone(0), Any, log_stats=False)


def test_a_core_with_several_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_core, "EngineCore", StandIn(ALL, LAST))
    with pytest.raises(SeveralKVGroups) as caught:
        VllmCore(alone(0), Any, log_stats=False)
    assert str(caught.value) == (
        "vLLM keeps 2 groups of KV blocks for this model (FullAttentionSpec, SlidingWindowSpec), "
        "Shoal needs one: --disable-hybrid-kv-cache-manager may make them one"
    )
