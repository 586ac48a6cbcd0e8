"""One switch, audit or forming of a group at a time: who asks for one meanwhile waits."""

import pytest

from shoal.policies.values.layouts import tensor_parallel
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.transport import Channel, engine_identity
from tests.runtime.loopback_node import LoopbackNode


@pytest.fixture
def node() -> LoopbackNode:
    node = LoopbackNode(2, restart_limit=3)
    node.settle()
    return node


def begin_to_form(node: LoopbackNode) -> None:
    """Have a group form anew, one of whose members does not answer for now."""
    node.kill(1)
    node.settle()
    node.hung = {0}
    node.restart(1)
    node.settle()


def test_audit_names_an_engine_that_does_not_answer(node: LoopbackNode) -> None:
    node.hung = {1}
    call = node.call(m.AuditNode)
    node.settle()
    assert node.reply(call) is None
    node.run_for(node.config.prepare_timeout_seconds, tick=1.0)
    reply = node.reply(call)
    assert isinstance(reply, m.AuditDone)
    assert reply.problems == ["engine 1: did not answer the audit"]


def test_an_answer_to_an_audit_that_is_over_answers_no_other(node: LoopbackNode) -> None:
    node.hung = {1}
    node.call(m.AuditNode)
    node.settle()
    node.run_for(node.config.prepare_timeout_seconds, tick=1.0)
    call = node.call(m.AuditNode)
    node.controller.turn()
    late = m.Integrity(call - 1, 1, [], [], [])
    node.network.post(Channel.ENGINE, engine_identity(1), [m.encode(late)])
    node.settle()
    assert node.reply(call) is None
    node.run_for(node.config.prepare_timeout_seconds, tick=1.0)
    reply = node.reply(call)
    assert isinstance(reply, m.AuditDone)
    assert reply.problems == ["engine 1: did not answer the audit"]


def test_audit_waits_for_a_switch_and_holds_the_next_one_back(node: LoopbackNode) -> None:
    calls = [
        node.set_layout((0, 1)),
        node.call(m.AuditNode),
        node.call(m.AuditNode),
    ]
    node.controller.turn()
    assert node.reply(calls[1]) is None
    node.settle()
    assert [type(node.reply(call)) for call in calls] == [m.SwitchDone, m.AuditDone, m.AuditDone]
    audit, switch = node.call(m.AuditNode), node.set_layout((0,), (1,))
    node.settle()
    assert isinstance(node.reply(audit), m.AuditDone)
    assert isinstance(node.reply(switch), m.SwitchDone)


def test_an_audit_waits_until_a_group_is_formed(node: LoopbackNode) -> None:
    begin_to_form(node)
    audit = node.call(m.AuditNode)
    node.settle()
    assert node.reply(audit) is None
    node.hung = set()
    node.settle()
    reply = node.reply(audit)
    assert isinstance(reply, m.AuditDone)
    assert reply.problems == []


def test_a_group_is_formed_only_after_an_audit(node: LoopbackNode) -> None:
    node.kill(1)
    node.settle()
    node.hung = {0}
    audit = node.call(m.AuditNode)
    node.restart(1)
    node.settle()
    assert node.reply(audit) is None
    assert node.backends[1].formed == []
    node.hung = set()
    node.settle()
    assert isinstance(node.reply(audit), m.AuditDone)
    assert [unit for unit, _ in node.backends[1].formed] == [tensor_parallel((0, 1))]


def test_those_who_wait_begin_in_the_order_they_came(node: LoopbackNode) -> None:
    begin_to_form(node)
    together, audit = node.set_layout((0, 1)), node.call(m.AuditNode)
    node.settle()
    assert (node.reply(together), node.reply(audit)) == (None, None)
    node.hung = set()
    while node.reply(audit) is None:
        node.turns(1)
    assert isinstance(node.reply(together), m.SwitchDone), "the switch came first"


def test_memory_is_not_changed_for_a_caller_who_has_gone(node: LoopbackNode) -> None:
    took = node.config.prepare_timeout_seconds
    node.hung = {1}
    node.call(m.AuditNode)  # engine 1 does not answer it
    late = node.call(m.ChangeMemory, 2, 1, took - 1)
    in_time = node.call(m.ChangeMemory, 2, 1, took + 10)
    node.run_for(took + 2, tick=1.0)
    reply = node.reply(late)
    assert isinstance(reply, m.CallFailed)
    assert (reply.status, reply.error) == (504, "other operations took longer than 4 s")
    reply = node.reply(in_time)
    assert isinstance(reply, m.CallFailed), "the node does not share weights"
    assert reply.status != 504


def test_a_switch_has_the_time_that_is_left_when_its_turn_comes(node: LoopbackNode) -> None:
    took = node.config.prepare_timeout_seconds
    node.hung = {1}
    node.call(m.AuditNode)  # engine 1 does not answer it
    late = node.set_layout((0, 1), timeout=took - 1)
    waits = node.set_layout((0, 1), treatment=m.Treatment.SEQUENTIAL, timeout=took + 10)
    node.run_for(took + 9, tick=1.0)
    reply = node.reply(late)
    assert isinstance(reply, m.CallFailed)
    assert (reply.status, reply.error) == (504, "other operations took longer than 4 s")
    assert node.reply(waits) is None
    node.run_for(2.0, tick=1.0)
    node.hung = set()  # so that the switch, which has been given up, can end
    node.settle()
    reply = node.reply(waits)
    assert isinstance(reply, m.CallFailed)
    assert reply.status == 504
