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

from tests.runtime.engine.every_layout import ALL, TOKENS, EveryLayout, Tokens
from tests.runtime.engine.prompts import Stock
from tests.runtime.engine.real_node import RealNode


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
def expected(stock: Stock) -> Tokens:
    """What stock vLLM generates with the Llama."""
    return stock(ALL, TOKENS)


@pytest.fixture(scope="module")
def node(model: Path) -> Iterator[RealNode]:
    with RealNode(model, 2, max_sp=2, language_model_only=True) as node:
        yield node


class TestMultimodalText(EveryLayout):
    """The carried requests end with its own tokens in DP, which are the Llama's."""
