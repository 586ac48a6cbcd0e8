"""Cycles of the policy ``batch``: when they fill, when they drain, and who takes part."""

from dataclasses import replace

import pytest

from shoal.policies.batch_policy import BATCH, REVIEW_SECONDS, Memory
from shoal.policies.cycle import BACKGROUND, best_cycle
from shoal.policies.throughput import partitions, usual_work
from shoal.policies.values.layouts import alone, tier_of
from shoal.policies.values.partition import singles
from shoal.policies.values.plan import Plan, check_plan
from shoal.policies.values.snapshot import Move, Snapshot, TierState
from shoal.runtime.config import BACKGROUND_PRIORITY
from tests.policies.snapshots import request
from tests.policies.test_batch_policy import (
    BLOCK_TOKENS,
    MODEL,
    PROMPT,
    ROOMY,
    SHORT_OF_KV,
    node,
)
from tests.units import tp

TP8 = (tp(*range(8)),)
SINGLES = singles(8)
BLOCKS_OF_ONE = PROMPT // BLOCK_TOKENS + 1


def tiers(*waiting: int, room: int = 20) -> tuple[TierState, ...]:
    """Return tiers in which so many requests wait, each with room for so many more."""
    counts = [*waiting, *[0] * (8 - len(waiting))]
    return tuple(
        TierState(
            tier_of(engine),
            (PROMPT + 1,) * count,
            room * BLOCKS_OF_ONE,
            (room + count) * BLOCKS_OF_ONE,
            BLOCK_TOKENS,
        )
        for engine, count in enumerate(counts)
    )


def plan(seen: Snapshot) -> Plan:
    made = BATCH.plan(seen)
    check_plan(made, seen)
    return made


def filling(**changes) -> Snapshot:
    """Return a node in the middle of filling; every engine has three requests."""
    fields = {"tiers": tiers(2), "memory": Memory(filling=True, decode=TP8, least=0)} | changes
    return node(waiting=300, **fields)


def draining(**changes) -> Snapshot:
    fields = {
        "partition": TP8,
        "tiers": tiers(5, 4, 4),
        "memory": Memory(decode=TP8, least=0),
    } | changes
    return node(fields.pop("partition"), waiting=300, running=0, **fields)


def test_where_kv_is_short_and_the_host_has_memory_a_cycle_begins() -> None:
    seen = node(waiting=300, tiers=tiers())
    made = plan(seen)
    assert isinstance(made.memory, Memory)
    assert made.memory.filling
    assert made.memory.decode is not None
    assert made.memory.least == 0
    assert made.target is None, "all engines are alone already"
    assert made.moves == tuple(Move(alone(k), tier_of(k), 3) for k in range(8))
    rate, _ = best_cycle(seen, MODEL, usual_work(seen))
    assert rate > 1.05 * max(other for _, other in partitions(seen, MODEL, usual_work(seen)))


@pytest.mark.parametrize(
    "seen",
    [
        node(waiting=300),
        node(waiting=20, tiers=tiers()),
        node(waiting=300, blocks=ROOMY, free=ROOMY, tiers=tiers()),
        node(waiting=300, tiers=tiers(room=1)),
        replace(node(waiting=300, tiers=tiers()), memory=Memory(at=100 - REVIEW_SECONDS / 2)),
    ],
    ids=["no tiers", "few requests", "much KV", "small tiers", "too early"],
)
def test_no_cycle_begins(seen: Snapshot) -> None:
    memory = plan(seen).memory
    assert not (isinstance(memory, Memory) and memory.filling)


def test_prompts_start_while_a_cycle_fills_and_who_moves_is_not_asked_again() -> None:
    moves = (Move(alone(0), tier_of(0), 3),)
    made = plan(filling(moves=moves))
    assert len(made.dispatches) == 3
    assert {move.source for move in made.moves} == set(SINGLES[1:])


def test_engines_that_are_in_a_group_part_first() -> None:
    made = plan(replace(filling(), partition=TP8, units=node(TP8).units))
    assert (made.target, made.moves) == (SINGLES, ())
    seen = replace(filling(switching=True), partition=TP8, units=node(TP8).units)
    assert plan(seen).target is None


@pytest.mark.parametrize("last", ["prompts", "room"])
def test_a_full_cycle_drains(last: str) -> None:
    seen = filling(tiers=tiers(2, room=0))
    assert plan(seen).target is None, "there is room on the engines"
    if last == "room":
        seen = replace(seen, units=tuple(replace(unit, free_blocks=0) for unit in seen.units))
    else:
        seen = replace(seen, waiting=0, pool=())
    made = plan(seen)
    assert made.target == TP8
    assert (made.memory.filling, made.memory.decode) == (False, TP8)


