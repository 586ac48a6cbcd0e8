"""What multiplies a layer: which candidates read it, and which is taken for how many tokens."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from vllm.model_executor.layers.quantization.utils import fp8_utils, w8a8_utils

from shoal.runtime.engine.kernels import library_gemms, linear_candidates, linear_tiles
from shoal.runtime.engine.kernels.library_gemms import Ranges
from shoal.runtime.engine.kernels.linear_candidates import (
    Format,
    choice,
    compiled_steps,
    format_of,
)
from shoal.runtime.engine.kernels.linear_tiles import ANY, BLOCK, Table, Tile
from tests.runtime.engine.kernels.fp8_layers import OnGpu, block_wise, input_range

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
QKV = Format(
    on_gpu=True,
    dtype=BF16,
    output=None,
    block=0,
    several=True,
    columns=3072,
    depth=4096,
    packed=True,
    packed_scales=True,
)
FP8_QKV = QKV._replace(dtype=FP8, output=BF16)
FP8_INPUT_RANGE = FP8_QKV._replace(several=False, packed=False)
BLOCK_QKV = FP8_QKV._replace(block=BLOCK)
BLOCK_INPUT_RANGE = FP8_INPUT_RANGE._replace(block=BLOCK)


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """CUTLASS and cuBLAS have scales of blocks, and choices of other tests are forgotten."""
    choice.cache_clear()
    monkeypatch.setattr(w8a8_utils, "CUTLASS_BLOCK_FP8_SUPPORTED", True)
    monkeypatch.setattr(library_gemms, "cublas_has_blocks", lambda: True)
    monkeypatch.setattr(fp8_utils, "get_w8a8_block_fp8_configs", lambda *_: None)
    yield monkeypatch
    choice.cache_clear()


def tiles(given: Format) -> list[tuple[int, Tile]]:
    """Return the launches of our kernel in a choice: up to how many tokens, and of which tile."""
    launched = [candidate for candidate in choice(given) if candidate.best_up_to < ANY]
    return [(candidate.best_up_to, candidate.run.args[0]) for candidate in launched]  # type: ignore[attr-defined]


def last(given: Format) -> str:
    """Return what steps of many tokens take."""
    return choice(given)[-1].name


# --- the list ---


@pytest.mark.parametrize(
    ("given", "table"),
    [
        (QKV, linear_tiles.QKV_16_BIT),
        (QKV._replace(dtype=FP16), linear_tiles.QKV_16_BIT),
        (QKV._replace(several=False), linear_tiles.QKV_16_BIT),
        (FP8_QKV, linear_tiles.FP8_QKV),
        (FP8_INPUT_RANGE, linear_tiles.FP8_INPUT_RANGE),
        (BLOCK_QKV, linear_tiles.BLOCK_QKV),
        (BLOCK_INPUT_RANGE, linear_tiles.BLOCK_INPUT_RANGE),
        (
            BLOCK_INPUT_RANGE._replace(packed_scales=False),
            (
                *linear_tiles.BLOCK_INPUT_RANGE,
                *linear_tiles.BLOCK_INPUT_RANGE_WITHOUT_CUBLAS,
            ),
        ),
    ],
)
def test_each_kind_of_layer_has_a_table(given: Format, table: Table) -> None:
    """Of the rows that fit, each number of tokens takes the first."""
    for columns, depth in itertools.product((768, 3072, 4096, 8192), (512, 2048, 4096, 14336)):
        sized = given._replace(columns=columns, depth=depth)
        fitting = [best for best in table if best.fits(columns, depth)]
        expected = {
            tokens: next((best.tile for best in fitting if tokens <= best.tokens), None)
            for tokens in range(1, 200)
        }
        found = {
            tokens: next((tile for most, tile in tiles(sized) if tokens <= most), None)
            for tokens in range(1, 200)
        }
        assert found == expected, sized


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (QKV, "GEMMs"),
        (QKV._replace(dtype=torch.float32), "GEMMs"),
        (FP8_QKV, "CUTLASS"),
        (FP8_INPUT_RANGE, "torch._scaled_mm"),
        (BLOCK_QKV, "CUTLASS"),
        (BLOCK_INPUT_RANGE, "cuBLAS for blocks"),
        (BLOCK_INPUT_RANGE._replace(packed_scales=False), "Triton"),
        (BLOCK_INPUT_RANGE._replace(output=FP16), "Triton"),
        (QKV._replace(on_gpu=False), "GEMMs"),
        (FP8_QKV._replace(on_gpu=False), "torch._scaled_mm"),
        (BLOCK_QKV._replace(on_gpu=False), "reference"),
    ],
)
def test_long_steps_have_a_library(given: Format, name: str) -> None:
    assert last(given) == name
    assert choice(given)[-1].best_up_to == ANY


@pytest.mark.parametrize(
    "given",
    [
        QKV._replace(dtype=torch.float32),
        FP8_QKV._replace(block=64),
        *(each._replace(on_gpu=False) for each in (QKV, FP8_QKV, BLOCK_QKV, BLOCK_INPUT_RANGE)),
    ],
)
def test_what_our_kernel_does_not_know_is_left_to_libraries(given: Format) -> None:
    assert tiles(given) == []


def test_a_choice_is_made_once(libraries: pytest.MonkeyPatch) -> None:
    before = choice(BLOCK_INPUT_RANGE)
    libraries.setattr(linear_candidates, "CANDIDATES", ())
    assert choice(BLOCK_INPUT_RANGE._replace()) is before


@pytest.mark.parametrize("given", [QKV, FP8_QKV, FP8_INPUT_RANGE, BLOCK_QKV, BLOCK_INPUT_RANGE])
def test_warming_up_needs_every_tile(given: Format) -> None:
    for columns, depth in itertools.product((512, 1280, 3072, 8192), (512, 2048, 14336)):
        sized = given._replace(columns=columns, depth=depth)
        assert list(compiled_steps(sized)) == [most for most, _ in tiles(sized)]
        assert len(tiles(sized)) > 1


def test_warming_up_needs_every_form_of_vllms_kernel(libraries: pytest.MonkeyPatch) -> None:
    configured = {128: {}, 256: {}}
    libraries.setattr(fp8_utils, "get_w8a8_block_fp8_configs", lambda *_: configured)
    steps = list(compiled_steps(BLOCK_INPUT_RANGE._replace(packed_scales=False)))
    assert steps[-5:] == [128, 144, 145, 256, 257]


# --- what a layer's tensors are ---


def test_a_format_is_all_that_counts_of_a_layer() -> None:
    ranges = input_range(5, 4).ranges
    given = format_of(ranges)
    assert given == Format(False, FP8, BF16, BLOCK, False, 2 * BLOCK, 4 * BLOCK, False, True)
    packed = ranges._replace(weights=[ranges.weights[0].contiguous()])
    assert format_of(packed) == given._replace(packed=True)
    scales = [torch.cat([ranges.scales[0]] * 2, dim=1)[:, :4]]
    assert format_of(ranges._replace(scales=scales)) == given._replace(packed_scales=False)
    on_gpu = ranges._replace(weights=[ranges.weights[0].as_subclass(OnGpu)])
    assert format_of(on_gpu) == given._replace(on_gpu=True)
    several = block_wise().ranges
    assert not several.weights[0].is_contiguous()
    assert format_of(several) == Format(
        False, FP8, BF16, BLOCK, True, 3 * BLOCK, 2 * BLOCK, True, True
    ), "a GEMM is given a copy"
    weights = [torch.empty(6, 8), torch.empty(2, 3, 8)]
    assert format_of(Ranges(weights)) == Format(
        False, torch.float32, None, 0, True, 12, 8, True, True
    )


# --- CUTLASS and cuBLAS ---


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("there", [False, True])
def test_cutlass_multiplies_what_is_packed(
    packed: bool, there: bool, libraries: pytest.MonkeyPatch
) -> None:
    """Of another weight it would read other elements, without an error."""
    libraries.setattr(w8a8_utils, "CUTLASS_BLOCK_FP8_SUPPORTED", there)
    libraries.setattr(library_gemms, "cublas_has_blocks", lambda: False)
    found = last(BLOCK_INPUT_RANGE._replace(packed=packed))
    assert found == ("CUTLASS" if packed and there else "Triton")
    assert last(FP8_INPUT_RANGE._replace(packed=packed)) == (
        "CUTLASS" if packed else "torch._scaled_mm"
    )


@pytest.mark.parametrize(
    ("blocks", "reads"), [(4, True), (16, True), (1, False), (2, False), (14, False), (27, False)]
)
def test_cublas_is_left_out_where_it_would_read_other_scales(blocks: int, reads: bool) -> None:
    """It pads a row's to a multiple of four; of other numbers it gave wrong products on an H200."""
    cublas = "cuBLAS for blocks"
    given = BLOCK_INPUT_RANGE._replace(depth=blocks * BLOCK)
    assert (last(given) == cublas) is reads
    for other in (
        given._replace(on_gpu=False),
        given._replace(columns=given.columns - 8),
        given._replace(output=FP16),
        given._replace(packed_scales=False),
    ):
        assert last(other) != cublas


