"""Engines that die are started again: they serve alone at once, then in their groups."""

import pytest

from shoal.policies.values.layouts import Unit, alone
from shoal.runtime.controller.books.engine_book import EngineState
from shoal.runtime.controller.failures.rejoin import ATTEMPTS, FORM_SECONDS, RETRY_SECONDS
from shoal.runtime.engine.fake.faults import NO_FAULTS, Faults
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.messages.views import UnavailableView
from shoal.runtime.protocol.transport import SUPERVISOR, Channel, engine_identity
from tests.runtime.loopback_node import SMALL, LoopbackNode
from tests.units import tp

PAIR = ([0, 1], [2], [3])
SINGLES = ([0], [1], [2], [3])


def make_node(engines: int = 4, max_group: int = 2, **options: object) -> LoopbackNode:
    node = LoopbackNode(engines, max_group=max_group, restart_limit=3, **options)  # type: ignore[arg-type]
    node.settle()
    return node


@pytest.fixture
def node() -> LoopbackNode:
    return make_node()


def kill(node: LoopbackNode, *engines: int) -> None:
    for engine in engines:
        node.kill(engine)
    node.settle()


def state(node: LoopbackNode, engine: int) -> EngineState:
    return node.controller.books.engines[engine].state


def refusal(node: LoopbackNode, *units: list[int]) -> str:
    call = node.set_layout(*units)
    node.settle()
    reply = node.reply(call)
    assert isinstance(reply, m.CallFailed), reply
    assert reply.status == 503
    return reply.error


def formed(node: LoopbackNode, engine: int) -> list[Unit]:
    """Return the groups that an engine had to form anew."""
    return [group for group, _ in node.backends[engine].formed]


def serve_everywhere(node: LoopbackNode, tag: str) -> None:
    """Let as many requests run as all units take, and check every token."""
    names = [f"{tag}{number}" for number in range(12)]
    for name in names:
        node.send(name)
    node.run_for(1.0)
    assert {node.finish.get(name) for name in names} == {wire.FinishReason.LENGTH}
    node.assert_exact()


def test_members_get_new_requests_while_their_group_is_formed() -> None:
    node = make_node(2)
    kill(node, 1)
    node.hung = {0}
    node.restart(1)
    node.settle()
    assert node.controller._operations.rejoin.engines == {0, 1}
    names = [f"new{number}" for number in range(8)]
    for name in names:
        node.send(name)
    node.run_for(1.0)
    ended = [name for name in names if name in node.finish]
    assert ended, "none ran on the member that answers"
    assert len(ended) < len(names), "the other one holds the forming up"
    node.hung = set()
    node.run_for(1.0)
    assert {node.finish.get(name) for name in names} == {wire.FinishReason.LENGTH}
    assert formed(node, 1) == [tp(0, 1)]


# --- engines --------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [0, 1], ids=["leader", "follower"])
def test_a_restarted_engine_serves_alone_and_then_in_its_group(
    node: LoopbackNode, engine: int
) -> None:
    node.switch(*PAIR)
    node.switch(*SINGLES)
    kill(node, engine)
    assert state(node, engine) is EngineState.DEAD

    node.restart(engine)
    node.settle()
    assert state(node, engine) is EngineState.SERVING
    serve_everywhere(node, "alone")
    assert alone(engine) in node.placed().values()
    node.switch(*PAIR)
    serve_everywhere(node, "grouped")
    assert tp(0, 1) in node.placed().values()
    node.switch(*SINGLES)
    assert node.audit() == []


def test_what_a_restarted_engine_did_before_is_forgotten(node: LoopbackNode) -> None:
    serve_everywhere(node, "before")
    kill(node, 1)
    node.restart(1)
    node.settle()
    # Its counters begin again: with the old ones the controller would take it for full.
    for turn in range(4):
        serve_everywhere(node, f"after{turn}-")
    assert alone(1) in {unit for name, unit in node.placed().items() if name.startswith("after3-")}


def test_a_group_that_broke_comes_back_whole(node: LoopbackNode) -> None:
    node.switch(*PAIR)
    kill(node, 1)
    assert {state(node, engine) for engine in (0, 1)} == {EngineState.DEAD}
    assert killed(node) == {0: 0, 1: 0}
    for engine in (0, 1):
        node.restart(engine)
    node.settle()
    node.switch(*PAIR)
    serve_everywhere(node, "again")
    assert node.audit() == []


