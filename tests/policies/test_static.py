"""The static policies: which unit gets a request, and which layout they want."""

from dataclasses import replace

from shoal.policies.static import MANUAL, STATIC_DP, STATIC_TP, dispatch_least_loaded
from shoal.policies.values.layouts import Layout, Unit, alone
from shoal.policies.values.snapshot import LayoutState, UnitState
from tests.policies.snapshots import request, snapshot, unit
from tests.units import tp


def where(seen) -> dict[str, Unit]:
    return {d.request_id: d.unit for d in dispatch_least_loaded(seen)}


def requests(count: int, **fields):
    return tuple(request(f"r{k}", **fields) for k in range(count))


def test_requests_spread_over_units() -> None:
    seen = snapshot(unit(alone(0)), unit(alone(1)), pool=requests(4))
    assert where(seen) == {"r0": alone(0), "r1": alone(1), "r2": alone(0), "r3": alone(1)}


def test_the_least_loaded_unit_is_first() -> None:
    seen = snapshot(unit(alone(0), requests=2), unit(alone(1), requests=1), pool=requests(1))
    assert where(seen) == {"r0": alone(1)}


def test_load_is_per_engine() -> None:
    seen = snapshot(
        unit(tp(0, 1), requests=3),
        unit(alone(2), requests=2),
        unit(alone(3), requests=2),
        pool=requests(1),
    )
    assert where(seen) == {"r0": tp(0, 1)}


def test_slots_and_blocks_bound_what_leaves_the_pool() -> None:
    assert len(where(snapshot(unit(alone(0), slots=3), pool=requests(9)))) == 3
    # Ten tokens and the first new one are three blocks of four.
    assert len(where(snapshot(unit(alone(0), blocks=8), pool=requests(9)))) == 2


def test_units_that_do_not_serve_get_nothing() -> None:
    seen = snapshot(unit(alone(0), serving=False), unit(alone(1)), pool=requests(2))
    assert set(where(seen).values()) == {alone(1)}


def test_small_requests_do_not_overtake_a_large_one() -> None:
    pool = (request("large", prompt=300), request("small", prompt=4))
    assert where(snapshot(unit(alone(0), blocks=50), pool=pool)) == {}


def test_a_request_that_waits_for_one_unit_leaves_others_open() -> None:
    pool = (request("long", total=500), request("short"))
    seen = snapshot(
        unit(tp(0, 1), slots=0, max_model_len=800), unit(alone(2)), unit(alone(3)), pool=pool
    )
    assert where(seen) == {"short": alone(2)}


def test_a_request_that_no_unit_holds_blocks_nobody() -> None:
    pool = (request("long", total=500), request("short"))
    assert where(snapshot(unit(alone(0)), unit(alone(1)), pool=pool)) == {"short": alone(0)}


def test_long_requests_go_to_a_unit_that_holds_them() -> None:
    seen = snapshot(
        unit(alone(0)),
        unit(alone(1)),
        unit(tp(2, 3), requests=9, max_model_len=800),
        pool=(request("long", total=500),),
    )
    assert where(seen) == {"long": tp(2, 3)}


def wide_and_narrow() -> list[UnitState]:
    """Return four engines together, two together and two alone; the widest has the least to do."""
    return [
        unit(tp(0, 1, 2, 3), max_model_len=1600),
        unit(tp(4, 5), requests=6, max_model_len=800),
        unit(alone(6), requests=1),
        unit(alone(7), requests=2),
    ]


def test_a_long_request_goes_to_the_smallest_group_that_holds_it() -> None:
    pool = (request("two", total=500), request("four", total=1000), request("short"))
    units = wide_and_narrow()
    assert where(snapshot(*units, pool=pool)) == {
        "two": tp(4, 5),
        "four": tp(0, 1, 2, 3),
        "short": tp(0, 1, 2, 3),
    }


def test_a_long_request_does_not_wait_for_the_smallest_group() -> None:
    units = wide_and_narrow()
    units[1] = unit(tp(4, 5), slots=0, max_model_len=800)
    assert where(snapshot(*units, pool=(request("two", total=500),))) == {"two": tp(0, 1, 2, 3)}


def test_no_preference_sends_a_long_request_to_a_wider_group() -> None:
    pool = (request("two", total=500, priority=-1), request("short", priority=-1))
    seen = snapshot(*wide_and_narrow(), pool=pool)
    placed = dispatch_least_loaded(seen, prefer=lambda request: request.priority)
    assert [d.unit for d in placed] == [tp(4, 5), tp(0, 1, 2, 3)]


def test_without_a_single_engine_the_layouts_say_what_is_long() -> None:
    units = [
        unit(tp(0, 1, 2, 3), max_model_len=1600),
        *(unit(g, requests=6) for g in (tp(4, 5), tp(6, 7))),
    ]
    layouts = tuple(LayoutState(Layout(tp=d), 4, 100, 4 * d, 200 * d) for d in (1, 2, 4))
    seen = snapshot(*units, pool=(request("two", total=300), request("short")))
    assert where(replace(seen, layouts=layouts)) == {"two": tp(4, 5), "short": tp(0, 1, 2, 3)}


def test_manual_keeps_any_partition() -> None:
    for units in ([unit(tp(0, 1)), unit(alone(2)), unit(alone(3))], [unit(tp(0, 1, 2, 3))]):
        assert MANUAL.plan(snapshot(*units)).target is None


def test_static_dp_takes_every_group_apart() -> None:
    seen = snapshot(unit(tp(0, 1)), unit(alone(2)), unit(alone(3)))
    assert STATIC_DP.plan(seen).target == (alone(0), alone(1), alone(2), alone(3))
    assert STATIC_DP.plan(snapshot(unit(alone(0)), unit(alone(1)))).target is None


def test_static_tp_forms_the_largest_groups() -> None:
    singles = [unit(alone(engine)) for engine in range(4)]
    assert STATIC_TP.plan(snapshot(*singles)).target == (tp(0, 1, 2, 3),)
    assert STATIC_TP.plan(snapshot(*singles, max_group=2)).target == (tp(0, 1), tp(2, 3))
    assert STATIC_TP.plan(snapshot(unit(tp(0, 1, 2, 3)))).target is None


def test_static_tp_leaves_the_remainder_alone() -> None:
    singles = [unit(alone(engine)) for engine in range(3)]
    assert STATIC_TP.plan(snapshot(*singles, max_group=2)).target == (tp(0, 1), alone(2))


def test_static_tp_forms_no_group_with_a_dead_engine() -> None:
    singles = [unit(alone(engine)) for engine in range(4)]
    seen = snapshot(*singles, max_group=2, dead=frozenset({1}))
    assert STATIC_TP.plan(seen).target == (alone(0), alone(1), tp(2, 3))
