"""The roofline's terms, each where it is the one that counts; its correction by measurements."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.policies.cost.cost_model import (
    KNOWN,
    LEAST_COPY_BYTES,
    MAX_CORRECTION,
    CostModel,
    Hardware,
    ModelShape,
)
from shoal.policies.values.batch import Batch, Mode, StepKind
from shoal.policies.values.layouts import DP, Layout, layouts_up_to
from shoal.policies.values.pace import stage_seconds
from shoal.policies.values.speculation import KEPT, Speculation

SHAPE = ModelShape(
    layers=10, hidden=100, heads=8, kv_heads=4, head_dim=16, parameters=1e6, weight_bytes=2.0
)
HARDWARE = Hardware(memory_bytes_per_second=1e9, flops_per_second=1e12, link_bytes_per_second=1e8)
MODEL = CostModel(SHAPE, HARDWARE)
ONE = Batch(decodes=1)


def test_a_small_batch_costs_the_reading_of_the_weights() -> None:
    assert MODEL.step_seconds(Layout(tp=1), ONE) == pytest.approx(2e6 / 1e9)


def test_a_long_prompt_costs_its_arithmetic() -> None:
    assert MODEL.step_seconds(Layout(tp=1), Batch(prefill_tokens=10_000)) == pytest.approx(
        2e6 * 1e4 / 1e12
    )


SHARED = replace(
    MODEL,
    shape=replace(SHAPE, sharable_bytes=1.6e6),
    hardware=replace(HARDWARE, peer_bytes_per_second=1e8),
    share_weights=4,
)
"""Four engines share 1.6 MB of weights, and read each other's memory ten times as slowly as theirs.
"""


@pytest.mark.parametrize(("tp", "missing"), [(1, 3 / 4), (2, 1 / 4), (4, 0)])
def test_a_small_step_takes_as_long_as_reading_what_others_keep(tp: int, missing: float) -> None:
    found = SHARED.device_seconds(Layout(tp=tp), ONE)
    assert found == pytest.approx(
        max(missing * 1.6e6 / 1e8, MODEL.device_seconds(Layout(tp=tp), ONE))
    )


def test_a_long_step_hides_what_it_reads_from_others() -> None:
    long = Batch(prefill_tokens=10_000)
    assert SHARED.step_seconds(DP, long) == MODEL.step_seconds(DP, long)


def test_streaming_is_hidden_above_a_number_of_tokens() -> None:
    """Three quarters of the MLPs take 12 ms to read, and a token takes 2 us to compute."""
    assert SHARED.hidden_above(DP) == 6000
    fast = replace(SHARED, hardware=replace(SHARED.hardware, link_bytes_per_second=1e30))
    assert [fast.hidden_above(Layout(tp=tp)) for tp in (2, 4)] == [4000, 0]
    assert replace(SHARED, share_weights=1).hidden_above(DP) == 0
    slow = SHARED.fit(Layout(tp=4), Mode.TP, StepKind.PREFILL, slower(SHARED, Layout(tp=4), 2.0))
    assert slow.hidden_above(DP) == pytest.approx(3000, rel=1e-3)


def test_whole_stages_leave_their_pipeline_nothing_to_read_and_dp_the_rest() -> None:
    """DP reads half of what it would, but only while it computes the layers that are not whole."""
    level = replace(SHARED, whole_stages=2)
    in_stages = Layout(pp=2)
    assert not level.streams(in_stages)
    assert level.pace(in_stages, StepKind.DECODE) == replace(SHARED, share_weights=1).pace(
        in_stages, StepKind.DECODE
    )
    reading, computing = 6e-3, MODEL.step_seconds(DP, ONE)
    assert level.fetch_seconds(DP) == pytest.approx(reading)
    assert level.step_seconds(DP, ONE) == pytest.approx(reading + computing / 2)
    long = Batch(prefill_tokens=10_000)
    assert level.step_seconds(DP, long) == MODEL.step_seconds(DP, long)
    assert level.hidden_above(DP) == SHARED.hidden_above(DP), "a layer hides the next one or not"
    for layout in (Layout(tp=2), Layout(tp=4), Layout(tp=2, pp=2), Layout(pp=4)):
        assert level.fetch_seconds(layout) == SHARED.fetch_seconds(layout), layout.name


def slower(model: CostModel, layout: Layout, factor: float) -> list[tuple[Batch, float]]:
    """Return steps that take so many times as long as the roofline says."""
    batches = [Batch(prefill_tokens=tokens) for tokens in (10, 100, 1000, 20_000)]
    return [(batch, factor * model.roofline_seconds(layout, batch)) for batch in batches]


def test_steps_that_read_weights_of_others_say_nothing_of_those_that_do_not() -> None:
    short, long = Batch(prefill_tokens=100), Batch(prefill_tokens=20_000)
    model = SHARED.fit(DP, Mode.TP, StepKind.PREFILL, slower(SHARED, DP, 1.5))
    assert model.step_seconds(DP, short) == pytest.approx(1.5 * 12e-3)
    assert model.step_seconds(DP, long) == pytest.approx(1.5 * 40e-3)
    whole = replace(model, share_weights=1)
    for layout in (DP, Layout(tp=4)):
        assert whole.step_seconds(layout, short) == MODEL.step_seconds(layout, short)
        assert whole.step_seconds(layout, long) == MODEL.step_seconds(layout, long)
    learned = whole
    for _ in range(30):
        learned = learned.observe(DP, short, 3 * MODEL.step_seconds(DP, short))
    assert learned.step_seconds(DP, short) == pytest.approx(3 * 2e-3, rel=0.05)
    again = replace(learned, share_weights=4)
    assert again.step_seconds(DP, short) == pytest.approx(1.5 * 12e-3), "reading took all the time"


def test_long_steps_that_hide_the_reading_say_what_computing_takes() -> None:
    """A group's short steps that all take as long, as they wait for their host, say it wrong."""
    flat = [(Batch(prefill_tokens=tokens), 30e-3) for tokens in (10, 100, 1000)]
    group = SHARED.fit(Layout(tp=4), Mode.TP, StepKind.PREFILL, flat)
    sizes = (100, 8000, 20_000, 60_000)
    taken = {tokens: max(12e-3, 1.2 * 2e-6 * tokens) for tokens in sizes}
    batches = [(Batch(prefill_tokens=tokens), taken[tokens]) for tokens in sizes]
    model = group.fit(DP, Mode.TP, StepKind.PREFILL, batches)
    for batch, seconds in batches:
        assert model.step_seconds(DP, batch) == pytest.approx(seconds, rel=0.02)
    whole = replace(model, share_weights=1)
    assert whole.step_seconds(DP, Batch(prefill_tokens=30_000)) == pytest.approx(72e-3, rel=0.02)


