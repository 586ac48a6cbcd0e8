"""One linear layer over ranges of rows: the operator, its kernels, and the layer that uses it."""

import itertools
import json
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from shoal.runtime.engine.kernels import partitioned_linear
from shoal.runtime.engine.kernels.partitioned_linear_fp8 import BLOCK
from shoal.runtime.engine.kernels.partitioned_linear_kernel import (
    BLOCK_INPUT_RANGE_TILES,
    BLOCK_QKV_TILES,
    COUNTERS,
    FP8_INPUT_RANGE_TILES,
    FP8_QKV_TILES,
    TILES,
    Table,
    tile_for,
    tiles_of,
    token_counts,
)
from shoal.runtime.engine.weights import shared_weights as weights

DEPTH = 32
RANGES = (slice(16, 56), slice(100, 120), slice(170, 190))


def parts(*, bias: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    weight, added = torch.randn(200, DEPTH, generator=draw), torch.randn(200, generator=draw)
    return [weight[rows] for rows in RANGES], [added[rows] for rows in RANGES] if bias else []


def reference(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]
) -> torch.Tensor:
    return nn.functional.linear(x, torch.cat(weights), torch.cat(biases) if biases else None)


# --- the operator ---


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, DEPTH), (7, DEPTH), (2, 3, DEPTH)])
def test_it_is_one_layer_over_all_ranges(shape: tuple[int, ...], bias: bool) -> None:
    x, arguments = torch.randn(shape), parts(bias=bias)
    torch.testing.assert_close(partitioned_linear.linear(x, *arguments), reference(x, *arguments))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, DEPTH), (7, DEPTH), (2, 3, DEPTH)])
def test_it_takes_two_ranges_as_one(shape: tuple[int, ...], bias: bool) -> None:
    x, arguments = torch.randn(shape), parts(bias=bias)
    joined = [partitioned_linear.paired(ranges) for ranges in arguments]
    assert [weight.shape for weight in joined[0]] == [(40, DEPTH), (2, 20, DEPTH)]
    assert {weight.data_ptr() for weight in joined[0]} < {w.data_ptr() for w in arguments[0]}
    torch.testing.assert_close(partitioned_linear.linear(x, *joined), reference(x, *arguments))


def test_it_writes_to_a_part_of_a_tensor() -> None:
    x, (weights_, biases) = torch.randn(7, DEPTH), parts(bias=True)
    whole = torch.zeros(9, 100)
    joined = [partitioned_linear.paired(ranges) for ranges in (weights_, biases)]
    partitioned_linear.multiply_each(x, *joined, whole[1:8, 10:90])
    torch.testing.assert_close(whole[1:8, 10:90], reference(x, weights_, biases))
    whole[1:8, 10:90] = 0
    assert not whole.any()


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
    operator = torch.ops.shoal.row_ranges_linear.default
    checks = ("test_schema", "test_faketensor")
    arguments = [partitioned_linear.paired(a) if joined else a for a in parts(bias=bias)]
    torch.library.opcheck(operator, (torch.randn(5, DEPTH), *arguments), test_utils=checks)


def test_it_is_opaque_to_a_compiler() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    arguments = parts(bias=True)
    compiled = torch.compile(
        lambda x: partitioned_linear.linear(x, *arguments) * 2,
        backend=backend,
        fullgraph=True,
        dynamic=True,
    )
    for tokens in (3, 8, 65):
        x = torch.randn(tokens, DEPTH)
        torch.testing.assert_close(compiled(x), reference(x, *arguments) * 2)
    (graph,) = graphs
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert len(called) == 2, called  # the multiplication by two is the other
    assert "row_ranges_linear" in called[0]


# --- the kernels ---


def interpreted(cases: str) -> list[dict[str, Any]]:
    """Run all cases in one program: Triton must be imported with its interpreter."""
    program = subprocess.run(
        [sys.executable, "-m", "tests.runtime.engine.kernels.partitioned_linear_main", cases],
        capture_output=True,
        text=True,
        check=False,
    )
    assert program.returncode == 0, program.stderr[-4000:]
    results: list[dict[str, Any]] = json.loads(program.stdout)
    assert len({result["case"] for result in results}) == len(results)
    return results


def test_the_kernels_compute_it() -> None:
    results = interpreted("wide")
    assert len(results) == 90
    for result in results:
        assert result["error"] < 1e-4, result
        assert result["counters"] == 0, result


def test_of_keys_and_values_in_one_the_operator_finds_each() -> None:
    results = interpreted("operator")
    assert len(results) == 8
    for result in results:
        assert result["error"] < 0.01, result
        assert result["counters"] == 0, result


def test_of_fp8_they_compute_it_with_scales() -> None:
    results = interpreted("fp8")
    assert len(results) == 32
    assert {tuple(result["scales"]) for result in results} == set(
        itertools.product((False, True), repeat=2)
    )
    for result in results:
        assert result["error"] < 1e-3, result
        assert result["unscaled"] > 1, result
        assert result["counters"] == 0, result


