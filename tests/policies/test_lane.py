"""The group that urgent requests have to themselves: which one it is, and who may start there."""

from dataclasses import replace

import pytest

from shoal.policies.adaptive import ADAPTIVE
from shoal.policies.lane import LINGER_SECONDS, lane_of
from shoal.policies.rebalance import rebalance
from shoal.policies.static import dispatch_least_loaded
from shoal.policies.values.layouts import Unit
from shoal.policies.values.partition import Partition
from shoal.policies.values.snapshot import PoolRequest, Snapshot
from tests.policies.nodes import DP, FOURS, PAIRS, TP, node
from tests.policies.snapshots import request
from tests.units import tp

FIRST, SECOND = tp(0, 1, 2, 3), tp(4, 5, 6, 7)


def lively(partition: Partition, engines: int = 4, *pool: PoolRequest) -> Snapshot:
    """Return a node on which urgent requests come."""
    seen = node(partition, {0: 5}, rate=20.0)
    return replace(seen, urgent_engines=engines, since_urgent=0.0, pool=pool, waiting=len(pool))


def with_requests(seen: Snapshot, place: int, **priorities: int) -> Snapshot:
    """Return the node with another number of ``urgent`` and other requests on one unit."""
    urgent, rest = priorities.get("urgent", 0), priorities.get("rest", 0)
    units = list(seen.units)
    units[place] = replace(
        units[place], requests=urgent + rest, by_priority=((-10, urgent), (0, rest))
    )
    return replace(seen, units=tuple(units))


def placed(seen: Snapshot, lane: Unit | None) -> dict[str, Unit]:
    return {d.request_id: d.unit for d in dispatch_least_loaded(seen, lane=lane)}


# --- which group ---


def test_there_is_none_unless_it_is_asked_for_and_urgent_requests_come() -> None:
    seen = lively(DP)
    assert lane_of(seen) == FIRST
    assert lane_of(replace(seen, urgent_engines=0)) is None
    assert lane_of(replace(seen, since_urgent=LINGER_SECONDS)) == FIRST
    assert lane_of(replace(seen, since_urgent=LINGER_SECONDS + 0.1)) is None


def test_it_is_formed_of_the_engines_with_the_fewest_other_requests() -> None:
    assert lane_of(with_requests(lively(DP), 5, rest=0)) == SECOND
    assert lane_of(with_requests(lively(DP), 5, rest=9)) == FIRST


def test_a_group_that_exists_is_taken_and_the_one_with_urgent_requests_stays() -> None:
    assert lane_of(lively((*PAIRS[:2], SECOND))) == SECOND
    assert lane_of(with_requests(lively(FOURS), 1, urgent=1, rest=90)) == SECOND


def test_a_group_with_a_dead_engine_is_none() -> None:
    assert lane_of(replace(lively(DP), dead=frozenset({1}))) == SECOND
    assert lane_of(replace(lively(DP), dead=frozenset({1, 6}))) is None


# --- who starts where ---


def test_only_urgent_requests_start_in_it() -> None:
    pool = (request("u", priority=-1), *(request(f"r{k}") for k in range(9)))
    went = placed(with_requests(lively(FOURS, 4, *pool), 0, rest=0), FIRST)
    assert went.pop("u") == FIRST
    assert set(went.values()) == {SECOND}
    assert len(went) == 9


def test_others_wait_while_the_rest_is_full_but_urgent_ones_may_go_anywhere() -> None:
    def full(place: int) -> Snapshot:
        pool = request("u", priority=-1), request("r")
        seen = lively(FOURS, 4, *pool)
        units = list(seen.units)
        units[place] = replace(units[place], free_slots=0)
        return replace(seen, units=tuple(units))

    assert placed(full(1), FIRST) == {"u": FIRST}
    assert placed(full(1), None) == {"u": FIRST, "r": FIRST}
    assert placed(full(0), FIRST) == {"u": SECOND, "r": SECOND}


def test_a_request_that_fits_nowhere_else_goes_there() -> None:
    seen = lively((FIRST, *PAIRS[2:]), 4, request("r", total=10_000))
    short = [replace(u, max_model_len=1000) if u.unit != FIRST else u for u in seen.units]
    assert placed(replace(seen, units=tuple(short)), FIRST) == {"r": FIRST}


def test_nothing_is_moved_to_it_for_balance() -> None:
    seen = lively(FOURS)
    units = [
        replace(
            unit,
            running=100,
            requests=100,
            context_tokens=200_000,
            total_blocks=9000,
            free_blocks=8000,
        )
        for unit in seen.units
    ]
    units[0] = replace(units[0], running=0, requests=0, context_tokens=0)
    even = replace(seen, units=tuple(units), output_tokens=2000.0)
    assert rebalance(replace(even, urgent_engines=0)) is not None
    assert rebalance(even) is None


# --- the policy ---


@pytest.mark.parametrize("partition", [DP, PAIRS, TP])
def test_it_is_formed_at_once(partition: Partition) -> None:
    plan = ADAPTIVE.plan(lively(partition))
    assert plan.target is not None
    assert FIRST in plan.target
    assert (plan.reason, plan.treatment) == ("urgent", "carry")


def test_it_stays_whatever_the_others_need() -> None:
    seen = lively((FIRST, *DP[4:]))
    for k in range(200):
        plan = ADAPTIVE.plan(replace(seen, now=0.1 * k))
        assert plan.target is None or FIRST in plan.target
        seen = replace(seen, memory=plan.memory, partition=plan.target or seen.partition)


def test_a_request_that_needs_the_whole_node_gets_it() -> None:
    long = request("r", prompt=100_000, total=131_072)
    seen = lively((FIRST, *DP[4:]), 4, long)
    small = [replace(layout, max_model_len=1000) for layout in seen.layouts[:-1]]
    units = [replace(unit, max_model_len=1000) for unit in seen.units]
    plan = ADAPTIVE.plan(replace(seen, layouts=(*small, seen.layouts[-1]), units=tuple(units)))
    assert plan.target == TP
    assert plan.reason == "long"
