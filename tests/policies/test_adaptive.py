"""The policy ``adaptive``: when it switches and where to, what it remembers, who goes where."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from shoal.policies import adaptive, adaptive_memory
from shoal.policies.adaptive import (
    ADAPTIVE,
    LEAST_SECONDS,
    MANY_REQUESTS,
    WATCH_SECONDS,
    Memory,
)
from shoal.policies.adaptive_memory import GONE_SECONDS
from shoal.policies.excursions import Excursions
from shoal.policies.flying import FLYING
from shoal.policies.foresight import Foresight
from shoal.policies.hindsight import News
from shoal.policies.surges import BUSY_RATE, Surges
from shoal.policies.values.layouts import Layout, Unit, alone
from shoal.policies.values.partition import Partition
from shoal.policies.values.plan import Plan
from shoal.policies.values.snapshot import OUTPUTS_KEPT, LayoutState, Snapshot, Target
from tests.policies.nodes import DP, FOURS, LAYOUTS, PAIRS, TP, node
from tests.policies.snapshots import request
from tests.units import tp

LOOSE, TIGHT = Target(0, 5.0, 0.1), Target(0, 5.0, 0.012)
URGENT, REST = Target(-1, 0.5, 0.013), Target(0, 1.0, 0.035)


def asked_for(seen: Snapshot, seconds: float, begin: int = 0) -> Iterator[Plan]:
    """Ask about the same load again and again; yield the plans until one wants a switch.

    Args:
        seen: the node at first. What a plan wants to be studied is known when the policy is asked
            next.
        seconds: for so long.
        begin: number of the first question; each comes ``WATCH_SECONDS`` after the one before it.
    """
    rate, prompt = seen.arrival_rate, round(seen.prompt_tokens)
    for k in range(begin, begin + round(seconds / WATCH_SECONDS)):
        now = k * WATCH_SECONDS
        come = range(int(rate * (now - WATCH_SECONDS)), int(rate * now)) if k else ()
        arrived = tuple(request(f"r{n}", prompt=prompt, arrival=now) for n in come)
        plan = ADAPTIVE.plan(replace(seen, now=now, arrived=arrived))
        yield plan
        if plan.target is not None:
            return
        findings = seen.findings if plan.study is None else plan.study()
        seen = replace(seen, memory=plan.memory, findings=findings)


def wanted(seen: Snapshot, seconds: float = 5.0) -> Partition:
    """Return the partition to which the policy comes if nothing else changes."""
    *_, last = asked_for(seen, seconds)
    return last.target or seen.partition


def reviews(seen: Snapshot, seconds: float = 20.0) -> int:
    """Return how often the policy judges a load until it switches."""
    return len(list(asked_for(seen, seconds)))


def chats(seen: Snapshot) -> Snapshot:
    """Return the node with short prompts and long outputs, where many degrees have their load."""
    return replace(seen, prompt_tokens=100.0, output_tokens=500.0)


CROWD = chats(node(TP, {0: 50}, rate=80.0))
"""A load that only DP bears, and the widest group that got it."""


def widths(partition: Partition) -> list[int]:
    return sorted(unit.size for unit in partition)


# --- when ---


GROWS = replace(chats(node(TP, {0: 30}, rate=10.0)), memory=Memory(-WATCH_SECONDS, age=60.0))
KNOWN = replace(GROWS, outputs=(round(GROWS.output_tokens),) * OUTPUTS_KEPT)
"""The same node, which knows how long outputs are."""


@pytest.mark.slow
def test_what_is_foreseen_pays_a_part_of_the_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Foresight, "gain", lambda *_: 1e-9)
    late = reviews(GROWS, 60.0)
    assert late < 600
    monkeypatch.setattr(Foresight, "gain", lambda *_: 1e9)
    assert 1 < reviews(GROWS, 60.0) < late, "something must have been saved"


@pytest.mark.slow
def test_nothing_pays_that_is_foreseen_to_lose_more_than_it_has_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Foresight, "gain", lambda *_: -1e9)
    assert wanted(CROWD, 20.0) == TP


@pytest.mark.slow
def test_nothing_pays_that_is_foreseen_to_lose_when_a_crowd_has_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Foresight, "gain", lambda *_: -1e-9)
    gone = Memory(-WATCH_SECONDS, age=600.0, requests=2000.0, squared_requests=4e6)
    assert wanted(replace(CROWD, memory=gone), 20.0) == TP


def test_a_loss_that_was_foreseen_once_does_not_count_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests that come together at the start of a node look like a load of any size."""
    quiet = chats(node(FOURS, {0: 1}, rate=2.0))
    monkeypatch.setattr(adaptive_memory, "candidates_of", lambda *_: iter((FOURS, TP)))
    monkeypatch.setattr(Foresight, "gain", lambda *_: 10.0)
    soon = reviews(quiet, 80.0)
    looks = iter([-1000.0, *[10.0] * 1000])
    monkeypatch.setattr(Foresight, "gain", lambda *_: next(looks))
    more = adaptive.LOOK_SECONDS / WATCH_SECONDS
    assert 0 < reviews(quiet, 80.0) - soon <= more + 1


