"""What a partition is predicted to do: the direction in which every cause moves the prediction."""

from dataclasses import replace

import pytest

from shoal.policies.cost.cost_model import CostModel
from shoal.policies.forecast import HORIZON_SECONDS, LASTS_SECONDS, Class, Forecast, Pace, served
from shoal.policies.values.layouts import Layout
from shoal.policies.values.partition import Partition, singles
from shoal.policies.values.snapshot import LayoutState, Snapshot, Target
from tests.policies.snapshots import request
from tests.policies.test_slo import DP, MODEL, TP, node
from tests.units import tp, tp_units

PAIRS = tp_units(8, 2)
MIXED: Partition = (tp(0, 1, 2, 3), tp(4, 5), tp(6, 7))
TARGET = Target(0, 1.0, 0.03)


def broken(seen: Snapshot, candidate: Partition | None = None) -> float:
    return Forecast(seen, MODEL).broken(candidate or seen.partition)


def test_never_more_breaks_than_there_is_and_than_surges_count_for() -> None:
    hopeless = Target(0, 1e-6, 1e-6)
    seen = node(PAIRS, {0: 2}, hopeless, rate=3.0)
    forecast = Forecast(seen, MODEL)
    assert forecast.affected == 16 + 3.0 * HORIZON_SECONDS
    assert forecast.broken(PAIRS) >= forecast.affected
    assert broken(node(PAIRS, {0: 2}, Target(0, 1e6, 1e6), rate=3.0)) == pytest.approx(0.0)


@pytest.mark.parametrize("partition", [DP, PAIRS, TP])
def test_more_load_breaks_more(partition: Partition) -> None:
    found = [broken(node(partition, {0: 2}, TARGET, rate=rate)) for rate in (1.0, 10.0, 40.0)]
    assert found == sorted(found)
    assert found[-1] > found[0]


def test_a_tighter_promise_is_broken_more_often() -> None:
    assert broken(node(DP, {0: 2}, Target(0, 1.0, 0.02))) > broken(node(DP, {0: 2}, TARGET))
    assert broken(node(DP, {0: 2}, Target(0, 0.1, 0.03))) > broken(node(DP, {0: 2}, TARGET))


def test_what_is_moved_is_computed_again() -> None:
    """The same partition, reached from another one, breaks more: the more, the more there is."""
    promise = Target(0, 1.0, 0.02)
    here = broken(node(PAIRS, {0: 4}, promise, rate=8.0))
    moved = broken(node(DP, {0: 4}, promise, rate=8.0), PAIRS)
    assert moved > here
    longer = node(DP, {0: 4}, promise, rate=8.0)
    units = tuple(replace(unit, context_tokens=4 * unit.context_tokens) for unit in longer.units)
    # The prompts that come are as long as before: only what is moved is longer.
    longer = replace(longer, units=units)
    assert broken(longer, PAIRS) > moved


def test_units_that_stay_move_nothing() -> None:
    seen = node(MIXED, {0: 4}, TARGET, rate=4.0)
    halves: Partition = (tp(0, 1, 2, 3), tp(4, 5, 6, 7))
    wide = Forecast(seen, MODEL)
    queued = [sum(share.queued for share in wide._shares(c)) for c in (MIXED, halves, TP)]
    assert queued == sorted(queued)
    assert queued[0] == 0.0


def test_what_waits_is_seen_beyond_the_head_of_the_pool() -> None:
    seen = replace(node(DP, {0: 1}, TARGET), waiting=501, waiting_tokens=501 * 500)
    seen = replace(seen, pool=(request("first"),))
    assert Forecast(seen, MODEL).affected > 501
    assert broken(seen) > broken(node(DP, {0: 1}, TARGET)) + 100


def test_longer_outputs_are_a_higher_load() -> None:
    seen = node(DP, {0: 2}, TARGET, rate=12.0)
    assert broken(replace(seen, output_tokens=800.0)) > broken(seen)


def test_the_most_urgent_class_has_the_widest_units_to_itself() -> None:
    first, rest = Class(TARGET, 1, 0), Class(TARGET, 9, 0)
    assert list(served(MIXED, [first, rest])) == [
        ([tp(0, 1, 2, 3)], [first]),
        ([tp(4, 5), tp(6, 7)], [rest]),
    ]
    assert list(served(MIXED, [rest])) == [(MIXED, [rest])]
    assert list(served(singles(4), [first, rest])) == [(singles(4), [first, rest])]


def test_prompts_that_run_in_sp_break_fewer_promises() -> None:
    """SP counts above the threshold only: below it, a step of the forecast is one in TP."""
    model = replace(MODEL, max_sp=8)
    seen = replace(node(TP, {0: 4}, Target(0, 0.2, 0.02), rate=12.0), cost_model=model)

    def breaks(above: int) -> float:
        return Forecast(replace(seen, sp_above=((Layout(tp=8), above),)), model).broken(TP)

    in_tp = Forecast(seen, model).broken(TP)
    assert breaks(512) < in_tp
    assert breaks(10**6) == in_tp


def waiting_for_host(layer_seconds: float) -> CostModel:
    hardware = replace(MODEL.hardware, sp_layer_host_seconds=layer_seconds)
    return replace(MODEL, hardware=hardware, max_sp=8)


