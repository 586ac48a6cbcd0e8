"""From how many tokens on steps are run in SP, and the policy that lives by it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.policies.cost.cost_model import CostModel
from shoal.policies.registry import get_policy
from shoal.policies.shift import (
    DEFAULT_THRESHOLD,
    MOST_TOKENS,
    SHIFT,
    ShiftRule,
    ShiftThresholdError,
    parse_threshold,
    tokens_for,
)
from shoal.policies.values.batch import Batch, Mode
from shoal.policies.values.layouts import Layout, alone, layouts_up_to
from shoal.policies.values.partition import singles
from shoal.policies.values.speculation import Speculation
from tests.policies.snapshots import MODEL, snapshot, unit
from tests.units import tp_units

GROUPS = layouts_up_to(8)[1:]
SP = replace(MODEL, max_sp=8)


@pytest.mark.parametrize(
    ("value", "threshold"),
    [
        (512, 512),
        ("512", 512),
        (0, 0),
        (MOST_TOKENS, MOST_TOKENS),
        ("auto", ShiftRule.AUTO),
        ("off", ShiftRule.OFF),
    ],
)
def test_thresholds(value: int | str, threshold: int | ShiftRule) -> None:
    assert parse_threshold(value) == threshold


@pytest.mark.parametrize("value", [-1, "-1", MOST_TOKENS + 1, "", "on", "1.5", True, "AUTO"])
def test_what_is_no_threshold_is_named(value: int | str) -> None:
    with pytest.raises(ShiftThresholdError, match=f"'{value}' is no threshold"):
        parse_threshold(value)


def test_a_number_of_thousands_of_digits_is_no_threshold() -> None:
    """Python itself refuses to read one, with an error of another kind."""
    with pytest.raises(ShiftThresholdError, match=f"'{'9' * 40}' is no threshold"):
        parse_threshold("9" * 5000)


def test_a_number_counts_for_every_layout_and_off_for_none() -> None:
    assert tokens_for(256, None, GROUPS) == dict.fromkeys(GROUPS, 256)
    assert tokens_for(ShiftRule.OFF, SP, GROUPS) == {}


def test_auto_is_the_first_step_that_sp_is_faster_for() -> None:
    found = tokens_for(ShiftRule.AUTO, SP, GROUPS)
    assert set(found) == set(GROUPS)
    for layout, above in found.items():
        for tokens, faster in ((above, False), (above + 1, True), (10 * above, True)):
            step = Batch(prefill_tokens=tokens)
            in_sp = SP.step_seconds(layout, step, Mode.SP)
            assert (in_sp < SP.step_seconds(layout, step)) is faster
    assert found[Layout(tp=8)] > found[Layout(tp=2)], (
        "the more members, the more weights are read in vain"
    )


def test_auto_is_never_where_sp_is_never_faster() -> None:
    free = replace(SP, hardware=replace(SP.hardware, link_bytes_per_second=1e30))
    free = replace(free, hardware=replace(free.hardware, allreduce_seconds=0.0))
    assert tokens_for(ShiftRule.AUTO, free, GROUPS) == {}


SHARED = replace(SP, shape=replace(SP.shape, sharable_bytes=5.6e10), share_weights=2)


@pytest.mark.parametrize("threshold", [256, ShiftRule.AUTO])
def test_steps_that_read_weights_of_others_run_in_sp_only_where_this_is_hidden(
    threshold: int | ShiftRule,
) -> None:
    shared, whole = (tokens_for(threshold, model, GROUPS) for model in (SHARED, SP))
    for layout, above in shared.items():
        steps = [Batch(prefill_tokens=tokens) for tokens in (above, above + 1)]
        faster = [
            SHARED.device_seconds(layout, step, Mode.SP) < SHARED.device_seconds(layout, step)
            for step in steps
        ]
        assert faster == [False, True]
        assert above > 2 * whole[layout]
    assert tokens_for(MOST_TOKENS, SHARED, GROUPS) == dict.fromkeys(GROUPS, MOST_TOKENS)


def waiting_for_host(layer_seconds: float) -> CostModel:
    hardware = replace(SP.hardware, sp_layer_host_seconds=layer_seconds)
    return replace(SP, hardware=hardware)


@pytest.mark.parametrize("layer_seconds", [1e-3, 1.0])
@pytest.mark.parametrize("layout", GROUPS)
def test_the_host_does_not_move_auto(layout: Layout, layer_seconds: float) -> None:
    """The model charges SP alone for it, and on GPUs steps in TP of as many tokens wait longer."""
    slow = waiting_for_host(layer_seconds)
    free = tokens_for(ShiftRule.AUTO, SP, (layout,))
    assert tokens_for(ShiftRule.AUTO, slow, (layout,)) == free
    step = Batch(prefill_tokens=free[layout] + 1)
    tp, sp = (slow.roofline_seconds(layout, step, mode) for mode in Mode)
    assert tp < sp, "with the host, the model would have kept this step in TP"


@given(
    degree=st.sampled_from((2, 4, 8)),
    max_sp=st.sampled_from((2, 4, 8)),
    level=st.sampled_from((1, 2, 4, 8)),
    shares=st.tuples(st.integers(1, 20_000), st.integers(1, 20_000)),
)
def test_what_sp_saves_never_shrinks_as_a_step_gets_longer(
    degree: int, max_sp: int, level: int, shares: tuple[int, int]
) -> None:
    """The search for the threshold relies on it. Steps that need no padding."""
    model = replace(SHARED, max_sp=max_sp, share_weights=level)

    def saved(tokens: int) -> float:
        tp, sp = (
            model.device_seconds(Layout(tp=degree), Batch(prefill_tokens=tokens), m) for m in Mode
        )
        return tp - sp

    short, long = sorted(degree * share for share in shares)
    assert saved(long) >= saved(short) - 1e-12


def test_measurements_do_not_move_it() -> None:
    """They come from one side of the threshold only, and would confirm it."""
    step = Batch(prefill_tokens=5000)
    slow = SP.observe(Layout(tp=8), step, 9 * SP.step_seconds(Layout(tp=8), step, Mode.SP), Mode.SP)
    assert tokens_for(ShiftRule.AUTO, slow, GROUPS) == tokens_for(ShiftRule.AUTO, SP, GROUPS)


def test_auto_needs_a_model() -> None:
    with pytest.raises(ShiftThresholdError, match="cost model"):
        tokens_for(ShiftRule.AUTO, None, GROUPS)


@pytest.mark.parametrize(
    ("degree", "tokens", "mode"),
    [(4, 300, Mode.TP), (4, 301, Mode.SP), (2, 5000, Mode.TP), (1, 5000, Mode.TP)],
)
def test_a_snapshot_says_how_a_step_is_run(degree: int, tokens: int, mode: Mode) -> None:
    seen = replace(snapshot(unit(alone(0))), sp_above=((Layout(tp=4), 300),))
    assert seen.mode(Layout(tp=degree), Batch(prefill_tokens=tokens - 1, decodes=1)) is mode
    drafting = replace(MODEL, speculation=Speculation(drafts=3.0, seen=9))
    checks = replace(seen, cost_model=drafting)
    decodes = Batch(decodes=10, prefill_tokens=tokens - 40)
    assert checks.mode(Layout(tp=degree), decodes) is mode, "each of them computes four tokens"


def test_the_policy_keeps_the_largest_groups_whatever_comes() -> None:
    assert (get_policy("shift").shifts, get_policy("static-tp").shifts) == (True, False)
    alone = [unit(group, requests=100) for group in singles(8)]
    assert SHIFT.plan(snapshot(*alone)).target == tp_units(8, 8)
    bound = unit(tp_units(8, 8)[0], requests=500, slots=0)
    busy = replace(snapshot(bound), waiting=1000, since_urgent=0.0, smoothed_requests=1e3)
    assert SHIFT.plan(busy).target is None


def test_the_default_is_the_paper_s() -> None:
    assert DEFAULT_THRESHOLD == 256
