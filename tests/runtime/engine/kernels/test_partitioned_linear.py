"""One linear layer over ranges of rows: the operator, its kernels, and the layer that uses it."""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shoal.runtime.engine.kernels import partitioned_linear, partitioned_linear_kernel
from shoal.runtime.engine.kernels.library_gemms import Ranges
from shoal.runtime.engine.kernels.linear_candidates import choice, format_of
from shoal.runtime.engine.kernels.linear_tiles import ANY, BLOCK
from shoal.runtime.engine.weights.rules import unquantised as weights
from shoal.runtime.engine.weights.view_loader import compile_kernels
from tests.runtime.engine.kernels.fp8_layers import (
    Given,
    OnGpu,
    assert_close,
    block_reference,
    block_wise,
    input_range,
    layer,
    reference,
)
from tests.runtime.engine.kernels.ranges_of_rows import DEPTH, linear_reference, parts

# --- the operator ---


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, DEPTH), (7, DEPTH), (2, 3, DEPTH)])
def test_it_is_one_layer_over_all_ranges(shape: tuple[int, ...], bias: bool) -> None:
    x, arguments = torch.randn(shape), parts(bias=bias)
    torch.testing.assert_close(
        partitioned_linear.linear(x, *arguments), linear_reference(x, *arguments)
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, DEPTH), (7, DEPTH), (2, 3, DEPTH)])
def test_it_takes_two_ranges_as_one(shape: tuple[int, ...], bias: bool) -> None:
    x, arguments = torch.randn(shape), parts(bias=bias)
    joined = [partitioned_linear.paired(ranges) for ranges in arguments]
    assert [weight.shape for weight in joined[0]] == [(40, DEPTH), (2, 20, DEPTH)]
    assert {weight.data_ptr() for weight in joined[0]} < {w.data_ptr() for w in arguments[0]}
    torch.testing.assert_close(
        partitioned_linear.linear(x, *joined), linear_reference(x, *arguments)
    )


def test_what_are_no_two_ranges_of_one_size_stays_apart() -> None:
    query, key, value = parts(bias=False)[0]
    beyond = parts(bias=False)[0][2]
    assert beyond.storage_offset() > key.storage_offset(), "in order, and of another tensor"
    for ranges in (
        [key, value],
        [query, value, key],
        [query, key, value[:10]],
        [query, key, beyond],
    ):
        assert all(map(torch.Tensor.is_set_to, partitioned_linear.paired(ranges), ranges))
        assert len(partitioned_linear.paired(ranges)) == len(ranges)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_its_declaration_is_true(bias: bool, joined: bool) -> None:
    """The schema (nothing is changed) and the shapes that compilers are told."""
    operator = torch.ops.shoal.partitioned_linear.default
    checks = ("test_schema", "test_faketensor")
    arguments = [partitioned_linear.paired(a) if joined else a for a in parts(bias=bias)]
    for shape in ((5, DEPTH), (2, 3, DEPTH)):
        given = (torch.randn(shape), None, *arguments, [], None, 0)
        torch.library.opcheck(operator, given, test_utils=checks)


def test_it_is_opaque_to_a_compiler() -> None:
    arguments = parts(bias=True)
    assert_opaque(
        lambda x: partitioned_linear.linear(x, *arguments),
        [(torch.randn(tokens, DEPTH),) for tokens in (3, 8, 65)],
        lambda x: linear_reference(x, *arguments),
    )


def assert_opaque(
    compute: Callable[..., torch.Tensor],
    inputs: list[tuple[torch.Tensor, ...]],
    expected: Callable[..., torch.Tensor],
    check: Callable[[torch.Tensor, torch.Tensor], None] = torch.testing.assert_close,
) -> None:
    """Check that a compiler sees one operator, in one graph for all numbers of tokens."""
    graphs: list[Any] = []

    def backend(graph: Any, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(
        lambda *given: compute(*given) * 2, backend=backend, fullgraph=True, dynamic=True
    )
    for given in inputs:
        check(compiled(*given), expected(*given) * 2)
    (graph,) = graphs
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert len(called) == 2, called  # the multiplication by two is the other
    assert "partitioned_linear" in called[0]


# --- the operator in FP8 ---


def computed(given: Given) -> torch.Tensor:
    return partitioned_linear.linear(given.x, *given.ranges, x_scale=given.x_scale)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("by_token", "by_row"), list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("tokens", [1, 5])
def test_in_fp8_it_is_one_layer_over_all_ranges(
    tokens: int, by_token: bool, by_row: bool, bias: bool, packed: bool
) -> None:
    given = layer(tokens, by_token=by_token, by_row=by_row, bias=bias, packed=packed)
    assert_close(computed(given), reference(given))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 5])
