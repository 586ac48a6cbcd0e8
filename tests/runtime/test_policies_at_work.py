"""Every registered policy runs a whole node: nothing starves, no token changes, books are right."""

import random

import pytest

from policies.cost_model import Batch, StepKind
from policies.registry import POLICIES
from runtime import messages as m
from runtime.config import FakeSettings
from runtime.wire import FinishReason
from tests.policies.snapshots import MODEL, TARGETS
from tests.runtime.loopback_node import LoopbackNode

TIMED = FakeSettings(
    step_seconds=0.02, num_blocks=40, block_tokens=4, max_num_seqs=12, max_model_len=400
)


def started(policy: str, seed: int | None = None) -> LoopbackNode:
    node = LoopbackNode(
        4, policy=policy, settings=TIMED, seed=seed, cost_model=MODEL, targets=TARGETS
    )
    for _ in range(50):
        turn(node)
    return node


def turn(node: LoopbackNode) -> None:
    node.controller.turn()
    for engine in node.agents:
        node.turn_agent(engine)


def let_pass(node: LoopbackNode, seconds: float, tick: float = 0.02) -> None:
    for _ in range(round(seconds / tick)):
        node.clock.advance(tick)
        for _ in range(4):
            turn(node)
        node.collect()


def load(node: LoopbackNode, waves: int = 4) -> None:
    """Send bursts, of which some requests are urgent and some fit into no engine alone."""
    rng = random.Random(1)
    for _ in range(waves):
        for _ in range(50):
            prompt = 200 if rng.random() < 0.04 and node.config.policy != "static-dp" else 8
            name, tokens = f"r{len(node.prompts)}", rng.randrange(2, 40)
            node.send(name, prompt, tokens, priority=rng.choice([0, 0, -1]))
        let_pass(node, rng.choice([0.5, 2.0, 6.0]))


def finish(node: LoopbackNode) -> None:
    for _ in range(30):
        let_pass(node, 4.0)
        if not node.missing:
            break
    assert node.missing == []
    node.assert_exact()
    assert {node.finish[r] for r in node.prompts} == {FinishReason.LENGTH}
    assert node.audit() == []
    assert node.view().policy_errors == 0


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"manual", "static-dp"}))
@pytest.mark.parametrize("seed", [None, 1])
def test_nothing_starves(policy: str, seed: int | None) -> None:
    node = started(policy, seed)
    load(node)
    finish(node)


def test_policies_change_under_load() -> None:
    node = started("flying")
    for policy in ("static-tp", "slo", "flying", "static-tp", "flying"):
        load(node, waves=1)
        node.call(m.SetPolicy, policy)
    finish(node)
    assert node.view().moves_total > 0


def test_measured_steps_correct_the_cost_model() -> None:
    """Steps that take twenty milliseconds whatever is in them: the model learns that."""
    node = started("manual")
    for k in range(12):
        node.send(f"r{k}", 8, 60)
    let_pass(node, 5.0)
    correction = node.controller._capacity.cost_model.correction(1, StepKind.DECODE)
    assert correction.samples > 10
    predicted = MODEL.step_seconds(1, Batch(decodes=3, context_tokens=3 * 8))
    assert correction.apply(predicted) == pytest.approx(0.02, rel=0.3)
    assert set(node.view().step_errors) == {"dp decode", "dp prefill"}
