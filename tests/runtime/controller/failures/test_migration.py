"""Engines that die: what their requests have, where they go on, and who is to blame."""

import pytest

from shoal.policies.values.layouts import alone
from shoal.runtime.config import FakeSettings
from shoal.runtime.controller.books.request_book import RequestBook
from shoal.runtime.controller.failures.migration import REMEMBERED_SECONDS
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.messages import Outcome
from shoal.runtime.protocol.transport import Channel, front_identity
from shoal.runtime.protocol.wire import FinishReason
from shoal.server.frontend.interruptions import OVERDUE_SECONDS, Interruptions
from tests.runtime.loopback_node import LoopbackNode, request_payload
from tests.units import tp

HARD, SOFT = m.Treatment.HARD, m.Treatment.SOFT


def started(engines: int = 2, **settings) -> LoopbackNode:
    node = LoopbackNode(engines, **settings)
    node.settle()
    return node


def running(tokens: int = 40, turned: int = 8, **settings) -> LoopbackNode:
    """Return a node whose engine 0 has one request, in the middle; its tokens are not read yet."""
    node = started(**settings)
    node.send("r", 10, tokens)
    node.turns(turned)
    assert node.placed()["r"] == alone(0)
    return node


def assert_whole(node: LoopbackNode) -> None:
    """Every request has all of its tokens, each once, and is counted once."""
    assert node.missing == []
    node.assert_exact()
    assert set(node.finish.values()) == {FinishReason.LENGTH}
    assert node.outcomes == {Outcome.FINISHED: len(node.prompts)}
    assert node.audit() == []


def migrated(node: LoopbackNode) -> float:
    return node.value("shoal_requests_migrated_total")


# --- where a death strikes ---


def test_between_two_outputs() -> None:
    node = running()
    node.collect()
    assert 0 < len(node.tokens["r"]) < 40
    node.kill(0)
    node.settle()
    assert node.placed()["r"] == alone(1)
    assert migrated(node) == 1
    assert_whole(node)


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_the_last_outputs_die_with_the_engine(keep: int) -> None:
    node = running()
    assert len(node.hold_outputs(0, keep=keep)) > 0
    node.kill(0)
    node.settle()
    assert_whole(node)


def test_before_the_first_output() -> None:
    node = started(settings=FakeSettings(step_seconds=1.0))
    node.send("r", 10, 5)
    node.turns(3)
    assert node.backends[0].own.in_flight
    node.kill(0)
    for _ in range(20):
        node.turns(2)
        node.collect()
        node.clock.advance(0.5)
    assert node.placed()["r"] == alone(1)
    assert_whole(node)


def test_after_the_last_output_before_the_controller_knows() -> None:
    node = started()
    node.send("r", 10, 6)
    while not node.finish:
        node.controller.turn()
        node.turn_agent(0)
        node.collect()
    node.network.to_controller.clear()  # its report dies with it
    node.kill(0)
    node.settle()
    assert node.placed()["r"] == alone(0), "it is not run again"
    assert migrated(node) == 0
    assert_whole(node)


def test_after_the_last_output_that_nobody_read() -> None:
    node = started()
    node.send("r", 10, 6)
    node.turns(3)
    while node.backends[0].own.num_requests:
        node.turn_agent(0)
    node.network.to_controller.clear()
    assert len(node.hold_outputs(0, keep=2)) > 1
    node.kill(0)
    node.settle()
    assert node.placed()["r"] == alone(1)
    assert_whole(node)


@pytest.mark.parametrize("when", ["before", "meanwhile", "after"])
def test_its_client_goes(when: str) -> None:
    node = running()
    node.collect()
    if when == "before":
        node.abort("r")
    node.kill(0)
    node.controller.turn()
    if when == "meanwhile":
        # The front end is asked, and has not answered.
        assert list(node.controller.books.requests.interrupted) == ["r"]
        node.abort("r")
        node.controller.turn()
    if when == "after":
        node.collect()
        node.controller.turn()
        node.abort("r")
    node.settle()
    assert node.outcomes == {Outcome.ABORTED: 1}
    assert node.controller.books.requests.interrupted == {}
    assert node.audit() == []


def test_late_outputs_are_dropped_and_counted() -> None:
    node = running()
    late = node.hold_outputs(0, keep=2)
    node.collect()
    node.kill(0)
    node.turns(1)
    node.collect()
    node.turns(6)
    node.deliver(late)
    node.settle()
    assert node.fronts[0].late == len(late)
    assert_whole(node)


