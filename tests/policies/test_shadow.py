"""Shadows: what they make of lengths that are guessed first and known later."""

from dataclasses import replace
from math import inf

import pytest

from shoal.policies.guessed_outputs import UNLIMITED
from shoal.policies.jobs import USUAL, Decode, Job, Kind, Promise
from shoal.policies.shadow import Population, Queue, Shadow, shadow_of
from shoal.policies.terms import Terms
from shoal.policies.unit_costs import Prices
from shoal.policies.values.layouts import Layout
from tests.policies.shadows import PACE, STEP

DP = Layout()
TERMS = Terms(PACE, PACE, PACE, inf, 16, 1e6, 8192, 8192, Prices(1e-5, 1e-9), 100.0)
ALL = {DP: TERMS}


def test_a_step_with_prompts_runs_by_sequence_above_its_tokens() -> None:
    terms = TERMS._replace(sp=replace(PACE, weights=3 * STEP), sp_above=512.0)
    seconds = [terms.prompt_step(tokens, 0.0, 0.0, 100) for tokens in (512, 513)]
    assert seconds == [STEP, 3 * STEP]
    drafting = terms._replace(drafts=3.0)
    seconds = [drafting.prompt_step(tokens, 0.0, 0.0, 100) for tokens in (212, 213)]
    assert seconds == [STEP, 3 * STEP], "each decode computes four tokens"


def shadow(*jobs: Job) -> Shadow:
    one = Shadow([Queue(DP, 0.0)])
    for job in jobs:
        one.put(job, ALL)
    return one


def guessed(output: int, key: str = "a") -> Job:
    return Job(0.0, 100, 100, output, key)


@pytest.mark.parametrize("guess", [5, 50, 100, 400])
def test_a_request_takes_as_long_as_its_true_length_whatever_the_guess_was(guess: int) -> None:
    one = shadow(guessed(guess))
    one.advance(0.5, ALL)
    one.expect("a", 100, ALL, known=True)
    assert one.final_cost(ALL) == pytest.approx(100 * STEP, abs=STEP)


@pytest.mark.parametrize("guess", [50, 100, 400])
def test_nor_does_it_matter_that_the_end_is_known_late(guess: int) -> None:
    """A shadow may be faster than the node, which tells the end when it comes there."""
    one = shadow(guessed(guess))
    one.advance(2.0, ALL)
    one.expect("a", 100, ALL, known=True)
    assert one.final_cost(ALL) == pytest.approx(100 * STEP, abs=2 * STEP)
    assert one.requests == 0 or guess < 100


def test_what_waits_gets_its_true_length_too() -> None:
    one = shadow(guessed(400))
    one.expect("a", 10, ALL, known=True)
    assert one.final_cost(ALL) == pytest.approx(10 * STEP)


def test_a_request_that_is_longer_than_the_guess_decodes_again() -> None:
    one = shadow(guessed(10))
    one.advance(1.0, ALL)
    assert one.guesses() == [("a", 100, 10, UNLIMITED)]
    assert one.requests == 0
    one.expect("a", 60, ALL, known=False)
    assert one.requests == 1
    one.advance(1.2, ALL)
    assert one.requests == 1
    one.advance(1.6, ALL)
    assert one.guesses() == [("a", 100, 60, UNLIMITED)]


def test_an_unknown_length_ends_a_request_now() -> None:
    one = shadow(guessed(400), Job(0.0, 100, 100, 20))
    one.advance(0.1, ALL)
    one.expect("a", 0, ALL, known=True)
    assert one.requests == 1
    assert one.queues[0].ended_cost == pytest.approx(0.1, abs=STEP)
    one.expect("of another node", 5, ALL, known=True)
    assert one.requests == 1


def test_an_empty_node_ends_what_nobody_has_told_the_end_of() -> None:
    one = shadow(guessed(5), guessed(400, "b"), Job(0.0, 100, 100, 300))
    one.advance(0.2, ALL)
    one.end_all(ALL)
    assert one.guesses() == []
    assert one.requests == 1, "its length is known, so this shadow is slower than the node"


def test_a_guess_that_has_come_to_the_requests_limit_waits_for_the_node() -> None:
    one = shadow(guessed(10)._replace(limit=30))
    one.advance(1.0, ALL)
    one.expect("a", 30, ALL, known=False)
    one.advance(3.0, ALL)
    assert one.guesses() == []
    assert "a" in one.keys, "the node may still be at it"
    cost = one.final_cost(ALL)
    one.expect("a", 20, ALL, known=True)
    assert one.keys == []
    assert one.final_cost(ALL) < cost


