"""The leader's choice of a mode: the same in the fake and in the real core."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode
from vllm.v1.core.sched.output import SchedulerOutput

from shoal.policies.values.layouts import Layout
from shoal.runtime.clock import ManualClock
from shoal.runtime.config import FakeSettings, NodeConfig
from shoal.runtime.engine.agent.full_graph_steps import LONGEST_CONTEXT, MOST_REQUESTS
from shoal.runtime.engine.agent.step_mode import Shift, sp_floor
from shoal.runtime.engine.fake.fake_backend import FakeBackend
from shoal.runtime.engine.scheduler import vllm_core, vllm_group_core
from shoal.runtime.engine.scheduler.vllm_group_core import VllmGroupCore
from shoal.runtime.protocol.messages import Mode
from tests.runtime.loopback_node import request_payload
from tests.units import tp

GROUP = tp(0, 1, 2, 3)


@pytest.mark.parametrize(
    ("floor", "threshold", "tokens", "mode"),
    [
        (0, 256, 256, Mode.TP),
        (0, 256, 257, Mode.SP),
        (512, 256, 512, Mode.TP),
        (512, 256, 513, Mode.SP),
        (0, 0, 0, Mode.TP),
        (0, 0, 1, Mode.SP),
        (0, None, 10**6, Mode.TP),
        (None, 0, 10**6, Mode.TP),
    ],
)
def test_a_step_in_sp_exceeds_threshold_and_floor(
    floor: int | None, threshold: int | None, tokens: int, mode: Mode
) -> None:
    assert Shift(floor, threshold).mode(tokens) is mode


def test_nobody_shifts_before_being_told() -> None:
    assert Shift(0).mode(10**6) is Mode.TP


def step(requests: int, tokens: int, new: int = 0, cached: int = 0) -> SimpleNamespace:
    """Return a step of so many requests; one that begins, and all others, have such contexts."""
    return SimpleNamespace(
        num_scheduled_tokens=dict.fromkeys(map(str, range(requests)), 1),
        total_num_scheduled_tokens=tokens,
        scheduled_new_reqs=[SimpleNamespace(num_computed_tokens=new)],
        scheduled_cached_reqs=SimpleNamespace(num_computed_tokens=[cached] * (requests - 1)),
    )


LONGER = LONGEST_CONTEXT + 1


@pytest.mark.parametrize(
    ("batched", "mode"),
    [
        pytest.param(step(9, 512, cached=LONGER), Mode.TP, id="vLLM's own graphs"),
        pytest.param(step(9, 513, cached=LONGEST_CONTEXT), Mode.TP, id="longest context"),
        pytest.param(step(9, 513, cached=LONGER), Mode.SP, id="too long a context"),
        pytest.param(step(9, 513, new=LONGER), Mode.SP, id="of a request that begins"),
        pytest.param(step(1, 1024), Mode.TP, id="largest graph"),
        pytest.param(step(1, 1025), Mode.SP, id="too large"),
        pytest.param(step(600, 600), Mode.SP, id="nothing but decodes"),
        pytest.param(step(MOST_REQUESTS + 1, 700), Mode.SP, id="too many requests"),
    ],
)
def test_a_step_that_has_a_full_graph_takes_tp(batched: SimpleNamespace, mode: Mode) -> None:
    shift = Shift(512, 256, full_graph_tokens=1024)
    assert shift.floor == 1024
    assert shift.mode(batched.total_num_scheduled_tokens, batched) is mode
    without = Shift(512, 256).mode(batched.total_num_scheduled_tokens, batched)
    assert without is (Mode.SP if batched.total_num_scheduled_tokens > 512 else Mode.TP)


def test_the_threshold_counts_beside_full_graphs() -> None:
    shift = Shift(512, 2000, full_graph_tokens=1024)
    assert [shift.mode(tokens, step(1, tokens)) for tokens in (1500, 2001)] == [Mode.TP, Mode.SP]
    assert Shift(None, 0, full_graph_tokens=1024).floor is None


@pytest.mark.parametrize(
    ("layout", "max_sp", "floor"),
    [
        (Layout(), 8, None),
        (Layout(tp=4), 1, None),
        (Layout(tp=4), 2, 512),
        (Layout(tp=2), 8, 512),
        (Layout(tp=2, pp=2), 8, None),
    ],
)
def test_a_group_runs_sp_only_with_a_degree_of_two_and_without_stages(
    layout: Layout, max_sp: int, floor: int | None
) -> None:
    assert sp_floor(layout, max_sp, 512) == floor


def fake_mode(config: NodeConfig, threshold: int | None, tokens: int) -> Mode:
    """Return the mode of the fake core's step that computes a prompt of so many tokens."""
    clock = ManualClock()
    core = FakeBackend(config, 0, clock=clock).groups[GROUP]
    core.shift.threshold = threshold
    core.bind(1, {engine: list(range(1, 100)) for engine in GROUP.engines}, seed=0)
    core.add(request_payload("r", [7] * tokens, 1))
    core.dispatch()
    clock.advance(1.0)
    collected = core.collect()
    assert collected is not None
    (ended,) = collected.steps
    return ended.mode


