"""Pre-copies, with engines that the test plays: each stage, and each failure in each stage."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest

from shoal.policies.values.layouts import Unit, alone
from shoal.policies.values.snapshot import NORMAL_PRIORITY, PoolRequest
from shoal.runtime.controller.books.prompt_hashes import prompt_hashes
from shoal.runtime.controller.books.request import Request
from shoal.runtime.controller.switching import precopy
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire
from tests.runtime.controller.scripted_node import BLOCK_TOKENS, BLOCKS, ScriptedNode
from tests.runtime.loopback_node import request_payload
from tests.units import tp

PAIR, OTHER, ALL = tp(0, 1), tp(2, 3), tp(0, 1, 2, 3)
SINGLES = tuple(alone(engine) for engine in range(4))
COMPUTED = 48
"""Tokens of each request that are pinned."""
STAGES = ("pinning", "lending", "reserving", "copying")
AT_EVERY_STAGE = pytest.mark.parametrize("stage", STAGES)


class Ahead:
    """A node that copies ahead of a switch.

    Args:
        on: the unit of each request. The groups among these units are bound.
        target: the layout to which the node switches.
        blocks: KV blocks of each engine.
        ended: requests that have ended on engine 0, with the lengths of their prompts.
    """

    def __init__(
        self,
        target: tuple[Unit, ...] = (PAIR,),
        blocks: int = BLOCKS,
        ended: Mapping[str, int] = MappingProxyType({}),
        **on: Unit,
    ) -> None:
        self.on = on or {"a": alone(0), "b": alone(1)}
        units = {*self.on.values(), *target}
        engines = 4 if any(engine > 1 for unit in units for engine in unit.engines) else 2
        self.node = node = ScriptedNode(engines, blocks=blocks, precopy_tokens=1)
        groups = sorted({unit for unit in self.on.values() if unit.is_group})
        grouped = {engine for unit in groups for engine in unit.engines}
        layout = sorted([*groups, *(u for u in SINGLES[:engines] if not grouped & {*u.engines})])
        if groups:
            node.view(node.switch(*layout, treatment=m.Treatment.HARD))
        for unit in layout:
            node.load(unit, blocks - BLOCKS + 32)
        ended_on(node, alone(0), **ended)
        for request_id, unit in self.on.items():
            self.place(request_id, unit)
        node.take()
        self.call = node.switch(*target)
        self.carries = {carry.source: carry for carry in node.books.carries}

    def place(self, request_id: str, unit: Unit) -> None:
        """Let a request run in a unit."""
        node = self.node
        mute, node.mute = node.mute, set(range(len(node.books.engines)))
        node.send(request_id)
        node.mute = mute
        books = node.books.requests
        request = books.pool.remove(request_id) or books.remove(request_id)
        assert request is not None
        books.place(request, unit)

    # --- what engines answer ---

    def copy_caches(self) -> None:
        """Let all of what is cached of the ended requests be copied."""
        (carry,) = self.node.books.carries
        found = [
            m.CarriedRequest("", [], 48, {0: [[1, 2, 3]]}, 48).as_prefix(n) for n in carry.ended
        ]
        self.node.answer(0, m.Pinned(carry.number, 0, alone(0), found))
        self.lend(PAIR)
        taken = [ahead(name, alone(0), PAIR) for name in sorted(carry.ended)]
        self.node.answer(0, m.Reserved(carry.number, 0, PAIR, taken))
        self.node.take()
        for engine in PAIR.engines:
            self.node.answer(engine, m.CopiedAhead(carry.number, engine, alone(engine), bytes=10))

    def pin(self, source: Unit, computed: int = COMPUTED) -> None:
        carry, leader = self.carries[source], source.leader
        blocks = {engine: [[1, 2, 3]] for engine in source.engines}
        pinned = [m.CarriedRequest(r, [7], computed, blocks, 60) for r in sorted(carry.ids)]
        self.node.answer(leader, m.Pinned(carry.number, leader, source, pinned))

    def lend(self, destination: Unit, *engines: int, blocks: int = 12) -> None:
        for engine in engines or destination.engines:
            lent = list(range(20, 20 + blocks))
            self.node.answer(engine, m.Lent(m.AHEAD, engine, destination, lent))

    def reserve(self, source: Unit) -> None:
        carry = self.carries[source]
        unit = carry.destination
        taken = [ahead(request_id, source, unit) for request_id in sorted(carry.ids)]
        self.node.answer(unit.leader, m.Reserved(carry.number, unit.leader, unit, taken))

    def read(self, source: Unit, reader: Unit, **result: Any) -> None:
        number = self.carries[source].number
        self.node.answer(reader.leader, m.CopiedAhead(number, reader.leader, reader, **result))

    def reach(self, stage: str) -> "Ahead":
        """Bring the switch from two engines to a pair to a stage of its pre-copies."""
        steps: dict[str, Callable[[], None]] = {
            "pinning": lambda: [self.pin(source) for source in self.carries],
            "lending": lambda: self.lend(PAIR),
            "reserving": lambda: [self.reserve(source) for source in self.carries],
            "copying": lambda: [
                self.read(source, reader, bytes=100)
                for source in self.carries
                for reader in SINGLES[:2]
            ],
        }
        for name, step in steps.items():
            if name == stage:
                break
            step()
        self.node.take()
        return self

    # --- what came of it ---

    def told(self, *kinds: type[m.Message]) -> list[tuple[int, str]]:
        return [(engine, type(message).__name__) for engine, message in self.node.take(*kinds)]

    def export(self) -> None:
        """Let the sources of carries that were asked to export say that all is there."""
        for carry in self.node.books.carries:
            leader, source = carry.source.leader, carry.source
            blocks = {engine: [[1, 2, 3]] for engine in source.engines}
            taken = [m.CarriedRequest(r, [7, 8], 50, blocks, 51) for r in sorted(carry.ids)]
            self.node.answer(leader, m.Exported(carry.number, leader, source, taken))

    def finish(self) -> Any:
        """Let the rest of the switch be done; return its view."""
        self.export()
        for carry in self.node.books.carries:
            leader, unit = carry.destination.leader, carry.destination
            imported = m.Imported(carry.number, leader, unit, sorted(carry.ids), {}, 0)
            self.node.answer(leader, imported)
        self.assert_nothing_is_left()
        return self.node.view(self.call)

    def assert_nothing_is_left(self) -> None:
        carries = self.node.controller._carries
        assert not carries.unsettled
        assert len(self.node.books.carries) == 0
        assert carries._ahead._leases._orphans == {}
        assert not self.node.books.leases.grows(PAIR)


def ahead(request_id: str, source: Unit, target: Unit) -> m.AheadRequest:
    """Return what a destination reserves for a request."""
    there = {engine: [[1, 2, 3]] for engine in source.engines}
    here = {engine: [[20, 21]] for engine in target.engines}
    return m.AheadRequest(request_id, 0, COMPUTED, there, here)


# --- the way of a pre-copy ---


def test_expect_and_pin_come_at_the_start_and_nothing_stops() -> None:
    switch = Ahead()
    assert switch.told() == [(0, "Expect"), (0, "Expect"), (0, "Pin"), (1, "Pin")]
    assert switch.node.books.units.partition == SINGLES[:2]
    assert switch.node.controller._operations.busy == frozenset()


def test_requests_start_meanwhile_and_leave_with_the_others() -> None:
    switch = Ahead().reach("copying")
    switch.node.send("new")
    assert switch.node.added["new"].unit in SINGLES[:2]
    for source in switch.carries:
        for reader in SINGLES[:2]:
            switch.read(source, reader)
    asked = [message for _, message in switch.node.take(m.Export)]
    assert sorted(request for message in asked for request in message.request_ids) == [
        *("a", "b", "new")
    ]
    assert len(asked) == 3, "it has a carry of its own"


def test_one_growth_for_all_sources_once_all_have_pinned() -> None:
    switch = Ahead().reach("pinning")
    switch.pin(alone(0))
    assert switch.told() == []
    switch.pin(alone(1), computed=17)
    # Both have 60 tokens by now, and will have some more when they come.
    blocks = 2 * -(-(60 + m.AHEAD_TOKENS) // (2 * BLOCK_TOKENS))
    lend = m.Lend(m.AHEAD, PAIR, blocks, urgent=False)
    assert switch.node.take() == [(0, lend), (1, lend)]


def test_what_all_members_lend_is_reserved() -> None:
    switch = Ahead().reach("lending")
    switch.lend(PAIR, 0, blocks=13)
    assert switch.told() == []
    switch.lend(PAIR, 1, blocks=12)
    told = switch.node.take()
    assert told[0] == (0, m.TakeBack([32]))
    lent = list(range(20, 32))
    assert told[1] == (0, m.Grow(m.AHEAD, PAIR, {0: lent, 1: lent}))
    reserved = {message.source: message.requests for _, message in told[2:]}
    assert {source: [r.computed for r in requests] for source, requests in reserved.items()} == {
        alone(0): [COMPUTED],
        alone(1): [COMPUTED],
    }


def test_every_unit_with_members_of_the_destination_reads() -> None:
    switch = Ahead(SINGLES, a=PAIR, b=OTHER)
    sent = dict(switch.node.take(m.Pin))
    assert {message.unit for message in sent.values()} == {PAIR, OTHER}
    for source in switch.carries:
        switch.pin(source)
    assert switch.told(m.Lend) == [], "engines alone have blocks of their own"
    for source in switch.carries:
        switch.reserve(source)
    copies = [message for _, message in switch.node.take(m.CopyAhead)]
    assert {(c.unit, c.source, c.destination) for c in copies} == {
        (PAIR, PAIR, alone(0)),
        (OTHER, OTHER, alone(2)),
    }


def test_a_wider_group_is_read_by_all_pairs() -> None:
    switch = Ahead((ALL,), a=PAIR, b=OTHER)
    for source in switch.carries:
        switch.pin(source)
    switch.lend(ALL)
    for source in switch.carries:
        switch.reserve(source)
    copies = [(engine, message.unit) for engine, message in switch.node.take(m.CopyAhead)]
    assert copies == [(0, PAIR), (2, OTHER)] * 2


def test_units_read_some_portions_at_once_and_then_one_for_each_that_they_have_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    switch = Ahead(a=alone(0), b=alone(0), c=alone(0), d=alone(0))
    monkeypatch.setattr(precopy, "AT_ONCE", 2)
    switch.pin(alone(0))
    switch.lend(PAIR, blocks=24)
    monkeypatch.setattr(m, "PORTION", 5)
    switch.node.take()
    switch.reserve(alone(0))
    first = switch.node.take(m.CopyAhead)
    assert [(engine, copy.requests[0].request_id) for engine, copy in first] == [
        *((0, "a"), (0, "b"), (1, "a"), (1, "b"))
    ]
    assert all(len(copy.requests) == 1 for _, copy in first), "two have six blocks"
    for nth, follows in enumerate("cd"):
        switch.read(alone(0), alone(0), bytes=10)
        ((engine, copy),) = switch.node.take()
        assert (engine, copy.requests[0].request_id) == (0, follows), nth
    for reader in [alone(0)] * 2 + [alone(1)] * 3:
        switch.read(alone(0), reader, bytes=10)
        assert switch.told(m.Settle, m.Export) == []
    switch.read(alone(0), alone(1), bytes=10)
    assert switch.told(m.Settle, m.Export) == [(0, "Settle"), (0, "Export")]
    assert switch.finish().precopied_bytes == 80


def test_after_one_that_could_not_be_read_no_more_portions_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    switch = Ahead(a=alone(0), b=alone(0))
    monkeypatch.setattr(precopy, "AT_ONCE", 1)
    switch.pin(alone(0))
    switch.lend(PAIR, blocks=12)
    monkeypatch.setattr(m, "PORTION", 5)
    switch.reserve(alone(0))
    switch.node.take()
    switch.read(alone(0), alone(0), problem="no memory")
    switch.read(alone(0), alone(1))
    ((_, settle),) = switch.node.take(m.CopyAhead, m.Settle)
    assert settle == m.Settle(switch.carries[alone(0)].number, PAIR, copied=False)
    assert switch.finish().carried == 2


def test_the_switch_goes_on_when_all_have_read() -> None:
    switch = Ahead().reach("copying")
    switch.node.clock.advance(0.5)
    for reader in SINGLES[:2]:
        switch.read(alone(0), reader, bytes=100)
    assert switch.told() == [(0, "Settle"), (0, "Unpin")]
    switch.read(alone(1), alone(0), bytes=30)
    assert switch.told() == []
    switch.read(alone(1), alone(1), bytes=20, host_bytes=15)
    assert switch.told() == [(0, "Settle"), (0, "Export"), (1, "Unpin"), (1, "Export")]
    view = switch.finish()
    assert (view.carried, view.precopied_bytes, view.precopy_seconds) == (2, 250, 0.5)
    node = switch.node
    assert node.value("shoal_precopied_bytes_total", "peer") == 235
    assert node.value("shoal_precopied_bytes_total", "host") == 15
    assert node.value("shoal_precopies_total", "copied") == 2
    assert node.value("shoal_carry_seconds", "precopy") == 2
    assert node.value("shoal_stale_messages_total") == 0


def test_a_lease_that_was_lent_ahead_is_not_asked_for_again() -> None:
    switch = Ahead()
    with_all = switch.node.controller._capacity.lease_for(PAIR)
    for carry in switch.carries.values():
        carry.reserved = 1000
    assert switch.node.controller._capacity.lease_for(PAIR) <= with_all


@pytest.mark.parametrize("tokens", [0, 1000])
def test_below_the_threshold_nothing_is_copied_ahead(tokens: int) -> None:
    switch = Ahead.__new__(Ahead)
    switch.node = node = ScriptedNode(2, precopy_tokens=tokens)
    for unit in SINGLES[:2]:
        node.load(unit, 32)
    switch.place("a", alone(0))
    node.take()
    switch.call = node.switch(PAIR)
    assert switch.told(m.Pin, m.Export) == [(0, "Export")]


@pytest.mark.parametrize("treatment", [m.Treatment.SOFT, m.Treatment.HARD, m.Treatment.SEQUENTIAL])
def test_only_a_carry_copies_ahead(treatment: m.Treatment) -> None:
    switch = Ahead()
    other = Ahead.__new__(Ahead)
    other.node = ScriptedNode(2, precopy_tokens=1)
    other.place("a", alone(0))
    other.node.take()
    other.node.switch(PAIR, treatment=treatment)
    assert other.told(m.Pin) == []
    assert switch.told(m.Pin) == [(0, "Pin"), (1, "Pin")]


# --- nothing to copy ---


def test_what_has_no_full_block_is_carried_as_ever() -> None:
    switch = Ahead().reach("pinning")
    for source in switch.carries:
        leader = source.leader
        number = switch.carries[source].number
        switch.node.answer(leader, m.Pinned(number, leader, source, []))
    assert (0, "Export") in switch.told()
    assert switch.finish().carried == 2
    assert switch.node.value("shoal_precopies_total", "nothing") == 2


def test_where_there_is_no_room_requests_are_carried_as_ever() -> None:
    switch = Ahead(a=alone(0))
    switch.pin(alone(0))
    switch.lend(PAIR, blocks=0)
    switch.node.answer(0, m.Reserved(switch.carries[alone(0)].number, 0, PAIR, []))
    settled = [message.copied for _, message in switch.node.take(m.Settle)]
    assert settled == [True], "it may have all of it in its cache"
    assert switch.finish().carried == 1


def test_of_several_sources_none_takes_the_room_of_all_ahead() -> None:
    switch = Ahead().reach("lending")
    switch.lend(PAIR, blocks=11)
    assert switch.told(m.Reserve, m.Unpin, m.Export) == [
        *((0, "Unpin"), (0, "Export"), (1, "Unpin"), (1, "Export"))
    ]
    assert switch.node.value("shoal_precopies_total", "nothing") == 2
    assert switch.finish().carried == 2


# --- what is cached of requests that have ended ---


def ended_on(node: ScriptedNode, unit: Unit, **prompts: int) -> None:
    """Let requests have ended on a unit, which has their prompts in its cache."""
    for name, length in prompts.items():
        prompt = [ord(name[0])] * length
        frames = request_payload(name, prompt, 1)
        seen = PoolRequest(name, length, length + 1, NORMAL_PRIORITY, 0.0)
        request = Request(name, 0, frames, seen, prompt_hashes(wire.decode_request(frames)))
        node.books.prefixes.place(request.prompt, length, unit)
        node.books.requests.ended.put(request, unit)


def test_what_is_cached_of_ended_requests_goes_ahead_and_is_known_there() -> None:
    node = ScriptedNode(2, blocks=2000, precopy_tokens=1)
    ended_on(node, alone(0), a=600, b=700)
    node.take()
    node.switch(PAIR)
    (carry,) = node.books.carries
    assert (carry.source, carry.ids) == (alone(0), set())
    assert {request.id for request in carry.ended.values()} == {"a", "b"}
    (_, expect), (_, pin) = node.take()
    assert isinstance(expect, m.Expect)
    assert isinstance(pin, m.Pin)
    assert expect.frames == {}
    assert expect.prefixes.keys() == pin.prefixes.keys() == carry.ended.keys()
    assert sorted(pin.prefixes.values()) == ["a", "b"]
    assert pin.room == 0.4 * 2000, "they lie in two places"
    found = [m.CarriedRequest("", [], 48, {0: [[1, 2, 3]]}, 48).as_prefix(n) for n in carry.ended]
    node.answer(0, m.Pinned(carry.number, 0, alone(0), found))
    for engine in (0, 1):
        node.answer(engine, m.Lent(m.AHEAD, engine, PAIR, list(range(20, 40))))
    (kept, _) = sorted(carry.ended)
    node.answer(0, m.Reserved(carry.number, 0, PAIR, [ahead(kept, alone(0), PAIR)]))
    assert carry.reserved == 0, "nobody comes for it"
    request = carry.ended[kept]
    assert not node.books.prefixes.has(request.prompt, PAIR)
    for engine in (0, 1):
        node.answer(engine, m.CopiedAhead(carry.number, engine, alone(engine), bytes=10))
    assert node.books.prefixes.has(request.prompt, PAIR)
    assert node.books.requests.ended.choose(PAIR, 10**6) == [request]
    assert not node.books.carries


def test_ended_requests_of_a_group_share_the_room_that_is_for_all_of_them() -> None:
    node = ScriptedNode(2, blocks=2000, precopy_tokens=1)
    node.switch(PAIR, treatment=m.Treatment.HARD)
    node.load(PAIR, 2000)
    ended_on(node, PAIR, a=600, b=600)
    node.take()
    node.switch(*SINGLES[:2])
    pins = [message for _, message in node.take() if isinstance(message, m.Pin)]
    assert [len(pin.prefixes) for pin in pins] == [1, 1]
    assert sum(pin.room for pin in pins) == 0.4 * 2000


def test_running_requests_are_copied_after_the_caches_with_all_that_they_have_by_then() -> None:
    switch = Ahead(blocks=2000, ended={"x": 600, "y": 700})
    (caches,) = switch.node.books.carries
    assert (caches.ids, len(caches.ended)) == (set(), 2)
    assert switch.told() == [(0, "Expect"), (0, "Pin")]
    switch.node.send("new")
    switch.node.take()
    switch.copy_caches()
    pins = [(engine, pin.request_ids, pin.prefixes) for engine, pin in switch.node.take(m.Pin)]
    (new,) = {0, 1} - {engine for engine, ids, _ in pins if "new" not in ids}
    assert sorted(id_ for _, ids, _ in pins for id_ in ids) == ["a", "b", "new"]
    assert all(prefixes == {} for _, _, prefixes in pins)
    assert switch.node.books.requests.where("new") == alone(new)
    switch.carries = {c.source: c for c in switch.node.books.carries if c.ids}
    switch.reach("nothing")
    assert switch.told(m.Export) == []
    exported = {r for carry in switch.carries.values() for r in carry.ids}
    assert exported == {"a", "b", "new"}
    assert switch.finish().carried == 3


def test_a_request_that_has_ended_is_not_exported() -> None:
    switch = Ahead().reach("copying")
    switch.node.load(alone(0), 32, ("a",))
    for source in switch.carries:
        for reader in SINGLES[:2]:
            switch.read(source, reader)
    told = switch.node.take(m.Export, m.Import)
    assert (0, m.Import(1, PAIR, alone(0), [])) in told
    assert [message.request_ids for _, message in told if isinstance(message, m.Export)] == [["b"]]
    assert switch.finish().carried == 1


# --- failures: the switch goes on without the pre-copy ---


@AT_EVERY_STAGE
def test_late_answers_end_it_and_the_switch_goes_on(stage: str) -> None:
    switch = Ahead().reach(stage)
    switch.node.clock.advance(5.0)
    switch.node.turn()
    told = switch.told()
    assert {(0, "Unpin"), (1, "Unpin"), (0, "Export"), (1, "Export")} <= set(told)
    assert ((0, "Settle") in told) == (stage == "reserving"), "readers may still write"
    late: dict[str, Callable[[], None]] = {
        "pinning": lambda: switch.pin(alone(0)),
        "lending": lambda: switch.lend(PAIR),
        "reserving": lambda: switch.reserve(alone(0)),
    }
    if stage in late:
        late[stage]()
        told = switch.told()
        assert told == ([(0, "TakeBack"), (1, "TakeBack")] if stage == "lending" else [])
    else:
        for source in switch.carries:
            for reader in SINGLES[:2]:
                switch.read(source, reader, bytes=100)
        settled = [message.copied for _, message in switch.node.take(m.Settle)]
        assert settled == [False, False]
    view = switch.finish()
    assert (view.outcome, view.carried) == ("done", 2)
    assert switch.node.value("shoal_precopies_total", "stopped") == 2


def test_one_late_source_does_not_stop_the_others() -> None:
    switch = Ahead().reach("pinning")
    switch.pin(alone(0))
    switch.node.clock.advance(5.0)
    switch.node.turn()
    assert switch.told() == [(0, "Lend"), (1, "Unpin"), (1, "Lend")]
    switch.lend(PAIR)
    assert switch.told(m.Reserve) == [(0, "Reserve")]


def test_what_could_not_be_read_is_not_used() -> None:
    switch = Ahead().reach("copying")
    switch.read(alone(0), alone(0), problem="no memory")
    assert switch.told() == []
    switch.read(alone(0), alone(1), bytes=10)
    ((_, settle),) = switch.node.take(m.Settle)
    assert not settle.copied
    for reader in SINGLES[:2]:
        switch.read(alone(1), reader)
    assert switch.finish().carried == 2


def test_members_that_never_stop_reading_are_lost() -> None:
    switch = Ahead().reach("copying")
    for source in switch.carries:
        switch.read(source, alone(0))
    for _ in range(2):
        switch.node.clock.advance(5.0)
        switch.node.turn()
    assert 1 in switch.node.books.engines.gone
    assert not switch.node.controller._carries.unsettled


# --- aborts ---


@AT_EVERY_STAGE
def test_both_leaders_hear_of_an_abort(stage: str) -> None:
    switch = Ahead().reach(stage)
    switch.node.abort("b")
    assert switch.told() == [(0, "AbortRequests"), (1, "AbortRequests")]
    for name in STAGES[STAGES.index(stage) :]:
        switch_on(switch, name)
    assert [message.request_ids for _, message in switch.node.take(m.Export)] == [["a"]]
    assert switch.finish().carried == 1


def switch_on(switch: Ahead, stage: str) -> None:
    """Let engines answer in a stage, whatever is left of the requests."""
    for source in switch.carries:
        if stage == "pinning":
            switch.pin(source)
        elif stage == "reserving":
            switch.reserve(source)
        elif stage == "copying":
            for reader in SINGLES[:2]:
                switch.read(source, reader)
    if stage == "lending":
        switch.lend(PAIR)


# --- deaths, and switches that fail ---


@AT_EVERY_STAGE
@pytest.mark.parametrize("engine", [0, 1])
def test_an_engine_dies_and_nothing_is_left(stage: str, engine: int) -> None:
    """Engine 0 leads the destination, and is a source; engine 1 is a source and reads."""
    switch = Ahead().reach(stage)
    switch.node.kill(engine)
    survivor = 1 - engine
    if stage == "copying":
        told = switch.told()
        assert (0, "Settle") not in told, "the survivor still reads"
        for source in switch.carries:
            switch.read(source, alone(survivor))
    assert isinstance(switch.node.reply(switch.call), m.CallFailed)
    assert switch.node.interrupted() == {"ab"[engine]: 1}
    assert switch.node.books.requests.where("ab"[survivor]) == alone(survivor)
    switch.assert_nothing_is_left()
    assert switch.node.books.leases.lent_by(survivor) == {} or engine == 1


def test_what_a_dead_leader_was_lent_comes_back_when_nobody_writes_to_it() -> None:
    switch = Ahead().reach("copying")
    switch.node.kill(0)
    assert switch.told(m.TakeBack) == []
    switch.read(alone(0), alone(1))
    assert switch.told() == []
    switch.read(alone(1), alone(1))
    assert switch.told() == [(1, "TakeBack")]
    assert switch.node.books.leases.lent_by(1) == {}


def test_a_dead_source_does_not_end_what_others_copy() -> None:
    """It is in no group of the target: the switch does not need it."""
    switch = Ahead((PAIR, OTHER), a=alone(0), b=alone(2))
    for source in switch.carries:
        switch.pin(source)
    assert switch.told(m.Lend) == [(0, "Lend"), (1, "Lend"), (2, "Lend"), (3, "Lend")]
    switch.node.kill(2)
    assert isinstance(switch.node.reply(switch.call), m.CallFailed)
    switch.assert_nothing_is_left()


def test_a_failed_switch_leaves_requests_where_they_run() -> None:
    switch = Ahead((PAIR, OTHER), a=alone(0), b=alone(1))
    switch.reach("copying")
    switch.node.kill(3)
    told = switch.told()
    assert {(0, "Unpin"), (1, "Unpin"), (0, "Import")} <= set(told)
    assert not {(0, "Settle"), (0, "Keep"), (0, "Export")} & set(told)
    for source in switch.carries:
        for reader in SINGLES[:2]:
            switch.read(source, reader)
    assert switch.told(m.Settle) == [(0, "Settle"), (0, "Settle")]
    assert [switch.node.books.requests.where(r) for r in "ab"] == list(SINGLES[:2])
    switch.assert_nothing_is_left()


def test_a_switch_may_fail_after_its_pre_copy() -> None:
    switch = Ahead().reach("copying")
    switch.node.mute = {1}
    for source in switch.carries:
        for reader in SINGLES[:2]:
            switch.read(source, reader)
    switch.export()
    switch.node.take()
    switch.node.clock.advance(5.0)
    switch.node.turn()
    told = switch.told()
    assert {(0, "Keep"), (0, "Import")} <= set(told)
    switch.node.mute = set()
    switch.node.turn()
    assert isinstance(switch.node.reply(switch.call), m.CallFailed)
    switch.assert_nothing_is_left()


# --- other operations meanwhile ---


@AT_EVERY_STAGE
def test_a_second_switch_is_refused_as_ever(stage: str) -> None:
    switch = Ahead().reach(stage)
    second = switch.node.reply(switch.node.switch(*SINGLES[:2]))
    assert isinstance(second, m.CallFailed)
    assert second.status == 409
    assert switch.told() == []
    for name in STAGES[STAGES.index(stage) :]:
        switch_on(switch, name)
    assert switch.finish().carried == 2


def test_an_audit_waits_until_nobody_reads() -> None:
    switch = Ahead().reach("copying")
    switch.node.clock.advance(5.0)
    switch.node.turn()
    audit = switch.node.call(m.AuditNode)
    view = None
    switch.export()
    for carry in switch.node.books.carries:
        switch.node.answer(0, m.Imported(carry.number, 0, PAIR, sorted(carry.ids), {}, 0))
    view = switch.node.view(switch.call)
    assert view.outcome == "done", "the switch does not wait for it"
    assert switch.node.reply(audit) is None
    for source in switch.carries:
        for reader in SINGLES[:2]:
            switch.read(source, reader)
    assert isinstance(switch.node.reply(audit), m.AuditDone)


def test_a_drain_waits_and_then_releases_the_new_group() -> None:
    switch = Ahead().reach("copying")
    switch.node.call(m.DrainEngines, [1], True)
    assert switch.told() == []
    for source in switch.carries:
        for reader in SINGLES[:2]:
            switch.read(source, reader)
    switch.export()
    for carry in switch.node.books.carries:
        switch.node.answer(0, m.Imported(carry.number, 0, PAIR, sorted(carry.ids), {}, 0))
    assert switch.node.view(switch.call).outcome == "done"
    pins = [message.unit for _, message in switch.node.take(m.Pin)]
    assert pins == [PAIR], "its requests go on, to engine 0, after another pre-copy"
