"""Full engines that become one group: their requests take turns, so that none is computed again."""

import pytest

from shoal.policies.values.partition import Partition
from shoal.runtime.config import FakeSettings
from shoal.runtime.controller.books.capacity import Capacity
from shoal.runtime.engine.fake.fake_copies import FakeCopies
from shoal.runtime.protocol import messages as m
from tests.runtime.computed_tokens import ComputedTokens
from tests.runtime.loopback_node import LoopbackNode
from tests.units import tp_units

PAIRS, ALL = tp_units(4, 2), tp_units(4, 4)
EACH, PROMPT, OUTPUT = 6, 400, 40
STEP = 0.02
HELD = 26
"""Blocks that a request holds; in a group of four it takes seven of each member."""
ROUNDED = EACH * (4 * 7 - HELD)
"""Blocks that the last blocks of all requests take more in a group: they have room to spare."""
ROOM = 4 * 7 + ROUNDED
"""With blocks for one request of each engine."""


def full(free: int) -> LoopbackNode:
    """Return a node whose engines run requests, each with so many free blocks."""
    settings = FakeSettings(
        num_blocks=EACH * HELD + free,
        block_tokens=16,
        max_num_seqs=64,
        max_model_len=2000,
        step_seconds=STEP,
        copy_seconds=STEP,
    )
    node = LoopbackNode(4, settings=settings)
    for number in range(4 * EACH):
        node.send(f"r{number}", PROMPT, OUTPUT)
    run(node, 4 * STEP)
    cores = [node.backends[engine].own for engine in range(4)]
    assert [core.load.running for core in cores] == [EACH] * 4
    assert [core.load.free_blocks for core in cores] == [free] * 4
    return node


def run(node: LoopbackNode, seconds: float) -> None:
    for _ in range(round(seconds / STEP)):
        node.clock.advance(STEP)
        node.turns(6)
        node.collect()


def carried_to(node: LoopbackNode, target: Partition) -> tuple[float, float]:
    """Switch; return how many requests were carried, and how many were computed again."""
    node.set_layout(*target, treatment=m.Treatment.CARRY)
    run(node, 200 * STEP)
    assert node.missing == []
    node.assert_exact()
    assert node.audit() == []
    total = "shoal_carried_requests_total"
    return node.value(total, outcome="carried"), node.value(total, outcome="recomputed")


@pytest.mark.parametrize("target", [ALL, PAIRS])
def test_room_for_one_request_of_each_engine_is_enough(
    monkeypatch: pytest.MonkeyPatch, target: Partition
) -> None:
    computed = ComputedTokens(monkeypatch)
    assert carried_to(full(ROOM), target) == (4 * EACH, 0)
    assert computed.again == {}


def test_without_turns_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(Capacity, "lacks_room", lambda *_: False)
    carried, again = carried_to(full(ROOM), ALL)
    assert carried + again == 4 * EACH
    assert again >= EACH, "requests give up one by one, and turns need not give up any"


def test_where_there_is_none_one_request_of_each_engine_makes_room() -> None:
    assert carried_to(full(ROUNDED), ALL) == (4 * (EACH - 1), 4)


def test_where_there_is_room_nothing_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    adopted = list[int]()
    start = FakeCopies.start

    def count(copies: FakeCopies, now: float) -> None:
        adopted.append(len(copies._adopted))
        start(copies, now)

    monkeypatch.setattr(FakeCopies, "start", count)
    assert carried_to(full(4 * EACH * 9), ALL) == (4 * EACH, 0)
    assert adopted == [EACH] * 4