@pytest.mark.parametrize(("here", "there", "looks"), [(TP, FOURS, 1), (FOURS, TP, 2)])
def test_a_switch_to_wider_units_must_be_foreseen_to_pay_twice(
    here: Partition, there: Partition, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []

    def foreseen(*_: object) -> float:
        looked.append(1)
        return 1e9

    monkeypatch.setattr(Foresight, "gain", foreseen)
    monkeypatch.setattr(adaptive_memory, "candidates_of", lambda *_: iter([here, there]))
    crowd, quiet = node(TP, {0: 30}, rate=10.0), node(FOURS, {0: 1}, rate=2.0)
    assert wanted(chats(crowd if here == TP else quiet), 80.0) == there
    assert len(looked) == looks


@pytest.mark.parametrize(("targets", "is_far"), [((), True), ((LOOSE,), False)])
def test_what_has_paid_for_long_is_looked_at_for_as_long(
    targets: tuple[Target, ...], is_far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But nothing that still has to pay, and nothing on a node with targets."""
    looked = []

    def foreseen(_: object, __: Partition, ___: float, seen: float) -> float:
        looked.append(seen)
        return -1e9

    monkeypatch.setattr(Foresight, "gain", foreseen)
    monkeypatch.setattr(adaptive_memory, "candidates_of", lambda *_: iter([TP, DP]))
    assert wanted(replace(CROWD, targets=targets), 20.0) == TP
    assert looked[0] == 0.0
    assert (max(looked) > 5.0) is is_far


STUDIED = replace(CROWD, can_study=True)


def test_judgements_beside_the_controllers_work_lead_to_the_same_layout() -> None:
    plans = list(asked_for(STUDIED, 5.0))
    assert plans[-1].target == wanted(CROWD)
    assert plans[-2].study is not None
    assert [plan.study for plan in plans if plan.target] == [None]


def test_there_is_one_judgement_at_a_time_and_one_that_never_ends_is_given_up() -> None:
    begun = ADAPTIVE.plan(STUDIED)
    assert begun.study is not None
    seen = replace(STUDIED, memory=begun.memory)
    for now in (WATCH_SECONDS, adaptive.LOST_SECONDS - 0.1):
        assert ADAPTIVE.plan(replace(seen, now=now)).study is None
    late = replace(seen, now=adaptive.LOST_SECONDS)
    assert ADAPTIVE.plan(late).study is not None
    crowd = replace(late, waiting=MANY_REQUESTS)
    assert ADAPTIVE.plan(crowd).study is None, "with many requests a judgement takes longer"


def last_but_one(seen: Snapshot) -> tuple[Snapshot, Plan]:
    """Return a node whose judgement has just found a switch, and the plan of that judgement."""
    plans = list(asked_for(seen, 5.0))
    begun, found = plans[-2], plans[-1]
    assert begun.study is not None
    now = (len(plans) - 1) * WATCH_SECONDS
    return replace(seen, now=now, memory=begun.memory, findings=begun.study()), found


def test_what_a_judgement_finds_is_dropped_if_the_node_has_changed() -> None:
    seen, found = last_but_one(STUDIED)
    assert ADAPTIVE.plan(seen).target == found.target
    assert found.target is not None
    elsewhere = chats(node(FOURS, {0: 50}, rate=80.0))
    elsewhere = replace(
        elsewhere, now=seen.now, memory=seen.memory, findings=seen.findings, can_study=True
    )
    cannot_form = replace(seen, broken=frozenset(found.target))
    for changed in (elsewhere, cannot_form, replace(seen, switching=True)):
        assert ADAPTIVE.plan(changed).target is None


def test_a_judgement_goes_on_while_requests_move_to_another_unit() -> None:
    seen, found = last_but_one(STUDIED)
    during = ADAPTIVE.plan(replace(seen, switching=True, findings=None))
    after = replace(seen, now=seen.now + WATCH_SECONDS, memory=during.memory)
    assert ADAPTIVE.plan(after).target == found.target


def test_a_judgement_may_end_while_requests_move_to_another_unit() -> None:
    begun = ADAPTIVE.plan(STUDIED)
    assert begun.study is not None
    moving = replace(STUDIED, memory=begun.memory, findings=begun.study(), switching=True)
    learned = ADAPTIVE.plan(moving).memory
    assert isinstance(learned, Memory)
    assert learned.hindsight is not None


def test_a_pipeline_is_left_for_good() -> None:
    pipeline = (Unit(tuple(range(8)), Layout(tp=4, pp=2)),)
    left = ADAPTIVE.plan(node(pipeline, {0: 3}))
    assert left.target is not None
    after = replace(node(left.target, {0: 3}), now=10.0, memory=left.memory)
    assert ADAPTIVE.plan(after).target is None


def unknown_to_shadows(plan: Plan) -> list[str]:
    """Return the requests that have come and are in no shadow, after a plan."""
    assert isinstance(plan.memory, Memory)
    judged = () if plan.memory.judged is None else plan.memory.judged.arrived
    return [one.request_id for one in (*judged, *plan.memory.news.arrived)]


def test_what_comes_during_a_judgement_is_known_to_the_next_one() -> None:
    begun = ADAPTIVE.plan(replace(STUDIED, arrived=(request("first"),)))
    assert begun.study is not None
    after = replace(STUDIED, now=WATCH_SECONDS, memory=begun.memory, arrived=(request("second"),))
    done = ADAPTIVE.plan(replace(after, findings=begun.study()))
    assert unknown_to_shadows(done) == ["second"]
    for given_up in (
        ADAPTIVE.plan(replace(after, switching=True)),
        ADAPTIVE.plan(replace(after, now=adaptive.LOST_SECONDS)),
    ):
        assert unknown_to_shadows(given_up) == ["first", "second"]


def test_a_surge_is_left_for_before_anything_was_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not a load that only wobbles, not to wider units, and not if outputs are unknown."""
    monkeypatch.setattr(Foresight, "gain", lambda *_: 1e9)
    wobbles = reviews(KNOWN, 60.0)
    monkeypatch.setattr(Surges, "at", lambda *_: Surges(-1.0, usual_rate=BUSY_RATE))
    assert reviews(KNOWN, 60.0) == 1 < wobbles
    assert reviews(GROWS, 60.0) > 1
    quiet = replace(chats(node(FOURS, {0: 1}, rate=2.0)), memory=Memory(-WATCH_SECONDS, age=60.0))
    monkeypatch.setattr(adaptive_memory, "candidates_of", lambda *_: iter((FOURS, TP)))
    assert reviews(quiet, 80.0) > 1


@pytest.mark.slow
def test_a_clump_after_near_silence_must_have_saved_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Foresight, "gain", lambda *_: 1e9)
    monkeypatch.setattr(Surges, "at", lambda *_: Surges(-1.0, usual_rate=BUSY_RATE / 2))
    assert reviews(KNOWN, 60.0) > 1


def test_a_group_that_nobody_is_in_is_left_when_requests_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody knows what comes next, and the node can leave the group as well when it comes."""
    monkeypatch.setattr(Foresight, "gain", lambda *_: 1e9)
    monkeypatch.setattr(Surges, "at", lambda *_: Surges(-1.0, usual_rate=BUSY_RATE))
    empty = replace(chats(node(TP, rate=10.0)), memory=GROWS.memory)
    assert empty.requests == 0
    assert wanted(empty) == TP
    assert wanted(GROWS) != TP


def test_a_surge_is_left_for_what_brings_more_than_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The looks of a surge are many, and the best of them says too much."""
    monkeypatch.setattr(Surges, "at", lambda *_: Surges(-1.0, usual_rate=BUSY_RATE))
    monkeypatch.setattr(Foresight, "gain", lambda *_: -1e9)
    first = next(asked_for(KNOWN, 1.0))
    cheapest = min(verdict.price for verdict in first.verdicts)
    assert cheapest > 10
    monkeypatch.setattr(Foresight, "gain", lambda *_: cheapest - 3)
    assert next(asked_for(KNOWN, 1.0)).target is None
    monkeypatch.setattr(Foresight, "gain", lambda *_: cheapest + 3)
    assert next(asked_for(KNOWN, 1.0)).target is not None


def test_a_surge_that_is_foreseen_to_lose_is_stayed_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Surges, "at", lambda *_: Surges(-1.0, usual_rate=BUSY_RATE))
    monkeypatch.setattr(Foresight, "gain", lambda *_: -1e-9)
    assert reviews(KNOWN, 5.0) == round(5.0 / WATCH_SECONDS)


