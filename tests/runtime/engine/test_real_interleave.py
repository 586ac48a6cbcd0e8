"""Interleave on real engines: steps of two layouts in turn, on one device and one KV buffer."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shoal.policies.values.layouts import Unit, alone
from shoal.policies.values.partition import Partition, singles
from shoal.runtime.controller.books import capacity
from shoal.runtime.protocol import messages as m
from tests.runtime.engine import probes
from tests.runtime.engine.prompts import PROMPTS, Stock, random_prompts
from tests.runtime.engine.real_node import RealNode
from tests.units import tp, tp_units

ENGINES = 4
PAIRS = tp_units(ENGINES, 2)
ALL = tp_units(ENGINES, 4)
INTERLEAVE = m.Treatment.INTERLEAVE
LONG, SHORT = 250, 60
"""Output tokens of requests that go on over a switch, and of those in between."""


@pytest.fixture(scope="module")
def node(llama: Path) -> Iterator[RealNode]:
    with RealNode(llama, ENGINES) as node:
        yield node


@pytest.fixture(scope="module")
def expected(stock: Stock) -> list[list[int]]:
    return stock(PROMPTS, LONG)


def cut(tokens: list[list[int]], length: int) -> list[list[int]]:
    return [output[:length] for output in tokens]


def start_own(node: RealNode, prompts: list[list[int]] = PROMPTS) -> dict[Unit, list[str]]:
    """Have some requests decode on every engine."""
    own = {alone(e): node.submit(alone(e), prompts, max_tokens=LONG) for e in range(ENGINES)}
    for requests in own.values():
        node.wait_for_tokens(requests, 3)
    return own


def received(node: RealNode, requests: list[str]) -> int:
    return sum(len(node.tokens[request]) for request in requests)


def test_tokens_are_stocks_on_both_sides(node: RealNode, expected: list[list[int]]) -> None:
    own = start_own(node)
    view = node.switch(*PAIRS, treatment=INTERLEAVE)
    assert (view.paused, view.moved, view.drained) == (0, 0, 0)
    before = received(node, own[alone(0)])
    groups = {group: node.submit(group, PROMPTS, max_tokens=SHORT) for group in PAIRS}
    for requests in groups.values():
        assert node.wait(requests) == cut(expected, SHORT)
    assert received(node, own[alone(0)]) > before
    assert not node.finished.keys() & set(own[alone(0)]), "they were not at it all the time"
    for requests in own.values():
        assert node.wait(requests) == expected
    node.switch()
    assert node.audit() == []


def test_own_requests_go_on_over_any_switch_that_follows(
    node: RealNode, expected: list[list[int]]
) -> None:
    own = start_own(node, PROMPTS[:2])
    for units, treatment in (
        (PAIRS, INTERLEAVE),
        (ALL, INTERLEAVE),
        (PAIRS[:1], m.Treatment.HARD),
        ((), INTERLEAVE),
        (PAIRS[1:], INTERLEAVE),
        ((), m.Treatment.HARD),
        (ALL, INTERLEAVE),
    ):
        node.switch(*units, treatment=treatment)
        for group in units:
            assert node.generate(group, PROMPTS[:2], max_tokens=8) == cut(expected[:2], 8)
    for requests in own.values():
        assert node.wait(requests) == expected[:2]
    node.switch()
    assert node.audit() == []


def test_what_a_late_bind_waited_for_goes_on_beside_the_group(
    node: RealNode, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = start_own(node, PROMPTS[:2])
    switch_late(node, ALL, monkeypatch)
    assert not node.finished.keys() & {r for requests in own.values() for r in requests}
    assert node.generate(ALL[0], PROMPTS[:2], max_tokens=8) == cut(expected[:2], 8)
    for requests in own.values():
        assert node.wait(requests) == expected[:2]
    node.switch()
    assert node.audit() == []


def test_what_a_late_release_waited_for_goes_on_when_its_unit_is_back(
    node: RealNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = {"max_tokens": LONG, "temperature": 1.0, "seed": 5}
    node.switch(*ALL)
    undisturbed = node.generate(ALL[0], PROMPTS[:2], **sampling)
    pinned = node.submit(ALL[0], PROMPTS[:2], **sampling)
    node.wait_for_tokens(pinned, 3)
    switch_late(node, singles(ENGINES), monkeypatch)
    node.generate(alone(1), PROMPTS[:1], max_tokens=8)  # meanwhile the step in flight ends
    had = received(node, pinned)
    node.generate(alone(1), PROMPTS[:1], max_tokens=8)
    assert received(node, pinned) == had < len(pinned) * LONG
    node.switch(*ALL)
    assert node.wait(pinned) == undisturbed
    node.switch()
    assert node.audit() == []


def switch_late(node: RealNode, target: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch as for a policy, which waits for next to no time."""
    switching = node.controller._operations.switches
    hasty = msgspec.structs.replace(node.config, switch_wait_seconds=0.1)
    monkeypatch.setattr(switching, "_config", hasty)
    switching.start_for_policy(target, m.Treatment.SEQUENTIAL, "load", waits=True)
    node.until(lambda: switching.running is None, "switch")
    assert (switching.past[-1].outcome, switching.past[-1].late) == ("done", True)
    assert node.partition == target


