"""Engines that die: whom they take with them, and how that is counted."""

from shoal.policies.values.partition import singles
from shoal.runtime.controller.books.engine_book import EngineState
from shoal.runtime.protocol import messages as m
from tests.runtime.loopback_node import LoopbackNode


def started(engines: int = 4) -> LoopbackNode:
    node = LoopbackNode(engines)
    node.settle()
    return node


def dead(node: LoopbackNode) -> set[int]:
    return set(node.controller.books.engines.in_state(EngineState.DEAD))


def kills(node: LoopbackNode) -> list[dict[int, int]]:
    """Return what the supervisor was told to end: engines, and how often each was restarted."""
    notes = node.network.control_replies.get("supervisor", [])
    return [note.engines for note in notes if isinstance(note, m.KillEngines)]


def test_an_engine_that_is_alone_dies_alone() -> None:
    node = started()
    node.kill(2)
    node.settle()
    assert dead(node) == {2}
    assert kills(node) == [{2: 0}]


def test_a_group_dies_with_its_member_and_is_a_unit_no_more() -> None:
    node = started()
    node.switch((0, 1), (2,), (3,))
    node.kill(1)
    node.settle()
    assert dead(node) == {0, 1}
    assert kills(node) == [{0: 0, 1: 0}]
    assert node.partition == singles(4)


def test_a_death_that_is_known_is_passed_over() -> None:
    node = started()
    for _ in range(2):
        node.kill(2)
        node.settle()
    assert kills(node) == [{2: 0}]
    assert node.value("shoal_engine_deaths_total") == 1


def test_an_audit_expects_nothing_of_the_dead() -> None:
    node = started()
    node.hung = {1}
    call = node.call(m.AuditNode)
    node.settle()
    assert node.reply(call) is None
    node.kill(1)
    node.settle()
    reply = node.reply(call)
    assert isinstance(reply, m.AuditDone)
    assert reply.problems == []


def test_deaths_count_by_cause() -> None:
    node = started(4)
    node.switch((0, 1), (2,), (3,))
    node.kill(0)
    node.agents.pop(1)
    node.settle()
    node.network.control_sends("supervisor", m.EngineDied(2, "stopped", m.DeathCause.STOPPED))
    node.settle()
    causes = {cause: node.value("shoal_engine_deaths_total", cause=cause) for cause in m.DeathCause}
    assert {cause: n for cause, n in causes.items() if n} == {
        m.DeathCause.ENDED: 1,
        m.DeathCause.GROUP: 1,
        m.DeathCause.STOPPED: 1,
    }
