"""Carries, with engines that the test plays: each stage, and each failure in each stage."""

from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from shoal.policies.values.layouts import Unit, alone
from shoal.runtime.controller.books.capacity import LEASE_BLOCKS
from shoal.runtime.controller.books.statistics import PAUSE, SWITCH
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages import Fallback, Outcome
from shoal.runtime.protocol.transport import front_identity
from tests.runtime.controller.scripted_node import BLOCK_TOKENS, BLOCKS, ScriptedNode
from tests.units import tp

PAIR, OTHER_PAIR, ALL = tp(0, 1), tp(2, 3), tp(0, 1, 2, 3)
SINGLES = tuple(alone(engine) for engine in range(4))


def described(*request_ids: str, tokens: int = 2) -> list[m.CarriedRequest]:
    """Return requests as a source describes them."""
    blocks = {0: [[1, 2, 3]]}
    return [m.CarriedRequest(each, [7] * tokens, 11, blocks, 12) for each in request_ids]


def node_with(**on: Unit) -> ScriptedNode:
    """Return a node of two engines, or of four if a unit needs them, with requests on these units.

    The units are the node's layout.
    """
    engines = 4 if any(engine > 1 for unit in on.values() for engine in unit.engines) else 2
    node = ScriptedNode(engines)
    groups = sorted({unit for unit in on.values() if unit.is_group})
    grouped = {engine for unit in groups for engine in unit.engines}
    layout = sorted([*groups, *(alone(e) for e in range(engines) if e not in grouped)])
    if groups:
        node.view(node.switch(*layout, treatment=m.Treatment.HARD))
        for unit in groups:
            node.load(unit, 8)
    for request_id, unit in on.items():
        node.books.requests.place(request_of(node, request_id), unit)
    node.take()
    return node


def request_of(node: ScriptedNode, request_id: str) -> Any:
    """Return a request that has come and waits in no pool."""
    node.mute = set(range(len(node.books.engines)))
    node.send(request_id)
    node.mute = set()
    waiting = node.books.requests.pool.remove(request_id)
    return waiting or node.books.requests.remove(request_id)


def exporting() -> tuple[ScriptedNode, int]:
    """Return a node that goes from two engines to a pair, and the number of its switch."""
    node = node_with(a=alone(0), b=alone(1))
    return node, node.switch(PAIR)


def importing() -> tuple[ScriptedNode, int]:
    """Return such a node whose requests are on the way."""
    node, call = exporting()
    node.say(0, m.Exported(1, 0, alone(0), described("a")))
    node.answer(1, m.Exported(2, 1, alone(1), described("b")))
    assert node.books.requests.where("a") == PAIR
    node.take()
    return node, call


# --- the way of a carry ---


def test_expect_and_export_come_at_the_very_start() -> None:
    node = node_with(a=alone(0), b=alone(1))
    frames = node.books.requests.find("a").payload
    node.mute = {0, 1}
    node.switch(PAIR)
    node.mute = set()
    node.turn()
    told = node.take(m.Expect, m.Export)
    assert told == [
        (0, m.Expect(1, PAIR, {"a": frames}, {})),
        (0, m.Export(1, alone(0), ["a"])),
        (0, m.Expect(2, PAIR, told[2][1].frames, {})),
        (1, m.Export(2, alone(1), ["b"])),
    ]


def test_requests_stay_with_their_source_until_the_destination_is_bound() -> None:
    node = node_with(a=alone(0))
    node.mute = {1}
    node.switch(PAIR)
    node.answer(0, m.Exported(1, 0, alone(0), described("a")))
    assert node.books.requests.where("a") == alone(0)
    assert node.take(m.Import) == []
    node.mute = set()
    node.turn()
    assert node.books.requests.where("a") == PAIR
    assert node.take(m.Import) == [(0, m.Import(1, PAIR, alone(0), described("a")))]
    assert node.books.requests.find("a").tokens == (7, 7)
    assert node.books.requests.find("a").seen.prompt_tokens == 12


def test_front_ends_hear_where_a_request_goes_on() -> None:
    node, _ = exporting()
    node.answer(0, m.Exported(1, 0, alone(0), described("a")))
    notes = node.network.control_replies[front_identity(0)]
    assert m.CarriedOn(["a"], PAIR) in notes