def test_an_idle_node_with_sp_begins_in_the_layout_whose_worst_case_is_best() -> None:
    idle = node(DP)
    able = replace(idle, sp_above=tuple((each.layout, 512) for each in LAYOUTS[1:]))
    plan = ADAPTIVE.plan(able)
    assert (plan.target, plan.reason) == (TP, "start")
    after = replace(able, now=1.0, memory=plan.memory)
    assert ADAPTIVE.plan(replace(after, partition=TP, units=node(TP).units)).target is None
    # Without SP long prompts would be slow, and on a busy node or later a switch has its price.
    assert ADAPTIVE.plan(idle).target is None
    assert ADAPTIVE.plan(replace(able, units=node(DP, {0: 1}).units)).target is None
    assert ADAPTIVE.plan(replace(able, memory=Memory(-1.0, age=60.0))).target is None


@pytest.mark.parametrize("targets", [(), (LOOSE,)])
def test_requests_are_not_kept_for_shadows_for_ever(targets: tuple[Target, ...]) -> None:
    """Shadows get them also while urgent requests have their group, and with promises."""
    seen = replace(node(TP, {0: 2}, rate=8.0), targets=targets, urgent_engines=4)
    for k in range(100):
        come = (request(f"r{k}", arrival=1.0 * k),)
        since = math.inf if k < 10 else 0.0
        plan = ADAPTIVE.plan(replace(seen, now=1.0 * k, arrived=come, since_urgent=since))
        assert isinstance(plan.memory, Memory)
        assert plan.memory.news == News()
        seen = replace(seen, memory=plan.memory)


