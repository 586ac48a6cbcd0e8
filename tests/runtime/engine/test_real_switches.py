"""What a switch keeps on real engines: paused KV, leases, equal sampling; and what would not be."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.policies.values.layouts import alone
from shoal.runtime.controller.books import capacity
from shoal.runtime.protocol import messages as m
from tests.runtime.engine import probes
from tests.runtime.engine.prompts import PROMPTS, random_prompts
from tests.runtime.engine.real_node import RealNode
from tests.units import tp

GROUP = tp(0, 1)
FEW_BLOCKS = {"kv_cache_memory_bytes": 4 << 20}
"""64 blocks of 32 tokens (DP), the null block included: two long requests fill an engine."""


@pytest.fixture(scope="module")
def node(llama: Path) -> Iterator[RealNode]:
    with RealNode(llama, 2, **FEW_BLOCKS) as node:
        yield node


@pytest.fixture
def small_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the controller ask for two blocks when a group forms."""
    monkeypatch.setattr(capacity, "LEASE_BLOCKS", 2)


_seeds = itertools.count(100)


def fresh(*lengths: int) -> list[list[int]]:
    """Return prompts that no other test has put into a prefix cache."""
    return random_prompts(lengths, next(_seeds))


def tokens_alone(node: RealNode, prompts: list[list[int]], max_tokens: int = 32) -> list[list[int]]:
    """Return what engine 1 gives alone: stock vLLM's tokens, as ``test_real_tokens`` shows."""
    return node.generate(alone(1), prompts, max_tokens)


# --- paused requests ---


@pytest.mark.usefixtures("small_leases")
def test_a_paused_requests_kv_stays_and_it_resumes_without_recomputing(node: RealNode) -> None:
    (prompt,) = fresh(210)
    group_prompts = fresh(300, 130, 64)
    expected = tokens_alone(node, [prompt], max_tokens=100)
    (paused,) = node.submit(alone(0), [prompt], max_tokens=100)
    node.wait_for_tokens([paused], 20)

    view = node.switch(GROUP)
    assert view.paused == 1
    blocks = node.probe(0, probes.blocks, paused)
    assert len(blocks) >= 210 // 32
    kv = node.probe(0, probes.kv_digest, blocks)
    whole = node.probe(0, probes.kv_digest, list(range(64)))
    node.generate(GROUP, group_prompts)
    assert node.probe(0, probes.kv_digest, blocks) == kv
    assert node.probe(0, probes.kv_digest, list(range(64))) != whole, "the group wrote nothing"
    assert paused not in node.finished

    view = node.switch()
    assert view.resumed == 1
    assert node.wait([paused]) == expected
    computed = node.probe(0, probes.scheduled)[paused]
    assert computed == 210 + 100 - 1, "every token but the last is computed once"
    assert node.audit() == []


def test_requests_paused_in_a_group_go_on_at_its_next_bind(node: RealNode) -> None:
    prompts = fresh(100, 40)
    expected = tokens_alone(node, prompts, max_tokens=120)
    node.switch(GROUP)
    paused = node.submit(GROUP, prompts, max_tokens=120)
    node.wait_for_tokens(paused, 10)
    assert node.switch().paused == 2
    meanwhile = fresh(50, 20)
    assert node.generate(alone(0), meanwhile) == tokens_alone(node, meanwhile)
    assert not node.finished.keys() & set(paused)
    assert node.switch(GROUP).resumed >= 2
    assert node.wait(paused) == expected
    for computed in node.probe_all(probes.scheduled):
        assert [computed[request] for request in paused] == [100 + 119, 40 + 119]
    node.switch()
    assert node.audit() == []


def test_a_sequential_switch_waits_for_the_requests(node: RealNode) -> None:
    requests = node.submit(alone(0), fresh(30, 60), max_tokens=300)
    node.wait_for_tokens(requests, 1)
    view = node.switch(GROUP, treatment=m.Treatment.SEQUENTIAL)
    assert (view.drained, view.paused) == (2, 0)
    assert node.finished.keys() >= set(requests)
    node.switch(treatment=m.Treatment.SEQUENTIAL)
    assert node.audit() == []


def test_an_aborted_paused_request_gives_its_blocks_back(node: RealNode) -> None:
    (paused,) = node.submit(alone(0), fresh(200), max_tokens=500)
    node.wait_for_tokens([paused], 3)
    with node.bound(GROUP):
        node.abort([paused])
        node.generate(GROUP, fresh(20))
    assert node.audit() == []


def test_moved_requests_go_on_with_the_same_tokens(node: RealNode) -> None:
    prompts = fresh(100, 40)
    expected = tokens_alone(node, prompts, max_tokens=120)
    moved = node.submit(None, prompts, max_tokens=120)
    node.wait_for_tokens(moved, 10)
    assert node.switch(GROUP, treatment=m.Treatment.SOFT).moved == 2
    node.wait_for_tokens(moved, 40)
    assert node.switch(treatment=m.Treatment.SOFT).moved == 2
    assert node.wait(moved) == expected
    assert node.audit() == []


# --- leases ---


