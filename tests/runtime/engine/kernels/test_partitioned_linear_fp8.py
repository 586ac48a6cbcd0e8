"""One FP8 linear layer over ranges of rows: the operator. Its kernels: ``test_row_ranges``."""

from functools import partial
from typing import Any

import pytest
import torch
import vllm._custom_ops as vllm_ops
from vllm.model_executor.layers.quantization.utils import fp8_utils, w8a8_utils

from shoal.runtime.engine.kernels import partitioned_linear_fp8, partitioned_linear_kernel
from shoal.runtime.engine.kernels.partitioned_linear_fp8 import BLOCK

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
        return torch.kron(scale.contiguous(), torch.ones(BLOCK, BLOCK))

    parts = [w.float() * spread(scale) for w, scale in zip(weights, scales, strict=True)]
    values = x.float() * torch.kron(x_scale.contiguous(), torch.ones(1, BLOCK))
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
    assert_close(partitioned_linear_fp8.linear(*given), reference(given))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 5])
def test_scales_may_be_those_of_blocks(tokens: int, bias: bool) -> None:
    given = block_wise(tokens, bias=bias)
    assert_close(partitioned_linear_fp8.linear(*given, BLOCK), block_reference(given))


@pytest.mark.parametrize("index", [1, 3])
def test_another_scale_is_another_layer(index: int) -> None:
    """The comparison above can fail."""
    given: list[Any] = list(arguments())
    expected = reference(arguments())
    given[index] = torch.ones_like(given[index]) if index == 1 else [torch.ones(1)] * 3
    with pytest.raises(AssertionError, match="not close"):
        assert_close(partitioned_linear_fp8.linear(*given), expected)


@pytest.mark.parametrize("bias", [False, True])
def test_its_declaration_is_true(bias: bool) -> None:
    """The shapes that compilers are told, and that nothing is changed."""
    operator = torch.ops.shoal.row_ranges_fp8_linear.default
    given = arguments(bias=bias)
    torch.library.opcheck(operator, (*given, 0), test_utils=("test_faketensor",))
    blocks = block_wise(bias=bias)
    torch.library.opcheck(operator, (*blocks, BLOCK), test_utils=("test_faketensor",))
    partitioned_linear_fp8.linear(*given)
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
        lambda x, scale: partitioned_linear_fp8.linear(x, scale, *rest) * 2,
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
    scaled_mm = partitioned_linear_fp8.scaled_mm

    def counted(*args: Any) -> torch.Tensor:
        multiplied.append(args)
        return scaled_mm(*args)

    monkeypatch.setattr(partitioned_linear_fp8, "scaled_mm", counted)
    # By its name: the operator for GPUs calls it so, and a decorator had left nothing there.
    assert_close(partitioned_linear_fp8.by_gemm(*given), reference(given))
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

    monkeypatch.setattr(partitioned_linear_fp8, "_cutlass_reads", choose)
    x, x_scale, *rest = given = block_wise(bias=bias)
    if scales_lie != "by token":
        padded = 3 if scales_lie == "by block, padded" else 0
        x_scale = torch.nn.functional.pad(x_scale.t(), (0, padded))[:, : x.shape[0]].t()
    assert_close(partitioned_linear_fp8.by_gemm(x, x_scale, *rest, BLOCK), block_reference(given))
    assert chosen == [(3 * BLOCK, 2 * BLOCK)]


class OnGpu(torch.Tensor):
    """A tensor that says so."""

    is_cuda = True


