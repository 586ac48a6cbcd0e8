"""Experts of which engines keep a range each, held against a layer that has all."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config

from shoal.policies.values.layouts import DP, Layout
from shoal.runtime.engine.kernels.mxfp4_experts import elements_of, in_rows, packed_experts
from shoal.runtime.engine.weights.rules.shards import UnviewableWeights
from shoal.runtime.engine.weights.shared_weights import SharedWeights
from shoal.runtime.engine.weights.sharing import slot_experts
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
from tests.runtime.engine.kernels.stand_in_packing import chooser, packed

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


GPT_OSS: dict[str, Any] = {"activation": "swigluoai", "has_bias": True}


def make(form: str, shared: SharedExperts | None = None) -> ExpertsLayer:
    """Return a layer of DP of one of ``FORMS``, of an engine that has all experts, or some."""
    inner = GptOssMxfp4Config() if form == "mxfp4" else None
    quant = SharedWeights(views=False, inner=inner)
    if shared is not None:
        quant.shared = shared.method
    options = {} if form == "plain" else GPT_OSS
    return make_experts(quant, 0, 1, HIDDEN, INTERMEDIATE, **options)


def engine(place: int, share: int, form: str = "plain") -> Engine:
    keeper, whole = Keeper(), WholeWeights(HostPages())
    shared = SharedExperts(place, Degree(share, 4), whole, keeper)
    return Engine(make(form, shared), shared, keeper, whole)


def load(layer: ExpertsLayer, *, without: int | None = None) -> None:
    load_experts(layer, HIDDEN, INTERMEDIATE, without=without)


def load_all_at_once(layer: ExpertsLayer, form: str) -> None:
    """Load a random checkpoint as vLLM's class of GPT-OSS does."""
    draw = torch.Generator().manual_seed(8)
    layer.gate.weight.data = torch.randn(EXPERTS, HIDDEN, generator=draw)
    for key, parameter in list(layer.routed.named_parameters()):
        loaded = torch.randn(EXPERTS, *parameter.shape[1:], generator=draw)
        if parameter.dtype == torch.uint8:
            least, most = (122, 126) if "scale" in key else (0, 256)
            loaded = torch.randint(least, most, loaded.shape, generator=draw).to(torch.uint8)
        if form == "mxfp4":
            load = parameter.weight_loader
            load(parameter, loaded, weight_name=key, shard_id=None, expert_id=None)
        else:
            parameter.copy_(loaded)


FORMS = {
    "plain": lambda layer: load(layer),
    "biases": lambda layer: load_all_at_once(layer, "biases"),
    "mxfp4": lambda layer: load_all_at_once(layer, "mxfp4"),
}


def stock_of(form: str) -> ExpertsLayer:
    layer = make(form)
    FORMS[form](layer)
    layer.routed.quant_method.process_weights_after_loading(layer.routed)
    return layer


def output(layer: ExpertsLayer) -> torch.Tensor:
    return expert_output(layer, HIDDEN, tokens=7)


@pytest.mark.parametrize(("place", "share"), [(0, 2), (1, 2), (1, 4), (2, 4)])
@pytest.mark.parametrize("form", FORMS)
def test_an_engine_keeps_its_experts_and_dp_computes_all(form: str, place: int, share: int) -> None:
    stock = stock_of(form)
    layer, shared, keeper, whole = engine(place, share, form)
    if form != "plain":
        layer.gate.weight.data = stock.gate.weight.data
    FORMS[form](layer)
    size, parts = EXPERTS // share, set(range(share)) - {nested_shard(place, share)}
    own = slice(nested_shard(place, share) * size, (nested_shard(place, share) + 1) * size)
    for key in dict(stock.routed.named_parameters()):
        weight, tensor = keeper.weights[f"{LAYER}.{key}"], getattr(stock.routed, key)
        assert weight.missing == set()
        assert weight.kept is not None
        assert torch.equal(weight.kept, tensor[own].flatten(1))
        for part in parts:
            others = tensor[part * size : (part + 1) * size].flatten(1)
            whole.slot(f"{LAYER}.{key}", part).copy_(others)
    shared.complete()
    slots = WeightSlots(HostCopier())
    slots.copies = {DP.tp: {0: []}}
    stream_by(slots)
    runner: Any = SimpleNamespace(forward=lambda *_, **__: output(layer))
    assert shared.stream_in({LAYER: layer.routed, "experts": runner}, DP, set()) == {0}
    assert slots._filled[0] is None
    found = runner.forward(hidden_states=torch.zeros(7, HIDDEN), router_logits=torch.zeros(7, 8))
    torch.testing.assert_close(found, output(stock), rtol=1e-5, atol=1e-4)
    assert slots._filled[0] is not None, "what vLLM's models call waits for the slot"
    for part in parts:
        for key in keeper.weights:
            if "w2_" in key:
                whole.slot(key, part).zero_()
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


