"""The threshold of the shift, from whoever sets it to the next step of every group."""

from typing import Any

import pytest

from shoal.policies.cost.cost_model import CostModel, Hardware, ModelShape
from shoal.policies.shift import ShiftRule, ShiftThreshold, tokens_for
from shoal.policies.values.batch import Mode
from shoal.policies.values.layouts import Layout
from shoal.runtime.config import FakeSettings
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages.views import ShiftView
from tests.runtime.loopback_node import LoopbackNode
from tests.units import tp

SETTINGS = FakeSettings(num_blocks=256, block_tokens=4, max_num_seqs=8, max_model_len=400)
MODEL = CostModel(
    ModelShape(8, 64, 8, 8, 8, parameters=1e6),
    Hardware(1e9, 1e12, 1e7, allreduce_seconds=1e-5),
    max_sp=4,
)
ALL = tp(0, 1, 2, 3)
TP2, TP4 = Layout(tp=2), Layout(tp=4)


def started(**fields: Any) -> LoopbackNode:
    defaults = {"settings": SETTINGS, "max_sp": 4, "shift_threshold": 100}
    node = LoopbackNode(4, **{**defaults, **fields})
    node.settle()
    return node


def set_shift(node: LoopbackNode, threshold: ShiftThreshold) -> m.FromController | None:
    call = node.call(m.SetShiftThreshold, threshold)
    node.settle()
    return node.reply(call)


def steps(node: LoopbackNode, mode: str) -> float:
    """Return the steps that groups have taken in a mode."""
    return node.value("shoal_steps_total", mode=mode)


def test_long_steps_of_a_group_run_in_sp_and_all_others_in_tp() -> None:
    node = started()
    node.switch(ALL)
    node.send("long", 150, 10)
    node.settle()
    assert (steps(node, "sp"), steps(node, "tp")) == (1, 9)
    assert node.value("shoal_step_tokens_total", mode="sp", kind="prefill") == 150
    assert node.value("shoal_step_tokens_total", mode="sp", kind="decode") == 0
    assert node.value("shoal_step_tokens_total", mode="tp", kind="decode") == 9
    node.send("short", 100, 1)
    node.settle()
    assert (steps(node, "sp"), steps(node, "tp")) == (1, 10)


def test_a_single_engine_has_one_mode() -> None:
    node = started()
    node.send("long", 150, 10)
    node.settle()
    modes = {s.labels[1:] for s in node.metric("shoal_steps_total")}
    assert modes == {("dp", "dp"), *((tp, mode) for tp in ("tp2", "tp4") for mode in ("tp", "sp"))}
    assert node.value("shoal_steps_total", mode="dp") == 10


def test_a_node_without_sp_shows_none() -> None:
    node = started(max_sp=1)
    node.switch(ALL)
    node.send("long", 150, 10)
    node.settle()
    modes = {sample.labels[2] for sample in node.metric("shoal_steps_total")}
    assert modes == {"dp", "tp"}
    assert steps(node, "tp") == 10
    assert node.view().shift == ShiftView(100, 1, {})


def turns(node: LoopbackNode, count: int = 4) -> None:
    node.turns(count)
    node.collect()


def test_a_new_threshold_counts_from_the_next_step_on() -> None:
    """A prompt in four chunks of 50 tokens; the threshold changes while each is computed."""
    fake = FakeSettings(step_seconds=1.0, max_num_batched_tokens=50)
    node = started(settings=fake, shift_threshold=49)
    node.switch(ALL)
    node.send("r", 200, 1)
    turns(node)
    for threshold in (ShiftRule.OFF, 0, 50):
        node.call(m.SetShiftThreshold, threshold)
        turns(node)
        node.clock.advance(1.0)
        turns(node)
    node.clock.advance(1.0)
    node.settle()
    assert node.finish.keys() == {"r"}
    assert (steps(node, "sp"), steps(node, "tp")) == (2, 2)


