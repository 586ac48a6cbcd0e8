"""What switches did to streams, from times that are made up."""

import statistics

import pytest

from shoal.loadgen.bench.switch_gaps import (
    CarrySwitch,
    count_differing,
    intervals_during,
    longest_before,
    longest_gap_of,
    of_bystanders,
    of_direction,
    step_before,
)

STEP = 0.005
STEADY = [STEP * n for n in range(21)]
"""A token every 5 ms, from 0 to 100 ms."""


def switch(
    begun: float, ended: float, carried: int = 2, recomputed: dict[str, int] | None = None
) -> CarrySwitch:
    return CarrySwitch(begun, ended, ended - begun, carried, recomputed or {}, 0, 3, 1000, 0.004)


def paused(after: float, gap: float) -> list[float]:
    """Return the times of a steady stream that has one gap instead of an interval."""
    before = [time for time in STEADY if time <= after]
    return before + [before[-1] + gap + STEP * n for n in range(20)]


def test_a_switch_is_read_from_the_answer_about_it() -> None:
    answer = {
        "duration_seconds": 0.01,
        "requests": {"carried": 7, "recomputed": {"no_room": 1}, "moved": 3, "paused": 2},
        "carried_bytes": 4096,
        "carry_seconds": 0.008,
    }
    found = CarrySwitch.of(1.0, 1.02, answer)
    assert found == CarrySwitch(1.0, 1.02, 0.01, 7, {"no_room": 1}, 3, 2, 4096, 0.008)


def test_intervals_during_a_switch_are_those_that_overlap_it() -> None:
    found = intervals_during([0.0, 1.0, 3.0, 6.0, 10.0, 15.0], switch(2.0, 5.0))
    assert found == [2.0, 3.0]
    assert intervals_during([0.0, 1.0, 3.0, 6.0, 10.0, 15.0], switch(2.0, 5.0), 1) == [2, 3, 4]
    assert intervals_during([0.0, 1.0], switch(2.0, 5.0)) == [], "it has no token afterwards"
    assert intervals_during([3.0, 4.0, 7.0], switch(2.0, 5.0)) == [1.0, 3.0], "none before"


def test_the_gap_of_a_switch_is_that_of_the_stream_that_waits_longest() -> None:
    streams = [paused(0.05, 0.012), paused(0.05, 0.02), STEADY]
    assert longest_gap_of(streams, switch(0.052, 0.06)) == pytest.approx(0.02)


def test_gaps_of_other_moments_are_not_of_the_switch() -> None:
    early, late = paused(0.02, 0.5), paused(0.08, 0.5)
    assert longest_gap_of([early], switch(0.552, 0.558)) == pytest.approx(STEP)
    assert longest_gap_of([late], switch(0.052, 0.058)) == pytest.approx(STEP)


def test_a_gap_counts_whose_last_tokens_the_answer_overtook() -> None:
    # The client has the answer at 49 ms, then the tokens before the pause, and those after it.
    assert longest_gap_of([paused(0.05, 0.03)], switch(0.046, 0.049)) == pytest.approx(0.03)


def test_the_step_before_a_switch_has_nothing_of_the_switches_around_it() -> None:
    stream = paused(0.02, 0.1)
    just_after = switch(stream[5] + 0.021, 1.0)
    assert step_before([stream], just_after, 3) == pytest.approx(STEP)
    assert step_before([STEADY, [2 * time for time in STEADY]], switch(0.1, 0.11), 4) == (
        pytest.approx(1.5 * STEP)
    )
    with pytest.raises(statistics.StatisticsError):
        step_before([[0.2, 0.3]], switch(0.1, 0.11), 4)


def test_the_longest_interval_before_a_switch_is_that_of_the_stream_that_waited_longest() -> None:
    uneven = [0.0, 9 * STEP, 10 * STEP, 13 * STEP, 14 * STEP]
    assert longest_before([STEADY, uneven], switch(0.1, 0.11), 4) == pytest.approx(3 * STEP)
    found = of_direction([([switch(0.1, 0.11)], [[*STEADY, 0.12], [*uneven, 0.12]])], steps=4)
    assert found["without"]["p50"] == pytest.approx(2 * STEP)


def test_the_figures_of_a_direction_are_of_each_switch_less_the_step_before_it() -> None:
    first = paused(0.05, 0.02)
    offset = first[-1] + STEP
    second = [offset + time for time in paused(0.05, 0.03)]
    switches = [
        switch(0.051, 0.06, recomputed={"no_room": 1}),
        switch(offset + 0.051, offset + 0.07, carried=1, recomputed={"no_room": 2}),
    ]
    found = of_direction([([one], [first + second]) for one in switches], steps=4)
    assert found == of_direction([(switches, [first + second])], steps=4)
    assert found["switches"] == 2
    assert found["gap"]["p50"] == pytest.approx(0.025)
    assert found["gap"]["max"] == pytest.approx(0.03)
    assert found["step"] == pytest.approx(STEP)
    assert found["beyond_step"]["p50"] == pytest.approx(0.02)
    assert found["beyond_step"]["max"] == pytest.approx(0.025)
    assert found["without"]["max"] == pytest.approx(0.0)
    assert found["duration"]["max"] == pytest.approx(0.019)
    assert found["carry"]["p50"] == 0.004
    assert (found["carried"], found["carried_bytes"]) == (3, 2000)
    assert found["recomputed"] == {"no_room": 3}
    assert (found["moved"], found["paused"]) == (0, 6)


def test_no_switch_has_no_figures() -> None:
    found = of_direction([([], [STEADY])], steps=4)
    assert (found["switches"], found["gap"], found["step"], found["carried"]) == (0, None, None, 0)
    assert of_bystanders([], [STEADY], steps=4)["during"] is None


def test_bystanders_are_compared_with_themselves_before() -> None:
    slowed = paused(0.05, 3 * STEP)
    found = of_bystanders([switch(0.051, 0.06)], [STEADY, slowed], steps=4)
    assert (found["switches"], found["streams"]) == (1, 2)
    assert found["ordinary"] == pytest.approx(STEP)
    assert found["during"]["max"] == pytest.approx(3 * STEP)
    assert found["during"]["p50"] == pytest.approx(2 * STEP), "one is slower, one is not"


def test_answers_differ_by_any_token() -> None:
    assert count_differing([[1, 2], [3, 4], [5]], [[1, 2], [3, 5], [5]]) == 1
    assert count_differing([[1, 2]], [[1]]) == 1