def test_what_runs_is_parked_before_a_cycle_drains() -> None:
    seen = filling()
    seen = replace(seen, units=tuple(replace(u, by_priority=((0, 3),)) for u in seen.units))
    made = plan(replace(seen, waiting=0, pool=()))
    assert (made.target, len(made.moves)) == (None, 8)


def test_a_group_reads_what_it_has_room_for_and_no_prompt_starts() -> None:
    made = plan(draining())
    assert made.dispatches == ()
    taken = {move.source: move.requests for move in made.moves}
    assert {move.destination for move in made.moves} == set(TP8)
    each = -(-(PROMPT + 250) // (8 * BLOCK_TOKENS)) + 1
    assert sum(taken.values()) == min(13, int(0.97 * SHORT_OF_KV) // each)
    assert plan(draining(switching=True, moves=made.moves)).moves == ()


def test_others_decode_if_the_group_cannot_form() -> None:
    made = plan(draining(partition=SINGLES, dead=frozenset({7}), tiers=tiers(1, 1)[:7]))
    assert made.target is None
    assert [move.source for move in made.moves] == [tier_of(0), tier_of(1)]


def test_without_a_budget_for_the_switch_requests_go_on_where_they_are() -> None:
    seen = draining(partition=SINGLES, tiers=tiers(1), switching=True)
    assert [move.source for move in plan(seen).moves] == [tier_of(0)]
    assert plan(replace(seen, pending=TP8)).moves == ()
    assert plan(replace(seen, moves=(Move(alone(1), tier_of(1), 1),))).moves == ()
    assert plan(replace(seen, switching=False)).target == TP8


def test_a_request_that_takes_nearly_all_goes_alone() -> None:
    one = TierState(tier_of(0), (8 * BLOCK_TOKENS * SHORT_OF_KV - 300,), 0, 20_000, BLOCK_TOKENS)
    assert [move.requests for move in plan(draining(tiers=(one,))).moves] == [1]


def test_more_urgent_requests_start_in_every_phase() -> None:
    pool = (request("person", priority=0), request("line", prompt=PROMPT, priority=100))
    beside = {"pool": pool, "waiting": 2, "waiting_tokens": PROMPT}
    seen = draining(memory=Memory(decode=TP8, least=100))
    started = plan(replace(seen, **beside)).dispatches
    assert [each.request_id for each in started] == ["person"]
    seen = filling(memory=Memory(filling=True, decode=TP8, least=100))
    both = {each.request_id for each in plan(replace(seen, **beside)).dispatches}
    assert both == {"person", "line"}
    # People come all the time, and no cycle waits for them.
    people = {"pool": pool[:1], "waiting": 1}
    units = tuple(replace(unit, by_priority=((0, 3),)) for unit in seen.units)
    assert plan(replace(seen, **people, units=units)).target == TP8


def test_the_next_cycle_waits_for_room_to_carry_what_is_left() -> None:
    full = node(
        TP8, waiting=300, running=4, free=100, tiers=tiers(), memory=Memory(decode=TP8, least=0)
    )
    made = plan(full)
    assert (made.target, made.dispatches, made.memory.decode) == (None, (), TP8)
    roomy = replace(full, units=tuple(replace(unit, free_blocks=800) for unit in full.units))
    made = plan(roomy)
    assert (made.target, made.memory.filling) == (SINGLES, True)
    ended = plan(replace(full, waiting=0, pool=()))
    assert ended.memory.decode is None


LINES = (request("line", prompt=PROMPT, priority=BACKGROUND),)


def test_there_are_more_lines_than_wait() -> None:
    """The batch worker sends no more than about as many as the node runs."""
    assert BACKGROUND == BACKGROUND_PRIORITY
    seen = replace(node(waiting=24, tiers=tiers()), pool=LINES)
    assert plan(seen).memory.filling
    assert not plan(node(waiting=24, tiers=tiers())).memory.filling
    assert not plan(replace(seen, waiting=7, waiting_tokens=7 * PROMPT)).memory.filling


def test_a_cycle_waits_for_the_next_lines_for_a_moment() -> None:
    seen = filling(tiers=tiers(2))
    seen = replace(seen, waiting=0, pool=(), units=node(running=0).units)
    for late, target in ((1.0, None), (2.0, TP8)):
        memory = Memory(filling=True, decode=TP8, least=BACKGROUND, waited=seen.now - late)
        assert plan(replace(seen, memory=memory)).target == target
