"""The workloads of the comparison, and what is made of their records."""

import pytest

from shoal.loadgen.bench.open_loop_serving import groups
from shoal.loadgen.bench.open_loop_workloads import bursty, busiest, priority
from shoal.loadgen.exchange import Exchange, Outcome, tokens_by_second
from shoal.loadgen.workload import Arrival, Phase, Workload


def test_the_busiest_stretch_begins_at_0() -> None:
    times = [0.0, 10.0, 20.0, 21.0, 22.0, 29.9, 30.0, 60.0]
    part = busiest(Workload("w", tuple(Arrival(at, 1, 1) for at in times)), 10.0)
    assert [a.at for a in part.arrivals] == pytest.approx([0.0, 1.0, 2.0, 9.9])


def test_nothing_has_no_busiest_stretch() -> None:
    assert busiest(Workload("w", ()), 10.0).arrivals == ()


def test_bursts_take_turns_with_quiet_phases_and_scale() -> None:
    slow, fast = bursty(0, 60.0, 1.0), bursty(0, 60.0, 4.0)
    assert [p for p, _ in phases(slow)] == [Phase.QUIET, Phase.BURST] * 2
    assert len(fast.arrivals) > 3 * len(slow.arrivals)
    assert fast.arrivals[-1].at < 60.0


def phases(workload: Workload) -> list[tuple[Phase, float]]:
    """Return the phases in turn, and when each begins."""
    found: list[tuple[Phase, float]] = []
    for arrival in workload.arrivals:
        if not found or found[-1][0] is not arrival.phase:
            found.append((arrival.phase, arrival.at))
    return found


def test_some_requests_are_urgent() -> None:
    assert {a.priority for a in priority(0, 60.0, 1.0).arrivals} == {-10, 0}


def exchange(priority: int, phase: Phase, chunks: list[float]) -> Exchange:
    arrival = Arrival(0.0, 4, len(chunks), priority=priority, phase=phase)
    return Exchange(
        0,
        arrival,
        sent=0.0,
        chunk_times=chunks,
        ended=chunks[-1],
        outcome=Outcome.OK,
        output_tokens=2 * len(chunks),
    )


def test_figures_are_of_all_and_of_each_phase_and_priority() -> None:
    exchanges = [
        exchange(-10, Phase.BURST, [0.1, 0.4]),
        exchange(0, Phase.QUIET, [0.3, 0.6]),
    ]
    found = groups([one.record() for one in exchanges])
    assert set(found) == {"all", "quiet", "burst", "priority -10", "priority 0"}
    assert found["all"]["ttft"]["mean"] == pytest.approx(0.2)
    assert found["priority -10"]["tpot"]["mean"] == pytest.approx(0.1)
    assert set(groups([exchanges[0].record()])) == {"all"}


def test_tokens_are_spread_over_their_chunks() -> None:
    assert tokens_by_second([exchange(0, Phase.QUIET, [0.5, 0.9, 1.5])]) == {0: 4.0, 1: 2.0}