def test_a_step_that_reads_weights_takes_at_least_its_corrected_computing() -> None:
    long = Batch(prefill_tokens=20_000)
    whole = replace(SHARED, share_weights=1)
    slow = whole.fit(DP, Mode.TP, StepKind.PREFILL, slower(whole, DP, 2.0))
    shared = replace(slow, share_weights=4)
    assert shared.step_seconds(DP, long) == pytest.approx(slow.step_seconds(DP, long))
    assert shared.step_seconds(DP, Batch(prefill_tokens=1)) == pytest.approx(12e-3)


def test_copies_of_kv_through_the_host_say_nothing_of_weights() -> None:
    slow = SHARED.observe_carry(LEAST_COPY_BYTES, 10.0, links=1)
    assert slow.carry_seconds(1e6, 1) > 2 * SHARED.carry_seconds(1e6, 1)
    assert slow.step_seconds(DP, ONE) == SHARED.step_seconds(DP, ONE)


def test_a_step_by_sequence_reads_what_its_base_computes_with() -> None:
    model = replace(SHARED, max_sp=2)
    assert model.device_seconds(Layout(tp=4), ONE, Mode.SP) == pytest.approx(1.6e6 / 4 / 1e8)


# Of a million parameters that a token passes through, 600,000 are those of its 2 of 16 experts.
EXPERTS = replace(SHAPE, experts=16, experts_per_token=2, expert_parameters=8 * 6e5)


@pytest.mark.parametrize(
    ("tokens", "parameters"),
    [(1, 1e6), (2, 4e5 + 4.8e6 * (1 - (7 / 8) ** 2)), (1000, 4e5 + 4.8e6)],
)
def test_more_tokens_read_more_experts_until_all_are_read(tokens: int, parameters: float) -> None:
    model = replace(MODEL, shape=EXPERTS)
    assert model.step_seconds(Layout(tp=1), Batch(decodes=tokens)) == pytest.approx(
        2 * parameters / 1e9, rel=0.001
    )
    plain = MODEL.step_seconds(Layout(tp=1), Batch(decodes=min(tokens, 2)))
    assert plain == pytest.approx(2 * 1e6 / 1e9, rel=0.001), "without experts, all are read"


@pytest.mark.parametrize("tokens", [1, 1000])
def test_experts_with_fewer_bytes_are_read_faster(tokens: int) -> None:
    model = replace(MODEL, shape=replace(EXPERTS, expert_bytes=0.5))
    read = 6e5 if tokens == 1 else 4.8e6
    assert model.step_seconds(Layout(tp=1), Batch(decodes=tokens)) == pytest.approx(
        (2 * 4e5 + 0.5 * read) / 1e9, rel=0.001
    )


def test_a_token_computes_with_its_own_experts_alone() -> None:
    model = replace(MODEL, shape=EXPERTS)
    tokens = Batch(prefill_tokens=100_000)
    assert model.step_seconds(Layout(tp=1), tokens) == MODEL.step_seconds(Layout(tp=1), tokens)


def test_a_member_of_sp_reads_the_experts_of_its_own_tokens() -> None:
    fast = replace(HARDWARE, link_bytes_per_second=1e30)
    model = CostModel(EXPERTS, fast, max_sp=2)
    by_sequence = model.step_seconds(Layout(tp=2), Batch(decodes=4), Mode.SP)
    assert by_sequence == pytest.approx(2 * (4e5 + 4.8e6 * (1 - (7 / 8) ** 2)) / 1e9)


