"""The layers that the benchmark of kernels measures: on a CPU, where libraries are PyTorch's."""

import pytest
import torch

from shoal.loadgen.bench import linear_layers
from shoal.loadgen.bench.linear_layers import DTYPES, STOCK, Layers, Shape, kinds
from shoal.policies.values.layouts import Layout

SHAPE = Shape("small", hidden=256, heads=4, kv_heads=2, intermediate=1024, head_dim=128)
TP2 = Layout(tp=2)
LAYERS = 8
WAYS = {
    "bf16": {"GEMMs, packed", "GEMMs, views", "GEMMs, paired", "op"},
    "fp8": {"torch._scaled_mm, packed", "torch._scaled_mm, views", "op"},
    "fp8-block": {"reference, packed", "reference, views", "op"},
}


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_layers, "DEVICE", "cpu")
    monkeypatch.setattr(linear_layers, "UNCACHED", 0)


def made(dtype: str) -> list[Layers]:
    return [make() for make in kinds(dtype, SHAPE, TP2)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_way_computes_the_layer(dtype: str) -> None:
    for layers in made(dtype):
        given = layers.input(5)
        expected = layers.reference(given)
        assert expected.shape == (5, layers.columns)
        ways = layers.ways(given)
        assert set(ways) == WAYS[dtype], layers.name
        for name, way in ways.items():
            error = (way(0).float() - expected).abs().max() / expected.abs().max()
            assert error < 0.02, (layers.name, name)
            assert not torch.equal(way(1), way(0)), "another layer has another weight"


def test_a_way_that_others_are_compared_with_is_there() -> None:
    for dtype in ("bf16", "fp8"):
        assert STOCK[dtype] in WAYS[dtype]
    assert STOCK["fp8-block"].split(",")[0] in {way.name for way in linear_layers.LIBRARIES}


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_are_dps_and_packed_weights_are_not(dtype: str) -> None:
    for layers in made(dtype):
        assert len(layers.views) == len(layers.packed) == LAYERS
        assert layers.packed[0].weights[0].is_contiguous()
        first, second = (ranges.weights[0].untyped_storage() for ranges in layers.views[:2])
        assert first.data_ptr() == second.data_ptr(), "of two members"
        packed = layers.packed[0].weights[0].untyped_storage()
        assert packed.data_ptr() != first.data_ptr()


def test_sizes_are_a_members() -> None:
    sizes = {layers.name: (layers.columns, layers.depth) for layers in made("fp8")}
    assert sizes == {"qkv": (512, 256), "o": (256, 256), "down": (256, 512)}
    assert [layers.name for layers in made("bf16")] == ["qkv"]
