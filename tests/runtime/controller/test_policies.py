"""The loop around a policy: its mistakes, its change, and how often it may switch."""

import logging

import pytest

from shoal.policies import registry
from shoal.policies.values.layouts import alone
from shoal.policies.values.partition import singles
from shoal.policies.values.plan import Dispatch, Plan, PlanFunction, Policy
from shoal.policies.values.snapshot import Snapshot
from shoal.runtime.config import FakeSettings
from shoal.runtime.controller.books.demand import BudgetSettings, SwitchBudget
from shoal.runtime.protocol import messages as m
from tests.runtime.loopback_node import LoopbackNode
from tests.units import tp, tp_units

TIMED = FakeSettings(
    step_seconds=0.05, num_blocks=512, block_tokens=16, max_num_seqs=64, max_model_len=400
)


def node_under(
    monkeypatch: pytest.MonkeyPatch, plan: PlanFunction, *, engines: int = 4, **settings
) -> LoopbackNode:
    """Return a node under a policy of the test's."""
    policy = Policy("test", plan, decides_layout=True)
    monkeypatch.setitem(registry.POLICIES, "test", policy)
    return LoopbackNode(engines, policy="test", **settings)


def let_pass(node: LoopbackNode, seconds: float, tick: float = 0.05) -> None:
    """Let time pass while steps take theirs."""
    for _ in range(round(seconds / tick)):
        node.clock.advance(tick)
        node.turns(4)
        node.collect()


def test_what_a_policy_notes_is_given_back_until_another_one_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[object] = []

    def counts(snapshot: Snapshot, /) -> Plan:
        seen.append(snapshot.memory)
        return Plan(memory=len(seen))

    node = node_under(monkeypatch, counts)
    for name in ("a", "b"):
        node.send(name, 10, 5)
        node.settle()
    assert seen[0] is None
    assert seen[1:] == list(range(1, len(seen)))
    before = len(seen)
    node.call(m.SetPolicy, "manual")
    node.call(m.SetPolicy, "test")
    node.settle()
    assert seen[before] is None


def test_a_policy_hears_once_what_becomes_of_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[str, object]] = []

    def listens(snapshot: Snapshot, /) -> Plan:
        heard.extend(("arrived", one.request_id) for one in snapshot.arrived)
        heard.extend(("placed", one) for one in snapshot.placed)
        heard.extend(("ended", one) for one in snapshot.ended)
        unit = snapshot.units[0].unit
        return Plan(tuple(Dispatch(one.request_id, unit) for one in snapshot.pool))

    node = node_under(monkeypatch, listens, settings=TIMED)
    node.send("a", 10, 5)
    let_pass(node, 1.0)
    node.send("b", 10, 50)
    let_pass(node, 0.5)
    node.abort("b")
    node.abort("a")  # has ended already
    let_pass(node, 1.0)
    events = [what for what, _ in heard]
    assert events == ["arrived", "placed", "ended"] * 2
    assert heard[1][1] == ("a", 0)
    assert heard[2][1] == ("a", 5)
    name, tokens = heard[5][1]
    assert (name, 0 < tokens < 50) == ("b", True)


def test_a_mistake_does_not_make_a_policy_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def errs(snapshot: Snapshot, /) -> Plan:
        seen.append(snapshot.memory)
        if len(seen) == 2:
            raise ZeroDivisionError("a bug")
        return Plan(memory="noted")

    node = node_under(monkeypatch, errs)
    for name in ("a", "b", "c"):
        node.send(name, 10, 5)
        node.settle()
    assert len(seen) > 2
    assert set(seen[1:]) == {"noted"}


# --- mistakes ---


def raises(_: Snapshot, /) -> Plan:
    raise ZeroDivisionError("a bug")


def invents_a_request(_: Snapshot, /) -> Plan:
    return Plan((Dispatch("no-such", alone(0)),))


def breaks_alignment(_: Snapshot, /) -> Plan:
    return Plan(target=(alone(0), (1, 2), alone(3)))


@pytest.mark.parametrize("plan", [raises, invents_a_request, breaks_alignment])
def test_mistakes_of_a_policy_are_counted_and_change_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, plan: PlanFunction
) -> None:
    with caplog.at_level(logging.ERROR):
        node = node_under(monkeypatch, plan)
        node.send("r", 10, 5)
        node.settle()
    assert "policy test" in caplog.text
    assert node.view().policy_errors > 0
    assert node.partition == singles(4)
    assert "r" in node.pool
    node.call(m.SetPolicy, "manual")
    node.settle()
    assert node.missing == []
    node.assert_exact()


# --- change ---


def test_the_policy_changes_live() -> None:
    node = LoopbackNode(4, policy="static-dp")
    node.settle()
    reply = node.call(m.SetPolicy, "static-tp")
    for k in range(8):
        node.send(f"r{k}", 10, 20)
    node.settle()
    view = node.reply(reply)
    assert isinstance(view, m.LayoutView)
    assert view.policy == "static-tp"
    assert node.partition == (tp(0, 1, 2, 3),)
    assert node.missing == []
    node.assert_exact()


NO_GROUP = "no unit of the policy, which forms no groups, holds the request"
NARROW = FakeSettings(num_blocks=8, block_tokens=4, max_num_seqs=4, max_model_len=60)
"""An engine alone holds 32 tokens."""


