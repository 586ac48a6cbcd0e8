"""Stock vLLM's balancer: the fewest requests, whatever they are like."""

from dataclasses import replace

from shoal.loadgen.bench.stock_balancer import STOCK_BALANCER
from shoal.policies.static import STATIC_DP
from shoal.policies.values.layouts import alone
from shoal.policies.values.plan import check_plan
from shoal.policies.values.snapshot import Snapshot
from tests.policies.snapshots import request, snapshot, unit


def chosen(seen: Snapshot) -> list[int]:
    plan = STOCK_BALANCER.plan(seen)
    check_plan(plan, seen)
    return [dispatch.unit.leader for dispatch in plan.dispatches]


def node(*requests: int, pool: int = 1, blocks: int = 100, waiting: int = 0) -> Snapshot:
    """Return engines with so many requests each; ``blocks`` and ``waiting`` are the first one's."""
    units = [unit(alone(engine), requests=count) for engine, count in enumerate(requests)]
    units[0] = replace(units[0], free_blocks=blocks, waiting=waiting)
    return snapshot(*units, pool=tuple(request(f"r{k}") for k in range(pool)))


def test_the_engine_with_the_fewest_requests_gets_the_next() -> None:
    assert chosen(node(3, 1, 2)) == [1]
    assert chosen(node(5, 1, 3, pool=4)) == [1, 1, 2, 1]


def test_of_equal_engines_another_one_comes_first_each_time() -> None:
    seen = node(0, 0)
    for expected in (0, 1, 0):
        plan = STOCK_BALANCER.plan(seen)
        assert plan.dispatches[0].unit.leader == expected
        seen = replace(seen, memory=plan.memory)


def test_it_does_not_see_how_much_waits_there_as_the_policies_of_shoal_do() -> None:
    units = unit(alone(0), requests=1, prefill_tokens=90_000), unit(alone(1), requests=2)
    seen = snapshot(*units, pool=(request(),))
    assert chosen(seen) == [0]
    assert STATIC_DP.plan(seen).dispatches[0].unit.leader == 1


def test_requests_that_wait_count_more_where_blocks_are_short() -> None:
    assert chosen(node(2, 3, blocks=60, waiting=2)) == [0]
    assert chosen(node(2, 3, blocks=20, waiting=2)) == [1]


def test_nothing_starts_where_nothing_has_room() -> None:
    seen = node(0, 0)
    full = tuple(replace(one, free_slots=0) for one in seen.units)
    assert chosen(replace(seen, units=full)) == []
    assert chosen(replace(seen, units=tuple(replace(one, serving=False) for one in full))) == []
