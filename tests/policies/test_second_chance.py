"""The benefit of the doubt for layouts that the node has not had for a while."""

from dataclasses import replace

import pytest

from shoal.policies.second_chance import (
    BACK_SECONDS,
    LEAST_SECONDS,
    REQUEST_SECONDS,
    VAIN,
    VAIN_SECONDS,
    Chances,
)
from shoal.policies.terms import TermsOf, terms_of
from shoal.policies.values.batch import Batch, Mode, StepKind
from shoal.policies.values.layouts import Layout, layouts_up_to
from tests.policies.nodes import DP, node
from tests.policies.snapshots import MODEL

ALONE, EIGHT = Layout(), Layout(tp=8)
EVERY = layouts_up_to(8)
STEPS = [Batch(count, 500 * count) for count in (1, 8, 64)]


def measured(**factors: float) -> TermsOf:
    """Return what units can do whose decodes take so many times as long as expected."""
    model = MODEL
    for name, factor in factors.items():
        layout = next(one for one in EVERY if one.name == name)
        taken = [(batch, factor * MODEL.roofline_seconds(layout, batch)) for batch in STEPS]
        model = model.fit(layout, Mode.TP, StepKind.DECODE, taken)
    return terms_of(replace(node(DP), cost_model=model), model, EVERY)


def after(seconds: float, terms: TermsOf, requests: float = 1, patience: float = 1.0) -> float:
    """Return how long the group's step seems to take, beside what it was expected to take."""
    chances = Chances(patience=patience).at(0.0, [ALONE, EIGHT], EVERY).at(seconds, [ALONE], EVERY)
    chances = replace(chances, patience=patience)
    seen = chances.terms(terms, ALONE, seconds, requests)[EIGHT].decode.step(1, 500, 500, 1)
    return seen / MODEL.step_seconds(EIGHT, Batch(1, 500))


def test_a_slow_group_is_forgiven_with_time() -> None:
    slow = measured(dp=1.0, tp8=2.0)
    course = [after(seconds, slow) for seconds in (0.0, 5.0, LEAST_SECONDS, 10 * LEAST_SECONDS)]
    assert course == sorted(course, reverse=True)
    assert course[0] == pytest.approx(2.0, rel=0.01)
    assert course[2] == pytest.approx(1.37, rel=0.02)
    assert course[3] == pytest.approx(1.0, rel=0.01)


def test_a_group_that_was_fast_stays_so() -> None:
    assert after(1000.0, measured(dp=1.0, tp8=0.5)) == pytest.approx(0.5, rel=0.01)


def test_what_slows_the_present_layout_slows_others_too() -> None:
    slow = measured(dp=1.5, tp8=2.5)
    assert after(1000.0, slow) == pytest.approx(after(0.0, measured(dp=1.5)), rel=0.01)


def test_the_present_layout_is_as_it_was_measured() -> None:
    slow = measured(dp=2.0, tp8=1.0)
    chances = Chances().at(0.0, [ALONE], EVERY)
    assert chances.terms(slow, ALONE, 1000.0, 1)[ALONE] == slow[ALONE]


def test_where_many_requests_are_it_takes_longer() -> None:
    slow = measured(dp=1.0, tp8=2.0)
    many = 4 * LEAST_SECONDS / REQUEST_SECONDS
    assert after(4.0, slow) == pytest.approx(after(16.0, slow, requests=many))


def test_after_attempts_in_vain_it_takes_longer_until_that_is_forgotten() -> None:
    slow = measured(dp=1.0, tp8=2.0)
    assert after(4.0, slow) == pytest.approx(after(8.0, slow, patience=2.0))
    vain = Chances().at(0.0, [ALONE], EVERY).after_switch(BACK_SECONDS / 2, back=True)
    assert vain.patience == VAIN
    assert vain.at(10 * VAIN_SECONDS, [ALONE], EVERY).patience == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(("since", "back"), [(BACK_SECONDS / 2, False), (2 * BACK_SECONDS, True)])
def test_other_switches_are_not_in_vain(since: float, back: bool) -> None:
    assert Chances().after_switch(since, back=back).patience == 1.0
