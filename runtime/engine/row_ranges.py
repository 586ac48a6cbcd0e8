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
"""Whether CUDA layers use the operator, or that of ``row_ranges_fp8``; ``SHOAL_ROW_RANGES=0`` goes
back to GEMMs and a copy."""

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
        weights: ``[rows, depth]`` each: at most ``MAX_RANGES`` ranges of rows of one tensor.
        biases: the same ranges of one tensor ``[rows]``; empty without a bias.
    """
    output: torch.Tensor = torch.ops.shoal.row_ranges_linear(x, list(weights), list(biases))
    return output


def warm_up(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> None:
    """Compile every kernel that ``linear`` may choose for a CUDA layer, and allocate its counters.

    Neither may happen while a graph is captured or a request waits.
    """
    from runtime.engine.row_ranges_kernel import arrival_counters, token_counts

    arrival_counters(weights[0].device)
    for tokens in token_counts(weights[0].dtype):
        linear(weights[0].new_zeros(tokens, weights[0].shape[1]), weights, biases)


@torch.library.register_fake("shoal::row_ranges_linear")  # type: ignore[untyped-decorator]
def _empty(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],  # noqa: ARG001 - the operator's signature
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], sum(weight.shape[0] for weight in weights)))


@torch.library.impl("shoal::row_ranges_linear", "cpu")  # type: ignore[untyped-decorator]
def _on_cpu(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]
) -> torch.Tensor:
    output = _empty(x, weights, biases)
    multiply_each(x.flatten(0, -2), weights, biases, output.flatten(0, -2))
    return output


@torch.library.impl("shoal::row_ranges_linear", "cuda")  # type: ignore[untyped-decorator]
def _on_cuda(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]
) -> torch.Tensor:
    from runtime.engine.row_ranges_kernel import multiply, tile_for

    output = _empty(x, weights, biases)
    rows, out = x.flatten(0, -2), output.flatten(0, -2)
    tile = tile_for(rows.shape[0], out.shape[1], x.dtype)
    if tile is None:
        multiply_each(rows, weights, biases, out)
    else:
        multiply(rows, weights, biases, out, tile)
    return output


def multiply_each(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    out: torch.Tensor,
) -> None:
    """Write ``x @ cat(weights).T + cat(biases)`` to ``out``: GEMMs over the ranges, no copy.

    Args:
        x: ``[tokens, depth]``.
        weights: ``[rows, depth]`` each: ranges of rows of one tensor, in its order.
        biases: the same ranges of one tensor ``[rows]``, or none.
        out: ``[tokens, sum of rows]``; a GEMM writes to a range of its columns.
    """
    sizes = [weight.shape[0] for weight in weights]
    columns = list(out.split(sizes, dim=1))
    alone = len(weights)
    if alone == MAX_RANGES and all(map(_are_pair, (weights, biases or weights))):
        alone = 1
        bias = _pair(biases[1:]).unsqueeze(1) if biases else None
        both = out[:, sizes[0] :].unflatten(1, (2, sizes[1])).transpose(0, 1)
        _multiply_pair(x.expand(2, -1, -1), _pair(weights[1:]).transpose(1, 2), bias, both)
    for index in range(alone):
        if biases:
            torch.addmm(biases[index], x, weights[index].t(), out=columns[index])
        else:
            torch.mm(x, weights[index].t(), out=columns[index])


def _are_pair(ranges: Sequence[torch.Tensor]) -> bool:
    """Return whether the last two are ranges of one tensor, of one size, the first before."""
    _, first, second = ranges
    if first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr():
        return False
    return bool(first.shape == second.shape and first.storage_offset() < second.storage_offset())


def _pair(ranges: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return two ranges of one tensor, of equal size, as one view ``[2, ...]``."""
    first, second = ranges
    distance = second.storage_offset() - first.storage_offset()
    return first.as_strided((2, *first.shape), (distance, *first.stride()))


def _multiply_pair(
    x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    if bias is None:
        torch.bmm(x, weights, out=out)
    else:
        torch.baddbmm(bias, x, weights, out=out)
