"""MLPs of which engines keep a part each, held against the whole model."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from shoal.runtime.engine.weights.rules.shards import UnviewableWeights
from shoal.runtime.engine.weights.shared_weights import SharedWeights
from shoal.runtime.engine.weights.sharing import filling
from shoal.runtime.engine.weights.sharing.filling import Filling, Part
from shoal.runtime.engine.weights.sharing.nested_order import Heads, nested_shard
from shoal.runtime.engine.weights.sharing.pages import HostPages
from shoal.runtime.engine.weights.sharing.shared_layers import SharedLayers
from shoal.runtime.engine.weights.sharing.shared_weight import Degree, SharedWeight
from shoal.runtime.engine.weights.sharing.slots import Copy, HostCopier, WeightSlots, stream_by
from shoal.runtime.engine.weights.sharing.whole_weights import WholeWeights
from shoal.runtime.engine.weights.store import ResidentWeights
from shoal.runtime.engine.weights.view_loader import arrange_weights
from tests.runtime.engine.one_rank import tensor_parallel
from tests.runtime.engine.weights.sharing.sharing_engines import (
    BY_HEADS,
    DECODER,
    ENGINES,
    HEAD_SIZE,
    HEADS,
    KV_HEADS,
    LAYERS,
    PLAIN,
    STAGES,
    UNQUANTISED,
    Kind,
    Model,
    SharingEngine,
    Weights,
    close_all,
    load,
    node,
    on_cpu,
    on_simulated_gpu,
    pipeline_outputs,
)
from tests.runtime.engine.weights.sharing.simulated_cuda import simulate_streams

HIDDEN, INNER = PLAIN
CHECKSUMS = 2 * LAYERS * 256
"""Bytes by which what an engine keeps is larger for its checksums."""
PAGE = HostPages.page
SLOTS = {2: 2 * (3 + 2) * PAGE, 4: 2 * (6 + 3) * PAGE}
"""Bytes of both slots, by how many engines share weights: two need no room for their own part."""
LONG_SECONDS = 60.0


@pytest.fixture(autouse=True)
def config() -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        yield
    close_all()


@pytest.fixture
def stock() -> list[torch.Tensor]:
    """Return what the whole model computes, with its rows grouped as at any share."""
    return UNQUANTISED.outputs(UNQUANTISED.whole())


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        (on_cpu, UNQUANTISED),
        (on_simulated_gpu, UNQUANTISED),
        (on_simulated_gpu, DECODER),
        (on_simulated_gpu, DECODER._replace(adapters=True)),
    ],
    ids=["on_cpu", "on_simulated_gpu", "with attention", "with adapters"],
)
@pytest.mark.parametrize("share", [2, 4])
def test_all_layouts_compute_what_the_whole_model_does(
    tmp_path: Path, share: int, kind: Kind, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate_streams(monkeypatch, [])
    engines, stock = node(tmp_path, share, kind, weights), weights.outputs(weights.whole())
    assert_right(engines, stock)
    for whole in (engines[:1], engines, engines[1:]):  # others share weights beside them
        for engine in whole:
            engine.be_whole()
        assert_right(engines, stock)
        for engine in whole:
            engine.mlps.be_shared()
        assert_right(engines, stock)


def test_an_adapter_is_divided_as_the_parts_that_members_compute(tmp_path: Path) -> None:
    """By the ``tp_rank`` of a layer, vLLM's layer around it takes its part of an adapter."""
    for engine in node(tmp_path, 2, on_cpu, DECODER._replace(adapters=True)):
        block = engine.member(4).blocks[0]
        place = nested_shard(engine.number, 4)
        assert {layer.tp_rank for layer in (block.mlp.gate_up_proj, block.mlp.down_proj)} == {place}
        place = BY_HEADS.order(engine.number, 4)
        assert {layer.tp_rank for layer in (block.attn.qkv_proj, block.attn.o_proj)} == {place}