def test_units_hear_of_requests_before_the_books_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    node, _ = exporting()
    sent, transport = list[type[m.Message]](), node.network.controller

    def note(send: Any, peer: Any, message: m.Message) -> None:
        sent.append(type(message))
        send(peer, message)

    for name in ("to_engine", "to_control"):
        monkeypatch.setattr(transport, name, partial(note, getattr(transport, name)))
    for number, engine, request_id in ((1, 0, "a"), (2, 1, "b")):
        node.say(engine, m.Load(engine, alone(engine), 0, 0, 9, 1, []))
        node.say(engine, m.Exported(number, engine, alone(engine), described(request_id)))
    node.controller.turn()
    assert sent[:4] == [m.Import, m.Import, m.CarriedOn, m.CarriedOn]
    assert {node.books.requests.where(name) for name in "ab"} == {PAIR}


def test_what_a_unit_says_of_requests_finds_the_books_done() -> None:
    """Its report comes in one batch with the answer that sent it the requests."""
    node, _ = exporting()
    node.say(0, m.Exported(1, 0, alone(0), described("a")))
    node.say(0, m.Load(0, PAIR, 0, 0, 9, 1, ["a"]))
    node.say(1, m.Exported(2, 1, alone(1), described("b")))
    node.turn()
    assert node.books.requests.where("a") is None
    assert node.value("shoal_requests_total", Outcome.FINISHED) == 1
    assert node.value("shoal_stale_messages_total") == 0


def test_other_work_waits_for_the_next_source(monkeypatch: pytest.MonkeyPatch) -> None:
    node, _ = exporting()
    done = list[None]()
    monkeypatch.setattr(node.controller._utility_calls, "tick", lambda: done.append(None))
    where = node.books.requests.where
    node.say(0, m.Exported(1, 0, alone(0), described("a")))
    node.controller.turn()
    assert (where("a"), done) == (alone(0), []), "not even the books are done"
    node.say(1, m.Exported(2, 1, alone(1), described("b")))
    node.controller.turn()
    assert (where("a"), where("b"), done) == (PAIR, PAIR, [None])


def test_a_source_that_is_late_holds_up_no_books() -> None:
    node, _ = exporting()
    node.say(0, m.Exported(1, 0, alone(0), described("a")))
    node.controller.turn()
    assert node.books.requests.where("a") == alone(0)
    node.controller.turn()  # nothing has come
    assert node.books.requests.where("a") == PAIR


def test_a_switch_is_over_when_all_have_been_taken_over() -> None:
    node, call = importing()
    node.answer(0, m.Imported(1, 0, PAIR, ["a"], {}, 0, 4096, 0.002, 1024))
    assert node.take() == [(0, m.Drop(alone(0), ["a"]))]
    assert node.reply(call) is None
    node.clock.advance(0.5)
    node.answer(0, m.Imported(2, 0, PAIR, [], {"b": Fallback.NO_ROOM}, 0, 0, 0.0))
    assert node.take() == [(1, m.Drop(alone(1), ["b"]))]
    view = node.view(call)
    assert (view.carried, view.recomputed, view.carried_bytes) == (1, {"no_room": 1}, 4096)
    assert (view.carry_seconds, view.paused, view.outcome) == (0.5, 0, "done")
    assert node.value("shoal_carried_requests_total", "carried") == 1
    assert node.value("shoal_carried_requests_total", "recomputed") == 1
    assert node.value("shoal_carry_fallbacks_total", "no_room") == 1
    assert node.value("shoal_carried_bytes_total", "peer") == 3072
    assert node.value("shoal_carried_bytes_total", "host") == 1024
    assert [node.value("shoal_carry_seconds", phase) for phase in ("export", "import", "copy")] == [
        *(2, 2, 1)
    ]


def test_portions_are_dropped_as_they_come() -> None:
    node = node_with(a=alone(0), b=alone(0))
    node.switch(PAIR)
    node.answer(0, m.Exported(1, 0, alone(0), described("a", "b")))
    node.take()
    node.answer(0, m.Imported(1, 0, PAIR, ["b"], {}, 1))
    assert node.take() == [(0, m.Drop(alone(0), ["b"]))]
    node.answer(0, m.Imported(1, 0, PAIR, ["a"], {}, 0))
    assert node.take() == [(0, m.Drop(alone(0), ["a"]))]


