"""What a switch costs: its stop, the room that it needs, and what caches lose."""

import math
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from shoal.policies.switch_costs import SwitchCosts
from shoal.policies.values.batch import Batch, PromptWork
from shoal.policies.values.layouts import Layout, alone
from shoal.policies.values.partition import Partition
from tests.policies.nodes import DP, PAIRS, TP, node
from tests.policies.snapshots import MODEL, snapshot, unit
from tests.units import tp

MIXED: Partition = (tp(0, 1, 2, 3), tp(4, 5), tp(6, 7))


def test_a_switch_stops_for_a_step_and_the_copies_and_computes_nothing_again() -> None:
    seen = node(DP, {0: 4}, rate=4.0)
    costs = SwitchCosts(seen, MODEL)
    units = tuple(replace(unit, context_tokens=40 * unit.context_tokens) for unit in seen.units)
    longer = SwitchCosts(replace(seen, units=units), MODEL)
    more = longer.stop_seconds(PAIRS) - costs.stop_seconds(PAIRS)
    added = 39 * sum(unit.context_tokens for unit in seen.units)
    # A pair reads one member's KV after the other's; the four pairs do so at once.
    assert more == pytest.approx(MODEL.carry_seconds(added, 4), rel=0.05)
    assert 0 < costs.stop_seconds(PAIRS) < 0.05
    assert more < 0.05 * MODEL.step_seconds(Layout(), Batch(prefill_tokens=added))


def test_a_prompt_in_flight_is_waited_for() -> None:
    seen = node(DP, {0: 4})
    units = (replace(seen.units[0], waiting=1, prefill_tokens=8000), *seen.units[1:])
    busy = replace(seen, units=units)
    assert (
        SwitchCosts(busy, MODEL).stop_seconds(TP) > SwitchCosts(seen, MODEL).stop_seconds(TP) + 0.2
    )


def test_a_prompt_of_which_a_part_is_computed_is_waited_for() -> None:
    seen = node(DP, {0: 4})
    units = (replace(seen.units[0], begun=PromptWork.of(8000, 8000)), *seen.units[1:])
    begun = SwitchCosts(replace(seen, units=units), MODEL)
    assert begun.stop_seconds(TP) > SwitchCosts(seen, MODEL).stop_seconds(TP) + 0.2


def stop_ahead(**units: Any) -> float:
    """Return the stop of a switch that copies ahead, where each unit has 1,000 blocks."""
    seen = replace(node(DP, {0: 4}), copies_ahead=True)
    room = {"total_blocks": 1000, "free_blocks": 900, "block_tokens": 16, "running": 4} | units
    of_units = tuple(replace(unit, **room) for unit in seen.units)
    return SwitchCosts(replace(seen, units=of_units), MODEL).stop_seconds(PAIRS)


def test_what_is_copied_ahead_stops_nobody() -> None:
    """Only the tokens of the last steps are left, and of blocks that are not full."""
    short, long = (stop_ahead(context_tokens=tokens) for tokens in (40_000, 160_000))
    assert 0 < long - short < 0.1 * MODEL.carry_seconds(8 * 120_000, 4)
    # What requests make while most is copied is read while they stop.
    few, many = (stop_ahead(context_tokens=160_000, running=count) for count in (4, 64))
    assert many - few > MODEL.carry_seconds(8 * 60 * 8, 4)


def test_what_has_no_room_in_two_places_cannot_go_ahead() -> None:
    room, half = (stop_ahead(context_tokens=12_000, free_blocks=free) for free in (900, 500))
    assert half == room
    tight = stop_ahead(context_tokens=12_000, free_blocks=250)
    assert tight - half == pytest.approx(MODEL.carry_seconds(8 * 500 * 16, 4))


def test_prompts_that_are_computed_meanwhile_cannot_go_ahead_whole() -> None:
    work = {"context_tokens": 200_000, "begun": PromptWork.of(9000, 9000)}
    one, more = (stop_ahead(**work | {"prefill_tokens": tokens}) for tokens in (0, 10**5))
    copied = MODEL.carry_seconds(8 * 10**5, 4)
    assert 0 < more - one < copied, "it is read as far as it is computed"


