"""Surges: when they begin and end, and how long the next one may last."""

from dataclasses import replace

import pytest

from shoal.policies import surges
from shoal.policies.hindsight import LATEST_SECONDS, Hindsight
from shoal.policies.surges import (
    ALIKE,
    KEPT,
    LEAST_BEFORE,
    LEAST_LEFT,
    LONGEST_SECONDS,
    UNKNOWN_LENGTHS,
    Surges,
)
from tests.policies.shadows import NOW, QUIET, after, rate, seen

JUDGED = 0.1


def surging(here: Hindsight) -> bool:
    return Surges().at(here, 0).began is not None


def watched(came: list[float], until: float) -> list[Surges]:
    """Return what is known at each judgement, once requests have come for ``LATEST_SECONDS``."""
    all_known, known, before = [], Surges(), came[0] + LATEST_SECONDS
    at = before + JUDGED
    while at < until:
        latest = [each for each in came if at - LATEST_SECONDS < each <= at]
        new = sum(before < each <= at for each in came)
        known = known.at(replace(seen(*latest), at=at), new)
        all_known.append(known)
        before, at = at, at + JUDGED
    return all_known


@pytest.mark.parametrize(("seconds", "per_second"), [(0.2, 140), (0.4, 96), (0.8, 72)])
def test_a_surge_is_noticed_within_a_second(seconds: float, per_second: float) -> None:
    assert surging(after(QUIET, seconds, per_second))


@pytest.mark.parametrize("seconds", [0.2, 0.5, 1, 2, 4])
def test_a_wobble_is_no_surge(seconds: float) -> None:
    assert not surging(after(QUIET, seconds, 24 * 1.3))
    assert not surging(after(QUIET, seconds, 24 * 0.5))


def test_a_clump_among_clumps_is_no_surge() -> None:
    clumps = [NOW - 0.01 - second for second in range(9, -1, -1) for _ in range(12)]
    assert not surging(seen(*clumps))
    larger = [NOW - 0.01] * 6
    assert not surging(seen(*clumps, *larger))
    assert surging(seen(*clumps[:-12], *[NOW - 0.01] * 100))


def test_two_clumps_that_one_window_holds_are_no_surge() -> None:
    """The latest window of 1.6 s has two of them, and so had others."""
    clumps = [NOW - 0.01 - 1.5 * k for k in range(6, -1, -1) for _ in range(7)]
    assert not surging(seen(*clumps, *[NOW - 0.01] * 4, *[NOW - 1.51] * 3))


def test_where_nobody_knows_what_is_usual_nothing_is_a_surge() -> None:
    few = rate(LEAST_BEFORE / LATEST_SECONDS, LATEST_SECONDS)
    assert surging(after(few, 0.2, 140))
    assert not surging(after(few[1:], 0.2, 140))
    assert not surging(seen())


@pytest.mark.parametrize("seconds", [0.5, 2.0, 5.0])
@pytest.mark.parametrize("per_second", [72, 140])
def test_the_end_of_a_surge_is_noticed_within_a_second(seconds: float, per_second: float) -> None:
    """And its length is known then, and no other surge seems to have been there."""
    came = [*rate(24, 12.0), *rate(per_second, seconds, NOW + seconds)]
    came += rate(24, 8.0, NOW + seconds + 8.0)
    known = watched(came, NOW + seconds + 7.0)
    (length,) = known[-1].lengths
    assert abs(length - seconds) < 0.5
    there = sum(one.began is not None for one in known) * JUDGED
    assert seconds - 0.5 < there < seconds + 1.0


def test_a_surge_among_clumps_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each request says little, the end is seen only in a longer time without any."""
    came = seen(*rate(16, 1.5, NOW - 3.5))
    there = Surges(NOW - 5.0, usual_rate=1.0, count=24, clumps=2.5)
    over = there.at(came, 0)
    assert over.began is None
    assert over.lengths == (pytest.approx(5.0 - 3.2),)
    monkeypatch.setattr(surges, "END_WINDOWS", surges.WINDOWS)
    assert there.at(came, 0).began is not None


def test_what_has_lasted_for_long_is_usual() -> None:
    known = watched([*rate(24, 12.0), *rate(140, 15.0, NOW + 15.0)], NOW + 15.0)
    assert known[-1].began is None
    (length,) = known[-1].lengths
    assert length == pytest.approx(LONGEST_SECONDS, abs=2 * JUDGED)


def test_a_node_that_is_watched_anew_is_in_no_surge() -> None:
    """What came before is not known, so nobody can say that it has ended, either."""
    in_one = Surges(NOW - 1.0, 24.0, 140, lengths=(3.0,))
    anew = in_one.at(seen(began=NOW - 0.5), 0)
    assert (anew.began, anew.lengths) == (None, (3.0,))


def test_a_surge_is_taken_to_last_as_long_as_the_latest_ones_have() -> None:
    # 4 s are 3 more, and after 0.9 s it may be alike; after 0.2 s it is of another kind.
    assert Surges(NOW - 1.0, lengths=(4.0, 0.9, 0.2)).lasting(NOW) == ((1.0, pytest.approx(3.0)),)
    assert Surges(NOW - 1.0, lengths=(0.9, 0.9, 4.0)).lasting(NOW) == ((1.0, LEAST_LEFT),)
    assert Surges(NOW - 4.0 * ALIKE, lengths=(4.0,)).lasting(NOW) == UNKNOWN_LENGTHS
    assert Surges(NOW - 1.0).lasting(NOW) == UNKNOWN_LENGTHS
    assert Surges(lengths=(4.0,)).lasting(NOW) == ()


def test_only_the_latest_surges_count() -> None:
    known = Surges()
    for length in range(1, KEPT + 3):
        known = replace(known, began=0.0)._over(float(length))
    assert known.lengths == tuple(range(3, KEPT + 3))


def test_a_young_surge_is_looked_at_more_often() -> None:
    assert Surges(NOW - 0.5).pause(NOW) < Surges(NOW - 5.0).pause(NOW)


def test_a_moment_with_few_requests_is_no_end() -> None:
    """Of nine that usually come in that time one comes: in a surge of seconds that happens."""
    there = Surges(NOW - 1.0, usual_rate=10.0, count=91)
    after_a_gap = seen(*rate(100, 0.9, NOW - 0.1), NOW - 0.05)
    assert there.at(after_a_gap, 0).began == there.began
    assert there.at(seen(*rate(100, 0.8, NOW - 0.2)), 0).began is None, "two such moments are one"