def full_and_exporting() -> tuple[ScriptedNode, int]:
    """Return what ``exporting`` does, with engines that have few blocks for the pair."""
    node = node_with(a=alone(0), b=alone(1))
    for unit in SINGLES[:2]:
        node.load(unit, 4)
    call = node.switch(PAIR)
    node.answer(0, m.Exported(1, 0, alone(0), described("a")))
    assert node.take(m.Import) == []
    return node, call


def test_where_blocks_are_short_all_sources_begin_together() -> None:
    node, _ = full_and_exporting()
    node.answer(1, m.Exported(2, 1, alone(1), described("b")))
    assert [(told.carry, told.more) for _, told in node.take(m.Import)] == [(1, True), (2, False)]


def test_where_there_are_enough_nobody_waits() -> None:
    node, _ = exporting()
    node.answer(0, m.Exported(1, 0, alone(0), described("a")))
    assert [(told.carry, told.more) for _, told in node.take(m.Import)] == [(1, False)]


def test_nobody_waits_for_a_source_that_is_late() -> None:
    node, _ = full_and_exporting()
    node.clock.advance(5.0)
    node.turn()
    told = [each for _, each in node.take(m.Import)]
    assert [(each.carry, each.more, len(each.requests)) for each in told] == [
        (2, False, 0),
        (1, False, 1),
    ]


def test_new_requests_start_while_only_carries_are_left() -> None:
    node, call = importing()
    node.load(PAIR, 8)
    node.send("new")
    assert node.added["new"].unit == PAIR
    assert node.reply(call) is None
    audit = node.call(m.AuditNode)
    assert node.reply(audit) is None, "no other operation starts"
    node.say(0, m.Imported(1, 0, PAIR, ["a"], {}, 0))
    node.answer(0, m.Imported(2, 0, PAIR, ["b"], {}, 0))
    assert isinstance(node.reply(audit), m.AuditDone)


def test_pairs_go_to_a_wider_group_directly() -> None:
    node = node_with(a=PAIR, b=OTHER_PAIR)
    call = node.switch(ALL)
    node.say(0, m.Exported(1, 0, PAIR, described("a")))
    node.answer(2, m.Exported(2, 2, OTHER_PAIR, described("b")))
    sources = [message.source for _, message in node.take(m.Import)]
    assert sources == [PAIR, OTHER_PAIR]
    node.say(0, m.Imported(1, 0, ALL, ["a"], {}, 0))
    node.answer(0, m.Imported(2, 0, ALL, ["b"], {}, 0))
    assert node.view(call).carried == 2


def test_a_groups_requests_are_divided_among_its_engines() -> None:
    node = node_with(**{f"r{k}": ALL for k in range(8)})
    node.switch(*SINGLES)
    sent = {message.unit: len(message.frames) for _, message in node.take(m.Expect)}
    assert sent == dict.fromkeys(SINGLES, 2)


def test_what_its_own_leader_takes_in_leaves_a_group_last() -> None:
    """The leader is busy with its exports until then, and the other engines wait."""
    node = node_with(**{f"r{k}": PAIR for k in range(4)}, c=OTHER_PAIR)
    node.switch(alone(0), alone(1), OTHER_PAIR)
    told = node.take(m.Expect, m.Export)
    destinations = {each.carry: each.unit for _, each in told if isinstance(each, m.Expect)}
    exports = [each.carry for _, each in told if isinstance(each, m.Export) and each.unit == PAIR]
    assert [destinations[carry] for carry in exports] == [alone(1), alone(0)]


def test_requests_go_to_units_that_share_an_engine_with_their_own() -> None:
    node = node_with(a=PAIR, b=PAIR, c=OTHER_PAIR)
    node.switch(alone(0), alone(1), OTHER_PAIR)
    assert {message.unit for _, message in node.take(m.Expect)} == {alone(0), alone(1)}


def test_what_has_ended_before_the_export_is_not_imported() -> None:
    node, _ = exporting()
    node.load(alone(0), BLOCKS, ("a",))
    node.answer(0, m.Exported(1, 0, alone(0), []))
    (import_,) = [message for _, message in node.take(m.Import) if message.carry == 1]
    assert import_.requests == []
    node.answer(0, m.Imported(1, 0, PAIR, [], {}, 0))
    assert node.value("shoal_stale_messages_total") == 0


