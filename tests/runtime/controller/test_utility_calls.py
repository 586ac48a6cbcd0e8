"""Utility calls: each has one answer, whoever dies."""

import pytest

from shoal.runtime.controller.books.engine_book import EngineState
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.transport import Channel, engine_identity
from tests.runtime.loopback_node import LoopbackNode


def asked(engines: int, method: str) -> LoopbackNode:
    """Return a node whose engine 0, which hangs, is to answer a call."""
    node = LoopbackNode(engines)
    node.settle()
    node.hung = {0}
    node.utility(method)
    node.settle()
    assert node.utilities == []
    return node


def test_of_all_engines_one_answers() -> None:
    node = LoopbackNode(4)
    node.settle()
    node.utility("get_supported_tasks", client=1)
    node.settle()
    (answer,) = node.utilities
    assert (answer.call_id, answer.result) == (7, (None, ["generate"]))


@pytest.mark.parametrize("returns", [False, True])
def test_another_engine_answers_in_the_place_of_one_that_died(returns: bool) -> None:
    node = asked(3, "reset_prefix_cache")
    node.kill(0)
    if returns:
        node.restart(0)
    node.settle()
    (answer,) = node.utilities
    assert (answer.call_id, answer.result) == (7, (None, True))


def test_one_that_does_not_answer_does_it_too_when_it_goes_on() -> None:
    node = LoopbackNode(2)
    node.settle()
    node.hung = {1}
    node.set_layout([0, 1])
    node.run_for(2 * node.config.prepare_timeout_seconds, tick=1.0)
    assert node.controller.books.engines[1].state is EngineState.SILENT
    node.utility("reset_prefix_cache")
    node.settle()
    (answer,) = node.utilities
    assert answer.result == (None, True)
    told = [m.decode_to_engine(frames[0]) for frames in node.network.to_engines[1]]
    assert m.Utility(None) in told


def test_without_an_engine_the_call_fails() -> None:
    node = asked(1, "is_sleeping")
    node.kill(0)
    node.settle()
    (answer,) = node.utilities
    assert answer.failure_message == "no engine is left"


def test_a_second_answer_reaches_nobody() -> None:
    """vLLM's front end would end with the error of a call that it does not know."""
    node = asked(2, "is_sleeping")
    node.kill(0)
    node.settle()
    late = m.encode(m.UtilityDone(1, 1, []))
    node.network.post(Channel.ENGINE, engine_identity(1), [late])
    node.settle()
    assert len(node.utilities) == 1
    assert node.controller.books.statistics.stale.total() == 1
