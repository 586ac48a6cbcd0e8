"""Speculative decoding by n-grams on real engines: the tokens are those without it.

The group's steps run in TP and by sequence, with prompts, drafts, or both.

vLLM checks drafts in the next step, and takes one only if the model says the same, so greedy tokens
do not change. The model repeats itself, so that drafts are right at times. With
``SHOAL_TESTS=all`` there is one that does not, so that nearly all drafts are wrong and what was
computed of them is taken back, and one with routed experts.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.policies.values.layouts import alone
from shoal.policies.values.partition import singles
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages import Mode
from tests.depth import among
from tests.looping_checkpoint import write_looping
from tests.runtime.engine import probes
from tests.runtime.engine.modes import scripted
from tests.runtime.engine.prompts import make_model, random_prompts
from tests.runtime.engine.real_node import RealNode, stock_tokens
from tests.runtime.engine.scripted_shift import Script
from tests.units import tp

PAIR = tp(0, 1)
DRAFTS = 4
SPECULATION = {
    "method": "ngram",
    "num_speculative_tokens": DRAFTS,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
PROMPTS = random_prompts((5, 17, 33, 64, 65, 130), seed=61)
"""Among them one token more than a block of DP and of TP2: with all but this token in the prefix
cache, vLLM lets its step check drafts that nobody has proposed."""
TOKENS = 56
FEW = 20
"""Where drafts matter that come with the prefix cache: they are checked first."""
Expected = list[list[int]]


MODELS = among(["looping"], "varied", "qwen3-moe")


@pytest.fixture(scope="module", params=MODELS)
def model(
    llama: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Path:
    if request.param == "varied":
        return llama
    if request.param == "qwen3-moe":
        return make_model(request.param, tmp_path_factory.mktemp("models"))
    return write_looping(llama, tmp_path_factory.mktemp("looping") / "llama")


@pytest.fixture(scope="module")
def expected(model: Path) -> Expected:
    """What stock vLLM generates without speculation."""
    return stock_tokens(model, PROMPTS, TOKENS)


@pytest.fixture(scope="module")
def node(model: Path) -> Iterator[RealNode]:
    with RealNode(
        model, 2, max_sp=2, speculative_config=SPECULATION, disable_log_stats=False
    ) as node:
        yield node


@pytest.fixture
def judged(node: RealNode, model: Path) -> Iterator[None]:
    """Drafts are accepted where the model repeats itself, and rejected in any case."""
    node.drafts.clear()
    yield
    assert node.drafts["rejected"] > 0
    if model.parent.name.startswith("looping"):
        assert node.drafts["accepted"] > 0


@pytest.mark.usefixtures("judged")
def test_alone_engines_generate_the_tokens_without_speculation(
    node: RealNode, expected: Expected
) -> None:
    assert node.generate_spread(singles(2), PROMPTS, TOKENS) == expected
    first = [output[:FEW] for output in expected]
    assert node.generate_spread(singles(2), PROMPTS, FEW) == first, "from the prefix cache"
    assert node.audit() == []


@pytest.mark.usefixtures("judged")
def test_the_search_for_n_grams_gives_torch_no_more_threads(node: RealNode) -> None:
    """Numba, with which vLLM searches, would tell OpenMP to use every core."""
    node.generate(alone(0), PROMPTS[:1], TOKENS)
    assert node.probe(0, probes.threads) == 1


@pytest.mark.usefixtures("judged")
def test_a_group_generates_the_tokens_without_speculation(
    node: RealNode, expected: Expected
) -> None:
    with node.bound(PAIR):
        assert node.generate(PAIR, PROMPTS, TOKENS) == expected
        first = [output[:FEW] for output in expected]
        assert node.generate(PAIR, PROMPTS, FEW) == first, "from the prefix cache"
    assert node.audit() == []


@pytest.mark.usefixtures("judged")
def test_steps_by_sequence_check_drafts(node: RealNode, expected: Expected) -> None:
    """All steps of the group are, those of prompts and those that check drafts."""
    node.switch()
    new = PROMPTS[-1][::-1]
    with scripted(node, PAIR, Script.SP) as ran, node.bound(PAIR):
        assert node.generate(PAIR, PROMPTS, TOKENS) == expected
        beside = node.submit(PAIR, PROMPTS[:3], TOKENS)
        node.wait_for_tokens(beside, 4)
        others = node.generate(PAIR, [new, *PROMPTS[3:]], FEW)
        assert others[1:] == [output[:FEW] for output in expected[3:]]
        assert node.wait(beside) == expected[:3], "beside a prompt that is not cached"
    assert ran[Mode.SP] > TOKENS // (1 + DRAFTS)
    assert ran[Mode.TP] == 0
    assert node.audit() == []


@pytest.mark.usefixtures("judged")
def test_seeded_requests_sample_the_same_however_steps_run(
    node: RealNode, expected: Expected
) -> None:
    """Which drafts are right depends on a request's own draws, and on what the model says."""
    node.switch()
    seeded: dict[str, Any] = {"temperature": 0.1, "seed": 7}
    tokens, drafts = [], []
    for script in (Script.TP, Script.ALTERNATE):
        node.drafts.clear()
        with scripted(node, PAIR, script) as ran, node.bound(PAIR):
            tokens.append(node.wait(node.submit(PAIR, PROMPTS, TOKENS, **seeded)))
        drafts.append(dict(node.drafts))
        assert (ran[Mode.SP] > 0) is (script is Script.ALTERNATE)
    assert tokens[0] == tokens[1] != expected
    assert drafts[0] == drafts[1]


