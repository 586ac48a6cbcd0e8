"""What partitions are predicted to serve, beside what the simulator says of them."""

import random
from dataclasses import replace

import pytest

from shoal.loadgen.workload import Arrival
from shoal.policies.throughput import (
    BACKGROUND,
    Full,
    Service,
    Work,
    full_unit,
    of_job,
    seconds_to_end,
    split_service,
    uniform_service,
)
from shoal.policies.values.layouts import DP, Layout, layouts_up_to
from shoal.policies.values.partition import Partition, singles
from shoal.policies.values.snapshot import LayoutState, Snapshot
from shoal.runtime.simulation.data_sheets import hardware_named
from shoal.runtime.simulation.node_settings import Node
from shoal.runtime.simulation.shape_files import BLOCK_TOKENS, cost_model, read_shape
from shoal.runtime.simulation.simulated_node import simulate
from tests.depth import among
from tests.policies.snapshots import request, snapshot, unit
from tests.units import tp_units

NODE = Node(
    read_shape("llama-3-8b-bf16"),
    hardware_named("l40s"),
    engines=4,
    max_group=4,
    max_num_seqs=6,
    max_num_batched_tokens=512,
    prefix_caching=False,
)
MODEL = cost_model(NODE.shape, NODE.hardware)
WORK = Work(prompt=4000, output=200, step_tokens=512)
BLOCKS = NODE.hardware.num_blocks(NODE.shape)
TP2, TP4 = Layout(tp=2), Layout(tp=4)


SINGLES = singles(4)


def seen(partition: Partition = SINGLES, running: int = 0) -> Snapshot:
    units = [unit(group, requests=running, running=running) for group in partition]
    states = tuple(
        LayoutState(layout, 6, BLOCKS, BLOCK_TOKENS * layout.tp, 131_072)
        for layout in layouts_up_to(4)
    )
    return replace(snapshot(*units), layouts=states, cost_model=MODEL)


@pytest.mark.parametrize(
    ("prompt", "output", "step_tokens"),
    [(4000, 200, 512), (4000, 200, 8192), (8000, 40, 512), (200, 200, 2048)],
    ids=["small steps", "large steps", "mostly prompts", "mostly outputs"],
)
@pytest.mark.parametrize("layout", among([DP, TP4], TP2))
def test_layouts_serve_about_what_the_simulator_says(
    layout: Layout, prompt: int, output: int, step_tokens: int
) -> None:
    asked = [Arrival(0.0, prompt, output, 0) for _ in range(200)]
    run = simulate(
        replace(NODE, layout=layout, max_num_batched_tokens=step_tokens), "manual", asked
    )
    ends = sorted(life.ended or 0.0 for life in run.lives)
    served = 100 / (ends[150] - ends[50])
    work = Work(prompt, output, step_tokens)
    assert uniform_service(seen(), MODEL, layout, work).rate == pytest.approx(served, rel=0.12)


def test_a_pipeline_serves_about_what_the_simulator_says() -> None:
    node = replace(NODE, max_pp=4, layout=Layout(pp=4), max_num_seqs=24)
    draw = random.Random(1)
    asked = [Arrival(0.0, 1500, draw.randint(20, 60), 0) for _ in range(160)]
    ends = sorted(life.ended or 0.0 for life in simulate(node, "manual", asked).lives)
    state = LayoutState(Layout(pp=4), 24, BLOCKS, 4 * BLOCK_TOKENS, 131_072)
    staged = replace(seen(), layouts=(*seen().layouts, state))
    found = uniform_service(staged, MODEL, Layout(pp=4), Work(1500, 40, 512))
    assert found.rate == pytest.approx(80 / (ends[120] - ends[40]), rel=0.12)
    assert found.running <= 24


def test_prompts_of_one_batch_hold_up_the_others_of_a_pipeline() -> None:
    alone = Full(decodes=10, decode=0.1, prompt=1.0, steps=5)
    assert alone.rate(200) == pytest.approx(1 / (0.5 + 2.0))
    assert replace(alone, beside=3).rate(200) == pytest.approx(
        1 / (0.5 * (1 - 0.75**4) / 0.25 + 2.0)
    )
    always = replace(alone, steps=20, prompt=4.0)
    assert replace(always, beside=3).rate(200) == always.rate(200), "each step has a prompt"


def test_the_end_of_a_job_counts_the_more_the_fewer_requests_there_are() -> None:
    found = Service(rate=10.0, running=20)
    waiting = [replace(seen(), waiting=waiting) for waiting in (10_000, 100, 10)]
    rates = [of_job(each, MODEL, WORK, found) for each in waiting]
    assert sorted(rates, reverse=True) == rates
    assert rates[0] == pytest.approx(10.0, rel=0.05)
    lines = replace(waiting[2], pool=(request(priority=BACKGROUND),))
    assert of_job(lines, MODEL, WORK, found) == 10.0, "there are more lines of a batch"


def test_a_group_is_held_up_by_reads_and_by_nothing_else() -> None:
    group = full_unit(seen(), MODEL, TP2, WORK)
    assert group.decodes == 6
    copy = MODEL.carry_seconds(4000, 1)
    decoded = 1 / (copy + 200 / 6 * group.decode)
    rate, single = (
        split_service(seen(), MODEL, TP2, 1, WORK).rate,
        full_unit(seen(), MODEL, DP, WORK),
    )
    assert decoded < rate < decoded + 2 * single.rate(WORK.output)
    # Two single engines that do nothing but prompts serve no more than these.
    long = Work(prompt=60_000, output=2, step_tokens=512)
    single = full_unit(seen(), MODEL, DP, long)
    assert split_service(seen(), MODEL, TP2, 1, long).rate == pytest.approx(2 / single.prompt)


def test_dead_engines_serve_nothing() -> None:
    one_dead = replace(seen(), dead=frozenset({3}))
    whole, rest = (uniform_service(each, MODEL, DP, WORK).rate for each in (seen(), one_dead))
    assert rest == pytest.approx(3 / 4 * whole)
    both_dead = replace(seen(), dead=frozenset({2, 3}))
    assert split_service(both_dead, MODEL, TP2, 1, WORK).rate == 0.0


def test_few_requests_end_sooner_in_a_wide_group_and_many_do_not_fit() -> None:
    wide = tp_units(4, 4)
    few = seen(running=1)
    assert seconds_to_end(few, MODEL, wide, WORK) < seconds_to_end(few, MODEL, singles(4), WORK)
    assert seconds_to_end(seen(running=2), MODEL, wide, WORK) == float("inf")
