"""Every registered policy runs a whole node: nothing starves, no token changes, books are right."""

import random

import pytest

from shoal.policies.registry import POLICIES
from shoal.policies.values.batch import Batch, StepKind
from shoal.policies.values.layouts import Layout, alone
from shoal.policies.values.snapshot import Target
from shoal.runtime.config import FakeSettings
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.wire import FinishReason
from tests.depth import among
from tests.policies.snapshots import MODEL, TARGETS
from tests.runtime.loopback_node import LoopbackNode
from tests.units import pp, tp

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


@pytest.mark.parametrize(
    ("policy", "seed"),
    [
        *((policy, None) for policy in sorted(set(POLICIES) - {"manual", "static-dp"})),
        *((policy, 1) for policy in among(["adaptive"], "batch", "flying", "shift", "static-tp")),
    ],
)
def test_nothing_starves(policy: str, seed: int | None) -> None:
    node = started(policy, seed)
    load(node)
    finish(node)


def test_policies_change_under_load() -> None:
    node = started("flying")
    for policy in ("static-tp", "adaptive", "flying", "static-tp", "flying"):
        load(node, waves=1)
        node.call(m.SetPolicy, policy)
    finish(node)
    assert node.value("shoal_carried_requests_total", outcome="carried") > 0


def test_measured_steps_correct_the_cost_model() -> None:
    """Steps that take twenty milliseconds whatever is in them: the model learns that."""
    node = started("manual")
    for k in range(12):
        node.send(f"r{k}", 8, 60)
    let_pass(node, 5.0)
    correction = node.controller._capacity.costs.model.correction(Layout(tp=1), StepKind.DECODE)
    assert correction.samples > 10
    predicted = MODEL.step_seconds(Layout(tp=1), Batch(decodes=3, context_tokens=3 * 8))
    assert correction.apply(predicted) == pytest.approx(0.02, rel=0.3)
    assert set(node.view().step_errors) == {"dp decode", "dp prefill"}


ROOMY = FakeSettings(
    step_seconds=0.02, num_blocks=1000, block_tokens=4, max_num_seqs=64, max_model_len=4000
)


def waits_under_load(node: LoopbackNode, seconds: float, rate: float) -> dict[str, float]:
    """Send so many requests a second; return how long each waited for its first token."""
    sent: dict[str, float] = {}
    waits: dict[str, float] = {}
    for _ in range(round(seconds / 0.1)):
        for _ in range(round(rate / 10)):
            name = f"r{len(node.prompts)}"
            node.send(name, 8, 20)
            sent[name] = node.clock.now
        let_pass(node, 0.1)
        for name in [name for name in sent if node.tokens.get(name)]:
            waits[name] = node.clock.now - sent.pop(name)
    return waits | {name: node.clock.now - at for name, at in sent.items()}


def test_a_switch_under_load_holds_up_nobody() -> None:
    node = LoopbackNode(4, policy="static-tp", settings=ROOMY, cost_model=MODEL, targets=TARGETS)
    let_pass(node, 1.0)
    for k in range(4):
        node.send(f"long-{k}", 10, 1000)
    let_pass(node, 0.5)
    assert set(node.placed().values()) == {tp(0, 1, 2, 3)}
    node.call(m.SetPolicy, "static-dp")
    waits = waits_under_load(node, 6.0, 40.0)
    assert max(waits.values()) < 1.0
    finish(node)
    assert node.value("shoal_carried_requests_total", outcome="carried") >= 4
    assert node.value("shoal_requests_total", outcome="finished") == len(node.prompts)


@pytest.mark.parametrize("targets", [(), TARGETS], ids=["", "targets"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_takes_over_a_node_of_pipelines(
    policy: str, targets: tuple[Target, ...]
) -> None:
    """Those that decide the layout leave the pipelines, and carry what runs there; others stay."""
    node = LoopbackNode(4, max_pp=4, cost_model=MODEL, targets=targets)
    node.settle()
    node.switch(pp(0, 1), pp(2, 3))
    for k in range(8):
        node.send(f"r{k}", 10, 30)
    node.turns(6)
    node.call(m.SetPolicy, policy)
    for k in range(8, 20):
        node.send(f"r{k}", 10, 20)
    node.run_for(25.0)
    assert node.missing == []
    node.assert_exact()
    assert node.value("shoal_policy_errors_total") == 0
    stays = not POLICIES[policy].decides_layout
    assert (node.controller.books.units.partition == (pp(0, 1), pp(2, 3))) == stays
    assert node.audit() == []


@pytest.mark.parametrize("kept", [0, 2])
def test_those_that_run_where_urgent_requests_get_a_group_go_on_elsewhere(kept: int) -> None:
    node = LoopbackNode(4, policy="adaptive", settings=ROOMY, cost_model=MODEL, urgent_engines=kept)
    node.settle()
    for k in range(16):
        node.send(f"r{k}", 8, 300)
    let_pass(node, 0.1)
    requests, partition = node.controller.books.requests, node.controller.books.units.partition
    assert partition == tuple(map(alone, range(4)))
    assert all(requests.core(unit).requests for unit in partition)
    node.send("urgent", 8, 300, priority=-1)
    let_pass(node, 0.5)
    alone_there = [core for core in requests.cores.values() if list(core.requests) == ["urgent"]]
    assert [core.unit for core in alone_there] == [tp(0, 1)] * (kept // 2)
    finish(node)
