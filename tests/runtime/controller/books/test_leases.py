"""Leases: how they grow and shrink, and what the audit notices."""

import pytest

from shoal.policies.values.layouts import alone
from shoal.runtime.config import FakeSettings
from shoal.runtime.controller.books.capacity import LEASE_BLOCKS
from shoal.runtime.engine.fake.faults import Faults
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.transport import Frames
from tests.runtime.controller.scripted_node import ScriptedNode
from tests.runtime.loopback_node import LoopbackNode
from tests.units import tp

LARGE = FakeSettings(num_blocks=400, block_tokens=4, max_num_seqs=8, max_model_len=3000)


def started(**settings) -> LoopbackNode:
    node = LoopbackNode(2, **({"settings": LARGE} | settings))
    node.settle()
    return node


def lease(node: LoopbackNode) -> int:
    return node.view().units[0].lease_blocks


def test_idle_bind_lends_the_floor_only() -> None:
    node = started()
    node.switch(tp(0, 1))
    assert lease(node) == LEASE_BLOCKS
    assert node.view().engines[1].lent_blocks == {"0,1": LEASE_BLOCKS}


def test_first_lease_is_what_waiting_requests_need() -> None:
    node = started()
    for k in range(40):  # more than the batches of both engines take
        node.send(f"r{k}", 100, 4)
    node.controller.turn()
    assert len(node.pool) == 22
    node.set_layout(tp(0, 1))
    node.controller.turn()
    prepares = [
        message
        for frames in node.network.to_engines[1]
        if isinstance(message := m.decode_to_engine(frames[0]), m.Prepare)
    ]
    assert [prepare.blocks for prepare in prepares] == [8 * 13]
    node.settle()


def test_request_larger_than_the_lease_makes_it_grow() -> None:
    node = started()
    node.switch(tp(0, 1))
    node.send("large", 2000, 20)
    node.settle()
    assert node.missing == []
    node.assert_exact()
    assert lease(node) >= 2000 // 8 > LEASE_BLOCKS
    assert node.audit() == []


def test_a_lease_stays_while_its_group_is_idle_and_goes_home_with_its_release() -> None:
    node = started()
    node.switch(tp(0, 1))
    node.send("large", 2000, 20)
    node.settle()
    grown = lease(node)
    node.run_for(60.0, tick=20.0)
    assert lease(node) == grown
    assert [len(backend.own.lent) for backend in node.backends.values()] == [grown] * 2
    assert node.audit() == []
    node.switch(alone(0), alone(1))
    assert [backend.own.lent for backend in node.backends.values()] == [frozenset()] * 2
    assert node.audit() == []


