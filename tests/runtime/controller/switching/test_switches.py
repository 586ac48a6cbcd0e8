"""Binds and releases through the whole protocol: what they do, and how they fail."""

import pytest

from shoal.policies.values.layouts import alone
from shoal.policies.values.partition import singles
from shoal.runtime.engine.fake.faults import Faults, Seam
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.transport import SUPERVISOR
from shoal.runtime.protocol.wire import FinishReason
from tests.runtime.loopback_node import LoopbackNode
from tests.units import tp

HARD, SEQUENTIAL = m.Treatment.HARD, m.Treatment.SEQUENTIAL
ALONE = (alone(0), alone(1), alone(2), alone(3))


def started(**settings) -> LoopbackNode:
    node = LoopbackNode(4, **settings)
    node.settle()
    return node


def busy(node: LoopbackNode, requests: int = 8, tokens: int = 12) -> None:
    """Have requests of every engine inside their first steps."""
    for k in range(requests):
        node.send(f"busy-{len(node.prompts)}-{k}", 10, tokens)
    node.turns(2)
    assert len(node.missing) >= requests


def failure(node: LoopbackNode, call: int) -> m.CallFailed:
    reply = node.reply(call)
    assert isinstance(reply, m.CallFailed), reply
    return reply


def killed(node: LoopbackNode) -> set[int]:
    notes = node.network.control_replies.get(SUPERVISOR, [])
    return {e for note in notes if isinstance(note, m.KillEngines) for e in note.engines}


def assert_sound(node: LoopbackNode) -> None:
    """Everything ended, exactly, and every book is right."""
    assert node.missing == []
    node.assert_exact()
    assert node.audit() == []


def assert_gone_on(node: LoopbackNode, interrupted: set[str]) -> None:
    """These were on dead engines, and ended in order on others."""
    assert FinishReason.ERROR not in node.finish.values()
    assert node.value("shoal_requests_migrated_total") == len(interrupted)


# --- what they do ---


def test_hard_bind_pauses_and_release_resumes() -> None:
    node = started()
    busy(node)
    bound = node.switch(tp(0, 1), tp(2, 3), treatment=HARD)
    assert (bound.outcome, bound.paused, bound.after) == ("done", 8, [(0, 1), (2, 3)])
    assert len(node.missing) == 8
    assert [unit.paused_requests for unit in node.view().units] == [4, 4]
    for k in range(6):
        node.send(f"shared-{k}", 20, 5)
    node.settle()
    assert len(node.missing) == 8
    assert {u for r, u in node.placed().items() if r.startswith("shared")} == {tp(0, 1), tp(2, 3)}

    freed = node.switch(*ALONE, treatment=HARD)
    assert (freed.paused, freed.resumed) == (0, 8)
    assert_sound(node)


def test_sequential_bind_waits_for_running_requests() -> None:
    node = started()
    busy(node)
    bound = node.switch(tp(0, 1, 2, 3), treatment=SEQUENTIAL)
    assert (bound.paused, bound.drained) == (0, 8)
    assert_sound(node)
    assert {node.finish[r] for r in node.prompts} == {FinishReason.LENGTH}


def test_new_requests_wait_in_the_pool_while_their_units_switch() -> None:
    node = started()
    busy(node, tokens=40)
    node.set_layout(tp(0, 1, 2, 3), treatment=SEQUENTIAL)
    node.send("later", 10, 3)
    node.turns(5)
    assert "later" in node.pool
    node.settle()
    assert node.placed()["later"] == tp(0, 1, 2, 3)
    assert_sound(node)


def test_hard_release_pauses_in_the_group_until_it_is_back() -> None:
    node = started()
    node.switch(tp(0, 1), alone(2), alone(3))
    for k in range(4):
        node.send(f"g{k}", 12, 30)
    node.turns(8)
    in_group = {r for r, unit in node.placed().items() if unit == tp(0, 1)}
    released = node.switch(*ALONE)
    assert in_group
    assert released.paused == len(in_group)
    assert set(node.missing) == in_group
    assert node.view().units[0].paused_requests == len(in_group)
    assert node.audit() == []
    back = node.switch(tp(0, 1), alone(2), alone(3))
    assert back.resumed == len(in_group)
    assert_sound(node)


