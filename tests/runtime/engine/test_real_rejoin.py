"""Engines that are killed come back, alone and then in their group, and give the same tokens.

The group runs in TP, by sequence and in stages, before it loses a member and afterwards. The tests
use one node up, so they run in the order they are written. With ``SHOAL_TESTS=all`` an engine
dies at more moments.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from shoal.policies.values.layouts import Unit, alone
from shoal.runtime.controller.books.engine_book import EngineState
from shoal.runtime.engine.groups.rendezvous import REJOIN_SECONDS
from shoal.runtime.protocol import messages as m
from tests.depth import among
from tests.runtime.engine import probes
from tests.runtime.engine.prompts import PROMPTS, Stock
from tests.runtime.engine.real_node import RealNode, SwitchFailed
from tests.runtime.engine.scripted_shift import Script
from tests.units import pp, tp

PAIR, STAGES = GROUPS = tp(0, 1), pp(0, 1)
SHORT = PROMPTS[:4]
TOKENS = 12
MOMENTS = among(
    [pytest.param(m.Import, 0, id="both")],
    pytest.param(m.Export, 0, id="source"),
    pytest.param(m.Import, 1, id="destination"),
)
DOOMED = among([pytest.param(PAIR, id="by sequence")], pytest.param(STAGES, id="in stages"))
VLLM_SOCKET = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@pytest.fixture(scope="module")
def node(llama: Path) -> Iterator[RealNode]:
    with RealNode(llama, 2, restart_limit=9, max_sp=2, max_pp=2) as node:
        yield node


@pytest.fixture(scope="module")
def expected(stock: Stock) -> list[list[int]]:
    return stock(SHORT, TOKENS)


@contextmanager
def scripted(node: RealNode, script: Script) -> Iterator[None]:
    """Run the group's steps as the script says for a while."""
    node.script(script)
    try:
        yield
    finally:
        node.script(Script.TP)


def assert_serve(node: RealNode, expected: list[list[int]]) -> None:
    """Let both engines serve alone, then together in TP, in SP and in stages, then alone again."""
    for engine in PAIR.engines:
        assert node.generate(alone(engine), SHORT, TOKENS) == expected
    for script in (Script.TP, Script.SP):
        node.probe_all(probes.take_modes)
        with scripted(node, script), node.bound(PAIR):
            assert node.generate(PAIR, SHORT, TOKENS) == expected
        first, second = node.probe_all(probes.take_modes)
        assert first == second, "the members ran different modes"
        assert [mode for mode, steps in first.items() if steps] == [script]
    with node.bound(STAGES):
        assert node.generate(STAGES, SHORT, TOKENS) == expected
    for engine in PAIR.engines:
        assert node.generate(alone(engine), SHORT, TOKENS) == expected
    assert node.audit() == []


@pytest.mark.parametrize(
    ("part", "survivor"), [("runner-1", 0), ("scheduler-0", 1)], ids=["follower", "leader"]
)
def test_an_engine_comes_back_while_the_other_serves(
    node: RealNode, expected: list[list[int]], part: str, survivor: int
) -> None:
    # The group was at work before, in both modes.
    with scripted(node, Script.ALTERNATE), node.bound(PAIR):
        assert node.generate(PAIR, SHORT, TOKENS) == expected
    serving = node.submit(alone(survivor), SHORT, max_tokens=200)
    node.wait_for_tokens(serving, 1)
    node.kill(part)
    node.until(lambda: node.controller.books.engines.gone, "the death to be known")
    with pytest.raises(SwitchFailed, match=rf"engines \[{1 - survivor}\] are restarting"):
        node.switch(PAIR)

    node.bring_back(*GROUPS)
    assert [tokens[:TOKENS] for tokens in node.wait(serving)] == expected
    assert_serve(node, expected)


