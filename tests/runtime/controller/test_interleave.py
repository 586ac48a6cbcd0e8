"""Interleave: requests of single engines go on beside those of the group their engines form."""

import msgspec
import pytest

from shoal.policies.values.layouts import alone
from shoal.runtime.config import FakeSettings
from shoal.runtime.controller.requests.pauses import PAUSE_SECONDS
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.wire import FinishReason
from tests.runtime.loopback_node import SMALL, LoopbackNode, request_payload
from tests.units import tp

SEQUENTIAL, SOFT, HARD, INTERLEAVE = m.Treatment
ALONE = (alone(0), alone(1), alone(2), alone(3))
PAIR = (tp(0, 1), alone(2), alone(3))


ROOMY = FakeSettings(num_blocks=1000, block_tokens=4, max_num_seqs=8, max_model_len=400)


def started(settings: FakeSettings = ROOMY, **limits) -> LoopbackNode:
    node = LoopbackNode(4, settings=settings, **limits)
    node.settle()
    return node


def turns(node: LoopbackNode, count: int) -> None:
    """Give everybody so many turns: with steps of no time, about one token each."""
    for _ in range(count):
        node.controller.turn()
        for engine in sorted(set(node.agents) - node.hung):
            node.turn_agent(engine)
    node.collect()


def switch(node: LoopbackNode, *units, treatment: m.Treatment = INTERLEAVE) -> m.SwitchDone:
    """Switch while requests go on."""
    call = node.set_layout(*units, treatment=treatment)
    for _ in range(400):
        turns(node, 1)
        if (reply := node.reply(call)) is not None:
            assert isinstance(reply, m.SwitchDone), reply
            return reply
    raise AssertionError("the switch takes for ever")


def busy(*units, requests: int = 8, tokens: int = 300, **limits) -> LoopbackNode:
    """Return a node whose engines decode, interleaved with those of the units."""
    node = started(**limits)
    for k in range(requests):
        node.send(f"own-{k}", 10, tokens)
    turns(node, 4)
    if units:
        switch(node, *units)
    return node


def unit(node: LoopbackNode, *engines: int):
    call = node.call(m.GetLayout)
    node.controller.turn()
    reply = node.reply(call)
    assert isinstance(reply, m.LayoutView)
    return next(unit for unit in reply.units if unit.engines == engines)


def own_requests(node: LoopbackNode, engine: int) -> set[str]:
    return set(node.controller.books.requests.core(alone(engine)).requests)


def count_tokens(node: LoopbackNode, requests: set[str]) -> int:
    return sum(len(node.tokens.get(request, [])) for request in requests)


def assert_sound(node: LoopbackNode) -> None:
    assert node.missing == []
    node.assert_exact()
    assert FinishReason.ERROR not in node.finish.values()
    assert node.audit() == []


def test_nobody_pauses_moves_or_waits() -> None:
    node = busy()
    view = switch(node, tp(0, 1), tp(2, 3)).switch
    assert (view.paused, view.resumed, view.drained, view.moved) == (0, 0, 0, 0)
    assert len(node.missing) == 8, "nobody was waited for"
    assert unit(node, 0, 1).interleaved_requests == 4
    assert unit(node, 0, 1).paused_requests == 0
    assert node.audit() == []
    node.settle()
    assert_sound(node)


def test_own_requests_and_the_groups_go_on_in_the_set_ratio() -> None:
    node = busy(tp(0, 1), alone(2), alone(3), requests=4, interleave_ratio=3)
    for k in range(4):
        node.send(f"shared-{k}", 8, 250)
    turns(node, 20)
    shared = {r for r, where in node.placed().items() if where == tp(0, 1)}
    own = own_requests(node, 0)
    assert shared
    assert len(own) == 1
    before = count_tokens(node, shared), count_tokens(node, own)
    turns(node, 90)
    group = (count_tokens(node, shared) - before[0]) / len(shared)
    solo = count_tokens(node, own) - before[1]
    assert solo >= 15
    assert group / solo == pytest.approx(3, rel=0.15)
    node.settle()
    assert_sound(node)


