"""Made-up workloads are what their parameters say, and the same for the same seed."""

import itertools
import statistics

import pytest

from shoal.loadgen.shapes import DEFAULT_REQUESTS, SHAPES, URGENT, Lengths, make_up
from shoal.loadgen.workload import Block, Phase


@pytest.mark.parametrize("shape", SHAPES)
def test_seed_decides_everything(shape: str) -> None:
    assert make_up(shape, 1, requests=200) == make_up(shape, 1, requests=200)
    assert make_up(shape, 1, requests=200) != make_up(shape, 2, requests=200)


@pytest.mark.parametrize("shape", SHAPES)
def test_arrivals_ascend_and_end_at_the_first_bound(shape: str) -> None:
    few = make_up(shape, 0, requests=50).arrivals
    assert len(few) == 50
    assert [a.at for a in few] == sorted(a.at for a in few)
    middle = few[24].at
    assert make_up(shape, 0, seconds=middle).arrivals == few[:24]
    assert make_up(shape, 0, requests=10, seconds=middle).arrivals == few[:10]
    assert len(make_up(shape, 0).arrivals) == DEFAULT_REQUESTS


def test_bursty_alternates_between_its_rates() -> None:
    arrivals = make_up("bursty", 3).arrivals
    for cycle in range(3):
        quiet = [a for a in arrivals if 90 * cycle <= a.at < 90 * cycle + 60]
        burst = [a for a in arrivals if 90 * cycle + 60 <= a.at < 90 * cycle + 90]
        assert {a.phase for a in quiet} == {Phase.QUIET}
        assert {a.phase for a in burst} == {Phase.BURST}
        # Within four standard deviations of a Poisson count at the bounds of the rates.
        assert 2 * 60 - 44 < len(quiet) < 5 * 60 + 70
        assert 10 * 30 - 70 < len(burst) < 30 * 30 + 120


def test_lengths_stay_within_their_bounds() -> None:
    lengths = Lengths(prompt=(10, 12), output=(1, 1))
    arrivals = make_up("bursty", 0, requests=300, lengths=lengths, quiet_seconds=5.0).arrivals
    assert {a.prompt_tokens for a in arrivals} == {10, 11, 12}
    assert {a.output_tokens for a in arrivals} == {1}


def test_part_of_the_requests_is_urgent() -> None:
    arrivals = make_up("priority", 0, requests=2000, urgent_share=0.25).arrivals
    urgent = sum(a.priority == URGENT for a in arrivals)
    assert {a.priority for a in arrivals} == {0, URGENT}
    assert urgent / len(arrivals) == pytest.approx(0.25, abs=0.04)


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
def test_burstiness_is_the_variation_of_distances(burstiness: float, variation: float) -> None:
    arrivals = make_up("gamma", 0, requests=8000, rate=5.0, burstiness=burstiness).arrivals
    gaps = [after.at - before.at for before, after in itertools.pairwise(arrivals)]
    assert statistics.mean(gaps) == pytest.approx(1 / 5.0, rel=0.1)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(variation, rel=0.1)


def test_a_hill_may_be_a_valley() -> None:
    arrivals = make_up("hill", 0, seconds=200.0, rate=(40.0, 2.0), hill_seconds=200.0).arrivals
    first, middle = (sum(a <= one.at < a + 20 for one in arrivals) for a in (0.0, 90.0))
    assert first > 5 * middle > 0


def test_a_hill_rises_and_falls_as_far() -> None:
    arrivals = make_up("hill", 0, seconds=300.0, rate=(2.0, 40.0), hill_seconds=200.0).arrivals
    counts = [sum(k * 50 <= a.at < (k + 1) * 50 for a in arrivals) for k in range(6)]
    assert counts[1] > 2 * counts[0] > 4 * counts[5]
    assert counts[2] == pytest.approx(counts[1], rel=0.2)
    assert counts[3] == pytest.approx(counts[0], rel=0.3)
    assert counts[4] == pytest.approx(2.0 * 50, rel=0.3)


def test_a_ramp_goes_from_one_rate_to_the_other_and_stays() -> None:
    arrivals = make_up("ramp", 0, seconds=400.0, rate=(2.0, 20.0), ramp_seconds=200.0).arrivals
    counts = [sum(start <= a.at < start + 20 for a in arrivals) for start in (0, 180, 300)]
    # The mean rates of these windows, and four standard deviations.
    for count, rate in zip(counts, (2.9, 19.1, 20.0), strict=True):
        assert abs(count - 20 * rate) < 4 * (20 * rate) ** 0.5


def test_chats_repeat_what_was_said_and_share_their_beginning() -> None:
    lengths = Lengths((10, 20), (3, 4))
    one = make_up("chats", 1, requests=20, lengths=lengths, turns=(2, 3), shared_tokens=50)
    assert len(one.arrivals) == 20
    for chat in one.arrivals:
        turns = list(chat.turns())
        assert 2 <= len(turns) <= 3
        for turn in turns:
            assert turn.prompt_tokens == sum(block.tokens for block in turn.prefix)
            assert turn.prefix[0] == Block("system", 50)
        for before, after in itertools.pairwise(turns):
            assert after.prefix[: len(before.prefix)] == before.prefix
            grown = after.prompt_tokens - before.prompt_tokens
            assert before.output_tokens + 10 <= grown <= before.output_tokens + 20
    own = [block.id for chat in one.arrivals for block in list(chat.turns())[-1].prefix[1:]]
    assert len(own) == len(set(own))
    first, twice = (list(w.arrivals[0].turns()) for w in (one, one.resized(2.0)))
    assert [t.prompt_tokens for t in twice] == [2 * t.prompt_tokens for t in first]
    short = one.fitting(90)
    assert 0 < short.requests < one.requests
    assert all(t.prompt_tokens + t.output_tokens <= 90 for a in short.arrivals for t in a.turns())