def test_a_group_caches_as_much_as_its_members_have_room_for() -> None:
    node = started()
    node.switch(tp(0, 1))
    cached, believed = list[int](), list[int]()
    for k in range(2):
        node.send(f"r{k}", 1000, 2)
        node.settle()
        cached.append(node.backends[0].groups[tp(0, 1)]._pool.cached)
        believed.append(node.controller.books.prefixes.tokens(tp(0, 1)))
    assert cached == [1000 // 8, 2 * 1000 // 8]
    assert believed[1] == pytest.approx(2 * believed[0], rel=0.05)


def test_group_takes_the_blocks_of_paused_requests_when_it_has_none() -> None:
    node = started()
    for k in range(8):
        node.send(f"own-{k}", 190, 10)
    node.turns(3)
    node.switch(tp(0, 1))
    paused = set(node.missing)
    assert len(paused) == 8
    node.send("large", 2500, 10)
    node.settle()
    assert set(node.missing) == paused
    node.switch(alone(0), alone(1))
    node.run_for(0.5)
    assert node.missing == []
    node.assert_exact()
    assert node.audit() == []


def test_request_too_long_for_one_engine_waits_for_a_group() -> None:
    node = started(settings=FakeSettings(0.0, 60, 4, 8, 400))
    node.send("long", 300, 20)
    node.send("short", 10, 5)
    node.settle()
    assert node.missing == ["long"]
    node.switch(tp(0, 1))
    assert node.missing == []
    assert node.placed()["long"] == tp(0, 1)
    node.assert_exact()


def test_wish_that_a_release_overtakes() -> None:
    node = started(seed=11)
    for round_ in range(30):
        call = node.set_layout(tp(0, 1))
        while node.reply(call) is None:
            node.step()
        node.send(f"large-{round_}", 1500, 6)
        for _ in range(node.rng.randrange(12)):
            node.step()
        node.switch(alone(0), alone(1))
        assert node.audit() == []
    node.switch(tp(0, 1))
    node.run_for(2.0)
    assert node.missing == []
    node.assert_exact()


def test_a_member_may_answer_two_wishes_when_one_of_them_was_given_up() -> None:
    """Wishes from before a bind have one epoch, so the first answer may count for the second."""
    node = started()
    leases, group = node.controller.books.leases, tp(0, 1)
    leases.grow_ahead(group, 5)
    leases.cancel(group)
    leases.grow_ahead(group, 5)
    node.turn_agent(1)
    node.controller.turn()
    assert leases.grows(group)
    node.settle()
    assert leases.lent_by(0) == leases.lent_by(1) == {}
    assert all(backend.own.lent == frozenset() for backend in node.backends.values())
    assert node.audit() == []


def test_what_is_lent_ahead_is_lent_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(m, "PORTION", 5)
    node = ScriptedNode(2, precopy_tokens=1)
    leases, group = node.books.leases, tp(0, 1)
    node.take()
    leases.grow_ahead(group, 12)
    node.turn()
    opened = list[tuple[int, m.Message]]()
    for portion, blocks in enumerate((5, 5, 2)):
        lend = m.Lend(m.AHEAD, group, blocks, urgent=False)
        assert node.take() == [*opened, (0, lend), (1, lend)]
        assert leases.grows(group)
        lent = list(range(10 * portion + 1, 10 * portion + 1 + blocks))
        for engine in (0, 1):
            node.answer(engine, m.Lent(m.AHEAD, engine, group, lent))
        opened = [(0, m.Grow(m.AHEAD, group, {0: lent, 1: lent}))]
    assert node.take() == opened
    assert not leases.grows(group)
    assert leases.opened[group] == 12


def test_members_that_have_no_more_are_not_asked_for_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(m, "PORTION", 5)
    node = ScriptedNode(2, precopy_tokens=1)
    leases, group = node.books.leases, tp(0, 1)
    leases.grow_ahead(group, 12)
    node.turn()
    node.take()
    for engine, lent in ((0, [1, 2, 3]), (1, [])):
        node.answer(engine, m.Lent(m.AHEAD, engine, group, lent))
    assert not leases.grows(group)
    assert [type(message) for _, message in node.take()] == [m.TakeBack, m.Grow]


def is_commit(frames: Frames) -> bool:
    return isinstance(m.decode_to_engine(frames[0]), m.Commit)


def test_a_leader_whose_wish_comes_before_its_group_is_bound_asks_again() -> None:
    """It commits first, and wants blocks for a paused request while the other still commits."""
    node = started()
    node.switch(tp(0, 1))
    node.send("large", 240, 1200)
    node.turns(30)
    node.switch(alone(0), alone(1))
    assert 0 < len(node.tokens["large"]) < 1200
    call = node.set_layout(tp(0, 1))
    node.controller.turn()
    while not any(is_commit(frames) for frames in node.network.to_engines[1]):
        node.turn_agent(0)
        node.turn_agent(1)
        node.controller.turn()
    for _ in range(3):
        node.turn_agent(0)
        node.controller.turn()
    assert node.reply(call) is None
    node.run_for(1.0)
    assert node.missing == []
    node.assert_exact()
    assert node.audit() == []


# --- negative controls ---


def test_audit_notices_a_block_lent_twice() -> None:
    node = started(faults={1: Faults(double_lend=True)})
    node.switch(tp(0, 1))
    node.send("large", 2000, 4)
    node.settle()
    assert any("engine 1 lent blocks twice" in problem for problem in node.audit())


def test_audit_notices_a_lost_block() -> None:
    node = started(faults={1: Faults(drop_block=True)})
    node.switch(tp(0, 1))
    node.switch(alone(0), alone(1))
    assert node.audit() == ["engine 1: 1 blocks are lost"]


def test_audit_notices_a_lease_that_differs() -> None:
    node = started()
    node.switch(tp(0, 1))
    node.backends[0].groups[tp(0, 1)].shrink(54)
    problems = node.audit()
    assert "engine 0: unit [0, 1] holds 10 blocks, the books say 64" in problems


def test_audit_notices_lent_blocks_that_differ() -> None:
    node = started()
    node.backends[1].own.lend(2)
    (problem,) = node.audit()
    assert problem.startswith("engine 1: lent blocks differ from the books")
