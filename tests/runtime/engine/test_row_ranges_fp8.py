"""One FP8 linear layer over ranges of rows: the operator. Its kernels: ``test_row_ranges``."""

from functools import partial
from typing import Any

import pytest
import torch
import vllm._custom_ops as vllm_ops
from vllm.model_executor.layers.quantization.utils import fp8_utils, w8a8_utils

from runtime.engine import row_ranges_fp8
from runtime.engine.row_ranges_fp8 import BLOCK

DEPTH = 64
RANGES = (slice(16, 64), slice(96, 112), slice(176, 192))
SCALES = [(False, False), (False, True), (True, False), (True, True)]
"""Whether there is one by token, and by row."""

Arguments = tuple[
    torch.Tensor,
    torch.Tensor,
    list[torch.Tensor],
    list[torch.Tensor],
    list[torch.Tensor],
    torch.dtype,
]


def arguments(
    tokens: int = 5,
    *,
    by_token: bool = True,
    by_row: bool = True,
    bias: bool = False,
    packed: bool = True,
) -> Arguments:
    draw = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=draw) + 0.5

    weight = (random(192, 2 * DEPTH) - 1).to(torch.float8_e4m3fn)[:, DEPTH:]
    scale, added = random(192, 1), random(192).to(torch.bfloat16)
    return (
        (random(tokens, DEPTH) * 4 - 4).to(torch.float8_e4m3fn),
        random(tokens, 1) if by_token else random(1),
        [(weight.contiguous() if packed else weight)[rows] for rows in RANGES],
        [scale[rows] if by_row else scale[0] for rows in RANGES],
        [added[rows] for rows in RANGES] if bias else [],
        torch.bfloat16,
    )


def reference(given: Arguments) -> torch.Tensor:
    x, x_scale, weights, scales, biases, dtype = given
    parts = [weight.float() * scale for weight, scale in zip(weights, scales, strict=True)]
    output = (x.float() * x_scale) @ torch.cat(parts).T
    return (output + torch.cat(biases).float() if biases else output).to(dtype)


def block_wise(tokens: int = 5, *, bias: bool = False) -> Arguments:
    draw = torch.Generator().manual_seed(2)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=draw) + 0.5

    weight = (random(5 * BLOCK, 3 * BLOCK) - 1).to(torch.float8_e4m3fn)[:, BLOCK:]
    scale, added = random(5, 3)[:, 1:], random(5 * BLOCK).to(torch.bfloat16)
    rows = [slice(0, 2 * BLOCK), slice(3 * BLOCK, 4 * BLOCK)]
    return (
        (random(tokens, 2 * BLOCK) * 4 - 4).to(torch.float8_e4m3fn),
        random(tokens, 2),
        [weight[of] for of in rows],
        [scale[of.start // BLOCK : of.stop // BLOCK] for of in rows],
        [added[of] for of in rows] if bias else [],
        torch.bfloat16,
    )


def block_reference(given: Arguments) -> torch.Tensor:
    """The same with scales of single elements."""
    x, x_scale, weights, scales, biases, dtype = given

    def spread(scale: torch.Tensor) -> torch.Tensor:
        return torch.kron(scale, torch.ones(BLOCK, BLOCK))

    parts = [w.float() * spread(scale) for w, scale in zip(weights, scales, strict=True)]
    values = x.float() * torch.kron(x_scale, torch.ones(1, BLOCK))
    output = values @ torch.cat(parts).T
    return (output + torch.cat(biases).float() if biases else output).to(dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.abs().max() > 1
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("by_token", "by_row"), SCALES)
@pytest.mark.parametrize("tokens", [1, 5])
def test_it_is_one_layer_over_all_ranges(
    tokens: int, by_token: bool, by_row: bool, bias: bool, packed: bool
) -> None:
    given = arguments(tokens, by_token=by_token, by_row=by_row, bias=bias, packed=packed)
    assert_close(row_ranges_fp8.linear(*given), reference(given))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 5])
def test_scales_may_be_those_of_blocks(tokens: int, bias: bool) -> None:
    given = block_wise(tokens, bias=bias)
    assert_close(row_ranges_fp8.linear(*given, BLOCK), block_reference(given))


@pytest.mark.parametrize("index", [1, 3])
def test_another_scale_is_another_layer(index: int) -> None:
    """The comparison above can fail."""
    given: list[Any] = list(arguments())
    expected = reference(arguments())
    given[index] = torch.ones_like(given[index]) if index == 1 else [torch.ones(1)] * 3
    with pytest.raises(AssertionError, match="not close"):
        assert_close(row_ranges_fp8.linear(*given), expected)


@pytest.mark.parametrize("bias", [False, True])
def test_its_declaration_is_true(bias: bool) -> None:
    """The shapes that compilers are told, and that nothing is changed."""
    operator = torch.ops.shoal.row_ranges_fp8_linear.default
    given = arguments(bias=bias)
    torch.library.opcheck(operator, (*given, 0), test_utils=("test_faketensor",))
    blocks = block_wise(bias=bias)
    torch.library.opcheck(operator, (*blocks, BLOCK), test_utils=("test_faketensor",))
    row_ranges_fp8.linear(*given)
    for before, after in zip(arguments(bias=bias)[2:5], given[2:5], strict=True):
        for one, other in zip(before, after, strict=True):  # type: ignore[call-overload]
            assert torch.equal(one.float(), other.float())
    assert torch.equal(arguments()[0].float(), given[0].float())
    assert torch.equal(arguments()[1], given[1])