@pytest.mark.usefixtures("judged")
def test_carried_requests_go_on_without_their_drafts(node: RealNode, expected: Expected) -> None:
    """In the group, steps in TP and by sequence follow each other in a random order."""
    node.switch()
    with scripted(node, PAIR, Script.RANDOM) as ran:
        # So many tokens that none ends before the last switch, if all drafts are right.
        requests = node.submit(alone(0), PROMPTS, 4 * TOKENS)
        node.wait_for_tokens(requests, 8)
        for partition, tokens in (((PAIR,), 14), (singles(2), 20), ((PAIR,), 26)):
            view = node.switch(*partition, treatment=m.Treatment.CARRY)
            assert (view.carried, view.recomputed) == (len(PROMPTS), {})
            node.wait_for_tokens(requests, tokens)
        assert [tokens[:TOKENS] for tokens in node.wait(requests)] == expected
        node.switch()
    assert ran[Mode.SP] > 0
    assert node.audit() == []


@pytest.mark.usefixtures("judged")
def test_paused_requests_go_on(node: RealNode, expected: Expected) -> None:
    requests = node.submit(alone(0), PROMPTS, TOKENS)
    node.wait_for_tokens(requests, 16)
    with node.bound(PAIR):
        first = [output[:FEW] for output in expected[:2]]
        assert node.generate(PAIR, PROMPTS[:2], FEW) == first
    assert node.wait(requests) == expected


def test_members_of_a_group_judge_drafts_alike(node: RealNode) -> None:
    """Drafts are accepted by chance if requests are sampled, by the same chance on all members."""
    node.drafts.clear()
    with node.bound(PAIR):
        requests = node.submit(PAIR, PROMPTS, FEW, temperature=0.7)
        tokens = node.wait(requests)
        first, second = (node.probe(engine, probes.sampled) for engine in PAIR.engines)
    assert [first[request][:FEW] for request in requests] == tokens
    assert [second[request] for request in requests] == [first[request] for request in requests]
    assert node.drafts["rejected"] > 0


def test_tokens_would_differ_if_wrong_drafts_were_accepted(
    node: RealNode, expected: Expected
) -> None:
    node.probe_all(probes.accept_all_drafts, True)
    found = node.generate_spread(singles(2), PROMPTS, FEW)
    node.probe_all(probes.accept_all_drafts, False)
    right = [output[:FEW] for output in expected]
    assert found != right
    assert node.generate_spread(singles(2), PROMPTS, FEW) == right
