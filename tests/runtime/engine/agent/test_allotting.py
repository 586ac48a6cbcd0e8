"""Requests that get their blocks in the next unit while their last step runs in the old one."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs

from shoal.policies.values.layouts import Unit
from shoal.runtime.engine.agent import allotting
from shoal.runtime.engine.agent.allotting import ALLOT_SECONDS
from shoal.runtime.engine.fake.fake_tokens import expected_tokens
from shoal.runtime.protocol import messages as m
from tests.runtime.engine.agent.agent_bench import Bench, started
from tests.runtime.engine.agent.test_carrying import (
    CARRY,
    OTHER,
    OUTPUT,
    OWN,
    PROMPT,
    STEP,
    carried,
    expect,
    only,
    outputs,
    take_in,
    tokens_of,
)
from tests.runtime.loopback_node import problems

BLOCKS = 3
"""Blocks of a request with three output tokens."""


def announced(request_id: str) -> m.CarriedRequest:
    """Return what the other engine says before the third output token is there."""
    whole = carried(request_id)
    return structs.replace(whole, tokens=whole.tokens[:-1])


def rest(request_id: str) -> m.CarriedRequest:
    """Return what it says when the token is there."""
    whole = carried(request_id)
    return structs.replace(whole, tokens=whole.tokens[-1:], blocks={}, is_rest=True)


@pytest.fixture
def bench() -> Bench:
    return started(step_seconds=STEP, prefix_caching=True)


@pytest.fixture
def plain() -> Bench:
    """Return an engine that caches no prefixes, so that requests with one prompt share nothing."""
    return started(step_seconds=STEP)


def free(bench: Bench) -> int:
    return bench.backend.own.load.free_blocks


def allot(bench: Bench, *ids: str, turns: int = 1) -> None:
    requests = [announced(id_) for id_ in ids]
    assert bench.tell(m.Allot(CARRY, OWN, OTHER, requests), turns=turns) == []


def test_allotted_requests_have_their_blocks_and_wait(bench: Bench) -> None:
    expect(bench, "r")
    before = free(bench)
    allot(bench, "r")
    own = bench.backend.own
    assert (before - free(bench), own.num_requests, own.in_flight) == (BLOCKS, 0, 0)
    assert problems(bench.backend) == []


def test_runners_are_told_when_all_have_their_blocks(
    plain: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[object]()
    monkeypatch.setattr(plain.backend.own, "tell_allotted", told.append)
    monkeypatch.setattr(allotting, "ALLOT_SECONDS", 0.0)
    expect(plain, "a", "b")
    allot(plain, "a", "b", turns=3)
    whole = [(OTHER, ["a", "b"])]
    assert [each for each in told if each] == []
    monkeypatch.setattr(allotting, "ALLOT_SECONDS", 1.0)
    plain.turn(3)
    assert [each for each in told if each] == [whole], "once"


def test_runners_are_not_told_while_one_has_no_blocks(
    plain: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[object]()
    monkeypatch.setattr(plain.backend.own, "tell_allotted", told.append)
    allot_one = plain.backend.own.allot
    monkeypatch.setattr(
        plain.backend.own, "allot", lambda each: each.request_id == "a" and allot_one(each)
    )
    expect(plain, "a", "b")
    allot(plain, "a", "b", turns=3)
    assert [*told] == [[]]


def test_the_rest_of_an_allotted_request_is_enough(bench: Bench) -> None:
    expect(bench, "r")
    allot(bench, "r")
    before = free(bench)
    only(take_in(bench, rest("r")), m.Imported)
    assert free(bench) == before
    for _ in range(OUTPUT):
        bench.clock.advance(STEP)
        bench.turn(2)
    assert tokens_of(bench, "r", client=1) == expected_tokens(PROMPT, OUTPUT)[3:]
    assert (free(bench), problems(bench.backend)) == (200, [])


def test_nobody_finds_what_is_not_read_yet(bench: Bench) -> None:
    expect(bench, "r")
    allot(bench, "r")
    bench.add("alike", tokens=1)  # the same prompt
    bench.clock.advance(STEP)
    bench.turn(2)
    (output,) = [o for o in outputs(bench) if o.request_id == "alike"]
    assert output.prefill_stats is not None
    assert output.prefill_stats.num_cached_tokens == 0


def test_a_request_that_is_not_as_it_was_foretold_is_taken_whole(bench: Bench) -> None:
    expect(bench, "r")
    allot(bench, "r")
    imported = only(take_in(bench, carried("r", tokens=5)), m.Imported)
    assert imported.carried == ["r"]
    for _ in range(OUTPUT):
        bench.clock.advance(STEP)
        bench.turn(2)
    assert tokens_of(bench, "r", client=1) == expected_tokens(PROMPT, OUTPUT)[5:]
    assert (free(bench), problems(bench.backend)) == (200, [])


@pytest.mark.parametrize("aborted", [True, False])
def test_what_does_not_come_gives_its_blocks_back(plain: Bench, aborted: bool) -> None:
    expect(plain, "ended", "comes")
    allot(plain, "ended", "comes")
    if aborted:
        plain.tell(m.AbortRequests(OWN, ["ended"]))
        assert free(plain) == 200 - BLOCKS
    only(take_in(plain, rest("comes")), m.Imported)
    assert (free(plain), problems(plain.backend)) == (200 - BLOCKS, [])


def test_an_aborted_request_gets_no_blocks(bench: Bench) -> None:
    expect(bench, "r")
    bench.tell(m.AbortRequests(OWN, ["r"]))
    allot(bench, "r")
    assert free(bench) == 200


def test_a_request_that_begins_alike_waits_for_the_first_one(bench: Bench) -> None:
    expect(bench, "a", "b")
    allot(bench, "a", "b")
    assert free(bench) == 200 - BLOCKS
    imported = only(take_in(bench, rest("a"), rest("b")), m.Imported)
    assert sorted(imported.carried) == ["a", "b"]
    assert free(bench) == 200 - BLOCKS - 1, "two of the blocks are the first one's"
    assert problems(bench.backend) == []


def test_what_has_come_and_waits_for_room_goes_first(plain: Bench) -> None:
    taken = plain.backend.own.lend(200 - 2)
    expect(plain, "r", carry=2)
    assert take_in(plain, carried("r"), carry=2) == []
    expect(plain, "later")
    allot(plain, "later")
    assert plain.agent.next_wakeup() != 0.0
    plain.backend.own.take_back(taken[:1])
    assert only(plain.turn(2), m.Imported).carried == ["r"]
    assert free(plain) == 0


def test_many_get_their_blocks_in_several_turns(
    plain: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = plain.backend.own
    take = core.allot

    def slowly(request: m.CarriedRequest) -> bool:
        plain.clock.advance(0.6 * ALLOT_SECONDS)
        return take(request)

    monkeypatch.setattr(core, "allot", slowly)
    expect(plain, "a", "b", "c")
    allot(plain, "a", "b", "c")
    assert free(plain) == 200 - 2 * BLOCKS
    assert plain.agent.next_wakeup() == 0.0
    plain.turn()
    assert free(plain) == 200 - 3 * BLOCKS


def test_those_that_find_no_room_come_as_others_do(plain: Bench) -> None:
    taken = plain.backend.own.lend(200 - BLOCKS)
    expect(plain, "r", "late")
    allot(plain, "r", "late")
    assert free(plain) == 0
    imported = only(take_in(plain, rest("r"), rest("late")), m.Imported)
    assert (imported.left, len(imported.carried)) == (1, 1)
    plain.backend.own.take_back(taken)
    assert plain.turn() == [], "the first one's step is in flight"
    plain.clock.advance(STEP)
    imported = only(plain.turn(), m.Imported)
    assert (imported.left, len(imported.carried)) == (0, 1)


def test_the_source_describes_a_request_anew_that_ends_otherwise(bench: Bench) -> None:
    """Its last step is counted wrong on purpose."""
    bench.add("leaves", tokens=OUTPUT)
    for _ in range(2):
        bench.clock.advance(STEP)
        bench.turn(2)
    own = bench.backend.own
    only(bench.tell(m.Export(CARRY, OWN, ["leaves"])), m.Leaving)
    foretold = own._leaving._announced
    foretold["leaves"] = structs.replace(foretold["leaves"], computed=3)
    bench.clock.advance(STEP)
    (request,) = only(bench.turn(), m.Exported).requests
    assert not request.is_rest
    assert request.tokens == expected_tokens(PROMPT, 3)
    assert request.blocks


def test_nothing_is_announced_where_no_step_is_in_flight(bench: Bench) -> None:
    only(bench.tell(m.Export(CARRY, OWN, ["unknown"])), m.Exported)


# --- first steps that are sent before requests are adopted ---


class Noted:
    """What an engine's core does of all that concerns its first step, in order."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch, *, sends: bool) -> None:
        self.calls: list[str] = []
        self.sent: list[list[str]] = []
        self._core, self._monkeypatch = bench.backend.own, monkeypatch
        for name in ("adopt", "copy", "dispatch"):
            self._note(name)

        def send_first(carries: Sequence[tuple[Unit, Sequence[m.CarriedRequest]]]) -> bool:
            self.calls.append("send_first")
            self.sent += [[request.request_id for request in requests] for _, requests in carries]
            return sends

        monkeypatch.setattr(self._core, "send_first", send_first)

    def _note(self, name: str) -> None:
        method = getattr(self._core, name)

        def noting(*arguments: Any, **named: Any) -> Any:
            self.calls.append(name)
            return method(*arguments, **named)

        self._monkeypatch.setattr(self._core, name, noting)


