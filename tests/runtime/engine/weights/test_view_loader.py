"""Views of the DP model's weights, held against vLLM's own sharding of the same checkpoint."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import vllm.model_executor.layers.linear as linear
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.lora.layers import MergedQKVParallelLinearWithLoRA, RowParallelLinearWithLoRA
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from shoal.policies.values.layouts import Layout
from shoal.runtime.engine.weights import view_loader
from shoal.runtime.engine.weights.rules.shards import UnviewableWeights
from shoal.runtime.engine.weights.shared_weights import SharedWeights
from shoal.runtime.engine.weights.store import ResidentWeights
from shoal.runtime.engine.weights.view_loader import (
    arrange_weights,
    load_owned,
    show_weights,
    view_weights,
)
from tests.runtime.engine.one_rank import ranks, tensor_parallel
from tests.runtime.engine.owned_bytes import owned_bytes

HIDDEN, INTERMEDIATE, VOCABULARY = 32, 64, 128
HEADS, HEAD_DIM = 8, 8
LARGEST = 4
"""Largest group of the node: what the DP rows are grouped for."""


@pytest.fixture(autouse=True)
def config() -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        yield


class Layer(nn.Module):
    """The linear and vocabulary layers of one decoder layer, as vLLM's model classes name them."""

    def __init__(self, quant_config: SharedWeights, kv_heads: int, *, bias: bool) -> None:
        super().__init__()
        options = {"quant_config": quant_config, "bias": bias}
        self.qkv_proj = QKVParallelLinear(HIDDEN, HEAD_DIM, HEADS, kv_heads, **options)
        self.o_proj = RowParallelLinear(HEADS * HEAD_DIM, HIDDEN, **options)
        self.gate_up_proj = MergedColumnParallelLinear(HIDDEN, [INTERMEDIATE] * 2, **options)
        self.act_fn = SiluAndMul()
        self.down_proj = RowParallelLinear(INTERMEDIATE, HIDDEN, **options)
        self.column = ColumnParallelLinear(HIDDEN, INTERMEDIATE, **options)
        self.router = ReplicatedLinear(HIDDEN, 4, **options)
        # As ``fused_qkv_a_proj`` of latent attention: fused, and whole on every rank.
        self.whole = MergedColumnParallelLinear(HIDDEN, [12, 4], disable_tp=True, **options)
        self.embed_tokens = VocabParallelEmbedding(VOCABULARY, HIDDEN, quant_config=quant_config)


def checkpoint(kv_heads: int) -> dict[str, list[tuple[object, int, int]]]:
    """Return each layer's logical parts: vLLM's shard id (None: not fused), rows and columns."""
    return {
        "qkv_proj": [
            ("q", HEADS * HEAD_DIM, HIDDEN),
            ("k", kv_heads * HEAD_DIM, HIDDEN),
            ("v", kv_heads * HEAD_DIM, HIDDEN),
        ],
        "o_proj": [(None, HIDDEN, HEADS * HEAD_DIM)],
        "gate_up_proj": [(0, INTERMEDIATE, HIDDEN), (1, INTERMEDIATE, HIDDEN)],
        "down_proj": [(None, HIDDEN, INTERMEDIATE)],
        "column": [(None, INTERMEDIATE, HIDDEN)],
        "router": [(None, 4, HIDDEN)],
        "whole": [(0, 12, HIDDEN), (1, 4, HIDDEN)],
        "embed_tokens": [(None, VOCABULARY, HIDDEN)],
    }


def load(layer: Layer, kv_heads: int) -> None:
    """Load the same random checkpoint through vLLM's own weight loaders, sharded or not."""
    draw = torch.Generator().manual_seed(5)
    for name, parts in checkpoint(kv_heads).items():
        module = getattr(layer, name)
        for shard, rows, columns in parts:
            where = () if shard is None else (shard,)
            weight = torch.randn(rows, columns, generator=draw)
            bias = torch.randn(rows, generator=draw)
            module.weight.weight_loader(module.weight, weight, *where)
            if getattr(module, "bias", None) is not None:
                module.bias.weight_loader(module.bias, bias, *where)


def stock(kv_heads: int, rank: int, degree: int, *, bias: bool = True) -> Layer:
    """Return what stock vLLM holds on one rank, with plain GEMMs."""
    with tensor_parallel(rank, degree):
        layer = Layer(SharedWeights(views=False), kv_heads, bias=bias)
        load(layer, kv_heads)
    return layer


