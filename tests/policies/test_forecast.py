"""What a partition is predicted to cost: in which direction every cause moves the prediction."""

import math
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from shoal.policies.forecast import Class, Forecast, risk, served, uniform, work_of
from shoal.policies.values.batch import Batch
from shoal.policies.values.layouts import Layout, alone
from shoal.policies.values.partition import Partition, singles
from shoal.policies.values.snapshot import Snapshot, Target
from tests.policies.nodes import DP, FOURS, PAIRS, TP, node
from tests.policies.snapshots import MODEL, request, snapshot, unit
from tests.units import tp

MIXED: Partition = (tp(0, 1, 2, 3), tp(4, 5), tp(6, 7))
TARGET = Target(0, 1.0, 0.03)


def cost(seen: Snapshot, candidate: Partition | None = None, stall: float = 0.0) -> float:
    return Forecast(seen, MODEL).cost(candidate or seen.partition, stall)


@pytest.mark.parametrize("partition", [DP, PAIRS, TP])
def test_requests_take_longer_the_more_come(partition: Partition) -> None:
    """In all and, as they share steps, each of them."""
    rates = (0.5, 2.0, 8.0, 32.0)
    found = [cost(node(partition, rate=rate)) for rate in rates]
    each = [total / rate for total, rate in zip(found, rates, strict=True)]
    assert each == sorted(each)
    assert each[0] < each[-1]


def test_every_degree_is_best_at_some_load() -> None:
    """One request is fastest in the widest group, a crowd is so alone, and between are others."""

    def best(rate: float) -> int:
        seen = replace(node(DP, rate=rate), prompt_tokens=300.0, output_tokens=500.0)
        return min(uniform(seen), key=Forecast(seen, MODEL).cost)[0].size

    found = [best(rate) for rate in (0.1, 20.0, 40.0, 50.0, 200.0)]
    assert found == sorted(found, reverse=True)
    assert {8, 4, 2, 1} == {best(float(rate)) for rate in range(1, 201, 3)}


def test_what_waits_costs_and_is_seen_beyond_the_head_of_the_pool() -> None:
    seen = replace(node(DP, {0: 1}), waiting=501, waiting_tokens=501 * 500, pool=(request("a"),))
    assert work_of(seen).waiting == 501
    assert cost(seen) > cost(node(DP, {0: 1})) + 500


def test_longer_outputs_are_a_higher_load() -> None:
    seen = node(DP, {0: 2}, rate=12.0)
    assert cost(replace(seen, output_tokens=800.0)) > cost(seen)


def test_prompts_that_run_in_sp_take_less_time() -> None:
    """SP counts above the threshold only: below it, a step of the forecast is one in TP."""
    seen = replace(node(TP, {0: 4}, rate=12.0), prompt_tokens=4000.0)

    def above(tokens: int) -> float:
        return cost(replace(seen, sp_above=((Layout(tp=8), tokens),)))

    assert above(512) < cost(seen)
    assert above(10**6) == cost(seen)


def test_a_dead_engine_takes_no_work() -> None:
    """Those that are left have more to do, and the dead one does not make the mean better."""
    seen = node(DP, {0: 2}, rate=8.0)
    assert cost(replace(seen, dead=frozenset({7}))) > cost(seen)


# --- switches ---


def test_a_stop_costs_what_it_keeps_requests_waiting() -> None:
    seen = node(DP, {0: 4}, rate=4.0)
    short, long = (cost(seen, stall=stall) - cost(seen) for stall in (0.05, 0.1))
    assert 32 * 0.05 < short < long
    assert long == pytest.approx(2 * short, rel=0.2)


def test_a_switch_stops_for_a_step_and_the_copies_and_computes_nothing_again() -> None:
    seen = node(DP, {0: 4}, rate=4.0)
    forecast = Forecast(seen, MODEL)
    units = tuple(replace(unit, context_tokens=40 * unit.context_tokens) for unit in seen.units)
    longer = Forecast(replace(seen, units=units), MODEL)
    more = longer.stall(PAIRS) - forecast.stall(PAIRS)
    added = 39 * sum(unit.context_tokens for unit in seen.units)
    # A pair reads one member's KV after the other's; the four pairs do so at once.
    assert more == pytest.approx(MODEL.carry_seconds(added, 4), rel=0.05)
    assert 0 < forecast.stall(PAIRS) < 0.05
    assert more < 0.05 * MODEL.step_seconds(Layout(), Batch(prefill_tokens=added))