def test_scales_may_be_those_of_blocks(tokens: int, bias: bool) -> None:
    given = block_wise(tokens, bias=bias)
    assert_close(computed(given), block_reference(given))


@pytest.mark.parametrize("of", ["tokens", "rows"])
def test_another_scale_is_another_layer(of: str) -> None:
    """The comparison above can fail."""
    given = layer()
    if of == "tokens":
        other = given._replace(x_scale=torch.ones_like(given.x_scale))
    else:
        other = given._replace(ranges=given.ranges._replace(scales=[torch.ones(1)] * 3))
    with pytest.raises(AssertionError, match="not close"):
        assert_close(computed(other), reference(given))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("make", [layer, block_wise])
def test_its_declaration_is_true_in_fp8(make: Callable[..., Given], bias: bool) -> None:
    """The shapes that compilers are told, and that nothing is changed."""
    operator = torch.ops.shoal.partitioned_linear.default
    given, before = make(bias=bias), make(bias=bias)
    arguments = (given.x, given.x_scale, *given.ranges)
    torch.library.opcheck(operator, arguments, test_utils=("test_faketensor",))
    computed(given)
    for one, other in ((given.x, before.x), (given.x_scale, before.x_scale)):
        assert torch.equal(one.float(), other.float())
    for kind in ("weights", "biases", "scales"):
        pairs = zip(getattr(given.ranges, kind), getattr(before.ranges, kind), strict=True)
        assert all(torch.equal(one.float(), other.float()) for one, other in pairs)


def test_it_is_opaque_to_a_compiler_in_fp8() -> None:
    given = layer()
    assert_opaque(
        lambda x, scale: partitioned_linear.linear(x, *given.ranges, x_scale=scale),
        [layer(tokens)[:2] for tokens in (3, 8, 65)],
        lambda x, scale: reference(Given(x, scale, given.ranges)),
        assert_close,
    )


# --- warming up ---


