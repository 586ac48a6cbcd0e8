"""What is foreseen: the latest requests come again, the last one first."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import exp, inf

import pytest

from shoal.policies import foresight
from shoal.policies.foresight import (
    SURGE_HORIZONS,
    EmptyCaches,
    Foresight,
    Future,
    mirrored,
    needed_seconds,
    period,
    repeated,
    rises,
)
from shoal.policies.hindsight import LATEST_SECONDS, Hindsight
from shoal.policies.jobs import Decode, Job
from shoal.policies.shadow import Population, shadow_of
from shoal.policies.surges import UNKNOWN_LENGTHS, Lasting
from shoal.policies.values.layouts import Layout
from tests.policies.shadows import GROUP, NOW, QUIET, SINGLES, TERMS, after, rate, seen


def gain(
    here: Hindsight, stop: float, lasting: Lasting = (), caches: EmptyCaches | None = None
) -> float:
    """Return what a switch to single engines saves."""
    return Foresight(here, lasting, caches).gain(SINGLES, stop)


def times(here: Hindsight) -> list[float]:
    return [at - NOW for at, _ in mirrored(here)]


def test_the_latest_come_again_first() -> None:
    assert times(seen(NOW - 5, NOW - 2, NOW - 1)) == [1, 2, 5]


def test_to_a_node_that_was_watched_for_short_they_come_to_and_fro() -> None:
    # After the last of two requests in four seconds, two more seconds are a third of what is usual.
    again = times(seen(NOW - 3, NOW - 1, began=NOW - 4))
    assert again == [1, 3, 9, 11]
    # Requests that have all come in this moment count as those of more than a second.
    again = times(seen(NOW, NOW, began=NOW))
    assert again[:4] == [0, 0, 3.5, 3.5]
    assert all(a <= b for a, b in pairwise(again))


def test_what_has_happened_may_come_again_as_it_came() -> None:
    def again(here: Hindsight) -> list[float]:
        return [at - NOW for at, _ in repeated(here)]

    assert again(seen(NOW - 5, NOW - 2, NOW - 1)) == [5, 8, 9]
    assert again(seen(NOW - 3, NOW - 1, began=NOW - 4)) == [3, 5, 9, 11]
    assert again(seen(NOW, NOW, began=NOW))[:4] == [1.75, 1.75, 3.5, 3.5]


def test_clumps_that_came_at_both_ends_of_the_time_are_not_taken_for_more() -> None:
    """Six come every two seconds, and the node was watched since the first of three such clumps."""
    clumps = sorted([NOW - 4, NOW - 2, NOW] * 6)
    assert 5 < period(seen(*clumps, began=NOW - 4)) <= 6
    evenly = seen(*rate(40, 2), began=NOW - 2)
    assert period(evenly) == pytest.approx(2, rel=0.03)
    assert period(seen(*clumps, began=NOW - 60)) == LATEST_SECONDS


def test_a_switch_must_pay_whether_what_happens_goes_on_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Perhaps many came at once, and no more of them will follow now."""
    many = seen(*rate(6, 9, NOW - 1), *rate(60, 1))
    whole = gain(many, 0.01)
    each = []
    for future in foresight.FUTURES:
        monkeypatch.setattr(foresight, "FUTURES", (future,))
        each.append(gain(many, 0.01))
    goes_on, comes_again = each
    assert comes_again < goes_on
    assert whole == comes_again


def test_a_switch_must_also_pay_for_what_caches_lose() -> None:
    many = seen(*rate(40, 10))
    cached = tuple(job._replace(new=10, prompt=1000) for job in many.latest)
    many, slow = replace(many, latest=cached), replace(TERMS[Layout()].tp, token=1e-5)
    dear = {layout: of._replace(tp=slow, sp=slow) for layout, of in TERMS.items()}
    many = replace(many, terms=dear)

    def worth(memory: float) -> float:
        return gain(many, 0.02, caches=EmptyCaches(memory))

    assert worth(0.0) == gain(many, 0.02)
    assert worth(0.0) > worth(20_000.0) > worth(inf)


