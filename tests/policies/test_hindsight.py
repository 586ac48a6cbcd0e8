"""What is foreseen: the latest requests come again, the last one first."""

from dataclasses import replace
from itertools import pairwise
from math import exp, inf

import pytest

from shoal.policies import hindsight
from shoal.policies.hindsight import (
    AGAIN_SECONDS,
    SURGE_HORIZONS,
    EmptyCaches,
    Future,
    Hindsight,
    News,
    Trial,
    _mirrored,
    _repeated,
    follow,
    foreseen,
    levelled,
    moved,
    on_node,
    renewed,
    saved,
)
from shoal.policies.jobs import Decode, Job
from shoal.policies.shadow import Queue, Shadow
from shoal.policies.surges import UNKNOWN_LENGTHS
from shoal.policies.terms import Terms
from shoal.policies.unit_costs import Prices
from shoal.policies.values.layouts import Layout, alone
from shoal.policies.values.pace import Pace
from tests.policies.nodes import TP, node
from tests.policies.snapshots import request, snapshot, unit
from tests.units import tp

NOW = 100.0
SINGLES, GROUP = (alone(0), alone(1)), (tp(0, 1),)


def terms(layout: Layout) -> Terms:
    """Return a unit: a group is the faster one for fewer than 12 requests, and two units above."""
    grouped = layout.tp == 2
    pace = Pace(
        members=1,
        weights=0.0,
        token=6e-4 if grouped else 2e-4,
        latency=0.0,
        moved=0.0,
        read=0.0,
        attend=0.0,
        host=0.0,
        mixed_host=0.0,
        overhead=0.004 if grouped else 0.01,
    )
    free = Pace(1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.001)
    return Terms(pace, free, free, inf, 256, 1e9, 8192, 8192, Prices(1e-6, 1e-9), 100.0)


TERMS = {layout: terms(layout) for layout in (Layout(), Layout(2))}


def seen(*latest: float, began: float = 0.0) -> Hindsight:
    """Return a group that has nothing to do, after requests came at these times."""
    jobs = tuple(Job(at, 10, 10, 100) for at in latest)
    current = Shadow([Queue(GROUP[0].layout, NOW)])
    return Hindsight(NOW, GROUP, current, (), latest=jobs, began=began)


def rate(per_second: float, seconds: float, until: float = NOW) -> list[float]:
    count = round(per_second * seconds)
    return [until - (count - k - 0.5) / per_second for k in range(count)]


def times(here: Hindsight) -> list[float]:
    return [at - NOW for at, _ in _mirrored(here)]


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
        return [at - NOW for at, _ in _repeated(here)]

    assert again(seen(NOW - 5, NOW - 2, NOW - 1)) == [5, 8, 9]
    assert again(seen(NOW - 3, NOW - 1, began=NOW - 4)) == [3, 5, 9, 11]
    assert again(seen(NOW, NOW, began=NOW))[:4] == [1.75, 1.75, 3.5, 3.5]


def test_clumps_that_came_at_both_ends_of_the_time_are_not_taken_for_more() -> None:
    """Six come every two seconds, and the node was watched since the first of three such clumps."""
    clumps = sorted([NOW - 4, NOW - 2, NOW] * 6)
    assert 5 < seen(*clumps, began=NOW - 4).period <= 6
    evenly = seen(*rate(40, 2), began=NOW - 2)
    assert evenly.period == pytest.approx(2, rel=0.03)
    assert seen(*clumps, began=NOW - 60).period == AGAIN_SECONDS


def test_a_switch_must_pay_whether_what_happens_goes_on_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Perhaps many came at once, and no more of them will follow now."""
    many = seen(*rate(6, 9, NOW - 1), *rate(60, 1))
    whole = foreseen(many, SINGLES, 0.01, TERMS)
    each = []
    for future in hindsight.FUTURES:
        monkeypatch.setattr(hindsight, "FUTURES", (future,))
        each.append(foreseen(many, SINGLES, 0.01, TERMS))
    goes_on, comes_again = each
    assert comes_again < goes_on
    assert whole == comes_again


def test_a_switch_must_also_pay_for_what_caches_lose() -> None:
    many = seen(*rate(40, 10))
    cached = tuple(job._replace(new=10, prompt=1000) for job in many.latest)
    many, slow = replace(many, latest=cached), replace(TERMS[Layout()].tp, token=1e-5)
    dear = {layout: of._replace(tp=slow, sp=slow) for layout, of in TERMS.items()}

    def worth(memory: float) -> float:
        return foreseen(many, SINGLES, 0.02, dear, caches=EmptyCaches(memory))

    assert worth(0.0) == foreseen(many, SINGLES, 0.02, dear)
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
    assert foreseen(both, SINGLES, 0.02, TERMS) < 0
    assert foreseen(seen(*rate(100, 10)), SINGLES, 0.02, TERMS) > 0
    monkeypatch.setattr(hindsight, "FUTURES", (Future(),))
    assert foreseen(both, SINGLES, 0.02, TERMS) > 0
    assert foreseen(seen(*rate(len(burst + quiet) / 10, 10)), SINGLES, 0.02, TERMS) < 0


def test_only_in_a_surge_does_it_look_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes later than that can be judged later."""
    grows, lasts = after(QUIET, 1.0, 140), ((1.0, 10.0),)
    near, far = (foreseen(grows, SINGLES, 0.02, TERMS, it) for it in ((), lasts))
    monkeypatch.setattr(hindsight, "SURGE_HORIZONS", hindsight.HORIZONS)
    assert foreseen(grows, SINGLES, 0.02, TERMS, lasts) < far
    monkeypatch.setattr(hindsight, "HORIZONS", SURGE_HORIZONS)
    assert foreseen(grows, SINGLES, 0.02, TERMS) > near