@pytest.mark.usefixtures("small_leases")
def test_a_lease_grows_on_demand_without_wrong_tokens(node: RealNode) -> None:
    expected = tokens_alone(node, PROMPTS)
    node.switch(GROUP)
    requests = node.submit(GROUP, PROMPTS)
    node.until(lambda: node.controller.books.leases.opened[GROUP] > 2, "a larger lease")
    assert node.wait(requests) == expected
    node.switch()
    assert node.controller.books.leases.opened[GROUP] == 0
    assert node.audit() == []


@pytest.mark.usefixtures("small_leases")
def test_a_request_larger_than_the_lease_starts(node: RealNode) -> None:
    prompts = fresh(900)
    expected = tokens_alone(node, prompts)
    with node.bound(GROUP):  # with two blocks of 64 tokens at first
        assert node.generate(GROUP, prompts) == expected
    assert node.audit() == []


def test_members_short_of_blocks_preempt_their_paused_requests(node: RealNode) -> None:
    long, wide = fresh(540, 540, 540), fresh(900)
    expected = tokens_alone(node, long, max_tokens=120)
    expected_wide = tokens_alone(node, wide)
    paused = node.submit(alone(0), long, max_tokens=120)
    node.wait_for_tokens(paused, 1)
    with node.bound(GROUP):
        # At least 51 of 63 blocks are in use, the request needs 15.
        assert node.controller.books.leases.opened[GROUP] < 15
        assert node.generate(GROUP, wide) == expected_wide
        assert not node.finished.keys() & set(paused)
    assert node.wait(paused) == expected
    computed = node.probe(0, probes.scheduled)
    assert sum(computed[request] for request in paused) > 3 * (540 + 119), "nobody was preempted"
    assert node.audit() == []


# --- sampling ---


def sample_in_group(node: RealNode) -> list[dict[str, list[int]]]:
    """Sample in a group after unequal work alone; return what each member picked."""
    node.generate(alone(0), PROMPTS[:3], temperature=1.0)
    node.generate(alone(1), PROMPTS[:1], max_tokens=7, temperature=1.0)
    with node.bound(GROUP):
        requests = node.submit(GROUP, PROMPTS[:4], temperature=1.0)
        tokens = node.wait(requests)
        # A member's own record may still lack a token: the leader has answered, not the follower.
        members = [sampled_by(node, member, requests) for member in GROUP.engines]
    assert [members[0][request] for request in requests] == tokens
    return members


def sampled_by(node: RealNode, engine: int, requests: list[str]) -> dict[str, list[int]]:
    sampled = node.probe(engine, probes.sampled)
    return {request: sampled[request] for request in requests}


def test_members_sample_the_same_after_unequal_work(node: RealNode) -> None:
    first, second = sample_in_group(node)
    assert first == second
    tokens = list(first.values())
    assert len({tuple(sampled) for sampled in tokens}) == len(tokens)


def test_without_the_reseed_they_would_not(node: RealNode) -> None:
    node.probe_all(probes.skip_reseed, True)
    first, second = sample_in_group(node)
    node.probe_all(probes.skip_reseed, False)
    assert first != second


def test_alone_they_sample_differently_again(node: RealNode) -> None:
    with node.bound(GROUP):
        node.generate(GROUP, PROMPTS[:1], temperature=1.0)
    # One request each, so that equal generators would give equal tokens.
    first, second = (node.generate(alone(e), PROMPTS[:1], temperature=1.0) for e in GROUP.engines)
    assert first != second


def test_binds_sample_differently(node: RealNode) -> None:
    runs = []
    for _ in range(2):
        with node.bound(GROUP):
            runs.append(node.generate(GROUP, PROMPTS[:1], temperature=1.0))
    assert runs[0] != runs[1]


def test_a_requests_own_seed_holds_in_every_layout(node: RealNode) -> None:
    options = {"temperature": 1.0, "seed": 5}
    expected = node.generate(alone(0), PROMPTS[:2], **options)
    with node.bound(GROUP):
        assert node.generate(GROUP, PROMPTS[:2], **options) == expected


# --- negative controls: the comparisons above would notice ---
# They damage KV on engine 1, and so come last and use fresh prompts.


def damaged_run(node: RealNode, damage: Callable[..., None], *arguments: object) -> bool:
    """Damage a running group's follower; return whether the tokens show it."""
    (prompt,) = fresh(300)
    # Engine 0's: the damage may reach what engine 1 has cached.
    expected = node.generate(alone(0), [prompt], max_tokens=80)
    with node.bound(GROUP):
        (request,) = node.submit(GROUP, [prompt], max_tokens=80)
        node.wait_for_tokens([request], 5)
        node.probe(1, damage, *(request if argument is ... else argument for argument in arguments))
        before = len(node.tokens[request])
        assert before < 80, "it came too late"
        got = node.wait([request])
    return got != expected


def test_an_undamaged_follower_gives_stocks_tokens(node: RealNode) -> None:
    assert not damaged_run(node, probes.scheduled)


def test_noise_in_a_followers_kv_shows(node: RealNode) -> None:
    assert damaged_run(node, probes.add_kv_noise, ...)


def test_a_wrong_block_map_on_a_follower_shows(node: RealNode) -> None:
    assert damaged_run(node, probes.collapse_block_map, ...)
