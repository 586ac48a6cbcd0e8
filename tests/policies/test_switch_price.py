"""What a layout must save before ``adaptive`` changes to it."""

import pytest

from shoal.policies.switch_price import SURPLUS_SHARE, Account, fine_of, most_surplus_of, noise_of
from tests.policies.nodes import DP, FOURS, TP


def test_the_noise_grows_with_the_usual_requests() -> None:
    """With many requests it is less than in proportion to their number."""
    assert noise_of(10, 1000) == pytest.approx(2.0)
    assert noise_of(20, 1000) == pytest.approx(4.0)
    assert noise_of(400, 1000) == pytest.approx(20.0)


def test_a_burst_that_is_over_makes_no_noise_beyond_what_is_at_hand() -> None:
    assert noise_of(100, 4) == pytest.approx(2.0)
    assert noise_of(100, 0) == 0.0


def test_the_fine_is_the_distance_to_the_best_layout() -> None:
    regrets = {DP: 30.0, TP: 10.0, FOURS: -5.0}
    assert fine_of(regrets, DP, 1000) == 0.0
    assert fine_of(regrets, TP, 1000) == pytest.approx(20.0)
    assert fine_of(regrets, FOURS, 1000) == pytest.approx(30.0)


def test_the_fine_has_the_loss_of_switches_that_were_all_in_vain() -> None:
    assert fine_of({DP: 30.0, TP: 10.0}, DP, 1000) == pytest.approx(10.0)
    assert fine_of({DP: 30.0, TP: 10.0}, TP, 1000) == pytest.approx(30.0)


def test_the_fine_is_bounded_by_what_is_at_hand() -> None:
    """What switches have cost in vain counts more than that another layout was better."""
    assert fine_of({DP: 1e6, TP: -1.0}, TP, 4) == pytest.approx(2.0)
    assert fine_of({DP: 1e6, TP: 1e5}, TP, 4) == pytest.approx(10.0)
    assert fine_of({DP: 1e6, TP: 1e5}, DP, 4) == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("saved", "fine", "near"), [(1.0, 0.0, True), (0.9, 0.0, False), (2.0, 1.1, False)]
)
def test_what_is_foreseen_pays_at_most_three_quarters(
    saved: float, fine: float, near: bool
) -> None:
    assert Account(saved, 4.0, fine, has_room=True).is_near is near
    assert not Account(saved, 4.0, fine, has_room=False).is_near


def test_what_was_saved_in_a_crowd_that_has_gone_pays_the_price_and_no_more() -> None:
    assert Account(1.0, 4.0, 0.5, has_room=True).unpaid == pytest.approx(3.5)
    assert Account(9.0, 4.0, 0.5, has_room=True).unpaid == 0.0


def test_what_is_saved_beyond_the_price_counts_in_part_while_the_crowd_is_there() -> None:
    assert most_surplus_of(100, 40) == 0.0
    assert most_surplus_of(100, 60) == pytest.approx(30.0)
    assert Account(1.0, 4.0, 0.5, has_room=True, most_surplus=30.0).unpaid == pytest.approx(3.5)
    saved = Account(14.5, 4.0, 0.5, has_room=True, most_surplus=30.0)
    assert saved.unpaid == pytest.approx(-10.0 * SURPLUS_SHARE)
    assert Account(1e6, 4.0, 0.5, has_room=True, most_surplus=1.0).unpaid == pytest.approx(-1.0)