# --- where to ---


def test_a_quiet_node_goes_to_the_widest_group_and_a_crowded_one_leaves_it() -> None:
    assert wanted(node(DP, {0: 1}, rate=1.0), 20.0) == TP
    assert widths(wanted(CROWD))[-1] < 8


@pytest.mark.parametrize(("requests", "rate", "best"), [(10, 10.0, TP), (10, 40.0, FOURS)])
def test_between_them_are_fours(requests: int, rate: float, best: Partition) -> None:
    assert wanted(chats(node(TP, {0: requests}, rate=rate)), 20.0) == best


@pytest.mark.parametrize("partition", [DP, PAIRS, FOURS, TP])
def test_where_it_comes_to_it_stays(partition: Partition) -> None:
    """The same load from any layout leads to the same one, which is then kept."""
    seen = replace(node(partition, {0: 2}, rate=8.0), prompt_tokens=300.0)
    assert wanted(seen) == TP
    assert reviews(replace(node(TP, {0: 2}, rate=8.0), prompt_tokens=300.0)) == 200


def test_running_requests_are_carried() -> None:
    *_, plan = asked_for(CROWD, 5.0)
    assert (plan.treatment, plan.reason) == ("carry", "load")
    *_, plan = asked_for(node(DP, {0: 1}, rate=0.5), 20.0)
    assert (plan.treatment, plan.reason) == ("carry", "quiet")


