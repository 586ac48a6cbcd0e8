"""How soon a caller that was refused is told to try again: by how fast the pool empties."""

import pytest

from runtime.controller.demand import DRAIN_SECONDS, Drain


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
