"""Every layout and mode generates exactly stock vLLM's tokens: fp32, greedy, varied output.

Prompts go through chunked prefill (the nodes' step budget is 64 tokens) and, the second time and
where they share a beginning, through the prefix cache; before and after switches.

Every model goes through a group of four and through a partition with units of one and two, and is
carried there. What order of modes it is, and how shares are padded, matters to the exchange of
heads and not to the model. So one model of each base of SP goes through all of that and through all
partitions, and the others through one order. With ``SHOAL_TESTS=all`` every model does all of it.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.policies.values.layouts import Layout, Unit, alone
from shoal.policies.values.partition import Partition, singles
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages import Mode
from tests.depth import DEEP
from tests.runtime.engine import probes
from tests.runtime.engine.modes import scripted
from tests.runtime.engine.prompts import MODELS, PROMPTS, SHARED, Stock, make_model, random_prompts
from tests.runtime.engine.real_node import NODE_ARGS, RealNode, stock_tokens
from tests.runtime.engine.scripted_shift import Script
from tests.units import tp, tp_units
from tests.variety import is_varied

ALL = PROMPTS + SHARED
LENGTH = 12
"""Output tokens that are compared. What is damaged on purpose below shows in fewer."""
ENGINES = 4
WIDEST = Layout(tp=ENGINES)
MAX_SP = {
    "llama": 2,
    "llama-2-kv-heads": 4,
    "qwen2": 2,
    "qwen3-1-kv-head": 4,
}
"""Largest SP degree of a model's node: of four engines it is (SP 4) or (SP 2, TP 2)."""
BASES = ("llama", "llama-2-kv-heads")
"""One model for each of the two: with KV heads that are held once and several times, and with
weights that are whole and shared."""
THOROUGH = MODELS if DEEP else BASES
WIDELY_PADDED = MODELS if THOROUGH is MODELS else BASES[:1]
STEP_TOKENS = NODE_ARGS["max_num_batched_tokens"]
SHARE = {"qwen2": 2, "llama-2-kv-heads": 4}
"""Of the models whose engines keep a part of the MLPs each, how many engines share them. With these
numbers of layers, the last one's slot is the first one's, or the other."""
ONE_OF_A_BASE = "the base of SP has had it; SHOAL_TESTS=all has it on every model"
Expected = list[list[int]]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(request.param, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest, model: Path) -> Expected:
    if model.name == "llama":
        stock: Stock = request.getfixturevalue("stock")
        return stock(ALL, 32)
    return stock_tokens(model, ALL)


@pytest.fixture(scope="module")
def node(model: Path) -> Iterator[RealNode]:
    share = SHARE.get(model.name, 1)
    with RealNode(model, ENGINES, max_sp=MAX_SP[model.name], share_weights=share) as node:
        yield node


LAYOUTS: dict[str, Partition] = {
    "dp": singles(ENGINES),
    "tp2x2": tp_units(ENGINES, 2),
    "tp4": tp_units(ENGINES, 4),
    "mixed": (tp(0, 1), alone(2), alone(3)),
}
"""Partitions in the order a node goes through them."""