def test_a_node_of_one_engine_has_nothing_to_decide() -> None:
    seen = node(DP, {0: 4}, rate=9.0)
    seen = replace(seen, engines=1, max_group=1, partition=(alone(0),), units=seen.units[:1])
    assert wanted(seen) == (alone(0),)


def test_without_a_model_of_the_hardware_it_works_as_flying() -> None:
    seen = replace(node(DP, {0: 1}), cost_model=None)
    assert ADAPTIVE.plan(seen) == FLYING.plan(seen)
    assert ADAPTIVE.plan(seen).target == TP


# --- keeping still ---


def test_a_clear_gain_is_taken_at_once_and_a_small_one_later() -> None:
    quiet = Memory(-WATCH_SECONDS, age=60.0)
    clear = reviews(replace(CROWD, memory=quiet))
    small = reviews(replace(chats(node(TP, {0: 30}, rate=10.0)), memory=quiet))
    assert clear <= 12
    assert clear < small < 400


def test_what_is_saved_adds_up_only_while_it_is_saved() -> None:
    """A load that calls for DP and for TP in turn, too shortly for a switch to pay."""
    busy, quiet = chats(node(TP, {0: 30}, rate=10.0)), chats(node(TP, {0: 1}, rate=1.0))
    assert 3 < reviews(busy) < 400
    memory, target = None, None
    for k in range(200):
        seen = quiet if k % 20 else busy
        plan = ADAPTIVE.plan(replace(seen, now=k * WATCH_SECONDS, memory=memory))
        memory, target = plan.memory, target or plan.target
    assert target is None


def test_a_switch_just_made_is_given_time() -> None:
    seen = CROWD
    assert wanted(replace(seen, since_switch=LEAST_SECONDS / 2)) == TP


def test_being_slower_than_a_layout_is_remembered_and_forgotten_within_minutes() -> None:
    *_, plan = asked_for(CROWD, 5.0)
    behind = dict(plan.memory.past_regrets)
    assert behind[plan.target] > behind[TP] > 0  # The latter is the stop alone.
    later = replace(CROWD, now=2000.0, memory=replace(plan.memory, judged_at=0.0, hindsight=None))
    assert dict(ADAPTIVE.plan(later).memory.past_regrets)[plan.target] < behind[plan.target] / 1e6


def test_while_another_layout_would_have_been_better_its_lead_must_be_saved_too() -> None:
    best = wanted(CROWD)
    others = {PAIRS, DP, FOURS} - {best}

    def after(*behind: tuple[Partition, float]) -> int:
        return reviews(replace(CROWD, memory=Memory(-WATCH_SECONDS, past_regrets=behind)))

    assert after((TP, 1e9)) > after()
    # The layout that leads is the way home, and costs nothing more.
    assert after((best, 1e9)) == after()
    # Nobody leads a node that was faster than every layout.
    assert after(*((c, -1e9) for c in (TP, best, *others))) == after()


