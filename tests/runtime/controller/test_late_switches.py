"""A policy's switch keeps nobody waiting for long, and what cannot be moved goes on nonetheless."""

import pytest

from shoal.policies import registry
from shoal.policies.static import dispatch_least_loaded
from shoal.policies.values.layouts import alone
from shoal.policies.values.partition import Partition
from shoal.policies.values.plan import Plan, Policy, TreatmentName
from shoal.policies.values.snapshot import Snapshot
from shoal.runtime.config import FakeSettings
from shoal.runtime.controller.requests.pauses import PAUSE_SECONDS, TURN_SECONDS
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
TIGHT = FakeSettings(
    step_seconds=STEP, num_blocks=40, block_tokens=16, max_num_seqs=8, max_model_len=4000
)
"""Half of an engine's blocks hold 320 tokens."""
WAIT = 2.0
SOON = WAIT + 1.0
"""A switch that was late, and the first step of a request after it."""
PINNED = {"presence_penalty": 0.5}


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
    treatment: TreatmentName = "soft",
) -> None:
    """Let a policy decide from now on that always wants this partition."""

    def plan(seen: Snapshot, /) -> Plan:
        wanted = None if seen.switching or seen.partition == target else target
        return Plan(dispatch_least_loaded(seen), wanted, treatment)

    monkeypatch.setitem(registry.POLICIES, "wants", Policy("wants", plan, decides_layout=True))
    node.call(m.SetPolicy, "wants")


def begin(node: LoopbackNode, *names: str, tokens: int = 400, **sampling) -> None:
    """Have requests in the midst of their outputs."""
    for name in names:
        node.send(name, 10, tokens, **sampling)
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


# --- binds ---


@pytest.mark.parametrize("treatment", ["soft", "sequential"])
def test_a_bind_takes_what_it_waited_for_along_beside_the_group(
    monkeypatch: pytest.MonkeyPatch, treatment: TreatmentName
) -> None:
    node = started(*ALONE)
    begin(node, "pinned", **PINNED)
    decide(monkeypatch, node, TOGETHER, treatment)
    node.send("new", 10, 5)
    let_pass(node, SOON)
    assert node.partition == TOGETHER
    assert "new" in node.finish
    had = tokens(node, "pinned")
    let_pass(node, 1.0)
    assert tokens(node, "pinned") > had, "it goes on beside the group"
    assert [(view.late, view.paused) for view in node.controller.switches] == [(True, 0)]
    finish(node, 60)
    assert node.value("shoal_late_switches_total", reason="other") == 1


def test_a_bind_pauses_what_would_leave_the_group_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    node = started(*ALONE, settings=TIGHT)
    begin(node, "pinned", tokens=500, **PINNED)
    decide(monkeypatch, node, TOGETHER)
    let_pass(node, 2 * SOON)
    assert node.controller.switches[-1].paused == 1
    finish(node, 120)


def test_requests_that_end_in_time_make_no_switch_late(monkeypatch: pytest.MonkeyPatch) -> None:
    node = started(*ALONE)
    begin(node, "pinned", tokens=40, **PINNED)
    decide(monkeypatch, node, TOGETHER)
    let_pass(node, SOON)
    (view,) = node.controller.switches
    assert (view.drained, view.paused, view.late) == (1, 0, False)
    finish(node, 1)
    assert node.value("shoal_late_switches_total") == 0


def test_a_wait_of_none_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    node = LoopbackNode(4, settings=TIMED, switch_wait_seconds=0.0)
    node.settle()
    begin(node, "pinned", "free", **PINNED)
    decide(monkeypatch, node, TOGETHER)
    let_pass(node, 3 * STEP)
    assert node.partition == TOGETHER
    assert node.controller.switches[-1].drained == 0
    finish(node, 60)


# --- releases ---


@pytest.mark.parametrize("treatment", ["soft", "sequential", "interleave"])
def test_a_release_pauses_what_it_waited_for_and_all_others_start(
    monkeypatch: pytest.MonkeyPatch, treatment: TreatmentName
) -> None:
    node = started(*TOGETHER)
    begin(node, "pinned", **PINNED)
    begin(node, "free")
    decide(monkeypatch, node, ALONE, treatment)
    for k in range(8):
        node.send(f"new{k}", 10, 5)
    let_pass(node, SOON)
    assert node.partition == ALONE
    assert all(f"new{k}" in node.finish for k in range(8))
    had = tokens(node, "free")
    let_pass(node, 4 * STEP)
    assert tokens(node, "free") > had, "it was moved"
    assert late(node) == [False, True]
    finish(node, 120)


def test_no_switch_is_late_for_a_request_that_comes_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = started(*TOGETHER)
    decide(monkeypatch, node, ALONE)
    node.send("pinned", 10, 400, **PINNED)
    node.send("free", 10, 400)
    let_pass(node, WAIT / 2)
    assert node.placed()["pinned"] in ALONE
    assert late(node) == [False, False]
    finish(node, 60)


