"""All requests of a node together have a bounded number of bytes, whether they wait or run."""

from typing import Any

import pytest

from shoal.runtime.controller.failures.migration import REMEMBERED_SECONDS
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.messages import Outcome
from tests.runtime.controller.requests.test_admission import (
    BUSY,
    ONE_SEAT,
    busy_node,
    ended,
    limits_told,
    steps,
    turns,
)
from tests.runtime.loopback_node import LoopbackNode, request_payload

FULL = (Outcome.POOL_FULL, 503)
KIB = 1 << 10


def send(node: LoopbackNode, name: str, size: int, **options: Any) -> None:
    """Send a request whose images have this many bytes, for two tokens."""
    node.prompts[name] = ([5, 6], 2)
    payload = request_payload(name, [5, 6], 2, **{"client": 0, **options})
    node.network.front_sends(0, wire.RequestType.ADD, [*payload, bytes(size)])


def held(node: LoopbackNode) -> int:
    return node.controller.books.requests.held.total


def remembered(node: LoopbackNode) -> int:
    return node.controller.books.requests.finished.bytes


def waiting(node: LoopbackNode) -> list[str]:
    return [request.id for request in node.pool.all()]


def roomy_node(limit: int, engines: int = 4, **limits: Any) -> LoopbackNode:
    """Return a node on which ``engines * BUSY`` requests can start at once."""
    node = LoopbackNode(engines, settings=ONE_SEAT, max_held_bytes=limit, **limits)
    turns(node)
    return node


def test_requests_that_could_start_at_once_are_refused_beyond_the_bytes() -> None:
    node = roomy_node(100 * KIB)
    for name in "abcd":
        send(node, name, 30 * KIB)
    turns(node)
    assert sorted(node.placed()) == ["a", "b", "c"]
    assert ended(node) == {"d": FULL}
    note = node.ended()["d"]
    assert note.message == f"the node is full: its requests may have {100 * KIB} bytes together"
    assert note.retry_after is not None
    assert node.outcomes == {Outcome.POOL_FULL: 1}


def test_what_ends_makes_room_and_leaves_nothing() -> None:
    node = roomy_node(100 * KIB)
    for name in "abc":
        send(node, name, 30 * KIB)
    turns(node)
    assert 90 * KIB < held(node) < 92 * KIB
    steps(node, 10)
    assert held(node) == 0
    for name in "def":  # though the node remembers the first three for a while
        send(node, name, 30 * KIB)
    turns(node)
    assert ended(node) == {}
    node.clock.advance(REMEMBERED_SECONDS + 10)
    steps(node, 10)
    node.clock.advance(REMEMBERED_SECONDS + 10)
    turns(node)
    assert (held(node), remembered(node)) == (0, 0)
    assert node.audit() == []


def test_requests_that_have_ended_are_remembered_only_as_far_as_there_is_room() -> None:
    node = roomy_node(100 * KIB)
    for name in "abc":
        send(node, name, 30 * KIB)
    turns(node)
    steps(node, 10)
    assert node.value("shoal_held_bytes", state="finished") == remembered(node) > 90 * KIB
    assert node.value("shoal_held_bytes", state="unfinished") == 0
    send(node, "d", 50 * KIB)
    turns(node)
    assert 30 * KIB < remembered(node) < 32 * KIB


def test_waiting_requests_make_room_for_urgent_ones() -> None:
    node = busy_node(max_held_bytes=100 * KIB)
    for name in "abc":
        send(node, name, 30 * KIB)
        turns(node)
    send(node, "same", 30 * KIB)
    turns(node)
    assert ended(node) == {"same": FULL}
    send(node, "urgent", 40 * KIB, priority=-5)
    turns(node)
    assert waiting(node) == ["urgent", "a"]
    assert ended(node) == dict.fromkeys(("same", "b", "c"), FULL)


def test_what_runs_does_not_make_room_for_urgent_ones() -> None:
    node = roomy_node(100 * KIB, engines=1)
    send(node, "a", 90 * KIB)
    turns(node)
    send(node, "urgent", 40 * KIB, priority=-5)
    turns(node)
    assert (list(node.placed()), ended(node)) == (["a"], {"urgent": FULL})


@pytest.mark.parametrize("of_key", [False, True])
def test_a_request_that_is_too_large_by_itself_is_told_not_to_come_again(of_key: bool) -> None:
    limit = 100 * KIB if of_key else 10 * KIB
    node = roomy_node(limit)
    terms = wire.Terms(caller="one", max_held_bytes=10 * KIB if of_key else None)
    send(node, "large", 20 * KIB, terms=terms)
    turns(node)
    assert ended(node) == {"large": (Outcome.TOO_LONG, 413)}
    assert f"at most {10 * KIB}" in node.ended()["large"].message
    assert node.ended()["large"].retry_after is None
    assert held(node) == 0


def test_a_caller_has_a_limit_of_its_own() -> None:
    node = roomy_node(1000 * KIB)
    mine = wire.Terms(caller="one", max_held_bytes=50 * KIB)
    for name in "ab":
        send(node, name, 30 * KIB, terms=mine)
    send(node, "other", 60 * KIB, terms=wire.Terms(caller="other"))
    turns(node)
    assert ended(node) == {"b": (Outcome.CALLER_FULL, 429)}
    assert f"{50 * KIB} bytes" in node.ended()["b"].message
    steps(node, 10)
    send(node, "c", 30 * KIB, terms=mine)
    turns(node)
    assert "c" in node.placed()


@pytest.mark.parametrize("begun", [False, True])
def test_the_parts_of_one_request_keep_to_the_bytes_even_when_a_unit_has_some(begun: bool) -> None:
    node = roomy_node(100 * KIB)
    for name in "abcde":
        send(node, name, 30 * KIB, terms=wire.Terms(family=1))
        if begun:
            turns(node)
    turns(node)
    assert held(node) <= 100 * KIB
    if begun:
        assert ended(node) == {"d": FULL, "e": FULL}
    else:  # all came at once, and none of them was let in
        assert ended(node) == dict.fromkeys("abcde", FULL)


def test_what_an_engine_s_death_gives_back_is_not_counted_twice() -> None:
    node = roomy_node(1000 * KIB, engines=2)
    for k in range(2 * BUSY + 2):
        send(node, f"r{k}", 10 * KIB)
    turns(node)
    before = held(node)
    node.kill(1)
    for _ in range(3):
        turns(node)
        assert held(node) == before
    steps(node, 60)
    assert node.missing == []
    assert held(node) == 0
    assert node.audit() == []


def test_front_ends_are_told_when_no_byte_is_left() -> None:
    node = LoopbackNode(1, settings=ONE_SEAT, max_held_bytes=10 * KIB)
    turns(node)
    head = len(request_payload("a", [5, 6], 2, client=0)[0])
    send(node, "a", 10 * KIB - head)
    turns(node)
    (told,) = limits_told(node)
    assert told.full == f"the node is full: its requests may have {10 * KIB} bytes together"
    steps(node, 10)
    assert limits_told(node)[-1] == m.PoolLimits()