@pytest.fixture
def cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS has scales of blocks."""
    monkeypatch.setattr(partitioned_linear_fp8, "_cublas_has_blocks", lambda: True)


def input_range(tokens: int, blocks: int, rows: int = 2 * BLOCK) -> Arguments:
    """A row-parallel layer's: one range, of inputs."""
    draw = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=draw) + 0.5

    depth = blocks * BLOCK
    weight = (random(rows, 2 * depth) - 1).to(torch.float8_e4m3fn)[:, depth:]
    x = (random(tokens, depth) * 4 - 4).to(torch.float8_e4m3fn)
    scale = random(rows // BLOCK, blocks)
    return x, random(tokens, blocks), [weight], [scale], [], torch.bfloat16


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
    partitioned_linear_fp8._block_mm(*given, dtype)
    cutlass_is_right = packed and there
    assert called == [
        "cutlass_scaled_mm" if cutlass_is_right else "w8a8_triton_block_scaled_mm_func"
    ]


@pytest.mark.usefixtures("cublas")
@pytest.mark.parametrize(
    ("blocks", "reads"), [(4, True), (16, True), (1, False), (2, False), (14, False), (27, False)]
)
def test_cublas_is_left_out_where_it_would_read_other_scales(blocks: int, reads: bool) -> None:
    """It pads a row's to a multiple of four; of other numbers it gave wrong products on an H200."""
    weight, scale = input_range(5, blocks)[2:4]
    on_gpu = weight[0].as_subclass(OnGpu)
    bf16 = torch.bfloat16
    assert partitioned_linear_fp8._cublas_reads(on_gpu, scale[0], bf16) is reads
    assert not partitioned_linear_fp8._cublas_reads(weight[0], scale[0], bf16)
    assert not partitioned_linear_fp8._cublas_reads(on_gpu[:-8], scale[0], bf16)
    assert not partitioned_linear_fp8._cublas_reads(on_gpu, scale[0], torch.float16)
    part_of_longer_rows = torch.cat([scale[0]] * 2, dim=1)[:, :blocks]
    assert not partitioned_linear_fp8._cublas_reads(on_gpu, part_of_longer_rows, bf16)


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
    assert partitioned_linear_fp8._cublas_has_blocks.__wrapped__() is has


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
    given = (x, scale_a, [weight.t()], [scale_b.t()], [], out_dtype)
    out.copy_(block_reference(given))


@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("tokens", [36, 37, 39])
def test_cublas_multiplies_all_but_the_last_few_tokens(
    tokens: int, by_block: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def multiply(
        x: torch.Tensor, weights: Any, _: object, out: torch.Tensor, tile: Any, scales: Any
    ) -> None:
        rest.append(x.shape[0])
        assert tile.tokens >= x.shape[0]
        given = (x, scales.x, weights, [scales.weight], [], out.dtype)
        out.copy_(block_reference(given))

    rest: list[int] = []
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm_of_blocks)
    monkeypatch.setattr(partitioned_linear_kernel, "multiply", multiply)
    x, x_scale, (weight,), (scale,), _, dtype = given = input_range(tokens, 4)
    x_scale = x_scale.t().contiguous().t() if by_block else x_scale
    assert_close(
        partitioned_linear_fp8._cublas_mm(x, x_scale, weight, scale, dtype), block_reference(given)
    )
    assert rest == ([tokens % 4] if tokens % 4 else [])


@pytest.mark.usefixtures("cublas")
@pytest.mark.parametrize(
    ("rows", "blocks", "dtype", "most"),
    [
        (4096, 16, torch.bfloat16, 32),
        (4096, 28, torch.bfloat16, 64),
        (4096, 56, torch.bfloat16, 64),
        (8192, 56, torch.bfloat16, 32),
        (4096, 27, torch.bfloat16, 128),
        (4096, 16, torch.float16, 128),
    ],
)
def test_our_kernel_is_left_where_cublas_is_faster(
    rows: int, blocks: int, dtype: torch.dtype, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From other numbers on for narrow and deep layers, and only where cuBLAS can be taken."""
    weight = torch.empty(rows, blocks * BLOCK, dtype=torch.float8_e4m3fn).as_subclass(OnGpu)
    scale = torch.empty(rows // BLOCK, blocks)
    given = ([weight], [scale], dtype, BLOCK)
    assert launched(monkeypatch, *given) == list(range(1, most + 1))
    several = [weight[:BLOCK], weight[BLOCK : 2 * BLOCK]]
    given = (several, [scale[:1], scale[1:2]], dtype, BLOCK)
    assert launched(monkeypatch, *given) == list(range(1, 129))


def launched(
    monkeypatch: pytest.MonkeyPatch,
    weights: list[torch.Tensor],
    scales: list[torch.Tensor],
    dtype: torch.dtype,
    block: int,
) -> list[int]:
    """Return the numbers of tokens, up to 200, of which a step is a launch of our kernel."""
    found: list[int] = []
    monkeypatch.setattr(partitioned_linear_fp8, "by_gemm", lambda *_: None)
    monkeypatch.setattr(
        partitioned_linear_kernel, "multiply", lambda x, *_: found.append(x.shape[0])
    )
    for tokens in range(1, 201):
        x = torch.empty(tokens, weights[0].shape[1], dtype=weights[0].dtype)
        partitioned_linear_fp8.on_gpu(x, torch.empty(1), weights, scales, [], dtype, block)
    return found


def test_a_step_with_scales_by_row_is_never_cublass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioned_linear_fp8, "_cublas_reads", lambda *_: pytest.fail("asked"))
    weight, scale = torch.empty(4096, 512, dtype=torch.float8_e4m3fn), torch.empty(4096, 1)
    given = ([weight], [scale], torch.bfloat16, 0)
    assert launched(monkeypatch, *given) == list(range(1, 129))


@pytest.mark.parametrize("fits", [False, True])
def test_cublas_comes_before_vllms_triton_kernel(
    fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    monkeypatch.setattr(partitioned_linear_fp8, "_cublas_reads", lambda *_: fits)
    monkeypatch.setattr(partitioned_linear_fp8, "_cublas_mm", lambda *_: called.append("cuBLAS"))
    kernel = "w8a8_triton_block_scaled_mm_func"
    monkeypatch.setattr(torch.ops.vllm, kernel, lambda *_: called.append("Triton"), raising=False)
    x, x_scale, (weight,), (scale,), _, dtype = input_range(5, 4)
    given = [tensor.as_subclass(OnGpu) for tensor in (x, x_scale, weight, scale)]
    partitioned_linear_fp8._block_mm(*given, dtype)
    assert called == ["cuBLAS" if fits else "Triton"]


@pytest.mark.parametrize("block", [0, BLOCK])
def test_scales_lie_as_in_a_step_when_kernels_are_compiled(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton has another form for each order of strides."""
    strides = []

    def linear(x: torch.Tensor, x_scale: torch.Tensor, *_: Any) -> None:
        assert x_scale.shape == (x.shape[0], x.shape[1] // block if block else 1)
        strides.append((x.shape[0], x_scale.stride()))

    monkeypatch.setattr(partitioned_linear_fp8, "linear", linear)
    monkeypatch.setattr(partitioned_linear_kernel, "arrival_counters", lambda _: None)
    _, _, weights, scales, _, dtype = input_range(5, 4)
    partitioned_linear_fp8.warm_up(weights, scales, [], dtype, block)
    longest = max(tokens for tokens, _ in strides)
    assert longest > 128 if block else longest == 128
    assert {stride[0] for _, stride in strides} == {1}
    assert all(stride[1] == tokens for tokens, stride in strides)


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
    monkeypatch.setattr(partitioned_linear_fp8, "_cutlass_reads", lambda _: False)
    weights, scales = block_wise()[2:4]
    assert partitioned_linear_fp8._long_steps(weights[:1], scales, torch.bfloat16, BLOCK) == counts
    assert asked == [(2 * BLOCK, 2 * BLOCK, BLOCK, BLOCK)]


@pytest.mark.parametrize("reason", ["no blocks", "several ranges", "packed", "cuBLAS"])
def test_other_layers_have_no_such_forms(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioned_linear_fp8, "_cutlass_reads", lambda _: reason == "packed")
    monkeypatch.setattr(partitioned_linear_fp8, "_cublas_reads", lambda *_: reason == "cuBLAS")
    weights, scales = block_wise()[2:4]
    weights = weights[: 2 if reason == "several ranges" else 1]
    block = 0 if reason == "no blocks" else BLOCK
    assert partitioned_linear_fp8._long_steps(weights, scales, torch.bfloat16, block) == []
