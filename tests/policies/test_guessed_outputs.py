"""How long outputs are expected to be, by the prompts."""

from dataclasses import replace

import pytest

from shoal.policies.guessed_outputs import LEAST_OUTPUTS, drawn_output, longer_output
from shoal.policies.values.layouts import alone
from shoal.policies.values.snapshot import Snapshot
from tests.policies.snapshots import snapshot, unit

CHAT, DOCUMENT = 500, 3000
"""Tokens of the prompts of two tenants."""


def node(chats: int = 0, documents: int = 0) -> Snapshot:
    """Return a node on which so many long answers to short prompts have ended, and the reverse."""
    answers = tuple(sorted(200 + k % 60 for k in range(chats)))
    summaries = tuple(range(20, 20 + documents))
    by_prompt = [()] * 13
    by_prompt[CHAT.bit_length()], by_prompt[DOCUMENT.bit_length()] = answers, summaries
    seen = replace(snapshot(unit(alone(0))), output_tokens=100.0)
    return replace(seen, outputs=(*summaries, *answers), outputs_by_prompt=tuple(by_prompt))


def drawn(seen: Snapshot, prompt: int) -> list[int]:
    return [drawn_output(seen, serial, prompt) for serial in range(100)]


def test_outputs_are_drawn_from_those_of_prompts_of_about_the_same_length() -> None:
    both = node(60, 60)
    assert min(drawn(both, CHAT)) >= 200 > max(drawn(both, DOCUMENT))
    assert set(drawn(both, CHAT)) > set(range(205, 255)), "and evenly"


def test_of_a_length_that_is_new_nothing_is_known() -> None:
    both = node(60, 60)
    assert drawn(both, 10**6) == drawn(replace(both, outputs_by_prompt=()), CHAT)
    assert sum(output < 200 for output in drawn(both, 10**6)) == pytest.approx(50, abs=2)


@pytest.mark.parametrize("known", [0, 1, 4, 12, LEAST_OUTPUTS])
def test_few_of_a_length_count_as_far_as_they_are_known(known: int) -> None:
    """The others count for those that are missing."""
    short = sum(output < 200 for output in drawn(node(1000, known), DOCUMENT))
    assert short == pytest.approx(100 * known / LEAST_OUTPUTS, abs=2)


def test_a_difference_that_may_be_chance_says_nothing() -> None:
    """Long prompts of one mix of answers happen to have longer ones."""
    every, some = tuple(range(100)), tuple(range(20, 100, 4))
    seen = replace(node(), outputs=every, outputs_by_prompt=((),) * 9 + (some,))
    assert drawn(seen, CHAT) == drawn(replace(seen, outputs_by_prompt=()), CHAT)
    longer = tuple(tokens + 60 for tokens in some)
    beyond = drawn(replace(seen, outputs_by_prompt=((),) * 9 + (longer,)), CHAT)
    assert min(beyond) == longer[0]


def test_before_any_output_has_ended_they_end_at_random_times() -> None:
    guesses = drawn(node(), CHAT)
    assert sum(guesses) / len(guesses) == pytest.approx(100, rel=0.05)


def test_an_output_that_is_longer_than_was_guessed_is_like_longer_ones_of_its_length() -> None:
    both = node(60, 60)
    longer = [longer_output(both, serial, DOCUMENT, 50) for serial in range(20)]
    assert all(50 < tokens < 80 for tokens in longer)
    assert longer_output(both, 1, DOCUMENT, 90) == 180, "none of them was as long"
    assert longer_output(node(60, 3), 1, DOCUMENT, 50) >= 200, "of three nobody knows that"