def assert_right(engines: list[SharingEngine], stock: list[torch.Tensor]) -> None:
    for engine in engines:
        assert all(map(is_close, engine.outputs(1), stock))
    for tp in (1, 2):
        for first in range(0, ENGINES, 2 * tp):
            found = pipeline_outputs(engines[first : first + 2 * tp], tp)
            assert all(map(is_close, found, stock)), "a pipeline"
    for tp in (2, 4):
        for first in range(0, ENGINES, tp):
            members = [engine.outputs(tp) for engine in engines[first : first + tp]]
            sums = [torch.stack(parts).sum(0) for parts in zip(*members, strict=True)]
            assert all(map(is_close, sums, stock))
    for engine in engines:
        assert all(map(is_close, engine.outputs(1), stock)), "after other layouts"


def is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("share", [2, 4])
def test_an_engine_keeps_a_part_and_two_slots(tmp_path: Path, share: int) -> None:
    engine = node(tmp_path, share)[1]
    layer = 3 * HIDDEN * INNER * 4
    assert engine.store.resident_bytes == LAYERS * layer // share + SLOTS[share] + CHECKSUMS
    copied = [copy.source for of in engine.slots.copies[1].values() for copy in of]
    assert sum(source.nbytes for source in copied) == LAYERS * layer * (share - 1) // share
    # The addresses of each layer, behind which slots are, count as well.
    peers = (share - 1) * (LAYERS * layer // share + CHECKSUMS)
    assert engine.mlps.borrowed_bytes == peers + LAYERS * SLOTS[share] // 2
    memory = engine.mlps.kept.own.untyped_storage().data_ptr()
    storages = {p.untyped_storage().data_ptr() for p in engine.member(4).parameters()}
    assert storages == {memory}, "a wider layout has nothing of its own"


def test_made_up_weights_leave_slots_as_they_are(tmp_path: Path) -> None:
    engine = SharingEngine(tmp_path, 0, 4)
    DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(engine.dp, None)
    slots = [p for name, p in engine.dp.named_parameters() if engine.mlps.has(name)]
    assert len(slots) == 2 * LAYERS
    assert not any(slot.any() for slot in slots)


def test_an_engine_with_whole_weights_streams_nothing(
    tmp_path: Path, stock: list[torch.Tensor]
) -> None:
    engine, *_ = node(tmp_path, 2)
    layer = 3 * HIDDEN * INNER * 4
    shared = LAYERS * layer // 2 + SLOTS[2] + CHECKSUMS
    assert engine.store.resident_bytes == shared
    copy = engine.mlps.fill_whole(engine.lent)
    copy()
    assert engine.store.resident_bytes == shared, "nothing uses the copies yet"
    engine.mlps.be_whole()
    half_pages = LAYERS * PAGE // 2
    assert engine.store.resident_bytes == shared + LAYERS * layer // 2 + half_pages
    engine.slots.copier = None  # type: ignore[assignment]  # nobody asks it for anything
    assert all(map(is_close, engine.outputs(1), stock))
    engine.slots.copier = HostCopier()
    assert any(memory.any() for memory in engine.lent)
    engine.mlps.be_shared()
    assert engine.store.resident_bytes == shared
    assert all(map(is_close, engine.outputs(1), stock))
    assert not any(memory.any() for memory in engine.lent), "KV gets zeros back"


@pytest.mark.parametrize(
    ("share", "kind", "weights"),
    [
        (2, on_cpu, DECODER),
        (4, on_simulated_gpu, UNQUANTISED),
    ],
)
def test_an_engine_with_the_layers_of_its_stage_streams_only_others(
    tmp_path: Path, share: int, kind: Kind, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate_streams(monkeypatch, [])
    engines, stock = node(tmp_path, share, kind, weights), weights.outputs(weights.whole())
    for stages in (engines[:1], engines):
        for engine in stages:
            shared = engine.store.resident_bytes
            engine.be_whole(2)
            taken = sum(engine.mlps.whole.moving_bytes(2))
            assert engine.store.resident_bytes == shared + taken
            assert 0 < taken < sum(engine.mlps.whole.moving_bytes())
        assert_right(engines, stock)
        if stages == engines:
            assert_only_others_are_streamed(engines)
        for engine in stages:
            engine.mlps.be_shared()
            assert engine.store.resident_bytes == shared
        assert_right(engines, stock)


def assert_only_others_are_streamed(engines: list[SharingEngine]) -> None:
    for engine in engines:
        own, copier = engine.mlps.whole.stages[2], engine.slots.copier
        engine.slots.settle()
        started: list[Sequence[Copy]] = []
        recorder = SimpleNamespace(start=started.append, wait=lambda _: None)
        engine.slots.copier = recorder  # type: ignore[assignment]
        engine.outputs(1, 2)
        assert started == [], "the pipeline"
        engine.outputs(1)
        layers = {id(some): layer for layer, some in engine.slots.copies[1].items()}
        streamed = {layers[id(some)] for some in started}
        assert streamed == set(layers.values()) - own
        assert streamed
        engine.slots.settle()
        engine.slots.copier = copier


def test_a_stage_that_has_the_memory_of_another_layer_changes_what_is_computed(
    tmp_path: Path, stock: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: the first stage's two layers change places."""
    engine, *_ = node(tmp_path, 2)
    parts = WholeWeights._parts

    def exchanged(whole: WholeWeights, kept: dict[int, torch.Tensor]) -> dict[int, list[Part]]:
        found = parts(whole, kept)
        one, other = ([part.target for part in found[layer]] for layer in (0, 1))
        targets = {0: other, 1: one}
        return {
            layer: [
                part._replace(target=target)
                for part, target in zip(found[layer], targets[layer], strict=True)
            ]
            for layer in found
        }

    monkeypatch.setattr(WholeWeights, "_parts", exchanged)
    engine.be_whole(2)
    found = engine.outputs(1)
    right = [is_close(one, other) for one, other in zip(found, stock, strict=True)]
    assert right[:LAYERS] == [False, False, True]


def test_a_weight_whose_memory_was_not_exchanged_changes_what_is_computed(
    tmp_path: Path, stock: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, *_ = node(tmp_path, 2)
    put = engine.pages.put
    monkeypatch.setattr(engine.pages, "put", lambda exchanges: put(exchanges[1:]))
    engine.be_whole()
    assert not is_close(engine.outputs(1)[0], stock[0])
    assert all(map(is_close, engine.outputs(1)[1:3], stock[1:3]))


def test_copies_that_are_given_up_change_nothing(tmp_path: Path, stock: list[torch.Tensor]) -> None:
    engine, *_ = node(tmp_path, 2)
    engine.mlps.fill_whole(engine.lent)()
    engine.mlps.be_shared()
    assert not any(memory.any() for memory in engine.lent)
    assert all(map(is_close, engine.outputs(1), stock))
    with pytest.raises(AssertionError, match="there are no copies"):
        engine.mlps.be_whole()


@pytest.mark.parametrize("kind", [on_cpu, on_simulated_gpu])
@pytest.mark.parametrize("share", [2, 4])
def test_steps_that_stream_make_the_weights_whole(
    tmp_path: Path,
    stock: list[torch.Tensor],
    share: int,
    kind: Kind,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulate_streams(monkeypatch, [])
    for engine in node(tmp_path, share, kind)[:share]:
        engine.mlps.whole.patience = LONG_SECONDS
        copy = engine.mlps.fill_whole(engine.lent)
        with ThreadPoolExecutor(1) as threads:
            filled = threads.submit(copy)
            assert all(map(is_close, engine.outputs(1), stock)), "steps go on meanwhile"
            assert filled.result()[:2] == (LAYERS, 0)
        engine.mlps.be_whole()
        assert all(map(is_close, engine.outputs(1), stock))


def test_what_no_step_streams_is_copied_from_where_it_is_kept(
    tmp_path: Path, stock: list[torch.Tensor]
) -> None:
    engine, *_ = node(tmp_path, 4)
    engine.member(2)
    copy = engine.mlps.fill_whole(engine.lent)
    engine.slots.use(1, 1)
    engine.slots.use(2, 0)  # of which a slot has a half only
    assert copy()[:2] == (1, LAYERS - 1)
    engine.mlps.be_whole()
    assert all(map(is_close, engine.outputs(1), stock))


@pytest.mark.parametrize("in_thread", [False, True], ids=["before", "while it waits"])
def test_nothing_is_copied_into_memory_that_kv_has_back(tmp_path: Path, in_thread: bool) -> None:
    engine, *_ = node(tmp_path, 2)
    engine.mlps.whole.patience = LONG_SECONDS
    copy = engine.mlps.fill_whole(engine.lent)
    with ThreadPoolExecutor(1) as threads:
        ended = threads.submit(copy) if in_thread else None
        engine.slots.use(1, 0)
        engine.mlps.be_shared()
        with pytest.raises(ValueError, match="has been given up"):
            copy() if ended is None else ended.result()
    engine.outputs(1)
    assert not any(memory.any() for memory in engine.lent)


def test_a_slot_that_does_not_hold_its_layer_is_noticed(tmp_path: Path) -> None:
    engine, *_ = node(tmp_path, 2)
    for copies in engine.slots.copies.values():
        copies[1].clear()
    copy = engine.mlps.fill_whole(engine.lent)
    engine.outputs(1)
    with pytest.raises(ValueError, match=r"mlps.1.gate_up_proj has another checksum"):
        copy()


def test_copies_that_differ_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stock: list[torch.Tensor]
) -> None:
    engine, *_ = node(tmp_path, 2)
    fetch = Filling._fetch_rest

    def damaged(copies: Filling) -> int:
        fetched = fetch(copies)
        for memory in engine.lent:
            memory.copy_(memory.roll(4))
        return fetched

    monkeypatch.setattr(Filling, "_fetch_rest", damaged)
    with pytest.raises(ValueError, match=r"mlps.0.gate_up_proj has another checksum"):
        engine.be_whole()
    monkeypatch.setattr(filling, "_differs", lambda _: torch.tensor(False))
    engine.be_whole()
    monkeypatch.undo()
    found = engine.outputs(1)
    assert not any(map(is_close, found, stock)), "the comparison is what keeps them out"


def test_what_a_peer_has_damaged_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = SharedWeight.keep_checksum

    def damaged(weight: SharedWeight, memory: torch.Tensor) -> None:
        keep(weight, memory)
        weight.bytes_in(memory)[-1] += 1

    monkeypatch.setattr(SharedWeight, "keep_checksum", damaged)
    with pytest.raises(ValueError, match=r"mlps.0.gate_up_proj has another checksum"):
        node(tmp_path, 2)


@pytest.mark.parametrize("kind", [on_cpu, on_simulated_gpu])
@pytest.mark.parametrize(("share", "pages"), [(2, [3, 2]), (4, [6, 3])])
def test_only_the_other_engines_part_is_copied_where_dp_is_all_that_streams(
    tmp_path: Path, kind: Kind, share: int, pages: list[int]
) -> None:
    for number in range(share):
        whole = SharingEngine(tmp_path, number, share, kind=kind).mlps.whole
        assert whole.moving_bytes() == [PAGE * count for count in pages] * LAYERS


def test_a_part_comes_back_from_peers_without_being_loaded(
    tmp_path: Path, stock: list[torch.Tensor]
) -> None:
    assert not SharingEngine(tmp_path, 1, 2).mlps.kept.is_kept()
    engines = node(tmp_path, 2)
    again = SharingEngine(tmp_path, 1, 2)
    assert again.mlps.kept.is_kept()
    again.complete()
    files = [os.fstat(engine.mlps.kept.file).st_ino for engine in (engines[1], again)]
    assert files[0] == files[1]
    assert all(map(is_close, again.outputs(1), stock))
    for engine in (engines[0], again):
        engine.be_whole()
        assert all(map(is_close, engine.outputs(1), stock)), "checksums are kept, too"


def test_slots_that_are_not_filled_change_what_is_computed(
    tmp_path: Path, stock: list[torch.Tensor]
) -> None:
    engine = node(tmp_path, 2)[0]
    for copies in engine.slots.copies.values():
        copies[1].clear()
    assert [is_close(*pair) for pair in zip(engine.outputs(1), stock, strict=True)] == [
        *(True, False, True),
        *(True, False, True),
    ]


def test_a_stage_streams_its_own_layers_only(tmp_path: Path) -> None:
    for engine in node(tmp_path, 2, weights=DECODER)[:2]:
        streamed: set[int] = set()
        fill = engine.slots._fill

        def noting(tp: int, layer: int, streamed: Any = streamed, fill: Any = fill) -> Any:
            streamed.add(layer)
            return fill(tp, layer)

        engine.slots._fill = noting  # type: ignore[method-assign]
        engine.outputs(1, 2)
        assert streamed == set(STAGES[engine.number])


def test_a_stages_layer_that_is_not_in_its_slot_changes_what_is_computed(tmp_path: Path) -> None:
    engine, stock = node(tmp_path, 2, weights=DECODER)[0], DECODER.outputs(DECODER.whole())
    stage = engine.member(1, 2)
    for copies in engine.slots.copies.values():
        copies[1].clear()
    stream_by(engine.slots)
    found, half = DECODER.outputs(stage), len(stock) // 2
    of_stage = [*stock[: 2 * len(STAGES[0])], *stock[half : half + 2 * len(STAGES[0])]]
    right = [is_close(*pair) for pair in zip(found, of_stage, strict=True)]
    assert right == [True, True, False, False] * 2, "attention and MLP of the layer"


def test_attention_in_a_slot_that_is_not_filled_changes_what_is_computed(tmp_path: Path) -> None:
    engine, expected = node(tmp_path, 2, weights=DECODER)[0], DECODER.outputs(DECODER.whole())
    for copies in engine.slots.copies.values():
        assert len(copies[1]) == 4, "a slot holds a layer's attention and its MLP"
        del copies[1][:2]
    found = [is_close(*pair) for pair in zip(engine.outputs(1), expected, strict=True)]
    assert found == [*(True, True), *(False, True), *(True, True)] * 2


def test_an_engine_has_a_part_of_attention_and_two_slots(tmp_path: Path) -> None:
    engine = node(tmp_path, 2, weights=DECODER)[1]
    rows = [2 * INNER, INNER, (HEADS + 2 * KV_HEADS) * HEAD_SIZE, HEADS * HEAD_SIZE]
    layer, biases = sum(rows) * HIDDEN * 4, LAYERS * (HEADS + 2 * KV_HEADS) * HEAD_SIZE * 4
    slots = 2 * sum(-(-count * HIDDEN * 2 // PAGE) * PAGE for count in rows)
    kept = LAYERS * layer // 2 + slots + 2 * CHECKSUMS
    assert engine.store.resident_bytes == kept + biases


def test_heads_in_the_order_of_ranks_are_refused(tmp_path: Path) -> None:
    heads = Heads(KV_HEADS, lambda place, _: place)
    engines = node(tmp_path, 2, weights=DECODER._replace(heads=heads))
    engines[0].member(4)
    with pytest.raises(UnviewableWeights, match="engine 1 does not keep its part of TP-4"):
        engines[1].member(4)


def on_one_cpu(directory: Path) -> SharedLayers:
    memory, copier, pages = on_cpu()
    return SharedLayers(0, Degree(2, 2), directory, memory, WeightSlots(copier), pages)


def refusal(directory: Path, model: type[nn.Module] = SiluAndMul, *, bias: bool = False) -> str:
    mlps = on_one_cpu(directory)
    quant = SharedWeights(views=False)
    quant.shared = mlps.method
    with tensor_parallel(0, 1):
        made = Model(quant, model, bias=bias)
        load(made)
    arrange_weights(ResidentWeights(made), 2)
    with pytest.raises(UnviewableWeights) as caught:
        mlps.complete(made, dummy=False)
    return str(caught.value)


def test_mlps_that_cannot_be_shared_are_refused_by_name(tmp_path: Path) -> None:
    assert refusal(tmp_path, bias=True) == "mlps.0: MLPs with biases cannot be shared"
    assert refusal(tmp_path, GeluAndMul) == "mlps.0 (Mlp) cannot be shared"


def test_a_model_without_gated_mlps_is_refused(tmp_path: Path) -> None:
    mlps = on_one_cpu(tmp_path)
    with pytest.raises(UnviewableWeights, match="Linear has no gated MLPs or experts"):
        mlps.complete(nn.Linear(2, 2), dummy=False)


def test_what_was_not_loaded_is_noticed(tmp_path: Path) -> None:
    engine = SharingEngine(tmp_path, 0, 2)
    weight = engine.mlps._weights["mlps.1.gate_up_proj"]
    weight.missing = {1}
    with pytest.raises(UnviewableWeights, match=r"mlps.1.gate_up_proj: .* not all of it"):
        engine.mlps.complete(engine.dp, dummy=False)


def test_parts_that_are_not_equal_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnviewableWeights, match="32 inner units do not make 64 equal parts"):
        SharingEngine(tmp_path, 0, 2, groups=64)