def test_group_of_groups_in_one_switch() -> None:
    node = started()
    node.switch(tp(0, 1), tp(2, 3))
    view = node.switch(tp(0, 1, 2, 3))
    assert (view.before, view.after) == ([(0, 1), (2, 3)], [(0, 1, 2, 3)])
    view = node.switch(tp(0, 1), alone(2), alone(3))
    assert (view.before, view.after) == ([(0, 1, 2, 3)], [(0, 1), (2,), (3,)])
    assert_sound(node)


def test_same_partition_is_done_at_once() -> None:
    node = started()
    call = node.set_layout(*reversed(ALONE))
    node.controller.turn()
    reply = node.reply(call)
    assert isinstance(reply, m.SwitchDone)
    assert reply.switch.duration_seconds == 0


def test_epochs_rise_and_history_is_kept() -> None:
    node = started()
    for _ in range(20):
        node.switch(tp(0, 1, 2, 3))
        node.switch(*ALONE)
    view = node.view()
    epochs = [switch.epoch for switch in view.switches]
    assert (len(epochs), epochs) == (32, sorted(epochs))
    assert view.switches_total == {"done": 40}


# --- refusals ---


@pytest.mark.parametrize(
    ("units", "says"),
    [
        ([[0], [1, 2], [3]], "not an aligned"),
        ([[0, 1], [2]], "engines [3] are in no unit"),
        ([[0, 1], [2, 4]], "names engine 4"),
        ([[0, 1, 2], [3]], "allowed sizes"),
    ],
)
def test_bad_partition_is_a_400(units: list[list[int]], says: str) -> None:
    node = started()
    call = node.set_layout(*units)
    node.settle()
    assert failure(node, call).status == 400
    assert says in failure(node, call).error
    assert node.partition == ALONE


def test_second_switch_is_a_409() -> None:
    node = started()
    busy(node, tokens=40)
    first = node.set_layout(tp(0, 1), tp(2, 3), treatment=SEQUENTIAL)
    second = node.set_layout(tp(0, 1, 2, 3))
    node.settle()
    assert failure(node, second).status == 409
    assert isinstance(node.reply(first), m.SwitchDone)


def test_switch_before_the_engines_are_up_is_a_503() -> None:
    node = LoopbackNode(4)
    node.hung = {2}
    node.network.to_controller.clear()
    call = node.set_layout(tp(0, 1), tp(2, 3))
    node.settle()
    assert failure(node, call).status == 503
    assert "starting" in failure(node, call).error


def test_layout_of_a_policy_is_its_own() -> None:
    node = started(policy="static-dp")
    call = node.set_layout(tp(0, 1), tp(2, 3))
    node.settle()
    assert failure(node, call).status == 409
    assert "static-dp" in failure(node, call).error


def test_unit_with_a_dead_engine_is_a_503() -> None:
    node = started()
    node.kill(3)
    node.settle()
    call = node.set_layout(tp(0, 1), tp(2, 3))
    node.settle()
    assert failure(node, call).status == 503
    assert "[3]" in failure(node, call).error
    node.switch(tp(0, 1), alone(2), alone(3))


# --- failures ---


def test_member_that_does_not_answer_fails_the_bind_and_others_serve() -> None:
    node = started()
    busy(node)
    node.hung = {3}
    stuck = [r for r, unit in node.placed().items() if unit == alone(3)]
    call = node.set_layout(tp(0, 1, 2, 3))
    node.settle()
    assert node.reply(call) is None
    node.run_for(node.config.prepare_timeout_seconds, tick=1.0)
    assert failure(node, call).status == 504
    assert "engines [3] did not reach a safe point within 5 s" in failure(node, call).error
    for k in range(6):
        node.send(f"after-{k}", 10, 4)
    node.settle()
    assert set(node.missing) == set(stuck)
    assert alone(3) not in {u for r, u in node.placed().items() if r.startswith("after")}
    assert node.view().engines[3].state == "silent"
    assert killed(node) == set()
    # It wakes up: it undoes the bind by itself, and serves again.
    node.hung = set()
    node.settle()
    assert node.view().engines[3].state == "serving"
    node.switch(tp(0, 1, 2, 3))
    node.switch(*ALONE)
    assert_sound(node)


