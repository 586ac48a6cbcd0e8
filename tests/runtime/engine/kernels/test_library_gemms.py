"""GEMMs over ranges of rows: what they compute, and how libraries want their operands."""

from typing import Any

import pytest
import torch
import vllm._custom_ops as vllm_ops
from vllm.model_executor.layers.quantization.utils import fp8_utils

from shoal.runtime.engine.kernels import (
    library_gemms,
    partitioned_linear,
    partitioned_linear_kernel,
)
from shoal.runtime.engine.kernels.library_gemms import Ranges
from shoal.runtime.engine.kernels.linear_tiles import BLOCK
from tests.runtime.engine.kernels.fp8_layers import (
    Given,
    assert_close,
    block_reference,
    block_wise,
    input_range,
    layer,
    reference,
)
from tests.runtime.engine.kernels.ranges_of_rows import DEPTH, linear_reference, parts

SCALES = [(False, False), (False, True), (True, False), (True, True)]
"""Whether there is one by token, and by row."""


def test_gemms_write_to_a_part_of_a_tensor() -> None:
    x, (weights_, biases) = torch.randn(7, DEPTH), parts(bias=True)
    whole = torch.zeros(9, 100)
    joined = [partitioned_linear.paired(ranges) for ranges in (weights_, biases)]
    library_gemms.multiply_each(x, *joined, whole[1:8, 10:90])
    torch.testing.assert_close(whole[1:8, 10:90], linear_reference(x, weights_, biases))
    whole[1:8, 10:90] = 0
    assert not whole.any()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("by_token", "by_row"), SCALES)
def test_several_ranges_are_one_gemm(
    by_token: bool, by_row: bool, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = layer(5, by_token=by_token, by_row=by_row, bias=bias)
    multiplied = []
    scaled_mm = torch._scaled_mm

    def counted(*args: Any, **options: Any) -> torch.Tensor:
        multiplied.append(args)
        return scaled_mm(*args, **options)

    monkeypatch.setattr(torch, "_scaled_mm", counted)
    assert_close(library_gemms.scaled_mm(*given), reference(given))
    assert len(multiplied) == 1


def cutlass(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """vLLM's product with scales of blocks, which takes operands to lie as it wants them."""
    assert bias is None
    (tokens, depth), rows = a.shape, b.shape[1]
    a_scales = scale_a.as_strided((tokens, depth // BLOCK), (1, tokens)).contiguous()
    b_scales = scale_b.as_strided((rows // BLOCK, depth // BLOCK), (depth // BLOCK, 1))
    weight = b.as_strided((rows, depth), (depth, 1))
    return block_reference(Given(a, a_scales, Ranges([weight], [], [b_scales], out_dtype, BLOCK)))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scales_lie", ["by token", "by block", "by block, padded"])
def test_of_blocks_too_it_is_one_gemm_as_cutlass_wants_it(
    scales_lie: str, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever way the scales of tokens lie: DeepGEMM's quantisation pads them."""
    monkeypatch.setattr(vllm_ops, "cutlass_scaled_mm", cutlass)
    given = block_wise(bias=bias)
    x_scale = given.x_scale
    if scales_lie != "by token":
        padded = 3 if scales_lie == "by block, padded" else 0
        x_scale = torch.nn.functional.pad(x_scale.t(), (0, padded))[:, : x_scale.shape[0]].t()
    found = library_gemms.cutlass(given.x, x_scale, given.ranges)
    assert_close(found, block_reference(given))


@pytest.mark.parametrize(
    ("cuda", "capability", "has"),
    [
        ("12.9", (9, 0), True),
        ("13.0", (9, 0), True),
        ("12.8", (9, 0), False),
        ("13.0", (10, 0), False),
        ("13.0", (8, 9), False),
        (None, (9, 0), False),
    ],
)
def test_cublas_has_scales_of_blocks_on_hopper(
    cuda: str | None, capability: tuple[int, int], has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert library_gemms.cublas_has_blocks.__wrapped__() is has


def scaled_mm_of_blocks(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    out: torch.Tensor,
) -> None:
    """cuBLAS's product, which takes scales to lie as it wants them and looks at a weight's rows."""
    (tokens, depth), rows = x.shape, weight.shape[1]
    blocks = depth // BLOCK
    assert tokens % 4 == 0
    assert scale_a.stride() == (1, tokens)
    assert scale_b.stride() == (1, blocks)
    assert scale_b.shape == (blocks, rows // BLOCK)
    ranges = Ranges([weight.t()], [], [scale_b.t()], out_dtype, BLOCK)
    out.copy_(block_reference(Given(x, scale_a, ranges)))


@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [36, 37, 39])
def test_cublas_multiplies_all_but_the_last_few_tokens(
    tokens: int, bias: bool, by_block: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def multiply(
        x: torch.Tensor, weights: Any, _: object, out: torch.Tensor, tile: Any, scales: Any
    ) -> None:
        rest.append(x.shape[0])
        assert tile.tokens >= x.shape[0]
        ranges = Ranges(weights, [], [scales.weight], out.dtype, scales.block)
        out.copy_(block_reference(Given(x, scales.x, ranges)))

    rest: list[int] = []
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm_of_blocks)
    monkeypatch.setattr(partitioned_linear_kernel, "multiply", multiply)
    given = input_range(tokens, 4)
    if bias:
        added = torch.ones(2 * BLOCK, dtype=torch.bfloat16)
        given = given._replace(ranges=given.ranges._replace(biases=[added]))
    x_scale = given.x_scale.t().contiguous().t() if by_block else given.x_scale
    found = library_gemms.cublas_blocks(given.x, x_scale, given.ranges)
    assert_close(found, block_reference(given))
    assert rest == ([tokens % 4] if tokens % 4 else [])


CONFIGURATIONS: dict[int, Any] = {64: {}, 128: {}, 256: {}, 3072: {}}


@pytest.mark.parametrize(
    ("configurations", "counts"),
    [(None, [144, 145]), (CONFIGURATIONS, [144, 145, 256, 257, 3072, 3073])],
)
def test_every_form_of_vllms_kernel_is_known(
    configurations: dict[int, Any] | None, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request would else wait for one to be compiled."""
    asked = []

    def configured(*sizes: int) -> dict[int, Any] | None:
        asked.append(sizes)
        return configurations

    monkeypatch.setattr(fp8_utils, "get_w8a8_block_fp8_configs", configured)
    assert library_gemms.triton_forms(512, 256, 144) == counts
    assert asked == [(512, 256, BLOCK, BLOCK)]