def test_empty_caches_fill_again() -> None:
    caches, job = EmptyCaches(1000.0), Job(0.0, new=100, prompt=500, output=1)
    found = [caches.job(job).new for _ in range(3)]
    assert found == [500, 100 + round(400 * exp(-0.5)), 100 + round(400 * exp(-1))]
    assert EmptyCaches(0.0).job(job) == job


def test_a_burst_that_has_just_begun_is_no_average_of_the_last_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If it goes on, it is worth leaving a group that would bear the mean rate.

    But nothing says that it does, so a switch must also pay if the next seconds are like those of
    ten seconds ago.
    """
    burst, quiet = rate(100, 0.5), rate(2, 9.5, NOW - 0.5)
    both = seen(*quiet, *burst)
    assert gain(both, 0.02) < 0
    assert gain(seen(*rate(100, 10)), 0.02) > 0
    monkeypatch.setattr(foresight, "FUTURES", (Future(),))
    assert gain(both, 0.02) > 0
    assert gain(seen(*rate(len(burst + quiet) / 10, 10)), 0.02) < 0


def test_only_in_a_surge_does_it_look_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes later than that can be judged later."""
    grows, lasts = after(QUIET, 1.0, 140), ((1.0, 10.0),)
    near, far = (gain(grows, 0.02, it) for it in ((), lasts))
    monkeypatch.setattr(foresight, "SURGE_HORIZONS", foresight.HORIZONS)
    assert gain(grows, 0.02, lasts) < far
    monkeypatch.setattr(foresight, "HORIZONS", SURGE_HORIZONS)
    assert gain(grows, 0.02) > near


def filling(output: int, began: float = 0.0) -> Hindsight:
    """Return a group to which two requests come each second, while four decode."""
    here = seen(*rate(2, 10), began=began)
    latest = tuple(job._replace(output=output) for job in here.latest)
    four = Population([Decode(output, NOW, 10 + output)] * 4, [], {})
    return replace(here, current=shadow_of(here.units(GROUP), four, NOW, TERMS), latest=latest)


def test_it_looks_as_far_as_long_requests_take() -> None:
    """They will be there with those that come meanwhile, for whom single engines are better."""
    near, far = (Foresight(filling(1000), far=it).gain(SINGLES, 0.02) for it in (False, True))
    assert near < 0 < far
    short = [Foresight(filling(100), far=it).gain(SINGLES, 0.02) for it in (False, True)]
    assert short[0] == short[1] < 0
    watched = filling(1000, began=NOW - 3)
    assert Foresight(watched, far=True).gain(SINGLES, 0.02) < 0, "who knows how long they come?"


def test_what_has_been_better_for_long_is_taken_to_be_so_for_as_long_again() -> None:
    """A short look has the present requests alone soon, for whom the group is better."""

    def worth(here: Hindsight, seen: float, lasting: Lasting = ()) -> float:
        return Foresight(here, lasting).gain(SINGLES, 0.02, seen)

    near, far = (worth(filling(1000), seen) for seen in (2.0, 9.0))
    assert near == worth(filling(1000), 0.0) < 0 < far
    assert worth(filling(1000, began=NOW - 3), 9.0) < 0, "who knows how long they come?"
    surge = ((1.0, 1.0),)
    assert worth(filling(1000), 9.0, surge) == worth(filling(1000), 0.0, surge)


