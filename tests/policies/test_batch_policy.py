"""When single engines compute prompts for groups that decode, and what they hand over."""

from dataclasses import replace

import pytest

from shoal.policies.batch_policy import (
    BATCH,
    MOST_TURNS,
    REVIEW_SECONDS,
    TURN_SECONDS,
    Memory,
    is_split,
)
from shoal.policies.throughput import partitions, usual_work
from shoal.policies.values.batch import PromptWork
from shoal.policies.values.layouts import alone, layouts_up_to
from shoal.policies.values.partition import Partition, singles
from shoal.policies.values.plan import Plan, check_plan
from shoal.policies.values.snapshot import LayoutState, Move, PoolRequest, Snapshot
from shoal.runtime.simulation.data_sheets import hardware_named
from shoal.runtime.simulation.shape_files import BLOCK_TOKENS, cost_model, read_shape
from tests.policies.snapshots import request, snapshot, unit
from tests.units import tp, tp_units

SHAPE = read_shape("llama-3-8b-bf16")
SLOW_LINKS = hardware_named("l40s")
MODEL = cost_model(SHAPE, SLOW_LINKS)
SPLIT = (tp(0, 1, 2, 3), *map(alone, range(4, 8)))
PROMPT, OUTPUT = 8000, 250.0
ENGINES = singles(8)
SHORT_OF_KV, ROOMY = 1600, 60_000
"""Blocks of an engine: three requests, or more than slots."""


def layouts(blocks: int) -> tuple[LayoutState, ...]:
    return tuple(
        LayoutState(layout, 256, blocks, BLOCK_TOKENS * layout.tp, 131_072)
        for layout in layouts_up_to(8)
    )


def node(
    partition: Partition = ENGINES,
    *,
    waiting: int = 100,
    running: int = 3,
    free: int = 1600,
    blocks: int = SHORT_OF_KV,
    **fields: object,
) -> Snapshot:
    """Return a node whose engines hold so many requests each, and with so many that wait."""
    units = [
        unit(
            group,
            requests=running * group.size,
            running=running * group.size,
            slots=200,
            blocks=free,
            total_blocks=blocks,
            block_tokens=BLOCK_TOKENS * group.size,
            max_model_len=131_072,
            longest_tokens=PROMPT + 1 if running else 0,
        )
        for group in partition
    ]
    return replace(
        snapshot(*units, now=100.0),
        cost_model=MODEL,
        layouts=layouts(blocks),
        pool=tuple(request(f"r{k}", prompt=PROMPT) for k in range(min(3, waiting))),
        waiting=waiting,
        waiting_tokens=waiting * PROMPT,
        output_tokens=OUTPUT,
        step_tokens=512,
        **fields,
    )


def plan(seen: Snapshot) -> Plan:
    made = BATCH.plan(seen)
    check_plan(made, seen)
    return made


# --- the partition ---


def test_where_kv_is_short_and_links_are_slow_engines_divide_the_work() -> None:
    made = plan(node())
    assert made.target is not None
    assert is_split(made.target)
    assert (made.treatment, made.reason) == ("carry", "load")


def test_where_kv_is_plentiful_and_links_are_fast_all_engines_stay_alike() -> None:
    fast = cost_model(SHAPE, hardware_named("h200"))
    assert plan(replace(node(blocks=ROOMY), cost_model=fast)).target is None


def test_the_target_is_the_best_by_far() -> None:
    seen = node()
    rates = dict(partitions(seen, MODEL, usual_work(seen)))
    target = plan(seen).target
    assert target is not None
    assert rates[target] == max(rates.values())
    assert rates[target] > 1.1 * max(rate for of, rate in rates.items() if not is_split(of))
    assert plan(node(target)).target is None


def test_partitions_are_compared_now_and_then_and_only_under_load() -> None:
    seen = node()
    just = Memory(at=seen.now - REVIEW_SECONDS / 2)
    assert plan(replace(seen, memory=just)).target is None
    assert plan(replace(seen, memory=Memory(at=seen.now - REVIEW_SECONDS))).target is not None
    assert plan(node(waiting=7)).target is None, "fewer than engines"


