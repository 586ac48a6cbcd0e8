"""Requests go where they cost least: where their prefix is cached, or little is to be done."""

from dataclasses import replace

import pytest

from shoal.policies.static import dispatch_least_loaded
from shoal.policies.unit_costs import MOST_PATIENCE, PATIENCE, UnitCosts, prices_of
from shoal.policies.values.batch import Batch, Mode, PromptWork
from shoal.policies.values.layouts import Unit, alone
from shoal.policies.values.plan import Room
from shoal.policies.values.snapshot import PoolRequest, Snapshot, UnitState
from tests.policies.snapshots import MODEL, request, snapshot, unit
from tests.units import tp

ONE, TWO = alone(0), alone(1)
WIDE = {"blocks": 100_000, "total_blocks": 100_000, "max_model_len": 400_000, "slots": 64}


def room(engine: Unit, requests: int = 0, context: int = 0, queued: int = 0) -> UnitState:
    return unit(engine, requests=requests, context_tokens=context, prefill_tokens=queued, **WIDE)


def asks(name: str, prompt: int, *cached: tuple[Unit, int], priority: int = 0) -> PoolRequest:
    return replace(request(name, prompt=prompt, priority=priority), cached=cached)


def placed(seen: Snapshot) -> list[Unit]:
    return [dispatch.unit for dispatch in dispatch_least_loaded(seen)]


@pytest.fixture(params=[None, MODEL], ids=["no-model", "model"])
def model(request: pytest.FixtureRequest) -> object:
    return request.param


def test_a_request_goes_where_its_prefix_is_cached(model: object) -> None:
    for home in (ONE, TWO):
        seen = snapshot(room(ONE), room(TWO), pool=(asks("r", 4000, (home, 3500)),))
        assert placed(replace(seen, cost_model=model)) == [home]


def test_the_longer_of_two_cached_prefixes_counts(model: object) -> None:
    seen = snapshot(room(ONE), room(TWO), pool=(asks("r", 4000, (ONE, 1000), (TWO, 3000)),))
    assert placed(replace(seen, cost_model=model)) == [TWO]


def test_a_unit_with_a_long_queue_is_avoided_whatever_it_has_cached(model: object) -> None:
    pool = (asks("r", 4000, (ONE, 3500)),)
    idle = snapshot(room(ONE, 1, 4000, 1000), room(TWO), pool=pool)
    assert placed(replace(idle, cost_model=model)) == [ONE]
    full = snapshot(room(ONE, 3, 30_000, 20_000), room(TWO), pool=pool)
    assert placed(replace(full, cost_model=model)) == [TWO]


def test_a_unit_with_many_requests_is_avoided_unless_the_prefix_is_worth_it(model: object) -> None:
    def where(cached: int) -> list[Unit]:
        seen = snapshot(
            room(ONE, 4, 4000), room(TWO, 3, 3000), pool=(asks("r", 60_000, (ONE, cached)),)
        )
        return placed(replace(seen, cost_model=model))

    assert where(100) == [TWO]
    assert where(50_000) == [ONE]


def test_without_a_prefix_the_one_with_fewer_tokens_is_taken(model: object) -> None:
    seen = snapshot(room(ONE, 2, 50_000), room(TWO, 2, 2000), pool=(asks("r", 500),))
    assert placed(replace(seen, cost_model=model)) == [TWO]
    queue = snapshot(room(ONE, 2, 2000, 9000), room(TWO, 2, 2000), pool=(asks("r", 500),))
    assert placed(replace(queue, cost_model=model)) == [TWO]


def test_a_hot_prefix_does_not_put_everything_on_one_unit(model: object) -> None:
    """All prompts begin with the same 3,000 tokens, which one unit has and the other gets."""
    pool = tuple(replace(asks(f"r{k}", 3200, (ONE, 3000)), prefix=7) for k in range(40))
    units = placed(replace(snapshot(room(ONE), room(TWO), pool=pool), cost_model=model))
    assert (len(units), units[0]) == (40, ONE)
    assert 18 <= units.count(TWO) <= 20


def test_what_one_brings_to_a_unit_is_there_for_those_with_the_same_beginning_only() -> None:
    first, same, other = (
        replace(asks(name, 4000, (ONE, 3000)), prefix=prefix)
        for name, prefix in (("first", 1), ("same", 1), ("other", 2))
    )
    there = Room(room(TWO))
    there.take(first)
    assert [there.new_tokens(one) for one in (same, other)] == [1000, 4000]


def test_the_order_of_the_pool_holds_whatever_is_cached(model: object) -> None:
    """One seat is left: it is the first request's, although the second one would cost less."""
    last = unit(ONE, **{**WIDE, "slots": 1})
    seen = snapshot(last, pool=(asks("first", 9000, priority=-1), asks("next", 9000, (ONE, 8900))))
    (dispatch,) = dispatch_least_loaded(replace(seen, cost_model=model))
    assert dispatch.request_id == "first"


def test_a_full_unit_is_not_waited_for(model: object) -> None:
    full = unit(ONE, **{**WIDE, "slots": 0})
    seen = snapshot(full, room(TWO), pool=(asks("r", 4000, (ONE, 3900)),))
    assert placed(replace(seen, cost_model=model)) == [TWO]


