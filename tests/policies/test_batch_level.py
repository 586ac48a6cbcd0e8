"""When the policy ``batch`` takes a pipeline, and when it asks for another level of memory."""

from dataclasses import replace

import msgspec
import pytest

from shoal.policies.batch_policy import BATCH, REVIEW_SECONDS, Memory
from shoal.policies.values.kv_geometry import KvGeometry
from shoal.policies.values.layouts import Layout, layouts_up_to
from shoal.policies.values.level import WHOLE, Level
from shoal.policies.values.partition import Partition, singles, units_of
from shoal.policies.values.plan import Plan, check_plan
from shoal.policies.values.snapshot import LayoutState, ShareLevel, Snapshot
from shoal.runtime.simulation.data_sheets import hardware_named
from shoal.runtime.simulation.shape_files import BLOCK_TOKENS, cost_model, read_shape
from tests.policies.snapshots import request, snapshot, unit

SHAPE = msgspec.structs.replace(read_shape("codellama-34b-bf16"), weight_dtype="fp8")
L40S = hardware_named("l40s")
GEOMETRY = KvGeometry(SHAPE.layers, SHAPE.kv_heads, BLOCK_TOKENS)
PROMPT = 3000
START, PP8 = Level(8), Level(8, 8)
IN_PP8: Partition = units_of(8, Layout(pp=8))
MODEL = cost_model(SHAPE, L40S, share_weights=8, widest=8)


def layouts(level: Level, max_pp: int = 8) -> tuple[LayoutState, ...]:
    blocks = L40S.num_blocks(SHAPE, level.share, 8, 1, level.stages)
    return tuple(
        LayoutState(layout, 256, blocks, GEOMETRY.block(layout).tokens, 16_384)
        for layout in layouts_up_to(8, max_pp)
    )


def offered(level: Level) -> ShareLevel:
    return ShareLevel(level.share, layouts(level), MODEL.at(level), stages=level.stages)


def node(
    level: Level = START,
    partition: Partition | None = None,
    *others: Level,
    waiting: int = 200,
    running: int = 0,
    max_pp: int = 8,
    free: float = 1.0,
    **fields: object,
) -> Snapshot:
    """Return a node at a level, with so many requests in all units together, and others waiting."""
    states = {state.layout: state for state in layouts(level)}
    partition = partition or singles(8)
    units = []
    for group in partition:
        state, count = states[group.layout], running // len(partition)
        blocks = round(free * state.total_blocks)
        of = unit(group, requests=count, running=count, slots=256, blocks=blocks)
        of = replace(of, total_blocks=state.total_blocks, block_tokens=state.block_tokens)
        units.append(replace(of, max_model_len=16_384, longest_tokens=PROMPT + 1))
    return replace(
        snapshot(*units, now=100.0),
        cost_model=MODEL.at(level),
        layouts=layouts(level, max_pp),
        share_weights=level.share,
        share_stages=level.stages,
        share_levels=tuple(map(offered, others)),
        pool=tuple(request(f"r{k}", prompt=PROMPT) for k in range(min(3, waiting))),
        waiting=waiting,
        waiting_tokens=waiting * PROMPT,
        step_tokens=512,
        **fields,
    )


def plan(seen: Snapshot) -> Plan:
    made = BATCH.plan(seen)
    check_plan(made, seen)
    return made


# --- pipelines ---


def test_the_pipeline_whose_stages_are_whole_computes_prompts() -> None:
    made = plan(node(PP8))
    assert (made.target, made.treatment, made.reason) == (IN_PP8, "carry", "load")
    assert made.dispatches == (), "they start in the pipeline"
    assert plan(node(PP8, IN_PP8)).target is None


def test_a_node_without_pipelines_forms_none() -> None:
    seen = node(PP8, max_pp=1)
    assert {one.layout.pp for one in plan(seen).target or seen.partition} == {1}


def test_a_pipeline_that_reads_weights_of_others_is_not_formed() -> None:
    """At the level of the start only groups of eight in TP read nothing."""
    target = plan(node(START)).target
    assert target is not None
    assert {one.layout.pp for one in target} == {1}


def test_where_weights_are_whole_and_kv_is_plentiful_dp_stays() -> None:
    shape = read_shape("llama-3-8b-bf16")
    h200 = hardware_named("h200")
    roomy = tuple(replace(state, total_blocks=60_000) for state in layouts(START))
    seen = replace(node(), cost_model=cost_model(shape, h200), layouts=roomy, share_weights=1)
    assert plan(seen).target is None


def test_the_last_requests_leave_the_pipeline() -> None:
    last = plan(node(PP8, IN_PP8, waiting=0, running=200, free=0.1))
    assert last.target == units_of(8, Layout(tp=8))
    assert last.reason == "quiet"
    assert plan(node(PP8, IN_PP8, waiting=0, running=200, free=0.01)).target is None, "no room"


