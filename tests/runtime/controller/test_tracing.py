"""What the controller tells front ends that trace: when requests waited, and what a switch did."""

import pytest

from shoal.policies.values.layouts import alone
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages.views import SwitchTrace
from tests.runtime.loopback_node import LoopbackNode
from tests.units import tp

ALONE = (alone(0), alone(1))
SOFT, HARD = m.Treatment.SOFT, m.Treatment.HARD


def started(*, tracing: bool) -> LoopbackNode:
    node = LoopbackNode(2, tracing=tracing)
    node.settle()
    return node


def placed(node: LoopbackNode) -> list[m.Placed]:
    return [n for n in node.network.control_replies["front-0"] if isinstance(n, m.Placed)]


def told(node: LoopbackNode, front: str = "front-0") -> list[m.Switching]:
    return [n for n in node.network.control_replies[front] if isinstance(n, m.Switching)]


def test_a_request_s_wait_is_told_at_every_placement() -> None:
    node = started(tracing=True)
    arrival = node.clock.now
    node.send("r", 10, 40)
    node.turns(6)
    node.clock.advance(2.0)
    node.switch(tp(0, 1), treatment=SOFT)
    node.settle()
    first, second = placed(node)
    assert first.waited == (arrival, arrival)
    assert second.unit == tp(0, 1)
    # It came back into the pool when it was moved, not when it first came.
    assert second.waited is not None
    assert arrival + 2.0 <= second.waited[0] <= second.waited[1]


def test_a_switch_is_told_as_it_begins_and_when_it_has_ended() -> None:
    node = started(tracing=True)
    began = node.clock.now
    node.send("r", 10, 40)
    node.turns(6)
    unit = placed(node)[0].unit
    view = node.switch(tp(0, 1), treatment=HARD)
    begin, end = (note.trace for note in told(node))
    assert isinstance(begin, SwitchTrace)
    assert isinstance(end, SwitchTrace)
    assert (begin.done, begin.phases, begin.units) == (None, [], [tp(0, 1)])
    assert (end.done, end.epoch, end.reason, end.treatment) == (view, view.epoch, "manual", "hard")
    assert began <= begin.at <= end.at
    assert [phase.name for phase in end.phases] == ["drain", "lease", "commit"]
    for phase in end.phases:
        assert phase.unit == tp(0, 1)
        assert begin.at <= phase.start <= phase.end <= end.at
    # All front ends can refer to it; the next one is another.
    assert told(node, "front-1") == told(node)
    assert begin.traceparent == end.traceparent
    node.switch(*ALONE, treatment=HARD)
    back = told(node)[-1].trace
    assert back is not None
    assert (begin.paused, end.paused, back.paused) == ([], [unit], [])
    assert [phase.name for phase in back.phases] == ["release", "resume"]
    assert back.traceparent != end.traceparent


@pytest.mark.parametrize("treatment", [SOFT, HARD])
def test_without_tracing_notes_carry_no_more(treatment: m.Treatment) -> None:
    node = started(tracing=False)
    node.send("r", 10, 40)
    node.turns(6)
    node.switch(tp(0, 1), treatment=treatment)
    node.switch(*ALONE, treatment=treatment)
    node.settle()
    assert {note.waited for note in placed(node)} == {None}
    assert {note.trace for note in told(node)} == {None}
    assert b"trace" not in m.encode(told(node)[0])
    assert b"waited" not in m.encode(placed(node)[0])
