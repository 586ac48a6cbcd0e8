"""Hundreds of random operations: binds, releases, shifts, requests, in any order of processes.

Nothing may hang, no token be lost, repeated or reordered, no block leak, and every audit on the way
must be clean. The controls show that each of these would be noticed. ``SHOAL_FAKE_OPERATIONS`` in
the environment says how many operations there are.
"""

import msgspec
import pytest

from shoal.runtime.controller.books import capacity
from shoal.runtime.engine.agent import carrying
from shoal.runtime.engine.fake.faults import Faults
from shoal.runtime.protocol.messages import CallFailed, SwitchDone, Treatment
from shoal.runtime.protocol.wire import FinishReason
from tests.depth import how_many
from tests.runtime.computed_tokens import ComputedTokens
from tests.runtime.loopback_node import SMALL, LoopbackNode
from tests.runtime.random_run import MOST_MISSING, RandomRun, hasty

OPERATIONS = how_many("SHOAL_FAKE_OPERATIONS", few=280, many=10_000)
NEVER, SOMETIMES, ALWAYS = 0, 50, 1
"""Tokens from which on a switch copies KV ahead."""
CHANGES = OPERATIONS // 2
"""Binds, releases and shifts among so many operations as that takes."""
MOST_ACTIONS = 10 * OPERATIONS


def live(run: RandomRun, operations: int, changes: int = 0) -> None:
    for _ in range(MOST_ACTIONS):
        if run.operations >= operations and run.changes >= changes:
            return
        run.act()
    raise AssertionError(f"only {run.operations} operations in {MOST_ACTIONS} actions")


@pytest.mark.parametrize(
    ("seed", "max_pp", "max_sp", "changes", "ahead"),
    [
        (0, 1, 1, 0, NEVER),
        (1, 1, 1, 0, ALWAYS),
        (8, 1, 1, 0, SOMETIMES),
        (3, 4, 2, 0, SOMETIMES),
        (4, 1, 4, CHANGES, ALWAYS),
    ],
)
def test_random_life(seed: int, max_pp: int, max_sp: int, changes: int, ahead: int) -> None:
    limits = {"max_pp": max_pp, "max_sp": max_sp, "precopy_tokens": ahead}
    run = RandomRun(LoopbackNode(4, seed=seed, **limits))
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
    assert len(done) > OPERATIONS // 20
    assert set(done) == set(Treatment)
    assert node.value("shoal_carried_requests_total", outcome="carried") > OPERATIONS // 20
    assert (node.value("shoal_precopies_total", outcome="copied") > OPERATIONS // 140) == (
        ahead != NEVER
    )
    if max_sp > 1:
        assert run.shifts > OPERATIONS // 20
        assert node.value("shoal_steps_total", mode="sp") > OPERATIONS // 25
        assert node.value("shoal_steps_total", mode="tp") > OPERATIONS // 20


@pytest.mark.parametrize(("seed", "tier"), [(0, 0), (1, 0), (2, 0), (3, 20), (4, 200)])
def test_random_life_under_a_policy(monkeypatch: pytest.MonkeyPatch, seed: int, tier: int) -> None:
    """Its switches are late again and again, because it waits for requests so briefly."""
    policy = hasty(monkeypatch, seed)
    ahead = (NEVER, SOMETIMES, ALWAYS)[seed % 3]
    settings = msgspec.structs.replace(SMALL, tier_blocks=tier)
    limits = {"switch_wait_seconds": 0.03, "precopy_tokens": ahead}
    node = LoopbackNode(4, seed=seed, policy=policy, settings=settings, **limits)
    run = RandomRun(node, decided=True)
    live(run, OPERATIONS)
    run.finish()

    node.assert_exact()
    assert node.missing == []
    assert set(node.finish.values()) == {FinishReason.LENGTH}
    assert [problem for audit in run.audits for problem in audit.problems] == []
    assert node.audit() == []
    assert all(backend.own.lent == frozenset() for backend in node.backends.values())
    assert node.value("shoal_switches_total", outcome="failed") == 0
    assert node.value("shoal_late_switches_total") > OPERATIONS // 120
    assert node.value("shoal_carried_requests_total", outcome="carried") > OPERATIONS // 20
    hits = node.value("shoal_tier_requests_total", outcome="hit")
    assert (hits > OPERATIONS // 100) == bool(tier), hits


def test_random_life_of_two_groups_of_four() -> None:
    run = RandomRun(LoopbackNode(8, seed=5, precopy_tokens=SOMETIMES))
    live(run, OPERATIONS)
    run.finish()
    node = run.node

    node.assert_exact()
    assert node.missing == []
    assert set(node.finish.values()) == {FinishReason.LENGTH}
    assert [problem for audit in run.audits for problem in audit.problems] == []
    assert node.audit() == []
    assert len(node.agents) == 8


ROOMY = msgspec.structs.replace(SMALL, num_blocks=4000, max_num_seqs=MOST_MISSING)
KEEPING = (Treatment.CARRY, Treatment.HARD, Treatment.SEQUENTIAL)
"""What leaves to requests all that was computed of them."""


@pytest.mark.parametrize(("seed", "ahead"), [(0, NEVER), (1, ALWAYS)])
def test_no_token_is_computed_twice_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, seed: int, ahead: int
) -> None:
    monkeypatch.setattr(carrying, "ROOM_SECONDS", 1000.0)
    monkeypatch.setattr(capacity, "LEASE_BLOCKS", ROOMY.num_blocks // 4)
    computed = ComputedTokens(monkeypatch)
    node = LoopbackNode(4, seed=seed, settings=ROOMY, precopy_tokens=ahead)
    run = RandomRun(node, treatments=KEEPING)
    live(run, OPERATIONS)
    run.finish()

    node.assert_exact()
    assert node.missing == []
    assert node.audit() == []
    assert node.value("shoal_carried_requests_total", outcome="carried") > OPERATIONS // 20
    assert computed.requests > OPERATIONS // 2
    assert computed.again == {}


def test_tokens_that_are_computed_twice_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = ComputedTokens(monkeypatch)
    run = RandomRun(LoopbackNode(4, seed=0, settings=ROOMY), treatments=(Treatment.SOFT,))
    live(run, 300)
    assert computed.again != {}


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


@pytest.mark.parametrize("ahead", [NEVER, ALWAYS])
@pytest.mark.parametrize("fault", ["lose_token", "wrong_block"])
def test_damage_in_a_carry_is_noticed(fault: str, ahead: int) -> None:
    engine = 0 if ahead else 2
    faults = {engine: Faults(**{fault: True})}
    node = LoopbackNode(4, seed=0, faults=faults, precopy_tokens=ahead)
    run = RandomRun(node, treatments=(Treatment.CARRY,))
    live(run, 400)
    with pytest.raises(AssertionError):
        node.assert_exact()


def test_dropped_block_is_noticed() -> None:
    run = RandomRun(LoopbackNode(4, seed=0, faults={2: Faults(drop_block=True)}))
    live(run, 200)
    run.node.run_for(1.0)  # requests that are carried wait for room
    assert any("engine 2: " in p and "lost" in p for p in run.node.audit())


def test_double_lend_is_noticed() -> None:
    run = RandomRun(LoopbackNode(4, seed=0, faults={2: Faults(double_lend=True)}))
    live(run, 300)
    run.node.run_for(1.0)  # requests that are carried wait for room
    problems = [p for audit in run.audits for p in audit.problems] + run.node.audit()
    assert any("engine 2 lent blocks twice" in p for p in problems)