def test_what_has_ended_before_the_export_does_not_count_as_paused() -> None:
    """The front ends, which say what has ended, may be late."""
    node, call = exporting()
    node.say(0, m.Exported(1, 0, alone(0), []))
    node.answer(1, m.Exported(2, 1, alone(1), []))
    view = node.view(call)
    assert (view.carried, view.paused, view.outcome) == (0, 0, "done")


def test_a_request_that_grew_too_long_for_its_destination_stays() -> None:
    node = node_with(a=PAIR)
    node.switch(*SINGLES[:2])
    node.answer(0, m.Exported(1, 0, PAIR, described("a", tokens=300)))
    told = node.take(m.Import, m.Keep)
    assert (0, m.Keep(PAIR, ["a"])) in told
    assert node.books.requests.where("a") == PAIR
    assert node.value("shoal_carried_requests_total", "kept") == 1


def test_the_answer_to_a_carry_that_is_over_is_stale() -> None:
    node, _ = importing()
    node.answer(0, m.Imported(9, 0, PAIR, ["a"], {}, 0))
    node.answer(0, m.Exported(1, 0, alone(0), described("a")))
    assert node.value("shoal_stale_messages_total") == 2


def test_suspects_go_through_the_pool() -> None:
    node = node_with(a=alone(0))
    core = node.books.requests.core(alone(0))
    core.replace(replace(core.requests["a"], suspect=True))
    node.switch(PAIR)
    assert node.take() == [(0, m.MoveOut(alone(0), ["a"]))]


# --- treatments ---


def test_a_policys_late_switch_goes_on_as_a_carry() -> None:
    node = node_with(a=alone(0))
    node.call(m.SetLayout, [[0, 1]], m.Treatment.SEQUENTIAL, 60.0, 2.0)
    assert node.take() == []
    node.clock.advance(2.0)
    node.turn()
    assert [type(message) for _, message in node.take()] == [m.Expect, m.Export]
    assert node.books.units.partition == (PAIR,)


def test_soft_requests_go_through_the_pool() -> None:
    node = node_with(a=alone(0), b=alone(1))
    node.switch(PAIR, treatment=m.Treatment.SOFT)
    assert node.take() == [(0, m.MoveOut(alone(0), ["a"])), (1, m.MoveOut(alone(1), ["b"]))]
    node.answer(0, m.Moved(0, {"a": [5, 6]}))
    assert node.books.requests.pool.get("a").tokens == (5, 6)


def test_hard_requests_stay() -> None:
    node = node_with(a=alone(0))
    node.view(node.switch(PAIR, treatment=m.Treatment.HARD))
    assert node.take() == []


# --- aborts ---


def test_both_leaders_hear_of_an_abort_before_the_import() -> None:
    node = node_with(a=alone(1), b=alone(1))
    node.switch(PAIR)
    node.take()
    node.abort("a")
    assert node.take() == [
        (0, m.AbortRequests(PAIR, ["a"])),
        (1, m.AbortRequests(alone(1), ["a"])),
    ]
    node.answer(1, m.Exported(1, 1, alone(1), described("a", "b")))
    ((_, import_),) = node.take(m.Import)
    assert import_.requests == described("b")
    assert node.value("shoal_requests_total", Outcome.FINISHED) == 1


def test_the_source_keeps_the_kv_of_an_aborted_request_while_it_is_read() -> None:
    node, call = importing()
    node.abort("b")
    assert node.take() == [(0, m.AbortRequests(PAIR, ["b"]))]
    node.say(0, m.Imported(1, 0, PAIR, ["a"], {}, 0))
    node.answer(0, m.Imported(2, 0, PAIR, [], {}, 0))
    assert (1, m.Drop(alone(1), ["b"])) in node.take()
    assert node.view(call).carried == 1


# --- deaths ---


def test_the_source_dies_while_its_kv_is_read() -> None:
    node = node_with(a=alone(2), b=alone(2), z=PAIR, y=alone(3))
    node.switch(PAIR, OTHER_PAIR)
    node.take()
    carried = next(c for c in node.books.carries if c.source == alone(2))
    assert carried.destination == OTHER_PAIR
    node.answer(2, m.Exported(carried.number, 2, alone(2), described("a", "b")))
    node.answer(2, m.Imported(carried.number, 2, OTHER_PAIR, ["a"], {}, 1))
    node.take()
    node.kill(3)
    assert set(node.interrupted()) == {"a", "b", "y"}, "the group died with its member"
    assert node.books.requests.where("b") is None


