"""The policy ``slo``: the partition that keeps the most promises, by the cost model."""

from dataclasses import replace

import pytest

from policies.cost_model import CostModel, Hardware, ModelShape
from policies.partition import groups_of, singles
from policies.slo import SLO
from policies.snapshot import Snapshot, Target
from tests.policies.snapshots import snapshot, unit

SHAPE = ModelShape(80, 8192, 64, 8, 128, parameters=70e9, weight_bytes=1.0)
HARDWARE = Hardware(3e12, 1e15, 2e11, allreduce_seconds=1e-5, overhead_seconds=2e-3)
MODEL = CostModel(SHAPE, HARDWARE)
DP, TP = singles(8), groups_of(8, 8)
LOOSE, TIGHT = Target(0, 5.0, 0.1), Target(-1, 5.0, 0.012)


def node(partition, classes: dict[int, int], *targets: Target, rate: float = 1.0) -> Snapshot:
    """Return eight engines with so many running requests of each priority, on every engine."""
    units = [
        replace(
            unit(group, requests=sum(classes.values()) * len(group), slots=64),
            by_priority=tuple((p, n * len(group)) for p, n in sorted(classes.items())),
            context_tokens=500 * sum(classes.values()) * len(group),
        )
        for group in partition
    ]
    seen = snapshot(*units)
    return replace(seen, cost_model=MODEL, targets=targets, arrival_rate=rate)


def widths(seen: Snapshot) -> list[int]:
    return sorted(map(len, SLO.plan(seen).target or seen.partition))


def test_promises_that_dp_breaks_form_groups() -> None:
    tight = Target(0, 5.0, 0.012)
    assert widths(node(DP, {0: 1}, tight))[-1] > 1
    loose = replace(node(DP, {0: 1}, LOOSE), since_switch=1.0)
    assert widths(loose) == [1] * 8


def test_a_load_that_breaks_promises_in_tp_takes_them_apart() -> None:
    # 25 prompts of 500 tokens a second are more than all engines together compute as one.
    heavy = replace(MODEL, hardware=replace(HARDWARE, link_bytes_per_second=1e10))
    seen = replace(node(TP, {0: 8}, Target(0, 2.0, 0.06), rate=25.0), cost_model=heavy)
    assert widths(seen)[0] == 1


def test_an_urgent_class_gets_a_group_beside_single_engines() -> None:
    heavy = replace(MODEL, hardware=replace(HARDWARE, link_bytes_per_second=1e10))
    seen = node(DP, {-1: 1, 0: 8}, TIGHT, Target(0, 2.0, 0.06), rate=25.0)
    assert 1 in widths(replace(seen, cost_model=heavy))
    assert max(widths(replace(seen, cost_model=heavy))) > 1


def test_a_gain_within_the_models_error_changes_nothing() -> None:
    assert SLO.plan(replace(node(DP, {0: 1}, LOOSE), since_switch=0.0)).target is None


def test_no_switch_while_one_runs() -> None:
    assert SLO.plan(replace(node(DP, {0: 1}, TIGHT), switching=True)).target is None


@pytest.mark.parametrize("missing", ["targets", "cost_model"])
def test_without_promises_or_model_load_decides(missing: str) -> None:
    seen = node(DP, {0: 1}, LOOSE)
    empty = {"targets": (), "cost_model": None}[missing]
    assert SLO.plan(replace(seen, **{missing: empty})).target == TP