def test_a_preferred_width_counts_before_a_prefix(model: object) -> None:
    seen = snapshot(room(ONE), room(TWO), room(tp(2, 3)), pool=(asks("r", 4000, (ONE, 3900)),))
    (dispatch,) = dispatch_least_loaded(replace(seen, cost_model=model), prefer=lambda _: -1)
    assert dispatch.unit == tp(2, 3)


def test_a_whole_prompt_is_never_free() -> None:
    one = asks("r", 100, (ONE, 200))
    assert Room(room(ONE)).new_tokens(one) == 1
    assert UnitCosts(snapshot(room(ONE)))(one, Room(room(ONE))).cost > 0


def test_a_prompt_does_not_wait_long_for_the_sake_of_many_others() -> None:
    """One unit has many requests and no prompt to compute, the other few and long prompts."""

    def where(queued: int, *, modelled: bool = True) -> list[Unit]:
        few = replace(room(TWO, 3, 90_000, queued), waiting=1, prompts=(queued,))
        seen = snapshot(room(ONE, 24, 24_000), few, pool=(asks("r", 20_000),))
        return placed(replace(seen, cost_model=MODEL if modelled else None))

    assert where(5000) == [TWO]
    assert where(60_000) == [ONE]
    assert where(60_000, modelled=False) == [TWO], "nothing tells how late that is"


def test_a_late_unit_is_taken_when_no_other_can_start_the_request() -> None:
    few = replace(room(TWO, 3, 90_000, 60_000), waiting=1, prompts=(60_000,))
    full = replace(room(ONE, 24, 24_000), free_blocks=10)
    seen = snapshot(full, few, pool=(asks("r", 20_000),))
    assert placed(replace(seen, cost_model=MODEL)) == [TWO]


def test_what_is_left_of_a_prompt_that_is_being_computed_is_waited_for(model: object) -> None:
    begun = replace(room(ONE, 2, 30_000), begun=PromptWork.of(29_000, 20_000))
    seen = snapshot(begun, room(TWO, 2, 30_000), pool=(asks("r", 500),))
    assert placed(replace(seen, cost_model=model)) == [TWO]


def test_one_long_prompt_takes_more_time_than_short_ones_of_as_many_tokens() -> None:
    long = replace(room(ONE, 4, 80_000, 80_000), waiting=4, prompts=(77_000, 1000, 1000, 1000))
    short = replace(room(TWO, 4, 80_000, 80_000), waiting=4, prompts=(20_000,) * 4)
    for units, there in (((long, short), TWO), ((short, long), TWO)):
        seen = snapshot(*units, pool=(asks("r", 500),))
        assert placed(replace(seen, cost_model=MODEL)) == [there]


def patience(seen: Snapshot) -> float:
    (dispatch,) = dispatch_least_loaded(seen)
    return dispatch.patience


@pytest.mark.parametrize(("prompt", "cached"), [(100, 0), (700, 0), (2000, 1900)])
def test_a_prompt_lets_others_pass_for_a_multiple_of_the_time_that_is_left_of_it(
    prompt: int, cached: int
) -> None:
    found = ((ONE, cached),) if cached else ()
    seen = replace(snapshot(room(ONE), pool=(asks("r", prompt, *found),)), cost_model=MODEL)
    own = prices_of(seen, ONE.layout).seconds(PromptWork.of(prompt, prompt - cached))
    assert patience(seen) == pytest.approx(PATIENCE * own)
    assert 0 < patience(seen) < MOST_PATIENCE


def test_no_prompt_is_more_patient_than_the_most() -> None:
    seen = snapshot(room(ONE), pool=(asks("r", 390_000),))
    assert patience(replace(seen, cost_model=MODEL)) == MOST_PATIENCE


def test_nobody_lets_others_pass_where_times_are_unknown_or_users_want_the_order_of_arrival() -> (
    None
):
    seen = snapshot(room(ONE), pool=(asks("r", 5000),))
    assert patience(replace(seen, cost_model=None)) == 0.0
    assert patience(replace(seen, cost_model=MODEL, short_first=False)) == 0.0


@pytest.mark.parametrize("layer_seconds", [0.0, 0.1])
def test_prompts_cost_their_part_of_long_steps_also_where_all_of_these_wait_for_the_host(
    layer_seconds: float,
) -> None:
    group = tp(0, 1)
    hardware = replace(MODEL.hardware, sp_layer_host_seconds=layer_seconds)
    model = replace(MODEL, hardware=hardware)
    seen = replace(snapshot(room(group)), cost_model=model, sp_above=((group.layout, 512),))
    long = [
        model.step_seconds(group.layout, Batch(0, 0, tokens, 4096), Mode.SP)
        for tokens in (2048, 4096)
    ]
    assert (long[0] == long[1]) == (layer_seconds > 0), "the host is the bottleneck, or is not"
    short = model.step_seconds(group.layout, Batch(0, 0, 1, 4096), Mode.TP)
    assert prices_of(seen, group.layout).prompt == pytest.approx((long[1] - short) / 4096)
    assert short < long[1]