def test_without_the_fence_a_late_output_repeats_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Interruptions, "_is_valid", lambda *_: True)
    with pytest.raises(AssertionError):
        test_late_outputs_are_dropped_and_counted()


def test_outputs_that_are_read_before_the_answer_count() -> None:
    """What the front end has let through, but not taken in, is no reason to repeat it."""
    node = running()
    front = node.fronts[0]
    front.interruptions.admit(alone(0), [])  # a message is being taken in
    node.kill(0)
    node.controller.turn()
    front.interruptions.interrupted(m.Interrupted({"r": 1}))
    node.controller.turn()
    assert "r" not in node.pool
    node.collect()
    node.settle()
    assert_whole(node)


# --- what it was doing ---


def test_a_moved_request_goes_on_from_all_of_its_tokens() -> None:
    node = running(tokens=60, engines=4)
    node.set_layout(tp(0, 1), tp(2, 3), treatment=SOFT)
    node.turns(20)
    node.collect()
    group = node.placed()["r"]
    assert group.size == 2
    assert 0 < len(node.tokens["r"]) < 60
    node.hold_outputs(*group.engines)
    node.kill(group.engines[1])
    node.agents.pop(group.leader)
    node.settle()
    assert_whole(node)


@pytest.mark.parametrize("forgotten", [False, True])
def test_tokens_of_a_moved_request_are_lost_that_has_ended_elsewhere(forgotten: bool) -> None:
    """The engine said what it had generated, and died before its outputs had left."""
    node = running(tokens=60)
    node.hold_outputs(0, keep=2)
    node.collect()
    node.set_layout(tp(0, 1), treatment=SOFT)
    for _ in range(4):
        node.turns(1)
        node.hold_outputs(0)
    node.settle()
    assert node.missing == ["r"]
    assert len(node.fronts[0].order) == 1, "it waits for what will not come"
    if forgotten:
        node.clock.advance(2 * REMEMBERED_SECONDS)
        node.send("later", 10, 5)
        node.settle()
    node.run_for(OVERDUE_SECONDS + 1.0, tick=0.5)
    if forgotten:
        assert node.ended()["r"].outcome is Outcome.LOST
        assert node.finish["r"] is FinishReason.ERROR
    else:
        assert_whole(node)


@pytest.mark.parametrize("kept", [0, 2, 5])
def test_the_report_of_the_end_comes_and_the_last_outputs_do_not(kept: int) -> None:
    node = started()
    node.send("r", 10, 6)
    node.turns(12)
    assert node.outcomes == {Outcome.FINISHED: 1}
    node.hold_outputs(0, keep=kept)
    node.kill(0)
    node.settle()
    assert node.placed()["r"] == alone(1)
    assert_whole(node)


def test_tokens_that_are_lost_after_a_move_are_computed_again() -> None:
    node = running(tokens=60, settings=FakeSettings(step_seconds=0.5), turned=3)
    for _ in range(4):
        node.clock.advance(0.5)
        node.turns(2)
    node.hold_outputs(0, keep=2)
    node.collect()
    node.set_layout(tp(0, 1), treatment=SOFT)
    for _ in range(4):
        node.turns(2)
        node.hold_outputs(0)
        node.clock.advance(0.5)
    for _ in range(200):
        node.turns(2)
        node.collect()
        node.fronts[0].interruptions.begin_overdue_again()
        node.clock.advance(0.5)
    assert len(node.fronts[0].order) == 0
    assert migrated(node) == 1
    assert_whole(node)


def test_paused_requests_go_on_elsewhere_and_are_not_to_blame() -> None:
    node = started(4)
    node.switch(tp(0, 1), tp(2, 3))
    for k in range(4):
        node.send(f"r{k}", 12, 30)
    node.turns(6)
    node.switch(alone(0), alone(1), alone(2), alone(3), treatment=HARD)
    paused = [r for r, unit in node.placed().items() if unit == tp(0, 1)]
    node.kill(1)
    node.turns(2)
    node.collect()
    interrupted = [node.controller.books.requests.interrupted.get(r) for r in paused]
    assert all(request is None or request.deaths == 0 for request in interrupted)
    node.settle()
    assert {node.placed()[r] for r in paused}.isdisjoint({tp(0, 1)})
    node.switch(alone(0), alone(1), tp(2, 3))
    assert_whole(node)