def test_prompts_that_the_node_finds_in_its_cache_are_shorter() -> None:
    one = shadow(guessed(10), guessed(10, "b"))
    one.find_cached("b", 90, ALL)
    assert one.queues[0].queued == 110
    # Every prompt has a token to compute.
    one.find_cached("b", 100, ALL)
    assert one.queues[0].queued == 101
    one.advance(0.05, ALL)
    one.find_cached("a", 50, ALL)
    assert one.queues[0].queued == 0


def test_a_unit_in_a_long_step_is_avoided() -> None:
    two = Shadow([Queue(DP, 3.0), Queue(DP, 0.0)])
    two.put(guessed(10), ALL)
    assert [queue.queued for queue in two.queues] == [0, 100]


def test_guesses_go_along_when_another_shadow_begins_where_this_one_is() -> None:
    one = shadow(guessed(5), guessed(400, "b"))
    one.advance(0.2, ALL)
    other = shadow_of([(DP, False)] * 2, one.population(), 0.2, ALL)
    assert other.guesses() == [("a", 100, 5, UNLIMITED)]
    before = other.final_cost(ALL)
    for key in "ab":
        other.expect(key, 105, ALL, known=True)
    assert other.final_cost(ALL) < before, "b was expected to be longer"
    assert other.final_cost(ALL) == pytest.approx((100 + 85) * STEP, abs=3 * STEP)


def test_what_waits_in_several_units_goes_on_in_the_order_of_arrival() -> None:
    """A group that served the short queue first would seem better than it is."""
    two = Shadow([Queue(DP, 0.0), Queue(DP, 0.0)])
    for queue, arrivals in zip(two.queues, ([0.1, 0.4], [0.2, 0.3]), strict=True):
        for at in arrivals:
            queue.add_prompt(Job(at, 100, 100, 5, f"at {at}"), TERMS)
    (one,) = shadow_of([(DP, False)], two.population(), 0.5, ALL).queues
    assert [job.key for job in one.waiting] == ["at 0.1", "at 0.2", "at 0.3", "at 0.4"]


@pytest.mark.parametrize(("mixed", "steps"), [(8192, 1), (2048, 4), (1000, 9)])
def test_beside_decodes_a_step_computes_as_much_of_prompts_as_the_node_does(
    mixed: int, steps: int
) -> None:
    """A request that decodes gets a token in each of these steps."""
    terms = {DP: TERMS._replace(chunk=8192 + 1, mixed_chunk=mixed)}
    one = shadow(Job(0.0, 10, 10, 1000))
    one.advance(STEP, terms)
    one.put(Job(0.0, 8192, 8192, 1000), terms)
    (queue,) = one.queues
    while queue.waiting:
        one.advance(queue.clock + STEP / 2, terms)
    assert queue.steps == 1 + steps


def test_where_nothing_decodes_it_computes_a_whole_step() -> None:
    terms = {DP: TERMS._replace(mixed_chunk=16)}
    one = shadow(Job(0.0, 8192, 8192, 10))
    one.advance(STEP / 2, terms)
    assert (one.queues[0].steps, one.queues[0].waiting) == (1, [])


@pytest.mark.parametrize("short", ["seats", "tokens"])
def test_requests_for_which_there_is_no_room_wait_for_their_turn(short: str) -> None:
    """A switch may bring more to a unit than it can decode at once."""
    one = Shadow([Queue(DP, 0.0)])
    for _ in range(8):
        one.queues[0].add_decode(Decode(50, 0.0, 150))
    narrow = TERMS._replace(seats=4) if short == "seats" else TERMS._replace(kv_tokens=500)
    wide, late = one.final_cost(ALL), one.final_cost({DP: narrow})
    assert wide == pytest.approx(8 * 50 * STEP)
    assert late == pytest.approx(2 * wide, rel=0.1)
    one.advance(1.0, {DP: narrow})
    assert 1.0 <= one.queues[0].clock < 1.0 + 3 * STEP