def test_stock_output_varies(expected: Expected) -> None:
    assert is_varied(expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_stocks(node: RealNode, model: Path, expected: Expected, layout: str) -> None:
    if model.name not in THOROUGH and layout in ("dp", "tp2x2"):
        pytest.skip(f"units of one and of two are in 'mixed', too; {ONE_OF_A_BASE}")
    assert_stock(node, expected, LAYOUTS[layout])


def assert_stock(node: RealNode, expected: Expected, partition: Partition) -> None:
    node.switch(*partition)
    assert node.partition == partition
    tokens = [output[:LENGTH] for output in expected]
    assert node.generate_spread(node.partition, ALL, LENGTH) == tokens
    assert node.generate_spread(node.partition, ALL, LENGTH) == tokens, "from the prefix cache"
    assert node.audit() == []


# --- modes ---

PAIR, QUARTET = tp(0, 1), tp(0, 1, 2, 3)
MIXED = [*PROMPTS[::2], PROMPTS[-1], SHARED[0]]
TOKENS = 12


@pytest.fixture(scope="module")
def expected_of_mixed(expected: Expected) -> Expected:
    """Of all of them together, then of the longest alone."""
    known = dict(zip(map(tuple, ALL), expected, strict=True))
    return [known[tuple(prompt)][:TOKENS] for prompt in (*MIXED, PROMPTS[-1])]


def generate_in(node: RealNode, group: Unit, script: Script) -> Expected:
    """Return what a group generates that was just bound; the longest prompt comes a second time.

    So batches have any size up to that of a step, one among them, and begin in the prefix cache.
    Every member runs each step in the mode that the leader chose by the script.
    """
    node.switch()
    with scripted(node, group, script) as ran, node.bound(group):
        outputs = node.generate(group, MIXED, TOKENS) + node.generate(group, PROMPTS[-1:], TOKENS)
    assert ran[Mode.SP] > 0
    assert (ran[Mode.TP] > 0) == (script is not Script.SP)
    return outputs


@pytest.mark.parametrize(
    ("group", "script"),
    # Each mode follows each other one in a random order. What that may break does not depend on
    # the degree, so the pair need not run all its steps by sequence as well.
    [(PAIR, Script.RANDOM), (QUARTET, Script.SP), (QUARTET, Script.RANDOM)],
    ids=["pair-random", "quartet-sp", "quartet-random"],
)
def test_tokens_are_stocks_however_steps_run(
    node: RealNode, model: Path, expected_of_mixed: Expected, group: Unit, script: Script
) -> None:
    if model.name not in THOROUGH and (group, script) != (QUARTET, Script.RANDOM):
        pytest.skip(ONE_OF_A_BASE)
    assert generate_in(node, group, script) == expected_of_mixed
    assert node.audit() == []


@pytest.mark.parametrize("sizes", [(5, 12), (576,)], ids=["a few", "hundreds of tokens"])
def test_tokens_are_stocks_where_shares_are_padded_as_for_graphs(
    node: RealNode, model: Path, expected_of_mixed: Expected, sizes: tuple[int, ...]
) -> None:
    """CPUs capture none; all but the replay is done, of shares of up to the largest size."""
    if model.name not in THOROUGH:
        pytest.skip(ONE_OF_A_BASE)
    if max(sizes) > STEP_TOKENS and model.name not in WIDELY_PADDED:
        pytest.skip("how far a share is padded does not depend on the base of SP")
    node.probe_all(probes.pretend_captures, *sizes)
    assert generate_in(node, QUARTET, Script.SP) == expected_of_mixed
    assert node.probe_all(probes.forget_captures) == [1] * ENGINES, "only the base's are"


def test_members_sample_the_same_however_steps_run(node: RealNode, model: Path) -> None:
    if model.name not in THOROUGH:
        pytest.skip(ONE_OF_A_BASE)
    node.script(Script.RANDOM)
    with node.bound(QUARTET):
        requests = node.submit(QUARTET, PROMPTS, max_tokens=16, temperature=1.0)
        tokens = node.wait(requests)
        members = [node.probe(engine, probes.sampled) for engine in QUARTET.engines]
    node.script(Script.TP)
    assert all([sampled[request] for request in requests] == tokens for sampled in members)
    assert len({tuple(output) for output in tokens}) == len(tokens)


def test_heads_in_another_order_than_the_bases_change_the_tokens(
    node: RealNode, model: Path, expected_of_mixed: Expected
) -> None:
    """What a step by sequence wrote to the KV cache is then another head's."""
    if MAX_SP[model.name] == ENGINES:
        pytest.skip("the heads of (SP 4) are in the order of the members")
    if model.name not in THOROUGH:
        pytest.skip(ONE_OF_A_BASE)
    node.probe_all(probes.order_heads_by_rank, WIDEST)
    assert generate_in(node, QUARTET, Script.PREFILL) != expected_of_mixed
    node.probe_all(probes.order_heads_by_base, WIDEST)
    assert generate_in(node, QUARTET, Script.PREFILL) == expected_of_mixed


def test_the_wrong_replica_of_a_kv_head_changes_the_tokens(
    node: RealNode, model: Path, expected_of_mixed: Expected
) -> None:
    if model.name != "llama-2-kv-heads":
        pytest.skip("needs several KV heads that are each held several times")
    node.probe_all(probes.swap_kv_heads, WIDEST)
    assert generate_in(node, QUARTET, Script.PREFILL) != expected_of_mixed
    node.probe_all(probes.swap_kv_heads, WIDEST)
    assert generate_in(node, QUARTET, Script.PREFILL) == expected_of_mixed


# --- carries ---

CARRY = m.Treatment.CARRY
CARRIED_TOKENS = 48
SHORT_WAY = ("tp4", "mixed", "dp")
WAY = ("tp4", "tp2x2", "mixed", "tp2x2", "tp4", "dp")
"""From single engines on, which gives every way between two layouts but one, and that is the first
of them in the other direction."""
_seeds = itertools.count(300)


def carried(node: RealNode, *way: Partition) -> tuple[list[str], list[list[int]]]:
    """Carry requests of single engines on a way of partitions; return them, and their prompts."""
    node.switch(*singles(ENGINES))
    prompts = random_prompts((5, 33, 64, 100, 150), next(_seeds))
    requests = [
        node.submit(alone(number % ENGINES), [prompt], CARRIED_TOKENS)[0]
        for number, prompt in enumerate(prompts)
    ]
    node.script(Script.RANDOM)
    for partition in way:
        goal = {request: len(node.tokens[request]) + 3 for request in requests}
        node.until(
            lambda g=goal: all(r in node.finished or len(node.tokens[r]) >= g[r] for r in g),
            "more tokens",
        )
        left = len(set(requests) - node.finished.keys())
        view = node.switch(*partition, treatment=CARRY)
        assert view.carried > 0 or left < len(requests), "nothing moved"
        assert (view.recomputed, view.paused) == ({}, 0)
    node.wait(requests)
    node.script(Script.TP)
    return requests, prompts


def test_requests_are_carried_between_all_layouts_and_no_token_is_computed_twice(
    node: RealNode, model: Path
) -> None:
    way = WAY if model.name in THOROUGH else SHORT_WAY
    requests, prompts = carried(node, *(LAYOUTS[name] for name in way))
    led = node.probe_all(probes.led)
    for request, prompt in zip(requests, prompts, strict=True):
        computed = sum(tokens.get(request, 0) for tokens in led)
        assert computed == len(prompt) + CARRIED_TOKENS - 1
    expected = node.generate_spread(singles(ENGINES), prompts, CARRIED_TOKENS)
    assert [node.tokens[request] for request in requests] == expected
    assert node.audit() == []


def test_other_heads_than_its_own_change_a_carried_requests_tokens(
    node: RealNode, model: Path
) -> None:
    if model.name != "llama":
        pytest.skip("that the comparison notices it does not depend on the model")
    node.probe_all(probes.swap_carried_heads, True)
    requests, prompts = carried(node, LAYOUTS["tp4"])
    node.probe_all(probes.swap_carried_heads, False)
    node.switch(*singles(ENGINES))
    expected = node.generate_spread(singles(ENGINES), prompts, CARRIED_TOKENS)
    found = [node.tokens[request] for request in requests]
    assert [tokens[:3] for tokens in found] == [tokens[:3] for tokens in expected]
    assert all(one != other for one, other in zip(found, expected, strict=True))


# --- shared weights ---


@pytest.mark.parametrize(
    ("damage", "unit"),
    [(probes.read_slots_early, alone(0)), (probes.order_shards_by_rank, QUARTET)],
    ids=["a slot that is not filled yet", "shards in the order of ranks"],
)
def test_weights_of_another_layer_or_member_change_the_tokens(
    node: RealNode, model: Path, damage: probes.Damage, unit: Unit
) -> None:
    if SHARE.get(model.name) != 2:
        pytest.skip("needs layouts of more members than share weights")
    for damaged in (True, False):
        prompts = random_prompts((5, 33, 100), next(_seeds))  # no cache has their prefixes
        node.switch()
        for engine in unit.engines:
            node.probe(engine, damage, damaged)
        if unit.is_group:
            node.switch(unit)
        found = node.generate(unit, prompts)
        node.switch()
        expected = node.generate(alone(1), prompts)
        assert is_varied(expected)
        assert (found != expected) is damaged


# --- what the above covers ---


def test_prompts_came_in_chunks_and_from_the_prefix_cache(
    node: RealNode, expected: Expected
) -> None:
    """What the tests above claim to cover, seen in a runner."""
    node.switch(tp(0, 1))
    prompt = [7, *PROMPTS[-1]]  # no prefix of an earlier one
    first, again = (node.submit(tp(0, 1), [prompt], max_tokens=1) for _ in range(2))
    node.wait(first + again)
    computed = node.probe(1, probes.scheduled)
    assert computed[first[0]] == len(prompt)
    assert computed[again[0]] < len(prompt)
    assert node.probe(1, probes.largest_step) <= 64 < len(prompt)


def test_no_layout_but_dp_owns_weights(node: RealNode, model: Path) -> None:
    for owned in node.probe_all(probes.owned_bytes):
        assert owned == {"dp": 0, "tp2": 0, "tp4": 0}
    if model.name in SHARE:
        pytest.skip("each slot has the parameters of several layers")
    for layouts in node.probe_all(probes.parameters):
        (size, devices, storages), *views = layouts.values()
        assert devices == {"cpu"}
        for viewed_size, viewed_devices, viewed_storages in views:
            assert viewed_devices == {"cpu"}
            assert viewed_storages <= storages
            # Not by leaving parameters out: a rank sees its share, norms whole.
            assert viewed_size >= size / ENGINES


def test_the_kv_caches_of_all_layouts_are_one_storage(node: RealNode) -> None:
    for storages in node.probe_all(probes.kv_storages):
        assert len(storages) == 3
        assert len(set.union(*storages.values())) == 1
        ((_, size),) = storages["dp"]
        assert size == NODE_ARGS["kv_cache_memory_bytes"]
