import pytest

from shoal.runtime.clock import ManualClock
from shoal.server.gate.keys import ApiKey, digest_of
from shoal.server.gate.quotas import Allowance, OverLimit, Quota, Quotas


def key(**limits: int) -> ApiKey:
    return ApiKey(digest_of("k"), "caller", **limits)


def test_an_allowance_holds_a_minutes_worth_and_fills_evenly() -> None:
    allowance = Allowance()
    for _ in range(6):
        assert allowance.wait(6, 1000.0) == 0
        allowance.spend(1, 6, 1000.0)
    assert allowance.wait(6, 1000.0) == pytest.approx(10)
    assert allowance.wait(6, 1009.0) == pytest.approx(1)
    assert allowance.wait(6, 1010.0) == 0
    # A long rest saves no more than a minute's worth.
    for _ in range(6):
        allowance.spend(1, 6, 9000.0)
    assert allowance.wait(6, 9000.0) == pytest.approx(10)


def test_an_overdrawn_allowance_is_closed_until_it_is_paid_back() -> None:
    allowance = Allowance()
    allowance.spend(300, 100, 0.0)  # three minutes' worth
    assert allowance.wait(100, 0.0) == pytest.approx(120.6)
    assert allowance.wait(100, 121.0) == 0


def test_a_share_of_less_than_one_a_minute_fills_as_fast_as_it_says() -> None:
    clock = ManualClock()
    quota = Quota(shares=4, clock=clock)
    limited = key(requests_per_minute=1)
    assert quota.over(limited) is None
    for _ in range(3):
        assert quota.over(limited) == OverLimit("caller may use 1 requests a minute, and has", 240)
        clock.advance(240)
        assert quota.over(limited) is None


def test_no_limit_is_never_reached() -> None:
    quota = Quota()
    assert all(quota.over(key()) is None for _ in range(1000))


def test_requests_a_minute() -> None:
    clock = ManualClock()
    quota = Quota(clock=clock)
    limited = key(requests_per_minute=2)
    assert quota.over(limited) is None
    assert quota.over(limited) is None
    assert quota.over(limited) == OverLimit("caller may use 2 requests a minute, and has", 30)
    clock.advance(30)
    assert quota.over(limited) is None


def test_tokens_are_spent_as_they_come_and_what_runs_goes_on() -> None:
    clock = ManualClock()
    quota = Quota(clock=clock)
    limited = key(tokens_per_minute=60)
    assert quota.over(limited) is None
    quota.spend_tokens(limited, 59)
    assert quota.over(limited) is None
    quota.spend_tokens(limited, 61)
    assert quota.over(limited) == OverLimit("caller may use 60 tokens a minute, and has", 61)


def test_what_is_in_progress_is_bounded() -> None:
    quota = Quota()
    limited = key(max_concurrent=2)
    with quota.running():
        assert quota.over(limited) is None
        with quota.running():
            said = "caller has 2 requests in progress, as many as it may"
            assert quota.over(limited) == OverLimit(said, 1)
        assert quota.over(limited) is None


def test_front_ends_share_a_limit() -> None:
    quota = Quota(shares=2)
    limited = key(requests_per_minute=4)
    assert [quota.over(limited) is None for _ in range(3)] == [True, True, False]
    with quota.running():
        assert Quota(shares=4).over(key(max_concurrent=2)) is None
        assert quota.over(key(max_concurrent=2)) is not None


def test_keys_of_one_holder_share_and_others_do_not() -> None:
    quotas = Quotas(clock=ManualClock())
    old, new = (ApiKey(digest_of(text), "team", requests_per_minute=1) for text in ("old", "new"))
    other = ApiKey(digest_of("x"), "other", requests_per_minute=1)
    assert quotas.caller(old).quota.over(old) is None
    assert quotas.caller(new).quota.over(new) is not None
    assert quotas.caller(other).quota.over(other) is None