def test_a_switch_waits_for_a_step_that_was_scheduled_ahead() -> None:
    """It is a whole one, after what is left of the longest of four that are computed."""
    seen = node(PAIRS, {0: 8})

    def longer(*, ahead: bool) -> float:
        short, long = (
            tuple(replace(unit, prefill_tokens=tokens) for unit in seen.units)
            for tokens in (4000, 8000)
        )
        stops = (
            SwitchCosts(replace(seen, units=units, schedules_ahead=ahead), MODEL).stop_seconds(DP)
            for units in (long, short)
        )
        return next(stops) - next(stops)

    assert longer(ahead=True) / longer(ahead=False) == pytest.approx(9 / 4, rel=0.02)


def test_the_last_of_several_steps_in_flight_is_waited_for() -> None:
    """Of one step half is left in the mean, and of the longest of four steps four fifths."""

    def stall(stepping: int, prefill: int) -> float:
        units = (
            replace(unit, requests=unit.requests if k < stepping else 0, prefill_tokens=prefill)
            for k, unit in enumerate(seen.units)
        )
        return SwitchCosts(replace(seen, units=tuple(units)), MODEL).stop_seconds(DP)

    seen = node(PAIRS, {0: 8})
    longer = {stepping: stall(stepping, 8000) - stall(stepping, 4000) for stepping in (1, 4)}
    assert longer[4] / longer[1] == pytest.approx(1.6, rel=0.1)


def test_prompts_that_wait_need_no_room_in_a_switch() -> None:
    """They have no KV, though the blocks that they will need are not free for others."""
    here = unit(tp(0, 1), requests=9, running=8, blocks=0, block_tokens=16, waiting=1)
    full = replace(here, longest_tokens=10**6)
    assert not SwitchCosts(snapshot(full), MODEL).has_room((alone(0), alone(1)))
    waits = replace(full, prompts=(16 * 20,))
    assert SwitchCosts(snapshot(waits), MODEL).has_room((alone(0), alone(1)))
    little = replace(full, prompts=(16 * 10,))
    assert not SwitchCosts(snapshot(little), MODEL).has_room((alone(0), alone(1)))


def test_a_nearly_full_unit_has_room_for_a_switch_if_its_longest_requests_can_take_turns() -> None:
    def has_room(free: int, longest: int) -> bool:
        group = unit(tp(0, 1), requests=9, running=9, blocks=free, block_tokens=16)
        here = replace(group, total_blocks=1000, longest_tokens=longest)
        return SwitchCosts(snapshot(here), MODEL).has_room((alone(0), alone(1)))

    assert has_room(free=20, longest=160)
    assert not has_room(free=19, longest=160), "a little must be free in any case"
    assert has_room(free=80, longest=640)
    assert not has_room(free=79, longest=640)
    assert has_room(free=150, longest=10**6), "so much is enough for anything"
    assert not has_room(free=149, longest=10**6)


def test_units_that_stay_are_not_stopped() -> None:
    seen = node(MIXED, {0: 4})
    halves: Partition = (tp(0, 1, 2, 3), tp(4, 5, 6, 7))
    costs = SwitchCosts(seen, MODEL)
    assert costs.stop_seconds(MIXED) < costs.stop_seconds(halves)


def refill(**seen: Any) -> float:
    """Return what caches lose, where half of the prompts' tokens is found."""
    units = {key: seen.pop(key) for key in ("cached_tokens", "portable_tokens") if key in seen}
    here = replace(node(DP, {0: 4}, rate=4.0), hit_share=0.5, prompt_tokens=1000.0)
    units = {"cached_tokens": 10**6, "context_tokens": 0} | units
    of_units = tuple(replace(unit, **units) for unit in here.units)
    known = {"lost_tokens": 600.0, "watched_tokens": inf} | seen
    return SwitchCosts(replace(here, units=of_units, **known), MODEL).refill_seconds()


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
    assert SwitchCosts(replace(seen, units=units), MODEL).empty_caches().memory == 1200.0
    some = tuple(replace(unit, portable_tokens=1000) for unit in units)
    assert SwitchCosts(replace(seen, units=some), MODEL).empty_caches().tokens > 1000
    portable = tuple(replace(unit, portable_tokens=100_000) for unit in units)
    assert SwitchCosts(replace(seen, units=portable), MODEL).empty_caches().memory == 0.0
    assert SwitchCosts(replace(seen, hit_share=0.0), MODEL).empty_caches().memory == 0.0
