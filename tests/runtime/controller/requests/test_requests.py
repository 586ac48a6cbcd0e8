"""A request's way through the controller, from its arrival to its end."""

import msgspec
import pytest

from shoal.policies import registry
from shoal.policies.values.layouts import alone
from shoal.policies.values.plan import Dispatch, Plan, Policy
from shoal.runtime.config import QUEUED_AHEAD, FakeSettings
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.loopback import LoopbackNetwork
from shoal.runtime.protocol.messages import Outcome
from shoal.runtime.protocol.transport import Channel, engine_identity
from tests.runtime.loopback_node import SMALL, LoopbackNode, request_payload
from tests.units import tp

TINY = FakeSettings(num_blocks=8, block_tokens=4, max_num_seqs=2, max_model_len=60)


def started(engines: int = 2, **settings) -> LoopbackNode:
    node = LoopbackNode(engines, **settings)
    node.settle()
    return node


def test_front_ends_are_greeted_once_every_engine_is_ready() -> None:
    node = LoopbackNode(2, settings=TINY)
    node.controller.turn()
    assert set(node.network.greetings) == {0, 1}
    ready = msgspec.msgpack.decode(node.network.greetings[1])
    # One engine holds 32 tokens, two together hold the 60 that the model allows.
    assert (ready["max_model_len"], ready["num_gpu_blocks"]) == (60, 16)


def test_no_greeting_before_the_last_engine_is_ready() -> None:
    node = LoopbackNode(2)
    queues = list(node.network.to_controller.values())
    last = queues[-1].popleft()
    node.controller.turn()
    assert not node.network.greetings
    view_call = node.call(m.GetLayout)
    node.controller.turn()
    view = node.reply(view_call)
    assert isinstance(view, m.LayoutView)
    assert (view.ready, view.reason) == (False, "engines [1] are starting")
    queues[-1].append(last)
    node.controller.turn()
    assert len(node.network.greetings) == 2


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_requests_end_to_end(seed: int | None) -> None:
    node = started(4, seed=seed)
    for k in range(60):
        node.send(f"r{k}", 1 + k, 1 + k % 9, client=k % 2)
    node.settle()
    node.assert_exact()
    assert node.missing == []
    assert node.outcomes == {Outcome.FINISHED: 60}
    assert len(set(node.placed().values())) == 4
    assert node.audit() == []


def test_outputs_and_notes_go_to_the_front_end_that_asked() -> None:
    node = started()
    node.send("mine", client=1)
    node.network.front_outputs.clear()
    node.controller.turn()
    for engine in node.agents:
        node.turn_agent(engine)
        node.turn_agent(engine)
    assert set(node.network.front_outputs) == {1}
    (note,) = node.network.control_replies["front-1"]
    assert note == m.Placed("mine", alone(0))


def test_request_waits_in_the_pool_until_it_can_start() -> None:
    node = started(settings=TINY)
    for k in range(7):
        node.send(f"r{k}", 4, 3)
    node.controller.turn()
    call = node.call(m.GetLayout)
    node.controller.turn()
    view = node.reply(call)
    assert isinstance(view, m.LayoutView)
    assert view.waiting == 7 - 2 * (TINY.max_num_seqs + QUEUED_AHEAD)
    node.settle()
    assert node.missing == []


def test_priority_then_arrival() -> None:
    node = started(1, settings=TINY)
    for name, priority in [("a", 0), ("b", 0), ("c", 5), ("d", 5), ("e", -1), ("f", 0)]:
        node.send(name, 4, 3, priority=priority)
    node.settle()
    assert list(node.placed()) == ["e", "a", "b", "f", "c", "d"]


def test_request_that_lacks_blocks_is_not_overtaken() -> None:
    node = started(1, settings=TINY)
    node.send("first", 20, 3)
    node.send("large", 24, 3)
    node.send("small", 4, 3)
    node.settle()
    assert list(node.placed()) == ["first", "large", "small"]
    node.assert_exact()


def test_request_that_nobody_can_hold_ends_with_an_error() -> None:
    node = started(settings=TINY)
    node.send("largest", 59, 1)
    node.send("beyond", 60, 1)
    node.settle()
    assert node.missing == ["largest"]
    assert node.finish["beyond"] is wire.FinishReason.ERROR
    assert node.outcomes[Outcome.TOO_LONG] == 1


def test_bound_beyond_the_model_asks_for_no_group() -> None:
    node = started(settings=TINY)
    node.send("open-ended", 10, 50)
    node.settle()
    assert node.placed()["open-ended"] == alone(0)
    # It ends where one engine ends.
    assert len(node.tokens["open-ended"]) == 32 - 10


def test_bound_that_only_a_group_can_reach_asks_for_one() -> None:
    node = started(settings=TINY)
    node.send("bounded", 10, 40)
    node.settle()
    assert node.missing == ["bounded"]
    node.switch(tp(0, 1))
    node.assert_exact()
    assert node.missing == []


def test_abort_in_the_pool() -> None:
    node = started(1, settings=TINY)
    for k in range(4):
        node.send(f"r{k}", 4, 3)
    node.abort("r3")
    node.settle()
    assert "r3" not in node.tokens
    assert node.outcomes == {Outcome.FINISHED: 3, Outcome.ABORTED: 1}