def paused_then_carried() -> tuple[ScriptedNode, Any]:
    """Return a node that carries requests paused on engine 2, in no unit of theirs, to the pair."""
    node = node_with(a=OTHER_PAIR, b=OTHER_PAIR)
    node.switch(*SINGLES, treatment=m.Treatment.HARD)
    node.clock.advance(31.0)
    node.turn()
    return node, list(node.books.carries)


def test_long_paused_requests_are_carried_to_what_is_there() -> None:
    node, carries = paused_then_carried()
    assert {carry.destination for carry in carries} == {alone(2), alone(3)}
    for carry in carries:
        node.answer(2, m.Exported(carry.number, 2, OTHER_PAIR, described(*carry.ids)))
        assert node.books.requests.where(min(carry.ids)) == carry.destination


def test_the_destination_dies_while_the_source_exports() -> None:
    node, carries = paused_then_carried()
    (lost,) = [carry for carry in carries if carry.destination == alone(3)]
    node.take()
    node.kill(3)
    # A member of the source has died, so the KV is lost, too.
    assert set(node.interrupted()) == {"a", "b"}
    assert lost.number not in {carry.number for carry in node.books.carries}


def to_a_far_unit() -> tuple[ScriptedNode, int]:
    """Return a node that carries a request of engine 0 to engine 1, and the carry's number."""
    node = ScriptedNode(4)
    node.books.requests.place(request_of(node, "a"), alone(0))
    left = node.controller._carries.begin([node.books.requests.core(alone(0))], SINGLES[1:], PAUSE)
    node.turn()
    assert left == []
    (carry,) = node.books.carries
    assert carry.destination == alone(1)
    return node, carry.number


def test_another_destination_is_chosen_when_one_dies() -> None:
    node, number = to_a_far_unit()
    node.take()
    node.kill(1)
    (carry,) = node.books.carries
    assert carry.destination == alone(2)
    assert carry.number > number
    told = {(engine, type(message)) for engine, message in node.take()}
    assert told == {(2, m.Expect), (0, m.Export)}
    node.answer(0, m.Exported(number, 0, alone(0), described("a")))
    assert node.take(m.Import) == [], "the first answer is stale"
    node.answer(0, m.Exported(carry.number, 0, alone(0), described("a")))
    assert node.books.requests.where("a") == alone(2)


def test_the_source_goes_on_when_no_destination_is_left() -> None:
    node, _ = to_a_far_unit()
    for engine in (1, 2):
        node.kill(engine)
    node.take()
    node.kill(3)
    assert node.take() == [(0, m.Keep(alone(0), ["a"]))]
    assert node.books.requests.where("a") == alone(0)
    assert not len(node.books.carries)


def test_the_destination_dies_while_it_imports() -> None:
    node, number = to_a_far_unit()
    node.answer(0, m.Exported(number, 0, alone(0), described("a")))
    node.take()
    node.kill(1)
    assert node.take() == [(0, m.Drop(alone(0), ["a"]))]
    assert node.interrupted() == {"a": 1}
    assert node.value("shoal_carried_requests_total", "lost") == 1


def test_the_source_dies_before_the_copy_is_complete() -> None:
    node, number = to_a_far_unit()
    node.answer(0, m.Exported(number, 0, alone(0), described("a")))
    node.take()
    node.kill(0)
    assert node.take() == [(1, m.AbortRequests(alone(1), ["a"]))]
    assert node.interrupted() == {"a": 1}
    assert not len(node.books.carries)
    node.answer(1, m.Imported(number, 1, alone(1), [], {}, 0))
    assert node.value("shoal_stale_messages_total") == 0


def test_the_source_dies_after_the_copy() -> None:
    node, number = to_a_far_unit()
    node.answer(0, m.Exported(number, 0, alone(0), described("a")))
    node.answer(1, m.Imported(number, 1, alone(1), ["a"], {}, 0))
    node.take()
    node.kill(0)
    assert node.interrupted() == {}
    assert node.books.requests.where("a") == alone(1)


def test_the_source_dies_before_it_has_exported() -> None:
    node, number = to_a_far_unit()
    node.take()
    node.kill(0)
    assert node.take() == [(1, m.Import(number, alone(1), alone(0), []))]
    assert node.interrupted() == {"a": 1}


# --- switches that fail, and engines that do not answer ---