def test_a_prompt_in_flight_is_waited_for() -> None:
    seen = node(DP, {0: 4})
    units = (replace(seen.units[0], waiting=1, prefill_tokens=8000), *seen.units[1:])
    busy = replace(seen, units=units)
    assert Forecast(busy, MODEL).stall(TP) > Forecast(seen, MODEL).stall(TP) + 0.2


def test_a_switch_waits_for_a_step_that_was_scheduled_ahead() -> None:
    """It is a whole one, after half of the one that is computed, or what the last unit leaves."""
    seen = node(PAIRS, {0: 8})

    def longer(stop: Callable[[Forecast], float], *, ahead: bool) -> float:
        short, long = (
            tuple(replace(unit, prefill_tokens=tokens) for unit in seen.units)
            for tokens in (4000, 8000)
        )
        stops = (
            stop(Forecast(replace(seen, units=units, schedules_ahead=ahead), MODEL))
            for units in (long, short)
        )
        return next(stops) - next(stops)

    for stop, left in ((lambda f: f.stall(DP), 1 / 2), (lambda f: f.whole_stop(DP), 4 / 5)):
        ratio = longer(stop, ahead=True) / longer(stop, ahead=False)
        assert ratio == pytest.approx((1 + left) / left, rel=0.02)


def test_the_last_of_several_steps_in_flight_is_waited_for() -> None:
    """Of one step half is left in the mean, and of the longest of four steps four fifths."""

    def stall(stepping: int, prefill: int) -> float:
        units = (
            replace(unit, requests=unit.requests if k < stepping else 0, prefill_tokens=prefill)
            for k, unit in enumerate(seen.units)
        )
        return Forecast(replace(seen, units=tuple(units)), MODEL).whole_stop(DP)

    seen = node(PAIRS, {0: 8})
    longer = {stepping: stall(stepping, 8000) - stall(stepping, 4000) for stepping in (1, 4)}
    assert longer[4] / longer[1] == pytest.approx(1.6, rel=0.1)


def test_prompts_that_wait_need_no_room_in_a_switch() -> None:
    """They have no KV, though the blocks that they will need are not free for others."""
    full = unit(tp(0, 1), requests=9, running=8, blocks=0, block_tokens=16, waiting=1)
    assert not Forecast(snapshot(full), MODEL).has_room((alone(0), alone(1)))
    waits = replace(full, prompts=(16 * 20,))
    assert Forecast(snapshot(waits), MODEL).has_room((alone(0), alone(1)))
    little = replace(full, prompts=(16 * 10,))
    assert not Forecast(snapshot(little), MODEL).has_room((alone(0), alone(1)))


def test_units_that_stay_are_not_stopped() -> None:
    seen = node(MIXED, {0: 4})
    halves: Partition = (tp(0, 1, 2, 3), tp(4, 5, 6, 7))
    forecast = Forecast(seen, MODEL)
    assert forecast.stall(MIXED) < forecast.stall(halves)


# --- classes and promises ---


def test_the_most_urgent_class_has_the_widest_units_to_itself() -> None:
    first, rest = Class(TARGET, 1, 0.1), Class(TARGET, 1, 0.9)
    assert list(served(MIXED, [first, rest])) == [
        ([tp(0, 1, 2, 3)], [first]),
        ([tp(4, 5), tp(6, 7)], [rest]),
    ]
    assert list(served(MIXED, [rest])) == [(MIXED, [rest])]
    assert list(served(singles(4), [first, rest])) == [(singles(4), [first, rest])]


def test_seconds_of_urgent_requests_weigh_more() -> None:
    seen = node(DP, {0: 2}, rate=8.0)
    none, some = (Forecast(seen, MODEL, share).cost(DP) for share in (0.0, 0.2))
    assert some == pytest.approx(none * (0.8 + 0.2 * 4))