def test_context_costs_the_reading_of_its_keys_and_values() -> None:
    one_token = 2 * 10 * 4 * 16 * 2
    assert SHAPE.kv_bytes_per_token == one_token
    extra = MODEL.step_seconds(Layout(tp=1), Batch(1, 5000)) - MODEL.step_seconds(Layout(tp=1), ONE)
    assert extra == pytest.approx(5000 * one_token / 1e9)


def test_copies_of_the_kv_heads_make_reading_no_faster() -> None:
    fast = replace(MODEL, hardware=replace(HARDWARE, link_bytes_per_second=1e30))
    extra = [
        fast.step_seconds(layout, Batch(1, 5000)) - fast.step_seconds(layout, ONE)
        for layout in layouts_up_to(8)
    ]
    assert extra[0] == pytest.approx(2 * extra[1])
    assert extra[1] == pytest.approx(2 * extra[2])
    assert extra[3] == pytest.approx(extra[2])


def test_a_group_divides_the_work_and_pays_for_reducing() -> None:
    reduce = 2 * 10 * (2 * 3 / 4 * 100 * 2 / 1e8 + 1e-5)
    model = replace(MODEL, hardware=replace(HARDWARE, allreduce_seconds=1e-5, overhead_seconds=7.0))
    assert model.step_seconds(Layout(tp=4), ONE) == pytest.approx(2e6 / 1e9 / 4 + reduce + 7.0)
    assert model.step_seconds(Layout(tp=1), ONE) == pytest.approx(2e6 / 1e9 + 7.0)


def test_measurements_correct_their_degree_only() -> None:
    model = MODEL.observe(Layout(tp=1), ONE, MODEL.step_seconds(Layout(tp=1), ONE))
    for _ in range(5):
        model = model.observe(Layout(tp=2), ONE, 1.5 * MODEL.step_seconds(Layout(tp=2), ONE))
    assert model.step_seconds(Layout(tp=2), ONE) == pytest.approx(
        1.5 * MODEL.step_seconds(Layout(tp=2), ONE)
    )
    assert model.step_seconds(Layout(tp=1), ONE) == MODEL.step_seconds(Layout(tp=1), ONE)
    assert model.correction(Layout(tp=2), StepKind.DECODE).samples == 5


def test_what_was_not_measured_misses_as_the_most_similar_that_was() -> None:
    """Else the layout that runs would look slow beside those that do not."""
    neutral, late = replace(MODEL, max_sp=4), 0.001
    model = neutral.observe(Layout(tp=4), ONE, neutral.step_seconds(Layout(tp=4), ONE) + late)
    for degree, mode in ((4, Mode.SP), (2, Mode.TP), (1, Mode.TP)):
        truth = neutral.step_seconds(Layout(tp=degree), ONE, mode) + late
        assert model.step_seconds(Layout(tp=degree), ONE, mode) == pytest.approx(truth)
        assert model.correction(Layout(tp=degree), StepKind.DECODE, mode).samples == 0
    nearer = model.observe(Layout(tp=2), ONE, MODEL.step_seconds(Layout(tp=2), ONE))
    assert nearer.step_seconds(Layout(tp=1), ONE) == MODEL.step_seconds(Layout(tp=1), ONE)


def batch(tokens: int) -> Batch:
    return Batch(decodes=1, prefill_tokens=tokens)


@pytest.mark.parametrize(("part", "constant"), [(1.0, 0.004), (1.5, 0.0), (1.2, 0.002)])
def test_steps_of_many_lengths_tell_a_part_from_a_constant(part: float, constant: float) -> None:
    """What short steps miss says what long ones will, which were never measured."""
    model = MODEL
    for tokens in [2000, 6000, 4000, 8000] * 20:
        seconds = part * MODEL.step_seconds(Layout(tp=1), batch(tokens)) + constant
        model = model.observe(Layout(tp=1), batch(tokens), seconds)
    for tokens in (1000, 40_000):
        truth = part * MODEL.step_seconds(Layout(tp=1), batch(tokens)) + constant
        assert model.step_seconds(Layout(tp=1), batch(tokens)) == pytest.approx(truth, rel=0.1)


def test_steps_of_one_length_are_taken_to_miss_a_constant() -> None:
    model = MODEL
    for _ in range(20):
        model = model.observe(
            Layout(tp=1), batch(4000), 0.004 + MODEL.step_seconds(Layout(tp=1), batch(4000))
        )
    truth = 0.004 + MODEL.step_seconds(Layout(tp=1), batch(40_000))
    assert model.step_seconds(Layout(tp=1), batch(40_000)) == pytest.approx(truth)


