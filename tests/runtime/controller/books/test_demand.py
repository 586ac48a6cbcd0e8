"""How long requests are, at which rate they come, how soon who was refused is to try again."""

import random

import pytest

from shoal.policies.values.snapshot import (
    ALIKE_KEPT,
    OUTPUT_TOKENS,
    OUTPUTS_KEPT,
    SMOOTHING_SECONDS,
)
from shoal.runtime.controller.books.demand import (
    DRAIN_SECONDS,
    RATE_SECONDS,
    Demand,
    Drain,
    Lengths,
)
from shoal.runtime.protocol.messages import Work
from tests.policies.snapshots import request


def drained(rate: float, seconds: float, *, tick: float = 0.5) -> Drain:
    """Return the drain of a pool that was never empty while so many requests a second left it."""
    drain = Drain(0.0)
    drain.see(0.0, started=0, waits=True)
    left = 0
    for k in range(1, round(seconds / tick) + 1):
        now = k * tick
        drain.see(now, started=int(now * rate) - left, waits=True)
        left = int(now * rate)
    return drain


@pytest.mark.parametrize("seconds", [5.0, 20.0, 500.0])
@pytest.mark.parametrize("rate", [2.0, 10.0])
def test_it_is_what_waits_over_the_rate_at_which_it_leaves(rate: float, seconds: float) -> None:
    assert drained(rate, seconds).retry_after(100) == pytest.approx(100 / rate, rel=0.1, abs=1)


def test_it_follows_a_change_of_the_rate() -> None:
    drain = drained(10.0, 100.0)
    assert drain.retry_after(200) == 20
    for k in range(1, round(4 * DRAIN_SECONDS) + 1):
        drain.see(100.0 + k, started=5, waits=True)
    assert drain.retry_after(200) == pytest.approx(40, abs=2)


def test_it_is_bounded() -> None:
    drain = drained(10.0, 60.0)
    assert (drain.retry_after(0), drain.retry_after(1), drain.retry_after(10**6)) == (1, 1, 60)


def test_a_stall_makes_it_longer() -> None:
    drain = drained(10.0, 60.0)
    before = drain.retry_after(50)
    drain.see(90.0, started=0, waits=True)
    assert drain.retry_after(50) > 2 * before


def test_while_nothing_has_left_one_is_assumed_to_be_about_to() -> None:
    drain = Drain(0.0)
    drain.see(0.0, started=0, waits=True)
    assert drain.retry_after(100) == 1
    drain.see(0.1, started=0, waits=True)
    assert drain.retry_after(100) == 10
    drain.see(20.0, started=0, waits=True)
    assert drain.retry_after(100) == 60


def test_time_and_starts_without_a_queue_do_not_count() -> None:
    drain = drained(10.0, 60.0)
    drain.see(60.0, started=0, waits=False)
    before = drain.retry_after(200)
    drain.see(1000.0, started=5000, waits=False)
    drain.see(1001.0, started=5000, waits=True)
    assert drain.retry_after(200) == before


# --- how long requests are ---


def test_lengths_are_those_of_what_starts_and_of_what_ends() -> None:
    lengths = Lengths()
    for _ in range(3000):
        lengths.see(Work(prefill_tokens=700, decodes=90), started=1, ended=1)
    assert lengths.prompt == pytest.approx(700, rel=0.01)
    assert lengths.output == pytest.approx(90, rel=0.01)


def test_accepted_drafts_are_tokens_of_outputs() -> None:
    lengths = Lengths()
    for _ in range(3000):
        work = Work(prefill_tokens=700, decodes=30, drafts=120, accepted=60)
        lengths.see(work, started=1, ended=1)
    assert lengths.output == pytest.approx(90, rel=0.01)


def test_prompts_are_no_longer_for_outputs_that_have_not_ended() -> None:
    """A burst: all its prompts are computed before the first of its outputs ends."""
    lengths = Lengths()
    before = lengths.prompt
    for _ in range(200):
        lengths.see(Work(prefill_tokens=round(before), decodes=10), started=1, ended=0)
    assert lengths.prompt == pytest.approx(before, rel=0.01)
    assert lengths.output > OUTPUT_TOKENS, "that of outputs is safely too high"


def test_what_is_computed_again_starts_again() -> None:
    lengths = Lengths()
    for _ in range(3000):
        lengths.see(Work(prefill_tokens=2 * 700, decodes=90), started=2, ended=1)
    assert lengths.prompt == pytest.approx(700, rel=0.01)
    assert lengths.output == pytest.approx(90, rel=0.01)