def test_abort_while_it_runs() -> None:
    node = started(1)
    node.send("a", 10, 300)
    node.controller.turn()
    for _ in range(4):
        node.turn_agent(0)
    node.abort("a")
    node.settle()
    node.assert_exact()
    assert 0 < len(node.tokens["a"]) < 300
    assert node.backends[0].own.load.free_blocks == SMALL.num_blocks
    assert node.outcomes == {Outcome.ABORTED: 1}


def test_abort_while_it_is_paused() -> None:
    node = started()
    node.send("a", 10, 300)
    node.controller.turn()
    node.turn_agent(0)
    node.switch(tp(0, 1))
    node.abort("a")
    node.settle()
    assert node.backends[0].own.num_requests == 0
    node.switch(alone(0), alone(1))
    assert node.audit() == []


def test_abort_of_an_unknown_request_is_nothing() -> None:
    node = started()
    node.abort("never")
    node.settle()
    assert node.outcomes == {}


def test_request_of_an_id_that_lives_is_dropped() -> None:
    node = started(1)
    node.send("a", 10, 20)
    node.send("a", 10, 20)
    node.settle()
    node.assert_exact()
    assert node.outcomes == {Outcome.FINISHED: 1}


@pytest.mark.parametrize(
    "frames", [[b"\x00", b"\xc1"], [b"\x00", b"\x90"], [b"\x01", b"\xff"], [b"\x09", b""]]
)
def test_malformed_messages_are_dropped(frames: list[bytes]) -> None:
    node = started()
    node.network.post(*front_post(frames))
    node.send("a")
    node.settle()
    node.assert_exact()
    assert node.missing == []


def front_post(frames: list[bytes]):
    return Channel.FRONT, "front-0", frames


@pytest.mark.parametrize("ready", [(), (0,), (1,)])
def test_a_switch_before_all_engines_are_ready_is_refused(ready: tuple[int, ...]) -> None:
    node = LoopbackNode(2)
    for engine in {0, 1} - set(ready):
        node.network.to_controller.pop((Channel.ENGINE, engine_identity(engine)))
    node.hung = {0, 1} - set(ready)
    call = node.set_layout((0, 1))
    node.settle()
    reason = f"engines {sorted(node.hung)} are starting"
    assert node.reply(call) == m.CallFailed(call, 503, reason)


def test_note_to_a_front_end_that_is_not_there_is_no_error() -> None:
    node = started()
    payload = request_payload("a", [1, 2], 2, client=1)
    node.network.front_sends(1, wire.RequestType.ADD, payload)
    node.settle()
    assert node.finish["a"] is wire.FinishReason.LENGTH


# --- policies inside the loop ---


def test_static_tp_forms_the_largest_groups_by_itself() -> None:
    node = started(4, max_group=2, policy="static-tp")
    assert node.partition == (tp(0, 1), tp(2, 3))
    node.send("a")
    node.settle()
    assert node.missing == []


def test_static_tp_goes_on_without_dead_engines() -> None:
    node = started(4, max_group=2, policy="static-tp")
    node.kill(3)
    node.settle()
    assert node.partition == (tp(0, 1), alone(2), alone(3))
    node.send("a")
    node.send("b")
    node.settle()
    assert node.missing == []


def test_failed_switch_of_a_policy_is_not_repeated_at_once() -> None:
    node = LoopbackNode(2, policy="static-tp")
    node.hung = {1}
    node.settle()
    for seconds in (700, 10):  # for the requests there could be, then for an answer to the abort
        node.clock.advance(seconds)
        node.settle()
    assert [switch.outcome for switch in node.controller.switches] == ["failed"]
    node.hung = set()
    node.run_for(6.0, tick=1.0)
    assert node.partition == (tp(0, 1),)


def raising(snapshot):
    raise ZeroDivisionError("a policy's mistake")


def overfull(snapshot):
    return Plan(tuple(Dispatch(r.request_id, snapshot.partition[0]) for r in snapshot.pool))


def misaligned(snapshot):
    return Plan(target=(alone(0), (1, 2), alone(3)))


@pytest.mark.parametrize("plan", [raising, overfull, misaligned])
def test_policy_that_errs_changes_nothing(plan, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setitem(registry.POLICIES, "bad", Policy("bad", plan, decides_layout=False))
    node = started(4, policy="bad")
    for k in range(20):
        node.send(f"r{k}")
    node.settle()
    assert len(node.pool) == 20
    assert node.partition == (alone(0), alone(1), alone(2), alone(3))
    assert "policy bad" in caplog.text


def test_unknown_policy_is_named() -> None:
    with pytest.raises(
        registry.UnknownPolicyError, match="choose one of adaptive, batch, flying, manual"
    ):
        LoopbackNode(2, policy="none-such")


def test_loopback_delivers_in_order() -> None:
    import random

    network = LoopbackNetwork(random.Random(4))
    agent = network.agent(0)
    for k in range(50):
        network.controller.to_engine(0, m.CheckIntegrity(k))
    got: list[int] = []
    while len(got) < 50:
        got += [m.decode_to_engine(frames[0]).call for frames in agent.receive()]
    assert got == list(range(50))