def test_sequential_bind_that_takes_too_long_changes_nothing() -> None:
    node = started()
    busy(node, requests=4, tokens=12)
    node.hung = {3}
    call = node.set_layout(tp(0, 1, 2, 3), treatment=SEQUENTIAL, timeout=2.0)
    node.settle()
    node.clock.advance(2.0)
    node.controller.turn()
    node.hung = set()
    node.settle()
    assert failure(node, call).status == 504
    assert node.partition == ALONE
    assert killed(node) == set()
    assert_sound(node)


def test_sequential_release_that_takes_too_long_changes_nothing() -> None:
    node = started()
    node.switch(tp(0, 1, 2, 3))
    node.send("long", 10, 60)
    node.controller.turn()
    node.turn_agent(0)
    call = node.set_layout(*ALONE, treatment=SEQUENTIAL, timeout=2.0)
    node.controller.turn()
    node.clock.advance(2.0)
    node.settle()
    assert failure(node, call).status == 504
    assert "[0, 1, 2, 3]" in failure(node, call).error
    assert node.partition == (tp(0, 1, 2, 3),)
    assert_sound(node)
    node.switch(*ALONE, treatment=SEQUENTIAL)


def test_failed_switch_restores_the_units_it_dissolved() -> None:
    node = started()
    node.switch(tp(0, 1), alone(2), alone(3))
    node.hung = {3}
    call = node.set_layout(tp(0, 1, 2, 3))
    node.settle()
    node.run_for(node.config.prepare_timeout_seconds, tick=1.0)
    assert failure(node, call).status == 504
    assert node.partition == (tp(0, 1), alone(2), alone(3))
    assert node.controller.switches[-1].outcome == "failed"
    node.send("after", 10, 4)
    node.settle()
    assert_sound_but_for(node, {3})


def assert_sound_but_for(node: LoopbackNode, engines: set[int]) -> None:
    """Like ``assert_sound``; these engines cannot be asked."""
    assert node.missing == []
    node.assert_exact()
    assert [p for p in node.audit() if not any(f"engine {e}" in p for e in engines)] == []


def test_member_dies_before_the_commit() -> None:
    node = started()
    busy(node)
    stuck = {r for r, unit in node.placed().items() if unit == alone(2)}
    node.hung = {2, 3}
    call = node.set_layout(tp(0, 1, 2, 3))
    node.settle()  # 0 and 1 are prepared and have lent
    assert any(backend.own.lent for backend in node.backends.values())
    node.kill(2, "out of memory")
    node.hung = set()
    node.settle()
    assert failure(node, call).status == 503
    assert "out of memory" in failure(node, call).error
    assert killed(node) == {2}
    assert node.partition == ALONE
    assert_gone_on(node, stuck)
    assert all(not node.backends[e].own.lent for e in (0, 1, 3))
    node.switch(tp(0, 1), alone(2), alone(3))
    node.switch(*ALONE)
    assert_sound(node)


def test_leader_dies_in_a_bind_of_a_group_that_holds_paused_requests() -> None:
    node = started()
    node.switch(tp(0, 1), tp(2, 3))
    busy(node, tokens=40)
    node.switch(*ALONE)
    assert node.backends[1].own.lent  # to requests that are paused in the group of engines 0 and 1
    node.hung = {0}
    node.set_layout(tp(0, 1), alone(2), alone(3))
    node.settle()  # 1 has lent more, to the bind
    node.kill(0)
    node.settle()
    assert node.deaths == {}
    assert node.backends[1].own.lent == frozenset()
    node.switch(alone(0), alone(1), tp(2, 3))
    assert_sound(node)


@pytest.mark.parametrize(("engine", "seam"), [(1, Seam.ATTACH), (0, Seam.BIND)])
def test_death_in_the_commit_takes_the_group_and_nobody_else(engine: int, seam: Seam) -> None:
    node = started(faults={engine: Faults(die_at=seam)})
    busy(node)
    lost = {r for r, unit in node.placed().items() if unit in (alone(0), alone(1))}
    call = node.set_layout(tp(0, 1), alone(2), alone(3))
    node.settle()
    assert failure(node, call).status == 503
    assert killed(node) == {0, 1}
    assert_gone_on(node, lost)
    assert lost
    for k in range(4):
        node.send(f"after-{k}", 10, 4)
    node.settle()
    assert {u for r, u in node.placed().items() if r.startswith("after")} == {alone(2), alone(3)}
    assert_sound(node)