@given(st.floats(0.5, 2.0), st.floats(0.5, 2.0))
def test_what_long_steps_miss_says_little_of_short_ones_that_were_measured(
    short: float, long: float
) -> None:
    """A node may have a layout only under load, and ask for its short steps much later."""
    few, many = Batch(decodes=1), Batch(decodes=64, context_tokens=2_000_000)
    model = MODEL.fit(
        DP, Mode.TP, StepKind.DECODE, [(few, short * MODEL.roofline_seconds(DP, few))]
    )
    for _ in range(500):
        model = model.observe(DP, many, long * MODEL.roofline_seconds(DP, many))
    assert model.step_seconds(DP, many) == pytest.approx(
        long * MODEL.roofline_seconds(DP, many), rel=0.02
    )
    assert model.step_seconds(DP, few) == pytest.approx(
        short * MODEL.roofline_seconds(DP, few), rel=0.02
    )


def test_lengths_that_no_line_fits_are_right_where_most_steps_are() -> None:
    """A host makes short steps as long as longer ones, so that three lengths are on no line."""
    lengths = {1000: 2.0, 4000: 1.0, 16_000: 1.4}

    def errors(common: int) -> dict[int, float]:
        model = MODEL
        for tokens in [*lengths, *[common] * 17] * 20:
            truth = lengths[tokens] * MODEL.roofline_seconds(DP, batch(tokens))
            model = model.observe(DP, batch(tokens), truth)
        return {
            tokens: abs(
                model.step_seconds(DP, batch(tokens))
                / (part * MODEL.roofline_seconds(DP, batch(tokens)))
                - 1
            )
            for tokens, part in lengths.items()
        }

    for common in lengths:
        found = errors(common)
        assert found[common] < 0.05
        assert max(found.values()) > 0.1, "a line would fit all three"


def test_more_work_takes_no_less_time_whatever_was_measured() -> None:
    model = MODEL
    for tokens, seconds in [(4000, 0.05), (8000, 0.005)] * 10:
        model = model.observe(Layout(tp=1), batch(tokens), seconds)
    assert (
        model.step_seconds(Layout(tp=1), batch(8000))
        >= model.step_seconds(Layout(tp=1), batch(4000))
        > 0
    )


def test_steps_with_prompts_are_corrected_apart() -> None:
    prompt = Batch(decodes=3, prefill_tokens=500)
    model = MODEL.observe(Layout(tp=1), prompt, 4 * MODEL.step_seconds(Layout(tp=1), prompt))
    assert model.step_seconds(Layout(tp=1), prompt) == pytest.approx(
        4 * MODEL.step_seconds(Layout(tp=1), prompt)
    )
    assert model.step_seconds(Layout(tp=1), ONE) == MODEL.step_seconds(Layout(tp=1), ONE)
    model = model.observe(Layout(tp=1), ONE, 0.5 * MODEL.step_seconds(Layout(tp=1), ONE))
    assert [c.kind for c in model.corrections] == [StepKind.PREFILL, StepKind.DECODE]
    assert model.step_seconds(Layout(tp=1), prompt) == pytest.approx(
        4 * MODEL.step_seconds(Layout(tp=1), prompt)
    )


