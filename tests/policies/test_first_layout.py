"""The layout with which an idle node begins: the one whose worst case is best."""

from dataclasses import replace

import pytest

from shoal.policies import first_layout as module
from shoal.policies.cost.cost_model import CostModel
from shoal.policies.first_layout import LENGTHS, RATES, REQUESTS, first_layout
from shoal.policies.values.layouts import Layout, layouts_up_to
from shoal.policies.values.snapshot import Snapshot
from tests.policies.nodes import DP, node
from tests.policies.snapshots import MODEL

ALL = layouts_up_to(8)
IDLE = replace(node(DP), sp_above=tuple((layout, 512) for layout in ALL[1:]))


def slow(**hardware: float) -> CostModel:
    return replace(MODEL, hardware=replace(MODEL.hardware, **hardware))


def test_a_node_with_fast_links_begins_in_one_group_and_one_with_slow_ones_in_single_engines() -> (
    None
):
    assert first_layout(IDLE, MODEL) == Layout(tp=8)
    assert first_layout(replace(IDLE, max_group=4), MODEL) == Layout(tp=4)
    late = slow(allreduce_seconds=1e-2)
    assert first_layout(replace(IDLE, cost_model=late), late) == Layout(tp=1)


def test_the_worst_case_decides_and_not_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs, group, worst = Layout(tp=2), Layout(tp=8), [2.0]

    def spent(layout: Layout, _: int, prompt: float, __: float, rate: float, ___: object) -> float:
        """The group is best, but not if a crowd comes with long prompts."""
        crowd = rate == RATES[-1] and prompt == LENGTHS[-1][0]
        return {pairs: 1.5, group: worst[0] if crowd else 1.0}.get(layout, 1.0 if crowd else 3.0)

    monkeypatch.setattr(module, "_cost", spent)
    assert first_layout(IDLE, MODEL) == pairs
    worst[0] = 1.4
    assert first_layout(IDLE, MODEL) == group


def test_the_requests_are_always_the_same_and_have_about_the_means_that_are_named() -> None:
    for prompt, output in LENGTHS:
        jobs = list(module._made_up(prompt, output, 4.0))
        assert jobs == list(module._made_up(prompt, output, 4.0))
        assert len(jobs) == REQUESTS
        assert jobs[-1].start == pytest.approx(REQUESTS / 4.0, rel=0.25)
        assert sum(job.prompt for job in jobs) == pytest.approx(REQUESTS * prompt, rel=0.25)
        assert sum(job.output for job in jobs) == pytest.approx(REQUESTS * output, rel=0.25)


@pytest.mark.parametrize("engines", [1, 2, 4, 8])
def test_every_layout_that_is_found_fits_the_node(engines: int) -> None:
    seen: Snapshot = replace(IDLE, engines=engines)
    assert first_layout(seen, MODEL).world_size <= engines