def test_commit_that_is_not_answered_takes_the_group() -> None:
    node = started()
    call = node.set_layout(tp(0, 1), alone(2), alone(3))
    node.controller.turn()
    node.turn_agent(0)
    node.turn_agent(1)
    node.hung = {1}  # prepared; it will not see the commit
    node.settle()
    node.run_for(node.config.prepare_timeout_seconds, tick=1.0)
    assert failure(node, call).status == 503
    assert killed(node) == {0, 1}


@pytest.mark.parametrize("dead", [0, 1])
def test_death_in_a_bound_group_takes_the_group(dead: int) -> None:
    node = started()
    node.switch(tp(0, 1), tp(2, 3))
    busy(node)
    lost = {r for r, unit in node.placed().items() if unit == tp(0, 1)}
    node.kill(dead)
    for engine in (0, 1):
        node.agents.pop(engine, None)
    node.settle()
    assert killed(node) == {0, 1}
    assert_gone_on(node, lost)
    assert node.partition == (alone(0), alone(1), tp(2, 3))
    node.switch(*ALONE)
    assert_sound(node)


@pytest.mark.parametrize("dead", [0, 1])
def test_death_while_a_group_is_paused_gives_survivors_their_blocks(dead: int) -> None:
    node = started()
    node.switch(tp(0, 1), tp(2, 3))
    busy(node, tokens=40)
    node.switch(*ALONE)
    paused = {r for r, unit in node.placed().items() if unit == tp(0, 1)}
    assert paused <= set(node.missing)
    assert node.backends[1 - dead].own.lent
    node.kill(dead)
    node.settle()
    assert_gone_on(node, paused)
    assert killed(node) == {dead}
    assert node.backends[1 - dead].own.lent == frozenset()
    node.switch(alone(0), alone(1), tp(2, 3))
    assert_sound(node)


def test_member_that_dies_while_it_resumes_dies_alone() -> None:
    node = started(faults={1: Faults(die_at=Seam.TAKE_BACK)})
    node.switch(tp(0, 1), tp(2, 3))
    call = node.set_layout(*ALONE)
    node.settle()
    assert failure(node, call).status == 503
    assert killed(node) == {1}
    # Both groups were formed before the switch. Only that of engines 2 and 3 is whole still.
    assert node.partition == (alone(0), alone(1), tp(2, 3))
    node.send("after", 10, 4)
    node.settle()
    assert_sound(node)


def test_leader_that_does_not_release_takes_the_group() -> None:
    node = started()
    node.switch(tp(0, 1), tp(2, 3))
    node.hung = {0}
    call = node.set_layout(*ALONE)
    node.settle()
    node.run_for(node.config.prepare_timeout_seconds, tick=1.0)
    assert failure(node, call).status == 503
    assert killed(node) == {0, 1}
    assert node.partition == (alone(0), alone(1), tp(2, 3))


def test_member_that_does_not_resume_is_left_alone() -> None:
    node = started()
    node.switch(tp(0, 1), tp(2, 3))
    node.hung = {1}
    call = node.set_layout(*ALONE)
    node.settle()
    node.run_for(node.config.prepare_timeout_seconds, tick=1.0)
    assert failure(node, call).status == 504
    assert node.view().engines[1].state == "silent"
    assert killed(node) == set()
    node.hung = set()
    node.settle()
    node.switch(*ALONE)
    assert_sound(node)


def test_every_engine_dead_leaves_nothing_waiting() -> None:
    node = started()
    busy(node, requests=40)
    for engine in range(4):
        node.kill(engine)
    node.settle()
    assert node.missing == []
    assert not node.view().ready
    node.send("late", 10, 3)
    node.utility("is_sleeping")
    node.settle()
    assert node.finish["late"] is FinishReason.ERROR
    assert node.utilities[-1].failure_message is not None


def test_late_answer_is_dropped_and_counted() -> None:
    node = started()
    node.agents[0]._transport.to_controller(m.Prepared(77, 0, [1, 2], 0))
    node.agents[0]._transport.to_controller(m.Resumed(77, 0, 0))
    node.settle()
    assert node.controller.books.statistics.stale.total() == 2
    assert node.partition == singles(4)
    assert_sound(node)
