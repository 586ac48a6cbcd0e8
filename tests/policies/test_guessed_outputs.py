"""How long outputs are expected to be, by the prompts."""

import random
import statistics
from collections.abc import Sequence

import pytest

from shoal.policies.guessed_outputs import LEAST_OUTPUTS, Outputs
from shoal.policies.values.snapshot import ALIKE_KEPT, OUTPUTS_KEPT

CHAT, DOCUMENT = 500, 3000
"""Tokens of the prompts of two tenants."""


def ended(chats: int = 0, documents: int = 0) -> Outputs:
    """Return so many long answers to short prompts that have ended, and the reverse."""
    answers = tuple(sorted(200 + k % 60 for k in range(chats)))
    summaries = tuple(range(20, 20 + documents))
    by_prompt = [()] * 13
    by_prompt[CHAT.bit_length()], by_prompt[DOCUMENT.bit_length()] = answers, summaries
    return Outputs(100.0, (*summaries, *answers), tuple(by_prompt))


def drawn(outputs: Outputs, prompt: int) -> list[int]:
    return [outputs.drawn(serial, prompt) for serial in range(100)]


def test_outputs_are_drawn_from_those_of_prompts_of_about_the_same_length() -> None:
    both = ended(60, 60)
    assert min(drawn(both, CHAT)) >= 200 > max(drawn(both, DOCUMENT))
    assert set(drawn(both, CHAT)) > set(range(205, 255)), "and evenly"


def test_of_a_length_that_is_new_nothing_is_known() -> None:
    both = ended(60, 60)
    assert drawn(both, 10**6) == drawn(both._replace(by_prompt=()), CHAT)
    assert sum(output < 200 for output in drawn(both, 10**6)) == pytest.approx(50, abs=2)


@pytest.mark.parametrize("known", [0, 1, 4, 12, LEAST_OUTPUTS])
def test_few_of_a_length_count_as_far_as_they_are_known(known: int) -> None:
    """The others count for those that are missing."""
    short = sum(output < 200 for output in drawn(ended(1000, known), DOCUMENT))
    assert short == pytest.approx(100 * known / LEAST_OUTPUTS, abs=2)


def test_a_difference_that_may_be_chance_says_nothing() -> None:
    """Long prompts of one mix of answers happen to have longer ones."""
    every, some = tuple(range(100)), tuple(range(20, 100, 4))
    seen = ended()._replace(latest=every, by_prompt=((),) * 9 + (some,))
    assert drawn(seen, CHAT) == drawn(seen._replace(by_prompt=()), CHAT)
    longer = tuple(tokens + 60 for tokens in some)
    beyond = drawn(seen._replace(by_prompt=((),) * 9 + (longer,)), CHAT)
    assert min(beyond) == longer[0]


def test_before_any_output_has_ended_they_end_at_random_times() -> None:
    guesses = drawn(ended(), CHAT)
    assert sum(guesses) / len(guesses) == pytest.approx(100, rel=0.05)


def test_an_output_that_is_longer_than_was_guessed_is_like_longer_ones_of_its_length() -> None:
    both = ended(60, 60)
    longer = [both.longer(serial, DOCUMENT, 50) for serial in range(20)]
    assert all(50 < tokens < 80 for tokens in longer)
    assert both.longer(1, DOCUMENT, 90) == 180, "none of them was as long"
    assert ended(60, 3).longer(1, DOCUMENT, 50) >= 200, "of three nobody knows that"


# --- a node that fills up ---


def filling_up(count: int, seed: int = 1) -> tuple[Outputs, list[tuple[int, int]], list[int]]:
    """Return what has ended of requests that began at random, what runs, and all lengths."""
    rng, done, running = random.Random(seed), list[int](), list[tuple[int, int]]()
    lengths = [max(1, round(rng.expovariate(1 / 300))) for _ in range(count)]
    for length in lengths:
        since = rng.randrange(1, 400)
        if length <= since:
            done.append(length)
        else:
            running.append((CHAT, since))
    seen = ended()._replace(mean=1.0, latest=tuple(sorted(done)))
    return seen, running, lengths


def quarters(lengths: Sequence[int]) -> list[float]:
    return statistics.quantiles(lengths, n=4)[:2]


def test_what_has_ended_is_short_while_a_node_fills_up() -> None:
    seen, running, lengths = filling_up(200)
    assert LEAST_OUTPUTS < len(seen.latest) < OUTPUTS_KEPT
    guesses = quarters(seen.with_running(running).latest)
    assert guesses == pytest.approx(quarters(lengths), rel=0.15)
    assert quarters(seen.latest)[1] < quarters(lengths)[1] / 1.5, "the control"


def test_prompts_of_one_length_have_running_ones_of_their_own() -> None:
    """Only chats run, so only their answers are longer than those that have ended."""
    both = ended(60, 60)
    some = both.with_running([(CHAT, 240)] * 60)
    of_chats, of_documents = CHAT.bit_length(), DOCUMENT.bit_length()
    assert some.by_prompt[of_documents] == both.by_prompt[of_documents]
    before = statistics.mean(both.by_prompt[of_chats])
    assert statistics.mean(some.by_prompt[of_chats]) > before + 10


def test_beyond_the_longest_that_has_ended_outputs_end_at_random_times() -> None:
    seen = ended()._replace(latest=(10,) * LEAST_OUTPUTS)
    longer = seen.with_running([(CHAT, 100)] * LEAST_OUTPUTS).latest
    assert longer[: LEAST_OUTPUTS // 2] == (10,) * (LEAST_OUTPUTS // 2)
    assert longer[LEAST_OUTPUTS // 2] > 100
    assert sorted(set(longer[LEAST_OUTPUTS // 2 :])) == list(longer[LEAST_OUTPUTS // 2 :])


def test_of_few_outputs_the_mean_counts_what_runs() -> None:
    seen = ended()._replace(latest=(20, 30), mean=25.0)
    assert seen.with_running([(CHAT, 400), (CHAT, 450)]).mean == (20 + 30 + 850) / 3
    assert seen.with_running([]) == seen


def test_where_outputs_were_forgotten_the_others_are_the_usual_ones() -> None:
    """Then the ones that run are more than came since the first of these ended."""
    seen = ended()._replace(
        latest=tuple(range(OUTPUTS_KEPT)),
        by_prompt=((),) * 9 + (tuple(range(ALIKE_KEPT)),),
    )
    assert seen.with_running([(CHAT, 300)] * 500) == seen


@pytest.mark.parametrize(("share", "least", "most"), [(1.0, 100, 100), (0.5, 45, 60), (0.0, 0, 0)])
def test_as_many_outputs_are_as_long_as_they_may_be_as_lately(
    share: float, least: int, most: int
) -> None:
    known = ended()._replace(limit_share=share)
    guesses = [known.drawn(serial, CHAT, 10**6) for serial in range(100)]
    assert least <= guesses.count(10**6) <= most
    longer = [known.longer(serial, CHAT, 50, 10**6) for serial in range(100)]
    assert least <= longer.count(10**6) <= most


def test_no_output_is_longer_than_it_may_be() -> None:
    assert {ended().drawn(serial, CHAT, 2) for serial in range(100)} == {1, 2}
    assert max(ended().longer(serial, CHAT, 50, 51) for serial in range(100)) == 51
