"""FP8 layers of which engines keep a part each: bytes and outputs beside those of whole models."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm.model_executor.kernels.linear as linear_kernels
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.kernels.linear.scaled_mm.deep_gemm import DeepGemmFp8BlockScaledMMKernel
from vllm.model_executor.kernels.linear.scaled_mm.triton import TritonFp8BlockScaledMMKernel
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.platforms import PlatformEnum

from shoal.policies.values.layouts import Layout
from shoal.runtime.engine.kernels import fp8_methods
from shoal.runtime.engine.weights.rules.shards import Shard, UnviewableWeights
from shoal.runtime.engine.weights.sharing import shared_layers
from shoal.runtime.engine.weights.sharing.filling import Filling
from shoal.runtime.engine.weights.sharing.pages import HostPages
from shoal.runtime.engine.weights.store import ResidentWeights
from shoal.runtime.engine.weights.view_loader import view_weights
from tests.depth import DEEP, among, skip_unless_deep
from tests.runtime.engine.fp8_formats import (
    BLOCK,
    BLOCK_WISE,
    FORMATS,
    PackedKernel,
    ReferenceBlockKernel,
    Tensors,
    checkpoint,
    compressed_tensors,
    load_part,
    on_cpus,
    pick_for_blocks,
)
from tests.runtime.engine.one_rank import tensor_parallel
from tests.runtime.engine.weights.sharing.sharing_engines import (
    BY_HEADS,
    ENGINES,
    HEADS,
    KV_HEADS,
    Decoder,
    Kind,
    Model,
    SharingEngine,
    Sizes,
    Weights,
    close_all,
    node,
    on_cpu,
    on_simulated_gpu,
    pipeline_outputs,
)
from tests.runtime.engine.weights.sharing.simulated_cuda import simulate_streams

SIZES = Sizes(3 * BLOCK, 4 * BLOCK)
SECTIONS = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
"""Of ``qkv_proj``: heads."""
LOADED = [name for name in FORMATS if "online" not in name]
DIFFERENT = among(
    [
        *("fp8 per tensor, static", "fp8 block-wise"),
        *("compressed-tensors per tensor, dynamic", "compressed-tensors per channel"),
    ],
    *("fp8 per tensor, dynamic", "compressed-tensors per tensor, static"),
    "compressed-tensors block-wise",
)
"""Formats of all kinds of scales, and of both libraries: outputs by each take a second or two."""
SHARES = among([4], 2)
COMPUTED = [
    *((2, on_cpu, name) for name in DIFFERENT),
    *((4, on_simulated_gpu, name) for name in (DIFFERENT if DEEP else DIFFERENT[1::2])),
]
"""How many engines share, on which device, and the format."""
PER_TENSOR = [name for name in LOADED if "tensor," in name]


@pytest.fixture(autouse=True)
def cpu() -> Iterator[pytest.MonkeyPatch]:
    with on_cpus() as patch:
        yield patch
    close_all()


def weights(name: str, change: Callable[[list[Tensors]], None] = lambda _: None) -> Weights:
    """Return random weights of a format; ``change`` may change gate's and up's."""

    def load(model: Model) -> None:
        draw = torch.Generator().manual_seed(5)
        for mlp in model.mlps:
            halves = checkpoint([(half, SIZES.inner, SIZES.hidden) for half in range(2)], draw)
            change(halves)
            for half, tensors in enumerate(halves):
                load_part(mlp.gate_up_proj, half, tensors, per_tensor=2)
            (tensors,) = checkpoint([(None, SIZES.hidden, SIZES.inner)], draw)
            load_part(mlp.down_proj, None, tensors, per_tensor=1)
            for layer in (mlp.gate_up_proj, mlp.down_proj):
                layer.quant_method.process_weights_after_loading(layer)

    return Weights(SIZES, load, FORMATS[name])


def decoder(name: str, head_size: int = 0) -> Weights:
    """Return the same with attention, of which engines share the projections.

    By default a part of the keys is as small as it may be: vLLM's CPU kernel is slow.
    """
    head_size = head_size or (BLOCK if name in BLOCK_WISE else 16)
    of_mlps = weights(name).load

    def load(model: Any) -> None:
        of_mlps(model)
        draw = torch.Generator().manual_seed(6)
        for block in model.blocks:
            qkv, output = block.attn.qkv_proj, block.attn.o_proj
            sections = [(key, heads * head_size, SIZES.hidden) for key, heads in SECTIONS.items()]
            for (key, *_), tensors in zip(sections, checkpoint(sections, draw), strict=True):
                load_part(qkv, key, tensors, per_tensor=3)
            (tensors,) = checkpoint([(None, SIZES.hidden, HEADS * head_size)], draw)
            load_part(output, None, tensors, per_tensor=1)
            for layer in (qkv, output):
                layer.quant_method.process_weights_after_loading(layer)

    model = partial(Decoder, head_size=head_size)
    return Weights(SIZES, load, FORMATS[name], model, BY_HEADS)


def by_parts(rows: torch.Tensor, share: int) -> torch.Tensor:
    """Return rows for queries, keys and values in the order in which engines keep them."""
    sizes = [rows.shape[0] * heads // sum(SECTIONS.values()) for heads in SECTIONS.values()]
    sections = [some.unflatten(0, (share, -1)) for some in rows.split(sizes)]
    return torch.cat(sections, dim=1).flatten(0, 1)


def matrix(layer: nn.Module) -> torch.Tensor:
    """Return a layer's weight, ``[outputs, inputs]``, as bytes."""
    transposed = layer.weight.shape != (layer.output_size, layer.input_size)
    assert layer.output_size != layer.input_size
    return (layer.weight.t() if transposed else layer.weight).view(torch.uint8)