def test_a_failed_switch_keeps_requests_at_their_sources() -> None:
    node = node_with(a=alone(0), b=alone(1))
    node.mute = {1}
    call = node.switch(PAIR)
    node.answer(0, m.Exported(1, 0, alone(0), described("a")))
    node.take()
    node.clock.advance(5.0)
    node.turn()
    told = node.take()
    assert (0, m.Keep(alone(0), ["a"])) in told
    assert (0, m.Import(1, PAIR, alone(0), [])) in told
    node.mute = set()
    node.turn()
    assert isinstance(node.reply(call), m.CallFailed)
    assert node.books.requests.where("a") == alone(0)
    assert (1, m.Keep(alone(1), ["b"])) in node.take()
    assert not len(node.books.carries)


def test_a_source_that_does_not_answer_keeps_its_requests() -> None:
    node, number = to_a_far_unit()
    node.take()
    node.clock.advance(5.0)
    node.turn()
    told = node.take()
    assert told == [(0, m.Keep(alone(0), ["a"])), (1, m.Import(number, alone(1), alone(0), []))]
    node.answer(0, m.Exported(number, 0, alone(0), described("a")))
    assert node.books.requests.where("a") == alone(0)


def test_a_destination_that_does_not_answer_is_lost() -> None:
    node, number = to_a_far_unit()
    node.answer(0, m.Exported(number, 0, alone(0), described("a")))
    node.clock.advance(5.0)
    node.turn()
    assert node.interrupted() == {"a": 1}
    assert 1 in node.books.engines.gone


def test_a_destination_that_makes_room_bit_by_bit_has_time() -> None:
    node, number = to_a_far_unit()
    node.answer(0, m.Exported(number, 0, alone(0), described("a")))
    node.clock.advance(4.0)
    node.answer(1, m.Imported(number, 1, alone(1), [], {}, 1))
    node.clock.advance(4.0)
    node.turn()
    assert node.books.engines.gone == frozenset()


def test_a_failure_waits_for_imports_before_the_switch_turns_round() -> None:
    node = node_with(a=alone(0), z=alone(3))
    node.mute = {3}
    call = node.switch(PAIR, OTHER_PAIR)
    node.answer(0, m.Exported(1, 0, alone(0), described("a")))
    assert node.books.requests.where("a") == PAIR, "the first pair is bound"
    node.clock.advance(4.9)
    node.answer(0, m.Imported(1, 0, PAIR, [], {}, 1))
    node.clock.advance(0.2)
    node.turn()
    node.mute = set()
    node.turn()
    assert PAIR in node.books.units.partition
    node.answer(0, m.Imported(1, 0, PAIR, ["a"], {}, 0))
    assert PAIR not in node.books.units.partition
    back = [message for _, message in node.take(m.Export) if message.unit == PAIR]
    assert [message.request_ids for message in back] == [["a"]], "it is carried back"
    (carry,) = node.books.carries
    node.answer(0, m.Exported(carry.number, 0, PAIR, described("a")))
    leader = carry.destination.leader
    node.answer(leader, m.Imported(carry.number, leader, carry.destination, ["a"], {}, 0))
    assert isinstance(node.reply(call), m.CallFailed)


# --- what a new group is lent ---


def test_a_lease_is_large_enough_for_what_is_carried() -> None:
    """They are half of the requests there, so at most half of the blocks in use are theirs."""
    node = ScriptedNode(4, blocks=1000)
    for request_id in ("a", "b", "c", "d"):
        node.books.requests.place(request_of(node, request_id), alone(2))
    node.load(alone(2), 900)
    capacity = node.controller._capacity
    assert capacity.lease_for(PAIR) == LEASE_BLOCKS
    node.books.carries.begin(alone(2), OTHER_PAIR, {"c", "d"}, SWITCH, now=0.0)
    carry = node.books.carries.begin(alone(2), PAIR, {"a", "b"}, SWITCH, now=0.0)
    assert capacity.lease_for(PAIR) == LEASE_BLOCKS
    node.load(alone(2), 200)
    assert capacity.lease_for(PAIR) == 800 * BLOCK_TOKENS // 2 // 8 + 4
    node.load(alone(0), 150)
    assert capacity.lease_for(PAIR) == 150, "no more than is free"
    node.books.carries.end(carry, now=0.0)
    assert capacity.lease_for(PAIR) == LEASE_BLOCKS


