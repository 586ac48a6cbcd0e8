"""What can multiply the ranges of a layer's weight: one list, in the order of preference.

A layer's ``choice`` is made once, when its kernels are compiled. It has the candidates that read
the layer's weight and are the best for some number of tokens, with the largest such number of each.
A step takes the first candidate whose number is not less than the step's.

A new kernel is one more candidate. It says what it reads and up to how many tokens it is the best,
and has its place in the list.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shoal.runtime.engine.kernels import library_gemms, linear_tiles
from shoal.runtime.engine.kernels.library_gemms import Ranges, columns_of
from shoal.runtime.engine.kernels.linear_tiles import ANY, BLOCK, Best, Table, Tile

FP8 = torch.float8_e4m3fn


class Format(NamedTuple):
    """Everything that the choice for a layer depends on; layers of one shape share a format.

    Attributes:
        on_gpu: whether the layer is on a GPU.
        dtype: the weight's type.
        output: the output's type; None means the input's.
        block: rows and inputs that share a scale; 0 if none do.
        several: whether the layer is more than one range of rows.
        columns: the layer's outputs.
        depth: the layer's inputs.
        packed: whether a GEMM over all finds the rows side by side: several ranges are copied.
        packed_scales: the same for the scales of blocks.
    """

    on_gpu: bool
    dtype: torch.dtype
    output: torch.dtype | None
    block: int
    several: bool
    columns: int
    depth: int
    packed: bool
    packed_scales: bool


def format_of(ranges: Ranges) -> Format:
    """Return the format of a layer."""
    first, several = ranges.weights[0], len(ranges.weights) > 1
    scales = ranges.scales
    return Format(
        first.is_cuda,
        first.dtype,
        ranges.dtype,
        ranges.block,
        several,
        columns_of(ranges.weights),
        first.shape[1],
        several or first.is_contiguous(),
        several or not scales or scales[0].is_contiguous(),
    )


Run = Callable[[torch.Tensor, Any, Ranges], torch.Tensor]
"""Multiplies an input ``[tokens, depth]`` and its scales, or None, with ranges: ``[tokens, sum of
rows]``."""


@dataclass(frozen=True)
class Candidate:
    """One way to multiply.

    Attributes:
        name: for people.
        reads: whether it can compute layers of a format, and is meant for them.
        run: multiplies.
        best_up_to: the most tokens for which it is better than all candidates after it.
        forms: for a candidate that is the best for any number of tokens: numbers of tokens above
            the former candidate's ``best_up_to`` that together need all its compiled forms.
    """

    name: str
    reads: Callable[[Format], bool]
    run: Run
    best_up_to: int = ANY
    forms: Callable[[Format, int], Sequence[int]] = lambda _format, _beyond: ()


# --- our kernel -----------------------------------------------------------------------------------


def launches(
    table: Table, dtypes: Collection[torch.dtype], block: int = 0, *, several: bool | None = None
) -> Iterator[Candidate]:
    """Yield a candidate for every row of a table.

    Args:
        table: for which sizes and numbers of tokens each tile is the best.
        dtypes: types of the weights that the table is for.
        block: rows and inputs that share a scale; 0 if none do.
        several: whether the table is for several ranges, or for one; None: for both.
    """

    def reads(best: Best, given: Format) -> bool:
        ours = given.on_gpu and given.dtype in dtypes and given.block == block
        meant = several is None or given.several == several
        return ours and meant and best.fits(given.columns, given.depth)

    for best in table:
        name = f"our kernel, {best.tile}"
        run = functools.partial(launch, best.tile)
        yield Candidate(name, functools.partial(reads, best), run, best.tokens)


def launch(
    tile: Tile, x: torch.Tensor, x_scale: torch.Tensor | None, ranges: Ranges
) -> torch.Tensor:
    """Return the product by one launch of our kernel."""
    from shoal.runtime.engine.kernels.partitioned_linear_kernel import Scales, multiply

    weights, biases, scales, dtype, block = ranges
    out = x.new_empty(x.shape[0], columns_of(weights), dtype=dtype)
    if x_scale is None:
        multiply(x, unpaired(weights, 2), unpaired(biases, 1), out, tile)
    else:
        multiply(x, weights, biases, out, tile, Scales(x_scale, scales[0], block))
    return out


def unpaired(ranges: Sequence[torch.Tensor], dimensions: int) -> list[torch.Tensor]:
    """Return each range alone, with so many dimensions; ``paired`` ranges have one more."""
    alone = ([range_] if range_.dim() == dimensions else range_.unbind() for range_ in ranges)
    return [range_ for several in alone for range_ in several]


# --- libraries' -----------------------------------------------------------------------------------


def _cutlass_reads(given: Format) -> bool:
    """Return whether CUTLASS reads an FP8 weight right: it assumes packed rows, with no error."""
    if not (given.on_gpu and given.dtype is FP8 and given.packed):
        return False
    return not given.block or library_gemms.cutlass_has_blocks()


def _scaled_mm_reads(given: Format) -> bool:
    return given.dtype is FP8 and not given.block


def _cublas_reads(given: Format) -> bool:
    """Return whether cuBLAS can take a weight with scales of blocks: it looks at strides of rows.

    Outputs other than bfloat16 have not been tried.

    cuBLAS assumes that a row's scales are padded to a multiple of four. If they are not, it reads
    scales of other rows, and PyTorch 2.11 does not prevent that (pytorch/pytorch#166752).
    """
    if not (given.on_gpu and given.block) or given.output is not torch.bfloat16:
        return False
    if given.columns % 16 or not given.packed_scales or -(-given.depth // given.block) % 4:
        return False
    return library_gemms.cublas_has_blocks()


def _triton_reads(given: Format) -> bool:
    return given.on_gpu and given.block > 0  # vLLM's kernel looks at strides.


def _triton_forms(given: Format, beyond: int) -> list[int]:
    return library_gemms.triton_forms(given.columns, given.depth, beyond + 16)


def _reference_reads(given: Format) -> bool:
    return not given.on_gpu and given.block > 0


CANDIDATES: Sequence[Candidate] = (
    *launches(linear_tiles.QKV_16_BIT, (torch.bfloat16, torch.float16)),
    *launches(linear_tiles.FP8_QKV, (FP8,), several=True),
    *launches(linear_tiles.FP8_INPUT_RANGE, (FP8,), several=False),
    *launches(linear_tiles.BLOCK_QKV, (FP8,), BLOCK, several=True),
    *launches(linear_tiles.BLOCK_INPUT_RANGE, (FP8,), BLOCK, several=False),
    Candidate("GEMMs", lambda given: given.dtype is not FP8, library_gemms.gemms),
    Candidate("CUTLASS", _cutlass_reads, library_gemms.cutlass),
    Candidate("torch._scaled_mm", _scaled_mm_reads, library_gemms.scaled_mm),
    Candidate("cuBLAS for blocks", _cublas_reads, library_gemms.cublas_blocks),
    *launches(linear_tiles.BLOCK_INPUT_RANGE_WITHOUT_CUBLAS, (FP8,), BLOCK, several=False),
    Candidate("Triton", _triton_reads, library_gemms.triton_blocks, forms=_triton_forms),
    Candidate("reference", _reference_reads, library_gemms.reference_blocks),
)


@functools.cache
def choice(given: Format) -> tuple[Candidate, ...]:
    """Return the candidates for layers of a format, ascending by ``best_up_to``, to ``ANY``.

    Each is the first in ``CANDIDATES`` that reads such layers and is best up to its number.
    """
    chosen: list[Candidate] = []
    longest = 0
    for candidate in CANDIDATES:
        if candidate.best_up_to > longest and candidate.reads(given):
            chosen.append(candidate)
            longest = candidate.best_up_to
        if longest == ANY:
            break
    return tuple(chosen)


def compiled_steps(given: Format) -> Iterator[int]:
    """Yield numbers of tokens that together need every kernel of the choice for a format."""
    longest = 0
    for candidate in choice(given):
        if candidate.best_up_to == ANY:
            yield from candidate.forms(given, longest)
        else:
            yield (longest := candidate.best_up_to)
