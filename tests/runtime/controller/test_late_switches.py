"""A policy's switch keeps nobody waiting for long: it carries what has not ended in time."""

import pytest

from shoal.policies import registry
from shoal.policies.static import dispatch_least_loaded
from shoal.policies.values.layouts import alone
from shoal.policies.values.partition import Partition
from shoal.policies.values.plan import Plan, Policy, TreatmentName
from shoal.policies.values.snapshot import Snapshot
from shoal.runtime.config import FakeSettings
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.wire import FinishReason
from tests.runtime.loopback_node import LoopbackNode
from tests.units import tp

ALONE = (alone(0), alone(1), alone(2), alone(3))
TOGETHER = (tp(0, 1, 2, 3),)
PAIR = (tp(0, 1), alone(2), alone(3))
STEP = 0.05
TIMED = FakeSettings(
    step_seconds=STEP, num_blocks=512, block_tokens=16, max_num_seqs=8, max_model_len=4000
)
WAIT = 2.0
SOON = WAIT + 1.0
"""A switch that was late, and the first step of a request after it."""


def let_pass(node: LoopbackNode, seconds: float) -> None:
    """Let time pass while steps take theirs."""
    for _ in range(round(seconds / STEP)):
        node.clock.advance(STEP)
        for _ in range(4):
            node.controller.turn()
            for engine in sorted(set(node.agents) - node.hung):
                node.turn_agent(engine)
        node.collect()


def started(*layout: tuple[int, ...], settings: FakeSettings = TIMED, **limits) -> LoopbackNode:
    """Return a node of this layout, which no policy decides."""
    node = LoopbackNode(4, settings=settings, switch_wait_seconds=WAIT, **limits)
    node.settle()
    if layout != ALONE:
        node.switch(*layout)
    return node


def decide(
    monkeypatch: pytest.MonkeyPatch,
    node: LoopbackNode,
    target: Partition,
    treatment: TreatmentName = "sequential",
) -> None:
    """Let a policy decide from now on that always wants this partition."""

    def plan(seen: Snapshot, /) -> Plan:
        wanted = None if seen.switching or seen.partition == target else target
        return Plan(dispatch_least_loaded(seen), wanted, treatment)

    monkeypatch.setitem(registry.POLICIES, "wants", Policy("wants", plan, decides_layout=True))
    node.call(m.SetPolicy, "wants")


def begin(node: LoopbackNode, *names: str, tokens: int = 400) -> None:
    """Have requests in the midst of their outputs."""
    for name in names:
        node.send(name, 10, tokens)
    let_pass(node, 1.0)
    assert all(0 < len(node.tokens[name]) < tokens for name in names)


def tokens(node: LoopbackNode, name: str) -> int:
    return len(node.tokens.get(name, []))


def finish(node: LoopbackNode, seconds: float) -> None:
    """Let every request end, each in order and exactly."""
    for _ in range(round(seconds)):
        let_pass(node, 1.0)
        if not node.missing:
            break
    assert node.missing == []
    node.assert_exact()
    assert {node.finish[name] for name in node.prompts} == {FinishReason.LENGTH}
    assert node.value("shoal_requests_total", outcome="finished") == len(node.prompts)
    assert node.value("shoal_requests_total") == len(node.prompts)
    assert node.audit() == []


def late(node: LoopbackNode) -> list[bool]:
    return [view.late for view in node.controller.switches]


# --- a policy's ---


@pytest.mark.parametrize(("before", "after"), [(ALONE, TOGETHER), (TOGETHER, ALONE)])
def test_what_a_switch_waited_for_is_carried(
    monkeypatch: pytest.MonkeyPatch, before: Partition, after: Partition
) -> None:
    node = started(*before)
    begin(node, "long")
    decide(monkeypatch, node, after)
    node.send("new", 10, 5)
    let_pass(node, SOON)
    assert node.partition == after
    assert "new" in node.finish
    had = tokens(node, "long")
    let_pass(node, 1.0)
    assert tokens(node, "long") > had
    view = node.controller.switches[-1]
    assert (view.late, view.paused, view.carried) == (True, 0, 1)
    finish(node, 60)
    assert node.value("shoal_late_switches_total", reason="other") == 1


