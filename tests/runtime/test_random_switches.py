"""2,000 random operations: binds, releases, shifts, requests, in any order of their processes.

Nothing may hang, no token be lost, repeated or reordered, no block leak, and every audit on the way
must be clean. The controls show that each of these would be noticed.
"""

import pytest

from shoal.runtime.engine.fake.faults import Faults
from shoal.runtime.protocol.messages import CallFailed, SwitchDone, Treatment
from shoal.runtime.protocol.wire import FinishReason
from tests.runtime.loopback_node import LoopbackNode
from tests.runtime.random_run import RandomRun, hasty

OPERATIONS = 2000
CHANGES = 1000
"""Binds, releases and shifts among so many operations as that takes."""
MOST_ACTIONS = 10_000


def live(run: RandomRun, operations: int, changes: int = 0) -> None:
    for _ in range(MOST_ACTIONS):
        if run.operations >= operations and run.changes >= changes:
            return
        run.act()
    raise AssertionError(f"only {run.operations} operations in {MOST_ACTIONS} actions")


@pytest.mark.parametrize(
    ("seed", "max_sp", "changes"), [(0, 1, 0), (1, 1, 0), (2, 1, 0), (3, 2, 0), (4, 4, CHANGES)]
)
def test_random_life(seed: int, max_sp: int, changes: int) -> None:
    run = RandomRun(LoopbackNode(4, seed=seed, max_sp=max_sp))
    live(run, OPERATIONS, changes)
    run.finish()
    node = run.node

    node.assert_exact()
    assert node.missing == []
    assert {node.finish[r] for r in node.finish} == {FinishReason.LENGTH}
    assert [problem for audit in run.audits for problem in audit.problems] == []
    assert node.audit() == []
    assert all(backend.own.lent == frozenset() for backend in node.backends.values())
    assert len(node.agents) == 4
    assert {type(reply) for reply in run.switches} <= {SwitchDone, CallFailed}
    # A sequential switch may run out of time; nothing else may fail.
    assert {r.status for r in run.switches if isinstance(r, CallFailed)} <= {504}
    done = [reply.switch.treatment for reply in run.switches if isinstance(reply, SwitchDone)]
    assert len(done) > 100
    assert set(done) == set(Treatment)
    if max_sp > 1:
        assert run.shifts > 100
        assert node.value("shoal_steps_total", mode="sp") > 100
        assert node.value("shoal_steps_total", mode="tp") > 100


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_life_under_a_policy(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Its switches are late again and again, since a third of the requests cannot be moved."""
    policy = hasty(monkeypatch, seed)
    node = LoopbackNode(4, seed=seed, policy=policy, switch_wait_seconds=0.03)
    run = RandomRun(node, decided=True, pinned=0.3)
    live(run, OPERATIONS)
    run.finish()

    node.assert_exact()
    assert node.missing == []
    assert set(node.finish.values()) == {FinishReason.LENGTH}
    assert [problem for audit in run.audits for problem in audit.problems] == []
    assert node.audit() == []
    assert all(backend.own.lent == frozenset() for backend in node.backends.values())
    assert node.value("shoal_switches_total", outcome="failed") == 0
    assert node.value("shoal_late_switches_total") > 10
    assert node.value("shoal_switches_total", reason="paused") > 3


def test_same_seed_same_life() -> None:
    lives = [RandomRun(LoopbackNode(4, seed=3)) for _ in range(2)]
    for run in lives:
        live(run, 300)
    assert lives[0].node.tokens == lives[1].node.tokens
    assert lives[0].node.controller.switches == lives[1].node.controller.switches


def test_repeated_token_is_noticed() -> None:
    run = RandomRun(LoopbackNode(4, seed=0, faults={2: Faults(repeat_token=True)}))
    live(run, 200)
    with pytest.raises(AssertionError):
        run.node.assert_exact()


def test_dropped_block_is_noticed() -> None:
    run = RandomRun(LoopbackNode(4, seed=0, faults={2: Faults(drop_block=True)}))
    live(run, 200)
    assert any("engine 2: " in p and "lost" in p for p in run.node.audit())


def test_double_lend_is_noticed() -> None:
    run = RandomRun(LoopbackNode(4, seed=0, faults={2: Faults(double_lend=True)}))
    live(run, 300)
    problems = [p for audit in run.audits for p in audit.problems] + run.node.audit()
    assert any("engine 2 lent blocks twice" in p for p in problems)