def test_prompts_that_come_together_share_what_a_step_in_sp_takes_of_the_host() -> None:
    """One that comes alone has all of it to its first token, but does not fill a unit with it."""
    seen = replace(
        node(TP, {0: 0}, rate=1.0), prompt_tokens=1000.0, sp_above=((Layout(tp=8), 512),)
    )

    def pace(layer_seconds: float, seen: Snapshot = seen) -> Pace:
        return Forecast(seen, waiting_for_host(layer_seconds))._paces[Layout(tp=8)]

    free, slow = pace(0.0), pace(1e-3)
    assert slow.prompt > 2 * free.prompt
    assert free.batched <= slow.batched < slow.prompt / 2
    long = replace(seen, prompt_tokens=20_000.0)
    assert pace(1e-3, long).batched == pace(1e-3, long).prompt, "one is a full step"


@pytest.mark.parametrize("layer_seconds", [0.0, 1e-3])
def test_prompts_that_run_in_tp_share_nothing(layer_seconds: float) -> None:
    forecast = Forecast(node(TP, {0: 0}), waiting_for_host(layer_seconds))
    assert all(pace.batched == pace.prompt for pace in forecast._paces.values())


def test_a_group_in_sp_is_full_when_its_steps_are_and_not_when_each_has_a_prompt() -> None:
    """Thirty prompts a second that take 80 ms of the host each, were they alone: a step of all."""
    seen = replace(node(TP, {0: 0}, rate=30.0), output_tokens=10.0, sp_above=((Layout(tp=8), 512),))
    each = Forecast(seen, waiting_for_host(1e-3)).seconds(TP) / (30.0 * LASTS_SECONDS)
    assert 10 * 0.08 < each < 20 * 0.08


@pytest.mark.parametrize(
    ("rate", "left"),
    [
        (1.0, 0.9),  # a prompt in one of ten seconds
        (9.0, 0.1),
        (20.0, 0.01 / 0.11),  # every step has at least one
        (36.0, 0.01 / 0.11),
        (39.6, 0.01),  # every step is nearly full
        (50.0, -0.25),
    ],
)
def test_what_prompts_leave_of_the_time_of_a_unit(rate: float, left: float) -> None:
    """A prompt takes 0.1 s alone and 0.025 in a full step; a step without one takes 10 ms."""
    assert Pace(0.01, 0.0, 0.1, 0.025).room(0.01, rate) == pytest.approx(left)
    assert Pace(0.01, 0.0, 0.1, 0.1).room(0.01, rate) == pytest.approx(1 - 0.1 * rate)


# --- how long requests take ---


def seconds(seen: Snapshot, candidate: Partition | None = None) -> float:
    return Forecast(seen, MODEL).seconds(candidate or seen.partition)


@pytest.mark.parametrize("partition", [DP, PAIRS, TP])
def test_requests_take_longer_the_more_come(partition: Partition) -> None:
    """In all and, as they share steps, each of them."""
    rates = (0.5, 2.0, 8.0, 32.0)
    found = [seconds(node(partition, {0: 0}, rate=rate)) for rate in rates]
    each = [total / rate for total, rate in zip(found, rates, strict=True)]
    assert each == sorted(each)
    assert each[0] < each[-1]


def test_a_lone_request_is_fastest_in_the_widest_group_and_a_crowd_is_not() -> None:
    assert seconds(node(TP, {0: 0}, rate=0.0)) < seconds(node(PAIRS, {0: 0}, rate=0.0))
    assert seconds(node(PAIRS, {0: 0}, rate=0.0)) < seconds(node(DP, {0: 0}, rate=0.0))
    assert seconds(node(TP, {0: 0}, rate=40.0)) > seconds(node(DP, {0: 0}, rate=40.0))


def test_a_move_costs_what_it_computes_again() -> None:
    seen = node(DP, {0: 4}, rate=4.0)
    moved, here = seconds(seen, PAIRS), seconds(node(PAIRS, {0: 4}, rate=4.0))
    assert moved > here
    units = tuple(replace(unit, context_tokens=8 * unit.context_tokens) for unit in seen.units)
    assert seconds(replace(seen, units=units), PAIRS) > moved


def test_what_finds_no_seat_waits() -> None:
    seen = node(TP, {0: 0}, rate=4.0)
    few, many = (
        tuple(LayoutState(Layout(tp=d), n, 10**6, 16, 10**5) for d in (1, 2, 4, 8)) for n in (4, 99)
    )
    assert seconds(replace(seen, layouts=few)) > 1.2 * seconds(replace(seen, layouts=many))
    # The KV of one request at a time, whatever the slots.
    narrow = tuple(replace(layout, total_blocks=70) for layout in many)
    assert seconds(replace(seen, layouts=narrow)) > 1.2 * seconds(replace(seen, layouts=many))


def test_a_class_without_requests_takes_no_time_of_its_units() -> None:
    urgent, rest = Target(-1, 1.0, 0.03), TARGET
    assert seconds(node(MIXED, {0: 4}, urgent, rest, rate=1.0)) > 0