def worst_error(model: CostModel) -> float:
    """Learn steps with prompts that are twice as fast as the roofline says, all others half."""
    for tokens in [2000, 6000, 4000, 8000] * 20:
        prompt = Batch(prefill_tokens=tokens)
        decodes = Batch(decodes=tokens // 8)
        model = model.observe(
            Layout(tp=1), prompt, 0.5 * model.roofline_seconds(Layout(tp=1), prompt)
        )
        model = model.observe(
            Layout(tp=1), decodes, 2.0 * model.roofline_seconds(Layout(tp=1), decodes)
        )
    return max(correction.error for correction in model.corrections)


def test_no_line_fits_steps_with_prompts_and_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worst_error(MODEL) < 0.05
    monkeypatch.setattr(Batch, "kind", StepKind.DECODE)
    assert worst_error(MODEL) > 0.15


def test_the_error_is_of_predictions_before_they_were_corrected() -> None:
    model = MODEL.observe(Layout(tp=1), ONE, 2 * MODEL.step_seconds(Layout(tp=1), ONE))
    assert model.correction(Layout(tp=1), StepKind.DECODE).error == pytest.approx(0.5)
    better = model
    for _ in range(50):
        better = better.observe(Layout(tp=1), ONE, 2 * MODEL.step_seconds(Layout(tp=1), ONE))
    assert better.correction(Layout(tp=1), StepKind.DECODE).error < 0.01


def test_absurd_measurements_are_bounded_and_impossible_ones_refused() -> None:
    slow = MODEL.observe(Layout(tp=1), ONE, 1e6).step_seconds(Layout(tp=1), ONE)
    assert slow == pytest.approx(MAX_CORRECTION * MODEL.step_seconds(Layout(tp=1), ONE))
    with pytest.raises(ValueError, match="cannot be"):
        MODEL.observe(Layout(tp=1), ONE, 0.0)


def test_one_step_that_had_to_wait_changes_little_and_a_lasting_change_is_learned() -> None:
    model, layout = MODEL, Layout(tp=1)
    usual = MODEL.step_seconds(layout, ONE)
    for _ in range(2 * KNOWN):
        model = model.observe(layout, ONE, usual)
    once = model.observe(layout, ONE, 8 * usual)
    assert once.step_seconds(layout, ONE) < 1.1 * usual
    for _ in range(100):
        model = model.observe(layout, ONE, 8 * usual)
    assert model.step_seconds(layout, ONE) == pytest.approx(8 * usual, rel=0.1)


def test_a_carry_takes_its_bytes_over_its_links() -> None:
    bytes_of_token = 2 * 10 * 4 * 16 * 2
    once = MODEL.carry_seconds(1000, 1)
    assert once == pytest.approx(1000 * bytes_of_token / HARDWARE.peer_bytes_per_second)
    assert MODEL.carry_seconds(1000, 4) == once / 4


def test_the_rate_of_carries_comes_near_what_is_measured() -> None:
    model, size, rate = MODEL, 1 << 30, 2e10
    for _ in range(8):
        model = model.observe_carry(size, size / (2 * rate), 2)
    assert model.hardware.peer_bytes_per_second == pytest.approx(rate, rel=0.05)


def test_small_copies_say_nothing_of_the_rate() -> None:
    assert MODEL.observe_carry(LEAST_COPY_BYTES - 1, 1.0, 1) == MODEL
    assert MODEL.observe_carry(LEAST_COPY_BYTES, 0.0, 1) == MODEL
    assert MODEL.observe_carry(LEAST_COPY_BYTES, 1.0, 1) != MODEL


# --- SP ---


def test_attention_may_read_slower_than_linear_layers() -> None:
    batch = Batch(decodes=1, context_tokens=10**6)
    slow = replace(HARDWARE, kv_bytes_per_second=HARDWARE.memory_bytes_per_second / 2)
    plain, halved = (CostModel(SHAPE, hardware) for hardware in (HARDWARE, slow))
    none = Batch(decodes=1)
    read = plain.device_seconds(DP, batch) - plain.device_seconds(DP, none)
    assert halved.device_seconds(DP, none) == plain.device_seconds(DP, none)
    slowly = halved.device_seconds(DP, batch) - halved.device_seconds(DP, none)
    assert slowly == pytest.approx(2 * read)


def test_attention_may_compute_slower_than_linear_layers() -> None:
    short, long = (Batch(prefill_tokens=8192, prefill_context=before) for before in (0, 10**5))
    slow = replace(HARDWARE, attention_flops_per_second=HARDWARE.flops_per_second / 2)
    plain, halved = (CostModel(SHAPE, hardware) for hardware in (HARDWARE, slow))
    assert halved.device_seconds(DP, short) == plain.device_seconds(DP, short)
    of_pairs = [
        model.device_seconds(DP, long) - model.device_seconds(DP, short)
        for model in (plain, halved)
    ]
    assert of_pairs[1] == pytest.approx(2 * of_pairs[0])


EVERY = Batch(decodes=3, context_tokens=900, prefill_tokens=4000, prefill_context=2000)


def test_sp_of_degree_one_is_tp() -> None:
    for degree in (1, 2, 4):
        assert MODEL.step_seconds(Layout(tp=degree), EVERY, Mode.SP) == MODEL.step_seconds(
            Layout(tp=degree), EVERY
        )


def test_a_small_batch_in_sp_reads_all_the_weights_at_every_member() -> None:
    model = replace(MODEL, max_sp=8, hardware=replace(HARDWARE, link_bytes_per_second=1e30))
    assert model.step_seconds(Layout(tp=4), ONE) == pytest.approx(2e6 / 1e9 / 4)
    assert model.step_seconds(Layout(tp=4), ONE, Mode.SP) == pytest.approx(2e6 / 1e9)
    half = replace(model, max_sp=2)
    assert half.step_seconds(Layout(tp=4), ONE, Mode.SP) == pytest.approx(2e6 / 1e9 / 2), (
        "with TP of 2"
    )


def test_a_long_prompt_in_sp_costs_each_member_its_part() -> None:
    model = replace(MODEL, max_sp=8, hardware=replace(HARDWARE, link_bytes_per_second=1e30))
    for tokens in (40_000, 39_997):  # padded to the same
        step = model.step_seconds(Layout(tp=4), Batch(prefill_tokens=tokens), Mode.SP)
        assert step == pytest.approx(2e6 * 1e4 / 1e12)
    attention = replace(EVERY, prefill_context=10**6)
    extra = [
        model.step_seconds(Layout(tp=4), attention, mode)
        - model.step_seconds(Layout(tp=4), EVERY, mode)
        for mode in Mode
    ]
    assert extra[0] == pytest.approx(extra[1]), "the heads are shared out in the same way"


def test_sp_exchanges_the_heads_of_a_member_s_tokens() -> None:
    """Two all-to-alls a layer: of 8 query and 2 * 4 KV heads, and of 8 heads of output."""
    slow = replace(HARDWARE, flops_per_second=1e30, memory_bytes_per_second=1e30)
    model = CostModel(SHAPE, replace(slow, allreduce_seconds=1e-3), max_sp=4)
    prompt = Batch(prefill_tokens=4000)
    moved = 3 / 4 * 1000 * (2 * 8 + 2 * 4) * 16 * 2
    assert model.step_seconds(Layout(tp=4), prompt, Mode.SP) == pytest.approx(
        10 * (2e-3 + moved / 1e8)
    )
    # Eight members share four KV heads: each of them is sent twice.
    wide = replace(model, max_sp=8)
    moved = 7 / 8 * 500 * (2 * 8 + 2 * 8) * 16 * 2
    assert wide.step_seconds(Layout(tp=8), prompt, Mode.SP) == pytest.approx(
        10 * (2e-3 + moved / 1e8)
    )


def test_sp_and_tp_together_pay_for_both() -> None:
    slow = replace(HARDWARE, flops_per_second=1e30, memory_bytes_per_second=1e30)
    model = CostModel(SHAPE, slow, max_sp=2)
    exchanged = 1 / 2 * 2000 * (2 * 8 + 2 * 4) / 2 * 16 * 2
    reduced = 2 * (2 * 1 / 2 * 2000 * 100 * 2)
    step = model.step_seconds(Layout(tp=4), Batch(prefill_tokens=4000), Mode.SP)
    assert step == pytest.approx(10 * (exchanged + reduced) / 1e8)


HOST = replace(HARDWARE, sp_layer_host_seconds=3e-4, overhead_seconds=1e-3)
"""3 ms of the host for a step by sequence."""
COUNTS = st.integers(0, 20_000)


@pytest.mark.parametrize("tokens", [1, 40, 400])
def test_a_short_step_in_sp_waits_for_the_host(tokens: int) -> None:
    """Whatever its tokens: it launches all layers, and what the device does is done by then."""
    free = replace(HOST, link_bytes_per_second=1e30)
    for max_sp in (2, 4):  # combined with TP, or not
        model = CostModel(SHAPE, free, max_sp=max_sp)
        step = model.roofline_seconds(Layout(tp=4), Batch(prefill_tokens=tokens), Mode.SP)
        assert step == pytest.approx(10 * 3e-4 + 1e-3)


def test_a_long_step_in_sp_hides_the_host() -> None:
    with_host, without = CostModel(SHAPE, HOST, max_sp=4), replace(HOST, sp_layer_host_seconds=0.0)
    step = with_host.roofline_seconds(Layout(tp=4), EVERY, Mode.SP)
    assert step == replace(with_host, hardware=without).roofline_seconds(
        Layout(tp=4), EVERY, Mode.SP
    )
    assert step > 10 * 3e-4 + 1e-3


@given(
    degree=st.sampled_from((1, 2, 4, 8)),
    max_sp=st.sampled_from((1, 2, 4, 8)),
    batch=st.builds(Batch, COUNTS, COUNTS, COUNTS, COUNTS),
    host=st.floats(0.0, 0.1),
)
def test_no_step_in_sp_is_faster_than_its_host_and_none_in_tp_waits_for_it(
    degree: int, max_sp: int, batch: Batch, host: float
) -> None:
    hardware = replace(HARDWARE, sp_layer_host_seconds=host)
    slow, free = (CostModel(SHAPE, h, max_sp=max_sp) for h in (hardware, HARDWARE))
    assert slow.roofline_seconds(Layout(tp=degree), batch) == free.roofline_seconds(
        Layout(tp=degree), batch
    )
    in_sp, device = (m.roofline_seconds(Layout(tp=degree), batch, Mode.SP) for m in (slow, free))
    runs_sp = min(degree, max_sp) > 1
    assert in_sp == pytest.approx(max(device, 10 * host if runs_sp else 0.0))


@given(
    degree=st.sampled_from((1, 2, 4, 8)),
    max_sp=st.sampled_from((1, 2, 4, 8)),
    batch=st.builds(Batch, COUNTS, COUNTS, COUNTS, COUNTS),
    host=st.floats(0.0, 0.1),
    mode=st.sampled_from(Mode),
)
def test_what_devices_take_has_neither_host_nor_overhead(
    degree: int, max_sp: int, batch: Batch, host: float, mode: Mode
) -> None:
    slow = replace(HARDWARE, sp_layer_host_seconds=host, overhead_seconds=1.0)
    waiting, free = (CostModel(SHAPE, h, max_sp=max_sp) for h in (slow, HARDWARE))
    assert HARDWARE.overhead_seconds == 0.0
    device = free.roofline_seconds(Layout(tp=degree), batch, mode)
    assert waiting.device_seconds(Layout(tp=degree), batch, mode) == device
    assert waiting.roofline_seconds(Layout(tp=degree), batch, mode) >= device + 1.0


def test_a_group_s_short_prompt_beside_decodes_waits_for_the_host_in_tp() -> None:
    slow = replace(HARDWARE, tp_layer_host_seconds=0.01, overhead_seconds=1e-3)
    model = CostModel(SHAPE, slow, max_sp=4)
    free = replace(model, hardware=replace(slow, tp_layer_host_seconds=0.0))
    short, long = Batch(4, 40, 4, 2), Batch(4, 40, 10_000, 50)
    decode, alone = Batch(4, 40), Batch(0, 0, 4, 2)
    for degree in (2, 4):
        layout = Layout(tp=degree)
        assert model.step_seconds(layout, short) == pytest.approx(10 * 0.01 + 1e-3)
        assert model.step_seconds(layout, short) > free.step_seconds(layout, short)
        for other in (long, decode, alone):
            assert model.step_seconds(layout, other) == free.step_seconds(layout, other)
        in_sp = model.step_seconds(layout, short, Mode.SP)
        assert in_sp == free.step_seconds(layout, short, Mode.SP)
    assert model.step_seconds(DP, short) == free.step_seconds(DP, short)


def test_a_pace_is_found_once_for_a_model() -> None:
    pace = MODEL.pace(DP, StepKind.DECODE)
    assert MODEL.pace(DP, StepKind.DECODE) is pace
    assert MODEL.pace(Layout(tp=2), StepKind.DECODE) != pace
    slow = MODEL.observe(DP, ONE, 100 * MODEL.step_seconds(DP, ONE))
    assert slow.pace(DP, StepKind.DECODE) != pace, "a measurement makes a new model"


def test_measurements_correct_their_mode_only() -> None:
    model = replace(MODEL, max_sp=4)
    model = model.observe(Layout(tp=4), EVERY, model.step_seconds(Layout(tp=4), EVERY))
    measured = model.observe(
        Layout(tp=4), EVERY, 3 * model.step_seconds(Layout(tp=4), EVERY, Mode.SP), Mode.SP
    )
    assert measured.step_seconds(Layout(tp=4), EVERY) == model.step_seconds(Layout(tp=4), EVERY)
    in_sp = measured.step_seconds(Layout(tp=4), EVERY, Mode.SP)
    assert in_sp == pytest.approx(3 * model.step_seconds(Layout(tp=4), EVERY, Mode.SP))
    both = measured.observe(Layout(tp=4), EVERY, 1.0).observe(Layout(tp=4), EVERY, 1.0)
    assert len(both.corrections) == 2
    assert both.correction(Layout(tp=4), StepKind.PREFILL, Mode.SP).samples == 1


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (1, 4), (2, 2)])
def test_a_pipelines_step_takes_all_layers_and_a_hop_between_two_stages(tp: int, pp: int) -> None:
    slow = replace(MODEL, hardware=replace(HARDWARE, allreduce_seconds=1e-5))
    for batch in (ONE, Batch(prefill_tokens=1000)):
        stage = slow.step_seconds(Layout(tp=tp), batch)
        hop = 1e-5 + 2 * batch.tokens * 100 * 2 / 1e8
        found = slow.step_seconds(Layout(tp=tp, pp=pp), batch)
        assert found == pytest.approx(stage + (pp - 1) * hop)
    prompt = Batch(prefill_tokens=1000)
    whole = slow.step_seconds(Layout(tp=tp, pp=pp), prompt)
    assert whole < slow.step_seconds(Layout(tp=tp * pp), prompt), "this link is slow"


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_a_hop_sends_two_tensors_of_hidden_states_and_is_only_between_stages(pp: int) -> None:
    hop = MODEL.hop_seconds(Layout(pp=pp), Batch(prefill_tokens=1000))
    assert hop == pytest.approx(0 if pp == 1 else 2 * 1000 * 100 * 2 / 1e8)


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (1, 4), (2, 2)])
def test_stages_read_what_others_keep_of_their_own_layers(tp: int, pp: int) -> None:
    """All stages together as much as DP, or as TP; between stages a step reads nothing."""
    layout, batch = Layout(tp=tp, pp=pp), Batch(prefill_tokens=100)
    slow = replace(SHARED, hardware=replace(SHARED.hardware, peer_bytes_per_second=5e7))
    hop, reading = slow.hop_seconds(layout, batch), slow.fetch_seconds(Layout(tp=tp))
    assert slow.device_seconds(layout, batch) == pytest.approx(reading + (pp - 1) * hop)
    stage = stage_seconds(layout, slow.step_seconds(layout, batch), hop)
    assert stage == pytest.approx(reading / pp)
    long = Batch(prefill_tokens=20_000)
    assert slow.step_seconds(layout, long) == MODEL.step_seconds(layout, long)
    without = slow.hidden_above(Layout(tp=tp))
    assert slow.hidden_above(layout) == pytest.approx(without, abs=1)