def test_what_switches_have_cost_in_vain_must_be_saved_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is slower than every layout would have been has switched to and fro."""
    monkeypatch.setattr(Foresight, "gain", lambda *_: 1e9)
    load = chats(node(TP, {0: 30}, rate=10.0))
    memory = Memory(-WATCH_SECONDS, age=60.0)

    def after(lost: float) -> int:
        behind = tuple((c, lost) for c in (TP, PAIRS, FOURS, DP))
        return reviews(replace(load, memory=replace(memory, past_regrets=behind)), 60.0)

    assert after(0.0) == after(-2000.0) < after(2000.0)


@pytest.mark.parametrize("worse", [(DP,), (DP, PAIRS, FOURS, TP)], ids=["lead", "in vain"])
def test_a_dear_past_does_not_hold_a_layout_that_is_clearly_the_worse_one(
    worse: tuple[Partition, ...],
) -> None:
    """Wider units are much faster for a request on each engine, and only the past speaks for DP."""
    quiet = replace(node(DP, {0: 1}, rate=2.0), prompt_tokens=100.0, output_tokens=60.0)
    dear = Memory(-WATCH_SECONDS, age=600.0, past_regrets=tuple(dict.fromkeys(worse, 1e6).items()))
    assert WATCH_SECONDS * reviews(replace(quiet, memory=dear), 60.0) < 8.0


def test_a_look_ahead_does_not_hold_what_has_long_paid_while_the_same_crowd_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The look ahead says that each switch would lose five seconds of requests."""
    monkeypatch.setattr(Foresight, "gain", lambda *_: -5.0)
    load = chats(node(TP, {0: 30}, rate=10.0))

    def after(usual: float) -> int:
        memory = Memory(-WATCH_SECONDS, age=600.0, requests=usual, squared_requests=usual**2)
        return reviews(replace(load, memory=memory), 60.0)

    assert after(240.0) < 300, "as many as are there"
    assert after(1200.0) == 600, "the others have gone"


def test_a_layout_to_which_the_node_came_back_too_late_is_not_left_for_a_short_time() -> None:
    """Bursts of 60 requests come here, and the last one found the node in wider units."""
    quiet = replace(node(DP, {0: 1}, rate=2.0), prompt_tokens=100.0, output_tokens=60.0)
    usual = Memory(-WATCH_SECONDS, age=600.0, requests=1.0, squared_requests=60.0)

    def after(lost: float, excursions: Excursions) -> float:
        memory = replace(usual, past_regrets=((DP, lost),), excursions=excursions)
        return WATCH_SECONDS * reviews(replace(quiet, memory=memory), 100.0)

    left = Excursions().leaving(DP, 0.0)
    assert after(30.0, left) > after(4.0, left) > after(0.0, left)
    assert after(-10.0, left) == after(0.0, left), "it has paid to leave"
    for lost in (4.0, 30.0, 1e6):
        assert after(lost, left) > after(lost, Excursions()), "it was never left"
    assert after(1e6, left) == after(100.0, left), "half a second of each request of a burst"


@pytest.mark.parametrize(("usual", "forgotten"), [(600.0, True), (60.0, False)])
def test_what_a_crowd_has_taught_is_forgotten_once_it_has_gone(
    usual: float, *, forgotten: bool
) -> None:
    """Eight requests are left of it. An eighth of sixty is still a crowd."""
    taught = Memory(
        -WATCH_SECONDS, age=600.0, requests=1.0, squared_requests=usual, past_regrets=((TP, 30.0),)
    )
    taught = replace(taught, excursions=Excursions().leaving(DP, 20.0))
    few = replace(node(DP, {0: 1}, rate=0.5), since_switch=0.0, memory=taught)
    memories = [plan.memory for plan in asked_for(few, 2 * GONE_SECONDS)]
    before, after = memories[round(GONE_SECONDS / WATCH_SECONDS) - 2], memories[-1]
    assert before.excursions.left
    assert before.past_regrets
    assert bool(after.excursions.left) == (not forgotten)
    assert bool(dict(after.past_regrets).get(TP)) == (not forgotten)
    assert (after.usual_requests < 10.0) == forgotten