def killed(node: LoopbackNode) -> dict[int, int]:
    """Return the engines that the supervisor was asked to end, and their incarnations."""
    notes = node.network.control_replies[SUPERVISOR]
    return {
        e: n for note in notes if isinstance(note, m.KillEngines) for e, n in note.engines.items()
    }


def test_requests_wait_for_engines_that_come_back() -> None:
    node = make_node(2)
    node.switch([0, 1])
    node.send("running", max_tokens=200)
    node.turns(20)
    kill(node, 0)
    node.send("new")
    node.run_for(1.0)
    assert node.finish == {}
    assert node.view().reason == "engines [0, 1] are lost"

    for engine in (0, 1):
        node.restart(engine)
    node.run_for(2.0)
    assert set(node.finish.values()) == {wire.FinishReason.LENGTH}
    node.assert_exact()


def test_an_engine_that_does_not_come_back_is_given_up(node: LoopbackNode) -> None:
    long = SMALL.num_blocks * SMALL.block_tokens + 40  # more than an engine alone holds
    node.switch([0, 1], [2, 3])
    node.switch(*SINGLES)
    kill(node, 1, 3)
    node.send("long", prompt_tokens=long, max_tokens=2)
    node.settle()
    assert node.finish == {}, "it waits for a group that may come back"

    for engine in (1, 3):
        node.network.control_sends(SUPERVISOR, m.EngineDied(engine, "again", restarts=False))
    node.settle()
    assert node.ended()["long"].outcome is m.Outcome.LOST
    assert refusal(node, *PAIR) == "unit [0, 1] is not available: engines [1] are lost"
    node.send("longer", prompt_tokens=long, max_tokens=2)
    serve_everywhere(node, "short")
    assert node.ended()["longer"].outcome is m.Outcome.TOO_LONG
    assert node.audit() == []


# --- incarnations ---------------------------------------------------------------------------------


def test_messages_of_an_earlier_incarnation_are_dropped_and_counted(node: LoopbackNode) -> None:
    kill(node, 1)
    node.restart(1)
    node.settle()
    stale = node.controller.books.statistics.stale.total()
    failed = m.encode(m.EngineFailed(1, "from the grave"))
    node.network.post(Channel.ENGINE, engine_identity(1, 0), [failed])
    node.network.control_sends(SUPERVISOR, m.EngineDied(1, "late news", incarnation=0))
    node.settle()
    assert state(node, 1) is EngineState.SERVING
    assert node.controller.books.statistics.stale.total() == stale + 1


def test_an_engine_that_is_up_before_its_restart_is_known_waits_for_it(node: LoopbackNode) -> None:
    kill(node, 1)
    control = node.network.control_sends
    held: list[tuple[str, m.Message]] = []
    node.network.control_sends = lambda *sent: held.append(sent)  # type: ignore[method-assign]
    node.restart(1)
    node.settle()
    assert state(node, 1) is EngineState.DEAD
    node.network.control_sends = control  # type: ignore[method-assign]
    for peer, message in held:
        control(peer, message)
    node.settle()
    assert state(node, 1) is EngineState.SERVING


def test_an_engine_that_was_ready_and_died_again_is_back_only_when_it_is_ready_again(
    node: LoopbackNode,
) -> None:
    node.hung.add(0)
    node.call(m.AuditNode)  # no engine comes back before engine 0 has answered
    kill(node, 1)
    node.restart(1)
    node.settle()
    assert state(node, 1) is EngineState.STARTING
    kill(node, 1)
    node.restart(1)
    sender = Channel.ENGINE, engine_identity(1, 2)
    ready = node.network.to_controller.pop(sender)
    node.hung.clear()
    node.settle()
    assert state(node, 1) is EngineState.STARTING
    node.network.to_controller[sender] = ready
    node.settle()
    assert state(node, 1) is EngineState.SERVING


