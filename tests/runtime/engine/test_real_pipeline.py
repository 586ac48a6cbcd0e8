"""Pipelines of real engines: the tokens are DP's, whatever layout the KV comes from.

``SHOAL_TESTS=all`` adds pipelines of four engines, in a minute more.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.policies.values.layouts import Unit, alone
from shoal.policies.values.partition import Partition
from shoal.runtime.protocol import messages as m
from tests.depth import only_deep
from tests.random_checkpoint import CheckpointSpec, write_checkpoint
from tests.runtime.engine import probes
from tests.runtime.engine.prompts import MANY, PROMPTS, SHARED, random_prompts
from tests.runtime.engine.real_node import RealNode
from tests.runtime.engine.test_real_carry import SAMPLING, TOKENS, assert_same, further
from tests.units import pp, tp

pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")

PAIR, TP2 = pp(0, 1), tp(0, 1)
CARRY = m.Treatment.CARRY
_seeds = itertools.count(900)
UNCACHED: dict[str, Any] = {"skip_reading_prefix_cache": True}


@pytest.fixture(scope="module")
def node(llama: Path) -> Iterator[RealNode]:
    with RealNode(llama, 2, max_pp=2, precopy_tokens=600) as node:
        yield node


def test_stages_have_no_weights_and_no_kv_of_their_own(node: RealNode) -> None:
    assert node.probe_all(probes.owned_bytes) == [{"dp": 0, "pp2": 0, "tp2": 0}] * 2
    for storages in node.probe_all(probes.kv_storages):
        assert len(set(map(frozenset, storages.values()))) == 1


def test_a_pipeline_generates_dps_tokens(node: RealNode) -> None:
    """Prompts longer than a step are computed in chunks; some begin with what is cached."""
    prompts = [*PROMPTS, *SHARED, *MANY]
    expected = node.generate_spread([alone(0), alone(1)], prompts)
    with node.bound(PAIR):
        assert node.generate(PAIR, prompts[:-1]) == expected[:-1]
        assert node.generate(PAIR, prompts) == expected, "by the pipeline's own prefix cache"
    assert node.audit() == []


def test_steps_follow_each_other_through_the_stages(node: RealNode) -> None:
    """The first stage begins a step of other requests while the last one has a step."""
    # Each takes two steps, which go through the stages one behind the other.
    prompts = random_prompts((100,) * 4, next(_seeds))
    for engine in (0, 1):
        node.probe(engine, probes.take_steps)
    with node.bound(PAIR):
        node.generate(PAIR, prompts)
        taken = node.probe_all(probes.take_steps)
    assert taken[0] == taken[1], "members run the same steps in the same order"
    quarter = len(taken[0]) // 4
    decoding = taken[0][quarter:-quarter]
    apart = [not before & after for before, after in itertools.pairwise(decoding)]
    assert apart
    assert all(apart), decoding


@pytest.mark.parametrize("path", [(PAIR, TP2, None), (TP2, PAIR, None, PAIR)])
def test_requests_go_along_with_their_kv(node: RealNode, path: tuple[Unit | None, ...]) -> None:
    prompts = random_prompts((40, 33, 64, 90, 31, 17, 150, 70, 5, 300, 25), next(_seeds))
    kinds = SAMPLING.values()
    both = list(zip(prompts, kinds, strict=True))
    plain = [node.submit(alone(1), [prompt], TOKENS, **kind)[0] for prompt, kind in both]
    node.until(lambda: node.finished.keys() >= set(plain), "requests")
    requests = [node.submit(alone(0), [prompt], TOKENS, **kind)[0] for prompt, kind in both]
    node.wait_for_tokens(requests, 8)
    ahead = 0
    for unit in path:
        view = node.switch(*filter(None, [unit]), treatment=CARRY)
        assert view.carried > len(requests) // 2
        assert view.recomputed == {}
        ahead += view.precopied_bytes
        further(node, requests, 15)
    assert ahead, "blocks were copied ahead, too"
    node.until(lambda: node.finished.keys() >= set(requests), "requests")
    node.switch()
    assert_same(node, plain, requests)
    greedy = [prompt + node.tokens[plain[0]][:90] for prompt in prompts[:1]]
    cached = node.generate(alone(0), greedy)
    assert cached == node.generate(alone(0), greedy, **UNCACHED), "by carried blocks"
    assert node.audit() == []


def test_no_token_is_computed_twice(node: RealNode) -> None:
    prompts = random_prompts((40, 130, 300), next(_seeds))
    requests = node.submit(alone(0), prompts, TOKENS)
    node.wait_for_tokens(requests, 8)
    node.switch(PAIR, treatment=CARRY)
    node.wait(requests)
    computed = node.probe(0, probes.scheduled)
    for request, prompt in zip(requests, prompts, strict=True):
        assert computed[request] == len(prompt) + TOKENS - 1
    node.switch()


def test_layers_of_another_stage_change_the_tokens(node: RealNode) -> None:
    """The tests above can fail: which layers a stage has read decides."""
    (prompt,) = random_prompts((300,), next(_seeds))
    (expected,) = node.generate(alone(1), [prompt], TOKENS)
    (request,) = node.submit(alone(0), [prompt], TOKENS)
    node.wait_for_tokens([request], 8)
    node.probe(1, probes.carry_layers_of_stage_0, True)
    node.switch(PAIR, treatment=CARRY)
    node.probe(1, probes.carry_layers_of_stage_0, False)
    assert node.wait([request]) != [expected]
    node.switch()


FOUR, BOTH = pp(0, 1, 2, 3), pp(0, 1, 2, 3, stages=2)
PATH: tuple[Partition, ...] = (
    (FOUR,),
    (tp(0, 1, 2, 3),),
    (),
    (BOTH,),
    (pp(0, 1), tp(2, 3)),
    (FOUR,),
    (BOTH,),
    (tp(0, 1), pp(2, 3)),
    (),
)


@only_deep
def test_four_engines_form_every_pipeline(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", CheckpointSpec(layers=4))
    with RealNode(tmp_path / "model", 4, max_pp=4) as node:
        assert_every_pipeline(node)


def assert_every_pipeline(node: RealNode) -> None:
    """Check that all layouts of four engines give the same tokens, and carry requests."""
    assert {sum(owned.values()) for owned in node.probe_all(probes.owned_bytes)} == {0}
    expected = node.generate_spread([alone(0), alone(1)], PROMPTS)
    for unit in (FOUR, BOTH, pp(2, 3)):
        with node.bound(unit):
            assert node.generate(unit, PROMPTS) == expected, unit
    prompts = random_prompts((45, 222, 70, 140), next(_seeds))
    plain = node.generate(alone(1), prompts, 220)
    requests = node.submit(alone(0), prompts, 220)
    node.wait_for_tokens(requests, 4)
    for units in PATH:
        view = node.switch(*units, treatment=CARRY)
        assert (view.carried, view.recomputed) == (len(prompts), {})
        further(node, requests, 15)
    assert node.wait(requests) == plain
    beginnings = [p + tokens[:90] for p, tokens in zip(prompts, plain, strict=True)]
    assert node.generate(alone(0), beginnings) == [tokens[90:122] for tokens in plain]
    assert node.audit() == []