def test_a_request_of_another_front_end() -> None:
    node = started()
    node.send("r", 10, 40, client=1)
    node.turns(8)
    late = node.hold_outputs(0, keep=1)
    node.collect()
    node.kill(0)
    node.turns(1)
    node.collect()
    node.deliver(late)
    node.settle()
    assert (node.fronts[0].late, node.fronts[1].late) == (0, len(late))
    assert_whole(node)


def test_it_keeps_its_place_in_the_pool() -> None:
    node = started(settings=FakeSettings(max_num_seqs=1), queued_ahead=0)
    for name in ("a", "b", "c", "d"):
        node.send(name, 10, 40)
        node.turns(2)
        node.clock.advance(1.0)
    node.collect()
    assert set(node.placed()) == {"a", "b"}
    node.kill(0)
    node.turns(2)
    node.collect()
    node.turns(1)
    assert [request.id for request in node.pool.all()] == ["a", "c", "d"]
    node.settle()
    assert_whole(node)


# --- what cannot go on ---


def test_what_no_group_holds_any_more_ends_with_a_reason() -> None:
    node = started(settings=FakeSettings(num_blocks=8, block_tokens=4, max_model_len=60))
    node.switch(tp(0, 1))
    node.send("long", 40, 10)
    node.turns(6)
    node.collect()
    node.kill(1)
    node.agents.pop(0)
    node.settle()
    assert node.ended()["long"].outcome is Outcome.LOST


def test_what_a_unit_gives_back_when_no_group_holds_it_ends_with_a_reason() -> None:
    """The last group that holds it cannot be formed any more by the time its unit has written."""
    node = started(settings=FakeSettings(num_blocks=8, block_tokens=4, max_model_len=60))
    node.switch(tp(0, 1))
    node.send("long", 36, 15)
    node.turns(8)
    node.set_layout(alone(0), alone(1), treatment=SOFT)
    node.controller.books.engines.refuse(tp(0, 1), "its members do not meet")
    node.settle()
    assert node.missing == []
    assert node.ended()["long"].outcome is Outcome.LOST
    assert node.view().moves_total == 1


# --- who is to blame ---


POISON = 251


def send_poison(node: LoopbackNode) -> None:
    node.prompts["poison"] = ([POISON] * 4, 30)
    node.network.front_sends(0, wire.RequestType.ADD, request_payload("poison", [POISON] * 4, 30))


@pytest.mark.parametrize("first", [True, False])
def test_a_request_that_kills_engines_twice_is_failed_alone(first: bool) -> None:
    node = started(4, settings=FakeSettings(poison_token=POISON))
    if first:
        send_poison(node)
    for k in range(12):
        node.send(f"r{k}", 10, 30)
    node.turns(4)
    if not first:
        send_poison(node)
    node.settle()
    assert len(node.deaths) == 2
    note = node.ended()["poison"]
    assert (note.outcome, note.status) == (Outcome.POISONED, 500)
    assert "2 engines died of this request" in note.message
    innocent = [why for r, why in node.finish.items() if r != "poison"]
    assert innocent == [FinishReason.LENGTH] * 12
    node.assert_exact()
    assert node.outcomes == {Outcome.FINISHED: 12, Outcome.POISONED: 1}
    assert node.audit() == []


def test_its_companions_are_to_blame_without_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestBook, "may_start", lambda *_: True)
    with pytest.raises(AssertionError):
        test_a_request_that_kills_engines_twice_is_failed_alone(first=False)


def test_suspects_start_one_at_a_time_in_a_unit() -> None:
    node = started(4)
    for k in range(12):
        node.send(f"r{k}", 10, 40)
    node.turns(6)
    node.collect()
    node.kill(0)
    most = 0
    for _ in range(60):
        node.turns(1)
        node.collect()
        cores = node.controller.books.requests.cores.values()
        most = max(most, *(sum(r.suspect for r in c.requests.values()) for c in cores))
    assert most == 1
    node.settle()
    assert_whole(node)


