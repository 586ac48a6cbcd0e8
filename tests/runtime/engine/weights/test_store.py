"""The full weights by name: they are the DP model's own tensors."""

import pytest
import torch
from torch import nn
from vllm.lora.layers import BaseLayerWithLoRA

from shoal.runtime.engine.weights.store import ResidentWeights, layers_of


def tied() -> nn.Module:
    """Return a model whose head has the embedding's weight, and a norm with a buffer."""
    model = nn.Module()
    model.embedding, model.head, model.norm = nn.Module(), nn.Module(), nn.Module()
    model.embedding.weight = nn.Parameter(torch.arange(6.0))
    model.head.weight = model.embedding.weight
    model.head.register_parameter("bias", None)
    model.norm.register_buffer("scale", torch.ones(1))
    model.register_buffer("positions", torch.arange(3))
    return model


def test_a_tensor_is_the_models_own_under_each_of_its_names() -> None:
    model = tied()
    store = ResidentWeights(model)
    assert store.model is model
    for name in ("embedding.weight", "head.weight"):
        assert store.tensor(name) is model.embedding.weight
    assert store.tensor("norm.scale") is model.norm.scale
    assert store.tensor("positions") is model.positions


def test_a_tensor_that_was_replaced_since_is_the_new_one() -> None:
    """As vLLM does when it processes weights."""
    model = tied()
    store = ResidentWeights(model)
    store.tensor("embedding.weight")
    model.embedding.weight = nn.Parameter(torch.zeros(2))
    assert store.tensor("embedding.weight") is model.embedding.weight


@pytest.mark.parametrize("name", ["head.bias", "head.none", "none"])
def test_what_is_not_there_is_named(name: str) -> None:
    with pytest.raises(KeyError, match=name):
        ResidentWeights(tied()).tensor(name)


def adapted() -> tuple[nn.Module, nn.Linear]:
    """Return a model as vLLM makes it with adapters, and its own layer in there."""
    model, wrapper, layer = nn.Module(), BaseLayerWithLoRA(), nn.Linear(2, 2, bias=False)
    wrapper.base_layer = layer
    model.mlp = nn.Module()
    model.mlp.down_proj = wrapper
    return model, layer


def test_layers_around_which_vllm_puts_others_keep_their_names() -> None:
    model, layer = adapted()
    assert list(layers_of(model)) == ["", "mlp", "mlp.down_proj"]
    assert layers_of(model)["mlp.down_proj"] is layer
    assert ResidentWeights(model).tensor("mlp.down_proj.weight") is layer.weight
