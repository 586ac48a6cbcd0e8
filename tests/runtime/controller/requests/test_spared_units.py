"""How many units background requests get while people use the node, and which."""

from dataclasses import replace

import pytest

from shoal.policies.cost.cost_model import CostModel
from shoal.policies.values.layouts import Unit, alone
from shoal.policies.values.snapshot import PoolRequest
from shoal.runtime.controller.requests.people_load import (
    LINGER_GAPS,
    LINGER_SECONDS,
    MOST_LINGER_SECONDS,
)
from shoal.runtime.controller.requests.spared_units import (
    HOLD_SECONDS,
    OVERDRAWN,
    SAVED,
    SAVED_SECONDS,
    START,
    TTFT_SHARE,
    Occupancy,
    SparedUnits,
)
from shoal.runtime.simulation.shape_files import cost_model, read_hardware, read_shape
from tests.policies.snapshots import snapshot, unit

MODEL = cost_model(read_shape("llama-3-8b-bf16"), read_hardware("h200"))
TURN = 0.1


class Node:
    """A node that people use, and the units that are spared meanwhile."""

    def __init__(self, engines: int = 4, model: CostModel | None = MODEL) -> None:
        self.now = 1000.0
        self.spared = SparedUnits()
        units = [unit(alone(engine)) for engine in range(engines)]
        self._snapshot = replace(snapshot(*units), cost_model=model, output_tokens=160.0)

    def see(
        self, *running: int, arrived: int = 0, needed: bool = True, **waits: float
    ) -> frozenset[Unit]:
        """Let requests arrive, while so many run on each unit; return the units that are spared.

        ``waits`` are those of the first unit's ``Occupancy``.
        """
        engines = self._snapshot.engines
        counts = (*running, *[0] * engines)[:engines]
        units = [Occupancy(alone(engine), count, 0) for engine, count in enumerate(counts)]
        units[0] = replace(units[0], **waits)
        new = [PoolRequest(f"r{k}", 1500, 1660, 0, self.now) for k in range(arrived)]
        self.spared.see(replace(self._snapshot, now=self.now), units, new, needed=needed)
        return self.spared.units

    def steady(self, rate: float, seconds: float, running: int, *, needed: bool = True) -> float:
        """Let requests arrive regularly; return how many units are spared in the mean."""
        engines, due, spared = self._snapshot.engines, 0.0, 0.0
        busy = [running // engines + (k < running % engines) for k in range(engines)]
        for _ in range(round(seconds / TURN)):
            due += rate * TURN
            spared += len(self.see(*busy, arrived=int(due), needed=needed)) * TURN / seconds
            due, self.now = due % 1, self.now + TURN
        return spared


def test_a_node_that_people_do_not_use_is_spared_as_a_whole() -> None:
    node = Node()
    assert len(node.see()) == 4
    assert node.see(0, 0, 1, arrived=1) == {alone(0), alone(1), alone(3)}


def test_a_unit_is_kept_free_until_few_more_can_come() -> None:
    node = Node()
    for gap in (0.0, 10.0, 10.0):
        node.now += gap
        node.see(arrived=1)
    node.now += LINGER_SECONDS - 1
    assert len(node.see()) == 3
    node.now += 1
    assert len(node.see()) == 4
    for _ in range(30):
        node.now += 100.0
        node.see(arrived=1)
    node.now += 0.9 * LINGER_GAPS * 100.0
    assert len(node.see()) == 3
    node.now += MOST_LINGER_SECONDS
    assert len(node.see()) == 4


@pytest.mark.slow
def test_what_costs_more_than_its_share_is_had_for_a_part_of_the_time() -> None:
    node = Node()
    node.steady(8.0, 60.0, 8)
    before = node.spared._account
    mean = node.steady(8.0, 600.0, 8)
    assert 0.2 < mean < 0.8
    # What people have lost is what they may lose: the account neither grows nor shrinks.
    assert abs(node.spared._account - before) < 8.0 * SAVED_SECONDS / 4
    assert node.steady(16.0, 600.0, 16) < mean / 2


def test_a_light_load_leaves_all_units_but_one_and_a_heavy_one_none() -> None:
    assert Node().steady(0.02, 60.0, 0) > 2.9
    node = Node()
    node.steady(60.0, 120.0, 200)
    assert node.steady(60.0, 120.0, 200) < 0.1


def test_units_change_rarely_and_those_of_people_are_given_back_first() -> None:
    node, changes, before = Node(), 0, frozenset[Unit]()
    for _ in range(600):
        node.steady(10.0, TURN, 8)
        changes += node.spared.units != before
        before = node.spared.units
    assert 2 <= changes <= 60 / HOLD_SECONDS * 2 + 3
    node = Node()
    node.see()
    assert node.see(1, 0, 2, 0, arrived=1) == {alone(0), alone(1), alone(3)}


def test_without_background_requests_nothing_is_spared_or_saved_up() -> None:
    node = Node()
    assert node.steady(8.0, 120.0, 8, needed=False) == 0
    assert node.spared._account == START
    while not node.see(2, 2, 2, 2, arrived=1):
        node.now += 1 / 8
    assert node.spared._account > START


def test_the_account_keeps_what_people_may_lose_in_some_seconds() -> None:
    node = Node()
    node.steady(300.0, 120.0, 300)
    assert node.spared.units == frozenset()
    assert node.spared._account == pytest.approx(SAVED + 300.0 * SAVED_SECONDS, rel=0.05)


def test_a_unit_is_given_back_at_once_when_people_queue_for_prompts() -> None:
    node = Node()
    node.steady(0.02, 60.0, 0)
    before = len(node.see(1))
    assert before == 3
    assert len(node.see(1, arrived=1, queued=0.002)) == before - 1
    assert len(node.see(1, arrived=1, queued=0.002)) == before - 2


def test_a_crowd_gets_a_unit_back_and_keeps_it_for_a_while() -> None:
    node = Node()
    node.steady(0.02, 60.0, 0)
    assert len(node.see()) == 3
    for _ in range(8):
        node.see(5, arrived=1)
    left = len(node.spared.units)
    assert left < 3
    came = node.now
    while len(node.see()) <= left:
        node.now += 0.5
    assert node.now - came >= HOLD_SECONDS


def test_an_account_that_is_overdrawn_spares_nothing_until_people_have_lost_less() -> None:
    node = Node()
    node.see(arrived=1)
    node.see(1, arrived=1, queued=10.0)
    assert node.spared._account == -OVERDRAWN
    assert node.see(1) == frozenset()
    for _ in range(round(OVERDRAWN)):
        node.now += 2.0
        assert node.see(1, arrived=1) == frozenset()
    for _ in range(round(START) + 1):
        node.now += 2.0
        spared = node.see(1, arrived=1)
    assert spared


def test_the_only_unit_is_shared() -> None:
    node = Node(1)
    assert node.see() == node.see(3, arrived=3) == {alone(0)}
    # Without a wait there is nothing to lose when the others have gone.
    assert node.see() == {alone(0)}


def test_the_only_unit_is_left_when_the_next_request_would_wait_too_long() -> None:
    node, wait = Node(1), 0.05
    node.see(1, arrived=1)
    assert node.see(wait=wait) == frozenset()
    paid = 0
    while node.see(wait=wait) == frozenset():
        node.now += 1.0
        assert node.see(1, arrived=1) == {alone(0)}, "few are beside people"
        paid += 1
    # The wait is about as long as a prompt takes, of which people may lose 3 %.
    assert 1 / TTFT_SHARE / 3 < START + paid < 3 / TTFT_SHARE
    account = node.spared._account
    assert node.see(1, arrived=1, waited=wait) == {alone(0)}
    assert node.spared._account < account - 10
    assert node.see(wait=wait) == frozenset()
    node.now += LINGER_SECONDS
    assert node.see(wait=wait) == {alone(0)}, "nobody uses the node any more"


def test_without_a_cost_model_people_keep_half() -> None:
    node = Node(model=None)
    assert len(node.see()) == 4
    assert node.steady(50.0, 60.0, 50) == pytest.approx(2)


def test_a_spared_unit_seems_to_have_more_to_do_than_the_others() -> None:
    node = Node()
    node.see()
    few = node.spared.context_of(node._snapshot)
    node.steady(8.0, 60.0, 12)
    assert few > 4 * 1500
    assert node.spared.context_of(node._snapshot) > 3 * few