def test_a_switch_waits_until_moves_have_ended_and_no_move_begins() -> None:
    target = plan(node()).target
    moved = (Move(alone(4), SPLIT[0], 1),)
    busy = node(SPLIT, switching=True, moves=moved, memory=Memory(100.0, singles(8)))
    assert (plan(busy).target, plan(busy).moves) == (None, ())
    late = node(switching=True)
    remembered = plan(late).memory
    assert plan(late).target is None
    assert plan(replace(late, switching=False, now=100.1, memory=remembered)).target == target


def test_a_partition_that_has_become_impossible_is_forgotten() -> None:
    seen = node(memory=Memory(100.0, SPLIT), dead=frozenset())
    assert plan(seen).target == SPLIT
    assert plan(replace(seen, broken=frozenset({SPLIT[0]}))).target is None
    assert plan(replace(seen, dead=frozenset({2}))).target is None


def test_a_dead_engine_leaves_partitions_without_it() -> None:
    target = plan(replace(node(), dead=frozenset({0}))).target
    assert target is not None
    assert alone(0) in target


@pytest.mark.parametrize("waiting", [1, 100])
def test_a_request_that_only_a_group_holds_gets_one(waiting: int) -> None:
    long = request("long", prompt=4 * PROMPT)
    seen = node(waiting=waiting)
    made = plan(replace(seen, pool=(long, *seen.pool[1:])))
    assert made.target is not None
    assert made.reason == "long"
    widest = max(made.target, key=lambda one: one.size).layout
    assert next(state for state in seen.layouts if state.layout == widest).can_hold(long)


def test_the_last_requests_go_where_they_end_soonest() -> None:
    last = plan(node(waiting=0, running=1))
    assert last.target == tp_units(8, 8)
    assert last.reason == "quiet"
    assert plan(node(tp_units(8, 8), waiting=0, running=1)).target is None
    assert plan(node(waiting=0, running=0)).target is None, "nothing runs"


def test_prompts_that_are_still_computed_are_not_the_last_requests() -> None:
    seen = node(waiting=0, running=1)
    units = (replace(seen.units[0], waiting=1), *seen.units[1:])
    assert plan(replace(seen, units=units)).target is None