class OneStep:
    """What of vLLM's scheduler and of Shoal's executor a core needs to dispatch one step."""

    use_v2_model_runner = False
    full_graph_tokens = 0

    def __init__(self, tokens: int) -> None:
        self.scheduled = SchedulerOutput.make_empty()
        self.scheduled.total_num_scheduled_tokens = tokens
        self.scheduled.num_scheduled_tokens = {"r": tokens}
        self.scheduled.scheduled_new_reqs = [
            SimpleNamespace(
                req_id="r", num_computed_tokens=0, prompt_token_ids=[1], prefill_token_ids=None
            )
        ]
        self.scheduled.finished_req_ids = {"gone"}
        managers = [SimpleNamespace(max_admission_blocks_per_request=None)]
        self.kv_cache_manager = SimpleNamespace(
            estimate_cached_tokens=lambda _: 0,
            block_pool=SimpleNamespace(num_gpu_blocks=1),
            coordinator=SimpleNamespace(single_type_managers=managers),
        )
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[])
        self.deferred_waiting: list[Any] = []
        self.channel = None
        self.modes: list[Mode] = []

    def has_requests(self) -> bool:
        return True

    def schedule(self) -> SchedulerOutput:
        return self.scheduled

    def get_grammar_bitmask(self, _: SchedulerOutput) -> None:
        return None

    def collective_rpc(self, method: str) -> list[int]:
        return [self.full_graph_tokens]

    def run_step(self, *_: Any, mode: Mode, **__: Any) -> tuple[int, "Future[Any]"]:
        self.modes.append(mode)
        return 1, Future()


def real_mode(
    monkeypatch: pytest.MonkeyPatch, captured: int, max_sp: int, threshold: int | None, tokens: int
) -> Mode:
    """Return the mode that the real core sends with a step of so many tokens."""
    step = OneStep(tokens)
    compilation = SimpleNamespace(
        max_cudagraph_capture_size=captured,
        cudagraph_mode=CUDAGraphMode.FULL if captured else CUDAGraphMode.NONE,
    )
    engine_core = SimpleNamespace(
        scheduler=step,
        model_executor=step,
        structured_output_manager=SimpleNamespace(backend=None),
        batch_queue_size=1,
        vllm_config=SimpleNamespace(compilation_config=compilation),
        get_supported_tasks=tuple,
        execute_dummy_batch=lambda: None,
    )
    monkeypatch.setattr(vllm_core, "EngineCore", lambda *_: engine_core)
    monkeypatch.setattr(vllm_group_core, "GroupLease", lambda *_: None)
    core = VllmGroupCore(GROUP, SimpleNamespace(), log_stats=False, max_sp=max_sp)
    core.shift.threshold = threshold
    assert core.dispatch()
    (mode,) = step.modes
    return mode


@pytest.mark.parametrize("captured", [0, 40])
@pytest.mark.parametrize("max_sp", [1, 2, 4])
@pytest.mark.parametrize("threshold", [None, 0, 30, 50])
@pytest.mark.parametrize("tokens", [1, 30, 31, 40, 41, 50, 51])
def test_fake_and_real_cores_choose_alike(
    monkeypatch: pytest.MonkeyPatch,
    captured: int,
    max_sp: int,
    threshold: int | None,
    tokens: int,
) -> None:
    settings = FakeSettings(num_blocks=100, captured_tokens=captured)
    config = NodeConfig(4, 4, "manual", "unused", {}, fake=settings, max_sp=max_sp)
    wanted = Mode.TP
    if max_sp > 1 and threshold is not None and tokens > max(captured, threshold):
        wanted = Mode.SP
    assert fake_mode(config, threshold, tokens) is wanted
    assert real_mode(monkeypatch, captured, max_sp, threshold, tokens) is wanted


def test_a_step_with_nothing_to_compute_is_one_in_tp(monkeypatch: pytest.MonkeyPatch) -> None:
    assert real_mode(monkeypatch, 0, 4, 0, 0) is Mode.TP
