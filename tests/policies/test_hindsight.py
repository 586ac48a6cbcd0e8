"""What candidates would have saved so far, and what is known of lengths."""

from dataclasses import replace

import pytest

from shoal.policies.hindsight import Hindsight, Length, News, Trial, population_of
from shoal.policies.jobs import Decode, Job
from shoal.policies.shadow import Queue, Shadow
from tests.policies.nodes import TP, node
from tests.policies.shadows import GROUP, NOW, SINGLES, TERMS
from tests.policies.snapshots import request, snapshot, unit


def test_after_a_switch_the_node_has_the_requests_that_it_took_along() -> None:
    """The shadow that always had the new layout has ended them, and nobody has saved anything."""
    jobs = [Job(NOW - 1.2, 10, 10, 100, str(k)) for k in range(14)]
    here = Shadow([Queue(GROUP[0].layout, NOW - 1.2)])
    ahead = Shadow([Queue(one.layout, NOW - 1.2) for one in SINGLES])
    for shadow in (here, ahead):
        for job in jobs:
            shadow.put(job, TERMS)
        shadow.advance(NOW, TERMS)
    assert (here.requests, ahead.requests) == (14, 0), "single engines are faster with so many"
    before = Hindsight(NOW, GROUP, here, ((SINGLES, Trial(ahead)),), TERMS)
    now = before.after_switch(SINGLES)
    assert now.current.requests == 14
    assert [queue.layout for queue in now.current.queues] == [one.layout for one in SINGLES]
    assert dict(now.trials) == {GROUP: Trial(here)}
    node = replace(snapshot(*(unit(one, requests=7) for one in SINGLES)), now=NOW)
    told = now.followed(node, News())
    assert told.levelled().savings() == {GROUP: pytest.approx(0.0)}


def test_a_wrong_guess_of_lengths_is_no_saving() -> None:
    """A trial begins with requests that seem long, and would end earlier in single engines."""
    here = Shadow([Queue(GROUP[0].layout, NOW)])
    for k in range(20):
        here.put(Job(NOW, 10, 10, 1000, str(k)), TERMS)
    here.advance(NOW + 0.05, TERMS)
    blank = Trial(here)
    before = Hindsight(NOW + 0.05, GROUP, here, ((SINGLES, blank),), TERMS)
    trial = before.restarted([SINGLES])
    assert trial.savings() == {SINGLES: pytest.approx(0.0)}
    told = News(ended=tuple((str(k), 20) for k in range(20)))
    # The node has one more request, or all that it has not heard of would count as gone.
    node = replace(snapshot(unit(GROUP[0], requests=1)), now=NOW + 0.1)
    known = trial.followed(node, told)
    assert abs(known.savings()[SINGLES]) < 0.2
    assert dict(known.trials)[SINGLES].beginning is None, "nothing in it is a guess any more"
    assert (trial.age(SINGLES), known.age(SINGLES)) == (0.0, pytest.approx(0.05))
    never = replace(
        trial, trials=((SINGLES, replace(dict(trial.trials)[SINGLES], beginning=None)),)
    )
    assert abs(never.followed(node, told).savings()[SINGLES]) > 10


def test_a_trial_is_told_of_its_own_requests_only() -> None:
    here = Shadow([Queue(GROUP[0].layout, NOW)])
    here.put(Job(NOW, 10, 10, 100, "old"), TERMS)
    begun = Hindsight(NOW, GROUP, here, ((SINGLES, Trial(here)),), TERMS).restarted([SINGLES])
    trial = dict(begun.trials)[SINGLES]
    assert trial.told([Length("new", 7, is_known=True)], TERMS) is trial
    longer = trial.told([Length("old", 200, is_known=False)], TERMS)
    assert longer.beginning is not None
    assert longer.beginning.current.final_cost(TERMS) > trial.baseline
    assert longer.told([Length("old", 200, is_known=True)], TERMS).beginning is None


def test_what_no_unit_can_hold_is_in_no_shadow() -> None:
    pool = (request("fits", prompt=100), request("never", prompt=10**7))
    seen = replace(node(TP), pool=pool)
    assert [job.key for job in population_of(seen).waiting] == ["fits"]
    everything = population_of(replace(seen, layouts=())).waiting
    assert [job.key for job in everything] == ["fits", "never"], "nothing is known of units"


def test_no_output_is_expected_to_be_longer_than_the_client_allows() -> None:
    pool = tuple(
        replace(request(f"{k}", prompt=100), output_limit=limit)
        for k, limit in enumerate((3, 30, None) * 10)
    )
    seen = replace(node(TP), pool=pool, output_tokens=200.0, now=NOW)
    jobs = population_of(seen).waiting
    assert max(job.output for job in jobs[::3]) == 3
    assert max(job.output for job in jobs[1::3]) == 30
    assert max(job.output for job in jobs[2::3]) > 200

    one = replace(snapshot(unit(GROUP[0], requests=1)), output_tokens=200.0, now=NOW)
    shadows = Hindsight.of(replace(one, units=()), [SINGLES], TERMS, None)
    shadows = shadows.followed(one, News(arrived=pool[:3]))
    shadows = shadows.followed(replace(one, now=NOW + 1e6), News())
    left = shadows.current.population()
    assert {key: left.guessed[key].decode.output for key in left.guessed} == {"0": 3, "1": 30}
    assert [one.key for one in left.decoding] == ["2"], "it goes on, as far as anybody knows"


def test_outputs_that_still_run_make_others_seem_longer() -> None:
    """Those that have ended are short, because the node has just begun."""
    here = Shadow([Queue(GROUP[0].layout, NOW)])
    for k in range(30):
        here.queues[0].add_decode(Decode(100, NOW - 5.0, 610, 600, str(k)))
    seen = Hindsight(NOW, GROUP, here, (), TERMS)
    node = replace(snapshot(unit(GROUP[0], requests=30)), now=NOW + 0.1, outputs=(10,) * 20)
    arrived = tuple(request(f"new {k}", arrival=NOW) for k in range(40))
    outputs = [job.output for job in seen.followed(node, News(arrived)).latest]
    assert sum(output > 500 for output in outputs) == pytest.approx(24, abs=2), "30 of 50 are long"