def test_it_is_opaque_to_a_compiler() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    rest = arguments()[2:]
    compiled = torch.compile(
        lambda x, scale: row_ranges_fp8.linear(x, scale, *rest) * 2,
        backend=backend,
        fullgraph=True,
        dynamic=True,
    )
    for tokens in (3, 8, 65):
        given = arguments(tokens)
        assert_close(compiled(*given[:2]), reference(given) * 2)
    (graph,) = graphs
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert len(called) == 2, called  # the multiplication by two is the other
    assert "row_ranges_fp8_linear" in called[0]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("by_token", "by_row"), SCALES)
def test_a_step_of_many_tokens_is_one_gemm(
    by_token: bool, by_row: bool, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments(5, by_token=by_token, by_row=by_row, bias=bias)
    multiplied = []
    scaled_mm = row_ranges_fp8.scaled_mm

    def counted(*args: Any) -> torch.Tensor:
        multiplied.append(args)
        return scaled_mm(*args)

    monkeypatch.setattr(row_ranges_fp8, "scaled_mm", counted)
    # By its name: the operator for GPUs calls it so, and a decorator had left nothing there.
    assert_close(row_ranges_fp8.by_gemm(*given), reference(given))
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
    return block_reference((a, a_scales, [weight], [b_scales], [], out_dtype))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scales_lie", ["by token", "by block", "by block, padded"])
def test_of_blocks_too_it_is_one_gemm_as_cutlass_wants_it(
    scales_lie: str, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever way the scales of tokens lie: DeepGEMM's quantisation pads them."""
    monkeypatch.setattr(vllm_ops, "cutlass_scaled_mm", cutlass)
    chosen = []

    def choose(weight: torch.Tensor) -> bool:
        chosen.append(weight.shape)
        return True

    monkeypatch.setattr(row_ranges_fp8, "_cutlass_reads", choose)
    x, x_scale, *rest = given = block_wise(bias=bias)
    if scales_lie != "by token":
        padded = 3 if scales_lie == "by block, padded" else 0
        x_scale = torch.nn.functional.pad(x_scale.t(), (0, padded))[:, : x.shape[0]].t()
    assert_close(row_ranges_fp8.by_gemm(x, x_scale, *rest, BLOCK), block_reference(given))
    assert chosen == [(3 * BLOCK, 2 * BLOCK)]


class OnGpu(torch.Tensor):
    """A tensor that says so."""

    is_cuda = True


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("there", [False, True])
def test_cutlass_multiplies_what_is_packed(
    packed: bool, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another weight it would read other elements, without an error."""
    monkeypatch.setattr(w8a8_utils, "CUTLASS_BLOCK_FP8_SUPPORTED", there)
    called = []
    for kernels, name in (
        (vllm_ops, "cutlass_scaled_mm"),
        (torch.ops.vllm, "w8a8_triton_block_scaled_mm_func"),
    ):
        called_so = partial(lambda name, *_, **__: called.append(name), name)
        monkeypatch.setattr(kernels, name, called_so, raising=False)
    x, x_scale, (weight, _), (scale, _), _, dtype = block_wise()
    weight = weight.contiguous() if packed else weight
    given = [tensor.as_subclass(OnGpu) for tensor in (x, x_scale, weight, scale)]
    row_ranges_fp8._block_mm(*given, dtype)
    cutlass_is_right = packed and there
    assert called == [
        "cutlass_scaled_mm" if cutlass_is_right else "w8a8_triton_block_scaled_mm_func"
    ]


CONFIGURATIONS: dict[int, Any] = {64: {}, 128: {}, 256: {}, 3072: {}}


@pytest.mark.parametrize(
    ("configurations", "counts"),
    [(None, [144, 145]), (CONFIGURATIONS, [144, 145, 256, 257, 3072, 3073])],
)
def test_warming_up_needs_every_form_of_vllms_kernel(
    configurations: dict[int, Any] | None, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a request would else wait for one to be compiled."""
    asked = []

    def configured(*sizes: int) -> dict[int, Any] | None:
        asked.append(sizes)
        return configurations

    monkeypatch.setattr(fp8_utils, "get_w8a8_block_fp8_configs", configured)
    monkeypatch.setattr(row_ranges_fp8, "_cutlass_reads", lambda _: False)
    weights = block_wise()[2]
    assert row_ranges_fp8._long_steps(weights[:1], BLOCK) == counts
    assert asked == [(2 * BLOCK, 2 * BLOCK, BLOCK, BLOCK)]


@pytest.mark.parametrize("reason", ["no blocks", "several ranges", "packed"])
def test_other_layers_have_no_such_forms(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_ranges_fp8, "_cutlass_reads", lambda _: reason == "packed")
    weights = block_wise()[2][: 2 if reason == "several ranges" else 1]
    assert row_ranges_fp8._long_steps(weights, 0 if reason == "no blocks" else BLOCK) == []
