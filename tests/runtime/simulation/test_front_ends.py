"""When simulated front ends have sent what engines make."""

import pytest

from shoal.runtime.simulation.front_ends import FrontEnds

TOKEN = 0.1
"""Seconds that a token takes a front end here."""


def test_a_front_end_that_keeps_up_adds_nothing() -> None:
    front_ends = FrontEnds(1, TOKEN)
    assert front_ends.sent(0, 1, now=1.0) == 1.0
    assert front_ends.sent(0, 5, now=2.0, since=1.0) == 2.0
    assert front_ends.sent(0, 5, now=3.0, since=2.0) == 3.0


def test_tokens_wait_for_those_before_them() -> None:
    front_ends = FrontEnds(1, TOKEN)
    assert front_ends.sent(0, 15, now=1.0, since=0.0) == pytest.approx(1.5)
    assert front_ends.sent(1, 1, now=1.2) == pytest.approx(1.6)
    assert front_ends.sent(0, 10, now=2.0, since=1.0) == pytest.approx(2.6)
    assert front_ends.sent(0, 1, now=4.0, since=2.0) == 4.0, "it has caught up"


def test_steps_that_come_as_one_take_as_long_as_one_by_one() -> None:
    together, each = FrontEnds(1, TOKEN), FrontEnds(1, TOKEN)
    last = 0.0
    for step in range(1, 9):
        for request in range(2):
            last = each.sent(request, 1, now=step * 0.15, since=(step - 1) * 0.15)
    for request in range(2):
        at_once = together.sent(request, 8, now=8 * 0.15, since=0.0)
    assert at_once == pytest.approx(last) == pytest.approx(1.6)


def test_requests_are_divided_among_front_ends() -> None:
    front_ends = FrontEnds(2, TOKEN)
    assert front_ends.sent(0, 20, now=1.0, since=0.0) == pytest.approx(2.0)
    assert front_ends.sent(1, 1, now=1.0, since=0.0) == 1.0
    assert front_ends.sent(2, 1, now=1.0, since=0.0) == pytest.approx(2.1)
