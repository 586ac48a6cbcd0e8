"""What splits and pipelines bring, beside the other layouts for all engines."""

import random
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from shoal.loadgen.workload import Arrival
from shoal.policies.batch_policy import is_split
from shoal.policies.values.layouts import DP, Layout
from shoal.policies.values.partition import units_of
from shoal.runtime.config import BACKGROUND_PRIORITY
from shoal.runtime.simulation.data_sheets import hardware_named
from shoal.runtime.simulation.node_settings import Node
from shoal.runtime.simulation.shape_files import read_shape
from shoal.runtime.simulation.simulated_node import Run, simulate

FP8 = msgspec.structs.replace(read_shape("qwen-2.5-32b-bf16"), weight_dtype="fp8")
SHORT_OF_KV = Node(FP8, hardware_named("l40s"), max_num_batched_tokens=512, prefix_caching=False)
SHARED = Node(
    msgspec.structs.replace(read_shape("codellama-34b-bf16"), weight_dtype="fp8"),
    hardware_named("l40s"),
    max_pp=8,
    max_num_batched_tokens=512,
    prefix_caching=False,
    share_weights=8,
    move_memory=True,
)
ROOMY = Node(
    read_shape("llama-3-8b-bf16"),
    hardware_named("h200"),
    engines=4,
    max_group=4,
    max_num_batched_tokens=2048,
    prefix_caching=False,
)


def uneven(count: int, prompt: int, priority: int = BACKGROUND_PRIORITY) -> list[Arrival]:
    draw = random.Random(5)
    return [Arrival(0.0, prompt, draw.randint(40, 360), priority) for _ in range(count)]


def rate(run: Run) -> float:
    assert all(life.finished for life in run.lives)
    assert run.policy_errors == 0
    return len(run.lives) / max(life.ended or 0.0 for life in run.lives)


def best_static(node: Node, load: Sequence[Arrival]) -> float:
    layouts = (Layout(tp=tp) for tp in (1, 2, 4, 8) if tp <= node.engines)
    return max(rate(simulate(replace(node, layout=of), "manual", load)) for of in layouts)


@pytest.mark.slow
def test_uneven_outputs_are_served_faster_where_kv_is_short() -> None:
    load = uneven(112, 3000)
    run = simulate(SHORT_OF_KV, "batch", load)
    served = [layout for _, layout in run.layouts]
    assert any(map(is_split, served))
    assert len(served[-1]) == 1, "the last requests end in one group"
    assert [life.tokens for life in run.lives] == [arrival.output_tokens for arrival in load]
    people = [replace_priority(arrival) for arrival in load]
    assert rate(run) > 1.1 * best_static(SHORT_OF_KV, people)


@pytest.mark.slow
def test_where_a_split_does_not_pay_the_best_layout_serves() -> None:
    load = uneven(240, 2000, priority=0)
    run = simulate(ROOMY, "batch", load)
    assert not any(is_split(layout) for _, layout in run.layouts)
    assert {unit.layout for unit in run.layouts[0][1]} == {DP}
    assert rate(run) > 0.97 * best_static(ROOMY, load)


def test_outputs_of_one_token_are_served_as_in_dp() -> None:
    """Nothing decodes, so no group is worth a switch: neither at first nor for the last prompts."""
    load = [Arrival(0.0, 3000, 1, 0) for _ in range(60)]
    run = simulate(SHORT_OF_KV, "batch", load)
    assert not run.switches
    assert rate(run) == pytest.approx(rate(simulate(SHORT_OF_KV, "manual", load)), rel=0.01)


def replace_priority(arrival: Arrival) -> Arrival:
    """Return a request as people send it: background requests leave room for these."""
    return Arrival(arrival.at, arrival.prompt_tokens, arrival.output_tokens, 0)


def test_a_pipeline_whose_stages_are_whole_serves_more_than_any_layout_without() -> None:
    """At first the weights are shared by eight, so that all but TP of eight read from others."""
    load = uneven(64, 3000, priority=0)
    run = simulate(SHARED, "batch", load)
    assert {unit.layout.pp for _, units in run.layouts for unit in units} > {1}
    change = run.memory_changes[0]
    assert (change.before_stages, change.after, change.outcome) == (1, 8, "done")
    assert change.after_stages > 1
    assert run.layouts[-1][1] == units_of(8, Layout(tp=8)), "the last requests end in one group"
    without = simulate(replace(SHARED, max_pp=1), "batch", load)
    assert rate(run) > 1.2 * rate(without)


def test_where_kv_is_plentiful_there_is_no_pipeline() -> None:
    run = simulate(replace(ROOMY, max_pp=4), "batch", uneven(60, 2000, priority=0))
    assert {unit.layout for _, units in run.layouts for unit in units} == {DP}
    assert rate(run) > 0.0
