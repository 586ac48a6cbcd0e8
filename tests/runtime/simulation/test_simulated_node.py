"""A simulated node serves as the real one would, and tells the truth about it."""

import functools
import random
from dataclasses import replace

import msgspec
import pytest

from shoal.loadgen.workload import Arrival, Block, chat_of
from shoal.policies.registry import POLICIES
from shoal.policies.shift import ShiftRule
from shoal.policies.static import dispatch_least_loaded, with_singles
from shoal.policies.values.batch import Batch, Mode
from shoal.policies.values.layouts import Layout
from shoal.policies.values.plan import Plan, Policy
from shoal.policies.values.snapshot import Snapshot, Target
from shoal.runtime.protocol.messages import Outcome
from shoal.runtime.simulation import node_settings as module
from shoal.runtime.simulation.node_settings import Node
from shoal.runtime.simulation.shape_files import (
    MEMORY_SHARE,
    cost_model,
    read_hardware,
    read_shape,
    step_times,
)
from shoal.runtime.simulation.simulated_node import Run, SimulationError, simulate
from tests.units import tp

SHAPE = read_shape("llama-3-70b-fp8")
H200 = read_hardware("h200")
BESIDE_STEPS = H200.front_seconds + 3 * H200.message_seconds
"""What a first token takes besides its steps. There are messages to the controller, to the engine,
and back to the front end."""
NODE = Node(SHAPE, H200)
TARGETS = (Target(-1, 0.5, 0.02), Target(0, 2.0, 0.05))
DECIDING = sorted(name for name, policy in POLICIES.items() if policy.decides_layout)


def arrivals(count: int, rate: float, *, seed: int = 1, urgent: float = 0.0) -> list[Arrival]:
    rng = random.Random(seed)
    at, made = 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        priority = -10 if rng.random() < urgent else 0
        made.append(Arrival(at, rng.randint(16, 3000), rng.randint(1, 300), priority))
    return made


def tpot(run: Run, number: int) -> float:
    life = run.lives[number]
    assert life.ended is not None
    assert life.first_token is not None
    return (life.ended - life.first_token) / (life.tokens - 1)


LOAD = arrivals(100, 40.0, urgent=0.2)


@functools.cache
def run_of_load(policy: str) -> Run:
    return simulate(NODE, policy, LOAD)


@pytest.mark.parametrize("policy", DECIDING)
def test_every_request_gets_exactly_its_tokens(policy: str) -> None:
    load, run = LOAD, run_of_load(policy)
    assert [life.tokens for life in run.lives] == [arrival.output_tokens for arrival in load]
    assert all(life.finished and life.units for life in run.lives)
    assert sum(run.tokens.values()) == pytest.approx(sum(a.output_tokens for a in load))
    assert run.policy_errors == 0
    for life in run.lives:
        assert None not in (life.started, life.first_token, life.ended)
        assert life.arrived <= life.started < life.first_token <= life.ended


@pytest.mark.parametrize("policy", DECIDING)
def test_a_run_can_be_repeated(policy: str) -> None:
    assert simulate(NODE, policy, LOAD) == run_of_load(policy)


def test_a_turn_comes_after_the_answer_and_finds_the_chat_cached() -> None:
    said = (Block("first", 1600), Block("second", 800))
    chat = chat_of([Arrival(1.0, 1600, 100, prefix=said), Arrival(2.5, 2400, 40, prefix=said)])
    other = Arrival(0.5, 700, 10)
    run = simulate(NODE, "static-dp", [other, chat])
    alone, first, second = run.lives
    assert [life.tokens for life in run.lives] == [10, 100, 40]
    assert run.arrivals == [other, chat, chat.next]
    assert first.ended is not None
    assert second.arrived == pytest.approx(first.ended + 2.5)
    assert (alone.cached, first.cached, second.cached) == (0, 0, 1600)


def test_no_turn_comes_after_one_that_failed() -> None:
    chat = chat_of(
        [Arrival(0.0, 10, 10), Arrival(1.0, SHAPE.max_model_len, 10), Arrival(1.0, 9, 9)]
    )
    run = simulate(NODE, "static-tp", [chat])
    assert [life.outcome for life in run.lives] == [Outcome.FINISHED, Outcome.TOO_LONG]


