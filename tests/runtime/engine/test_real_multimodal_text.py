"""The text of a multimodal model on real engines: the tokens of the Llama that it has inside.

It is loaded without what sees images (``--language-model-only``), from a checkpoint that has only
the text's weights, too.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from shoal.policies.values.layouts import alone
from shoal.policies.values.partition import singles
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages import Mode
from tests.runtime.engine import probes
from tests.runtime.engine.prompts import PROMPTS, SHARED, Stock
from tests.runtime.engine.real_node import RealNode
from tests.runtime.engine.scripted_shift import Script
from tests.units import tp

ALL = PROMPTS + SHARED
PAIR = tp(0, 1)
TOKENS = 24
Expected = list[list[int]]


@pytest.fixture(scope="module")
def model(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An Idefics3 around the Llama."""
    path = tmp_path_factory.mktemp("models") / "idefics3"
    shutil.copytree(llama, path)
    text = json.loads((llama / "config.json").read_text())
    config = AutoConfig.for_model("idefics3", text_config=text).to_dict()
    config |= {"architectures": ["Idefics3ForConditionalGeneration"], "dtype": "float32"}
    (path / "config.json").write_text(json.dumps(config))
    weights = load_file(llama / "model.safetensors")
    renamed = {name.replace("model.", "model.text_model."): each for name, each in weights.items()}
    save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def expected(stock: Stock) -> Expected:
    """What stock vLLM generates with the Llama."""
    return stock(ALL, TOKENS)


@pytest.fixture(scope="module")
def node(model: Path) -> Iterator[RealNode]:
    with RealNode(model, 2, max_sp=2, language_model_only=True) as node:
        yield node


def test_tokens_are_the_llamas_in_every_layout(node: RealNode, expected: Expected) -> None:
    for partition in (singles(2), (PAIR,)):
        node.switch(*partition)
        for _ in range(2):  # the second time from the prefix cache
            assert node.generate_spread(node.partition, ALL, TOKENS) == expected
    assert node.audit() == []


def test_tokens_are_the_llamas_however_steps_run(node: RealNode, expected: Expected) -> None:
    node.switch()
    node.probe_all(probes.take_modes)
    node.script(Script.RANDOM)
    with node.bound(PAIR):
        assert node.generate(PAIR, ALL, TOKENS) == expected
    node.script(Script.TP)
    assert all(ran[Mode.SP] > 0 for ran in node.probe_all(probes.take_modes))


def test_carried_requests_go_on_with_the_right_tokens(node: RealNode, stock: Stock) -> None:
    node.switch()
    requests = node.submit(alone(0), ALL, 60)
    node.wait_for_tokens(requests, 6)
    for partition, tokens in (((PAIR,), 20), (singles(2), 36)):
        view = node.switch(*partition, treatment=m.Treatment.CARRY)
        assert (view.carried > 0, view.recomputed) == (True, {})
        node.wait_for_tokens(requests, tokens)
    assert node.wait(requests) == stock(ALL, 60)
    assert node.audit() == []


def test_no_layout_but_dp_owns_weights(node: RealNode) -> None:
    assert node.probe_all(probes.owned_bytes) == [{"dp": 0, "tp2": 0}] * 2
