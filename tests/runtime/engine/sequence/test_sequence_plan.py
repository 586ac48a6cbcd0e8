"""Which layouts' graphs steps by sequence replay, on all shapes of node, and what that reserves."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode

from shoal.policies.values.layouts import DP, Layout, layouts_up_to, tensor_parallel
from shoal.runtime.engine.sequence.sequence_plan import LARGER_CAPTURES_BYTES, SequencePlan
from shoal.runtime.engine.sequence.sp_settings import SettingError

MAX_TOKENS = 3000
OWN_SIZES = [1, 256, 512]
SHARE_OF_TWO = [576, 640, 704, 768, 832, 896, 960, 1024, 1152, 1280, 1408, 1500]
SHARE_OF_FOUR = [576, 640, 704, 750]
TP2, TP4 = Layout(tp=2), Layout(tp=4)

CONFIG: Any = SimpleNamespace(
    scheduler_config=SimpleNamespace(max_num_batched_tokens=MAX_TOKENS),
    compilation_config=SimpleNamespace(
        cudagraph_capture_sizes=OWN_SIZES, cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE
    ),
)


def planned(
    max_sp: int, layouts: Sequence[Layout] = layouts_up_to(4), *, sizes_are_chosen: bool = False
) -> SequencePlan:
    return SequencePlan(layouts, max_sp, sizes_are_chosen=sizes_are_chosen)


def captures(plan: SequencePlan) -> dict[Layout, tuple[bool, list[int]]]:
    """Return by layout whether steps by sequence replay graphs of its model, and which larger."""
    found = {layout: plan.captures(layout, CONFIG) for layout in layouts_up_to(4)}
    return {layout: (each.wanted, list(each.larger)) for layout, each in found.items()}


NONE = (False, list[int]())


@pytest.mark.parametrize(
    ("max_sp", "wanted"),
    [
        pytest.param(1, {DP: NONE, TP2: NONE, TP4: NONE}, id="no steps by sequence"),
        pytest.param(4, {DP: (True, SHARE_OF_TWO), TP2: NONE, TP4: NONE}, id="the base is DP"),
        pytest.param(
            2,
            {DP: (True, SHARE_OF_TWO), TP2: (True, SHARE_OF_TWO), TP4: NONE},
            id="the base of a group of four is TP2",
        ),
    ],
)
def test_graphs_of_bases_are_replayed(
    max_sp: int, wanted: dict[Layout, tuple[bool, list[int]]]
) -> None:
    assert captures(planned(max_sp)) == wanted


def test_sizes_go_as_far_as_the_largest_share_of_any_group() -> None:
    """With groups of four alone, shares were no larger than these."""
    assert captures(planned(4, (DP, TP4)))[DP] == (True, SHARE_OF_FOUR)


def test_who_chooses_sizes_gets_those_alone() -> None:
    chosen = planned(4, sizes_are_chosen=True)
    assert captures(chosen) == {DP: (True, []), TP2: NONE, TP4: NONE}


def test_memory_is_kept_for_the_larger_graphs_that_vllm_does_not_measure() -> None:
    """It measures those of DP."""
    assert planned(1).reserved_bytes == 0
    assert planned(4).reserved_bytes == 0
    assert planned(2).reserved_bytes == LARGER_CAPTURES_BYTES
    assert planned(2, sizes_are_chosen=True).reserved_bytes == 0


@pytest.mark.parametrize(
    ("max_sp", "bases", "reorders"),
    [(1, {}, False), (2, {TP2: DP, TP4: TP2}, True), (4, {TP2: DP, TP4: DP}, False)],
)
def test_each_group_has_a_base(max_sp: int, bases: dict[Layout, Layout], reorders: bool) -> None:
    plan = planned(max_sp)
    included = [layout for layout in layouts_up_to(4) if plan.includes(layout)]
    assert {layout: plan.base(layout) for layout in included} == bases
    assert plan.reorders is reorders


def test_a_pipeline_runs_no_step_by_sequence() -> None:
    pipeline = Layout(tp=2, pp=2)
    plan = planned(2, (DP, TP2, pipeline))
    assert [plan.includes(layout) for layout in (DP, TP2, pipeline)] == [False, True, False]


def test_a_wrong_word_is_found_where_steps_run_by_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_SP_EXCHANGE", "yes")
    with pytest.raises(SettingError, match="SHOAL_SP_EXCHANGE=yes: "):
        planned(2)
    planned(1)


def test_a_group_alone_can_be_told_to_exchange_through_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHOAL_SP_EXCHANGE", "peer")
    plan = planned(2)
    assert plan.requires_peers
    assert not plan.exchanges_by_peers(tensor_parallel([0]))
    with pytest.raises(SettingError, match="there are no GPUs"):
        plan.exchanges_by_peers(tensor_parallel([0, 1]))