def test_an_idle_node_begins_again_once_a_crowd_has_gone() -> None:
    able = replace(node(DP, rate=0.0), sp_above=tuple((one.layout, 512) for one in LAYOUTS[1:]))
    taught = Memory(-WATCH_SECONDS, age=600.0, requests=1.0, squared_requests=60.0)
    plans = list(asked_for(replace(able, memory=taught), 2 * GONE_SECONDS))
    assert (plans[-1].target, plans[-1].reason) == (TP, "start")
    assert WATCH_SECONDS * len(plans) > GONE_SECONDS
    busy = replace(able, units=node(DP, {0: 1}).units, since_switch=0.0)
    crowd = replace(taught, squared_requests=600.0)
    assert wanted(replace(busy, memory=crowd), 2 * GONE_SECONDS) == DP, "somebody would wait"


def test_the_policy_says_what_it_thinks_of_layouts_that_the_node_does_not_have() -> None:
    *_, last = asked_for(CROWD, 5.0)
    seen = {verdict.partition: verdict for verdict in last.verdicts}
    assert set(seen) == {PAIRS, DP, FOURS}
    taken = seen[last.target]
    assert taken.saved + taken.foreseen > taken.price
    assert taken.fine == 0
    assert all(verdict.has_room for verdict in last.verdicts)


def test_the_usual_number_of_requests_does_not_begin_at_none() -> None:
    """Else switches would seem cheap to a node that was busy from its first second on."""
    memory = None
    for k in range(20):
        seen = replace(CROWD, now=k * WATCH_SECONDS, memory=memory, since_switch=0.0)
        memory = ADAPTIVE.plan(seen).memory
    assert memory.requests > 0.6 * CROWD.requests


def test_no_crowd_of_minutes_ago_waits_for_what_caches_lose() -> None:
    """Of a crowd of chats the last few are left, and what is cached of the others is lost."""
    here = node(DP, {0: 1}, rate=4.0)
    units = tuple(replace(unit, cached_tokens=10**6, context_tokens=0) for unit in here.units)
    few = replace(here, units=units, hit_share=0.5, since_switch=60.0)

    def price(usual: float, seen: Snapshot = few) -> float:
        memory = Memory(-WATCH_SECONDS, age=60.0, requests=usual, squared_requests=usual**2)
        plan = ADAPTIVE.plan(replace(seen, memory=memory))
        return next(one.price for one in plan.verdicts if one.partition == TP)

    assert price(200.0) < price(8.0) + few.requests
    crowd = replace(few, units=tuple(replace(unit, requests=25) for unit in units))
    assert price(200.0, crowd) > 10 * price(200.0), "it does, while it is there"
    assert price(8.0, crowd) > 10 * price(8.0), "also if it is not usual"


def test_between_reviews_nothing_is_judged_but_requests_start() -> None:
    seen = CROWD
    first = ADAPTIVE.plan(seen).memory
    soon = replace(seen, now=WATCH_SECONDS / 2, memory=first, pool=(request("a"),), waiting=1)
    plan = ADAPTIVE.plan(soon)
    assert plan.memory == first
    assert [d.request_id for d in plan.dispatches] == ["a"]


@pytest.mark.parametrize(("waiting", "judged"), [(0, 20), (MANY_REQUESTS * 5, 4)])
def test_a_crowd_is_judged_less_often_because_it_takes_longer(waiting: int, judged: int) -> None:
    seen, times = replace(CROWD, waiting=waiting, since_switch=0.0), set()
    for k in range(20):
        plan = ADAPTIVE.plan(replace(seen, now=1.1 * k * WATCH_SECONDS))
        times.add(plan.memory.judged_at)
        seen = replace(seen, memory=plan.memory)
    assert len(times) == pytest.approx(judged, abs=1)


def test_no_switch_while_one_runs_and_nothing_adds_up() -> None:
    seen = replace(CROWD, switching=True)
    *_, last = asked_for(seen, 2.0)
    assert last.target is None
    assert last.memory.hindsight is None


def test_a_full_node_keeps_its_layout() -> None:
    """Requests could not take their KV along, so a switch would compute all of them again."""
    units = (replace(unit, free_blocks=5, longest_tokens=800) for unit in CROWD.units)
    full = replace(CROWD, units=tuple(units))
    assert wanted(full) == TP
    assert wanted(CROWD) != TP


