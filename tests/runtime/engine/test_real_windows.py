"""Models with a sliding window generate stock vLLM's tokens, in one KV group and in several.

The prompts reach far beyond the window: a layout that attended to other tokens would show. With
``SHOAL_TESTS=all`` requests of a model whose layers differ in one group are carried, too.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from shoal.policies.values.layouts import alone
from shoal.policies.values.partition import Partition
from shoal.runtime.protocol import messages as m
from tests.depth import skip_unless_deep
from tests.random_checkpoint import CheckpointSpec, model_config, write_checkpoint
from tests.runtime.engine.every_layout import COMPARED, first
from tests.runtime.engine.prompts import PROMPTS, SHARED, random_prompts
from tests.runtime.engine.real_node import RealNode, stock_tokens
from tests.runtime.engine.scripted_shift import Script
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
    "gemma-2": (GEMMA, {"max_sp": 2}),
}
"""What the configuration of each says beside ``SPEC``, and with which options it is served."""
GROUP = tp(0, 1)
CARRY = m.Treatment.CARRY
TOKENS = 120
Expected = list[list[int]]


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
def expected(model: Path) -> Expected:
    return stock_tokens(model, ALL)


@pytest.fixture(scope="module")
def node(model: Path, name: str) -> Iterator[RealNode]:
    with RealNode(model, 2, precopy_tokens=64, **MODELS[name][1]) as node:
        yield node


@pytest.fixture(scope="module")
def stock_without_window(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Expected]:
    """Return what gives stock's tokens of a model whose layers all attend to everything."""
    known: dict[str, Expected] = {}

    def tokens(model: Path) -> Expected:
        config = json.loads((model / "config.json").read_text()) | {"sliding_window": None}
        family = config["model_type"]
        if family not in known:
            whole = tmp_path_factory.mktemp("whole")
            for part in model.iterdir():
                (whole / part.name).symlink_to(part)
            (whole / "config.json").unlink()
            (whole / "config.json").write_text(json.dumps(config))
            known[family] = stock_tokens(whole, ALL)
        return known[family]

    return tokens


def test_the_window_shows_in_stocks_tokens(
    model: Path, expected: Expected, stock_without_window: Callable[[Path], Expected]
) -> None:
    """Or it would not matter whether layouts keep to it."""
    assert is_varied(expected)
    assert first(stock_without_window(model)) != first(expected)


def test_layers_that_keep_other_tokens_have_a_group_of_their_own(node: RealNode, name: str) -> None:
    for unit in (alone(0), GROUP):
        limits = node.controller.books.engines.limits(unit).group_limits
        assert len(limits) == (2 if name == "gemma-2" else 1)
        assert 0 in limits


@pytest.mark.parametrize("partition", [(alone(0), alone(1)), (GROUP,)], ids=["dp", "tp2"])
def test_tokens_are_stocks(node: RealNode, expected: Expected, partition: Partition) -> None:
    node.switch(*partition)
    for _ in range(2):  # the second time from the prefix cache
        found = node.generate_spread(node.partition, ALL, COMPARED)
        assert found == first(expected)
    assert node.audit() == []


def test_tokens_are_stocks_in_sp(node: RealNode, expected: Expected) -> None:
    if node.config.max_sp == 1:
        pytest.skip("the node has no SP")
    node.switch(GROUP)
    node.script(Script.RANDOM)
    assert node.generate(GROUP, ALL, COMPARED) == first(expected)
    node.script(Script.TP)
    assert node.audit() == []


def test_requests_go_along_with_their_kv(node: RealNode, name: str) -> None:
    if name == "mistral-some-layers":
        skip_unless_deep()
    prompts = random_prompts((40, 130, 300, 7), seed=21)
    node.switch(alone(0), alone(1))
    expected = node.generate(alone(1), prompts, TOKENS)
    requests = node.submit(alone(0), prompts, TOKENS)
    node.wait_for_tokens(requests, 8)
    ahead = 0
    for partition, tokens in (((GROUP,), 30), ((alone(0), alone(1)), 50), ((GROUP,), 70)):
        view = node.switch(*partition, treatment=CARRY)
        assert (view.carried > 0, view.recomputed) == (True, {})
        ahead += view.precopied_bytes
        node.wait_for_tokens(requests, tokens)
    # Not in each switch: engines that go on alone may still have in their caches what was filled.
    assert ahead > 0
    assert node.wait(requests) == expected
    assert node.audit() == []


def test_a_block_of_the_wrong_group_changes_the_tokens(node: RealNode, name: str) -> None:
    """The test above can fail."""
    if name != "gemma-2":
        pytest.skip("there is one group")
    (prompt,) = random_prompts((300,), seed=22)
    node.switch(alone(0), alone(1))
    (request,) = node.submit(alone(0), [prompt], TOKENS)
    node.wait_for_tokens([request], 8)

    def damage(_engine: int, message: m.Message) -> None:
        if isinstance(message, m.Allot | m.Import | m.CopyAhead) and message.requests:
            request = message.requests[0]
            have = request.blocks if isinstance(request, m.CarriedRequest) else request.source
            if 0 not in have:
                return  # ``Allot`` had them, or they are of an ended request of the other engine
            one, other = have[0]
            one[-2], other[-2] = other[-2], one[-2]

    node.transport.before_send = damage
    node.switch(GROUP, treatment=CARRY)
    node.transport.before_send = lambda _engine, _message: None
    found = node.wait([request])
    node.switch(alone(0), alone(1))
    assert node.generate(alone(1), [prompt], TOKENS) != found