def test_requests_that_end_in_time_make_no_switch_late(monkeypatch: pytest.MonkeyPatch) -> None:
    node = started(*ALONE)
    begin(node, "short", tokens=40)
    decide(monkeypatch, node, TOGETHER)
    let_pass(node, SOON)
    (view,) = node.controller.switches
    assert (view.drained, view.paused, view.late) == (1, 0, False)
    finish(node, 1)
    assert node.value("shoal_late_switches_total") == 0


def test_a_wait_of_none_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    node = LoopbackNode(4, settings=TIMED, switch_wait_seconds=0.0)
    node.settle()
    begin(node, "one", "other")
    decide(monkeypatch, node, TOGETHER)
    let_pass(node, 3 * STEP)
    assert node.partition == TOGETHER
    (view,) = node.controller.switches
    assert (view.drained, view.carried) == (0, 2)
    finish(node, 60)


@pytest.mark.parametrize("treatment", ["carry", "soft"])
def test_no_request_makes_other_switches_late(
    monkeypatch: pytest.MonkeyPatch, treatment: TreatmentName
) -> None:
    node = started(*TOGETHER)
    begin(node, "long")
    decide(monkeypatch, node, ALONE, treatment)
    let_pass(node, 4 * STEP)
    assert node.partition == ALONE
    assert late(node) == [False, False]
    finish(node, 60)


def test_engines_that_a_switch_does_not_concern_go_on_starting_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = started(*PAIR)
    begin(node, "long")
    assert node.placed()["long"] == tp(0, 1)
    decide(monkeypatch, node, ALONE)
    let_pass(node, STEP)
    for k in range(4):
        node.send(f"new{k}", 10, 5)
    let_pass(node, WAIT / 2)
    assert {node.placed()[f"new{k}"] for k in range(4)} == {alone(2), alone(3)}
    assert all(f"new{k}" in node.finish for k in range(4))
    assert node.partition == PAIR, "it still waits"
    let_pass(node, SOON)
    assert node.partition == ALONE
    finish(node, 120)


def test_a_release_before_a_bind_shares_its_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    node = started(tp(0, 1), tp(2, 3))
    begin(node, "left", "right")
    assert set(node.placed().values()) == {tp(0, 1), tp(2, 3)}
    decide(monkeypatch, node, TOGETHER)
    node.send("new", 10, 5)
    let_pass(node, SOON)
    assert node.partition == TOGETHER
    assert "new" in node.finish
    finish(node, 200)


def test_a_member_that_dies_when_the_switch_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    node = started(*ALONE)
    begin(node, "long")
    (engine,) = node.placed()["long"].engines
    other = (engine + 1) % 4
    node.hung = {other}
    decide(monkeypatch, node, TOGETHER)
    let_pass(node, SOON)
    assert late(node) == [], "it waits for an answer of the engine"
    node.kill(other)
    node.hung = set()
    node.send("new", 10, 5)
    let_pass(node, 1.0)
    assert "new" in node.finish
    finish(node, 60)


# --- an operator's ---


def test_an_operator_waits_as_long_as_was_asked_for() -> None:
    """The control: without the bound one request holds everybody."""
    node = started(*TOGETHER)
    begin(node, "long")
    call = node.set_layout(*ALONE, treatment=m.Treatment.SEQUENTIAL, timeout=10.0)
    node.send("new", 10, 5)
    let_pass(node, 9.0)
    assert node.partition == TOGETHER
    assert tokens(node, "new") == 0
    let_pass(node, 2.0)
    reply = node.reply(call)
    assert isinstance(reply, m.CallFailed)
    assert reply.status == 504
    assert late(node) == [False, False]
    finish(node, 60)


def test_an_operator_may_ask_for_a_bound() -> None:
    node = started(*TOGETHER)
    begin(node, "long")
    units = [list(unit.engines) for unit in ALONE]
    call = node.call(m.SetLayout, units, m.Treatment.SEQUENTIAL, 10.0, 1.0)
    node.send("new", 10, 5)
    let_pass(node, 2.0)
    reply = node.reply(call)
    assert isinstance(reply, m.SwitchDone)
    assert (reply.switch.late, reply.switch.carried) == (True, 1)
    assert "new" in node.finish
    finish(node, 60)