def test_a_suspect_whose_output_is_known_late_is_not_guilty() -> None:
    """Its front end has an output when its second engine dies, and the controller hears it then."""
    node = running(tokens=60, engines=3)
    node.collect()
    node.kill(0)
    node.turns(2)
    node.collect()
    node.turns(8)
    second = node.placed()["r"]
    assert second != alone(0)
    node.collect()
    front = Channel.CONTROL, front_identity(0)
    goes_on = node.network.to_controller.pop(front)
    node.kill(second.leader)
    node.controller.turn()
    assert node.controller.books.requests.interrupted["r"].guilty
    node.network.to_controller[front] = goes_on
    node.settle()
    assert_whole(node)


@pytest.mark.parametrize("over", [False, True])
def test_a_report_that_comes_twice_counts_once(over: bool) -> None:
    """A front end missed outputs, and the controller asked for them meanwhile."""
    node = running()
    node.collect()
    node.kill(0)
    node.turns(1)
    node.collect()
    front = Channel.CONTROL, front_identity(0)
    (report,) = node.network.to_controller[front]
    node.turns(200 if over else 8)
    assert node.outcomes == ({Outcome.FINISHED: 1} if over else {})
    node.network.post(*front, report)
    node.settle()
    assert migrated(node) == 1
    assert_whole(node)


def test_an_earlier_report_is_no_answer() -> None:
    """The report is from before the request went on, and its next engine has died since."""
    node = running(engines=3)
    node.collect()
    node.kill(0)
    node.turns(1)
    node.collect()
    front = Channel.CONTROL, front_identity(0)
    (report,) = node.network.to_controller[front]
    node.turns(8)
    node.collect()
    node.turns(1)
    node.kill(node.placed()["r"].leader)
    node.controller.turn()
    node.network.post(*front, report)
    node.controller.turn()
    assert list(node.controller.books.requests.interrupted) == ["r"]
    node.settle()
    assert migrated(node) == 2
    assert_whole(node)


def test_whom_the_engine_never_computed_is_no_suspect() -> None:
    node = started(settings=FakeSettings(max_num_seqs=1))
    for k in range(4):
        node.send(f"r{k}", 10, 40)
    node.turns(6)
    node.collect()
    waiting = [r for r in ("r0", "r1", "r2", "r3") if not node.tokens.get(r)]
    assert len(waiting) == 2
    assert {node.placed()[r] for r in waiting} == {alone(0), alone(1)}
    node.kill(0)
    node.controller.turn()
    blamed = {r.id: r.deaths for r in node.controller.books.requests.interrupted.values()}
    assert sorted(blamed.values()) == [0, 1]
    assert all(blamed[r] == 0 for r in waiting if r in blamed)
    node.settle()
    assert_whole(node)


def test_retries_are_bounded() -> None:
    node = started(4, max_retries=1)
    node.send("r", 10, 60)
    for _ in range(2):
        for _ in range(6):
            node.turns(1)
            node.collect()
        node.turns(1)
        node.kill(node.placed()["r"].leader)
    node.settle()
    note = node.ended()["r"]
    assert (note.outcome, note.status) == (Outcome.LOST, 500)
    assert "2 engines died while they had this request" in note.message
    assert migrated(node) == 1


def test_no_retries_at_all() -> None:
    node = running(max_retries=0)
    node.collect()
    node.kill(0)
    node.settle()
    assert node.ended()["r"].outcome is Outcome.LOST


def test_an_engine_that_a_signal_stopped_did_not_die_of_its_requests() -> None:
    node = running(restart_limit=5)
    node.collect()
    del node.agents[1]  # it is stopped, and nobody knows
    node.kill(0)
    node.turns(2)
    node.collect()
    node.turns(2)
    (suspect,) = node.controller.books.requests.core(alone(1)).computed
    assert suspect.suspect
    stopped = m.EngineDied(1, "stopped", m.DeathCause.STOPPED, restarts=True)
    node.network.control_sends("supervisor", stopped)
    node.turns(2)
    node.collect()
    node.turns(1)
    assert node.outcomes == {}
    node.restart(0)
    node.settle()
    assert_whole(node)


def test_an_attempt_is_told_from_the_one_before() -> None:
    terms = wire.Terms(caller="me")
    frames = request_payload("r", [1, 2, 3], 9, terms=terms)
    view = wire.decode_request(wire.mark_attempt(frames, 2))
    assert wire.attempt_of(view.headers) == 2
    assert view.terms == terms
    assert wire.attempt_of(None) == wire.attempt_of({}) == 0