def test_a_request_that_the_pipeline_cannot_hold_makes_it_give_way() -> None:
    """It fits into no unit of two stages."""
    seen = node(PP8, units_of(8, Layout(pp=2)), waiting=1)
    room = {state.layout: state.longest for state in seen.layouts}
    long = request("long", prompt=min(room[Layout(pp=2)] + 1, 16_000))
    small = tuple(
        replace(state, total_blocks=200) if state.layout == Layout(pp=2) else state
        for state in seen.layouts
    )
    made = plan(replace(seen, layouts=small, pool=(long,)))
    assert made.target is not None
    assert made.reason == "long"
    assert Layout(pp=2) not in {one.layout for one in made.target}


def test_prompts_that_wait_in_units_count_as_those_of_the_pool() -> None:
    """Where KV is plentiful, the pool is empty at once."""
    seen = node(PP8, waiting=0, running=8)
    assert plan(seen).target != IN_PP8
    waiting = tuple(
        replace(u, requests=30, running=0, waiting=30, prefill_tokens=30 * PROMPT)
        for u in seen.units
    )
    assert plan(replace(seen, units=waiting)).target == IN_PP8


def test_a_few_prompts_beside_many_requests_change_nothing() -> None:
    assert plan(node(PP8, waiting=40, running=200)).target is None
    assert plan(node(PP8, waiting=60, running=200)).target is not None


# --- levels ---


def test_the_level_comes_first_whose_pipeline_serves_the_job_soonest() -> None:
    made = plan(node(START, None, PP8, Level(8, 2), WHOLE))
    assert made.level == PP8
    assert (made.share_reason, made.target, made.dispatches) == ("steps", None, ())


def test_no_level_without_clear_gain_or_while_prompts_are_few() -> None:
    assert plan(node(PP8, IN_PP8, Level(8, 4), START)).level is None
    assert plan(node(START, None, PP8, waiting=7)).level is None
    just = Memory(at=100.0 - REVIEW_SECONDS / 2, level=START)
    assert plan(node(START, None, PP8, memory=just)).level is None


def test_the_copies_of_a_change_are_counted() -> None:
    """Eight requests are soon served. Over links that are slow enough, no copy pays for them."""
    slow = replace(MODEL.hardware, fetch_bytes_per_second=1e6)
    seen = node(START, units_of(8, Layout(tp=8)), PP8, waiting=8)
    assert plan(seen).level == PP8
    levels = tuple(
        replace(each, cost_model=replace(MODEL.at(each.level), hardware=slow))
        for each in seen.share_levels
    )
    model = replace(MODEL, hardware=slow)
    assert plan(replace(seen, cost_model=model, share_levels=levels)).level is None


def test_what_finds_no_room_at_a_level_makes_it_dearer() -> None:
    few = {"waiting": 20, "running": 8}
    group = units_of(8, Layout(tp=8))
    assert plan(node(START, group, PP8, **few)).level == PP8  # type: ignore[arg-type]
    assert plan(node(START, group, PP8, free=0.0, **few)).level is None  # type: ignore[arg-type]


def test_urgent_requests_start_while_the_level_changes() -> None:
    urgent = request("urgent", prompt=PROMPT, priority=-1)
    seen = node(START, None, PP8)
    seen = replace(seen, pool=(urgent, *seen.pool))
    made = plan(seen)
    assert [one.request_id for one in made.dispatches] == ["urgent"]
    # The controller names the goal from the beginning of a change.
    busy = replace(seen, share_stages=8, share_levels=(), switching=True, memory=made.memory)
    assert [one.request_id for one in plan(busy).dispatches] == ["urgent"]
    failed = replace(seen, share_levels=(), memory=plan(busy).memory)
    assert len(plan(failed).dispatches) == 4


@pytest.mark.parametrize("level", [START, PP8])
def test_partitions_are_compared_anew_when_the_level_has_changed(level: Level) -> None:
    before = Memory(at=100.0, here=singles(8), level=START)
    made = plan(node(level, None, running=8, memory=before))
    assert (made.target == IN_PP8) == (level == PP8)


def test_limits_of_outputs_count_when_all_requests_have_left_the_pool() -> None:
    short = node(PP8, running=8)
    short = replace(short, pool=tuple(replace(each, output_limit=1) for each in short.pool))
    for seen, longest in ((short, 1), (node(PP8, running=8), float("inf"))):
        memory = plan(seen).memory
        assert isinstance(memory, Memory)
        assert memory.longest == longest
        left = replace(seen, pool=(), waiting=0, now=101.0, memory=memory)
        assert plan(left).memory.longest == longest  # type: ignore[attr-defined]
        idle = tuple(replace(u, requests=0, running=0) for u in left.units)
        assert plan(replace(left, units=idle)).memory.longest == 0.0  # type: ignore[attr-defined]