def test_whoever_is_left_alone_has_every_step() -> None:
    node = busy(*PAIR, requests=4)
    own = own_requests(node, 0)
    before = count_tokens(node, own)
    turns(node, 40)
    assert count_tokens(node, own) - before >= 39


def test_new_requests_go_to_the_group() -> None:
    node = busy(tp(0, 1), tp(2, 3))
    node.send("new", 10, 5)
    turns(node, 2)
    assert node.placed()["new"] in [tp(0, 1), tp(2, 3)]


def test_a_release_leaves_own_requests_alone() -> None:
    node = busy(*PAIR)
    own = own_requests(node, 0)
    view = switch(node, *ALONE, treatment=HARD).switch
    assert (view.paused, view.resumed) == (0, 0)
    assert own_requests(node, 0) == own
    before = count_tokens(node, own)
    turns(node, 10)
    assert count_tokens(node, own) - before >= 9 * len(own)
    node.settle()
    assert_sound(node)


def test_a_release_waits_for_the_groups_requests() -> None:
    node = busy(*PAIR, tokens=380)
    for k in range(6):
        node.send(f"shared-{k}", 10, 30)
    turns(node, 4)
    shared = {r for r, where in node.placed().items() if where == tp(0, 1)}
    assert shared
    view = switch(node, *ALONE).switch
    assert (view.drained, view.paused) == (len(shared), 0)
    assert shared <= set(node.finish)
    assert own_requests(node, 0), "its own requests were not waited for"
    node.settle()
    assert_sound(node)


def test_a_release_that_takes_too_long_changes_nothing() -> None:
    node = busy(*PAIR)
    for k in range(6):
        node.send(f"shared-{k}", 10, 200)
    turns(node, 4)
    call = node.set_layout(*ALONE, treatment=INTERLEAVE, timeout=2.0)
    turns(node, 2)
    node.clock.advance(2.0)
    turns(node, 4)
    reply = node.reply(call)
    assert isinstance(reply, m.CallFailed)
    assert reply.status == 504
    assert node.partition == PAIR
    assert unit(node, 0, 1).interleaved_requests > 0
    node.settle()
    assert_sound(node)


def test_a_hard_bind_that_follows_pauses_everybody() -> None:
    node = busy(tp(0, 1), tp(2, 3))
    view = switch(node, tp(0, 1, 2, 3), treatment=HARD).switch
    assert view.paused == 8
    assert unit(node, 0, 1, 2, 3).paused_requests == 8
    assert unit(node, 0, 1, 2, 3).interleaved_requests == 0
    before = count_tokens(node, set(node.prompts))
    turns(node, 10)
    assert count_tokens(node, set(node.prompts)) == before
    assert node.switch(*ALONE, treatment=HARD).resumed == 8
    assert_sound(node)


def test_a_hard_bind_of_the_same_group_pauses_them_the_next_time() -> None:
    node = busy(*PAIR)
    switch(node, *ALONE, treatment=HARD)
    assert switch(node, *PAIR, treatment=HARD).switch.paused == 4
    assert unit(node, 0, 1).interleaved_requests == 0
    assert unit(node, 0, 1).paused_requests == 4
    node.switch(*ALONE)
    assert_sound(node)


def test_a_soft_bind_that_follows_moves_everybody() -> None:
    node = busy(tp(0, 1), tp(2, 3))
    assert switch(node, tp(0, 1, 2, 3), treatment=SOFT).switch.moved == 8
    node.settle()
    assert {where for r, where in node.placed().items()} >= {tp(0, 1, 2, 3)}
    assert_sound(node)


def test_a_sequential_bind_that_follows_waits_for_everybody() -> None:
    node = busy(tp(0, 1), tp(2, 3), tokens=40)
    assert switch(node, tp(0, 1, 2, 3), treatment=SEQUENTIAL).switch.drained == 8
    assert_sound(node)


def test_a_wider_group_takes_interleaving_members_as_they_are() -> None:
    node = busy(tp(0, 1), tp(2, 3))
    view = switch(node, tp(0, 1, 2, 3)).switch
    assert (view.paused, view.drained, view.moved) == (0, 0, 0)
    assert unit(node, 0, 1, 2, 3).interleaved_requests == 8
    node.settle()
    assert_sound(node)