def test_what_needs_a_group_is_refused_where_none_is_ever_formed() -> None:
    node = LoopbackNode(2, policy="static-dp", settings=NARROW)
    node.settle()
    node.send("long", 40, 1)
    node.settle()
    assert node.ended()["long"].outcome is m.Outcome.TOO_LONG
    assert "holds 32" in node.ended()["long"].message

    node.call(m.SetPolicy, "static-tp")
    node.settle()
    node.send("again", 40, 1)
    node.settle()
    assert node.placed()["again"] == tp(0, 1)
    assert node.missing == []
    node.assert_exact()


def test_what_waits_for_a_group_ends_where_none_is_formed_any_more() -> None:
    node = LoopbackNode(2, settings=NARROW)
    node.settle()
    node.send("long", 40, 1)
    node.settle()
    assert node.missing == ["long"], "an operator may form it"
    node.call(m.SetPolicy, "static-dp")
    node.send("short", 10, 1)
    node.settle()
    ended = node.ended()["long"]
    assert (ended.outcome, ended.status) == (m.Outcome.LOST, 500)
    assert ended.message == NO_GROUP
    assert node.placed()["short"] in (alone(0), alone(1))


def test_what_comes_back_from_a_group_ends_where_none_is_formed_any_more() -> None:
    node = LoopbackNode(2, settings=NARROW)
    node.settle()
    node.switch(tp(0, 1))
    node.send("long", 36, 15)
    node.turns(8)
    node.switch(alone(0), alone(1), treatment=m.Treatment.HARD)
    node.call(m.SetPolicy, "static-dp")
    node.run_for(60.0, tick=1.0)
    assert node.missing == []
    assert node.ended()["long"].message == NO_GROUP


def test_what_engines_took_away_is_not_the_policys_doing() -> None:
    node = LoopbackNode(2, policy="static-dp", settings=NARROW)
    node.settle()
    node.send("one", 10, 15)
    node.turns(6)
    node.kill(0)
    node.kill(1)
    node.settle()
    assert node.missing == []
    message = node.ended()["one"].message
    assert message == "no group of the engines that are left holds the request"


def test_a_policy_that_is_none_changes_nothing() -> None:
    node = LoopbackNode(2)
    node.settle()
    call = node.call(m.SetPolicy, "no-such")
    node.settle()
    reply = node.reply(call)
    assert isinstance(reply, m.CallFailed)
    assert (reply.status, node.view().policy) == (400, "manual")
    assert "choose one of" in reply.error


# --- flapping ---


def flips(seen: Snapshot, /) -> Plan:
    """Want the other layout, always."""
    wide = tp_units(seen.engines, seen.engines)
    return Plan(target=None if seen.switching else _other(seen, wide), treatment="soft")


def _other(seen, wide):
    return singles(seen.engines) if seen.partition == wide else wide


def test_no_policy_switches_more_often_than_the_budget_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = node_under(monkeypatch, flips)
    node.run_for(180.0, tick=0.25)
    budget = BudgetSettings()
    total = node.view().switches_total["done"]
    assert total <= budget.burst + 3 * budget.per_minute
    assert total >= 2 * budget.per_minute, "the policy was shut out"


@pytest.mark.slow
def test_without_the_budget_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwitchBudget, "allows", lambda *_: True)
    node = node_under(monkeypatch, flips)
    let_pass(node, 30.0)
    assert len(node.controller.switches) == node.controller.switches.maxlen


@pytest.mark.slow
@pytest.mark.parametrize("period", [1.0, 3.0, 7.0])
def test_a_square_wave_does_not_make_flying_flap(period: float) -> None:
    """Load that rises and falls as fast as the policy's own delays: few switches, no loss."""
    node = LoopbackNode(4, policy="flying", settings=TIMED)
    node.settle()
    seconds = 42.0
    for wave in range(int(seconds / period)):
        for k in range(64):
            node.send(f"w{wave}-{k}", 8, 20)
        let_pass(node, period)
    let_pass(node, 20.0)
    assert node.missing == []
    node.assert_exact()
    done = node.view().switches_total["done"]
    assert 1 < done <= BudgetSettings().burst + seconds / 60 * BudgetSettings().per_minute
    assert node.partition == (tp(0, 1, 2, 3),), "quiet again"
    assert node.audit() == []


def test_costly_switches_are_rarer() -> None:
    budget = SwitchBudget(0.0)
    assert budget.rate == BudgetSettings().per_minute / 60
    budget.learn(0.5)
    assert budget.rate == pytest.approx(BudgetSettings().overhead / 0.5)
    for _ in range(100):
        budget.learn(1e6)
    assert budget.rate == BudgetSettings().least_per_minute / 60


def test_a_budget_that_is_spent_comes_back() -> None:
    budget = SwitchBudget(0.0)
    for _ in range(BudgetSettings().burst):
        assert budget.allows(0.0)
        budget.spend(0.0)
    assert not budget.allows(1.0)
    assert budget.allows(60 / BudgetSettings().per_minute)


# --- the whole of it ---


def test_urgent_requests_get_a_group_and_those_paused_for_it_come_back() -> None:
    node = LoopbackNode(4, policy="flying", settings=TIMED)
    node.settle()
    for k in range(60):
        node.send(f"n{k}", 8, 60)
    let_pass(node, 1.0)
    assert node.partition == singles(4)
    node.send("urgent", 8, 40, priority=-5)
    let_pass(node, 0.5)
    assert node.placed()["urgent"] in (tp(0, 1), tp(2, 3))
    assert node.controller.switches[-1].treatment is m.Treatment.HARD
    let_pass(node, 30.0)
    assert node.missing == []
    node.assert_exact()
    assert node.audit() == []