def test_an_engine_is_back_only_when_no_lease_has_blocks_of_its_former_life(
    node: LoopbackNode,
) -> None:
    node.switch(*PAIR)
    node.send("paused", max_tokens=100)
    node.turns(20)
    node.switch(*SINGLES)
    assert node.controller.books.leases.opened[tp(0, 1)] > 0
    node.hung.add(0)  # the leader, who has the lease
    kill(node, 1)
    node.restart(1)
    node.settle()
    assert state(node, 1) is EngineState.STARTING
    node.hung.clear()
    node.run_for(1.0)
    assert state(node, 1) is EngineState.SERVING
    assert node.finish == {"paused": wire.FinishReason.LENGTH}
    node.assert_exact()
    assert node.audit() == []


# --- groups ---------------------------------------------------------------------------------------


def test_groups_are_refused_until_they_are_formed_again(node: LoopbackNode) -> None:
    kill(node, 1)
    assert refusal(node, *PAIR) == "unit [0, 1] is not available: engines [1] are restarting"
    node.switch([0], [1], [2, 3])
    node.switch(*SINGLES)
    node.restart(1, faults=Faults(fail_form=True))
    node.settle()
    assert "is being formed again" in refusal(node, *PAIR)


def test_policies_form_no_broken_group_and_form_it_when_it_is_whole() -> None:
    node = make_node(policy="static-tp")
    node.run_for(1.0)
    assert node.partition == (tp(0, 1), tp(2, 3))
    kill(node, 3)
    node.run_for(1.0)
    assert node.partition == (tp(0, 1), alone(2), alone(3))
    for engine in (2, 3):
        node.restart(engine, faults=Faults(fail_form=True) if engine == 3 else NO_FAULTS)
    node.run_for(1.0)
    assert node.partition == (tp(0, 1), alone(2), alone(3))
    node.kill(3)
    node.restart(3)
    node.run_for(10.0, tick=0.5)
    assert node.partition == (tp(0, 1), tp(2, 3))
    assert node.view().policy_errors == 0


def test_wide_groups_are_formed_after_narrow_ones() -> None:
    node = make_node(max_group=4)
    kill(node, 2)
    node.restart(2)
    node.settle()
    assert formed(node, 3) == [tp(2, 3), tp(0, 1, 2, 3)]
    assert formed(node, 0) == [tp(0, 1, 2, 3)], "what has not lost a member stays as it is"
    node.switch([0, 1, 2, 3])
    serve_everywhere(node, "wide")


def test_a_group_waits_for_members_that_are_bound() -> None:
    node = make_node(max_group=4)
    node.switch([0], [1], [2, 3])
    kill(node, 0)
    node.restart(0)
    node.settle()
    node.switch([0, 1], [2, 3])
    assert refusal(node, [0, 1, 2, 3]) == (
        "unit [0, 1, 2, 3] is not available: "
        "it is formed again when units [[0, 1], [2, 3]] are released"
    )
    serve_everywhere(node, "meanwhile")
    node.switch(*SINGLES)
    node.switch([0, 1, 2, 3])
    serve_everywhere(node, "wide")
    assert node.audit() == []


def test_a_switch_that_is_asked_for_meanwhile_waits(node: LoopbackNode) -> None:
    kill(node, 1)
    node.hung.add(0)
    node.restart(1)
    node.settle()
    call = node.set_layout([0], [1], [2, 3])
    node.settle()
    assert node.reply(call) is None
    assert {unit.state for unit in node.view().units[:2]} == {"switching"}
    node.hung.clear()
    node.settle()
    assert isinstance(node.reply(call), m.SwitchDone)


def test_a_group_that_cannot_be_formed_is_tried_a_few_times_then_refused(
    node: LoopbackNode,
) -> None:
    kill(node, 1)
    node.restart(1, faults=Faults(fail_form=True))
    node.settle()
    for attempt in range(1, ATTEMPTS):
        assert len(formed(node, 0)) == attempt
        node.run_for(RETRY_SECONDS * 2 ** (attempt - 1), tick=1.0)
    node.run_for(RETRY_SECONDS * 2**ATTEMPTS, tick=RETRY_SECONDS)
    assert len(formed(node, 0)) == ATTEMPTS
    assert refusal(node, *PAIR) == (
        "unit [0, 1] is not available: it could not be formed again: "
        "engine 1: failed to form a group on purpose"
    )
    serve_everywhere(node, "alone")
    assert node.audit() == []

    kill(node, 1)
    node.restart(1)
    node.settle()
    node.switch(*PAIR)
    serve_everywhere(node, "again")


