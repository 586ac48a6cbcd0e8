"""One linear layer over several ranges of a weight's rows: a TP layout's QKV in the DP weight.

The rows of a member's query, key and value heads are three ranges of ``qkv_proj`` in vLLM's order.
A step of few tokens is bound by reading them once, so one launch of our kernel does it; a step of
many is bound by arithmetic, where GEMMs write their columns of the output: one for the queries, and
one batched for keys and values, whose ranges are of one size.

To ``torch.compile`` it is one opaque operator. The choice is made where it runs or is captured.
"""

import os
from collections.abc import Sequence

import torch

ENABLED = os.environ.get("SHOAL_ROW_RANGES", "1") != "0"
"""Whether CUDA layers use the operator, or that of ``partitioned_linear_fp8``;
``SHOAL_ROW_RANGES=0`` goes back to GEMMs and a copy."""

MAX_RANGES = 3
"""Most ranges of rows that one launch reads: query, key and value."""

torch.library.define(
    "shoal::row_ranges_linear", "(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor"
)


def linear(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return ``x @ cat(weights).T + cat(biases)``, ``[..., sum of rows]``.

    Args:
        x: ``[..., depth]``.
        weights: at most ``MAX_RANGES`` ranges of rows of one tensor, ``[rows, depth]`` each, or as
            ``paired`` gives them.
        biases: the same ranges of one tensor ``[rows]``, in the same way; empty without a bias.
    """
    output: torch.Tensor = torch.ops.shoal.row_ranges_linear(x, list(weights), list(biases))
    return output


def paired(ranges: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return three ranges of one tensor with the last two as one view ``[2, rows, ...]`` of it.

    To make that view in every step would take the host longer than to launch what reads it. Other
    ranges are returned as they are.
    """
    if len(ranges) != MAX_RANGES or not _are_pair(*ranges[1:]):
        return list(ranges)
    query, first, second = ranges
    distance = second.storage_offset() - first.storage_offset()
    return [query, first.as_strided((2, *first.shape), (distance, *first.stride()))]


def _are_pair(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether these are ranges of one tensor, of one size, the first before the second."""
    if first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr():
        return False
    return bool(first.shape == second.shape and first.storage_offset() < second.storage_offset())


def unpaired(ranges: Sequence[torch.Tensor], dimensions: int) -> list[torch.Tensor]:
    """Return each range alone, of so many dimensions; ``paired`` ones have one more."""
    alone = ([range_] if range_.dim() == dimensions else range_.unbind() for range_ in ranges)
    return [range_ for several in alone for range_ in several]


def warm_up(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> None:
    """Compile every kernel that ``linear`` may choose for a CUDA layer, and allocate its counters.

    Neither may happen while a graph is captured or a request waits.
    """
    from shoal.runtime.engine.kernels.partitioned_linear_kernel import (
        arrival_counters,
        tiles_of,
        token_counts,
    )

    arrival_counters(weights[0].device)
    for tokens in token_counts(tiles_of(weights[0].dtype)):
        linear(weights[0].new_zeros(tokens, weights[0].shape[1]), weights, biases)


@torch.library.register_fake("shoal::row_ranges_linear")  # type: ignore[untyped-decorator]
def _empty(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],  # noqa: ARG001 - the operator's signature
) -> torch.Tensor:
    columns = 0
    for weight in weights:
        columns += weight.shape[0] if weight.dim() == 2 else 2 * weight.shape[1]
    return x.new_empty((*x.shape[:-1], columns))


@torch.library.impl("shoal::row_ranges_linear", "cpu")  # type: ignore[untyped-decorator]
def _on_cpu(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]
) -> torch.Tensor:
    output = _empty(x, weights, biases)
    multiply_each(x.flatten(0, -2), weights, biases, output.flatten(0, -2))
    return output


def on_gpu(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]
) -> torch.Tensor:
    """Return what ``linear`` does, by our kernel or by GEMMs, as the number of tokens says."""
    from shoal.runtime.engine.kernels.partitioned_linear_kernel import multiply, tile_for, tiles_of

    output = _empty(x, weights, biases)
    rows, out = x.flatten(0, -2), output.flatten(0, -2)
    tile = tile_for(tiles_of(x.dtype), rows.shape[0], out.shape[1], rows.shape[1])
    if tile is None:
        multiply_each(rows, weights, biases, out)
    else:
        multiply(rows, unpaired(weights, 2), unpaired(biases, 1), out, tile)
    return output


@torch.library.impl("shoal::row_ranges_linear", "cuda")  # type: ignore[untyped-decorator]
def _on_cuda(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]
) -> torch.Tensor:
    return on_gpu(x, weights, biases)


def multiply_each(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    out: torch.Tensor,
) -> None:
    """Write ``x @ cat(weights).T + cat(biases)`` to ``out``: GEMMs over the ranges, no copy.

    Args:
        x: ``[tokens, depth]``.
        weights: ranges of rows of one tensor, in its order, ``[rows, depth]`` each; those that are
            ``paired``, ``[2, rows, depth]``, are one batched GEMM.
        biases: the same ranges of one tensor ``[rows]``, or none.
        out: ``[tokens, sum of rows]``; a GEMM writes to a range of its columns, which are
            contiguous.
    """
    tokens, width, offset = out.shape[0], out.stride(0), out.storage_offset()
    begin = 0
    for index, weight in enumerate(weights):
        bias = biases[index] if biases else None
        if weight.dim() == 2:
            rows = weight.shape[0]
            _multiply(x, weight.t(), bias, out[:, begin : begin + rows])
            begin += rows
        else:
            rows = weight.shape[1]
            columns = out.as_strided((2, tokens, rows), (rows, width, 1), offset + begin)
            _multiply_pair(x.expand(2, -1, -1), weight.transpose(1, 2), bias, columns)
            begin += 2 * rows


def _multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    if bias is None:
        torch.mm(x, weight, out=out)
    else:
        torch.addmm(bias, x, weight, out=out)


def _multiply_pair(
    x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    if bias is None:
        torch.bmm(x, weights, out=out)
    else:
        torch.baddbmm(bias.unsqueeze(1), x, weights, out=out)