def test_times_between_steps_of_a_pipeline_teach_nothing() -> None:
    assert MODEL.observe(Layout(pp=2), ONE, 1.0) is MODEL
    assert MODEL.observe(Layout(tp=2), ONE, 1.0) is not MODEL


@pytest.mark.parametrize("kind", [StepKind.DECODE, StepKind.PREFILL])
def test_steps_that_were_all_measured_at_once_say_both_parts_of_the_error(kind: StepKind) -> None:
    """Each is predicted as it was measured, and so is one between them."""

    def step(tokens: int) -> Batch:
        decodes = kind is StepKind.DECODE
        return Batch(tokens, 3000 * tokens) if decodes else Batch(prefill_tokens=tokens)

    def seconds(batch: Batch) -> float:
        return 1.5 * MODEL.roofline_seconds(Layout(tp=2), batch) + 0.004

    sizes = (16, 64, 128, 256) if kind is StepKind.DECODE else (500, 2000, 8000)
    measured = [(batch, seconds(batch)) for batch in map(step, sizes)]
    model = MODEL.fit(Layout(tp=2), Mode.TP, kind, measured)
    for tokens in (*sizes, 180 if kind is StepKind.DECODE else 4000):
        found = model.step_seconds(Layout(tp=2), step(tokens))
        assert found == pytest.approx(seconds(step(tokens)), rel=0.02), tokens
    assert model.correction(Layout(tp=2), kind).error < 0.02
    # A step of the same kind in another layout is corrected alike, as after any measurement.
    other = model.step_seconds(Layout(tp=4), step(sizes[0]))
    assert other > 1.2 * MODEL.step_seconds(Layout(tp=4), step(sizes[0]))