def test_outputs_are_remembered_by_the_lengths_of_their_prompts() -> None:
    """Those of rare prompts too, when many others have ended since."""
    lengths = Lengths()
    lengths.end([(1024, 7, None), (2047, 5, None)])
    for _ in range(OUTPUTS_KEPT):
        lengths.end([(100, 300, None)])
    assert lengths.by_prompt[11] == (5, 7)
    assert lengths.by_prompt[7] == (300,) * ALIKE_KEPT
    assert not any(lengths.by_prompt[k] for k in (0, 8, 10))
    assert lengths.outputs == (300,) * OUTPUTS_KEPT


def test_it_is_known_whether_outputs_come_to_their_limits() -> None:
    lengths = Lengths()
    assert lengths.limit_share == 0.5, "nobody knows yet"
    for _ in range(40):
        lengths.end([(100, 64, 64), (100, 999, None)])
    assert lengths.limit_share > 0.9
    for _ in range(2000):
        lengths.end([(100, 63, 64)])
    assert lengths.limit_share < 0.01


# --- the rate at which requests come ---


def poisson(demand: Demand, rate: float, start: float, end: float, seed: int) -> list[float]:
    """Let requests come at random, and return what the rate was taken for, twice a second."""
    chance, seen, at = random.Random(seed), [], start
    arrivals = []
    while (at := at + chance.expovariate(rate)) < end:
        arrivals.append(at)
    for half in range(round(2 * start) + 1, round(2 * end) + 1):
        while arrivals and arrivals[0] <= half / 2:
            demand.arrive(arrivals.pop(0), request(prompt=100))
        seen.append(demand.arrival_rate(half / 2))
    return seen


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_steady_arrivals_have_a_steadier_rate_than_their_latest_seconds(seed: int) -> None:
    demand = Demand(0.0)
    seen = poisson(demand, 5.0, 0.0, 400.0, seed)[40:]
    mean = sum(seen) / len(seen)
    deviation = (sum((rate - mean) ** 2 for rate in seen) / len(seen)) ** 0.5
    assert mean == pytest.approx(5.0, rel=0.1)
    assert deviation < 0.7 * (5.0 / 2 / SMOOTHING_SECONDS) ** 0.5


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_burst_is_a_rate_at_once_and_its_end_too(seed: int) -> None:
    demand = Demand(0.0)
    poisson(demand, 2.0, 0.0, 60.0, seed)
    burst = poisson(demand, 40.0, 60.0, 80.0, seed)
    assert burst[3] > 20.0, "two seconds after it began"
    after = poisson(demand, 2.0, 80.0, 100.0, seed)
    assert after[15] < 10.0, "eight after it ended"


@pytest.mark.parametrize("silence", [0.5, 1.0, 3.0, 7.0])
def test_one_request_after_a_burst_is_no_burst(silence: float) -> None:
    """A silence is forgotten no faster than it came."""
    demand = Demand(0.0)
    for k in range(30):
        demand.arrive(100.0 + k / 15, request(prompt=100))
    silent = demand.arrival_rate(102.0 + silence)
    demand.arrive(102.0 + silence, request(prompt=100))
    assert demand.arrival_rate(102.0 + silence) < silent + 1.0


def test_the_first_seconds_are_no_average_of_more() -> None:
    demand = Demand(100.0)
    seen = poisson(demand, 10.0, 100.0, 100.0 + RATE_SECONDS[0] / 2, 0)
    assert seen[-1] == pytest.approx(10.0, rel=0.35)


# --- the rates of the past ---


def test_the_longer_the_average_the_later_it_follows() -> None:
    demand = Demand(0.0)
    for k in range(300):
        demand.arrive(float(k), request(prompt=10))
    # Ten a second from now on, for five seconds.
    for k in range(50):
        demand.arrive(300.0 + k / 10, request(prompt=10))
    now, recent, usual = (
        rate(305.0) for rate in (demand.arrival_rate, demand.recent_rate, demand.usual_rate)
    )
    assert now > 5.5
    assert 3.0 < recent < 5.5
    assert 1.0 < usual < 2.5


def test_a_node_that_just_started_knows_its_rates_at_once() -> None:
    demand = Demand(0.0)
    for k in range(40):
        demand.arrive(k / 4, request(prompt=10))
    assert demand.recent_rate(10.0) == pytest.approx(4.0, rel=0.1)
    assert demand.usual_rate(10.0) == pytest.approx(4.0, rel=0.1)
