"""How requests flow through a unit, in cases of which the answer is known."""

import math
from dataclasses import replace

import pytest

from shoal.policies.flow import (
    CHUNK_TOKENS,
    FAR,
    NEAR,
    SIZES,
    Added,
    Moment,
    UnitPace,
    Work,
    flow,
    pace_of,
)
from shoal.policies.values.batch import Batch, Mode
from shoal.policies.values.layouts import Layout
from shoal.policies.values.speculation import Speculation
from tests.policies.nodes import TP, node
from tests.policies.snapshots import MODEL

STEP, PROMPT = 0.01, 0.1
"""Seconds of a step without prompts, whatever the batch, and seconds that a prompt adds."""
STEADY = UnitPace(
    (STEP,) * len(SIZES), *[Added(0.0, 0.0, PROMPT / 1000)] * 2, above=math.inf, seats=math.inf
)
IDLE = Work(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, prompt=1000.0, output=100.0)


def moments(pace: UnitPace = STEADY, **changes: float) -> list[Moment]:
    """``rate`` is also the rate of the past, if that is not said."""
    rate = changes.get("rate", 0.0)
    work = replace(IDLE, **{"recent": rate, "usual": rate, **changes})
    return list(flow(pace, work, [*NEAR, *FAR]))


def spent(pace: UnitPace = STEADY, **changes: float) -> float:
    return sum(moment.seconds for moment in moments(pace, **changes))


def test_nothing_takes_no_time() -> None:
    assert spent() == 0.0


def test_requests_that_decode_leave_at_their_pace() -> None:
    """Each has the mean length ahead of it, as outputs end at random times."""
    assert spent(decoding=3.0) == pytest.approx(3 * 100 * STEP, rel=0.1)
    assert moments(decoding=3.0)[0].tpot == STEP


@pytest.mark.parametrize(
    ("rate", "tpot"),
    [
        (1.0, STEP / 0.9),  # prompts take a tenth of the time
        (5.0, STEP / 0.5),
        (9.0, STEP / 0.1),
        (9.5, STEP / (1 - 9.5 * PROMPT)),  # every step has a prompt, or several
    ],
)
def test_prompts_make_tokens_slower(rate: float, tpot: float) -> None:
    assert moments(rate=rate)[-1].tpot == pytest.approx(tpot)


def test_more_prompts_than_there_is_time_for_have_to_wait() -> None:
    overloaded = moments(rate=20.0)
    queue = [moment.waiting for moment in overloaded]
    assert queue == sorted(queue)
    # Of twenty each second about ten are done.
    assert queue[-1] == pytest.approx(10 * sum([*NEAR, *FAR]), rel=0.15)
    assert moments(rate=8.0)[-1].waiting == 0.0


def test_what_waits_is_computed_first_and_then_the_queue_is_gone() -> None:
    backlog = moments(waiting=20.0, tokens=20_000.0)
    assert backlog[0].waiting > 0
    assert backlog[-1].waiting == 0.0
    assert sum(moment.tokens > 0 for moment in backlog) > 1


def test_what_finds_no_seat_waits() -> None:
    few = replace(STEADY, seats=4.0)
    assert spent(few, rate=8.0) > 1.5 * spent(rate=8.0)
    assert moments(few, rate=8.0)[-1].waiting > 0


def test_a_burst_is_expected_to_end() -> None:
    """The longer it has lasted, the longer it is expected to go on."""
    new, old = spent(rate=8.0, recent=2.0, usual=1.0), spent(rate=8.0, recent=8.0, usual=1.0)
    assert spent(rate=1.0) < new < old < spent(rate=8.0) / 2


def test_what_comes_later_goes_on_from_what_is_left() -> None:
    """In two parts or in one: the same."""
    work = replace(IDLE, decoding=5.0, waiting=9.0, tokens=9000.0, rate=8.0, recent=4.0, usual=1.0)
    whole = list(flow(STEADY, work, [*NEAR, *FAR]))
    near = list(flow(STEADY, work, NEAR))
    end = near[-1]
    left = replace(work, decoding=end.decoding, waiting=end.waiting, tokens=end.tokens)
    assert [*near, *flow(STEADY, left, FAR, at=sum(NEAR))] == pytest.approx(whole)


def test_steps_above_the_threshold_take_the_time_of_sp() -> None:
    """Decodes count: with two hundred of them the same prompts make a step that runs in SP."""
    host = Added(0.5, 0.5, 0.0)
    shifting = replace(STEADY, sp=host, above=1100.0)
    alone = {"rate": 0.5}
    assert spent(shifting, **alone) == spent(**alone)
    crowded = {"decoding": 200.0} | alone
    assert moments(shifting, **crowded)[0].tpot > 1.1 * moments(**crowded)[0].tpot


# --- the pace of a layout ---

WORK = replace(IDLE, rate=1.0, recent=1.0, usual=1.0)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_pace_gives_the_times_of_the_cost_model(tp: int) -> None:
    layout = Layout(tp=tp)
    pace = pace_of(node(TP), MODEL, layout, WORK)
    context = 1050
    for size in SIZES:
        assert pace.step(size) == MODEL.step_seconds(layout, Batch(size, size * context))
    few, many = (pace.step(size) for size in (64, 160))
    assert few < pace.step(100) < many
    full = Batch(SIZES[1], SIZES[1] * context, CHUNK_TOKENS, 500)
    added = pace.tp.fixed(SIZES[1]) + CHUNK_TOKENS * pace.tp.token
    expected = MODEL.step_seconds(layout, full)
    assert pace.step(SIZES[1]) + added == pytest.approx(expected, rel=0.03)


def test_a_pace_knows_sp_where_the_node_runs_it() -> None:
    layout = Layout(tp=8)
    seen = replace(node(TP), sp_above=((layout, 512),))
    pace = pace_of(seen, MODEL, layout, WORK)
    assert pace.added(0, 513) is pace.sp
    assert pace.added(112, 400) is pace.tp
    drafting = replace(MODEL, speculation=Speculation(drafts=3.0, seen=9))
    speculates = pace_of(seen, drafting, layout, WORK)
    assert speculates.added(29, 400) is speculates.sp, "each of them computes four tokens"
    assert speculates.added(28, 400) is speculates.tp
    assert pace.sp.token < pace.tp.token
    full = Batch(SIZES[1], SIZES[1] * 1050, CHUNK_TOKENS, 500)
    added = pace.sp.fixed(SIZES[1]) + CHUNK_TOKENS * pace.sp.token
    expected = MODEL.step_seconds(layout, full, Mode.SP)
    assert pace.step(SIZES[1]) + added == pytest.approx(expected)
    without = pace_of(node(TP), MODEL, layout, WORK)
    assert without.added(0, 10**6) is without.tp


def test_seats_are_those_of_the_layout() -> None:
    seats = [pace_of(node(TP), MODEL, Layout(tp=tp), WORK).seats for tp in (1, 8)]
    assert seats == [pytest.approx(10_000 * 16 / 1050), 256]


def test_units_without_a_prompt_do_not_help_with_those_of_others() -> None:
    """Eight prompts at once: one after another in one unit, or one in each of eight slower ones."""
    slower = replace(STEADY, tp=Added(0.0, 0.0, 8 * PROMPT / 1000))
    together = replace(IDLE, waiting=8.0, tokens=8000.0)
    one = sum(moment.seconds for moment in flow(STEADY, together, [*NEAR, *FAR]))
    eight = 8 * sum(moment.seconds for moment in flow(slower, together.part(1 / 8), [*NEAR, *FAR]))
    decoding = 8 * 100 * STEP
    assert eight - decoding > 1.5 * (one - decoding)