SPECULATES = replace(MODEL, speculation=Speculation(drafts=3, accepted=1.5, seen=100))


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_decode_that_checks_drafts_computes_them_and_yields_what_is_accepted(
    tp: int, mode: Mode
) -> None:
    """In a step by sequence as well, in which members divide what is checked."""
    layout = Layout(tp=tp)
    plain, speculates = (replace(model, max_sp=4) for model in (MODEL, SPECULATES))
    few, many = Batch(decodes=20, context_tokens=500), Batch(decodes=2000, context_tokens=100_000)
    for batch in (few, many):
        whole = speculates.whole_step_seconds(layout, batch, mode)
        as_many = Batch(batch.decodes * 4, batch.context_tokens)
        assert whole == pytest.approx(plain.step_seconds(layout, as_many, mode))
        assert speculates.step_seconds(layout, batch, mode) == pytest.approx(whole / 2.5)
        in_one = plain.whole_step_seconds(layout, batch, mode)
        assert in_one == plain.step_seconds(layout, batch, mode)


def test_speculation_saves_the_reading_of_weights_and_not_arithmetic() -> None:
    few, many = (
        SPECULATES.step_seconds(DP, batch) / MODEL.step_seconds(DP, batch)
        for batch in (Batch(decodes=1), Batch(decodes=100_000))
    )
    assert few == pytest.approx(1 / 2.5)
    assert many == pytest.approx(4 / 2.5), "rejected drafts are computed in vain"