def test_the_memory_of_another_policy_is_forgotten() -> None:
    assert isinstance(ADAPTIVE.plan(replace(node(DP), memory="strange")).memory, Memory)


# --- long and urgent requests, promises ---


def test_a_request_that_fits_nowhere_is_reason_enough() -> None:
    limits = [100, 200, 400, 800]
    layouts = tuple(
        LayoutState(each.layout, each.slots, each.total_blocks, each.block_tokens, limit)
        for each, limit in zip(LAYOUTS, limits, strict=True)
    )
    crowd = replace(CROWD, partition=DP, units=node(DP, {0: 50}).units)
    units = tuple(replace(unit, max_model_len=100) for unit in crowd.units)
    long = request("long", prompt=20, total=150)
    seen = replace(crowd, units=units, layouts=layouts, pool=(long,), waiting=1, since_switch=0.0)
    plan = ADAPTIVE.plan(seen)
    assert plan.reason == "long"
    assert 2 <= max(widths(plan.target)) < 8, "the crowd keeps what it needs"
    few = tuple(replace(unit, max_model_len=100) for unit in node(DP, {0: 1}).units)
    assert ADAPTIVE.plan(replace(seen, units=few)).target == TP, "nobody else is there"


def test_a_request_that_runs_keeps_the_group_that_it_needs() -> None:
    """The crowd wants DP, where this request would find no room."""
    limits = [100, 200, 400, 800]
    layouts = tuple(
        LayoutState(each.layout, each.slots, each.total_blocks, each.block_tokens, limit)
        for each, limit in zip(LAYOUTS, limits, strict=True)
    )
    for tokens, narrowest in ((90, 1), (350, 4)):
        unit = replace(CROWD.units[0], longest_tokens=tokens)
        found = wanted(replace(CROWD, layouts=layouts, units=(unit,)), 20.0)
        assert narrowest <= max(widths(found)) < 8


def test_urgent_requests_do_not_change_what_pays() -> None:
    """They go first in every layout. So the layout is best for them, too, that is best for all."""
    crowd = chats(node(DP, {-1: 4, 0: 8}, rate=40.0))
    assert wanted(replace(crowd, since_urgent=0.0)) == wanted(replace(crowd, since_urgent=math.inf))
    assert wanted(replace(CROWD, since_urgent=0.0)) == wanted(CROWD) != TP


def test_urgent_requests_go_to_the_widest_unit_and_the_others_elsewhere() -> None:
    mixed: Partition = (tp(0, 1, 2, 3), tp(4, 5), tp(6, 7))
    pool = (request("urgent", priority=-1), request("a"), request("b"))
    for targets in ((), (URGENT, REST)):
        seen = replace(node(mixed, {-1: 1, 0: 1}, *targets), pool=pool, since_urgent=0.0)
        sent = {d.request_id: d.unit.size for d in ADAPTIVE.plan(seen).dispatches}
        assert sent == {"urgent": 4, "a": 2, "b": 2}


def test_without_urgent_requests_all_go_wherever_there_is_least_to_do() -> None:
    mixed: Partition = (tp(0, 1, 2, 3), *(alone(k) for k in range(4, 8)))
    seen = node(mixed)
    busy = (replace(seen.units[0], requests=8), *seen.units[1:])
    seen = replace(seen, units=busy, pool=(request("a"),), waiting=1)
    assert ADAPTIVE.plan(seen).dispatches[0].unit.size == 1


def test_promises_decide_where_there_are_some() -> None:
    """TP would be faster for both; only DP or narrow groups bear the load of the second."""
    assert widths(wanted(node(DP, {0: 1}, TIGHT)))[-1] > 1
    assert wanted(node(TP, {0: 8}, Target(0, 2.0, 0.06), rate=60.0)) != TP


def test_promises_that_every_layout_keeps_are_kept_in_the_fastest() -> None:
    assert wanted(node(DP, {0: 2}, LOOSE, rate=4.0)) == TP
