"""Models with a sliding window generate stock vLLM's tokens, where all KV is one group of blocks.

The prompts reach far beyond the window: a layout that attended to other tokens would show.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from shoal.policies.values.layouts import alone
from shoal.policies.values.partition import Partition
from tests.random_checkpoint import CheckpointSpec, model_config, write_checkpoint
from tests.runtime.engine.prompts import PROMPTS, SHARED
from tests.runtime.engine.real_node import RealNode, stock_tokens
from tests.units import tp
from tests.variety import is_varied

ALL = PROMPTS + SHARED
WINDOW = 48
SLIDING, FULL = "sliding_attention", "full_attention"
SPEC = CheckpointSpec(layers=2, tied_embeddings=True)
MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
GEMMA = {
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": SPEC.head_dim,
}
ONE_GROUP = {"disable_hybrid_kv_cache_manager": True}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mistral": (MISTRAL, {}),
    "mistral-some-layers": (MISTRAL | {"layer_types": [SLIDING, FULL]}, ONE_GROUP),
    "gemma-2": (GEMMA, ONE_GROUP),
}
"""What the configuration of each says beside ``SPEC``, and with which options it is served."""


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def model(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / name
    write_checkpoint(path, SPEC)  # of Llama, whose layers Mistral's are
    if name.startswith("gemma"):
        make_gemma(path / "model.safetensors")
    config = model_config(SPEC) | MODELS[name][0] | {"sliding_window": WINDOW}
    (path / "config.json").write_text(json.dumps(config))
    return path


def make_gemma(path: Path) -> None:
    """Make a Gemma of a Llama: norms around the MLP, and what Gemma adds and multiplies undone."""
    tensors = load_file(path)
    for layer in range(SPEC.layers):
        norm = tensors[f"model.layers.{layer}.input_layernorm.weight"]
        for place in ("pre", "post"):
            tensors[f"model.layers.{layer}.{place}_feedforward_layernorm.weight"] = norm
    scale = SPEC.hidden_size**0.5  # of embeddings as they come in, not as they make logits
    tensors["model.embed_tokens.weight"] /= scale
    tensors["model.norm.weight"] *= scale
    save_file(
        {name: tensor - 1 if "norm" in name else tensor for name, tensor in tensors.items()},
        path,
        metadata={"format": "pt"},
    )


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return stock_tokens(model, ALL)


@pytest.fixture(scope="module")
def node(model: Path, name: str) -> Iterator[RealNode]:
    with RealNode(model, 2, **MODELS[name][1]) as node:
        yield node


def test_the_window_shows_in_stocks_tokens(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    """Or it would not matter whether layouts keep to it."""
    assert is_varied(expected)
    config = json.loads((model / "config.json").read_text()) | {"sliding_window": None}
    whole = tmp_path / "whole"
    whole.mkdir()
    for part in model.iterdir():
        (whole / part.name).symlink_to(part)
    (whole / "config.json").unlink()
    (whole / "config.json").write_text(json.dumps(config))
    assert stock_tokens(whole, ALL) != expected


@pytest.mark.parametrize("partition", [(alone(0), alone(1)), (tp(0, 1),)], ids=["dp", "tp2"])
def test_tokens_are_stocks(node: RealNode, expected: list[list[int]], partition: Partition) -> None:
    node.switch(*partition)
    for _ in range(2):  # the second time from the prefix cache
        assert node.generate_spread(node.partition, ALL) == expected
    assert node.audit() == []
