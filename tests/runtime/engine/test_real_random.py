"""Random binds, releases, drains, shifts and requests on four real engines; every token is checked.

The fake engine goes through far more of them in ``tests/runtime/controller``; this shows that what
holds there holds with real block pools, runners and collectives. ``SHOAL_RANDOM_OPERATIONS`` in the
environment says how many there are. ``test_real_v2`` does the same with the V2 model runner.
"""

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from shoal.policies.values.layouts import alone
from shoal.runtime.protocol import messages as m
from tests.runtime.engine import probes, random_life
from tests.runtime.engine.prompts import random_prompts
from tests.runtime.engine.random_life import ALL, DIRECTIONS, ENGINES, NODE, OPERATIONS, TOKENS
from tests.runtime.engine.real_node import RealNode, stock_tokens
from tests.runtime.engine.scripted_shift import Script
from tests.units import tp

QUARTET = tp(0, 1, 2, 3)
LONG = 240
"""Output tokens of requests that are carried wrongly: so many that none ends before the switch."""
_seeds = itertools.count(2000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_life.make_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def node(model: Path) -> Iterator[RealNode]:
    with RealNode(model, ENGINES, **NODE) as node:
        node.script(Script.RANDOM)
        yield node


def test_no_request_loses_or_repeats_a_token(node: RealNode, model: Path) -> None:
    expected = stock_tokens(model, ALL, TOKENS)
    lived = random_life.live(
        node, expected, OPERATIONS, enough=DIRECTIONS.issubset, everything=True
    )
    assert lived.wrong == []
    assert lived.problems == []
    assert lived.lent == 0
    assert sum(lived.counts.values()) >= OPERATIONS
    assert min(lived.counts["requests"], lived.counts["switches"]) > OPERATIONS // 4
    assert lived.directions.keys() == DIRECTIONS
    assert lived.parked > 0
    for ran in lived.modes:
        assert min(ran.values()) > OPERATIONS // 10
    # Random prompts are short, so most switches copy nothing ahead, but some do.
    assert lived.precopies > 0


def test_the_books_notice_a_lost_block(node: RealNode) -> None:
    """The audit above can fail."""
    with node.bound(tp(0, 1)):
        node.controller.books.leases.blocks_of(1)
        lent = node.controller.books.leases._lent[1][tp(0, 1)]
        lost = lent.pop()
        assert any("engine 1" in problem for problem in node.audit())
        lent.add(lost)
        assert node.audit() == []


@pytest.mark.parametrize(
    "damage", [probes.swap_carried_heads, probes.read_a_block_late], ids=lambda of: of.__name__
)
def test_tokens_notice_kv_of_other_heads_and_kv_that_comes_late(
    node: RealNode, damage: probes.Damage
) -> None:
    """The comparison of tokens above can fail, and does not without the damage."""
    for damaged in (True, False):
        node.switch()
        node.probe_all(damage, damaged)
        prompts = random_prompts((40, 70, 150, 300), next(_seeds))  # no cache has their prefixes
        requests = node.submit(alone(0), prompts, LONG)
        node.wait_for_tokens(requests, 3)
        view = node.switch(QUARTET, treatment=m.Treatment.CARRY)
        assert (view.carried, view.recomputed) == (len(prompts), {})
        tokens = max(len(node.tokens[request]) for request in requests) + 8
        node.wait_for_tokens(requests, tokens)
        node.abort(requests)
        found = [node.tokens[request][:tokens] for request in requests]
        node.probe_all(damage, False)
        node.switch()
        expected = node.generate(alone(1), prompts, tokens)
        assert [one[:3] for one in found] == [other[:3] for other in expected]
        wrong = sum(one != other for one, other in zip(found, expected, strict=True))
        # KV that comes a step late may by chance leave the next tokens of a request as they are.
        assert bool(wrong) is damaged


def test_tokens_notice_a_wrong_hash(node: RealNode) -> None:
    """What was carried is found in the prefix cache by its hash, and nothing else is."""
    for damaged in (True, False):
        node.switch()
        (prompt,) = random_prompts((300,), next(_seeds))
        other = [prompt[0] + 1, *prompt[1:]]
        ended = node.controller.books.requests.ended
        ended.choose(alone(1), tokens=0)  # what earlier tests asked for
        ((expected,), (of_other,)) = (node.generate(alone(1), [of], 40) for of in (prompt, other))
        (request,) = node.submit(alone(0), [prompt], LONG)
        node.wait_for_tokens([request], 3)
        # The switch would take what both have cached along first, and that is right.
        assert len(ended.choose(alone(1), tokens=1000)) == 2
        assert ended.choose(alone(1), tokens=0) == []
        if damaged:
            node.transport.before_send = partial(name_other, other)
        node.switch(QUARTET, treatment=m.Treatment.CARRY)
        node.transport.before_send = lambda _engine, _message: None
        (found,) = node.generate(QUARTET, [other], 40)
        assert (found != of_other) == damaged
        node.wait_for_tokens([request], 40)
        assert node.tokens[request][:40] == expected, "its own KV was right"
        node.abort([request])
    assert node.audit() == []


def name_other(prompt: list[int], _engine: int, message: m.Message) -> None:
    """Let a carried request's unit believe that it has another prompt."""
    if not isinstance(message, m.Expect):
        return
    for name, frames in message.frames.items():
        request = MsgpackDecoder(EngineCoreRequest).decode(frames)
        request.prompt_token_ids = prompt
        message.frames[name] = [bytes(frame) for frame in MsgpackEncoder().encode(request)]