def bytes_of(layer: Any) -> dict[str, torch.Tensor]:
    """Return what a layer's kernel gets, as it lies in memory."""
    return {key: elements_of(value) for key, value in packed_experts(layer).items()}


@pytest.mark.parametrize(("place", "share"), [(0, 2), (1, 2), (1, 4)])
def test_what_a_gpus_kernel_wants_is_kept_and_streamed(
    monkeypatch: pytest.MonkeyPatch, place: int, share: int
) -> None:
    """Its values are in an order of its own, inside of what is no tensor of torch's."""
    chooser(monkeypatch)(Mxfp4MoeBackend.TRITON, packed)
    stock = bytes_of(stock_of("mxfp4").routed)
    layer, shared, keeper, whole = engine(place, share, "mxfp4")
    load_all_at_once(layer, "mxfp4")
    shared.complete()
    size, own = EXPERTS // share, nested_shard(place, share)
    kept, beside = layer.routed, layer.routed.shoal_beside
    for key, tensor in bytes_of(kept).items():
        assert torch.equal(tensor, stock[key][own * size : (own + 1) * size])
        weight = keeper.weights[f"{LAYER}.{key}"]
        assert weight.kept is not None
        assert tensor.data_ptr() == weight.kept.data_ptr()
        for part in set(range(share)) - {own}:
            slot = in_rows(tensor, whole.slot(f"{LAYER}.{key}", part))
            slot.copy_(stock[key][part * size : (part + 1) * size])
    for key, tensor in bytes_of(beside).items():
        assert tensor.stride() == stock[key].stride()
        for expert, here in enumerate(beside._expert_map.tolist()):
            is_kept = expert // size == own
            assert is_kept == (here == -1)
            assert is_kept or torch.equal(tensor[here], stock[key][expert])
    assert [of.w2_weight.shape[0] for of in (kept, beside)] == [size, 4 if share == 2 else 8]
    found = shared.part(LAYER, share)
    assert found is not None
    assert bytes_of(found)["w13_weight"].data_ptr() == bytes_of(kept)["w13_weight"].data_ptr()


def test_made_up_experts_are_packed_like_others() -> None:
    layer, shared, keeper, _ = engine(1, 2, "mxfp4")
    keeper.allocate()
    shared.make_up(lambda tensor: tensor.fill_(3))
    assert all(weight.missing == set() for weight in keeper.weights.values())
    shared.complete()
    assert all(bool((tensor == 3).all()) for tensor in layer.routed.parameters())


def test_kernels_that_find_experts_by_the_rank_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slot_experts, "PACKED_BY_RANGES", ())
    with pytest.raises(
        UnviewableWeights, match=r"^experts: XPU, .* by its rank; --moe-backend marlin can share"
    ):
        engine(0, 2, "mxfp4")


def test_experts_that_make_no_equal_parts_are_refused() -> None:
    shared = SharedExperts(0, Degree(2, 16), WholeWeights(HostPages()), Keeper())
    quant = SharedWeights(views=False)
    quant.shared = shared.method
    with pytest.raises(UnviewableWeights, match="experts: 8 experts do not make 16 equal parts"):
        make_experts(quant, 0, 1, HIDDEN, INTERMEDIATE)