def test_prompts_of_which_steps_have_begun_are_not_the_last_requests() -> None:
    seen = node(waiting=0, running=1)
    begun = replace(seen.units[0], begun=PromptWork.of(PROMPT, PROMPT // 2))
    assert plan(replace(seen, units=(begun, *seen.units[1:]))).target is None


def test_the_last_requests_stay_where_outputs_have_been_short() -> None:
    seen = node(waiting=0, running=1)
    assert plan(replace(seen, outputs=(1, 1, 2))).target is None
    assert plan(replace(seen, outputs=(1, 1, 250))).target == tp_units(8, 8)


def test_a_split_is_for_outputs_that_may_be_long() -> None:
    seen = node()
    short = tuple(replace(each, output_limit=1) for each in seen.pool)
    assert plan(replace(seen, pool=short)).target is None
    some = (*short[1:], replace(short[0], output_limit=500))
    assert plan(replace(seen, pool=some)).target == plan(seen).target is not None
    unknown = (*short[1:], replace(short[0], output_limit=None))
    assert plan(replace(seen, pool=unknown)).target == plan(seen).target


def test_without_a_cost_model_the_layout_stays() -> None:
    assert plan(replace(node(), cost_model=None)).target is None


# --- what is handed over ---


def test_groups_get_what_they_have_room_for_and_single_engines_get_the_prompts() -> None:
    made = plan(node(SPLIT))
    assert {move.destination for move in made.moves} == {SPLIT[0]}
    assert {move.source for move in made.moves} <= set(SPLIT[1:])
    each = -(-(PROMPT + OUTPUT / 4) // (4 * BLOCK_TOKENS)) + 1
    assert sum(move.requests for move in made.moves) == (1600 - 32) // each == 12
    assert {dispatch.unit for dispatch in made.dispatches} <= set(SPLIT[1:])
    assert made.dispatches


@pytest.mark.parametrize(
    "changes",
    [
        {"free": 40},
        {"moves": (Move(alone(4), SPLIT[0], 12),)},
        {"pending": singles(8), "switching": True},
        {"running": 0},
    ],
    ids=["no room", "room for those on their way", "a switch runs", "nothing to hand over"],
)
def test_nothing_is_handed_over(changes: dict[str, object]) -> None:
    assert plan(node(SPLIT, **changes)).moves == ()  # type: ignore[arg-type]


def test_an_engine_makes_one_move_at_a_time() -> None:
    made = plan(node(SPLIT, moves=(Move(alone(4), SPLIT[0], 1),)))
    assert made.moves
    assert alone(4) not in {move.source for move in made.moves}


def test_layouts_for_all_engines_hand_nothing_over() -> None:
    for partition in (singles(8), tp_units(8, 4)):
        assert plan(node(partition)).moves == ()


def test_groups_take_prompts_while_no_engine_has_anything_to_hand_over() -> None:
    idle = node(SPLIT, running=0, free=0)
    free = tuple(replace(u, free_blocks=1600 if u.unit.is_group else 0) for u in idle.units)
    idle = replace(idle, units=free)
    assert {dispatch.unit for dispatch in plan(idle).dispatches} == {SPLIT[0]}
    busy = replace(idle, units=tuple(replace(u, running=1) for u in free))
    assert plan(busy).dispatches == ()


def test_urgent_requests_go_first() -> None:
    seen = node(SPLIT, free=520)
    pool = (request("urgent", prompt=PROMPT, priority=-1), *seen.pool)
    assert plan(replace(seen, pool=pool)).dispatches[0].request_id == "urgent"


def test_long_requests_start_in_a_group_all_the_same() -> None:
    long: PoolRequest = request("long", prompt=2 * 16 * SHORT_OF_KV)
    made = plan(replace(node(SPLIT), pool=(long,)))
    assert [(one.request_id, one.unit) for one in made.dispatches] == [("long", SPLIT[0])]


# --- how often ---


def test_every_switch_makes_the_next_one_dearer_until_it_is_forgotten() -> None:
    """The gain of the best partition over single engines lies between 5 and 80 %."""
    seen = node(memory=Memory(here=ENGINES))
    assert plan(seen).target is not None
    dear = Memory(here=ENGINES, turns=MOST_TURNS, changed=seen.now)
    assert plan(replace(seen, memory=dear)).target is None
    for turns in range(MOST_TURNS, 0, -1):
        seen = replace(seen, now=seen.now + TURN_SECONDS + 1)
        memory = plan(replace(seen, memory=dear)).memory
        assert isinstance(memory, Memory)
        assert memory.turns == turns - 1
        dear = memory
    assert plan(replace(seen, now=seen.now + REVIEW_SECONDS, memory=dear)).target is not None


def test_a_change_of_the_partition_counts_once_and_an_idle_node_forgets() -> None:
    before = Memory(here=ENGINES)
    while_switching = node(SPLIT, pending=SPLIT, switching=True, memory=before)
    after = node(SPLIT, memory=before)
    idle = node(SPLIT, memory=Memory(here=SPLIT, turns=3), running=0, waiting=0)
    turns = [plan(seen).memory.turns for seen in (while_switching, after, idle)]  # type: ignore[attr-defined]
    assert turns == [0, 1, 0]
    assert plan(replace(after, memory=plan(after).memory)).memory.turns == 1  # type: ignore[attr-defined]


def test_full_units_keep_the_last_requests() -> None:
    assert plan(node(waiting=0, running=1, free=SHORT_OF_KV // 25)).target is None