def joined(pieces: Sequence[nn.Module], of: str) -> torch.Tensor:
    """Return the weight that pieces make together."""
    by_inputs = of in ("down_proj", "o_proj")
    return torch.cat([matrix(piece) for piece in pieces], 1 if by_inputs else 0)


def blocks(model: Any) -> list[Any]:
    """Return a ``Decoder``'s blocks."""
    return list(model.blocks)


# --- bytes ---


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", LOADED)
def test_what_is_kept_and_streamed_is_the_whole_layer(
    tmp_path: Path, name: str, share: int
) -> None:
    """Bit by bit, as vLLM has processed the whole weight: also where it quantises gate anew."""
    whole = weights(name).whole()
    for engine in node(tmp_path, share, weights=weights(name)):
        for number, (mlp, expected) in enumerate(zip(engine.dp.mlps, whole.mlps, strict=True)):
            engine.slots.use(1, number)
            for of in ("gate_up_proj", "down_proj"):
                found, stock = mlp.get_submodule(of), expected.get_submodule(of)
                assert torch.equal(joined(found.pieces, of), matrix(stock)), (number, of)
                scales = {k: v for k, v in stock.named_parameters() if "scale" in k}
                assert scales
                for key, scale in scales.items():
                    assert torch.equal(found.get_parameter(key), scale), (number, of, key)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", LOADED)
def test_what_is_kept_and_streamed_of_attention_is_the_whole_layer(
    tmp_path: Path, name: str, share: int
) -> None:
    whole = decoder(name).whole()
    for engine in node(tmp_path, share, weights=decoder(name)):
        for number, (block, expected) in enumerate(
            zip(blocks(engine.dp), blocks(whole), strict=True)
        ):
            engine.slots.use(1, number)
            found, stock = block.attn.qkv_proj, expected.attn.qkv_proj
            rows = joined(found.pieces, "qkv_proj")
            assert torch.equal(rows, by_parts(matrix(stock), share)), number
            for key, scale in stock.named_parameters():
                if "scale" in key:
                    ordered = by_parts(scale, share) if scale.numel() > 1 else scale
                    assert torch.equal(found.get_parameter(key), ordered), (number, key)
            found, stock = block.attn.o_proj, expected.attn.o_proj
            assert torch.equal(joined(found.pieces, "o_proj"), matrix(stock)), number


def test_a_slot_that_is_not_filled_is_not_the_layer(tmp_path: Path) -> None:
    name = "compressed-tensors per channel"
    whole = weights(name).whole()
    engine, *_ = node(tmp_path, 2, weights=weights(name))
    for copies in engine.slots.copies.values():
        copies[1].clear()
    engine.slots.use(1, 1)
    found = joined(engine.dp.mlps[1].down_proj.pieces, "down_proj")
    assert not torch.equal(found, matrix(whole.mlps[1].down_proj))


@pytest.mark.parametrize("of_one_weight", [False, True])
@pytest.mark.parametrize("name", PER_TENSOR)
def test_gate_and_up_get_one_scale_unless_they_are_one_weight(
    tmp_path: Path, name: str, of_one_weight: bool
) -> None:
    kept = []

    def one_weight(halves: list[Tensors]) -> None:
        if of_one_weight:  # vLLM finds the scale of up as it has made it: nothing is loaded for it
            halves[1]["weight_scale"].fill_(torch.finfo(torch.float32).min)
        kept.append([half["weight"].to(torch.float8_e4m3fn).view(torch.uint8) for half in halves])

    given = weights(name, one_weight)
    engine, *_ = node(tmp_path, 2, weights=given)
    engine.slots.use(1, 0)
    found = joined(engine.dp.mlps[0].gate_up_proj.pieces, "gate_up_proj")
    halves = found.view(ENGINES, 2, -1, SIZES.hidden)
    same = [
        torch.equal(halves[:, half].reshape(kept[0][half].shape), kept[0][half]) for half in (0, 1)
    ]
    assert same.count(True) == (2 if of_one_weight else 1), (
        "the half with the smaller scale changes"
    )


