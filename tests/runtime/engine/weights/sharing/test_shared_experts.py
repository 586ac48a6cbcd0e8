"""Experts of which engines keep a range each, held against a layer that has all."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config

from shoal.policies.values.layouts import DP, Layout
from shoal.runtime.engine.weights.rules.shards import UnviewableWeights
from shoal.runtime.engine.weights.shared_weights import SharedWeights
from shoal.runtime.engine.weights.sharing.nested_order import nested_shard
from shoal.runtime.engine.weights.sharing.pages import HostPages
from shoal.runtime.engine.weights.sharing.shared_experts import SharedExperts
from shoal.runtime.engine.weights.sharing.shared_weight import Degree, SharedWeight
from shoal.runtime.engine.weights.sharing.slots import HostCopier, WeightSlots, stream_by
from shoal.runtime.engine.weights.sharing.whole_weights import WholeWeights
from tests.runtime.engine.expert_layers import (
    EXPERTS,
    ExpertsLayer,
    expert_output,
    load_experts,
    make_experts,
    without_groups,
)

HIDDEN, INTERMEDIATE = 32, 64
LAYER = "experts.routed_experts"


@pytest.fixture(autouse=True)
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    without_groups(monkeypatch)
    with set_current_vllm_config(VllmConfig()):
        yield


class Keeper:
    """What ``SharedLayers`` is to ``SharedExperts``."""

    def __init__(self) -> None:
        self.weights: dict[str, SharedWeight] = {}

    @property
    def size(self) -> int:
        return sum(-(-weight.kept_bytes // 256) * 256 for weight in self.weights.values())

    def keep(self, name: str, weight: SharedWeight) -> None:
        self.weights[name] = weight

    def number_of(self, name: str) -> int:
        return 0

    def allocate(self) -> None:
        memory = torch.zeros(self.size, dtype=torch.uint8)
        for weight in self.weights.values():
            if weight.kept is None:
                weight.keep_in(memory, filled=False)


class Engine(NamedTuple):
    layer: ExpertsLayer
    shared: SharedExperts
    keeper: Keeper
    whole: WholeWeights


def engine(place: int, share: int, **options: Any) -> Engine:
    keeper, whole = Keeper(), WholeWeights(HostPages())
    shared = SharedExperts(place, Degree(share, 4), whole, keeper)
    quant = SharedWeights(views=False)
    quant.shared = shared.method
    layer = make_experts(quant, 0, 1, HIDDEN, INTERMEDIATE, **options)
    return Engine(layer, shared, keeper, whole)


def load(layer: ExpertsLayer, *, without: int | None = None) -> None:
    load_experts(layer, HIDDEN, INTERMEDIATE, without=without)


@pytest.fixture
def stock() -> ExpertsLayer:
    layer = make_experts(SharedWeights(views=False), 0, 1, HIDDEN, INTERMEDIATE)
    load(layer)
    layer.routed.quant_method.process_weights_after_loading(layer.routed)
    return layer


def output(layer: ExpertsLayer) -> torch.Tensor:
    return expert_output(layer, HIDDEN, tokens=7)


@pytest.mark.parametrize(("place", "share"), [(0, 2), (1, 2), (1, 4), (2, 4)])
def test_an_engine_keeps_its_experts_and_dp_computes_all(
    stock: ExpertsLayer, place: int, share: int
) -> None:
    layer, shared, keeper, whole = engine(place, share)
    load(layer)
    size, parts = EXPERTS // share, set(range(share)) - {nested_shard(place, share)}
    own = slice(nested_shard(place, share) * size, (nested_shard(place, share) + 1) * size)
    for key in ("w13_weight", "w2_weight"):
        weight, tensor = keeper.weights[f"{LAYER}.{key}"], getattr(stock.routed, key)
        assert weight.missing == set()
        assert torch.equal(weight.kept, tensor[own].flatten(1))
        for part in parts:
            others = tensor[part * size : (part + 1) * size].flatten(1)
            whole.slot(f"{LAYER}.{key}", part).copy_(others)
    shared.complete()
    slots = WeightSlots(HostCopier())
    slots.copies = {DP.tp: {0: []}}
    stream_by(slots)
    assert shared.stream_in({LAYER: layer.routed}, DP, set()) == {0}
    torch.testing.assert_close(output(layer), output(stock), rtol=1e-5, atol=1e-4)
    assert slots._filled[0] is not None, "the layer waits for its slot"
    for part in parts:
        whole.slot(f"{LAYER}.w2_weight", part).zero_()
    assert not torch.allclose(output(layer), output(stock), rtol=0.1, atol=0.1)


@pytest.mark.parametrize(("place", "share"), [(0, 2), (1, 2), (0, 4), (2, 4)])
def test_tensors_begin_where_there_is_memory(place: int, share: int) -> None:
    """On GPUs a Triton kernel fails if nothing is behind the address at which a tensor begins.

    Nothing is behind an engine's own part of the whole weight if two engines share weights.
    """
    layer, shared, keeper, whole = engine(place, share)
    load(layer)
    shared.complete()
    size, first = EXPERTS // share, nested_shard(place, share) * EXPERTS // share
    for key in ("w13_weight", "w2_weight"):
        others = whole.weight(f"{LAYER}.{key}")[size - first if share == 2 else 0 :]
        kept = keeper.weights[f"{LAYER}.{key}"].kept
        assert kept is not None
        tensors = [getattr(each, key) for each in (layer.routed, layer.routed.shoal_beside)]
        # Not of tensors: of one that fails, pytest would show what is in it.
        assert [each.data_ptr() for each in tensors] == [kept.data_ptr(), others.data_ptr()]
        assert [len(each) for each in tensors] == [size, size if share == 2 else EXPERTS]


@pytest.mark.parametrize(("share", "tp"), [(2, 2), (4, 4), (4, 2)])
@pytest.mark.parametrize("place", range(4))
def test_rules_are_given_the_experts_of_a_layout(share: int, tp: int, place: int) -> None:
    layer, shared, keeper, _ = engine(place % share, share)
    load(layer)
    shared.complete()
    part = shared.part(LAYER, tp)
    assert part is not None
    assert part.shoal_first == nested_shard(place % share % tp, tp) * EXPERTS // tp
    assert part.w13_weight.shape == (EXPERTS // tp, 2 * INTERMEDIATE, HIDDEN)
    kept = keeper.weights[f"{LAYER}.w13_weight"].kept
    assert kept is not None
    assert (part.w13_weight.data_ptr() == kept.data_ptr()) == (tp >= share)
    assert shared.part("gate", tp) is None


def test_a_layout_without_the_layer_streams_nothing() -> None:
    layer, shared, *_ = engine(0, 2)
    load(layer)
    shared.complete()
    assert shared.stream_in({}, Layout(pp=2), set()) == set()


def test_an_expert_that_was_not_loaded_is_noticed() -> None:
    layer, _, keeper, _ = engine(1, 2)
    load(layer, without=EXPERTS - 1)
    assert all(weight.missing for weight in keeper.weights.values())


def test_experts_with_biases_are_refused() -> None:
    with pytest.raises(UnviewableWeights, match=r"^experts: only experts without biases"):
        engine(0, 2, has_bias=True, activation="swigluoai")


def test_experts_that_make_no_equal_parts_are_refused() -> None:
    shared = SharedExperts(0, Degree(2, 16), WholeWeights(HostPages()), Keeper())
    quant = SharedWeights(views=False)
    quant.shared = shared.method
    with pytest.raises(UnviewableWeights, match="experts: 8 experts do not make 16 equal parts"):
        make_experts(quant, 0, 1, HIDDEN, INTERMEDIATE)
