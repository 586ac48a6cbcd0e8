"""Requests that are begun again while steps and copies of their first attempt are under way."""

import pytest

from shoal.runtime.engine.scheduler.scheduled_steps import InFlight
from tests.runtime.engine.prompts import random_prompts
from tests.runtime.engine.scheduler.toy_engines import Make, ToyEngines, undisturbed

(PROMPT,) = random_prompts((30,), seed=3)


def aborted_in_flight(make: Make) -> ToyEngines:
    """Return engines of which the first runs steps of a request that has been aborted."""
    engines = make()
    own = engines.own[0]
    engines.submit(own, "r", PROMPT)
    engines.step(own, 4)
    while own.dispatch():
        pass
    assert own.in_flight
    own.abort(["r"])
    return engines


def begin_again(engines: ToyEngines, keeps: int) -> None:
    """Begin the aborted request anew, with some of its tokens."""
    kept = engines.tokens["r"][:keeps]
    engines.tokens["r"] = list(kept)
    own = engines.own[0]
    own.add(engines.frames["r"], kept)
    while own.in_flight:
        engines._collect(own)


def assert_ends_as_if_undisturbed(engines: ToyEngines, make: Make, keeps: int) -> None:
    begin_again(engines, keeps)
    engines.finish(engines.own[0])
    assert engines.tokens["r"] == undisturbed(make, PROMPT)
    assert engines.audit() == []


@pytest.mark.parametrize("keeps", [0, 2])
def test_a_new_attempt_gets_no_token_of_a_step_of_the_old_one(make: Make, keeps: int) -> None:
    assert_ends_as_if_undisturbed(aborted_in_flight(make), make, keeps)


def test_such_a_token_would_be_noticed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control of the test above."""
    monkeypatch.setattr(InFlight, "forget_gone", lambda _: None)
    engines = aborted_in_flight(make)
    # Either vLLM's scheduler fails, or the tokens are others.
    with pytest.raises((AssertionError, IndexError)):
        assert_ends_as_if_undisturbed(engines, make, keeps=0)
