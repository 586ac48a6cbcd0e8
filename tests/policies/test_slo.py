"""The policy ``slo``: when it switches, where to, and whom it sends where."""

from dataclasses import replace

import pytest

from shoal.policies.cost.cost_model import CostModel, Hardware, ModelShape
from shoal.policies.slo import LEAST_SECONDS, SETTLE_SECONDS, SLO
from shoal.policies.values.layouts import alone
from shoal.policies.values.partition import Partition, singles
from shoal.policies.values.snapshot import Snapshot, Target
from tests.policies.snapshots import LAYOUTS, request, snapshot, unit
from tests.units import tp, tp_units

SHAPE = ModelShape(80, 8192, 64, 8, 128, parameters=70e9, weight_bytes=1.0)
HARDWARE = Hardware(3e12, 1e15, 2e11, allreduce_seconds=1e-5, overhead_seconds=2e-3)
MODEL = CostModel(SHAPE, HARDWARE)
DP, TP = singles(8), tp_units(8, 8)
LOOSE, TIGHT = Target(0, 5.0, 0.1), Target(0, 5.0, 0.012)
URGENT, REST = Target(-1, 0.5, 0.013), Target(0, 1.0, 0.035)


def node(
    partition: Partition, classes: dict[int, int], *targets: Target, rate: float = 1.0
) -> Snapshot:
    """Return eight engines with so many running requests of each priority, on every engine."""
    units = []
    for group in partition:
        counts = {priority: count * group.size for priority, count in sorted(classes.items())}
        total = sum(counts.values())
        units.append(
            unit(
                group,
                requests=total,
                slots=64,
                running=total,
                by_priority=tuple(counts.items()),
                context_tokens=500 * total,
            )
        )
    return replace(snapshot(*units), cost_model=MODEL, targets=targets, arrival_rate=rate)


def widths(seen: Snapshot) -> list[int]:
    return sorted(unit.size for unit in SLO.plan(seen).target or seen.partition)


def test_promises_that_dp_breaks_form_groups() -> None:
    assert widths(node(DP, {0: 1}, TIGHT))[-1] > 1
    assert widths(replace(node(DP, {0: 1}, LOOSE), since_switch=SETTLE_SECONDS - 1)) == [1] * 8


def test_promises_that_any_layout_keeps_are_kept_in_the_fastest() -> None:
    """But not soon after a switch, nor while load grows, nor where a surge would break them."""
    seen = node(DP, {0: 1}, LOOSE, rate=0.5)
    quiet = replace(seen, smoothed_requests=8.0)
    assert widths(quiet) == [8]
    assert widths(replace(quiet, since_switch=SETTLE_SECONDS - 1)) == [1] * 8
    assert widths(replace(quiet, smoothed_requests=4.0)) == [1] * 8
    assert widths(replace(quiet, arrival_rate=8.0))[-1] < 8


def test_a_load_that_breaks_promises_in_tp_takes_them_apart() -> None:
    assert widths(node(TP, {0: 8}, Target(0, 2.0, 0.06), rate=25.0)) == [1] * 8


def test_an_urgent_class_gets_a_group_beside_narrower_units() -> None:
    assert widths(node(DP, {-1: 1, 0: 4}, URGENT, REST, rate=12.0)) == [2, 2, 4]


def test_urgent_requests_go_to_the_widest_unit_and_the_others_elsewhere() -> None:
    mixed: Partition = (tp(0, 1, 2, 3), tp(4, 5), tp(6, 7))
    seen = node(mixed, {-1: 1, 0: 1}, URGENT, REST)
    pool = (request("urgent", priority=-1), request("a"), request("b"))
    sent = {d.request_id: d.unit.size for d in SLO.plan(replace(seen, pool=pool)).dispatches}
    assert sent == {"urgent": 4, "a": 2, "b": 2}


def test_one_class_goes_wherever_there_is_least_to_do() -> None:
    busy = unit(tp(0, 1, 2, 3), requests=4)
    seen = snapshot(busy, *(unit(alone(k), requests=0) for k in range(4, 8)), pool=(request("a"),))
    seen = replace(seen, cost_model=MODEL, targets=(LOOSE,), waiting=1)
    assert SLO.plan(seen).dispatches[0].unit.size == 1


# --- keeping still ---


def test_a_switch_just_made_is_given_time() -> None:
    wanted = node(DP, {0: 1}, TIGHT)
    assert SLO.plan(wanted).target is not None
    assert SLO.plan(replace(wanted, since_switch=LEAST_SECONDS / 2)).target is None


def test_a_gain_that_is_enough_in_the_long_run_is_not_at_once() -> None:
    # Some requests break their promise in DP, none in groups.
    seen = node(DP, {0: 1}, Target(0, 5.0, 0.031))
    assert SLO.plan(seen).target is not None
    assert SLO.plan(replace(seen, since_switch=2.0)).target is None


def test_where_all_is_lost_nothing_is_moved() -> None:
    hopeless = node(tp_units(8, 2), {0: 100}, Target(0, 0.001, 0.001), rate=500.0)
    assert SLO.plan(hopeless).target is None


def test_an_idle_node_stays_as_it_is() -> None:
    assert SLO.plan(node(DP, {}, TIGHT, rate=0.0)).target is None


def test_no_switch_while_one_runs() -> None:
    assert SLO.plan(replace(node(DP, {0: 1}, TIGHT), switching=True)).target is None


def test_a_request_that_fits_nowhere_is_reason_enough() -> None:
    seen = node(DP, {0: 1}, LOOSE)
    long = request("long", prompt=20, total=LAYOUTS[1].max_model_len)
    seen = replace(seen, layouts=LAYOUTS, pool=(long,), waiting=1, since_switch=0.0)
    assert widths(seen)[-1] > 1


@pytest.mark.parametrize("missing", ["targets", "cost_model"])
def test_without_promises_or_model_load_decides(missing: str) -> None:
    seen = node(DP, {0: 1}, LOOSE)
    empty = {"targets": (), "cost_model": None}[missing]
    assert SLO.plan(replace(seen, **{missing: empty})).target == TP