@pytest.mark.parametrize(("policy", "degree"), [("static-dp", 1), ("static-tp", 8)])
def test_a_request_alone_takes_the_times_of_its_steps(policy: str, degree: int) -> None:
    prompt, output = 1000, 200
    run = simulate(NODE, policy, [Arrival(0.0, prompt, output)])
    seconds = NODE.step_times()
    layout = Layout(tp=degree)
    decode = [seconds(layout, Batch(1, prompt + k)) for k in range(1, output)]
    assert tpot(run, 0) == pytest.approx(sum(decode) / len(decode), rel=1e-5)
    prefill = seconds(layout, Batch(prefill_tokens=prompt, prefill_context=(prompt + 1) // 2))
    assert run.lives[0].first_token == pytest.approx(prefill + BESIDE_STEPS)
    assert run.lives[0].units == [tp(*range(degree))]


def test_runs_of_steps_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    load = arrivals(60, 20.0)
    together = simulate(NODE, "static-dp", load)
    monkeypatch.setattr(module, "STEPS_AT_ONCE", 1)
    one_by_one = simulate(NODE, "static-dp", load)
    pairs = list(zip(together.lives, one_by_one.lives, strict=True))
    # All steps of a run take the run's mean time. So a request that comes between two steps may
    # come before one of them in one simulation, and after it in the other.
    other = [
        pair
        for pair in pairs
        if pair[0].first_token != pytest.approx(pair[1].first_token, rel=1e-3)
    ]
    assert len(other) <= len(pairs) // 20
    for fast, exact in pairs:
        late = 0.02 if (fast, exact) in other else 0.0
        assert fast.first_token == pytest.approx(exact.first_token, rel=1e-3, abs=late)
        assert fast.ended == pytest.approx(exact.ended, rel=1e-3, abs=late)


def test_runs_of_steps_change_little_where_leases_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    # A run takes the blocks of all its steps: a new prompt may find some, or have to ask for them.
    load = arrivals(60, 8.0)
    together = simulate(NODE, "static-tp", load)
    monkeypatch.setattr(module, "STEPS_AT_ONCE", 1)
    one_by_one = simulate(NODE, "static-tp", load)
    ends = [sum(life.ended - life.arrived for life in run.lives) for run in (together, one_by_one)]
    assert ends[0] == pytest.approx(ends[1], rel=0.02)


def test_a_request_that_arrives_in_a_run_of_steps_waits_for_one() -> None:
    run = simulate(NODE, "static-tp", [Arrival(0.0, 100, 2000), Arrival(1.0, 100, 2)])
    seconds = NODE.step_times()
    step = seconds(Layout(tp=8), Batch(1, 2100, 100, 50))
    ttft = run.lives[1].first_token - run.lives[1].arrived
    # What is left of a step, the one that was scheduled ahead, and its own.
    assert ttft < 3 * step + BESIDE_STEPS


def test_a_prompt_is_computed_in_chunks() -> None:
    small = Node(SHAPE, H200, max_num_batched_tokens=512)
    load = [Arrival(0.0, 4096, 2)]
    whole = simulate(NODE, "static-dp", load).lives[0].first_token
    chunks = simulate(small, "static-dp", load).lives[0].first_token
    # Each chunk reads the weights and pays the overhead of a step again.
    assert chunks > whole + 6 * H200.step_seconds


def test_a_request_that_nobody_holds_ends_without_a_token() -> None:
    run = simulate(NODE, "static-dp", [Arrival(0.0, SHAPE.max_model_len + 1, 5)])
    life = run.lives[0]
    assert (life.outcome, life.tokens, life.finished) == (Outcome.TOO_LONG, 0, False)
    assert life.units == []


def test_a_node_that_stops_is_an_error() -> None:
    spare = 100 * 16 * SHAPE.model_shape().kv_bytes_per_token
    needed = (SHAPE.weight_bytes + H200.reserved_bytes + spare) / MEMORY_SHARE
    small = msgspec.structs.replace(H200, memory_bytes=needed)
    # Two engines together hold it, but this policy never forms a group.
    load = [Arrival(0.0, 16 * small.num_blocks(SHAPE) + 16, 5)]
    node = Node(SHAPE, small, engines=2, max_group=2)
    with pytest.raises(SimulationError, match="1 requests are left"):
        simulate(node, "manual", load)
    assert simulate(node, "static-tp", load).lives[0].finished


def test_layouts_and_switches_are_those_of_the_policy() -> None:
    run = simulate(NODE, "static-tp", [Arrival(0.0, 10, 2)])
    assert run.layouts == [(0.0, (tp(*range(8)),))]
    assert run.switches == []


# --- SP ---

SP = replace(NODE, max_sp=8, captured_tokens=100)


def test_steps_in_sp_take_the_time_of_sp() -> None:
    """Prompts above the threshold, and above the largest graph, and nothing else."""
    seconds = SP.step_times()
    for tokens, mode in ((256, Mode.TP), (257, Mode.SP), (3000, Mode.SP)):
        run = simulate(SP, "shift", [Arrival(0.0, tokens, 1, 0)])
        (life,) = run.lives
        step = seconds(
            Layout(tp=8), Batch(prefill_tokens=tokens, prefill_context=(tokens + 1) // 2), mode
        )
        assert life.first_token == pytest.approx(step + BESIDE_STEPS, rel=0.01), tokens


def test_short_steps_in_sp_take_the_host_s_time_whatever_their_tokens() -> None:
    free = msgspec.structs.replace(H200, sp_layer_host_seconds=0.0)

    def ttfts(node: Node) -> list[float]:
        loads = ([Arrival(0.0, tokens, 1, 0)] for tokens in (300, 900))
        return [simulate(node, "shift", load).lives[0].first_token for load in loads]

    short, longer = ttfts(SP)
    host = 80 * H200.sp_layer_host_seconds + H200.step_seconds
    assert short == pytest.approx(host + BESIDE_STEPS)
    assert longer == pytest.approx(short)
    short, longer = ttfts(replace(SP, hardware=free))
    assert short < longer < host


def test_what_is_decoded_stays_in_tp() -> None:
    load = [Arrival(0.0, 3000, 200, 0)]
    (shift,), (tp,) = (simulate(SP, policy, load).lives for policy in ("shift", "static-tp"))
    assert shift.first_token < tp.first_token
    assert shift.ended - shift.first_token == pytest.approx(tp.ended - tp.first_token)


@pytest.mark.parametrize("policy", ["shift", "flying", "adaptive"])
def test_no_policy_loses_a_token_in_sp(policy: str) -> None:
    load = arrivals(150, 40.0, urgent=0.2)
    run = simulate(replace(SP, targets=TARGETS, shift_threshold=ShiftRule.AUTO), policy, load)
    assert [life.tokens for life in run.lives] == [arrival.output_tokens for arrival in load]
    assert run.policy_errors == 0
    assert any(" sp " in steps for steps in run.step_errors)


# --- what policies learn of the steps ---


def uneven(*node):
    """Steps with prompts twice as fast as the roofline says, all others three times as slow.

    Not the other way round: long steps that take longer still would be one line with short ones.
    """
    roofline = step_times(*node)
    return lambda layout, batch, mode: (
        roofline(layout, batch, mode) * (0.5 if batch.prefill_tokens else 3.0)
    )


@pytest.mark.parametrize("policy", ["static-dp", "static-tp"])
def test_the_cost_model_learns_steps_with_and_without_prompts(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setattr(module, "step_times", uneven)
    run = simulate(NODE, policy, arrivals(200, 8.0))
    layout = {"static-dp": "dp", "static-tp": "tp8"}[policy]
    assert set(run.step_errors) == {f"{layout} decode", f"{layout} prefill"}
    # The host's part of a wide group's shorter steps is on no line with the long ones.
    assert all(error < 0.1 for error in run.step_errors.values())


# --- switches ---


def test_kv_is_copied_ahead_of_a_switch_beside_the_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy takes the time of its bytes; with a pre-copy requests are on their way for less."""

    def plan(seen: Snapshot, /) -> Plan:
        target = [tp(*range(8))] if seen.now > 5.0 else []
        return Plan(dispatch_least_loaded(seen), with_singles(seen, target), "carry")

    monkeypatch.setitem(POLICIES, "once", Policy("once", plan, decides_layout=True))
    load = [Arrival(k / 100, 6000, 900) for k in range(16)]
    runs = [simulate(replace(NODE, precopy_tokens=tokens), "once", load) for tokens in (0, 8192)]
    without, ahead = (run.switches[-1] for run in runs)
    assert without.carried == ahead.carried == len(load)
    assert without.precopied_bytes == 0
    assert ahead.precopied_bytes > 10 * ahead.carried_bytes
    assert ahead.carry_seconds < without.carry_seconds
    assert ahead.precopy_seconds > ahead.precopied_bytes / (8 * H200.peer_bytes_per_second)


# --- promises ---

PROMISED = (Target(0, 1.0, 0.03),)


@pytest.mark.parametrize("period", [1.0, 3.0, 7.0])
def test_a_square_wave_does_not_make_adaptive_flap(period: float) -> None:
    """Load that rises and falls as fast as it is measured: the policy does not follow it."""
    load = [a for a in arrivals(400, 20.0) if int(a.at / period) % 2 == 0]
    run = simulate(Node(SHAPE, H200, targets=PROMISED), "adaptive", load)
    assert all(life.finished for life in run.lives)
    assert 1 <= len(run.switches) <= 6


PROMISING = ("adaptive", "static-dp", "static-tp")
"""The policy, and each layout alone that a node has without SP."""


def test_adaptive_keeps_hardly_fewer_promises_than_any_layout_alone() -> None:
    load = arrivals(75, 3.0) + [
        Arrival(25.0 + a.at, a.prompt_tokens, a.output_tokens) for a in arrivals(225, 24.0)
    ]
    node = Node(SHAPE, H200, targets=PROMISED)
    kept = {name: promises_kept(simulate(node, name, load)) for name in PROMISING}
    assert kept["adaptive"] > 0.98 * max(kept.values())
    assert kept["adaptive"] > 2 * min(kept.values())


def promises_kept(run: Run) -> int:
    """Return how many requests got their first token and each other one in time."""
    (target,) = PROMISED
    return sum(
        life.first_token - life.arrived <= target.ttft_seconds
        and (life.tokens == 1 or tpot(run, number) <= target.tpot_seconds)
        for number, life in enumerate(run.lives)
    )


def chats(count: int, turns: int) -> list[Arrival]:
    """Return chats, each of whose prompts begins with the last one."""
    made = []
    for chat in range(count):
        for turn in range(turns):
            prefix = tuple(Block(f"{chat}.{k}", 512) for k in range(turn + 1))
            made.append(Arrival(20.0 * turn + chat, 512 * (turn + 1), 20, prefix=prefix))
    return sorted(made, key=lambda arrival: arrival.at)


def test_what_a_unit_has_cached_it_does_not_compute_again() -> None:
    load = chats(3, 4)
    node = replace(NODE, engines=1, max_group=1)
    warm, cold = (
        simulate(replace(node, prefix_caching=caching), "static-dp", load)
        for caching in (True, False)
    )
    # A prompt that is no longer than a cached one computes its last block.
    expected = [0 if a.prompt_tokens == 512 else a.prompt_tokens - 512 for a in load]
    assert [life.cached for life in warm.lives] == expected
    assert {life.cached for life in cold.lives} == {0}
    for with_cache, without, hit in zip(warm.lives, cold.lives, expected, strict=True):
        assert (with_cache.first_token < without.first_token) == (hit > 0)


def test_one_with_a_cache_computes_what_is_left_in_the_time_that_it_takes() -> None:
    same = (Block("a", 2048),)
    node = replace(NODE, engines=1, max_group=1)
    run = simulate(node, "static-dp", [Arrival(t, 2048, 1, prefix=same) for t in (0.0, 9.0)])
    rest = Batch(prefill_tokens=16, prefill_context=2032 + 17 // 2)
    seconds = step_times(SHAPE, H200)(Layout(), rest) + BESIDE_STEPS
    assert run.lives[1].first_token == pytest.approx(9.0 + seconds, rel=1e-4)


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=4), Layout(tp=2, pp=2)])
def test_a_pipelines_throughput_is_that_of_its_steps(layout: Layout) -> None:
    """The cost model's arithmetic, with the time to fill the pipeline."""
    shape, prompt, number = read_shape("llama-3-8b-bf16"), 2048, 24
    node = Node(
        shape,
        H200,
        engines=4,
        max_group=4,
        max_pp=4,
        layout=layout,
        max_num_batched_tokens=prompt,
    )
    run = simulate(node, "manual", [Arrival(0.0, prompt, 1) for _ in range(number)])
    assert {unit.layout for life in run.lives for unit in life.units} == {layout}
    model, batch = cost_model(shape, H200), Batch(prefill_tokens=prompt, prefill_context=1024)
    between = model.step_seconds(layout, batch) / layout.pp  # as many steps are under way
    steps = number * layout.world_size // node.engines
    fill = step_times(shape, H200)(layout, batch) * (1 - 1 / layout.pp)
    assert between > model.hop_seconds(layout, batch)
    found = max(life.ended for life in run.lives)
    assert steps * between < found < 1.03 * (steps * between + fill)


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=4), Layout(tp=2, pp=2)])
def test_stages_that_stream_take_at_least_the_time_of_their_copies(layout: Layout) -> None:
    """Steps of few tokens, on a node whose four engines share weights."""
    shape, number = read_shape("llama-3-8b-bf16"), 48
    node = Node(
        *(shape, H200),
        engines=4,
        max_group=4,
        max_pp=4,
        layout=layout,
        share_weights=4,
        max_num_batched_tokens=64,
    )
    runs = [
        simulate(replace(node, share_weights=share), "manual", [Arrival(0.0, 64, 1)] * number)
        for share in (4, 1)
    ]
    model = cost_model(shape, H200, share_weights=4, widest=4)
    steps = number * layout.world_size // node.engines
    streaming = (steps + layout.pp - 1) * model.fetch_seconds(layout) / layout.pp
    found, whole = (max(life.ended for life in run.lives) for run in runs)
    assert streaming < found < 1.1 * streaming + whole
    assert found > whole


def test_a_layout_that_the_node_does_not_have_is_refused() -> None:
    node = Node(SHAPE, H200, layout=Layout(pp=2))
    with pytest.raises(SimulationError, match="pp2"):
        simulate(node, "manual", [Arrival(0.0, 10, 1)])
