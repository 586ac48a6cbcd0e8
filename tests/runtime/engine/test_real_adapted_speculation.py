"""LoRA adapters with speculative decoding: the tokens are those without speculation.

Adapters change what the model says, so drafts of requests of one prompt are judged differently.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.policies.values.partition import Partition, singles
from shoal.runtime.config import Adapter
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages import Mode
from tests.depth import skip_unless_deep
from tests.looping_checkpoint import write_looping
from tests.random_adapter import write_adapter
from tests.runtime.engine import probes, v2_program
from tests.runtime.engine.adapters import (
    Adapters,
    named,
    stock_tokens_of_each,
    submitted,
    write_adapters,
)
from tests.runtime.engine.prompts import MODELS, random_prompts
from tests.runtime.engine.real_node import RealNode
from tests.runtime.engine.scripted_shift import Script
from tests.units import tp

pytestmark = pytest.mark.timeout(1200)

PAIR = tp(0, 1)
TOKENS = 40
PROMPTS = random_prompts((5, 33, 65, 130), seed=61)
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8, "max_num_seqs": 12}
SPECULATION = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}


@pytest.fixture(scope="module")
def model(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_looping(llama, tmp_path_factory.mktemp("looping") / "llama")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    """None, and two adapters."""
    return write_adapters(tmp_path_factory.mktemp("adapters"), MODELS["llama"])


@pytest.fixture(scope="module")
def node(model: Path, adapters: Adapters) -> Iterator[RealNode]:
    options = {"speculative_config": SPECULATION, "disable_log_stats": False}
    with RealNode(model, 2, adapters=named(adapters), max_sp=2, **LORA, **options) as node:
        yield node


@pytest.fixture(scope="module")
def expected(model: Path, adapters: Adapters) -> list[list[int]]:
    """Stock's tokens for what ``submitted`` sends, without speculation."""
    return stock_tokens_of_each(model, adapters, PROMPTS, TOKENS, LORA)


@pytest.fixture
def judged(node: RealNode) -> Iterator[None]:
    """Some drafts are accepted, and some rejected."""
    node.drafts.clear()
    yield
    assert min(node.drafts["accepted"], node.drafts["rejected"]) > 0


@pytest.mark.usefixtures("judged")
@pytest.mark.parametrize("partition", [singles(2), (PAIR,)], ids=["dp", "tp2"])
def test_layouts_generate_the_tokens_without_speculation(
    node: RealNode, adapters: Adapters, expected: list[list[int]], partition: Partition
) -> None:
    node.switch(*partition)
    assert node.wait(submitted(node, adapters, PROMPTS, TOKENS)) == expected
    assert node.audit() == []


@pytest.mark.usefixtures("judged")
def test_steps_by_sequence_check_drafts_with_the_adapters(
    node: RealNode, adapters: Adapters, expected: list[list[int]]
) -> None:
    node.switch()
    node.probe_all(probes.take_modes)
    node.script(Script.RANDOM)
    with node.bound(PAIR):
        assert node.wait(submitted(node, adapters, PROMPTS, TOKENS)) == expected
    node.script(Script.TP)
    assert all(min(ran[mode] for mode in Mode) > 0 for ran in node.probe_all(probes.take_modes))


@pytest.mark.usefixtures("judged")
def test_carried_requests_keep_their_adapters(
    node: RealNode, adapters: Adapters, expected: list[list[int]]
) -> None:
    node.switch()
    requests = submitted(node, adapters, PROMPTS, TOKENS)
    for partition in ((PAIR,), singles(2)):
        node.wait_for_tokens(requests, len(node.tokens[requests[-1]]) + 3)
        view = node.switch(*partition, treatment=m.Treatment.CARRY)
        assert (view.carried, view.recomputed) == (len(requests), {})
    assert node.wait(requests) == expected


def test_a_draft_model_on_the_v2_runner_changes_no_token(tmp_path: Path) -> None:
    """Its steps have several rows of logits for a request, of which vLLM tells adapters of one."""
    skip_unless_deep()
    result = v2_program.run("tests.runtime.engine.v2_adapted_speculation_main", tmp_path)
    expected = result["expected"]
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    for phase, tokens in result["tokens"].items():
        assert tokens == expected, phase
        assert min(result["drafts"][phase].values()) > 0, phase
    assert result["modes of sp2"] == ["sp"]
    assert result["carried in sp2"] > 0
    assert min(result["carried"]) > 0
    assert result["computed again"] == [{}] * 3
    assert result["problems"] == []


def test_an_adapter_of_the_head_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "head", MODELS["llama"], seed=3, ends=True)
    with (
        pytest.raises(
            Exception, match=r"adapter head: it adapts (lm_head|model\.embed_tokens), and"
        ),
        RealNode(
            model,
            1,
            adapters=[Adapter("head", str(tmp_path / "head"))],
            speculative_config=SPECULATION,
            **LORA,
        ),
    ):
        pass