def test_a_tighter_promise_is_broken_more_often() -> None:
    seen = cost(node(DP, {0: 2}, TARGET))
    assert cost(node(DP, {0: 2}, Target(0, 1.0, 0.02))) > seen
    assert cost(node(DP, {0: 2}, Target(0, 0.1, 0.03))) > seen
    assert cost(node(DP, {0: 2}, Target(0, 1e6, 1e6))) < seen


def test_no_more_promises_break_than_were_made() -> None:
    hopeless = node(PAIRS, {0: 2}, Target(0, 1e-6, 1e-6), rate=3.0)
    made = 16 + 3.0 * 55
    assert 0.7 * made < cost(hopeless) < 1.3 * made + 0.002 * cost(node(PAIRS, {0: 2}, rate=3.0))


def test_a_risk_grows_from_none_to_certainty() -> None:
    risks = [risk(0.1 * k, 0.003 * k, TARGET) for k in range(1, 40)]
    assert risks == sorted(risks)
    assert risks[0] < 0.01
    assert risks[-1] > 0.99


def test_an_idle_node_has_a_best_layout() -> None:
    seen = node(FOURS, rate=0.0)
    assert cost(seen, TP) < cost(seen, FOURS) < cost(seen, DP)


def refill(**seen: Any) -> float:
    """Return what caches lose, where half of the prompts' tokens is found."""
    units = {key: seen.pop(key) for key in ("cached_tokens", "portable_tokens") if key in seen}
    here = replace(node(DP, {0: 4}, rate=4.0), hit_share=0.5, prompt_tokens=1000.0)
    units = {"cached_tokens": 10**6, "context_tokens": 0} | units
    of_units = tuple(replace(unit, **units) for unit in here.units)
    known = {"lost_tokens": 600.0, "watched_tokens": inf} | seen
    return Forecast(replace(here, units=of_units, **known), MODEL).refill()


def test_what_is_used_again_soon_is_lost_only_once() -> None:
    everything = refill(lost_tokens=inf)
    assert refill() == pytest.approx(everything / 400)
    assert refill(lost_tokens=1200.0) == pytest.approx(everything / 200)
    assert refill(lost_tokens=inf, cached_tokens=300) == pytest.approx(everything / 100)


def test_what_was_not_watched_for_long_is_a_guess() -> None:
    """A minute has 480,000 tokens of prompts. Each doubling of the time finds as much again."""
    new = {"watched_tokens": 80_000.0, "late_share": math.log(2) / 100}
    token = refill() / 600
    assert refill(**new) == pytest.approx((600 + 4400) * token)
    assert refill(**{**new, "late_share": 0.0}) == refill()
    assert refill(**{**new, "watched_tokens": 960_000.0}) == refill()


def test_what_a_switch_takes_along_is_not_lost() -> None:
    assert refill(lost_tokens=inf, portable_tokens=10**6) == 0.0
    half = refill(lost_tokens=inf, cached_tokens=600, portable_tokens=300)
    assert half == refill(lost_tokens=inf, cached_tokens=300) > 0


def test_what_is_lost_was_used_longer_ago_than_what_a_switch_takes_along() -> None:
    nothing, little, more = (refill(portable_tokens=tokens) for tokens in (0, 50, 500))
    assert 0 < more < 0.2 * little < 0.2 * nothing
    guess = {"watched_tokens": 80_000.0, "late_share": math.log(2) / 100, "lost_tokens": 0.0}
    assert refill(**guess, portable_tokens=500) == refill(**guess), "it was watched for longer"
    assert 0 < refill(**guess, portable_tokens=20_000) < refill(**guess)


def test_caches_that_a_switch_takes_along_are_not_empty_after_it() -> None:
    seen = replace(node(DP, {0: 4}, rate=4.0), hit_share=0.5, lost_tokens=600.0)
    units = tuple(replace(unit, cached_tokens=100_000) for unit in seen.units)
    assert Forecast(replace(seen, units=units), MODEL).empty_caches().memory == 1200.0
    some = tuple(replace(unit, portable_tokens=1000) for unit in units)
    assert Forecast(replace(seen, units=some), MODEL).empty_caches().tokens > 1000
    portable = tuple(replace(unit, portable_tokens=100_000) for unit in units)
    assert Forecast(replace(seen, units=portable), MODEL).empty_caches().memory == 0.0
    assert Forecast(replace(seen, hit_share=0.0), MODEL).empty_caches().memory == 0.0