def test_an_operator_waits_as_long_as_was_asked_for() -> None:
    """The control: without the bound one request holds everybody."""
    node = started(*TOGETHER)
    begin(node, "pinned", **PINNED)
    call = node.set_layout(*ALONE, treatment=m.Treatment.SOFT, timeout=10.0)
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
    begin(node, "pinned", **PINNED)
    units = [list(unit.engines) for unit in ALONE]
    call = node.call(m.SetLayout, units, m.Treatment.SOFT, 10.0, 1.0)
    node.send("new", 10, 5)
    let_pass(node, 2.0)
    reply = node.reply(call)
    assert isinstance(reply, m.SwitchDone)
    assert (reply.switch.late, reply.switch.paused) == (True, 1)
    assert "new" in node.finish
    node.set_layout(*TOGETHER)
    finish(node, 60)


def test_engines_that_a_switch_does_not_concern_go_on_starting_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = started(*PAIR)
    begin(node, "pinned", **PINNED)
    assert node.placed()["pinned"] == tp(0, 1)
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
    begin(node, "left", "right", **PINNED)
    assert set(node.placed().values()) == {tp(0, 1), tp(2, 3)}
    decide(monkeypatch, node, TOGETHER)
    node.send("new", 10, 5)
    let_pass(node, SOON)
    assert node.partition == TOGETHER
    assert "new" in node.finish
    finish(node, 200)


def test_a_member_that_dies_when_the_switch_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    node = started(*ALONE)
    begin(node, "pinned", **PINNED)
    (engine,) = node.placed()["pinned"].engines
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


# --- turns ---


def test_what_is_paused_gets_turns_until_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    node = started(*TOGETHER)
    begin(node, "pinned", **PINNED)
    decide(monkeypatch, node, ALONE)
    longest = since = 0.0
    while "pinned" not in node.finish:
        node.send(f"new{len(node.prompts)}", 10, 5)
        had = tokens(node, "pinned")
        let_pass(node, 0.5)
        since = 0.0 if tokens(node, "pinned") > had else since + 0.5
        longest = max(longest, since)
        assert node.clock.now < 1200.0, "it takes for ever"
    assert longest + 0.5 >= PAUSE_SECONDS
    assert longest <= PAUSE_SECONDS + 1.5
    let_pass(node, SOON)
    assert node.partition == ALONE, "nothing else keeps it from the policy's layout"
    finish(node, 5)
    assert node.value("shoal_switches_total", reason="paused", outcome="done") > 0


def test_a_turn_is_over_when_its_requests_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    node = started(*TOGETHER)
    begin(node, "pinned", tokens=80, **PINNED)
    decide(monkeypatch, node, ALONE)
    let_pass(node, WAIT + PAUSE_SECONDS + TURN_SECONDS / 2)
    assert "pinned" in node.finish
    assert node.partition == ALONE
    finish(node, 1)


def test_what_a_hard_bind_has_paused_goes_on_beside_its_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = started(*ALONE)
    begin(node, "a", "b", "c", "d", **PINNED)
    decide(monkeypatch, node, PAIR, "hard")
    let_pass(node, 1.0)
    assert node.controller.switches[-1].paused == 2
    node.send("shared", 10, 200)
    let_pass(node, PAUSE_SECONDS + 1.0)
    view = node.controller.switches[-1]
    assert (view.reason, view.before, view.after) == (
        "paused",
        [unit.engines for unit in PAIR],
        [unit.engines for unit in PAIR],
    )
    had = [tokens(node, name) for name in "abcd"]
    let_pass(node, 1.0)
    assert all(tokens(node, name) > n for name, n in zip("abcd", had, strict=True))
    finish(node, 120)


def test_a_turn_is_for_those_who_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a node whose requests can never be moved would be in turns for ever."""
    node = started(*TOGETHER)
    begin(node, "pinned", **PINNED)
    decide(monkeypatch, node, ALONE)
    let_pass(node, WAIT + PAUSE_SECONDS + 1.0)
    assert node.partition == TOGETHER
    node.send("another", 10, 200, **PINNED)
    node.send("free", 10, 200)
    let_pass(node, 1.0)
    assert node.placed()["free"] == TOGETHER[0]
    assert "another" not in node.placed()
    let_pass(node, TURN_SECONDS)
    assert node.partition == ALONE
    assert node.placed()["another"] in ALONE
    assert tokens(node, "another") > 0
    finish(node, 120)


def test_a_turn_moves_what_is_in_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    node = started(*ALONE, settings=TIGHT)
    begin(node, "pinned", tokens=500, **PINNED)
    decide(monkeypatch, node, TOGETHER)
    let_pass(node, SOON)
    node.send("shared", 10, 400)
    let_pass(node, PAUSE_SECONDS - 0.5)
    assert node.partition == ALONE, "no room beside the group"
    had = tokens(node, "pinned"), tokens(node, "shared")
    let_pass(node, 1.0)
    assert tokens(node, "pinned") > had[0]
    assert tokens(node, "shared") > had[1] > 0
    finish(node, 200)


def test_an_operators_layout_is_left_alone() -> None:
    node = started(*TOGETHER)
    begin(node, "pinned", **PINNED)
    node.set_layout(*ALONE, treatment=m.Treatment.HARD)
    let_pass(node, 2 * (PAUSE_SECONDS + TURN_SECONDS))
    assert node.partition == ALONE
    assert node.missing == ["pinned"]
    node.set_layout(*TOGETHER)
    finish(node, 60)
