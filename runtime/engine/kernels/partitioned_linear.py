"""One linear layer over ranges of a weight's rows: QKV and row-parallel layers of a TP layout.

The rows of a member's query, key and value heads are three ranges of ``qkv_proj`` in vLLM's order.
A row-parallel FP8 layer is one range of rows that are parts of longer rows, which vLLM's CUTLASS
kernels cannot read. A step of few tokens is bound by reading the rows once, so one launch of our
kernel computes it; a step of many tokens is bound by arithmetic and goes to a library.

``torch.compile`` sees one opaque operator. Which candidate computes a step depends on the step's
number of tokens, so the operator looks it up in the layer's choice (``linear_candidates``) when it
runs or is captured.
"""

from collections.abc import Sequence
from typing import Any

import torch

from shoal.runtime.engine.kernels.library_gemms import Ranges, columns_of
from shoal.runtime.engine.kernels.linear_candidates import choice, compiled_steps, format_of
from shoal.runtime.engine.kernels.linear_tiles import MAX_RANGES

_OPERATOR = "shoal::partitioned_linear"

torch.library.define(
    _OPERATOR,
    "(Tensor x, Tensor? x_scale, Tensor[] weights, Tensor[] biases, Tensor[] scales,"
    " ScalarType? dtype, int block) -> Tensor",
)


def linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] = (),
    scales: Sequence[torch.Tensor] = (),
    dtype: torch.dtype | None = None,
    block: int = 0,
    x_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``(x_scale * x) @ cat(scales * weights).T + cat(biases)``, ``[..., sum of rows]``.

    Args:
        x: ``[..., depth]``; in FP8 ``[tokens, depth]``, float8_e4m3fn.
        weights: at most ``MAX_RANGES`` ranges of rows of one tensor, ``[rows, depth]`` each, of the
            type of ``x``. In FP8 the rows may be parts of longer ones; in 16 bits they may be as
            ``paired`` gives them.
        biases: the same ranges of one tensor ``[rows]`` of the output's type, in the same way;
            empty without a bias.
        scales: for FP8, float32: the same ranges of a scale for each row; or for each range the
            scale of the whole weight; or with ``block`` ``[rows / block, depth / block]`` each.
        dtype: for FP8, the output's type, bfloat16 or float16.
        block: ``linear_tiles.BLOCK`` if blocks have scales, else 0.
        x_scale: for FP8, float32: one for each token or one for all; with ``block``
            ``[tokens, depth / block]``.
    """
    output: torch.Tensor = torch.ops.shoal.partitioned_linear(
        x, x_scale, list(weights), list(biases), list(scales), dtype, block
    )
    return output


def warm_up(
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] = (),
    scales: Sequence[torch.Tensor] = (),
    dtype: torch.dtype | None = None,
    block: int = 0,
) -> None:
    """Compile every kernel that ``linear`` may choose for a CUDA layer, and allocate its counters.

    Neither may happen while a graph is captured or a request waits.
    """
    from shoal.runtime.engine.kernels.partitioned_linear_kernel import arrival_counters

    ranges = Ranges(weights, biases, scales, dtype, block)
    first = weights[0]
    arrival_counters(first.device)
    depth = first.shape[1]
    blocks = -(-depth // block) if block else 1
    for tokens in compiled_steps(format_of(ranges)):
        x = torch.zeros(tokens, depth, dtype=first.dtype, device=first.device)
        # Scales are laid out as in a step: Triton compiles other forms for other strides.
        x_scale = torch.ones(blocks, tokens, dtype=torch.float32, device=first.device).t()
        linear(x, *ranges, x_scale=x_scale if scales else None)


def paired(ranges: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return three ranges of one tensor with the last two as one view ``[2, rows, ...]`` of it.

    GEMMs in 16 bits multiply the two as a batch. Making that view in every step would take the host
    longer than launching the kernel that reads it. Other ranges are returned as they are.
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


@torch.library.register_fake(_OPERATOR)  # type: ignore[untyped-decorator]
def _empty(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,  # noqa: ARG001 - the operator's signature
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],  # noqa: ARG001
    scales: list[torch.Tensor],  # noqa: ARG001
    dtype: torch.dtype | None,
    block: int,  # noqa: ARG001
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], columns_of(weights)), dtype=dtype)


def _compute(x: torch.Tensor, x_scale: torch.Tensor | None, *given: Any) -> torch.Tensor:
    """Compute what ``linear`` returns, by the layer's candidate for so many tokens."""
    ranges = Ranges(*given)
    rows = x if x.dim() == 2 else x.flatten(0, -2)
    tokens = rows.shape[0]
    for candidate in choice(format_of(ranges)):
        if tokens <= candidate.best_up_to:
            output = candidate.run(rows, x_scale, ranges)
            return output if x.dim() == 2 else output.unflatten(0, x.shape[:-1])
    raise AssertionError("the last candidate of a choice takes any number of tokens")


# As a decorator it would leave None in the function's place.
torch.library.impl(_OPERATOR, "default", _compute)