def test_no_look_is_much_longer_than_the_present_requests_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others will be there by then, of which little is known."""
    here = filling(1000)
    near, far = (Foresight(here).gain(SINGLES, 0.02, seen) for seen in (0.0, 9.0))
    needed = needed_seconds(here)
    monkeypatch.setattr(foresight, "TURNS", 2.0 / needed)
    assert Foresight(here).gain(SINGLES, 0.02, 9.0) == near
    monkeypatch.setattr(foresight, "TURNS", 9.0 / needed)
    assert Foresight(here).gain(SINGLES, 0.02, 9.0) == far > near


def test_each_candidate_is_looked_at_for_its_own_time() -> None:
    """What staying costs is found out for each of these times."""
    both = Foresight(filling(1000))
    alone_each = [Foresight(filling(1000)).gain(SINGLES, 0.02, seen) for seen in (9.0, 0.0, 6.0)]
    assert [both.gain(SINGLES, 0.02, seen) for seen in (9.0, 0.0, 6.0)] == alone_each
    assert len(set(alone_each)) == 3


HILL = [at for second in range(10) for at in rate(2 + 2 * second, 1, NOW - 9 + second)]
"""Ten seconds, in each of which two more come than in the one before."""


def test_a_load_that_has_grown_is_not_taken_to_be_small_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hill = seen(*HILL)
    goes_on = gain(hill, 0.02)
    monkeypatch.setattr(foresight, "rises", lambda _: False)
    assert gain(hill, 0.02) < goes_on


def test_growth_is_no_burst_no_clump_and_no_chance() -> None:
    assert rises(seen(*HILL))
    assert not rises(seen(*HILL, began=NOW - 9)), "it was watched from its first requests on"
    assert not rises(seen(*rate(11, 10)))
    assert not rises(seen(*(2 * NOW - 10 - at for at in reversed(HILL)))), "it falls"
    assert not rises(seen(*rate(6, 9, NOW - 1), *rate(60, 1))), "a burst"
    slightly = [*rate(9, 5, NOW - 5), *rate(12, 5)]
    assert not rises(seen(*slightly)), "so many more come by chance"
    clumps = sorted(NOW - 9.5 + second for second in range(10) for _ in range(2 + 2 * second))
    assert len(clumps) == len(HILL)
    assert not rises(seen(*clumps)), "a few clumps are larger than others by chance"
    assert not rises(seen())


def test_a_clump_is_not_a_burst_for_ever() -> None:
    """Requests that come together once are expected to come as often as they have been seen."""
    clump = seen(*[NOW - 0.1] * 4)
    steady = seen(*rate(40, 10))
    assert gain(clump, 0.02) < 0 < gain(steady, 0.02)


def test_what_pays_for_a_time_must_pay_for_the_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst that is expected to go on for a second is left again, if stops are short."""
    here, stops = seen(*rate(6, 9, NOW - 1), *rate(60, 1)), (0.01, 2.0)
    back = [gain(here, stop, ((1.0, 1.0),)) for stop in stops]
    monkeypatch.setattr(foresight, "SURGE_HORIZONS", SURGE_HORIZONS[-1:])
    stays = [gain(here, stop, ((1.0, 1.0),)) for stop in stops]
    assert back[0] > stays[0] + 1
    assert back[1] == pytest.approx(stays[1])


@pytest.mark.parametrize("stop", [0.02, 0.2])
def test_without_requests_nothing_is_worth_a_switch(stop: float) -> None:
    empty = replace(seen(), latest=())
    assert gain(empty, stop) <= 0


def test_for_longer_they_come_more_often() -> None:
    jobs = seen(NOW - 2, NOW - 1)
    assert [at - NOW for at, _ in mirrored(jobs, 2.0)] == [1, 2, 3, 4]
    assert next(at - NOW for at, _ in mirrored(jobs, 0.5)) == 1, "every other one comes"


def test_a_surge_of_unknown_length_is_worth_a_switch_before_it_has_lasted() -> None:
    """It may end at once, which costs little, or go on for seconds, which costs much."""
    at_first, later = after(QUIET, 0.3, 140), after(QUIET, 1.0, 140)
    known, unknown = (gain(at_first, 0.02, it) for it in ((), UNKNOWN_LENGTHS))
    assert known < unknown
    assert gain(later, 0.02, UNKNOWN_LENGTHS) > unknown


def test_what_staying_costs_is_found_out_once_for_all_candidates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And each candidate is worth, to the last bit, what it is worth alone."""
    surge, stops, looks = after(QUIET, 0.3, 140), (0.02, 0.2), list[Future]()
    alone_each = [gain(surge, stop, UNKNOWN_LENGTHS) for stop in stops]
    arrivals = Future.arrivals

    def counted(future: Future, hindsight: Hindsight) -> Iterator[tuple[float, Job]]:
        looks.append(future)
        return arrivals(future, hindsight)

    monkeypatch.setattr(Future, "arrivals", counted)
    shared = Foresight(surge, UNKNOWN_LENGTHS)
    assert [shared.gain(SINGLES, stop) for stop in stops] == alone_each
    futures = [Future(stretch) for _, stretch in UNKNOWN_LENGTHS]
    assert sorted(looks) == sorted(3 * futures), "once for staying, and for each of two switches"