def test_a_clump_is_not_a_burst_for_ever() -> None:
    """Requests that come together once are expected to come as often as they have been seen."""
    clump = seen(*[NOW - 0.1] * 4)
    steady = seen(*rate(40, 10))
    assert foreseen(clump, SINGLES, 0.02, TERMS) < 0 < foreseen(steady, SINGLES, 0.02, TERMS)


def test_what_pays_for_a_time_must_pay_for_the_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst that is expected to go on for a second is left again, if stops are short."""
    here, stops = seen(*rate(6, 9, NOW - 1), *rate(60, 1)), (0.01, 2.0)
    back = [foreseen(here, SINGLES, stop, TERMS, ((1.0, 1.0),)) for stop in stops]
    monkeypatch.setattr(hindsight, "SURGE_HORIZONS", SURGE_HORIZONS[-1:])
    stays = [foreseen(here, SINGLES, stop, TERMS, ((1.0, 1.0),)) for stop in stops]
    assert back[0] > stays[0] + 1
    assert back[1] == pytest.approx(stays[1])


@pytest.mark.parametrize("stop", [0.02, 0.2])
def test_without_requests_nothing_is_worth_a_switch(stop: float) -> None:
    empty = replace(seen(), latest=())
    assert foreseen(empty, SINGLES, stop, TERMS) <= 0


def after(quiet: list[float], seconds: float, per_second: float) -> Hindsight:
    """Return a group to which requests came at some times, and then at another rate."""
    return seen(*(at - seconds for at in quiet), *rate(per_second, seconds))


QUIET = rate(24, AGAIN_SECONDS)


def test_for_longer_they_come_more_often() -> None:
    jobs = seen(NOW - 2, NOW - 1)
    assert [at - NOW for at, _ in _mirrored(jobs, 2.0)] == [1, 2, 3, 4]
    assert next(at - NOW for at, _ in _mirrored(jobs, 0.5)) == 1, "every other one comes"


def test_a_surge_of_unknown_length_is_worth_a_switch_before_it_has_lasted() -> None:
    """It may end at once, which costs little, or go on for seconds, which costs much."""
    at_first, later = after(QUIET, 0.3, 140), after(QUIET, 1.0, 140)
    known, unknown = (foreseen(at_first, SINGLES, 0.02, TERMS, it) for it in ((), UNKNOWN_LENGTHS))
    assert known < unknown
    assert foreseen(later, SINGLES, 0.02, TERMS, UNKNOWN_LENGTHS) > unknown


def test_what_staying_costs_is_found_out_once_for_all_candidates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And each candidate is worth, to the last bit, what it is worth alone."""
    surge, stays = after(QUIET, 0.3, 140), hindsight.Staying()
    stops = (0.02, 0.2)
    alone_each = [foreseen(surge, SINGLES, stop, TERMS, UNKNOWN_LENGTHS) for stop in stops]
    shared = [foreseen(surge, SINGLES, stop, TERMS, UNKNOWN_LENGTHS, stays) for stop in stops]
    assert shared == alone_each
    assert stays.keys() == {Future(length) for _, length in UNKNOWN_LENGTHS}
    # It is really used: where staying takes no time, nothing is worth a switch.
    none = {future: tuple((0.0, 0) for _ in SURGE_HORIZONS) for future in stays}
    assert foreseen(surge, SINGLES, 0.02, TERMS, UNKNOWN_LENGTHS, none) < 0 < shared[0]
    looks = []
    again = hindsight._again
    monkeypatch.setattr(hindsight, "_again", lambda *args: looks.append(args) or again(*args))
    foreseen(surge, SINGLES, 0.02, TERMS, UNKNOWN_LENGTHS, stays)
    assert len(looks) == len(UNKNOWN_LENGTHS), "only what leaving costs"