# --- outputs ---


@pytest.mark.parametrize(("share", "kind", "name"), COMPUTED)
def test_all_layouts_compute_what_they_do_with_whole_weights(
    tmp_path: Path, name: str, share: int, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate_streams(monkeypatch, [])
    engines = node(tmp_path, share, kind, weights(name))
    expected = expected_outputs(name)
    assert_right(engines, expected)
    for engine in engines[1:]:
        engine.be_whole()
    assert_right(engines, expected)
    for engine in engines[1:]:
        engine.mlps.be_shared()
    assert_right(engines, expected)


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize(("share", "kind", "name"), COMPUTED)
def test_all_layouts_compute_what_they_do_with_whole_attention(
    tmp_path: Path,
    name: str,
    share: int,
    kind: Kind,
    adapters: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With adapters, outputs of MLPs are in vLLM's order, too."""
    if adapters is (kind is on_cpu):
        skip_unless_deep()
    simulate_streams(monkeypatch, [])
    given = decoder(name)
    expected = expected_outputs(name, given)
    engines = node(tmp_path, share, kind, given._replace(adapters=adapters))
    assert_right(engines, expected)
    engines[1].be_whole()
    assert_right(engines, expected)


def test_heads_that_are_no_whole_blocks_of_scales_stay_on_every_engine(tmp_path: Path) -> None:
    """Two parts of four KV heads of 32 have 64 rows each, and a scale is for 128."""
    given = decoder("fp8 block-wise", BLOCK // 4)
    engine, *_ = node(tmp_path, 2, weights=given)
    assert not hasattr(blocks(engine.dp)[0].attn.qkv_proj, "pieces")
    for one, other in zip(engine.outputs(1), given.outputs(given.whole()), strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02 * float(other.abs().max()))


def test_attention_in_a_slot_that_is_not_filled_changes_what_is_computed(tmp_path: Path) -> None:
    given = decoder("compressed-tensors per channel")
    engines, expected = node(tmp_path, 2, weights=given), given.outputs(given.whole())
    for copies in engines[0].slots.copies.values():
        assert len(copies[1]) == 4, "a slot holds a layer's attention and its MLP"
        del copies[1][:2]
    close = [
        torch.allclose(one, other, rtol=0.02, atol=0.02 * float(other.abs().max()))
        for one, other in zip(engines[0].outputs(1), expected, strict=True)
    ]
    assert close == [*(True, True), *(False, True), *(True, True)] * 2


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", LOADED)
def test_pieces_add_up_to_what_the_whole_layer_computes(
    tmp_path: Path, name: str, share: int
) -> None:
    """In fp32, of the same input: ``gate_up_proj`` bit by bit, and ``down_proj`` as sums are."""
    torch.set_default_dtype(torch.float32)
    get_current_vllm_config().model_config.dtype = torch.float32
    whole, engines = weights(name).whole(), node(tmp_path, share, weights=weights(name))
    draw = torch.Generator().manual_seed(8)
    x, inner = (torch.randn(7, size, generator=draw) for size in SIZES)
    for engine in engines[:share]:
        for number, (mlp, expected) in enumerate(zip(engine.dp.mlps, whole.mlps, strict=True)):
            engine.slots.use(1, number)
            assert torch.equal(mlp.gate_up_proj(x)[0], expected.gate_up_proj(x)[0])
            one, other = mlp.down_proj(inner)[0], expected.down_proj(inner)[0]
            assert one.dtype == torch.float32
            assert (one - other).abs().max() < 1e-5 * other.std()


@pytest.fixture
def packed(cpu: pytest.MonkeyPatch) -> None:
    """vLLM picks a kernel that takes every weight for packed, as CUTLASS does."""
    cpu.setitem(linear_kernels._POSSIBLE_FP8_KERNELS, PlatformEnum.CPU, [PackedKernel])
    cpu.setitem(fp8_methods.INPUT_RANGE_KERNELS, PackedKernel, PackedKernel)


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("name", [name for name in DIFFERENT if name not in BLOCK_WISE])
def test_a_kernel_that_ignores_strides_gets_packed_pieces(tmp_path: Path, name: str) -> None:
    for number, given in enumerate((weights(name), decoder(name))):
        directory = tmp_path / str(number)
        directory.mkdir()
        assert_right(node(directory, 4, weights=given), expected_outputs(name, given))


@pytest.mark.parametrize("share", [2, 4])
@pytest.mark.parametrize("name", [name for name in LOADED if name in BLOCK_WISE])
def test_pieces_keep_the_kernel_where_ranges_of_inputs_have_another(
    tmp_path: Path, name: str, share: int, cpu: pytest.MonkeyPatch
) -> None:
    kernel = TritonFp8BlockScaledMMKernel
    cpu.setattr(kernel, "is_supported", ReferenceBlockKernel.is_supported)
    pick_for_blocks(cpu, ReferenceBlockKernel, kernel)
    assert_right(node(tmp_path, share, weights=weights(name)), expected_outputs(name))


Outputs = list[torch.Tensor]


def expected_outputs(name: str, given: Weights | None = None) -> dict[int, list[Outputs]]:
    """Return what each member of each layout computes on a node that shares nothing."""
    given = given or weights(name)
    whole = given.whole()
    found = {1: [given.outputs(whole)] * ENGINES}
    for tp in (2, 4):
        found[tp] = []
        for number in range(ENGINES):
            with tensor_parallel(number % tp, tp):
                member = given.model(given.config(views=True), sizes=SIZES)
                view_weights(member, ResidentWeights(whole), Layout(tp=tp), number % tp)
            found[tp].append(given.outputs(member))
    return found


def assert_right(engines: list[SharingEngine], expected: dict[int, list[Outputs]]) -> None:
    for tp, members in expected.items():
        found = [engine.outputs(tp) for engine in engines]
        for first in range(0, ENGINES, tp):
            assert_close(*(total(some[first : first + tp]) for some in (found, members)))


@pytest.mark.parametrize("name", DIFFERENT)
def test_stages_compute_what_layouts_without_stages_do(tmp_path: Path, name: str) -> None:
    given = decoder(name)
    engines, expected = node(tmp_path, 4, weights=given), expected_outputs(name, given)
    for tp in (1, 2):
        found = pipeline_outputs(engines[: 2 * tp], tp)
        assert_close([output.float() for output in found], total(expected[tp][:tp]))


def assert_close(ours: Outputs, theirs: Outputs) -> None:
    assert all(output.abs().max() > 0.1 for output in theirs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02 * float(other.abs().max()))


def total(members: Sequence[Outputs]) -> Outputs:
    return [torch.stack(parts).float().sum(0) for parts in zip(*members, strict=True)]


def test_parts_in_the_order_of_ranks_change_what_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "compressed-tensors per channel"
    engines, expected = node(tmp_path, 2, weights=weights(name)), expected_outputs(name)
    assert_right(engines, expected)
    monkeypatch.setattr(
        shared_layers.SharedLayers,
        "_within",
        lambda mlps, tp, _: Shard(mlps._engine % tp % 2, tp // 2),
    )
    with pytest.raises(AssertionError):
        assert_right(engines, {4: expected[4]})


def test_a_model_may_have_mlps_that_are_not_quantised_between_others(tmp_path: Path) -> None:
    def some() -> QuantizationConfig:
        config = compressed_tensors("channel")
        config.ignore = [f"mlps.1.{part}" for part in ("gate_proj", "up_proj", "down_proj")]
        return config

    given = weights("compressed-tensors per channel")._replace(inner=some)
    whole, engines = given.whole(), node(tmp_path, 2, weights=given)
    expected = given.outputs(whole)
    assert not hasattr(engines[0].dp.mlps[1].down_proj, "pieces")
    for change in (lambda: None, engines[0].be_whole, engines[0].mlps.be_shared):
        change()
        for one, other in zip(engines[0].outputs(1), expected, strict=True):
            most = 0.02 * float(other.abs().max())
            torch.testing.assert_close(one, other, rtol=0.02, atol=most)


@pytest.mark.parametrize("name", LOADED)
def test_weights_may_be_made_up(tmp_path: Path, name: str) -> None:
    def nothing(model: Model) -> None:
        for mlp in model.mlps:
            for layer in (mlp.gate_up_proj, mlp.down_proj):
                for key, parameter in layer.named_parameters():
                    if "scale" in key:
                        parameter.data.fill_(0.01)
                layer.quant_method.process_weights_after_loading(layer)

    given = Weights(SIZES, nothing, FORMATS[name])
    engines = [SharingEngine(tmp_path, number, 2, weights=given) for number in range(2)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda engine: engine.mlps.complete(engine.dp, dummy=True), engines))
    engine = engines[0]
    engine.mlps.stream_in(engine.dp, Layout())
    assert all(output.isfinite().all() for output in engine.outputs(1))
    engine.be_whole()


# --- changes and restarts ---


def test_a_copy_that_differs_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, *_ = node(tmp_path, 2, weights=weights("fp8 block-wise"))
    fetch = Filling._fetch_rest

    def damaged(filling: Filling) -> int:
        fetched = fetch(filling)
        engine.lent[3][0] += 1
        return fetched

    monkeypatch.setattr(Filling, "_fetch_rest", damaged)
    with pytest.raises(ValueError, match=r"mlps.1.down_proj has another checksum"):
        engine.be_whole()


@pytest.mark.parametrize("name", ["fp8 per tensor, static", "compressed-tensors block-wise"])
def test_a_part_comes_back_from_peers_as_it_was_processed(tmp_path: Path, name: str) -> None:
    engines = node(tmp_path, 2, weights=weights(name))
    again = SharingEngine(tmp_path, 1, 2, weights=weights(name))
    again.complete()
    assert_right([engines[0], again, *engines[2:]], expected_outputs(name))


def test_scales_count_as_the_engines_own_and_pieces_do_not(tmp_path: Path) -> None:
    engine, *_ = node(tmp_path, 2, weights=weights("compressed-tensors per channel"))
    layer, scales = 3 * SIZES.hidden * SIZES.inner, 4 * (2 * SIZES.inner + SIZES.hidden)
    layers = len(engine.dp.mlps)
    sides = (2 * SIZES.inner * SIZES.hidden, SIZES.inner * SIZES.hidden)
    slots = 2 * sum(-(-side // 2 // HostPages.page) * HostPages.page for side in sides)
    kept = layers * (layer // 2 + 2 * 256)
    assert engine.store.resident_bytes == kept + slots + layers * scales


# --- refusals ---


def refusal(directory: Path, name: str, sizes: Sizes = SIZES, groups: int = ENGINES) -> str:
    given = Weights(sizes, lambda _: None, FORMATS[name])
    with pytest.raises(UnviewableWeights) as caught:
        SharingEngine(directory, 0, 2, groups, weights=given)
    return str(caught.value)


@pytest.mark.parametrize("name", [name for name in FORMATS if "online" in name])
def test_weights_that_are_quantised_as_they_are_loaded_are_refused(
    tmp_path: Path, name: str
) -> None:
    assert refusal(tmp_path, name).endswith("weights cannot be shared; FP8 checkpoints can")


def test_sizes_that_vllm_would_pad_are_refused(tmp_path: Path) -> None:
    found = refusal(tmp_path, "compressed-tensors per channel", Sizes(256, 32))
    assert found == "mlps.0.gate_up_proj: FP8 weights of 8 rows or columns would be padded"


def test_parts_that_cut_through_blocks_are_refused(tmp_path: Path) -> None:
    given = weights("fp8 block-wise")
    with pytest.raises(UnviewableWeights, match=r"mlps.0.gate_up_proj: .* do not make 8 groups"):
        SharingEngine(tmp_path, 0, 2, groups=8, weights=given)


def test_deep_gemm_is_refused_with_what_to_do(tmp_path: Path, cpu: pytest.MonkeyPatch) -> None:
    cpu.setattr(DeepGemmFp8BlockScaledMMKernel, "is_supported", ReferenceBlockKernel.is_supported)
    cpu.setattr(DeepGemmFp8BlockScaledMMKernel, "can_implement", lambda _config: (True, None))
    pick_for_blocks(cpu, DeepGemmFp8BlockScaledMMKernel, TritonFp8BlockScaledMMKernel)
    assert "with VLLM_USE_DEEP_GEMM=0 vLLM takes another kernel" in refusal(
        tmp_path, "fp8 block-wise"
    )


def test_a_kernel_that_moves_the_weight_is_refused(tmp_path: Path, cpu: pytest.MonkeyPatch) -> None:
    class Moving(ReferenceBlockKernel):
        def process_weights_after_loading(self, layer: Any) -> None:
            layer.weight = nn.Parameter(layer.weight.data.clone(), requires_grad=False)

    pick_for_blocks(cpu, Moving, Moving)
    with pytest.raises(UnviewableWeights, match=r"mlps.0.gate_up_proj: Moving repacks FP8"):
        SharingEngine(tmp_path, 0, 2, weights=weights("fp8 block-wise"))