def test_drafts_read_more_experts() -> None:
    shape = replace(SHAPE, parameters=2.5e6, experts=8, experts_per_token=2, expert_parameters=8e6)
    plain, drafting = replace(MODEL, shape=shape), replace(SPECULATES, shape=shape)
    assert drafting.whole_step_seconds(DP, ONE) == pytest.approx(
        plain.step_seconds(DP, Batch(decodes=4))
    )


def test_a_step_with_prompts_lengthens_a_token_by_what_the_prompts_take() -> None:
    alone, beside = Batch(100, 5000), Batch(100, 5000, 8000, 4000)
    added = SPECULATES.step_seconds(DP, beside) - SPECULATES.step_seconds(DP, alone)
    whole = SPECULATES.whole_step_seconds(DP, beside) - SPECULATES.whole_step_seconds(DP, alone)
    assert added == pytest.approx(whole)
    assert added > 0
    prompts = Batch(prefill_tokens=8000)
    assert SPECULATES.step_seconds(DP, prompts) == MODEL.step_seconds(DP, prompts)


def test_corrections_learn_from_whole_steps() -> None:
    batch, learned = Batch(decodes=10, context_tokens=500), SPECULATES
    true = 3 * SPECULATES.whole_step_seconds(DP, batch)
    for _ in range(2 * KNOWN):
        learned = learned.observe(DP, batch, true)
    assert learned.whole_step_seconds(DP, batch) == pytest.approx(true)
    assert learned.step_seconds(DP, batch) == pytest.approx(true / 2.5)


def test_means_of_drafts_follow_the_latest_decodes() -> None:
    none = Speculation()
    assert none.see(1000, 0, 0) is none, "without speculation nothing is kept"
    assert none.see(0, 0, 0) is none
    seen = none.see(100, 300, 150)
    assert (seen.checked, seen.yielded) == (4, 2.5)
    later = seen.see(100, 0, 0)
    assert (later.checked, later.yielded) == (2.5, 1.75), "steps without proposals count, too"
    for _ in range(20):
        later = later.see(KEPT, 3 * KEPT, 3 * KEPT)
    assert later.accepted == pytest.approx(3, abs=0.01)


def test_a_request_that_decodes_costs_the_host_as_much_beside_prompts() -> None:
    """If it cost nothing there, what groups miss by their many decodes would be put on others."""
    model = replace(MODEL, hardware=replace(HARDWARE, request_seconds=1e-3))
    for prompt in (0, 100):
        few, many = (Batch(decodes=n, prefill_tokens=prompt) for n in (1, 11))
        more = [each.step_seconds(DP, many) - each.step_seconds(DP, few) for each in (model, MODEL)]
        assert more[0] - more[1] == pytest.approx(10e-3)