def test_requests_paused_in_another_group_stay_paused() -> None:
    node = started()
    node.switch(*PAIR)
    for k in range(6):
        node.send(f"r{k}", 10, 60)
    turns(node, 6)
    paused = node.switch(*ALONE, treatment=HARD).paused
    assert paused > 0
    view = node.switch(tp(0, 1, 2, 3), treatment=INTERLEAVE)
    assert (view.paused, view.resumed) == (0, 0)
    assert unit(node, 0, 1, 2, 3).paused_requests == paused
    node.switch(*PAIR)
    assert_sound(node)


def test_interleaved_requests_can_be_aborted() -> None:
    node = busy(tp(0, 1), tp(2, 3))
    for request in sorted(node.prompts):
        node.abort(request)
    node.settle()
    assert unit(node, 0, 1).interleaved_requests == 0
    assert_sound(node)


def test_death_of_a_member_takes_what_is_on_the_group() -> None:
    node = busy(*PAIR)
    node.send("shared", 10, 200)
    turns(node, 3)
    interrupted = own_requests(node, 0) | own_requests(node, 1)
    interrupted |= {r for r, where in node.placed().items() if where == tp(0, 1)}
    node.kill(1)
    node.agents.pop(0)
    node.settle()
    assert_sound(node)
    assert node.value("shoal_requests_migrated_total") == len(interrupted)


def test_a_failed_switch_lets_them_interleave_again() -> None:
    node = busy(*PAIR)
    own = own_requests(node, 0) | own_requests(node, 1)
    node.hung = {3}
    call = node.set_layout(tp(0, 1, 2, 3), treatment=HARD)
    turns(node, 20)
    node.clock.advance(node.config.prepare_timeout_seconds)
    turns(node, 20)
    assert isinstance(node.reply(call), m.CallFailed)
    assert node.partition == PAIR
    assert unit(node, 0, 1).interleaved_requests == len(own)
    node.hung = set()
    node.settle()
    assert_sound(node)


# --- blocks ---


def test_a_group_waits_for_blocks_that_own_requests_hold() -> None:
    node = started(SMALL)
    for k in range(4):
        node.send(f"own-{k}", 190, 40)
    turns(node, 4)
    switch(node, tp(0, 1, 2, 3))
    node.send("wide", 380, 10)
    turns(node, 20)
    assert node.placed()["wide"] == tp(0, 1, 2, 3)
    assert "wide" not in node.tokens
    node.run_for(1.0)
    assert_sound(node)
    loads = [node.controller.books.requests.core(alone(engine)).load for engine in range(4)]
    computed = [load.done(m.Mode.TP).prefilling.prefill_tokens for load in loads]
    assert computed == [190] * 4, "preempted"


def test_own_requests_that_a_busy_group_leaves_no_block_move_into_it() -> None:
    """Where nobody knew what they would need: their output is bounded by the model's length."""
    node = started(SMALL)
    node.send("own", 100, 156)
    turns(node, 4)
    unit = node.placed()["own"]
    switch(node, tp(0, 1, 2, 3))
    node.send("shared", 10, 380)
    turns(node, 40)
    assert node.backends[unit.leader].own.load.running == 0
    node.clock.advance(PAUSE_SECONDS)
    turns(node, 1)
    assert node.placed()["own"] == unit
    node.clock.advance(0.1)
    turns(node, 6)
    assert node.placed()["own"] == tp(0, 1, 2, 3)
    node.run_for(2.0)
    assert_sound(node)


def test_pinned_requests_are_waited_for_by_a_soft_switch() -> None:
    node = started()
    payload = request_payload("pinned", [7] * 10, 200)
    fields = msgspec.msgpack.decode(payload[0])
    fields[3]["presence_penalty"] = 0.5
    node.prompts["pinned"] = ([7] * 10, 200)
    node.network.front_sends(0, wire.RequestType.ADD, [msgspec.msgpack.encode(fields)])
    turns(node, 4)
    switch(node, *PAIR)
    view = switch(node, tp(0, 1, 2, 3), treatment=SOFT).switch
    assert (view.moved, view.drained) == (0, 1)
    assert_sound(node)
