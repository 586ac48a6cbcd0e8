"""Made-up workloads are what their parameters say, and the same for the same seed."""

import pytest

from loadgen.workload import (
    URGENT,
    Arrival,
    Bursts,
    Lengths,
    Phase,
    Workload,
    bursty,
    priorities,
    with_phases,
)


def test_seed_decides_everything() -> None:
    assert bursty(1, requests=200) == bursty(1, requests=200)
    assert bursty(1, requests=200) != bursty(2, requests=200)
    assert priorities(1, requests=200) == priorities(1, requests=200)


def test_bursty_alternates_between_its_rates() -> None:
    arrivals = bursty(3).arrivals
    assert len(arrivals) == 4000
    assert [a.at for a in arrivals] == sorted(a.at for a in arrivals)
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
    arrivals = bursty(0, requests=300, bursts=Bursts(quiet_seconds=5.0), lengths=lengths).arrivals
    assert {a.prompt_tokens for a in arrivals} == {10, 11, 12}
    assert {a.output_tokens for a in arrivals} == {1}


def test_part_of_the_requests_is_urgent() -> None:
    arrivals = priorities(0, requests=2000, urgent_share=0.25).arrivals
    urgent = sum(a.priority == URGENT for a in arrivals)
    assert {a.priority for a in arrivals} == {0, URGENT}
    assert urgent / len(arrivals) == pytest.approx(0.25, abs=0.04)


def test_scaling_moves_arrivals_together() -> None:
    workload = Workload("w", (Arrival(1.0, 5, 5), Arrival(4.0, 6, 6)))
    assert [a.at for a in workload.scaled(2.0).arrivals] == [0.5, 2.0]
    assert workload.scaled(2.0).arrivals[1].prompt_tokens == 6
    for factor in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="cannot be scaled"):
            workload.scaled(factor)


def test_phases_follow_the_rate() -> None:
    sparse = [Arrival(float(t), 1, 1) for t in range(0, 100, 5)]
    dense = [Arrival(50.0 + k / 10, 1, 1) for k in range(60)]
    phases = {a.at: a.phase for a in with_phases(sorted(sparse + dense, key=lambda a: a.at))}
    assert phases[50.5] is Phase.BURST
    assert phases[0.0] is phases[95.0] is Phase.QUIET
    assert with_phases([]) == ()
