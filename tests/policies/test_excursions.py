"""What it has cost to leave a layout and to come back to it."""

import pytest

from shoal.policies.excursions import Excursions
from tests.policies.nodes import DP, PAIRS, TP


def test_what_happened_before_a_layout_was_left_says_nothing_of_leaving_it() -> None:
    assert Excursions().cost(PAIRS, 50.0) == 0.0
    assert Excursions().leaving(PAIRS, 50.0).cost(PAIRS, 50.0) == 0.0


def test_excursions_that_cost_more_than_they_bring_add_up() -> None:
    left = Excursions().leaving(PAIRS, 50.0)
    assert left.cost(PAIRS, 70.0) == pytest.approx(20.0)
    again = left.leaving(PAIRS, 70.0)
    assert again.cost(PAIRS, 85.0) == pytest.approx(35.0)


def test_excursions_that_pay_cost_nothing() -> None:
    assert Excursions().leaving(DP, 10.0).cost(DP, -30.0) == 0.0


def test_each_layout_has_its_own() -> None:
    left = Excursions().leaving(PAIRS, 0.0).leaving(TP, 5.0)
    assert left.cost(PAIRS, 20.0) == pytest.approx(20.0)
    assert left.cost(TP, 20.0) == pytest.approx(15.0)
    assert left.cost(DP, 20.0) == 0.0


def test_they_are_forgotten_as_fast_as_regrets() -> None:
    left = Excursions().leaving(PAIRS, 50.0)
    assert left.aged(0.1).cost(PAIRS, 0.1 * 70.0) == pytest.approx(2.0)