def test_what_is_cached_of_ended_requests_is_not_carried() -> None:
    """It is in use while it is copied ahead, and the last report may be from then."""
    node = ScriptedNode(4, blocks=1000)
    for request_id in ("a", "b"):
        node.books.requests.place(request_of(node, request_id), alone(2))
    node.load(alone(2), 200)
    node.load(alone(0), 900)
    capacity = node.controller._capacity
    ended = [request_of(node, "ended")]
    node.books.carries.begin(alone(2), PAIR, {"a", "b"}, SWITCH, now=0.0, ended=ended)
    assert capacity.lease_for(PAIR) == LEASE_BLOCKS
    node.books.leases.opened[PAIR] = LEASE_BLOCKS
    assert not capacity.lacks_room(PAIR)


# --- blocks of a source of which some engines live ---


def read_from_a_quad() -> tuple[ScriptedNode, int, list[str]]:
    """Return a node whose engine 1 reads requests that four engines have left.

    Also returned are the carry's number and these requests.
    """
    node = node_with(**dict.fromkeys("abcd", ALL))
    node.switch(*SINGLES, treatment=m.Treatment.HARD)
    node.clock.advance(31.0)
    node.turn()
    (carry,) = [each for each in node.books.carries if each.destination == alone(1)]
    ids = sorted(carry.ids)
    node.answer(0, m.Exported(carry.number, 0, ALL, described(*ids)))
    node.take()
    return node, carry.number, ids


def dropped(node: ScriptedNode, ids: list[str]) -> list[int]:
    """Return the engines that have been told to drop some requests."""
    return [engine for engine, told in node.take(m.Drop) if set(ids) <= set(told.request_ids)]


@pytest.mark.parametrize("failed", [False, True])
def test_a_dead_units_blocks_stay_while_they_are_read(failed: bool) -> None:
    node, number, ids = read_from_a_quad()
    node.kill(3)
    assert set(ids) <= set(node.interrupted())
    assert dropped(node, ids) == []
    carried = [] if failed else ids
    node.answer(1, m.Imported(number, 1, alone(1), carried, {}, 0, failed=failed))
    assert dropped(node, ids) == [0]
    assert number not in {carry.number for carry in node.books.carries}
    assert node.value("shoal_carried_requests_total", "lost") == 4
    assert node.value("shoal_stale_messages_total") == 0


def test_portions_of_a_dead_units_requests_are_waited_for() -> None:
    node, number, ids = read_from_a_quad()
    node.kill(3)
    node.answer(1, m.Imported(number, 1, alone(1), ids, {}, 1))
    assert dropped(node, ids) == []
    node.answer(1, m.Imported(number, 1, alone(1), [], {}, 0))
    assert dropped(node, ids) == [0]


def test_blocks_that_could_not_be_read_are_free_when_the_death_is_known() -> None:
    node, number, ids = read_from_a_quad()
    node.answer(1, m.Imported(number, 1, alone(1), [], {}, 0, failed=True))
    assert dropped(node, ids) == []
    node.kill(3)
    assert set(ids) <= set(node.interrupted())
    assert dropped(node, ids) == [0]


def test_blocks_of_a_dead_unit_are_free_when_their_reader_dies() -> None:
    node, _, ids = read_from_a_quad()
    node.kill(3)
    node.take()
    node.kill(1)
    assert dropped(node, ids) == [0]


def test_a_dead_units_blocks_are_free_in_the_end() -> None:
    """A destination that does not answer at all is not lost: the requests are elsewhere."""
    node, _, ids = read_from_a_quad()
    node.kill(3)
    node.take()
    node.clock.advance(5.0)
    node.turn()
    assert dropped(node, ids) == [0]
    assert 1 not in node.books.engines.gone


def test_a_request_that_begins_again_is_no_longer_read() -> None:
    """The next death must not take it for damaged again."""
    node, _, ids = read_from_a_quad()
    node.kill(3)
    before = node.interrupted()
    node.kill(2)
    assert {name: node.interrupted()[name] for name in ids} == {name: before[name] for name in ids}


def test_what_a_dead_leader_held_stays_while_it_is_read() -> None:
    node, number, ids = read_from_a_quad()
    node.kill(0)
    assert node.books.leases.blocks_of(1)
    node.answer(1, m.Imported(number, 1, alone(1), ids, {}, 0))
    assert node.books.leases.blocks_of(1) == set()
