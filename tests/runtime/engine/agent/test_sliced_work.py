"""What takes long for carries is done in slices, between which an engine goes on with its steps."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shoal.policies.values.layouts import Unit
from shoal.runtime.clock import ManualClock
from shoal.runtime.engine.agent.sliced_work import SLICE_SECONDS, SlicedWork
from shoal.runtime.protocol import messages as m
from tests.runtime.engine.agent.agent_bench import GROUP, Bench, started
from tests.runtime.engine.agent.test_carrying import (
    CARRY,
    OTHER,
    OUTPUT,
    OWN,
    PROMPT,
    carried,
    only,
    take_in,
)
from tests.runtime.loopback_node import problems, request_payload

IDS = ("a", "b", "c", "d")
Slowed = Callable[..., list[str]]


@pytest.fixture
def bench() -> Bench:
    return started(prefix_caching=True)


@pytest.fixture
def slowed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Slowed:
    """Return what makes a method of a core slow, and returns a list of its calls."""

    def slow(name: str, seconds: float, unit: Unit = OWN) -> list[str]:
        core, calls = bench.backend.cores[unit], list[str]()
        method = getattr(core, name)

        def slowly(*args: Any, **kwargs: Any) -> Any:
            bench.clock.advance(seconds)
            calls.append(name)
            return method(*args, **kwargs)

        monkeypatch.setattr(core, name, slowly)
        return calls

    return slow


def expect_all(bench: Bench, unit: Unit = OWN) -> None:
    frames = {id_: request_payload(id_, [1] * len(PROMPT), OUTPUT, client=1) for id_ in IDS}
    assert bench.tell(m.Expect(CARRY, unit, frames, {})) == []


def described(request_id: str) -> m.CarriedRequest:
    """Return what the other engine has pinned of a request."""
    return m.CarriedRequest(request_id, [], 8, {1: [[1, 2]]}, len(PROMPT))


def counting(to: list[int], count: int, clock: ManualClock) -> Iterator[None]:
    for number in range(count):
        clock.advance(0.6 * SLICE_SECONDS)
        to.append(number)
        yield


def test_a_slice_ends_with_what_has_begun() -> None:
    clock, done = ManualClock(), list[int]()
    work = SlicedWork(clock)
    work.add(1, counting(done, 3, clock))
    work.go_on()
    assert (done, work.is_due) == ([0, 1], True)
    work.go_on()
    assert (done, work.is_due) == ([0, 1, 2], False)


def test_work_of_a_carry_comes_after_what_was_queued_before_it() -> None:
    clock, of = ManualClock(), dict[int, list[int]]()
    work = SlicedWork(clock)
    for carry in (1, 2, 3):
        work.add(carry, counting(of.setdefault(carry, []), 2, clock))
    work.finish(2)
    assert of == {1: [0, 1], 2: [0, 1], 3: []}


def test_an_engine_goes_on_with_steps_while_it_builds_requests(
    bench: Bench, slowed: Slowed
) -> None:
    built, stepped = slowed("expect", SLICE_SECONDS), slowed("dispatch", 0.0)
    bench.add("runs", tokens=OUTPUT)
    stepped.clear()
    expect_all(bench)
    assert (len(built), len(stepped), bench.agent.next_wakeup()) == (1, 1, 0.0)
    bench.turn(3)
    assert (len(built), len(stepped)) == (4, 4)


def test_requests_that_come_before_they_are_built_are_built_at_once(
    bench: Bench, slowed: Slowed
) -> None:
    built = slowed("expect", SLICE_SECONDS)
    expect_all(bench)
    imported = only(take_in(bench, *map(carried, IDS)), m.Imported)
    assert (sorted(imported.carried), len(built)) == ([*IDS], 4)
    bench.turn(2 * OUTPUT)
    assert problems(bench.backend) == []


def test_a_request_whose_client_has_gone_is_not_built(bench: Bench, slowed: Slowed) -> None:
    built = slowed("expect", SLICE_SECONDS)
    expect_all(bench)
    bench.tell(m.AbortRequests(GROUP, ["b"]))  # another unit's
    bench.tell(m.AbortRequests(OWN, ["c", "d"]))
    bench.turn(4)
    assert len(built) == 2
    take_in(bench)
    assert problems(bench.backend) == []


def test_blocks_are_reserved_in_slices_and_let_go_after_that(bench: Bench, slowed: Slowed) -> None:
    expect_all(bench)
    reserved = slowed("reserve", SLICE_SECONDS)
    requests = [described(id_) for id_ in IDS]
    assert bench.tell(m.Reserve(CARRY, OWN, OTHER, requests)) == []
    # The controller gives the pre-copy up meanwhile.
    assert bench.tell(m.Settle(CARRY, OWN, copied=False)) == []
    answer = only(bench.turn(3), m.Reserved)
    # They begin alike, so the blocks of the first are those of all.
    assert ([each.request_id for each in answer.requests], len(reserved)) == (["a"], 4)
    assert bench.backend.own.load.free_blocks == 200
    take_in(bench)
    assert problems(bench.backend) == []
