"""Requests whose KV waits in the host's memory while real engines regroup, token by token.

With ``SHOAL_TESTS=all`` another engine takes requests alone, too.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.config import StructuredOutputsConfig

from shoal.policies.values.layouts import Unit, alone, tier_of
from shoal.runtime.protocol import messages as m
from tests.depth import among
from tests.runtime.engine.prompts import random_prompts
from tests.runtime.engine.real_node import RealNode
from tests.runtime.engine.test_real_carry import (
    LENGTHS,
    SAMPLING,
    TOKENS,
    assert_same,
    finish,
    submit_all,
)
from tests.units import pp, tp

pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")

TIER, SOURCE = tier_of(0), alone(0)
_seeds = itertools.count(700)


@pytest.fixture(scope="module")
def node(llama: Path) -> Iterator[RealNode]:
    options = {"structured_outputs_config": StructuredOutputsConfig(backend="xgrammar")}
    with RealNode(llama, 2, max_pp=2, tier_bytes=32 << 20, **options) as node:
        yield node


def park(node: RealNode, requests: list[str]) -> None:
    """Park requests once their prompts are computed, whichever are there by then."""

    def all_are_there() -> bool:
        running = [r for r in requests if r in node.controller.books.requests.core(SOURCE).requests]
        if running:
            node.move(SOURCE, TIER, len(running))
        return not running

    node.wait_for_tokens(requests, 2)
    node.until(all_are_there, "parking")


def outcomes(node: RealNode) -> dict[str, float]:
    counter = node.controller.books.statistics.carries.tier_requests
    return {name: counter.total(name) for name in ("parked", "no_room", "hit", "miss")}


@pytest.mark.parametrize("unit", among([tp(0, 1), pp(0, 1), alone(0)], alone(1)), ids=str)
def test_more_requests_than_seats_wait_and_go_on_with_the_same_tokens(
    node: RealNode, unit: Unit
) -> None:
    """Two waves with every kind of sampling are parked: more than an engine's runner has rows."""
    before = outcomes(node)
    prompts = random_prompts(LENGTHS, next(_seeds))
    plain = submit_all(node, alone(1), prompts)
    finish(node, plain)
    waves = list[list[str]]()
    for _ in range(2):
        waves.append(submit_all(node, SOURCE, prompts))
        park(node, waves[-1])
    assert node.audit() == []
    told = {request: len(node.tokens[request]) for request in itertools.chain(*waves)}
    assert all(2 <= count < TOKENS for count in told.values())
    if unit.is_group:
        node.switch(unit, treatment=m.Treatment.CARRY)
    while held := len(node.controller.books.requests.core(TIER).requests):
        node.move(TIER, unit, min(held, 5))
    for wave in waves:
        finish(node, wave)
        assert_same(node, plain, wave)
    node.switch()
    assert node.audit() == []
    after = outcomes(node)
    assert after["parked"] - before["parked"] == 2 * len(SAMPLING)
    assert after["hit"] - before["hit"] == 2 * len(SAMPLING)
    assert after["no_room"] == after["miss"] == 0
    written = node.controller.books.statistics.carries.tier_bytes.total("written")
    assert written > 0


def test_a_wrong_block_of_the_tier_changes_the_tokens(node: RealNode) -> None:
    """The test above can fail: what is in the tier's blocks decides."""
    (prompt,) = random_prompts((300,), next(_seeds))
    (expected,) = node.generate(alone(1), [prompt], TOKENS)
    (request,) = node.submit(SOURCE, [prompt], TOKENS)
    park(node, [request])
    damaged: list[m.Message] = []

    def damage(_engine: int, message: m.Message) -> None:
        if isinstance(message, m.Import) and message.source.tier and message.requests:
            blocks = message.requests[0].blocks[0][0]
            blocks[2] = blocks[3]
            damaged.append(message)

    node.transport.before_send = damage
    node.switch(tp(0, 1), treatment=m.Treatment.CARRY)
    node.move(TIER, tp(0, 1), 1)
    node.transport.before_send = lambda _engine, _message: None
    assert len(damaged) == 1
    assert node.wait([request]) != [expected]
    node.switch()


def test_what_waits_can_be_aborted(node: RealNode) -> None:
    requests = node.submit(SOURCE, random_prompts((40, 130), next(_seeds)), TOKENS)
    park(node, requests)
    node.abort(requests[:1])
    node.move(TIER, alone(1), 2)
    node.wait(requests[1:])
    assert node.audit() == []
    assert node.controller.books.requests.core(TIER).requests == {}