def order(*jobs: Job, terms: Terms = TERMS) -> list[str]:
    """Return in which order a shadow will compute prompts that wait behind another one."""
    queue = Queue(DP, 0.0)
    queue.add_prompt(Job(0.0, 8192, 8192, 5, "begun"), terms)
    queue.computed = 1
    for job in jobs:
        queue.add_prompt(job, terms)
    assert queue.waiting[0].key == "begun", "what has begun is computed to its end"
    return [job.key for job in queue.waiting[1:]]


LONG = Job(1.0, 4000, 4000, 5, "long")
"""It takes 40 ms, and lets others pass that come up to 320 ms later."""


@pytest.mark.parametrize(("later", "passes"), [(0.3, True), (0.35, False)])
def test_a_short_prompt_passes_a_long_one_that_came_shortly_before(
    later: float, passes: bool
) -> None:
    short = Job(1.0 + later, 10, 10, 5, "short")
    assert order(LONG, short) == (["short", "long"] if passes else ["long", "short"])
    in_turn = TERMS._replace(short_first=False)
    assert order(LONG, short, terms=in_turn) == ["long", "short"]


def test_what_is_cached_of_a_prompt_makes_it_short() -> None:
    assert order(LONG, Job(1.1, 10, 9000, 5, "cached")) == ["cached", "long"]


def test_what_is_found_in_a_cache_makes_it_short_too() -> None:
    one = shadow(LONG, Job(1.1, 9000, 9000, 5, "cached"))
    one.find_cached("cached", 8990, ALL)
    assert [job.key for job in one.queues[0].waiting] == ["cached", "long"]


def test_prompts_keep_their_turn_in_another_layout() -> None:
    """Even long ones, if they came first; and what has begun goes on before all others."""
    one = shadow(
        Job(0.0, 9000, 9000, 5, "begun"), LONG, Job(1.5, 10, 10, 5, "a"), Job(1.6, 9, 9, 5, "b")
    )
    one.queues[0].computed = 1
    for now in (2.0, 3.0):
        one = shadow_of([(DP, False)], one.population(), now, ALL)
        assert [job.key for job in one.queues[0].waiting] == ["begun", "long", "a", "b"]


# --- urgent requests and promises ---

URGENT = Kind(is_urgent=True)


def test_urgent_prompts_go_first() -> None:
    urgent = Job(9.0, 4000, 4000, 5, "urgent", kind=URGENT)
    assert order(LONG, urgent, Job(0.5, 10, 10, 5, "short")) == ["urgent", "short", "long"]


def test_a_lane_serves_urgent_requests_and_no_others() -> None:
    waiting = [Job(0.0, 100, 100, 5, str(k), kind=URGENT if k == 3 else USUAL) for k in range(6)]
    decoding = [Decode(50, 0.0, 150, kind=kind) for kind in (URGENT, USUAL, USUAL)]
    units = [(DP, True), (DP, False), (DP, False)]
    one = shadow_of(units, Population(decoding, waiting, {}), 0.0, ALL)
    lane, *rest = one.queues
    assert [job.key for job in lane.waiting] == ["3"]
    assert len(lane.running) == len(rest[0].running) == len(rest[1].running) == 1
    assert sorted(len(queue.waiting) for queue in rest) == [2, 3]
    again = one.copy()
    again.put(Job(1.0, 100, 100, 5, "late"), ALL)
    assert len(again.queues[0].waiting) == 1
    free = shadow_of([(DP, False)] * 3, Population(decoding, waiting, {}), 0.0, ALL)
    assert sorted(len(queue.waiting) for queue in free.queues) == [2, 2, 2]


def test_a_broken_promise_counts_once_however_wrong_the_guess_was() -> None:
    """Outputs are taken to be shorter or longer at first; all tokens come too late."""
    kind = Kind(Promise(ttft=5.0, tpot=STEP / 4, worth=100.0))
    true = shadow(Job(0.0, 100, 100, 50, kind=kind)).final_cost(ALL)
    assert true == pytest.approx(100.0 + 50 * STEP, abs=3 * STEP)
    for guess, told_at in ((5, 0.3), (50, 0.3), (400, 0.3), (400, 60 * STEP)):
        one = shadow(Job(0.0, 100, 100, guess, "a", kind=kind))
        one.advance(told_at, ALL)
        one.expect("a", 50, ALL, known=True)
        assert one.final_cost(ALL) == pytest.approx(true, abs=12 * STEP)
