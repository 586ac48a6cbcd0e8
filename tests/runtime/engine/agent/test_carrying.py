"""An engine's part in carries, message by message; the other engine's part is played."""

from typing import Any

import msgspec
import pytest

from shoal.policies.values.layouts import Unit, alone
from shoal.runtime.engine.agent.carrying import ROOM_SECONDS, TOGETHER_SECONDS
from shoal.runtime.engine.agent.results import Copied
from shoal.runtime.engine.fake.fake_tokens import expected_tokens
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire
from tests.runtime.engine.agent.agent_bench import GROUP, LEASE_1, Bench, started
from tests.runtime.loopback_node import problems, request_payload

STEP = 0.5
PROMPT, OUTPUT = [1] * 8, 9
OWN, OTHER = alone(0), alone(1)
CARRY = 3


def carried(request_id: str, tokens: int = 3, computed: int | None = None) -> m.CarriedRequest:
    """Return what the other engine says of a request; it has so many output tokens."""
    computed = len(PROMPT) + tokens - 1 if computed is None else computed
    blocks = {1: [list(range(1, computed // 4 + 2))]} if computed else {}
    length = len(PROMPT) + tokens
    return m.CarriedRequest(request_id, expected_tokens(PROMPT, tokens), computed, blocks, length)


def expect(
    bench: Bench,
    *ids: str,
    unit: Unit = OWN,
    prompt: int = len(PROMPT),
    carry: int = CARRY,
) -> None:
    frames = {id_: request_payload(id_, [1] * prompt, OUTPUT, client=1) for id_ in ids}
    assert bench.tell(m.Expect(carry, unit, frames, {})) == []


def take_in(
    bench: Bench, *requests: m.CarriedRequest, unit: Unit = OWN, carry: int = CARRY
) -> list[m.Message]:
    return bench.tell(m.Import(carry, unit, OTHER, list(requests)))


def only(answers: list[m.Message], kind: type) -> Any:
    """Return the one answer of a kind, which is the only one."""
    (answer,) = answers
    assert isinstance(answer, kind)
    return answer


def outputs(bench: Bench, client: int = 0) -> list[wire.Output]:
    messages = bench.network.front_outputs.get(client, [])
    decoder = msgspec.msgpack.Decoder(wire.Outputs)
    return [output for frames in messages for output in decoder.decode(frames[0]).outputs]


def tokens_of(bench: Bench, request_id: str, client: int = 0) -> list[int]:
    made = [output for output in outputs(bench, client) if output.request_id == request_id]
    return [token for output in made for token in output.new_token_ids]


@pytest.fixture
def busy() -> Bench:
    """Return an engine with two requests, of which a step is in flight."""
    bench = started(step_seconds=STEP)
    bench.add("leaves", tokens=OUTPUT)
    bench.add("stays", tokens=OUTPUT)
    for _ in range(2):
        bench.clock.advance(STEP)
        bench.turn(2)
    return bench


# --- the source ---


def test_requests_are_exported_when_the_step_in_flight_is_collected(busy: Bench) -> None:
    own = busy.backend.own
    leaving = only(busy.tell(m.Export(CARRY, OWN, ["leaves", "ended"]), turns=3), m.Leaving)
    assert (leaving.carry, leaving.engine, leaving.unit) == (CARRY, 0, OWN)
    assert (busy.agent.active, own.in_flight) == ([], 1)
    busy.clock.advance(STEP)
    exported = only(busy.turn(), m.Exported)
    assert (exported.carry, exported.engine, exported.unit) == (CARRY, 0, OWN)
    (announced,), (rest,) = leaving.requests, exported.requests
    assert (rest.is_rest, rest.blocks, len(rest.tokens)) == (True, {}, 1)
    request = rest.after(announced)
    assert (request.computed, request.length) == (len(PROMPT) + 2, len(PROMPT) + 3)
    assert request.tokens == tokens_of(busy, "leaves") == expected_tokens(PROMPT, 3)
    busy.turn()
    assert (busy.agent.active, own.in_flight, own.load.running) == ([own], 1, 1)


def test_dropped_requests_free_their_blocks(busy: Bench) -> None:
    own = busy.backend.own
    busy.tell(m.Export(CARRY, OWN, ["leaves"]))
    busy.clock.advance(STEP)
    busy.turn()
    held = own.load.free_blocks
    assert busy.tell(m.Drop(OWN, ["leaves", "unknown"])) == []
    assert own.load.free_blocks == held + 3
    assert own.num_requests == 1


@pytest.mark.parametrize("early", [True, False])
def test_kept_requests_go_on(busy: Bench, early: bool) -> None:
    only(busy.tell(m.Export(CARRY, OWN, ["leaves"])), m.Leaving)
    if not early:
        busy.clock.advance(STEP)
        assert len(only(busy.turn(), m.Exported).requests) == 1
    answers = busy.tell(m.Keep(OWN, ["leaves"]))
    for _ in range(OUTPUT):
        busy.clock.advance(STEP)
        answers += busy.turn(2)
    assert answers == ([m.Exported(CARRY, 0, OWN, [])] if early else [])
    assert tokens_of(busy, "leaves") == expected_tokens(PROMPT, OUTPUT)
    assert tokens_of(busy, "stays") == expected_tokens(PROMPT, OUTPUT)


def test_a_paused_core_exports_too(busy: Bench) -> None:
    busy.tell(m.Prepare(5, GROUP, m.Treatment.HARD, 10))
    busy.tell(m.Export(CARRY, OWN, ["leaves", "stays"]))
    busy.clock.advance(STEP)
    assert len(only(busy.turn(), m.Exported).requests) == 2
    urgent = busy.backend.own.lend(200, urgent=True)
    assert len(urgent) == 200 - 10 - 6, "exported requests keep their blocks"


def test_a_unit_exports_nothing_before_its_own_copy_has_ended() -> None:
    bench = started(step_seconds=STEP, copy_seconds=2.0)
    expect(bench, "r")
    assert take_in(bench, carried("r")) == []
    bench.clock.advance(STEP)
    only(bench.tell(m.Export(4, OWN, ["r"]), turns=3), m.Leaving)
    bench.clock.advance(2.0 - STEP)
    only(bench.turn(), m.Imported)
    assert bench.turn() == [], "its first step is in flight"
    bench.clock.advance(STEP)
    (request,) = only(bench.turn(), m.Exported).requests
    assert request.tokens == expected_tokens(PROMPT, 4)[3:]


# --- the destination ---


def test_kv_that_could_not_be_read_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller lets nobody have the blocks before that."""
    bench = started(step_seconds=STEP, copy_seconds=2.0)
    expect(bench, "r")
    assert take_in(bench, carried("r")) == []
    lost = [Copied(["r"], 0, 0.0, "engine 1 has ended")]
    monkeypatch.setattr(bench.backend.own, "copied", lambda: [lost.pop()] if lost else [])
    assert only(bench.turn(), m.Imported) == m.Imported(CARRY, 0, OWN, [], {}, 0, failed=True)


def test_imported_requests_go_on(bench: Bench) -> None:
    expect(bench, "a", "b")
    imported = only(take_in(bench, carried("a"), carried("b", 2)), m.Imported)
    assert imported == m.Imported(CARRY, 0, OWN, ["b", "a"], {}, 0)
    bench.turn(OUTPUT)
    assert tokens_of(bench, "a", 1) == expected_tokens(PROMPT, OUTPUT)[3:]
    assert tokens_of(bench, "b", 1) == expected_tokens(PROMPT, OUTPUT)[2:]
    first = next(output for output in outputs(bench, 1) if output.request_id == "a")
    assert first.prefill_stats is not None
    assert first.prefill_stats.num_prompt_tokens == len(PROMPT) + 3
    assert problems(bench.backend) == []


def test_an_import_is_answered_when_its_copy_has_ended() -> None:
    bench = started(copy_seconds=2.0)
    expect(bench, "r")
    assert take_in(bench, carried("r")) == []
    assert bench.turn() == []
    assert bench.agent.next_wakeup() == pytest.approx(2.0)
    bench.clock.advance(2.0)
    imported = only(bench.turn(), m.Imported)
    assert (imported.carried, imported.seconds, imported.left) == (["r"], 2.0, 0)


def test_imported_requests_count_as_sent_to_the_unit(bench: Bench) -> None:
    expect(bench, "a", "b")
    bench.network.controller.to_engine(0, m.Import(CARRY, OWN, OTHER, [carried("a")]), ())
    bench.agent.turn()
    loads = [x for x in bench.heard() if isinstance(x, m.Load) and x.unit == OWN]
    assert loads[-1].added == 1


def test_what_is_expected_and_does_not_come_is_forgotten(bench: Bench) -> None:
    expect(bench, "a", "b")
    assert take_in(bench) == [m.Imported(CARRY, 0, OWN, [], {}, 0)]
    with pytest.raises(KeyError):
        bench.backend.own.adopt(OTHER, carried("a"), with_kv=True)


def test_what_finds_no_room_comes_when_blocks_come_back(bench: Bench) -> None:
    own = bench.backend.own
    lent = own.lend(200 - 4)
    expect(bench, "long", "short")
    imported = only(take_in(bench, carried("long", 8), carried("short", 1)), m.Imported)
    assert (imported.carried, imported.left) == (["short"], 1)
    assert bench.turn(3) == []
    bench.tell(m.TakeBack(lent))
    imported = only(bench.turn(), m.Imported)
    assert (imported.carried, imported.recomputed, imported.left) == (["long"], {}, 0)


def test_requests_of_several_sources_take_turns(bench: Bench) -> None:
    """The next one is always of the source that has most; all answer when the last has come."""
    own = bench.backend.own
    lent = own.lend(200 - 3 * 3)
    for carry, ids in ((CARRY, ["a", "b"]), (CARRY + 1, ["c", "d", "e", "f"])):
        expect(bench, *ids, carry=carry)
    first = m.Import(CARRY, OWN, OTHER, [carried("a"), carried("b")], more=True)
    assert bench.tell(first, turns=3) == []
    came = take_in(bench, *map(carried, "cdef"), carry=CARRY + 1)
    assert [(each.carried, each.left) for each in came] == [(["a"], 1), (["c", "d"], 2)]
    own.take_back(lent)
    assert [each.carried for each in bench.turn(2)] == [["b"], ["e", "f"]]


def test_each_of_several_sources_gives_up_its_longest_request(bench: Bench) -> None:
    own = bench.backend.own
    own.lend(200 - 1)
    for carry, ids in ((CARRY, ["a", "b"]), (CARRY + 1, ["c", "d"])):
        expect(bench, *ids, carry=carry)
    bench.tell(m.Import(CARRY, OWN, OTHER, [carried("a", 8), carried("b")], more=True))
    assert take_in(bench, carried("c"), carried("d", 8), carry=CARRY + 1) == []
    assert bench.agent.next_wakeup() == pytest.approx(ROOM_SECONDS)
    bench.clock.advance(ROOM_SECONDS)
    again = m.Fallback.NO_ROOM
    assert [(each.recomputed, each.left) for each in bench.turn(2)] == [
        ({"a": again}, 1),
        ({"d": again}, 1),
    ]


def test_what_finds_no_room_for_long_is_computed_again(bench: Bench) -> None:
    bench.backend.own.lend(200 - 1)
    expect(bench, "r")
    assert take_in(bench, carried("r")) == []
    assert bench.agent.next_wakeup() == pytest.approx(ROOM_SECONDS)
    bench.clock.advance(ROOM_SECONDS / 2)
    assert bench.turn() == []
    bench.clock.advance(ROOM_SECONDS / 2)
    imported = only(bench.turn(), m.Imported)
    assert (imported.carried, imported.left) == ([], 0)
    assert imported.recomputed == {"r": m.Fallback.NO_ROOM}
    bench.backend.own.take_back(sorted(bench.backend.own.lent))
    bench.turn(OUTPUT)
    assert tokens_of(bench, "r", 1) == expected_tokens(PROMPT, OUTPUT)[3:]


def test_nobody_gives_up_while_a_portion_is_copied() -> None:
    bench = started(copy_seconds=4 * ROOM_SECONDS)
    bench.backend.own.lend(200 - 4)
    expect(bench, "long", "short")
    take_in(bench, carried("long", 8), carried("short", 1))
    bench.clock.advance(2 * ROOM_SECONDS)
    assert bench.turn(2) == []
    bench.clock.advance(2 * ROOM_SECONDS)
    imported = only(bench.turn(2), m.Imported)
    assert (imported.carried, imported.left) == (["short"], 1)
    bench.clock.advance(ROOM_SECONDS)
    assert only(bench.turn(), m.Imported).recomputed == {"long": m.Fallback.NO_ROOM}


def test_a_group_asks_for_the_blocks_that_arrivals_lack(bench: Bench) -> None:
    bench.bind(blocks=1)
    expect(bench, "r", unit=GROUP)
    wish = only(take_in(bench, carried("r"), unit=GROUP), m.NeedBlocks)
    assert (wish.blocks, wish.urgent) == (1, True), "a block of a pair holds eight tokens"
    lent = only(bench.tell(m.Lend(5, GROUP, 1, urgent=True)), m.Lent).blocks
    lease = {0: lent, 1: LEASE_1[1:2]}
    answers = bench.tell(m.Grow(5, GROUP, lease), turns=2)
    imported = only([each for each in answers if isinstance(each, m.Imported)], m.Imported)
    assert (imported.unit, imported.carried, imported.left) == (GROUP, ["r"], 0)
    assert m.NeedBlocks in map(type, answers), "now for its next block"


def test_a_unit_that_is_not_bound_takes_requests_without_their_kv(bench: Bench) -> None:
    expect(bench, "r", unit=GROUP)
    imported = only(take_in(bench, carried("r"), unit=GROUP), m.Imported)
    assert (imported.recomputed, imported.left) == ({"r": m.Fallback.NO_ROOM}, 0)
    bench.bind()
    bench.turn(OUTPUT + 2)
    assert tokens_of(bench, "r", 1) == expected_tokens(PROMPT, OUTPUT)[3:]


def test_a_request_that_is_not_valid_here_ends_with_an_error_when_it_comes(bench: Bench) -> None:
    expect(bench, "long", prompt=300)
    assert outputs(bench, 1) == [], "it still runs elsewhere"
    bench.network.controller.to_engine(0, m.Import(CARRY, OWN, OTHER, [carried("long")]), ())
    bench.agent.turn()
    heard = bench.heard()
    (load,) = [x for x in heard if isinstance(x, m.Load) and x.unit == OWN]
    assert (load.finished, load.added) == (["long"], 1)
    assert outputs(bench, 1) == [wire.Output("long", [], finish_reason=wire.FinishReason.ERROR)]
    assert [x for x in heard if isinstance(x, m.Imported)] == [m.Imported(CARRY, 0, OWN, [], {}, 0)]


# --- the first steps of a core that goes on ---


def group_with_one_of_two_carries(bench: Bench) -> None:
    """Bind, and let one request come while another one is still expected."""
    expect(bench, "early", unit=GROUP)
    expect(bench, "late", unit=GROUP, carry=CARRY + 1)
    bench.bind()
    only(take_in(bench, carried("early"), unit=GROUP), m.Imported)
    assert bench.turn(4) == []
    assert tokens_of(bench, "early", 1) == []


def test_a_group_begins_when_all_that_it_expects_has_come(bench: Bench) -> None:
    group_with_one_of_two_carries(bench)
    only(take_in(bench, carried("late"), unit=GROUP, carry=CARRY + 1), m.Imported)
    bench.turn(OUTPUT)
    for request_id in ("early", "late"):
        assert tokens_of(bench, request_id, 1) == expected_tokens(PROMPT, OUTPUT)[3:]


def test_a_group_does_not_wait_for_requests_that_do_not_come(bench: Bench) -> None:
    group_with_one_of_two_carries(bench)
    take_in(bench, unit=GROUP, carry=CARRY + 1)
    bench.turn(OUTPUT)
    assert tokens_of(bench, "early", 1) == expected_tokens(PROMPT, OUTPUT)[3:]


def test_a_group_does_not_wait_for_long(bench: Bench) -> None:
    group_with_one_of_two_carries(bench)
    assert bench.agent.next_wakeup() == pytest.approx(TOGETHER_SECONDS)
    bench.clock.advance(TOGETHER_SECONDS)
    bench.turn(OUTPUT)
    assert tokens_of(bench, "early", 1) == expected_tokens(PROMPT, OUTPUT)[3:]


@pytest.mark.parametrize("nothing", [False, True], ids=["none came", "nothing came"])
def test_a_group_waits_for_nobody_before_a_request_has_come(bench: Bench, nothing: bool) -> None:
    """Of what is cached of ended requests, no request comes when the group is bound."""
    expect(bench, "late", unit=GROUP)
    bench.bind()
    if nothing:
        take_in(bench, unit=GROUP, carry=CARRY + 1)
    bench.add("new", tokens=2, group=GROUP)
    bench.turn(4)
    assert len(tokens_of(bench, "new")) == 2


def test_a_group_without_requests_takes_no_step_before_the_first_comes(bench: Bench) -> None:
    """A step that says what has ended would be in flight, and theirs could not be sent ahead."""
    expect(bench, "late", unit=GROUP)
    bench.bind()
    group = bench.backend.groups[GROUP]
    assert group not in bench.agent.active
    bench.turn()
    assert bench.agent.next_wakeup() is None, "until something comes"
    take_in(bench, carried("late"), unit=GROUP)
    assert group in bench.agent.active


def test_an_engine_that_goes_on_alone_waits_for_what_it_expects(bench: Bench) -> None:
    bench.bind()
    expect(bench, "r")
    bench.tell(m.Release(5, GROUP, m.Treatment.HARD))
    bench.add("new", tokens=2)
    bench.tell(m.Resume(5, GROUP, []), turns=4)
    assert tokens_of(bench, "new") == []
    only(take_in(bench, carried("r")), m.Imported)
    bench.turn(2)
    assert len(tokens_of(bench, "new")) == 2


def test_an_engine_that_goes_on_alone_does_not_wait_for_requests_that_do_not_come(
    bench: Bench,
) -> None:
    bench.bind()
    expect(bench, "lost")
    bench.tell(m.Release(5, GROUP, m.Treatment.HARD))
    bench.add("new", tokens=2)
    bench.tell(m.Resume(5, GROUP, []), turns=4)
    take_in(bench)
    bench.turn(2)
    assert len(tokens_of(bench, "new")) == 2


def test_a_unit_that_serves_waits_for_nobody(bench: Bench) -> None:
    expect(bench, "from elsewhere")
    bench.add("own", tokens=2)
    bench.turn(2)
    assert len(tokens_of(bench, "own")) == 2


# --- requests whose clients have gone ---


def test_an_expected_request_may_be_aborted(bench: Bench) -> None:
    expect(bench, "gone", "r")
    bench.tell(m.AbortRequests(OWN, ["gone"]))
    assert only(take_in(bench, carried("gone"), carried("r")), m.Imported).carried == ["r"]


def test_a_request_that_waits_for_room_may_be_aborted(bench: Bench) -> None:
    bench.backend.own.lend(200 - 1)
    expect(bench, "gone")
    assert take_in(bench, carried("gone")) == []
    assert bench.tell(m.AbortRequests(OWN, ["gone"])) == [m.Imported(CARRY, 0, OWN, [], {}, 0)]
    assert bench.backend.own.num_requests == 0


def test_a_request_may_be_aborted_while_its_kv_is_copied() -> None:
    bench = started(copy_seconds=2.0)
    expect(bench, "gone")
    take_in(bench, carried("gone"))
    assert bench.tell(m.AbortRequests(OWN, ["gone"])) == []
    bench.clock.advance(2.0)
    assert only(bench.turn(), m.Imported).left == 0
    assert bench.backend.own.num_requests == 0
    assert problems(bench.backend) == []


def test_an_abort_concerns_one_unit(busy: Bench) -> None:
    """The engine may lead both units of a carry, and what is being read must stay as it is."""
    busy.tell(m.Export(CARRY, OWN, ["leaves"]))
    busy.clock.advance(STEP)
    busy.turn()
    assert busy.tell(m.AbortRequests(GROUP, ["leaves"])) == []
    assert busy.backend.own.num_requests == 2


@pytest.mark.parametrize("exported", [True, False])
def test_a_request_that_leaves_may_be_aborted(busy: Bench, exported: bool) -> None:
    busy.tell(m.Export(CARRY, OWN, ["leaves"]))
    if exported:
        busy.clock.advance(STEP)
        busy.turn()
    answers = busy.tell(m.AbortRequests(OWN, ["leaves"]))
    busy.clock.advance(STEP)
    answers += busy.turn()
    assert answers == ([] if exported else [m.Exported(CARRY, 0, OWN, [])])
    assert busy.backend.own.num_requests == 1
    assert problems(busy.backend) == []