def full(kv_heads: int, *, bias: bool = True) -> Layer:
    """Return the DP layer, loaded and grouped."""
    with tensor_parallel(0, 1):
        layer = Layer(SharedWeights(views=False), kv_heads, bias=bias)
        load(layer, kv_heads)
    arrange_weights(ResidentWeights(layer), LARGEST)
    return layer


def view(dp: Layer, kv_heads: int, rank: int, degree: int, *, bias: bool = True) -> Layer:
    """Return a layer of TP-``degree`` whose weights are views of ``dp``'s."""
    with tensor_parallel(rank, degree):
        layer = Layer(SharedWeights(views=True), kv_heads, bias=bias)
        view_weights(layer, ResidentWeights(dp), Layout(tp=degree), rank)
    return layer


# --- grouped gate_up ---


@pytest.mark.parametrize("bias", [False, True])
def test_the_grouped_dp_layer_computes_what_stock_computes(bias: bool) -> None:
    expected, dp = stock(4, 0, 1, bias=bias), full(4, bias=bias)
    x = torch.randn(5, HIDDEN)
    assert torch.equal(feed(dp, x), feed(expected, x))
    assert not torch.equal(dp.gate_up_proj.weight, expected.gate_up_proj.weight)


def feed(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """Return the input of ``down_proj``."""
    return layer.act_fn(layer.gate_up_proj(x)[0])


def test_a_node_without_groups_keeps_stock_rows() -> None:
    with tensor_parallel(0, 1):
        layer = Layer(SharedWeights(views=False), 4, bias=False)
        load(layer, 4)
    arrange_weights(ResidentWeights(layer), 1)
    assert torch.equal(layer.gate_up_proj.weight, stock(4, 0, 1).gate_up_proj.weight)
    assert isinstance(layer.act_fn, SiluAndMul)


# --- views ---


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize(("rank", "degree"), ranks(2, 4))
def test_the_parts_of_qkv_are_vllms_shards(rank: int, degree: int, kv_heads: int) -> None:
    """Also with fewer KV heads than members, where neighbours hold the same head."""
    expected, viewed = stock(kv_heads, rank, degree), view(full(kv_heads), kv_heads, rank, degree)
    parts = viewed.qkv_proj.parts
    assert torch.equal(torch.cat([part.weight for part in parts]), expected.qkv_proj.weight)
    assert torch.equal(torch.cat([part.bias for part in parts]), expected.qkv_proj.bias)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rank", "degree"), ranks(2, 4))
def test_every_column_parallel_layer_computes_what_stock_computes(
    rank: int, degree: int, bias: bool
) -> None:
    expected = stock(2, rank, degree, bias=bias)
    viewed = view(full(2, bias=bias), 2, rank, degree, bias=bias)
    x = torch.randn(5, HIDDEN)
    outputs: list[Callable[[Layer], torch.Tensor]] = [
        lambda layer: layer.qkv_proj(x)[0],
        lambda layer: feed(layer, x),
        lambda layer: layer.column(x)[0],
        lambda layer: layer.router(x)[0],
        lambda layer: layer.whole(x)[0],
    ]
    for output in outputs:
        torch.testing.assert_close(output(viewed), output(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["o_proj", "down_proj", "column", "router", "whole", "embed_tokens"]
)
@pytest.mark.parametrize(("rank", "degree"), ranks(2, 4))
def test_the_other_shards_are_vllms(rank: int, degree: int, name: str) -> None:
    expected, viewed = stock(2, rank, degree), view(full(2), 2, rank, degree)
    assert torch.equal(getattr(viewed, name).weight, getattr(expected, name).weight)
    bias = getattr(getattr(expected, name), "bias", None)
    if bias is not None:
        assert torch.equal(getattr(viewed, name).bias, bias)


@pytest.mark.parametrize(("rank", "degree"), ranks(2, 4))
def test_views_own_no_byte_and_lie_in_the_dp_layers_storages(rank: int, degree: int) -> None:
    dp = full(2)
    viewed = view(dp, 2, rank, degree)
    assert owned_bytes(viewed, dp) == 0
    storages = {p.untyped_storage().data_ptr() for p in dp.parameters()}
    assert {p.untyped_storage().data_ptr() for p in viewed.parameters()} <= storages
    parameters = sum(p.numel() for p in viewed.parameters())
    assert parameters > sum(p.numel() for p in dp.parameters()) // degree // 2


class Block(nn.Module):
    """A decoder layer whose attention and MLP are modules of their own."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        self.self_attn.qkv_proj, self.self_attn.o_proj = layer.qkv_proj, layer.o_proj
        self.mlp.gate_up_proj, self.mlp.act_fn = layer.gate_up_proj, layer.act_fn
        self.mlp.down_proj, self.mlp.column = layer.down_proj, layer.column


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize(("rank", "heads"), [(1, 2), (2, 1), (3, 0)])
def test_attention_may_take_another_shard_than_its_rank(
    rank: int, heads: int, kv_heads: int
) -> None:
    """Its heads are those of that shard, in qkv_proj and o_proj; all else is the rank's."""
    dp = Block(full(kv_heads))
    with tensor_parallel(rank, 4):
        viewed = Block(Layer(SharedWeights(views=True), kv_heads, bias=True))
        view_weights(viewed, ResidentWeights(dp), Layout(tp=4), rank, heads)
    attention, mlp = stock(kv_heads, heads, 4), stock(kv_heads, rank, 4)
    parts = viewed.self_attn.qkv_proj.parts
    assert torch.equal(torch.cat([part.weight for part in parts]), attention.qkv_proj.weight)
    assert torch.equal(torch.cat([part.bias for part in parts]), attention.qkv_proj.bias)
    assert torch.equal(viewed.self_attn.o_proj.weight, attention.o_proj.weight)
    for name in ("down_proj", "column"):
        assert torch.equal(getattr(viewed.mlp, name).weight, getattr(mlp, name).weight)
    assert owned_bytes(viewed, dp) == 0


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_adapters_are_divided_as_the_heads_are(kv_heads: int) -> None:
    """vLLM's layers around those of attention cut the part of an adapter by themselves."""
    dp = Block(full(kv_heads))
    with tensor_parallel(1, 4):
        viewed = Block(Layer(SharedWeights(views=True), kv_heads, bias=True))
        view_weights(viewed, ResidentWeights(dp), Layout(tp=4), 1, 2)
    show_weights(viewed)
    query, kv = HEADS * HEAD_DIM, kv_heads * HEAD_DIM
    parts = [torch.arange(size).unsqueeze(1) for size in (query, kv, kv)]
    found = MergedQKVParallelLinearWithLoRA(viewed.self_attn.qkv_proj).slice_lora_b(parts)
    own_kv, first = max(kv // 4, HEAD_DIM), 2 * kv // 4 // HEAD_DIM * HEAD_DIM
    expected = [torch.arange(2 * query // 4, 3 * query // 4), torch.arange(first, first + own_kv)]
    for part, rows in zip(found, [*expected, expected[1]], strict=True):
        assert torch.equal(part, rows.unsqueeze(1))
    for layer, heads in ((viewed.self_attn.o_proj, 2), (viewed.mlp.down_proj, 1)):
        adapted = RowParallelLinearWithLoRA(layer)
        columns = torch.arange(4 * adapted.input_size).unsqueeze(0)
        assert torch.equal(adapted.slice_lora_a(columns), columns.chunk(4, 1)[heads])


def test_owned_bytes_counts_what_is_not_shared() -> None:
    dp = full(2)
    viewed = view(dp, 2, 0, 2)
    viewed.router.weight = nn.Parameter(viewed.router.weight.clone())
    assert owned_bytes(viewed, dp) == 4 * 4 * HIDDEN
    assert owned_bytes(stock(2, 0, 1), dp) == sum(4 * p.numel() for p in dp.parameters())


def test_a_change_of_the_dp_weights_is_seen_through_every_view() -> None:
    dp = full(2)
    views = [view(dp, 2, rank, degree) for rank, degree in ranks(2, 4)]
    for tensor in dp.parameters():
        tensor.data.fill_(3.0)
    assert all((tensor == 3.0).all() for viewed in views for tensor in viewed.parameters())


class ElsewhereStore(ResidentWeights):
    """Full weights that are not the DP model's tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.tensors = {
            name: tensor.detach().clone()
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        }

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]


@pytest.mark.parametrize(("rank", "degree"), ranks(2, 4))
def test_all_tensors_are_where_the_store_has_them(rank: int, degree: int) -> None:
    """A layout needs the DP model for the sizes of its layers alone."""
    dp = full(2)
    store, expected = ElsewhereStore(dp), view(dp, 2, rank, degree)
    with tensor_parallel(rank, degree):
        viewed = Layer(SharedWeights(views=True), 2, bias=True)
        view_weights(viewed, store, Layout(tp=degree), rank)
    there = {tensor.untyped_storage().data_ptr() for tensor in store.tensors.values()}
    parameters = dict(viewed.named_parameters())
    assert {tensor.untyped_storage().data_ptr() for tensor in parameters.values()} <= there
    for name, tensor in expected.named_parameters():
        assert torch.equal(parameters[name], tensor)


# --- what cannot be viewed ---


def test_a_layer_that_only_the_group_has_is_named() -> None:
    dp = full(2)
    del dp.router
    with pytest.raises(UnviewableWeights, match=r"^router exists in TP-2 only$"):
        view(dp, 2, 0, 2)


def test_a_parameter_split_in_an_unknown_way_is_named() -> None:
    dp = full(2)
    dp.router.weight = nn.Parameter(torch.zeros(8, HIDDEN))
    with pytest.raises(UnviewableWeights, match=r"^router\.weight is split in a way"):
        view(dp, 2, 0, 2)


def test_a_linear_layer_of_an_unknown_kind_is_named() -> None:
    class OwnLinear(linear.LinearBase):  # type: ignore[misc]
        pass

    dp = full(2)
    with tensor_parallel(0, 2):
        layer = Layer(SharedWeights(views=True), 2, bias=False)
        layer.router = OwnLinear(HIDDEN, 4)
        with pytest.raises(UnviewableWeights, match=r"^router \(OwnLinear\) cannot be viewed$"):
            view_weights(layer, ResidentWeights(dp), Layout(tp=2), 0)


def test_a_tensor_left_without_bytes_is_named() -> None:
    dp = full(2)
    dp.router.weight = nn.Parameter(dp.router.weight.to("meta"))
    with pytest.raises(UnviewableWeights, match=r"^no bytes behind router\.weight$"):
        view(dp, 2, 0, 2)


# --- layers that a layout loads for itself ---


class Repacked(nn.Module):  # type: ignore[misc]
    """A layer that ``quantised_method`` has marked."""

    def __init__(self) -> None:
        super().__init__()
        self.shoal_owned = True
        self.qweight = nn.Parameter(torch.ones(4, 3, dtype=torch.int32), requires_grad=False)
        self.register_buffer("isa", torch.ones(2))


class Loader(BaseModelLoader):  # type: ignore[misc]
    """Remembers what it was to load."""

    def __init__(self) -> None:
        self.loaded: list[nn.Module] = []

    def download_model(self, model_config: Any) -> None:
        """Nothing to fetch."""

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Remember it."""
        self.loaded.append(model)


class Dummies(Loader, DummyModelLoader):  # type: ignore[misc]
    """Fills whatever it is given."""


@pytest.mark.parametrize("marked", [0, 2])
def test_a_checkpoint_is_read_again_only_for_layers_that_are_repacked(marked: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2), *(Repacked() for _ in range(marked)))
    loader, dummies = Loader(), Dummies()
    load_owned(loader, model, None)
    assert loader.loaded == ([model] if marked else [])
    load_owned(dummies, model, None)
    assert dummies.loaded == [*model[1:]], "tensors without bytes cannot be filled"
    assert view_loader.owned_bytes(model) == marked * (4 * 3 * 4 + 2 * 4)


def test_a_draft_model_counts_without_the_layers_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Embedding(8, 2))
    draft = nn.ModuleDict({"fc": nn.Linear(4, 2, bias=False), "embeddings": model[1]})
    assert view_loader.owned_bytes(model) == 0
    assert view_loader.owned_bytes(model, draft) == 4 * 8


def test_a_repacked_layer_stays_as_the_rank_loaded_it() -> None:
    full_model, own = nn.ModuleDict({"a": Repacked()}), nn.ModuleDict({"a": Repacked()})
    loaded = own["a"].qweight
    view_weights(own, ResidentWeights(full_model), Layout(tp=2), 1)
    assert own["a"].qweight is loaded
    with pytest.raises(UnviewableWeights, match="a is loaded in the order of the ranks"):
        view_weights(own, ResidentWeights(full_model), Layout(tp=2), 1, heads=0)