def test_own_requests_can_be_aborted(node: RealNode, expected: list[list[int]]) -> None:
    own = start_own(node)
    node.switch(*PAIRS, treatment=INTERLEAVE)
    requests = node.submit(PAIRS[0], PROMPTS, max_tokens=SHORT)
    for aborted in own.values():
        node.abort(aborted[::2])
    assert node.wait(requests) == cut(expected, SHORT)
    for kept in own.values():
        assert node.wait(kept[1::2]) == expected[1::2]
    node.switch()
    assert node.audit() == []


def test_the_groups_lease_grows_beside_them(
    node: RealNode, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "LEASE_BLOCKS", 2)
    own = start_own(node, PROMPTS[:3])
    node.switch(*ALL, treatment=INTERLEAVE)
    assert node.controller.books.leases.opened[ALL[0]] == 2
    assert node.generate(ALL[0], PROMPTS, max_tokens=SHORT) == cut(expected, SHORT)
    assert node.controller.books.leases.opened[ALL[0]] > 2
    for requests in own.values():
        assert node.wait(requests) == expected[:3]
    node.switch()
    assert node.audit() == []


# --- KV and sampling ---

_seeds = itertools.count(500)


def test_the_group_leaves_their_kv_alone(node: RealNode) -> None:
    (prompt,) = random_prompts((200,), next(_seeds))
    (own,) = node.submit(alone(0), [prompt], max_tokens=LONG)
    node.wait_for_tokens([own], 5)
    node.switch(*PAIRS, treatment=INTERLEAVE)
    # Those of the prompt: nothing is written to them any more.
    blocks = node.probe(0, probes.blocks, own)[: 200 // 32]
    kv = node.probe(0, probes.kv_digest, blocks)
    node.generate(tp(0, 1), random_prompts((300, 130, 64), next(_seeds)))
    assert own not in node.finished
    assert node.probe(0, probes.kv_digest, blocks) == kv
    node.wait([own])
    node.switch()
    computed = node.probe(0, probes.scheduled)[own]
    assert computed == 200 + LONG - 1, "every token but the last is computed once"


def sample_beside_own_requests(node: RealNode) -> tuple[list[list[int]], ...]:
    """Sample in a group whose members decode unequally much; return what each member picked."""
    unequal = node.submit(alone(0), PROMPTS[:3], max_tokens=LONG, temperature=1.0)
    unequal += node.submit(alone(1), PROMPTS[:1], max_tokens=LONG, temperature=1.0)
    node.wait_for_tokens(unequal, 3)
    node.switch(tp(0, 1), treatment=INTERLEAVE)
    before = received(node, unequal)
    requests = node.submit(tp(0, 1), PROMPTS[:4], max_tokens=SHORT, temperature=1.0)
    tokens = node.wait(requests)
    assert received(node, unequal) > before + 8
    members = [node.probe(engine, probes.sampled) for engine in (0, 1)]
    node.wait(unequal)
    node.switch()
    first, second = ([sampled[request] for request in requests] for sampled in members)
    assert first == tokens
    return first, second


def test_members_sample_the_same_beside_unequal_requests(node: RealNode) -> None:
    first, second = sample_beside_own_requests(node)
    assert first == second
    assert len({tuple(sampled) for sampled in first}) == len(first)


def test_with_one_generator_for_both_layouts_they_would_not(node: RealNode) -> None:
    node.probe_all(probes.share_generators, True)
    first, second = sample_beside_own_requests(node)
    node.probe_all(probes.share_generators, False)
    assert first != second