@pytest.mark.parametrize("block", [0, BLOCK])
def test_scales_lie_as_in_a_step_when_kernels_are_compiled(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton has another form for each order of strides."""
    strides = []

    def linear(x: torch.Tensor, *ranges: Any, x_scale: torch.Tensor) -> None:
        assert x_scale.shape == (x.shape[0], x.shape[1] // block if block else 1)
        assert ranges[-1] == block
        strides.append((x.shape[0], x_scale.stride()))

    monkeypatch.setattr(partitioned_linear, "linear", linear)
    monkeypatch.setattr(partitioned_linear, "compiled_steps", lambda _: [1, 16, 128, 145])
    monkeypatch.setattr(partitioned_linear_kernel, "arrival_counters", lambda _: None)
    ranges = input_range(5, 4).ranges
    partitioned_linear.warm_up(*ranges._replace(block=block))
    assert [tokens for tokens, _ in strides] == [1, 16, 128, 145]
    assert {stride[0] for _, stride in strides} == {1}
    assert all(stride[1] == tokens for tokens, stride in strides)


def test_a_layer_in_16_bits_is_warmed_up_without_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []

    def linear(x: torch.Tensor, *ranges: Any, x_scale: torch.Tensor | None) -> None:
        assert x_scale is None
        steps.append((tuple(x.shape), x.dtype, len(ranges[0])))

    monkeypatch.setattr(partitioned_linear, "linear", linear)
    monkeypatch.setattr(partitioned_linear_kernel, "arrival_counters", lambda _: None)
    weights_ = [part.to(torch.bfloat16).as_subclass(OnGpu) for part in parts(bias=False)[0]]
    partitioned_linear.warm_up(weights_, [])
    expected = [most for c in choice(format_of(Ranges(weights_))) if (most := c.best_up_to) < ANY]
    assert len(expected) > 4
    assert steps == [((most, DEPTH), torch.bfloat16, 3) for most in expected]


# --- the kernels ---


Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Results]:
    """Run all kinds of cases in one program: Triton must be imported with its interpreter."""
    program = subprocess.run(
        [sys.executable, "-m", "tests.runtime.engine.kernels.partitioned_linear_main"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert program.returncode == 0, program.stderr[-4000:]
    kinds: dict[str, Results] = json.loads(program.stdout)
    for results in kinds.values():
        assert len({result["case"] for result in results}) == len(results)
    return kinds


def test_the_kernels_compute_it(interpreted: dict[str, Results]) -> None:
    results = interpreted["wide"]
    assert len(results) == 45
    for result in results:
        assert result["error"] < 1e-4, result
        assert result["counters"] == 0, result


def test_of_keys_and_values_in_one_the_operator_finds_each(interpreted: dict[str, Results]) -> None:
    results = interpreted["operator"]
    assert len(results) == 8
    for result in results:
        assert result["error"] < 0.01, result
        assert result["counters"] == 0, result


def test_of_fp8_they_compute_it_with_scales(interpreted: dict[str, Results]) -> None:
    results = interpreted["fp8"]
    assert len(results) == 32
    assert {tuple(result["scales"]) for result in results} == set(
        itertools.product((False, True), repeat=2)
    )
    for result in results:
        assert result["error"] < 1e-3, result
        assert result["unscaled"] > 1, result
        assert result["counters"] == 0, result


def test_of_blocks_they_compute_it_with_scales(interpreted: dict[str, Results]) -> None:
    results = interpreted["blocks"]
    assert len(results) == 12
    for result in results:
        assert result["error"] < 1e-3, result
        assert result["unscaled"] > 1, result
        assert result["counters"] == 0, result


# --- the layer ---


class Fused(nn.Module):
    """What ``weights`` makes of a fused layer of a TP layout."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        for weight, added in zip(*parts(bias=True), strict=True):
            part = weights.Part()
            part.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
            part.register_parameter(
                "bias", nn.Parameter(added, requires_grad=False) if bias else None
            )
            self.parts.append(part)
        self.quant_method = weights.RowRangesLinear(meta=True)


@pytest.mark.parametrize("bias", [False, True])
def test_both_methods_of_a_fused_layer_agree(bias: bool) -> None:
    layer, x = Fused(bias=bias), torch.randn(4, DEPTH)
    outputs = [
        method(meta=True).apply(layer, x)
        for method in (weights.RowRangesLinear, weights.SplitLinear)
    ]
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(outputs[0], linear_reference(x, *parts(bias=bias)))


@pytest.mark.parametrize("bias", [False, True])
def test_keys_and_values_are_one_part_of_a_layer(
    monkeypatch: pytest.MonkeyPatch, bias: bool
) -> None:
    """As a layout's are on a GPU; nothing is copied."""
    monkeypatch.setattr(weights, "_in_one_launch", lambda _: True)
    layer, x = Fused(bias=bias), torch.randn(4, DEPTH)
    begins = [part.weight.data_ptr() for part in layer.parts]
    weights.bind_kernels(layer)
    assert isinstance(layer.quant_method, weights.RowRangesLinear)
    assert [part.weight.data_ptr() for part in layer.parts] == begins[:2]
    torch.testing.assert_close(
        layer.quant_method.apply(layer, x), linear_reference(x, *parts(bias=bias))
    )


def test_kernels_are_compiled_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[tuple[int, int]] = []

    def warm_up(weights: list[torch.Tensor], biases: list[torch.Tensor]) -> None:
        warmed.append((len(weights), len(biases)))

    monkeypatch.setattr(partitioned_linear, "warm_up", warm_up)
    model = nn.ModuleList([Fused(), Fused(), Fused(bias=False), nn.Linear(2, 2)])
    compile_kernels(model)
    assert warmed == [(3, 3), (3, 0)]