@pytest.mark.parametrize(("message", "receiver"), MOMENTS)
def test_an_engine_dies_while_requests_are_carried(
    node: RealNode, expected: list[list[int]], message: type[m.Message], receiver: int
) -> None:
    """Half of the KV is its own, and half of the requests come to it."""
    node.switch(PAIR)
    requests = node.submit(None, SHORT, max_tokens=200)
    node.wait_for_tokens(requests, 3)

    def kill(engine: int, sent: m.Message) -> None:
        if engine == receiver and isinstance(sent, message):
            node.transport.before_send = nothing
            node.kill("runner-1")

    nothing, node.transport.before_send = node.transport.before_send, kill
    with suppress(SwitchFailed):  # once all members are alone it has succeeded
        node.switch(treatment=m.Treatment.CARRY)
    assert node.transport.before_send is nothing
    dead = node.controller.books.engines.in_state
    node.until(lambda: dead(EngineState.DEAD), "a death to be known")
    node.bring_back(*GROUPS)
    assert [tokens[:TOKENS] for tokens in node.wait(requests)] == expected
    assert_serve(node, expected)


@pytest.mark.parametrize("group", DOOMED)
def test_a_group_that_dies_as_one_comes_back(
    node: RealNode, expected: list[list[int]], group: Unit
) -> None:
    """It dies while its steps run by sequence, or in stages."""
    node.switch(group)
    with scripted(node, Script.SP):
        doomed = node.submit(group, SHORT, max_tokens=800)
        node.wait_for_tokens(doomed, 1)
        node.kill("runner-1")
        dead = node.controller.books.engines.in_state
        both = set(PAIR.engines)
        node.until(lambda: dead(EngineState.DEAD) == node.dead == both, "both to be given up")
    node.bring_back(*GROUPS)
    assert_serve(node, expected)


def test_a_request_that_kills_its_engine_again_is_given_up(
    node: RealNode, expected: list[list[int]]
) -> None:
    # The survivor waits in vain for the one that is killed as they form their groups.
    node.probe(0, probes.wait_for_members, 3.0)
    poison = node.submit(alone(1), SHORT[:1], max_tokens=800)
    serving = node.submit(alone(0), SHORT, max_tokens=200)
    node.wait_for_tokens(poison + serving, 1)
    node.kill("runner-1")

    def kill_again(engine: int, message: m.Message) -> None:
        if engine == 1 and isinstance(message, m.AddRequest):
            node.transport.before_send = nothing
            node.kill("runner-1")

    nothing, node.transport.before_send = node.transport.before_send, kill_again
    node.restart(1)
    node.until(lambda: node.finished.keys() >= set(poison), "the end of the request")
    assert str(node.finished[poison[0]]) == "error"
    assert node.controller.books.statistics.requests.total(m.Outcome.POISONED) == 1
    node.probe(0, probes.wait_for_members, REJOIN_SECONDS)
    node.bring_back(*GROUPS)
    assert [tokens[:TOKENS] for tokens in node.wait(serving)] == expected
    assert_serve(node, expected)


def test_members_sample_alike_after_that(node: RealNode) -> None:
    with scripted(node, Script.ALTERNATE), node.bound(PAIR):
        requests = node.submit(PAIR, SHORT, temperature=1.0)
        node.wait(requests)
    first, second = (node.probe(engine, probes.sampled) for engine in PAIR.engines)
    assert all(first[request] == second[request] for request in requests)


def test_what_no_longer_serves_leaves_nothing(node: RealNode) -> None:
    names = sorted(path.name for path in Path(node.config.runtime_dir).iterdir())
    made = [name.partition(".")[0] for name in names if name.startswith(("group-", "members-"))]
    layouts = ("pp2", "tp2")
    queues = [f"group-{layout}-0-1-{engine}" for layout in layouts for engine in (0, 1)]
    assert made == [*queues, *(f"members-{layout}-0-1" for layout in layouts)], names
    assert [name for name in names if VLLM_SOCKET.fullmatch(name)] == []
    assert list(Path("/dev/shm").glob(f"*{Path(node.config.runtime_dir).name}*")) == []
