"""The own steps of a group's members go on while the group is formed anew, also while it compiles.

Its models are compiled, so that a warm-up is noticeable work. The tests use one node up. With
``SHOAL_TESTS=all`` a leader survives, too.
"""

from collections.abc import Iterator

import pytest

from shoal.policies.values.layouts import alone
from shoal.runtime.engine.link import instructions
from shoal.runtime.protocol import messages as m
from tests.depth import among
from tests.random_checkpoint import CheckpointSpec, write_checkpoint
from tests.runtime.engine import probes
from tests.runtime.engine.prompts import PROMPTS
from tests.runtime.engine.real_node import RealNode
from tests.units import tp

PAIR = tp(0, 1)
SHORT = PROMPTS[:4]
LENGTH = 500
"""Output tokens of requests that a survivor has while the group is formed: more than it computes
meanwhile."""
PARTS = {instructions.Form, instructions.Start}
SURVIVORS = among(
    [pytest.param("scheduler-0", 1, id="follower")], pytest.param("runner-1", 0, id="leader")
)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealNode]:
    model = tmp_path_factory.mktemp("models") / "one-layer"  # its compilation takes half as long
    write_checkpoint(model, CheckpointSpec(layers=1))
    cache = {"VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("compiled"))}
    with RealNode(model, 2, restart_limit=9, enforce_eager=False, environment=cache) as node:
        yield node


@pytest.fixture(scope="module")
def expected(node: RealNode) -> list[list[int]]:
    with node.bound(PAIR):
        return node.generate(PAIR, SHORT, 32)


def form_again(node: RealNode, part: str, survivor: int) -> None:
    """Kill a member, and let the other one get requests when the group begins to be formed."""
    serving: list[str] = []

    def submit(_engine: int, sent: m.Message) -> None:
        if isinstance(sent, m.FormGroup) and not serving:
            serving.extend(node.submit(alone(survivor), SHORT * 12, max_tokens=LENGTH))

    node.kill(part)
    node.until(lambda: node.controller.books.engines.gone, "the death to be known")
    nothing, node.transport.before_send = node.transport.before_send, submit
    node.bring_back(PAIR)
    node.transport.before_send = nothing
    node.wait_for_tokens(serving[: 2 * len(SHORT)], 32)
    node.abort(serving)
    core = node.controller.books.requests.core(alone(survivor))
    node.until(lambda: not core.requests, "the end of all requests")
    for prompt in range(len(SHORT)):
        copies = (node.tokens[request] for request in serving[prompt :: len(SHORT)])
        longest, *others = sorted(copies, key=len, reverse=True)
        assert len(others[0]) >= 32
        assert all(other == longest[: len(other)] for other in others)


@pytest.mark.parametrize(("part", "survivor"), SURVIVORS)
def test_a_survivor_goes_on_with_its_steps(
    node: RealNode, expected: list[list[int]], part: str, survivor: int
) -> None:
    form_again(node, part, survivor)
    beside = node.probe(survivor, probes.take_steps_beside)
    assert beside.keys() == PARTS
    assert min(beside.values()) >= 2, beside
    with node.bound(PAIR):
        assert node.generate(PAIR, SHORT, 32) == expected
    assert node.audit() == []


def test_without_interludes_no_step_runs(node: RealNode, expected: list[list[int]]) -> None:
    node.probe(0, probes.hold_no_interludes, True)
    form_again(node, "runner-1", 0)
    assert not node.probe(0, probes.take_steps_beside)
    node.probe(0, probes.hold_no_interludes, False)
    with node.bound(PAIR):
        assert node.generate(PAIR, SHORT, 32) == expected
