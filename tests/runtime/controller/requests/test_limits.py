"""Who makes room in a full task pool, on a whole node."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from shoal.policies.values.layouts import alone
from shoal.runtime.controller.books.pool import TaskPool
from shoal.runtime.controller.requests import limits
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.messages import Outcome
from shoal.server.gate.pool_door import PoolDoor
from tests.runtime.controller.requests.test_admission import (
    BUSY,
    ONE_SEAT,
    STEP,
    busy_node,
    ended,
    limits_told,
    steps,
    turns,
)
from tests.runtime.loopback_node import LoopbackNode

AGING = 30.0
FULL = (Outcome.POOL_FULL, 503)


def waiting(node: LoopbackNode) -> list[str]:
    return [request.id for request in node.pool.all()]


def send_family(
    node: LoopbackNode,
    number: int,
    *names: str,
    priority: int = 0,
    caller: wire.Terms | None = None,
) -> None:
    limit = (None, None) if caller is None else (caller.caller, caller.max_waiting)
    for name in names:
        terms = wire.Terms(caller=limit[0], max_waiting=limit[1], family=number)
        node.send(name, priority=priority, terms=terms)


def pushed_out(node: LoopbackNode) -> int:
    return node.controller.books.statistics.pushed_out.total()


# --- who makes room ---


def test_an_urgent_request_takes_the_place_of_the_one_that_would_be_served_last() -> None:
    node = busy_node(max_waiting_requests=2)
    for name in "abc":
        node.send(name)
    turns(node)
    node.send("urgent", priority=-5)
    turns(node)
    assert waiting(node) == ["urgent", "a"]
    assert ended(node) == dict.fromkeys("cb", FULL)
    note = node.ended()["b"]
    assert note.message == (
        "the task pool is full: 2 requests may wait, and more urgent ones have come"
    )
    assert note.retry_after is not None
    assert node.finish["b"] is wire.FinishReason.ABORT
    assert node.outcomes == {Outcome.POOL_FULL: 2}
    assert pushed_out(node) == 1


def test_nobody_makes_room_for_one_that_is_not_more_urgent() -> None:
    node = busy_node(max_waiting_requests=2)
    for name, priority in (("a", -5), ("b", 0), ("same", 0), ("less", 3)):
        node.send(name, priority=priority)
        turns(node)
    assert waiting(node) == ["a", "b"]
    assert ended(node) == {"same": FULL, "less": FULL}
    assert pushed_out(node) == 0


@pytest.mark.parametrize(("waits", "stays"), [(AGING - 1, "urgent"), (AGING + 1, "patient")])
def test_a_long_wait_makes_up_for_a_class(waits: float, stays: str) -> None:
    node = busy_node(max_waiting_requests=1)
    node.send("patient")
    turns(node)
    node.clock.advance(waits)
    node.send("urgent", priority=-1)
    node.controller.turn()
    assert waiting(node) == [stays]


def test_of_newcomers_at_once_the_most_urgent_stay() -> None:
    node = busy_node(max_waiting_requests=2)
    for name, priority in (("a", 0), ("b", 2), ("c", -1), ("d", -2)):
        node.send(name, priority=priority)
    turns(node)
    assert waiting(node) == ["d", "c"]
    assert pushed_out(node) == 0  # none of them had waited


def test_as_many_make_room_as_a_long_prompt_needs() -> None:
    node = busy_node(max_waiting_tokens=40)
    for name in "abcd":
        node.send(name, 10)
        turns(node)
    node.send("urgent", 15, priority=-5)
    turns(node)
    assert waiting(node) == ["urgent", "a", "b"]
    assert set(ended(node)) == {"c", "d"}


def test_nobody_makes_room_for_a_prompt_that_would_not_fit_even_then() -> None:
    node = busy_node(max_waiting_tokens=40)
    node.send("urgent", 25, priority=-9)
    node.send("a", 10)
    turns(node)
    node.send("long", 30, priority=-5)
    turns(node)
    assert waiting(node) == ["urgent", "a"]
    assert ended(node) == {"long": FULL}


def test_what_a_unit_has_had_does_not_make_room() -> None:
    node = LoopbackNode(2, settings=ONE_SEAT, max_waiting_requests=1)
    turns(node)
    for k in range(2 * BUSY):
        node.send(f"r{k}", 4, 100)
    turns(node)
    steps(node, 3)
    gone = [name for name, unit in node.placed().items() if unit == alone(1)]
    node.kill(1)
    for _ in range(3):
        turns(node)
    assert waiting(node) == gone
    node.send("urgent", priority=-5)
    turns(node)
    assert waiting(node) == gone
    assert ended(node) == {"urgent": FULL}


def test_what_waits_for_a_response_that_has_begun_does_not_make_room() -> None:
    node = busy_node(max_waiting_requests=1)
    node.send("begun", terms=wire.Terms(begun=True))
    turns(node)
    node.send("urgent", priority=-5)
    turns(node)
    assert waiting(node) == ["begun"]
    assert limits_told(node)[-1].let_in is None


# --- families ---


def test_a_family_makes_room_as_a_whole() -> None:
    node = busy_node(max_waiting_requests=3)
    node.send("a")
    turns(node)
    send_family(node, 1, "b", "c")
    turns(node)
    node.send("urgent", priority=-5)
    turns(node)
    assert waiting(node) == ["urgent", "a"]
    assert ended(node) == dict.fromkeys("bc", FULL)
    assert node.outcomes == {Outcome.POOL_FULL: 2}


@pytest.mark.parametrize("at_once", [True, False])
def test_a_family_that_does_not_fit_is_refused_as_a_whole(at_once: bool) -> None:
    node = busy_node(max_waiting_requests=2)
    for name in "abcd":
        send_family(node, 1, name)
        if not at_once:
            turns(node)
    turns(node)
    assert waiting(node) == []
    assert ended(node) == dict.fromkeys("abcd", FULL)
    node.send("other")
    turns(node)
    assert waiting(node) == ["other"]


def test_the_same_number_of_another_front_end_is_another_family() -> None:
    node = busy_node(max_waiting_requests=2)
    send_family(node, 1, "a")
    node.send("b", client=1, terms=wire.Terms(family=1))
    turns(node)
    node.send("urgent", priority=-5)
    turns(node)
    assert waiting(node) == ["urgent", "a"]


def test_a_family_of_which_a_unit_has_one_is_let_in_and_stays() -> None:
    node = LoopbackNode(1, settings=ONE_SEAT, max_waiting_requests=1)
    turns(node)
    send_family(node, 1, *"abcde")
    turns(node)
    assert (list(node.placed()), waiting(node)) == (["a", "b"], ["c", "d", "e"])
    node.send("urgent", priority=-5)
    turns(node)
    assert ended(node) == {"urgent": FULL}
    steps(node, 60)
    assert node.missing == []
    node.assert_exact()


def test_a_family_beyond_its_caller_s_limit_is_refused_as_a_whole() -> None:
    node = busy_node()
    greedy = wire.Terms(caller="greedy", max_waiting=3)
    send_family(node, 1, "a", "b", caller=greedy)
    send_family(node, 2, "c", "d", caller=greedy)
    turns(node)
    assert waiting(node) == ["a", "b"]
    assert ended(node) == dict.fromkeys("cd", (Outcome.CALLER_FULL, 429))


def test_families_are_forgotten_with_their_requests() -> None:
    node = busy_node()
    send_family(node, 1, "a", "b")
    turns(node)
    known = node.controller._admission._families._known
    assert len(known) == 1
    node.abort("a")
    node.abort("b")
    turns(node)
    assert len(known) == 0


# --- what front ends are told ---


def test_front_ends_are_told_who_is_let_in_all_the_same() -> None:
    node = busy_node(max_waiting_requests=1)
    node.send("a", priority=4)
    turns(node)
    assert limits_told(node)[-1].let_in == 3
    node.clock.advance(AGING)
    node.controller.turn()
    assert limits_told(node)[-1].let_in == 2
    node.send("b", priority=2)
    node.controller.turn()
    assert waiting(node) == ["b"]
    assert limits_told(node, 1)[-1].let_in == 1


def test_the_word_to_front_ends_and_the_controller_s_own_agree() -> None:
    """Whoever is let in at the door comes in, and whoever is not would be refused."""
    for priority in range(-4, 8):
        node = busy_node(max_waiting_requests=8)
        for k in range(8):
            node.send(f"r{k}", priority=k)
        turns(node)
        assert limits_told(node)[-1].let_in == 4  # two of the eight are kept
        node.send("new", priority=priority)
        turns(node)
        assert ("new" in waiting(node)) == limits_told(node)[0].lets_in(priority), priority


# --- ten times the load ---

SEND_STEPS = 400
WAITING = 20


@dataclass
class Overloaded:
    """What became of the requests of a node that is asked for too much."""

    offered: dict[str, int]
    """Priority by request."""
    at_door: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)

    def share(self, priority: int) -> float:
        """Return how many of a class are answered."""
        mine = {name for name, own in self.offered.items() if own == priority}
        return len(mine & self.finished) / len(mine)

    def answered(self, priority: int) -> int:
        return sum(self.offered[name] == priority for name in self.finished)


async def overload(per_step: int, weights: dict[int, float]) -> Overloaded:
    """Send requests at a steady rate through the doors of two front ends, and see what becomes.

    The one seat answers one request in two steps. Priorities are drawn by ``weights``.
    """
    rng = random.Random(1)
    node = LoopbackNode(1, settings=ONE_SEAT, max_waiting_requests=WAITING)
    turns(node)

    def door(client: int) -> PoolDoor:
        async def count(outcome: Outcome) -> None:
            node.network.control_sends(f"front-{client}", m.CountRefused(outcome))

        return PoolDoor(count, [].append)

    doors = [door(0), door(1)]
    result = Overloaded({})
    for _ in range(SEND_STEPS):
        for _ in range(per_step):
            (priority,) = rng.choices([*weights], [*weights.values()])
            name, client = f"r{len(result.offered)}", len(result.offered) % 2
            result.offered[name] = priority
            if await doors[client].refusal(None, priority) is not None:
                result.at_door.add(name)
            else:
                node.send(name, 4, 2, client=client, priority=priority)
            node.controller.turn()
            for number, each in enumerate(doors):
                for note in limits_told(node, number)[-1:]:
                    each.limits(note)
        steps(node, 1)
    steps(node, 4 * WAITING)
    assert node.missing == []
    node.assert_exact()
    finished = {name for name, why in node.finish.items() if why is wire.FinishReason.LENGTH}
    result.finished, result.refused = finished, node.ended().keys() | node.ended(1).keys()
    _check_books(node, result)
    return result


def _check_books(node: LoopbackNode, result: Overloaded) -> None:
    """Every request has one outcome, and both sides have counted the same."""
    ends: Sequence[set[str]] = (result.at_door, result.finished, result.refused)
    assert set().union(*ends) == result.offered.keys()
    assert sum(map(len, ends)) == len(result.offered)
    assert node.value("shoal_pushed_out_requests_total") == pushed_out(node)
    assert node.outcomes == {
        Outcome.FINISHED: len(result.finished),
        Outcome.POOL_FULL: len(result.refused) + len(result.at_door),
    }
    assert node.audit() == []


PER_STEP = 5
"""Ten times what the seat can do."""
CAPACITY = SEND_STEPS // 2
URGENT = -5


@pytest.mark.slow
async def test_at_ten_times_the_load_the_urgent_ones_are_let_in() -> None:
    result = await overload(PER_STEP, {URGENT: 0.04, 0: 0.96})
    assert len(result.offered) == 10 * CAPACITY
    assert result.share(URGENT) == 1
    # All that they leave is the others'.
    assert len(result.finished) >= CAPACITY
    assert result.answered(0) >= CAPACITY - result.answered(URGENT)
    assert result.at_door  # most are refused there


@pytest.mark.slow
async def test_without_making_room_all_classes_are_refused_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TaskPool, "let_in", lambda *_: None)
    result = await overload(PER_STEP, {URGENT: 0.04, 0: 0.96})
    assert result.share(URGENT) < 0.3
    assert result.share(0) < 0.3


async def flood() -> Overloaded:
    """Let the urgent class alone ask for nine times what the node can do."""
    return await overload(PER_STEP, {-1: 0.9, 0: 0.1})


async def test_a_flood_of_urgent_requests_leaves_the_others_a_part() -> None:
    result = await flood()
    assert result.answered(-1) > result.answered(0) >= SEND_STEPS * STEP / AGING


@pytest.mark.slow
async def test_without_the_kept_share_it_leaves_them_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "KEPT_SHARE", 0.0)
    result = await flood()
    assert result.answered(0) < SEND_STEPS * STEP / AGING / 2
