"""Workloads are cut and changed as one asks, and bursts are found in them."""

import pytest

from shoal.loadgen.workload import Arrival, Block, Phase, Workload, with_phases


def test_scaling_moves_arrivals_together() -> None:
    workload = Workload("w", (Arrival(1.0, 5, 5), Arrival(4.0, 6, 6)))
    assert [a.at for a in workload.scaled(2.0).arrivals] == [0.5, 2.0]
    assert workload.scaled(2.0).arrivals[1].prompt_tokens == 6
    for factor in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="cannot be scaled"):
            workload.scaled(factor)


def test_resizing_keeps_what_prompts_share() -> None:
    prefix = (Block("a", 512), Block("b", 512))
    workload = Workload("w", (Arrival(1.0, 600, 3, prefix=prefix), Arrival(1.0, 1, 1)))
    first, second = workload.resized(0.25).arrivals
    assert (first.prompt_tokens, first.output_tokens) == (150, 1)
    assert first.prefix == (Block("a", 128), Block("b", 128))
    assert (second.prompt_tokens, second.output_tokens) == (1, 1)
    with pytest.raises(ValueError, match="cannot be scaled"):
        workload.resized(0.0)


def test_a_workload_can_be_cut() -> None:
    workload = Workload("w", tuple(Arrival(float(t), 10 * t + 1, 9) for t in range(5)))
    assert workload.first() == workload
    assert len(workload.first(requests=2).arrivals) == 2
    assert [a.at for a in workload.first(seconds=2.0).arrivals] == [0.0, 1.0]
    assert [a.prompt_tokens for a in workload.fitting(20).arrivals] == [1, 11]
    assert workload.after(0.0) == workload
    assert [(a.at, a.prompt_tokens) for a in workload.after(2.5).arrivals] == [(0.5, 31), (1.5, 41)]


def test_workloads_at_the_same_time_are_one() -> None:
    ours = Workload("a", tuple(Arrival(float(t), 8, 1, prefix=(Block("x", 4),)) for t in range(3)))
    other = Workload("b", (Arrival(0.5, 9, 1, prefix=(Block("x", 5),)),)).later(1.0)
    both = ours.beside(other)
    assert [(a.at, a.prompt_tokens) for a in both.arrivals] == [(0, 8), (1, 8), (1.5, 9), (2, 8)]
    assert {block.id for a in both.arrivals for block in a.prefix} == {"x"}
    apart = ours.beside(other.apart("1"))
    assert [a.prefix[0] for a in apart.arrivals] == [
        *[Block("x", 4)] * 2,
        Block("1/x", 5),
        Block("x", 4),
    ]


def test_priorities_come_in_their_shares() -> None:
    workload = Workload("w", tuple(Arrival(float(t), 1, 1) for t in range(4000)))
    mixed = workload.with_priorities({-10: 1.0, 5: 3.0}, seed=0)
    urgent = sum(a.priority == -10 for a in mixed.arrivals)
    assert urgent / 4000 == pytest.approx(0.25, abs=0.03)
    assert mixed == workload.with_priorities({-10: 1.0, 5: 3.0}, seed=0)
    for shares in ({}, {0: 0.0}, {0: 2.0, 1: -1.0}):
        with pytest.raises(ValueError, match="shares"):
            workload.with_priorities(shares, seed=0)


def test_phases_follow_the_rate() -> None:
    sparse = [Arrival(float(t), 1, 1) for t in range(0, 100, 5)]
    dense = [Arrival(50.0 + k / 10, 1, 1) for k in range(60)]
    phases = {a.at: a.phase for a in with_phases(sorted(sparse + dense, key=lambda a: a.at))}
    assert phases[50.5] is Phase.BURST
    assert phases[0.0] is phases[95.0] is Phase.QUIET
    assert with_phases([]) == ()
