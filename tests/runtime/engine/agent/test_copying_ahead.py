"""An engine's part in pre-copies, message by message; the other engine's part is played."""

from typing import Any

import pytest

from shoal.policies.values.layouts import Unit, alone
from shoal.runtime.engine.agent import copying_ahead
from shoal.runtime.engine.fake.fake_request import FakeRequest
from shoal.runtime.engine.fake.fake_tokens import expected_tokens
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire
from tests.runtime.engine.agent.agent_bench import GROUP, LEASE_1, Bench, started
from tests.runtime.loopback_node import problems, request_payload
from tests.units import tp

OWN, OTHER, STRANGER = alone(0), alone(1), tp(2, 3)
CARRY = 3
PROMPT, OUTPUT = 30, 9
READ_SECONDS = 0.5


def only(answers: list[m.Message], kind: type) -> Any:
    """Return the one answer of a kind, which is the only one."""
    (answer,) = answers
    assert isinstance(answer, kind)
    return answer


def prompt_of(request_id: str) -> list[int]:
    return [ord(request_id[0])] * PROMPT


def described(request_id: str, computed: int = 28) -> m.CarriedRequest:
    """Return what the other engine has pinned of a request."""
    blocks = {1: [list(range(1, computed // 4 + 1))]}
    return m.CarriedRequest(request_id, [7], computed, blocks, PROMPT + 1)


def expect(bench: Bench, *ids: str, unit: Unit = OWN) -> None:
    frames = {id_: request_payload(id_, prompt_of(id_), OUTPUT) for id_ in ids}
    assert bench.tell(m.Expect(CARRY, unit, frames, {})) == []


def reserve(bench: Bench, *requests: m.CarriedRequest, unit: Unit = OWN) -> m.Reserved:
    return only(bench.tell(m.Reserve(CARRY, unit, OTHER, list(requests))), m.Reserved)


def cached(bench: Bench, request_id: str) -> int:
    """Return how many tokens of a prompt the engine has in its prefix cache."""
    view = wire.decode_request(request_payload(request_id, prompt_of(request_id), 1))
    prefixes = FakeRequest(view, prompt_of(request_id), 1).prefixes(4)
    return 4 * len(bench.backend.own._scheduler.pool.find(prefixes))


@pytest.fixture
def bench() -> Bench:
    return started(prefix_caching=True)


@pytest.fixture
def slow() -> Bench:
    """Return an engine that reads slowly."""
    return started(copy_seconds=READ_SECONDS, prefix_caching=True)


def lend_ahead(bench: Bench, blocks: int = 6) -> list[m.Message]:
    """Lend to the group before it is bound, as a member, and take the lease, as its leader."""
    lent = only(bench.tell(m.Lend(m.AHEAD, GROUP, blocks, urgent=False)), m.Lent)
    assert (lent.epoch, len(lent.blocks)) == (m.AHEAD, blocks)
    return bench.tell(m.Grow(m.AHEAD, GROUP, {0: lent.blocks, 1: LEASE_1[:blocks]}))


# --- as the source ---


def test_requests_go_on_while_they_are_pinned(bench: Bench) -> None:
    bench.add("r", prompt=PROMPT, tokens=OUTPUT)
    bench.turn(2)
    pinned = only(bench.tell(m.Pin(CARRY, OWN, ["r", "unknown"], {}, 0)), m.Pinned)
    (request,) = pinned.requests
    assert (pinned.carry, pinned.engine, pinned.unit) == (CARRY, 0, OWN)
    assert request.computed == 28
    bench.turn(2 * OUTPUT)
    assert bench.backend.own.num_requests == 0
    assert bench.backend.own.load.free_blocks == 200 - 7
    assert bench.tell(m.Unpin(CARRY, OWN)) == []
    assert bench.backend.own.load.free_blocks == 200
    assert problems(bench.backend) == []


def test_what_is_cached_of_ended_requests_is_pinned_by_new_names(bench: Bench) -> None:
    for name in "ab":
        payload = request_payload(name, prompt_of(name), OUTPUT)
        bench.tell(m.AddRequest(OWN, name), *payload)
    bench.turn(3 * OUTPUT)
    assert bench.backend.own.num_requests == 0
    named = {"a cached": "a", "b cached": "b", "c cached": "c"}
    pinned = only(bench.tell(m.Pin(CARRY, OWN, [], named, 100)), m.Pinned)
    found = {one.request_id: (one.computed, one.length, one.is_prefix) for one in pinned.requests}
    whole = (PROMPT + OUTPUT - 1) // 4 * 4
    assert found == {"a cached": (whole, whole, True), "b cached": (whole, whole, True)}
    assert bench.backend.own.load.free_blocks < 200
    assert bench.tell(m.Unpin(CARRY, OWN)) == []
    assert bench.backend.own.load.free_blocks == 200
    assert problems(bench.backend) == []


def test_ended_requests_take_no_more_blocks_than_there_is_room_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying_ahead, "PINNED_AT_ONCE", 1)
    for name in "abc":
        payload = request_payload(name, prompt_of(name), OUTPUT)
        bench.tell(m.AddRequest(OWN, name), *payload)
    bench.turn(4 * OUTPUT)
    named, each = {name.upper(): name for name in "abc"}, (PROMPT + OUTPUT - 1) // 4
    pinned = only(bench.tell(m.Pin(CARRY, OWN, [], named, 2 * each), turns=4), m.Pinned)
    assert [request.request_id for request in pinned.requests] == ["A", "B"]
    assert bench.backend.own.load.free_blocks == 200 - 2 * each
    bench.tell(m.Unpin(CARRY, OWN))
    assert problems(bench.backend) == []


def test_words_on_groups_without_a_core_are_ignored(bench: Bench) -> None:
    assert bench.tell(m.Unpin(CARRY, STRANGER)) == []
    assert bench.tell(m.Settle(CARRY, STRANGER, copied=False)) == []


# --- as the destination ---


def test_a_group_is_lent_blocks_before_it_is_bound(bench: Bench) -> None:
    expect(bench, "r", unit=GROUP)
    assert lend_ahead(bench) == []
    assert bench.turn(3) == [], "it needs them"
    (request,) = reserve(bench, described("r"), unit=GROUP).requests
    assert (request.begin, request.end) == (0, 24)
    assert request.target == {0: [[1, 2, 3]], 1: [LEASE_1[:3]]}
    assert bench.turn(3) == []
    assert bench.tell(m.Settle(CARRY, GROUP, copied=True)) == []
    bench.bind(10)
    core = bench.backend.groups[GROUP]
    assert core.lease_blocks == 16
    computed = m.CarriedRequest("r", expected_tokens(prompt_of("r"), 2), 31, {1: [[*range(8)]]}, 32)
    imported, wish = bench.tell(m.Import(CARRY, GROUP, OTHER, [computed]), turns=3)
    assert isinstance(imported, m.Imported)
    assert imported.carried == ["r"]
    assert isinstance(wish, m.NeedBlocks)
    assert not wish.urgent, "it does without, but would evict what it caches"
    assert core.load.free_blocks <= 16 - 4


def test_what_nobody_comes_for_goes_back(bench: Bench) -> None:
    expect(bench, "r", unit=GROUP)
    lend_ahead(bench)
    reserve(bench, described("r"), unit=GROUP)
    imported, returning = bench.tell(m.Import(CARRY, GROUP, OTHER, []))
    assert isinstance(imported, m.Imported)
    assert isinstance(returning, m.Returning)
    assert len(returning.returned[0]) == 3, "members may still read into the other half"
    returning = only(bench.tell(m.Settle(CARRY, GROUP, copied=False)), m.Returning)
    returned = {engine: sorted(blocks) for engine, blocks in returning.returned.items()}
    assert returned == {0: [1, 2, 3], 1: LEASE_1[:3]}
    assert bench.backend.groups[GROUP].lease_blocks == 0
    bench.tell(m.TakeBack([1, 2, 3, 4, 5, 6]))
    assert problems(bench.backend) == []


def test_a_group_that_expects_nothing_gives_back_at_once(bench: Bench) -> None:
    returning = only(lend_ahead(bench), m.Returning)
    assert len(returning.returned[0]) == 6


def test_an_empty_lease_ahead_is_no_answer_to_a_wish(bench: Bench) -> None:
    bench.bind(blocks=1)
    bench.add("shared", prompt=30, tokens=3, group=GROUP)
    assert bench.tell(m.Grow(m.AHEAD, GROUP, {0: [], 1: []})) == []
    bench.clock.advance(1.0)
    assert bench.turn() == [], "it still waits for what it has asked for"


def test_what_is_cached_of_an_ended_request_stays_cached_and_is_not_held(bench: Bench) -> None:
    frames = {id_: request_payload(id_, prompt_of(id_), OUTPUT) for id_ in ("r", "old")}
    old = described("old cached").as_prefix("old cached")
    expect = m.Expect(CARRY, OWN, {"r": frames["r"]}, {"old cached": frames["old"]})
    assert bench.tell(expect) == []
    reserved = reserve(bench, old, described("r"))
    assert {one.request_id for one in reserved.requests} == {"r", "old cached"}
    assert bench.tell(m.Settle(CARRY, OWN, copied=True)) == []
    own = bench.backend.own
    assert own.load.free_blocks == 200 - 7, "only the running one's blocks are held"
    only(bench.tell(m.Import(CARRY, OWN, OTHER, [])), m.Imported)
    assert own.load.free_blocks == 200
    assert problems(bench.backend) == []
    assert cached(bench, "old") == 28


def test_an_ended_request_that_could_not_be_copied_is_not_cached(bench: Bench) -> None:
    frames = request_payload("old", prompt_of("old"), OUTPUT)
    assert bench.tell(m.Expect(CARRY, OWN, {}, {"old cached": frames})) == []
    reserve(bench, described("old cached").as_prefix("old cached"))
    assert bench.tell(m.Settle(CARRY, OWN, copied=False)) == []
    assert cached(bench, "old") == 0


def test_those_that_have_least_to_read_come_first(bench: Bench) -> None:
    """The long request has nearly all of its KV here already, and needs the fewest blocks."""
    expect(bench, "short", "long")
    reserve(bench, described("long"))
    bench.tell(m.Settle(CARRY, OWN, copied=True))
    bench.backend.own.lend(200 - 7 - 2)
    blocks = {1: [[*range(1, 9)]]}
    short = m.CarriedRequest(
        "short", expected_tokens(prompt_of("short"), 1), 12, blocks, PROMPT + 1
    )
    long = m.CarriedRequest("long", expected_tokens(prompt_of("long"), 1), 30, blocks, PROMPT + 1)
    imported = only(bench.tell(m.Import(CARRY, OWN, OTHER, [short, long])), m.Imported)
    assert (imported.carried, imported.left) == (["long"], 1)


# --- as a unit with members of the destination ---


def test_the_answer_comes_when_all_is_read(slow: Bench) -> None:
    expect(slow, "r")
    requests = reserve(slow, described("r")).requests
    assert slow.tell(m.CopyAhead(CARRY, OWN, OTHER, OWN, requests)) == []
    assert slow.agent.next_wakeup() == pytest.approx(READ_SECONDS)
    slow.clock.advance(READ_SECONDS / 2)
    assert slow.turn() == []
    slow.clock.advance(READ_SECONDS / 2)
    copied = only(slow.turn(), m.CopiedAhead)
    assert copied == m.CopiedAhead(CARRY, 0, OWN)
    assert slow.turn() == []


def test_a_group_reads_for_one_of_its_members(slow: Bench) -> None:
    slow.bind()
    expect(slow, "r")
    requests = reserve(slow, described("r")).requests
    assert slow.tell(m.CopyAhead(CARRY, GROUP, OTHER, OWN, requests)) == []
    slow.clock.advance(READ_SECONDS)
    assert only(slow.turn(), m.CopiedAhead).unit == GROUP


def test_nobody_waits_for_a_group_that_is_formed_anew(slow: Bench) -> None:
    expect(slow, "r")
    requests = reserve(slow, described("r")).requests
    slow.tell(m.CopyAhead(CARRY, GROUP, OTHER, OWN, requests))
    assert [type(answer) for answer in slow.tell(m.FormGroup(9, GROUP, 1), turns=3)] == [m.Formed]
    slow.tell(m.StartGroup(9, GROUP), turns=3)
    slow.clock.advance(READ_SECONDS)
    assert slow.turn(3) == []