def test_another_attempt_whose_time_has_just_come_is_due_at_once(node: LoopbackNode) -> None:
    kill(node, 1)
    node.restart(1, faults=Faults(fail_form=True))
    node.settle()
    until = node.controller.next_wakeup()
    assert until == pytest.approx(RETRY_SECONDS)
    node.clock.advance(until)
    assert node.controller.next_wakeup() == 0.0
    node.controller.turn()
    assert node.controller.next_wakeup() == pytest.approx(FORM_SECONDS)


def test_a_member_that_dies_while_its_group_forms_takes_nobody_with_it(node: LoopbackNode) -> None:
    kill(node, 1)
    node.restart(1)
    node.hung.add(1)  # it is back, and does not answer any more
    node.settle()
    assert formed(node, 0) == [tp(0, 1)]
    kill(node, 1)
    assert state(node, 0) is EngineState.SERVING
    serve_everywhere(node, "others")
    node.restart(1)
    node.run_for(2 * RETRY_SECONDS, tick=1.0)
    node.switch(*PAIR)
    serve_everywhere(node, "again")


def die_after_the_answer(node: LoopbackNode) -> None:
    """Have engine 1 die when it has made its part of a group, and engine 0 has not."""
    kill(node, 1)
    node.restart(1)
    node.hung.add(0)
    node.settle()
    assert formed(node, 1) == [tp(0, 1)]
    kill(node, 1)


def test_no_group_starts_without_a_member_that_has_answered_and_died(node: LoopbackNode) -> None:
    die_after_the_answer(node)
    node.hung.discard(0)
    node.settle()
    assert formed(node, 0) == [tp(0, 1)]
    assert tp(0, 1) not in node.backends[0].groups  # its start would wait for engine 1
    serve_everywhere(node, "others")
    node.restart(1)
    node.run_for(2 * RETRY_SECONDS, tick=1.0)
    node.switch(*PAIR)
    serve_everywhere(node, "again")


def test_a_member_that_has_died_and_is_back_makes_its_part_again_before_its_group_starts(
    node: LoopbackNode,
) -> None:
    die_after_the_answer(node)
    node.restart(1)
    node.settle()
    assert state(node, 1) is EngineState.SERVING
    node.hung.discard(0)
    while node.controller.books.units.starting is None:
        node.step()
    assert formed(node, 1) == [tp(0, 1)]
    node.settle()
    node.switch(*PAIR)
    serve_everywhere(node, "again")


def test_a_member_that_does_not_answer_in_time_is_lost(node: LoopbackNode) -> None:
    kill(node, 1)
    node.hung.add(0)
    node.restart(1)
    node.settle()
    node.clock.advance(FORM_SECONDS)
    node.settle()
    assert state(node, 0) is EngineState.DEAD
    assert state(node, 1) is EngineState.SERVING
    assert killed(node)[0] == 0


def test_members_that_start_a_core_together_die_together(node: LoopbackNode) -> None:
    kill(node, 1)
    node.restart(1)
    while node.controller.books.units.starting is None:
        node.step()
    kill(node, 0)
    assert {state(node, engine) for engine in (0, 1)} == {EngineState.DEAD}
    assert killed(node) == {0: 0, 1: 1}
    for engine in (0, 1):
        node.restart(engine)
    node.settle()
    node.switch(*PAIR)
    serve_everywhere(node, "again")


# --- what is to be seen ---------------------------------------------------------------------------


def test_restarts_and_missing_groups_are_shown(node: LoopbackNode) -> None:
    assert node.value("shoal_groups_unavailable", layout="tp2") == 0
    kill(node, 1)
    view = node.view()
    assert view.ready
    assert view.engines[1].state == "dead"
    assert view.engines[1].reason == "killed"
    assert view.unavailable == [UnavailableView((0, 1), "engines [1] are restarting", "tp2")]
    assert node.value("shoal_groups_unavailable", layout="tp2") == 1
    node.restart(1)
    node.settle()
    view = node.view()
    assert view.engines[1].restarts == 1
    assert view.engines[1].reason is None
    assert view.unavailable == []
    assert node.value("shoal_groups_unavailable", layout="tp2") == 0
    assert node.value("shoal_engine_restarts_total", engine="1") == 1
