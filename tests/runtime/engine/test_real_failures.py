"""Engines that die or fall silent in the middle of a bind: it fails, the others serve on.

The tests take engines away from one node, so they run in the order they are written.
"""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.policies.values.layouts import alone
from shoal.runtime.protocol import messages as m
from tests.runtime.engine.prompts import PROMPTS, Stock
from tests.runtime.engine.real_node import RealNode, SwitchFailed
from tests.units import tp

ENGINES = 4
SHORT = PROMPTS[:4]


@pytest.fixture(scope="module")
def node(llama: Path) -> Iterator[RealNode]:
    # Requests of this node are for one unit each: they have no other to go on in.
    with RealNode(llama, ENGINES, max_retries=0, patience=60.0) as node:
        yield node


@pytest.fixture(scope="module")
def expected(stock: Stock) -> list[list[int]]:
    return stock(SHORT, 32)


@pytest.fixture
def at(node: RealNode) -> Iterator[Callable[[type[m.Message], int, Callable[[], None]], None]]:
    """Do something just before the first message of a kind goes to an engine."""

    def arrange(kind: type[m.Message], engine: int, act: Callable[[], None]) -> None:
        def before_send(to: int, message: m.Message) -> None:
            if to == engine and isinstance(message, kind):
                node.transport.before_send = nothing
                act()

        node.transport.before_send = before_send

    nothing = node.transport.before_send
    yield arrange
    node.transport.before_send = nothing


def assert_serve(node: RealNode, engines: list[int], expected: list[list[int]]) -> None:
    requests = [node.submit(alone(engine), SHORT) for engine in engines]
    for ids in requests:
        assert node.wait(ids) == expected


def test_a_member_that_does_not_answer_fails_the_bind_and_comes_back(
    node: RealNode, expected: list[list[int]], at: Callable[..., None]
) -> None:
    member = node.processes["scheduler-1"]
    at(m.Prepare, 1, lambda: member.signal(signal.SIGSTOP))
    call = node.ask([tp(0, 1), alone(2), alone(3)])
    switches = node.controller._operations.switches
    node.until(lambda: switches.running and switches.running.answers, "the other one's answer")
    node.skip(60.0)
    with pytest.raises(SwitchFailed, match=r"engines \[1\] did not reach a safe point within 60 s"):
        node.switched(call)
    assert_serve(node, [0, 2, 3], expected)
    with node.bound(tp(2, 3)):
        assert node.generate(tp(2, 3), SHORT) == expected
    with pytest.raises(SwitchFailed, match=r"engines \[1\], which do not answer"):
        node.switch(tp(0, 1))

    member.signal(signal.SIGCONT)
    node.until(lambda: node.controller.books.engines.serves(tp(0, 1)), "engine 1 to answer again")
    with node.bound(tp(0, 1)):
        assert node.generate(tp(0, 1), SHORT) == expected
    assert_serve(node, [0, 1, 2, 3], expected)
    assert node.audit() == []


def test_a_member_that_dies_before_it_is_prepared_fails_the_bind(
    node: RealNode, expected: list[list[int]], at: Callable[..., None]
) -> None:
    paused = node.submit(alone(0), SHORT)
    at(m.Prepare, 1, lambda: node.kill("scheduler-1"))
    with pytest.raises(SwitchFailed, match=r"engines \[1\] are lost: scheduler-1 was killed"):
        node.switch(tp(0, 1))
    assert node.wait(paused) == expected
    assert_serve(node, [0, 2, 3], expected)
    with node.bound(tp(2, 3)):
        assert node.generate(tp(2, 3), SHORT) == expected
    assert node.audit() == []


def test_a_runner_that_dies_between_prepared_and_commit_takes_only_its_group_down(
    node: RealNode, expected: list[list[int]], at: Callable[..., None]
) -> None:
    serving = node.submit(alone(0), SHORT, max_tokens=200)
    doomed = node.submit(alone(2), SHORT, max_tokens=500)
    node.wait_for_tokens(serving + doomed, 1)
    at(m.Commit, 3, lambda: node.kill("runner-3"))
    with pytest.raises(SwitchFailed, match=r"engines \[2, 3\] are lost: runner-3 was killed"):
        node.switch(tp(2, 3))
    node.until(lambda: node.finished.keys() >= set(doomed), "their end")
    assert {str(node.finished[request]) for request in doomed} == {"error"}
    assert [tokens[:32] for tokens in node.wait(serving)] == expected
    assert_serve(node, [0], expected)
    assert node.dead == {1, 2, 3}
    assert node.audit() == []


def test_what_no_engine_can_run_is_refused(node: RealNode) -> None:
    with pytest.raises(SwitchFailed, match=r"unit \[0, 1\] is not available: engines \[1\]"):
        node.switch(tp(0, 1))