@pytest.mark.parametrize("has", [False, True])
def test_cublas_is_taken_where_it_has_blocks(has: bool, libraries: pytest.MonkeyPatch) -> None:
    """Before vLLM's Triton kernel, also of a copy that CUTLASS cannot multiply."""
    libraries.setattr(library_gemms, "cublas_has_blocks", lambda: has)
    libraries.setattr(w8a8_utils, "CUTLASS_BLOCK_FP8_SUPPORTED", False)
    for given in (BLOCK_INPUT_RANGE, BLOCK_QKV):
        assert last(given) == ("cuBLAS for blocks" if has else "Triton")


@pytest.mark.parametrize(
    ("rows", "blocks", "dtype", "most"),
    [
        (4096, 16, BF16, 32),
        (4096, 24, BF16, 32),
        (4096, 28, BF16, 64),
        (4096, 56, BF16, 64),
        (8192, 56, BF16, 32),
        (4096, 27, BF16, 128),
        (4096, 16, FP16, 128),
    ],
)
def test_our_kernel_is_left_where_cublas_is_faster(
    rows: int, blocks: int, dtype: torch.dtype, most: int
) -> None:
    """From other numbers on for narrow and deep layers, and only where cuBLAS can be taken."""
    given = BLOCK_INPUT_RANGE._replace(columns=rows, depth=blocks * BLOCK, output=dtype)
    assert tiles(given)[-1][0] == most
    assert tiles(given._replace(several=True, packed=True))[-1][0] == 128


def test_a_step_with_scales_by_row_is_never_cublass() -> None:
    given = FP8_INPUT_RANGE._replace(columns=4096, depth=512)
    assert tiles(given)[-1][0] == 128
    assert last(given) == "torch._scaled_mm"