def test_after_a_switch_the_node_has_the_requests_that_it_took_along() -> None:
    """The shadow that always had the new layout has ended them, and nobody has saved anything."""
    jobs = [Job(NOW - 1.2, 10, 10, 100, str(k)) for k in range(14)]
    here = Shadow([Queue(GROUP[0].layout, NOW - 1.2)])
    ahead = Shadow([Queue(one.layout, NOW - 1.2) for one in SINGLES])
    for shadow in (here, ahead):
        for job in jobs:
            shadow.put(job, TERMS)
        shadow.advance(NOW, TERMS)
    assert (here.requests, ahead.requests) == (14, 0), "single engines are faster with so many"
    before = Hindsight(NOW, GROUP, here, ((SINGLES, Trial(ahead, 0.0)),))
    now = moved(before, SINGLES, TERMS)
    assert now.current.requests == 14
    assert [queue.layout for queue in now.current.queues] == [one.layout for one in SINGLES]
    assert dict(now.trials) == {GROUP: Trial(here, 0.0)}
    node = replace(snapshot(*(unit(one, requests=7) for one in SINGLES)), now=NOW)
    told = follow(now, node, News((), (), ()), TERMS)
    assert saved(levelled(told, TERMS), TERMS) == {GROUP: pytest.approx(0.0)}


def test_a_wrong_guess_of_lengths_is_no_saving() -> None:
    """A trial begins with requests that seem long, and would end earlier in single engines."""
    here = Shadow([Queue(GROUP[0].layout, NOW)])
    for k in range(20):
        here.put(Job(NOW, 10, 10, 1000, str(k)), TERMS)
    here.advance(NOW + 0.05, TERMS)
    blank = Trial(here, 0.0)
    before = Hindsight(NOW + 0.05, GROUP, here, ((SINGLES, blank),))
    trial = renewed(before, [SINGLES], TERMS)
    assert saved(trial, TERMS) == {SINGLES: pytest.approx(0.0)}
    told = News((), (), tuple((str(k), 20) for k in range(20)))
    # The node has one more request, or all that it has not heard of would count as gone.
    node = replace(snapshot(unit(GROUP[0], requests=1)), now=NOW + 0.1)
    known = follow(trial, node, told, TERMS)
    assert abs(saved(known, TERMS)[SINGLES]) < 0.2
    assert dict(known.trials)[SINGLES].first is None, "nothing in it is a guess any more"
    never = replace(trial, trials=((SINGLES, replace(dict(trial.trials)[SINGLES], first=None)),))
    assert abs(saved(follow(never, node, told, TERMS), TERMS)[SINGLES]) > 10


def test_a_trial_is_told_of_its_own_requests_only() -> None:
    here = Shadow([Queue(GROUP[0].layout, NOW)])
    here.put(Job(NOW, 10, 10, 100, "old"), TERMS)
    begun = renewed(Hindsight(NOW, GROUP, here, ((SINGLES, Trial(here, 0.0)),)), [SINGLES], TERMS)
    trial = dict(begun.trials)[SINGLES]
    assert trial.told([("new", 7, True)], TERMS) is trial
    longer = trial.told([("old", 200, False)], TERMS)
    assert longer.first is not None
    assert longer.first.here.final_cost(TERMS) > trial.differ
    assert longer.told([("old", 200, True)], TERMS).first is None


def test_what_no_unit_can_hold_is_in_no_shadow() -> None:
    pool = (request("fits", prompt=100), request("never", prompt=10**7))
    seen = replace(node(TP), pool=pool)
    assert [job.key for job in on_node(seen).waiting] == ["fits"]
    everything = on_node(replace(seen, layouts=())).waiting
    assert [job.key for job in everything] == ["fits", "never"], "nothing is known of units"


def test_outputs_that_still_run_make_others_seem_longer() -> None:
    """Those that have ended are short, because the node has just begun."""
    here = Shadow([Queue(GROUP[0].layout, NOW)])
    for k in range(30):
        here.queues[0].add_decode(Decode(100, NOW - 5.0, 610, 600, str(k)))
    seen = Hindsight(NOW, GROUP, here, ())
    node = replace(snapshot(unit(GROUP[0], requests=30)), now=NOW + 0.1, outputs=(10,) * 20)
    arrived = tuple(request(f"new {k}", arrival=NOW) for k in range(40))
    outputs = [job.output for job in follow(seen, node, News(arrived, (), ()), TERMS).latest]
    assert sum(output > 500 for output in outputs) == pytest.approx(24, abs=2), "30 of 50 are long"