@pytest.mark.parametrize("sends", [True, False])
def test_a_first_step_is_sent_before_requests_are_adopted(
    plain: Bench, monkeypatch: pytest.MonkeyPatch, sends: bool
) -> None:
    expect(plain, "a", "b")
    allot(plain, "a", "b")
    noted = Noted(plain, monkeypatch, sends=sends)
    take_in(plain, rest("a"), rest("b"))
    assert noted.sent == [["a", "b"]]
    assert noted.calls[:5] == ["send_first", "adopt", "adopt", "copy", "dispatch"]
    assert noted.calls.count("dispatch") == 1 + sends, "at once, and again in its turn"


def test_a_first_step_is_for_all_that_is_expected(
    plain: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect(plain, "a")
    expect(plain, "b", carry=CARRY + 1)
    allot(plain, "a")
    noted = Noted(plain, monkeypatch, sends=False)
    take_in(plain, rest("a"))
    assert noted.sent == []
    plain.tell(m.Allot(CARRY + 1, OWN, OTHER, [announced("b")]))
    take_in(plain, rest("b"), carry=CARRY + 1)
    assert noted.sent == [["b"]]


def test_no_first_step_is_sent_of_requests_without_blocks(
    plain: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect(plain, "a", "b")
    allot(plain, "a")
    noted = Noted(plain, monkeypatch, sends=True)
    take_in(plain, rest("a"), carried("b"))
    assert (noted.sent, noted.calls[:3]) == ([], ["adopt", "adopt", "copy"])


def test_what_was_not_allotted_in_time_is_when_it_comes(
    plain: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allotting, "ALLOT_SECONDS", 0.0)
    expect(plain, "a", "b")
    allot(plain, "a", "b")
    noted = Noted(plain, monkeypatch, sends=True)
    take_in(plain, rest("a"), rest("b"))
    assert [sorted(names) for names in noted.sent] == [["a", "b"]]
    assert noted.calls[:5] == ["send_first", "adopt", "adopt", "copy", "dispatch"]


def test_what_comes_with_others_that_have_their_blocks_is_allotted_when_it_comes(
    plain: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect(plain, "a")
    expect(plain, "b", carry=CARRY + 1)
    allot(plain, "a")
    monkeypatch.setattr(allotting, "ALLOT_SECONDS", 0.0)
    plain.tell(m.Allot(CARRY + 1, OWN, OTHER, [announced("b")]))
    noted = Noted(plain, monkeypatch, sends=True)
    for carry, name in ((CARRY, "a"), (CARRY + 1, "b")):
        plain.network.controller.to_engine(0, m.Import(carry, OWN, OTHER, [rest(name)]))
    plain.turn()
    assert noted.sent == [["a"], ["b"]], "they need not be adopted before the step is sent"
    assert noted.calls[:4] == ["send_first", "adopt", "copy", "adopt"]


def test_what_shares_the_room_with_others_is_not_allotted_when_it_comes(
    plain: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allotting, "ALLOT_SECONDS", 0.0)
    expect(plain, "a")
    expect(plain, "b", carry=CARRY + 1)
    allot(plain, "a")
    noted = Noted(plain, monkeypatch, sends=True)
    for carry, name, more in ((CARRY, "a", True), (CARRY + 1, "b", False)):
        message = m.Import(carry, OWN, OTHER, [carried(name)], more)
        plain.network.controller.to_engine(0, message)
    plain.turn()
    assert noted.sent == []
    assert noted.calls[:3] == ["adopt", "copy", "adopt"]


def test_no_first_step_is_sent_of_a_request_whose_client_has_gone(
    plain: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect(plain, "a", "b")
    allot(plain, "a", "b")
    noted = Noted(plain, monkeypatch, sends=True)
    plain.network.controller.to_engine(0, m.Import(CARRY, OWN, OTHER, [rest("a"), rest("b")]), ())
    plain.tell(m.AbortRequests(OWN, ["a"]))
    assert noted.sent == [["b"]]


def test_an_engine_that_was_wrong_about_its_first_step_ends(
    plain: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect(plain, "a")
    allot(plain, "a")
    Noted(plain, monkeypatch, sends=True)
    monkeypatch.setattr(plain.backend.own, "dispatch", lambda: False)
    with pytest.raises(RuntimeError, match="a step that does not come"):
        take_in(plain, rest("a"))
