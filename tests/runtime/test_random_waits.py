"""Whatever is asked of a node, all its requests end in time, though its processes sleep meanwhile.

A process that waits for an answer which nobody sends, or that nobody wakes, is noticed here.
"""

from collections.abc import Sequence

import msgspec
import pytest

from shoal.runtime.controller.requests.pauses import MANUAL_PAUSE_SECONDS, Pauses
from shoal.runtime.engine.agent.lending import Lending
from shoal.runtime.protocol.messages import Grow, Treatment
from shoal.runtime.protocol.wire import FinishReason
from tests.runtime.loopback_node import SMALL
from tests.runtime.random_run import random_partition
from tests.runtime.sleeping_node import SleepingNode

ENGINES = 4
ROUNDS = 12
ACTIONS = 25
MOST_MISSING = 40
MOST_SECONDS = 2 * MANUAL_PAUSE_SECONDS
"""A request may wait that long for its unit to come back before it goes elsewhere."""

AFTERWARDS = 6.0
"""A copy, or a switch that waits, may go on for a while when all requests have ended."""

SETTINGS = [
    SMALL,
    msgspec.structs.replace(SMALL, step_seconds=0.01, copy_seconds=0.02),
    msgspec.structs.replace(SMALL, step_seconds=0.01, copy_seconds=0.02, num_blocks=100),
    msgspec.structs.replace(SMALL, step_seconds=0.001, copy_seconds=0.3, max_num_seqs=4),
]


def act(node: SleepingNode, treatments: Sequence[Treatment]) -> None:
    """Do one thing to a node, and let some time pass."""
    rng, draw = node.rng, node.rng.random()
    if draw < 0.6 and len(node.missing) < MOST_MISSING:
        prompt = rng.randrange(120, 220) if rng.random() < 0.2 else rng.randrange(1, 120)
        node.send(f"r{len(node.prompts)}", prompt, rng.randrange(1, 30))
    elif draw < 0.65 and node.missing:
        node.abort(rng.choice(node.missing))
    else:
        units = random_partition(rng, ENGINES, ENGINES)
        node.set_layout(*units, treatment=rng.choice(treatments), timeout=0.2)
    node.live(rng.choice([0.0, 0.001, 0.01, 0.1]))


def live(seed: int, treatments: Sequence[Treatment] = tuple(Treatment)) -> SleepingNode:
    """Act on a node at random, and leave it alone again and again, until its requests have ended.

    Half of the nodes copy KV ahead of their switches.
    """
    node = SleepingNode(
        ENGINES, seed=seed, settings=SETTINGS[seed // 2 % len(SETTINGS)], precopy_tokens=seed % 2
    )
    node.live(1.0)
    for _ in range(ROUNDS):
        for _ in range(node.rng.randrange(1, ACTIONS)):
            act(node, treatments)
        if not node.live(MOST_SECONDS, until_done=True):
            break
    node.live(AFTERWARDS)
    return node


@pytest.mark.parametrize("seed", range(6))
def test_nobody_waits_for_ever(seed: int) -> None:
    node = live(seed)
    assert node.missing == []
    node.assert_exact()
    assert set(node.finish.values()) == {FinishReason.LENGTH}
    assert node.audit() == []
    assert node.value("shoal_carried_requests_total", outcome="carried") > 0


# --- negative controls ---


def someone_waits() -> bool:
    return any(live(seed).missing for seed in range(6))


def test_an_answer_that_gets_lost_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that hears nothing when there are no blocks never asks again."""
    grow = Lending.grow

    def deaf(lending: Lending, message: Grow) -> None:
        if any(message.lease.values()):
            grow(lending, message)

    monkeypatch.setattr(Lending, "grow", deaf)
    assert someone_waits()


def test_an_alarm_that_is_not_set_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pauses, "deadline", None)
    assert someone_waits()