@pytest.mark.parametrize(
    ("threshold", "above"),
    [
        (0, {TP2: 0, TP4: 0}),
        (512, {TP2: 512, TP4: 512}),
        (ShiftRule.OFF, {}),
        (ShiftRule.AUTO, tokens_for(ShiftRule.AUTO, MODEL, (TP2, TP4))),
    ],
)
def test_every_engine_and_policy_is_told(
    threshold: ShiftThreshold, above: dict[Layout, int]
) -> None:
    node = started(cost_model=MODEL)
    answer = set_shift(node, threshold)
    assert isinstance(answer, m.LayoutView)
    assert answer.shift == ShiftView(
        threshold, 4, {layout.name: tokens for layout, tokens in above.items()}
    )
    assert dict(node.controller.snapshot().sp_above) == above
    for backend in node.backends.values():
        for group, core in backend.cores.items():
            assert core.shift.threshold == above.get(group.layout)


def test_no_step_in_sp_lies_under_the_largest_graph() -> None:
    fake = FakeSettings(num_blocks=256, block_tokens=4, max_model_len=400, captured_tokens=160)
    node = started(settings=fake, max_sp=2)
    node.switch(tp(0, 1), tp(2, 3))
    assert node.view().shift.sp_above == {"tp2": 160, "tp4": 160}
    assert node.controller.snapshot().sp_above == ((TP2, 160), (TP4, 160))
    for number, prompt in enumerate((101, 160, 161)):
        node.send(f"r{number}", prompt, 1)
        node.settle()
    assert (steps(node, "sp"), steps(node, "tp")) == (1, 2)


@pytest.mark.parametrize(
    ("fields", "threshold", "named"),
    [
        ({"max_sp": 1}, 512, "--max-sp"),
        ({}, ShiftRule.AUTO, "cost model"),
    ],
)
def test_what_a_node_cannot_do_is_refused(
    fields: dict[str, Any], threshold: ShiftThreshold, named: str
) -> None:
    node = started(**fields)
    before = node.view().shift
    answer = set_shift(node, threshold)
    assert isinstance(answer, m.CallFailed)
    assert answer.status == 400
    assert named in answer.error
    assert node.view().shift == before


def test_a_policy_may_keep_its_groups_in_tp() -> None:
    node = started(policy="static-tp")
    node.run_for(2.0)
    assert node.partition == (ALL,)
    node.send("a", 150, 1)
    node.settle()
    assert (steps(node, "sp"), steps(node, "tp")) == (0, 1)
    assert node.view().shift.sp_above == {}
    node.call(m.SetPolicy, "shift")
    node.settle()
    node.send("b", 150, 1)
    node.settle()
    assert (steps(node, "sp"), steps(node, "tp")) == (1, 1)
    assert node.partition == (ALL,)
    node.call(m.SetPolicy, "static-tp")
    node.settle()
    node.send("c", 150, 1)
    node.settle()
    assert (steps(node, "sp"), steps(node, "tp")) == (1, 2)


def test_the_cost_model_learns_each_mode_apart() -> None:
    fake = FakeSettings(step_seconds=0.1, num_blocks=256, block_tokens=4, max_model_len=400)
    node = started(settings=fake, cost_model=MODEL)
    node.switch(ALL)
    for number, prompt in enumerate((10, 150, 50)):  # nothing is learned from the first step
        node.send(f"r{number}", prompt, 3)
        for _ in range(10):
            turns(node)
            node.clock.advance(0.1)
    node.settle()
    assert set(node.view().step_errors) == {"tp4 sp prefill", "tp4 prefill", "tp4 decode"}
    kinds = {sample.labels for sample in node.metric("shoal_step_time_relative_error")}
    assert kinds == {("tp4", "sp", "prefill"), ("tp4", "tp", "prefill"), ("tp4", "tp", "decode")}
    assert Mode.SP in {c.mode for c in node.controller.snapshot().cost_model.corrections}