def test_of_blocks_they_compute_it_with_scales() -> None:
    results = interpreted("blocks")
    assert len(results) == 12
    for result in results:
        assert result["error"] < 1e-3, result
        assert result["unscaled"] > 1, result
        assert result["counters"] == 0, result


TABLES = (
    (torch.bfloat16, 0, 3, TILES),
    (torch.bfloat16, 0, 1, TILES),
    (torch.float8_e4m3fn, 0, 3, FP8_QKV_TILES),
    (torch.float8_e4m3fn, 0, 1, FP8_INPUT_RANGE_TILES),
    (torch.float8_e4m3fn, BLOCK, 2, BLOCK_QKV_TILES),
    (torch.float8_e4m3fn, BLOCK, 1, BLOCK_INPUT_RANGE_TILES),
)


@pytest.mark.parametrize(("dtype", "block", "ranges", "table"), TABLES)
def test_each_kind_of_layer_has_a_table(
    dtype: torch.dtype, block: int, ranges: int, table: Table
) -> None:
    assert tiles_of(dtype, block, ranges) is table


@pytest.mark.parametrize(("dtype", "block"), [(torch.float32, 0), (torch.float8_e4m3fn, 64)])
def test_what_no_kernel_knows_is_left_to_gemms(dtype: torch.dtype, block: int) -> None:
    table = tiles_of(dtype, block)
    assert tile_for(table, 1, 512, 512) is None
    assert token_counts(table) == []


of_every_table = pytest.mark.parametrize("table", [row[-1] for row in TABLES[1:]])
SIZES = list(itertools.product((512, 768, 1280, 3072, 5120, 8192), (512, 2048, 4096, 14336)))


@of_every_table
def test_long_steps_are_left_to_gemms(table: Table) -> None:
    longest = table[-1][0]
    assert tile_for(table, longest, 512, 512) is not None
    assert tile_for(table, longest + 1, 512, 512) is None


@of_every_table
def test_of_several_tiles_the_first_that_fits_is_taken(table: Table) -> None:
    """None is hidden by those before it."""
    sizes = sorted({limit for row in table for limit in row[1:3]})
    tokens = sorted({row[0] for row in table})
    chosen = [
        next(row for row in table if row[3] is tile)
        for each in itertools.product(tokens, sizes, sizes)
        if (tile := tile_for(table, *each)) is not None
    ]
    assert {id(row) for row in chosen} == {id(row) for row in table}


@of_every_table
def test_split_tiles_have_a_counter_each(table: Table) -> None:
    for tokens, (columns, depth) in itertools.product(range(1, table[-1][0] + 1), SIZES):
        tile = tile_for(table, tokens, columns, depth)
        if tile is not None and tile.splits > 1:
            tiles = math.ceil(tokens / tile.tokens) * math.ceil(columns / tile.columns)
            assert tiles <= COUNTERS


@of_every_table
def test_warming_up_needs_every_tile(table: Table) -> None:
    for size in SIZES:
        chosen = {tile_for(table, tokens, *size) for tokens in token_counts(table)}
        tokens_of_all = range(1, table[-1][0] + 1)
        assert chosen == {tile_for(table, tokens, *size) for tokens in tokens_of_all}


@pytest.mark.parametrize("table", [BLOCK_QKV_TILES, BLOCK_INPUT_RANGE_TILES])
def test_a_tile_of_blocks_is_as_deep_as_they_are(table: Table) -> None:
    """And is none of the matrix-vector kernel's, which knows no blocks."""
    assert {row[3].depth for row in table} == {BLOCK}
    assert min(row[3].tokens for row in table) > 1


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
    torch.testing.assert_close(outputs[0], reference(x, *parts(bias=bias)))


@pytest.mark.parametrize("bias", [False, True])
def test_keys_and_values_are_one_part_of_a_layer(
    monkeypatch: pytest.MonkeyPatch, bias: bool
) -> None:
    """As a layout's are on a GPU; nothing is copied."""
    monkeypatch.setattr(weights, "_in_one_launch", lambda _: True)
    layer, x = Fused(bias=bias), torch.randn(4, DEPTH)
    begins = [part.weight.data_ptr() for part in layer.parts]
    weights._choose_method(layer)
    assert isinstance(layer.quant_method, weights.RowRangesLinear)
    assert [part.weight.data_ptr() for part in layer.parts] == begins[:2]
    torch.testing.assert_close(layer.quant_method.apply(layer, x), reference(x, *parts(bias=bias)))


def test_kernels_are_compiled_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[tuple[int, int]] = []

    def warm_up(weights: list[torch.Tensor], biases: list[torch.Tensor]) -> None:
        warmed.append((len(weights), len(biases)))

    monkeypatch.setattr(partitioned_linear, "warm_up", warm_up)
    model = nn.ModuleList([Fused(), Fused(), Fused(bias=False), nn.Linear(2, 2)])
    weights.compile_kernels(model)
    assert warmed == [(3, 3), (3, 0)]
