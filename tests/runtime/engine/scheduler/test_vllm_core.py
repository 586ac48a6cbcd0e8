"""What a unit reads off vLLM's own schedule, and when it schedules ahead."""

from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)

from shoal.policies.values.layouts import Unit, alone
from shoal.runtime.engine.scheduler import vllm_core
from shoal.runtime.engine.scheduler.kv_groups import (
    UnservedKVGroups,
    check_kv_groups,
    group_limits,
)
from shoal.runtime.engine.scheduler.scheduled_steps import AHEAD_REQUESTS, InFlight, work_of
from shoal.runtime.engine.scheduler.vllm_core import VllmCore
from shoal.runtime.protocol.messages import Mode, Work
from tests.runtime.engine.scheduler.stand_in import StandIn
from tests.runtime.engine.scheduler.toy_engines import Make
from tests.units import pp, tp


def schedule(
    tokens: dict[str, int],
    *,
    new: dict[str, int],
    running: dict[str, int],
    drafts: dict[str, list[int]] | None = None,
):
    """Return a step: tokens by request, and how many each has computed before."""
    scheduled = SchedulerOutput.make_empty()
    scheduled.num_scheduled_tokens = tokens
    scheduled.scheduled_new_reqs = [
        SimpleNamespace(req_id=name, num_computed_tokens=done) for name, done in new.items()
    ]
    scheduled.scheduled_spec_decode_tokens = drafts or {}
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
        pytest.param(
            schedule(
                {"a": 4, "b": 1, "c": 3},
                new={"c": 0},
                running={"a": 10, "b": 20},
                drafts={"a": [1, 2, 3]},
            ),
            Work(1, 0.0, 2, 11 + 21, 3, 1 + 2 + 3, drafts=3),
            id="decode-that-checks-drafts",
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
    pool = SimpleNamespace(get_num_free_blocks=lambda: free)
    core = SimpleNamespace(
        _in_flight=deque(steps),
        _scheduler=SimpleNamespace(
            running=[object()] * running,
            num_spec_tokens=0,
            kv_cache_manager=SimpleNamespace(block_pool=pool),
        ),
        _depth=depth,
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


def test_nothing_goes_ahead_of_the_first_token_after_a_carry() -> None:
    first = in_flight(DECODES, ended=True)
    first.scheduled.scheduled_cached_reqs.resumed_req_ids.add("a")
    assert not goes_ahead(first, in_flight(DECODES))


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


CHUNKS = ChunkedLocalAttentionSpec(**LAYER, attention_chunk_size=64)
LONGER = FullAttentionSpec(**LAYER | {"block_size": 32})


@pytest.mark.parametrize(
    "specs",
    [(ALL,), (LAST,), (CHUNKS,), (ALL, LAST, LAST)],
    ids=["all-tokens", "sliding-window", "chunks", "several"],
)
def test_a_core_with_groups_of_kv_blocks_that_can_be_counted_starts(
    monkeypatch: pytest.MonkeyPatch, specs: tuple[KVCacheSpec, ...]
) -> None:
    monkeypatch.setattr(vllm_core, "EngineCore", StandIn(*specs))
    VllmCore(alone(0), Any, log_stats=False)


@pytest.mark.parametrize(
    ("specs", "names"),
    [
        ((ALL, CHUNKS), "FullAttentionSpec of 16 tokens, ChunkedLocalAttentionSpec of 16 tokens"),
        ((LAST, LONGER), "SlidingWindowSpec of 16 tokens, FullAttentionSpec of 32 tokens"),
    ],
    ids=["chunks", "block-sizes"],
)
def test_a_core_with_others_does_not(
    monkeypatch: pytest.MonkeyPatch, specs: tuple[KVCacheSpec, ...], names: str
) -> None:
    monkeypatch.setattr(vllm_core, "EngineCore", StandIn(*specs))
    with pytest.raises(UnservedKVGroups) as caught:
        VllmCore(alone(0), Any, log_stats=False)
    assert str(caught.value) == (
        f"vLLM keeps 2 groups of KV blocks for this model ({names}), which Shoal cannot serve "
        "together: --disable-hybrid-kv-cache-manager may make them one"
    )


def test_a_window_limits_the_blocks_of_its_group_beside_others() -> None:
    def limits(*of_groups: int | None) -> tuple[int, ...]:
        managers = [SimpleNamespace(max_admission_blocks_per_request=each) for each in of_groups]
        return group_limits(managers)

    assert limits(None) == limits(9) == (0,)
    assert limits(None, 9, 9) == (0, 9, 9)
    assert limits(7, 9) == (7, 0), "no request is taken for one of limited size"


@pytest.mark.parametrize(("unit", "steps"), [(alone(0), 2), (tp(0, 1), 2), (pp(0, 1), 1)])
def test_a_pipelines_steps_are_collected_one_by_one(unit: Unit, steps: int) -> None:
    """The control: elsewhere all that have ended are."""
    done = list[InFlight]()
    ended = [in_flight(DECODES, ended=True), in_flight(DECODES, ended=True), in_flight(DECODES)]
    core = SimpleNamespace(
        unit=unit,
        _in_flight=deque(ended),
        _carried=SimpleNamespace(has_ended=lambda _copy: True),
        _oldest_has_ended=lambda: VllmCore._oldest_has_ended(core),  # type: ignore[arg-type]
        _collect_one=lambda step, _collected: done.append(step),
    )
    assert VllmCore.collect(core) is not None  # type: ignore[arg-type]
    assert done == ended[:steps]


def test_a_pipeline_has_one_group_of_kv_blocks() -> None:
    several = StandIn(ALL, LAST).kv_cache_config
    check_kv_groups(several)
    check_kv_groups(StandIn(ALL).kv_cache_config, stages=2)
    with pytest.raises(UnservedKVGroups, match=r"keeps 2 groups .* --max-pp 1 serves it"):
        check_kv_groups(several, stages=2)


@pytest.mark.parametrize(("patience", "first"), [(0.0, "long"), (1.5, "short")])
def test_vllm_schedules_prompts_in_the_order_of_arrival_and_patience(
    make: Make, patience: float, first: str
) -> None:
    """The later one arrives one second later."""
    engines = make()
    core = engines.own[0]
    core._scheduler.policy = SchedulingPolicy.PRIORITY
    core._scheduler.waiting = create_request_queue(SchedulingPolicy.PRIORITY)
    core.add(engines.frames_of("long", range(20)), patience=patience)
    core.add(engines.frames_of("short", range(5)))
    core.dispatch()
    assert core._scheduler.running[0].request_id == first


@pytest.mark.parametrize("patience", [0.0, 1.5])
def test_vllm_preempts_who_came_last_among_those_that_have_begun(
    make: Make, patience: float
) -> None:
    engines = make()
    core = engines.own[0]
    core.add(engines.frames_of("long", range(20)), patience=patience)
    core.dispatch()
    core.add(engines.frames_of("short", range(5)))
    assert max(core._scheduler.requests.values()).request_id == "short"
