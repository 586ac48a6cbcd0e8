"""What requests cost in shadows, and what kinds of them there are."""

import pytest

from shoal.policies.jobs import BROKEN, NOTHING, USUAL, Job, Kind, Promise, kind_of
from shoal.policies.values.snapshot import Target

PROMISE = Promise(ttft=1.0, tpot=0.03, worth=10.0)
FAST, SLOW = Target(-10, 0.5, 0.01), Target(0, 2.0, 0.05)


def test_a_promise_is_lost_by_either_time_and_more_so_the_later_it_is() -> None:
    late = [PROMISE.lost(0.1 * k, 0.0) for k in range(1, 40)]
    slow = [PROMISE.lost(0.0, 0.003 * k) for k in range(1, 40)]
    for losses in (late, slow):
        assert losses == sorted(losses)
        assert losses[0] < 0.001
        assert losses[-1] == pytest.approx(PROMISE.worth, rel=0.001)
    assert PROMISE.lost(1.0, 0.0) == PROMISE.lost(0.0, 0.03) == PROMISE.worth / 2
    assert NOTHING.lost(1e9, 1e9) == 0.0


def test_a_request_costs_its_seconds_and_what_it_breaks() -> None:
    job = Job(2.0, 100, 100, 11, kind=Kind(PROMISE))
    kept, late = job.decoding(2.2, 5), job.decoding(9.0, 5)
    assert (kept.end, kept.ttft) == (15, pytest.approx(0.2))
    assert kept.cost(2.3) == pytest.approx(0.3, abs=0.01)
    assert kept.cost(3.2) == pytest.approx(1.2 + PROMISE.worth, rel=0.01), "0.1 s for each token"
    assert late.cost(9.1) == pytest.approx(7.1 + PROMISE.worth, rel=0.01)
    assert job._replace(kind=USUAL).decoding(9.0, 5).cost(9.1) == pytest.approx(7.1)


def test_what_a_request_has_waited_before_the_shadow_began_makes_it_late() -> None:
    job = Job(5.0, 100, 100, 11, came=1.0, kind=Kind(PROMISE))
    assert job.decoding(5.1, 5).ttft == pytest.approx(4.1)
    assert job.decoding(5.1, 5).cost(5.2) == pytest.approx(0.2 + PROMISE.worth, rel=0.01)


@pytest.mark.parametrize("targets", [(), (SLOW,), (FAST, SLOW)])
def test_requests_below_normal_priority_are_urgent(targets: tuple[Target, ...]) -> None:
    urgent = [kind_of(priority, targets, 100.0).is_urgent for priority in (-10, -1, 0, 100)]
    assert urgent == [True, True, False, False]


def test_without_targets_nothing_is_promised() -> None:
    assert kind_of(-10, (), 100.0).promise == NOTHING


def test_a_promise_holds_for_what_is_at_least_as_urgent() -> None:
    fast, slow = (kind_of(p, (FAST, SLOW), 100.0).promise for p in (-10, 0))
    assert (fast[:2], slow[:2]) == ((0.5, 0.01), (2.0, 0.05))
    assert slow.worth == pytest.approx(BROKEN * (2.0 + 100 * 0.05))
    others = [kind_of(p, (FAST, SLOW), 100.0).promise for p in (-11, -9, 7)]
    assert others == [fast, slow, slow], "the last target is for all that are less urgent"
